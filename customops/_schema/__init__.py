"""Schemas: what an op takes and returns.

A type of the dispatcher is a row of `types`: its hints, its default values, its results. `infer` reads a function's
signature: `hints` makes `nodes` of each parameter and of the return, by these rows and, for other types, by `codecs`;
`arguments` makes arguments of them, and `writes` says which are written. `advice` says what to write instead of a
hint that is not supported, `default_advice` the same of a default; `spelling` and `node_types` say how one writes a
type. `parse` reads text. Both make the `Schema` of `model`, whose text the dispatcher gets. `defaults` and `tags`
have the rules for these; `literals` says how a single value is written. `differentiability` says which arguments and
returns have gradients.

    function -> infer.read -> model.Schema (and nodes.Signature) -> str -> torch's parser
    text -> parse.parse -> model.Schema
    OpOverload -> parse.from_dispatcher -> model.Schema

`literals` < `types` < `defaults` < `model` < `tags`, `parse`, `differentiability`; `model` < `codecs`, `forms` <
`nodes` < `node_types` < `default_advice` < `arguments` < `writes`; `annotations` < `spelling` < `advice`; `advice`,
`nodes` < `hints`; all < `infer`
"""
