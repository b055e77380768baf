"""The command line, ``customops`` or ``python -m customops``: one module for each command; `main` has the parser.

`check` runs the checker over the ops of targets, in processes if asked to (`checked`), and `results` writes what it
found. `list_ops` and `describe` show what ops are, `bench` what their calls cost. `backend_report` says which of
torch's own op tests a device passes; `doctor` which private names of torch are used, and whether they are there;
`stubs` writes the types of ops in `torch.ops`; `completion` completes all of this in shells. `targets` finds the ops
that commands name, `terminal` has colours, where they can be seen.
"""
