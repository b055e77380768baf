"""What a call of an op's object does.

`classes` makes the class of an object: `CustomOpDef` itself, or one of a single op whose ``__call__`` is generated.
Around the call of the flat schema (`_codegen.bypass`) comes that of the signature (`_lowering`), and around it what
computes arguments (`computed`). `settings` is what `Registry.configure` was told; it changes classes. `undefined` has
the object where there is no op.
"""
