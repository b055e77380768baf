"""Schemas: what an op takes and returns.

A type of the dispatcher is a row of `types`: its hints, its default values, its results. `infer` reads a function's
signature: `hints` makes nodes (`structure`) of each parameter and of the return, by these rows and, for other types, by
codecs, and `infer` makes arguments of the nodes. `advice` says what to write instead of a hint or a default that is not
supported. `parse` reads text. Both make the `Schema` of `model`, whose text the dispatcher gets. `defaults` puts in the
arguments that a call leaves out. `tags` has the rules for tags.

    function -> infer.read -> model.Schema (and structure.Signature) -> str -> torch's parser
    text -> parse.parse -> model.Schema
    OpOverload -> parse.from_dispatcher -> model.Schema
"""
