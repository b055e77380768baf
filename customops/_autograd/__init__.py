"""Gradients: the node of an op in the autograd graph, made for its backward and jvp. The door is `rule`.

`options` holds a formula as registered, `layout` what the node takes and returns. `node` makes the autograd.Function;
`node_codegen` generates the forward and backward of the usual ones. `context` calls setup_context; `gradient_checks`
compares what a formula returned with the inputs; `inplace` is for ops that write, `untracked` for saved tensors without
a graph, `recompute` for `register_autograd_from`.

    forward:  rule -> node.forward -> kernel -> context.SetUp -> setup_context
    backward: node.backward -> backward -> gradient_checks.InputGradients
"""
