"""Every row of the table of faults has tests that exist, and a number of seconds."""

import ast

import pytest
import run
from faults.rows import TABLE, rows

ROWS = rows(TABLE.read_text())


def test_every_row_was_understood():
    text = TABLE.read_text()
    assert len(ROWS) == text.count("\n| ") - text.count("\n| fault |") > 0


@pytest.mark.parametrize(("fault", "seconds", "tests"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_row(fault, seconds, tests):
    assert tests
    assert 0 < seconds <= 60
    for test in tests:
        path, _, name = test.partition("::")
        tree = ast.parse((run.ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
