"""The pytest plugin of customops. It stands beside `customops`, so that pytest can load it without loading torch.

`plugin` has the options, and is all that a run loads which uses none of them. `pytest --customops` loads `collecting`,
``--customops-mode`` `watching`, and the fixture `opcheck` `fixture`; they share the `Session` of `session`: what is
expected to fail (`expected`), what did, and what is said of it at the end.

PYTEST_DONT_REWRITE: no assert here is one of a test, and a second run in one process would warn.
"""
