"""Configuration of Sphinx. `make docs` builds the documentation; warnings are errors."""

import atexit
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# The extension beside this file, and `experiments`, which is not installed.
sys.path[:0] = [str(HERE), str(HERE.parent)]

project = "jaxfedmvc"
author = "The jaxfedmvc authors"
copyright = "The jaxfedmvc authors"

extensions = [
    "myst_nb",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.bibtex",
    "docstrings",
    "settings_table",
]
exclude_patterns = ["_build", "jupyter_execute", "reference/generated/modules.rst"]

html_theme = "furo"
html_title = "jaxfedmvc"
html_static_path = ["_static"]
html_css_files = ["notebooks.css"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
smartquotes = False

# Notebooks are kept without outputs and executed here, by the interpreter that runs Sphinx, each in
# a folder of its own that is removed afterwards. An error in one of them ends the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 180  # seconds a cell
nb_execution_in_temp = True
nb_merge_streams = True
logging.getLogger("traitlets").setLevel(logging.WARNING)
# Their programs run for milliseconds and take seconds to optimise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the binaries under experiments/ do
# A profile of their own, so that nobody's start-up files run first. Tracing makes many objects that
# live long: looking for garbage among them takes a tenth of the time.
ipython = Path(tempfile.mkdtemp(prefix="jaxfedmvc-docs-"))
atexit.register(shutil.rmtree, ipython, ignore_errors=True)
(ipython / "profile_default").mkdir()
(ipython / "profile_default" / "ipython_kernel_config.py").write_text(
    "import gc\n\n"
    "gc.set_threshold(100_000, 50, 50)\n"
    "get_config().IPKernelApp.log_level = 'ERROR'  # else each says that it talks over TCP\n"
)
os.environ["IPYTHONDIR"] = str(ipython)

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
# Other libraries' names, and variables of types.
nitpick_ignore_regex = [
    ("py:.*", r"(?!jaxfedmvc\.).*"),
    ("py:class", r".*\._(Arguments|Hyperparams|Returned)"),
]
# Several methods have a `Model` and a `ServerState` of their own.
suppress_warnings = ["ref.python"]


def keep_inside(app: Any) -> None:
    """Has the notebooks' pictures written into the output folder, and not beside it."""
    folder = Path(app.outdir) / "jupyter_execute"
    app.env.mystnb_config = app.env.mystnb_config.copy(output_folder=str(folder))


def setup(app: Any) -> None:
    """Connects this after the extension's own handler."""
    app.connect("builder-inited", keep_inside, priority=900)
