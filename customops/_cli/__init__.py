"""The command line: ``python -m customops check`` and ``backend-report``."""
