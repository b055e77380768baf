"""The command line, ``python -m customops``: one module for each command; `check` has the parser.

`check` runs the checks of ops, `outcomes` prints what they found; `backend_report` says which of
torch's own op tests a device passes; `doctor` says which private names of torch are used, and whether they are there;
`stubs` writes the types of ops in `torch.ops`. `targets` imports the files and modules that commands name.
"""
