"""Lowering: between a signature with rich types and the flat arguments and returns of the schema.

    f(x, Config(64, 3), Mode.FAST)  ->  ns::f(x, 64, 3, "FAST")  ->  kernel(x, Config(64, 3), Mode.FAST)

A call of the op's object is lowered before the dispatcher sees it; callbacks get back what the signature says. What is
in between (autograd, vmap, compilers, ``torch.ops``) knows the lowered form only. `source` writes the functions, `plan`
holds them, and `lowering` wraps callbacks; `gradients` and `batching` are what formulas and vmap rules need besides.
"""
