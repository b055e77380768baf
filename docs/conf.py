"""Sphinx configuration."""

from importlib.metadata import version as installed_version

project = "customops"
author = "customops contributors"
copyright = "2026, customops contributors"
release = installed_version("customops")
version = release

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "customops"
