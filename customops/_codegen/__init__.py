"""Functions that are generated for an op as Python source, so that a call loops over no arguments.

`function` fills templates and compiles the result when the function is first called, in a way that tracebacks, pdb and
`inspect.getsource` show its lines. `kernel` has the templates of the function at a device's key, and of the one at the
Autograd key, which calls the kernel where nothing is to be differentiated; `bypass` has those of the ``__call__`` of an
op with ``bypass=True``. tests/codegen/generated shows what they become, a file for each shape of op.

    dispatcher -> function at Autograd (generated) -> kernel (generated) -> the user's function
"""
