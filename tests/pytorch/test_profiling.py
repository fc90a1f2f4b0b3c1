"""torch's profiler and NVTX show the phases of an exchange, and nothing is begun while nobody looks."""

import itertools
import subprocess
import sys
import unittest.mock

import pytest
import torch
from replicas import distribute, network, train

import mpicomp
from mpicomp.mpi import LocalWorld
from mpicomp.reducer import trace

PHASES = ["compress", "exchange", "decode"]


def test_ranges_in_torchs_profiler():
    """They begin while a profiler runs only, whose function for it is another one before."""
    model = network()
    optimizer = distribute(model, LocalWorld(1).transports[0], None, "topk", "allgather", warmup=0, bucket_bytes=None)
    with unittest.mock.patch.object(torch.profiler, "record_function", side_effect=AssertionError):
        train(model, optimizer, range(1), 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(model, optimizer, range(3), 0)
    ranges_seen = [event for event in profiler.events() if event.name.startswith("mpicomp::")]
    assert [event.name for event in sorted(ranges_seen, key=lambda event: event.time_range.start)] == [
        f"mpicomp::{phase}" for phase in PHASES
    ] * 3
    ends = sorted((event.time_range.start, event.time_range.end) for event in ranges_seen)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))


def test_what_has_begun_is_ended_where_an_exchange_fails(monkeypatch):
    calls = []

    def mark(name):
        calls.append(name)
        return lambda: calls.append(f"end of {name}")

    monkeypatch.setattr(trace, "markers", [mark])
    reducer = mpicomp.Reducer("topk", "allgather", comm=LocalWorld(1).transports[0])
    rounds = reducer.rounds({"w": torch.ones(10)})
    reply = None
    while "mpicomp::exchange" not in calls:  # in the agreement before it there is no range
        asked = rounds.send(reply)
        if "mpicomp::exchange" not in calls:
            asked.recv[:] = asked.send
            reply = asked.recv
    with pytest.raises(RuntimeError, match="the network"):
        rounds.throw(RuntimeError("the network"))
    assert calls == [word for phase in PHASES[:2] for word in (f"mpicomp::{phase}", f"end of mpicomp::{phase}")]


def test_nvtx_receives_ranges_where_a_tool_collects_them(tmp_path, clean_environ):
    """The package nvtx, here a stand-in, receives the ranges for Nsight."""
    (tmp_path / "nvtx.py").write_text(
        "calls = []\npush_range = calls.append\npop_range = lambda: calls.append('end')\n"
    )
    code = f"""if True:
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        import nvtx, numpy as np, mpicomp
        from mpicomp.mpi import LocalWorld
        reducer = mpicomp.Reducer("topk", "allgather", comm=LocalWorld(1).transports[0])
        reducer.reduce({{"w": np.ones(10, np.float32)}})
        print(*nvtx.calls)"""
    found = []
    for tool in ({"NVTX_INJECTION64_PATH": "/nowhere"}, {}):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=clean_environ | tool, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found == [[word for phase in PHASES for word in (f"mpicomp::{phase}", "end")], []]
