"""The tables of fields in the documentation, read to be compared with what is written."""

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
FILL = runpy.run_path(str(DOCS / "generated.py"))["fill"]

_KINDS = {
    "integer": [int],
    "number": [int, float],
    "string": [str],
    "boolean": [bool],
    "object": [dict],
    "null": [type(None)],
    "list of objects": [list],
    "list of strings": [list],
    "list of integers": [list],
}


def documented(page, heading):
    """Give the fields below a heading of a page, with their types."""
    sections = re.split(r"^#{2,5} (.+)$", (DOCS / page).read_text(), flags=re.MULTILINE)
    text = FILL(sections[sections.index(heading) + 1])
    return dict(re.findall(r"^\| `(\w+)` \| ([\w ]+?) \|", text, flags=re.MULTILINE))


def check_types(written, fields):
    for name, kind in fields.items():
        assert type(written[name]) in [one for word in kind.split(" or ") for one in _KINDS[word]], name
