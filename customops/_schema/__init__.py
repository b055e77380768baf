"""Schemas: what an op takes and returns.

A type is a row of `types`: its hints, its default values, its results. `infer` reads type hints by these rows
(`advice` says what to write instead of a hint that is not there), and `parse` reads text; both make the `Schema` of
`model`, whose text the dispatcher gets. `defaults` and `tags` have the rules for these; `literals` says how a single
value is written. `differentiability` says which arguments and returns have gradients.

    function -> infer.schema_of -> model.Schema -> str -> torch's parser
    text -> parse.parse -> model.Schema
    OpOverload -> parse.from_dispatcher -> model.Schema

`literals` < `types` < `defaults` < `model` < `tags`, `parse`, `differentiability`; `types` < `advice` < `infer`
"""
