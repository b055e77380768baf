"""Sphinx configuration."""

from importlib.metadata import version as installed_version

project = "customops"
author = "customops contributors"
copyright = "2026, customops contributors"
release = installed_version("customops")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

default_role = "code"  # docstrings put names in single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what matters, and overloads what types there are
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "customops"
