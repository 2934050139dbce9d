"""Configuration of Sphinx. `make docs` builds the documentation; warnings are errors."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
# The extension beside this file, and `experiments`, which is not installed.
sys.path[:0] = [str(HERE), str(HERE.parent)]

project = "jaxfedmvc"
author = "The jaxfedmvc authors"
copyright = "The jaxfedmvc authors"

extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.bibtex",
    "docstrings",
    "settings_table",
]
exclude_patterns = ["_build", "reference/generated/modules.rst"]

html_theme = "furo"
html_title = "jaxfedmvc"

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
smartquotes = False

bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "unsrt"

# One page for each package, made of the modules that are there.
apidoc_modules = [
    {
        "path": "../jaxfedmvc",
        "destination": "reference/generated",
        "max_depth": 2,
        "module_first": True,
        "automodule_options": {"members", "show-inheritance"},
    }
]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# A module documents what it defines, not what it passes on from others.
autodoc_default_options = {"ignore-module-all": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Fields are listed with their class and not once more each.
napoleon_use_ivar = True
default_role = "py:obj"

# A reference to something of this library must lead somewhere; types of others need not.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!jaxfedmvc\.).*")]
# Several methods have a `Model` and a `ServerState` of their own.
suppress_warnings = ["ref.python"]
