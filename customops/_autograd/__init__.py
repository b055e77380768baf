"""Gradients: the node of an op in the autograd graph, made for its backward and jvp. The door is `rule`.

`layout` holds a formula as registered, and what the node takes and returns: lists and keyword-only tensors are among
the flat arguments that autograd sees. `rule` makes the autograd.Function, of functions that `node_codegen` generates.
`context` calls setup_context, and looks at what is saved without a graph; `gradient_checks` compares what a formula
returned with the inputs; `inplace` is for ops that mutate, `recompute` derives formulas from a plain function.

    forward:  rule -> apply (generated) -> forward (generated) -> kernel -> setup_context -> context.Outputs
    backward: backward (generated) -> the formula; where a gradient does not fit, gradient_checks.InputGradients
"""
