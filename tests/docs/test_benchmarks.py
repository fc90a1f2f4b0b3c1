"""docs/results.md has every field that is written, and no other."""

import json

from tables import check_types, documented

from mpicomp.cli import main


def compare(written, heading, page="results.md"):
    fields = documented(page, heading)
    assert list(written) == list(fields)
    check_types(written, fields)


def test_what_is_written(tmp_path):
    path = tmp_path / "out.json"
    words = ["--numel", "2000", "--repeats", "2", "--compressor", "topk", "--ratio", "0.1", "--json", str(path)]
    assert main(["bench", "kernels", *words]) == 0
    written = json.loads(path.read_text())
    compare(written, "The object of --json")
    compare(written["environment"], "environment")
    for row in written["rows"]:
        compare(row, "Rows of kernels")
