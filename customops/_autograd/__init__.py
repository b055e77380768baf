"""Gradients: the node of an op in the autograd graph, made for its backward and jvp. The door is `rule`.

`options` holds a formula as registered, `layout` what the node takes and returns, `node_arguments` how lists and
keyword-only tensors are among the flat arguments that autograd sees. `node` makes the autograd.Function, of functions
that `apply_codegen`, `forward_codegen` and `backward_codegen` generate. `context` calls setup_context;
`gradient_checks` compares what a formula returned with the inputs; `inplace` is for ops that mutate, `untracked` for
saved tensors without a graph, `recompute` for `register_autograd_from`.

    forward:  rule -> apply (generated) -> forward (generated) -> kernel -> setup_context -> context.Outputs
    backward: backward (generated) -> the formula; where a gradient does not fit, gradient_checks.InputGradients
"""
