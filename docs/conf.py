"""How the documentation is built: sphinx-build -W docs docs/_build"""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

from mpicomp import __version__
from mpicomp.cli.list import compressor_table

project = "mpicomp"
copyright = "the mpicomp contributors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"description": "Compressed gradient exchange, native to MPI", "page_width": "1100px"}

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # numpydoc docstrings say it in words
numpydoc_show_class_members = False

if importlib.util.find_spec("torch") is None:
    # Classes that signatures name, so that the pages can be built without PyTorch; autodoc's own mocks know no "|".
    torch = ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})
    torch.nn = SimpleNamespace(Module=type("Module", (), {}))
    torch.optim = SimpleNamespace(Optimizer=type("Optimizer", (), {}))
    sys.modules["torch"] = torch


def fill(app, page, source):
    """Put the table of compressors where a page wants it: the registry has it, so that it is never out of date."""
    source[0] = source[0].replace("<!-- the table of compressors -->", compressor_table())


def setup(app):
    """Have Sphinx call `fill`."""
    app.connect("source-read", fill)
