"""Sphinx configuration."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import public_names

project = "customops"
author = "customops contributors"
copyright = "2026, customops contributors"
release = installed_version("customops")
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

default_role = "code"  # docstrings put names in single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88  # longer ones take a line for each parameter
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute is described once, also where members are listed

copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "customops"
html_static_path = ["static"]
html_css_files = ["customops.css"]


def add_names(app, document, source):
    """docs/reference.md is made of the package."""
    if document == "reference":
        source[0] += "\n" + public_names.text()


def outdated(app, env, added, changed, removed):
    """What docs/reference.md is made of is not in it, so it is read each time."""
    return ["reference"]


def setup(app):
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", add_names)
