"""The page on the design: its walk against a step that is traced, its laws, and the table of faults."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import run
from faults.rows import TABLE, rows
from step_cost import functions_of

import mpicomp
from mpicomp.reducer import trace

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "design.md").read_text()
ROWS = rows(TABLE.read_text())
TRACED_STEPS = 40  # some files are visited now and then, such as kernels of a bound that was too high


@pytest.mark.mpi(min_size=2, max_size=2)
def test_walk_names_every_file_that_steps_visit(comm, monkeypatch):
    monkeypatch.setattr(trace, "markers", [])  # those of torch, where another test has loaded it
    section = re.search(r"## A walk through a step\n(.*?)\n## ", PAGE, re.DOTALL)[1]
    named = set(re.findall(r"`((?:mpicomp|kernels)/[\w/]+\.py)`", section))
    gradients = {"w": np.random.default_rng(comm.rank).standard_normal(1000).astype(np.float32)}
    with mpicomp.Reducer("topk", "allgather", comm=comm) as reducer:
        for _ in range(100):
            reducer.reduce(gradients)
        visits = [{file for file, _ in functions_of(lambda: reducer.reduce(gradients))} for _ in range(TRACED_STEPS)]
    visited = set.union(*visits)
    assert visited <= named
    assert named - visited <= {"kernels/cpu/above_threshold.py", "mpicomp/gpu/device.py"}


@pytest.mark.quick
@pytest.mark.parametrize(("fault", "seconds", "tests"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_row_of_a_fault_has_tests_that_exist(fault, seconds, tests):
    assert tests
    assert 0 < seconds <= 60
    for test in tests:
        path, _, name = test.partition("::")
        tree = ast.parse((run.ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
