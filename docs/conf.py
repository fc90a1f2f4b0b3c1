"""How the documentation is built: sphinx-build -W docs docs/_build"""

import importlib
import importlib.util
import re
import sys
from types import ModuleType, SimpleNamespace

from mpicomp import __version__
from mpicomp.cli.list import compressor_table
from mpicomp.registry import REGISTRIES

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


# Where classes are public under a shorter name than that of their module.
PACKAGES = {"compressor": "mpicomp", "collective": "mpicomp.collectives", "policy": "mpicomp.policies"}


def registered(kind):
    """Return an autoclass directive for every built-in class of a kind."""
    registry, package = REGISTRIES[kind], importlib.import_module(PACKAGES[kind])
    classes = [registry.cls(name) for name in registry.names() if registry.plugin(name) is None]
    homes = [PACKAGES[kind] if hasattr(package, cls.__name__) else cls.__module__ for cls in classes]
    return "\n\n".join(f".. autoclass:: {home}.{cls.__name__}" for home, cls in zip(homes, classes, strict=True))


def fill(app, page, source):
    """Put in what the registry has where a page wants it, so that it is never out of date."""
    text = source[0].replace("<!-- the table of compressors -->", compressor_table())
    source[0] = re.sub(r"<!-- registered: (\w+) -->", lambda found: registered(found[1]), text)


def setup(app):
    """Have Sphinx call `fill`."""
    app.connect("source-read", fill)
