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


def built_in(kind):
    """Return the built-in classes of a kind, in the order of their names."""
    return [cls for cls in REGISTRIES[kind].classes() if REGISTRIES[kind].plugin(cls.id) is None]


def public_name(kind, cls):
    """Return the dotted name by which the API page has a class."""
    short = hasattr(importlib.import_module(PACKAGES[kind]), cls.__name__)
    return f"{PACKAGES[kind] if short else cls.__module__}.{cls.__name__}"


def directives(kind):
    """Return an autoclass directive for every built-in class of a kind."""
    return "\n\n".join(f".. autoclass:: {public_name(kind, cls)}" for cls in built_in(kind))


def rows(kind, page):
    """Return a row for every built-in class that a page's tables do not have: what its docstring begins with."""
    found = [cls for cls in built_in(kind) if f"\n| `{cls.id}` |" not in page]
    return "\n".join(
        f"| `{cls.id}` | {cls.__doc__.splitlines()[0]} | see {{py:class}}`{public_name(kind, cls)}` |" for cls in found
    )


def sections(page):
    """Return a section for every built-in policy that a page has none of, with its settings."""
    found = []
    for cls in built_in("policy"):
        if f"\n## {cls.id}\n" not in page:
            head = [
                f"## {cls.id}\n",
                f"{cls.__doc__.splitlines()[0]} See {{py:class}}`{public_name('policy', cls)}`.\n",
            ]
            settings = [(key, value) for key, value in cls().get_config().items() if key != "id"]
            table = [f"| `{key}` | `{value!r}` |" for key, value in settings]
            found += [*head, "| setting | default |", "|---|---|", *table, ""]
    return "\n".join(found)


def fill(app, page, source):
    """Put in what the registry has where a page wants it, so that it is never out of date."""
    text = source[0]
    parts = {
        "the table of compressors": compressor_table,
        "other collectives": lambda: rows("collective", text),
        "other policies": lambda: rows("policy", text),
        "sections of other policies": lambda: sections(text),
    } | {f"registered: {kind}": lambda kind=kind: directives(kind) for kind in PACKAGES}
    source[0] = re.sub(r"<!-- (.+?) -->", lambda found: parts[found[1]](), text)


def setup(app):
    """Have Sphinx call `fill`."""
    app.connect("source-read", fill)
