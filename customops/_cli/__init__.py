"""The command line, ``customops`` or ``python -m customops``: `main` has the parser and catches what ends a command.

`targets` finds the ops that commands name. `check` runs the checker over them, in processes if asked to, and writes
what it found; it also has the lines for terminals. `show` lists and describes ops, tries the private names of torch
(``doctor``) and completes commands in shells. `bench` times calls, `stubs` writes the types of ops in `torch.ops`,
`backend_report` says which of torch's own op tests a device passes.
"""
