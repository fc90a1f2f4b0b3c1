"""How the documentation is built: sphinx-build -W docs docs/_build"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "studies")]  # studies are scripts, which import each other by bare names

import generated  # noqa: E402, it stands next to this file
from docutils import nodes  # noqa: E402

from mpicomp import __version__  # noqa: E402

project = "mpicomp"
copyright = "the mpicomp contributors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "mpicomp"
html_static_path = ["static"]
html_css_files = ["page.css"]
html_show_sourcelink = False
html_copy_source = False
smartquotes_action = "qe"  # no dashes: headings name options such as --json

myst_heading_anchors = 5

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # as they are written: os.environ, and not what the builder has in it
autodoc_typehints = "none"  # numpydoc docstrings say it in words
numpydoc_show_class_members = False


def fill(app, page, source):
    """Put in what a page takes from the code."""
    source[0] = generated.fill(source[0])


def shorten(app, document):
    """Leave of the paths in a difference of two files those below this folder."""
    for node in document.findall(nodes.literal_block):
        if node.get("language") == "udiff":
            node.children = [nodes.Text(node.astext().replace(f"{ROOT / 'docs'}/", ""))]


def setup(app):
    """Have Sphinx call `fill` and `shorten`."""
    app.connect("source-read", fill)
    app.connect("doctree-read", shorten)
