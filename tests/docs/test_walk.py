"""The walk through a step in docs/design.md against a step that is traced."""

import re
from pathlib import Path

import numpy as np
import pytest
from step_cost import functions_of

import mpicomp
from mpicomp.reducer import trace

PAGE = Path(__file__).parents[2] / "docs" / "design.md"
TRACED_STEPS = 40  # some files are visited now and then, such as kernels of a bound that was too high


@pytest.mark.mpi(min_size=2, max_size=2)
def test_walk_names_every_file_that_steps_visit(comm, monkeypatch):
    monkeypatch.setattr(trace, "markers", [])  # those of torch, where another test has loaded it
    section = re.search(r"## A walk through a step\n(.*?)\n## ", PAGE.read_text(), re.DOTALL)[1]
    named = set(re.findall(r"`((?:mpicomp|kernels)/[\w/]+\.py)`", section))
    gradients = {"w": np.random.default_rng(comm.rank).standard_normal(1000).astype(np.float32)}
    with mpicomp.Reducer("topk", "allgather", comm=comm) as reducer:
        for _ in range(100):
            reducer.reduce(gradients)
        visits = [{file for file, _ in functions_of(lambda: reducer.reduce(gradients))} for _ in range(TRACED_STEPS)]
    visited = set.union(*visits)
    assert visited <= named
    assert named - visited <= {"kernels/cpu/tail.py"}
