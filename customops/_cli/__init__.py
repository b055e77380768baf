"""The command line, ``python -m customops``: one module for each command; `check` has the parser.

`check` imports the targets and runs the checks, `outcomes` prints what they found; `backend_report` says which of
torch's own op tests a device passes; `doctor` says which private names of torch are used, and whether they are there.
"""
