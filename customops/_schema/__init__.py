"""Schemas: what an op takes and returns.

`infer` reads type hints by the table in `types` (`advice` says what to write instead of a hint that is not there), and
`parse` reads text; both make the `Schema` of `model`, whose text the dispatcher gets. `defaults` and `tags` have the
rules for these. `differentiability` says which arguments and returns have gradients.

    function -> infer.schema_of -> model.Schema -> str -> torch's parser
    text -> parse.parse -> model.Schema
    OpOverload -> parse.from_dispatcher -> model.Schema

`model` < `defaults`, `tags`, `parse` < `types` < `advice` < `infer`
"""
