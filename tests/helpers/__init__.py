"""What tests share; `pythonpath` in pyproject.toml makes it importable: `from helpers.tensors import leaf`."""
