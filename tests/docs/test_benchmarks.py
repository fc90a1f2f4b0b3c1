"""docs/benchmarks.md has every field that is written, and no other."""

import json
import re
from pathlib import Path

import pytest

from mpicomp.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
KINDS = {
    "integer": [int],
    "number": [int, float],
    "string": [str],
    "boolean": [bool],
    "object": [dict],
    "null": [type(None)],
    "list of objects": [list],
}


def compare(written, heading):
    sections = re.split(r"^#{2,3} (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    text = sections[sections.index(heading) + 1]
    fields = dict(re.findall(r"^\| `(\w+)` \| ([\w ]+?) \|", text, flags=re.MULTILINE))
    assert list(written) == list(fields)
    for name, kind in fields.items():
        assert type(written[name]) in [one for word in kind.split(" or ") for one in KINDS[word]], name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kernels", ["--numel", "2000", "--repeats", "2", "--compressor", "topk"]),
        ("estimators", ["--numel", "2000", "--steps", "2", "--data", "laplace"]),
    ],
)
def test_what_is_written(name, options, tmp_path):
    path = tmp_path / "out.json"
    assert main(["bench", name, *options, "--ratio", "0.1", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    compare(written, "The object of --json")
    compare(written["environment"], "environment")
    for row in written["rows"]:
        compare(row, f"Rows of {name}")


def test_every_row_is_explained(tmp_path):
    path = tmp_path / "out.json"
    assert main(["bench", "kernels", "--numel", "2000", "--repeats", "2", "--ratio", "0.1", "--json", str(path)]) == 0
    page = PAGE.read_text()
    for name in {row["name"] for row in json.loads(path.read_text())["rows"]}:
        assert name.endswith(".compress") or f"`{name}`" in page


def test_the_page_saves_gradients_that_are_read(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert main(["bench", "estimators", "--gradients", "mine.npz", "--ratio", "0.1"]) == 0
    assert "mine" in capsys.readouterr().out
