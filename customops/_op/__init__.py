"""The object that stands for an op: how it is defined, what it holds, and the registry that owns it."""
