"""Functions that are generated for an op as Python source, so that a call loops over no arguments.

`function.Source` collects lines and compiles them when the function is first called; `linecache` has the text, so that
tracebacks and pdb show it. `kernel` makes the function at a device's key, `autograd` the one at the Autograd key, which
calls the kernel where nothing is to be differentiated, and `bypass` the ``__call__`` of an op with ``bypass=True``.

    dispatcher -> autograd (generated) -> kernel (generated) -> the user's function
"""
