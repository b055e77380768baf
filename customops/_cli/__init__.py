"""The command line, ``customops`` or ``python -m customops``: `main` has the parser and catches what ends a command.

`targets` finds the ops that commands name, `screen` has what all commands print and return. `check` runs the checker
over ops, in processes if asked to, and writes what it found. `show` lists and describes ops. `doctor` tries the private
names of torch. `bench` times calls, `stubs` writes the types of ops in `torch.ops`, `backend_report` says which of
torch's own op tests a device passes. `tune` measures the kernels of ops that have several. `new` writes a package, and
`migrate` moves one from `torch.library`.
"""
