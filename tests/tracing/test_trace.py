"""A trace of several ranks: whole, on one clock, and in the order in which things can only have happened."""

import contextlib
import json
import resource
import time
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from marks import slow
from tracing.chrome import check, names

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.mpi import LocalWorld
from mpicomp.reducer import trace as tracing

TRACKS = {"step", "compute", "bucket", "compress", "exchange", "decode"}
CASES = [("topk", "allgather", 2), slow("topk", "hierarchical", 2), slow("dense", "auto", 1)]
STEPS = 6


def alone():
    return LocalWorld(1).transports[0]


def by_track(kinds):
    """Return events by rank and by the name of their track."""
    _, threads = names(kinds)
    found = defaultdict(list)
    for event in kinds["X"]:
        found[event["pid"], threads[event["pid"], event["tid"]]].append(event)
    return found


def shared(comm, tmp_path):
    """Return a folder that all ranks have, that of rank 0."""
    return comm.bcast(str(tmp_path))


def reduce_some(comm, pair, path, layout=None):
    """Reduce on all ranks while a trace is written; return the trace on rank 0, and the records of all."""
    from mpicomp.mpi.comm import MPITransport

    transport = MPITransport(comm, layout=layout)
    reducer = mpicomp.Reducer(*pair, policy={"warmup": 0}, comm=transport, bucket_bytes=4000)
    random = np.random.default_rng(comm.rank)
    records = []
    with mpicomp.trace(path, comm=transport):
        for _ in range(STEPS):
            time.sleep(0.002 * comm.rank)  # so that there is something to wait for
            shapes = {"a": (900,), "b": (30, 30), "c": (700,)}
            reducer.reduce({key: random.standard_normal(shape).astype("f4") for key, shape in shapes.items()}, lr=0.1)
            records.append(reducer.last_step.to_json())
    reducer.close()
    transport.close()
    everyones = comm.gather(records)
    if comm.rank:
        return None, None
    with open(path) as file:
        return json.load(file), everyones


@pytest.mark.mpi
@pytest.mark.parametrize(("compressor", "collective", "hosts"), CASES)
def test_trace_has_the_steps_of_all_ranks(comm, tmp_path, compressor, collective, hosts):
    layout = None if hosts == 1 else [rank * 2 // comm.size for rank in range(comm.size)]
    path = shared(comm, tmp_path) + "/trace.json"
    trace, records = reduce_some(comm, (compressor, collective), path, layout)
    if comm.rank:
        return
    assert trace["otherData"]["ranks"] == comm.size
    kinds = check(trace)
    error = 1e6 * trace["otherData"]["clock_error_s"]
    processes, threads = names(kinds)
    assert sorted(processes) == list(range(comm.size))
    assert all(name.startswith(f"rank {pid} ") for pid, name in processes.items())
    assert set(threads.values()) == TRACKS
    tracks = by_track(kinds)
    for rank in range(comm.size):
        buckets = [bucket for record in records[rank] for bucket in record["buckets"]]
        assert [event["name"] for event in tracks[rank, "step"]] == [f"step {step}" for step in range(STEPS)]
        assert len(tracks[rank, "compute"]) == STEPS
        reported = tracks[rank, "bucket"]
        assert len(reported) == len(buckets)
        seconds = defaultdict(float)
        for track in ("compress", "exchange", "decode"):
            for event in tracks[rank, track]:
                seconds[track, event["args"]["step"], event["args"]["bucket"]] += event["dur"] / 1e6
        for event, bucket, step in zip(reported, buckets, np.repeat(range(STEPS), len(buckets) // STEPS), strict=True):
            about = event["args"]
            for key in ("compressor", "collective", "ratio", "sent_bytes", "wire_bytes", "predicted_s", "numel"):
                assert about[key] == bucket[key]
            assert about["step"] == step
            where = (step, bucket["bucket"])
            assert seconds["compress", *where] == pytest.approx(bucket["phases_s"]["compress"], abs=5e-8)
            assert seconds["decode", *where] == pytest.approx(bucket["phases_s"]["decode"], abs=5e-8)
            # What is begun in the background takes no time of its own.
            assert seconds["exchange", *where] <= bucket["phases_s"]["exchange"] + 5e-8
            assert seconds["exchange", *where] == pytest.approx(bucket["phases_s"]["exchange"], rel=0.2, abs=2e-4)
        wire = [event["args"]["sent"] for event in kinds["C"] if event["pid"] == rank]
        assert wire == sorted(wire)
        assert wire[-1] == pytest.approx(sum(record["wire_bytes"] for record in records[rank]), abs=1)
    check_causes(kinds, comm.size, error)


def check_causes(kinds, ranks, error):
    """Where all ranks wait for all, none is done before the last one has begun."""
    tracks = by_track(kinds)
    rounds = defaultdict(lambda: [[] for _ in range(ranks)])  # by step and bucket, of each rank: begin and end
    for rank in range(ranks):
        for event in tracks[rank, "exchange"]:
            if event["name"] in ("allreduce", "allgatherv") and "group" not in event["args"]:
                key = event["args"]["step"], event["args"]["bucket"]
                rounds[key][rank].append((event["ts"], event["ts"] + event["dur"]))
    for everyones in rounds.values():
        assert len({len(values) for values in everyones}) == 1
        for item in zip(*everyones, strict=True):
            assert min(end for _, end in item) >= max(begin for begin, _ in item) - 2 * error - 0.002


@pytest.mark.mpi(min_size=2, max_size=2)
def test_error_on_one_rank_leaves_the_files_of_all_ranks(comm, tmp_path):
    path = shared(comm, tmp_path) + "/trace.json"
    reducer = mpicomp.Reducer("topk", "allgather", comm=comm)
    if comm.rank == 0:
        with contextlib.suppress(RuntimeError), mpicomp.trace(path, comm=comm):
            reducer.reduce({"w": np.ones(10, "f4")})
            raise RuntimeError
    else:
        tracer = mpicomp.trace(path, comm=comm)
        reducer.reduce({"w": np.ones(10, "f4")})
        tracer.__exit__(RuntimeError, RuntimeError(), None)
    reducer.close()
    assert tracing.listeners == []
    comm.barrier()
    if comm.rank == 0:
        text = "".join(Path(f"{path}.rank-{rank}").read_text() for rank in range(comm.size))  # as cat joins them
        tracks = by_track(check({"traceEvents": json.loads(text.removesuffix(",\n") + "]")}))
        for rank in range(comm.size):
            assert [event["name"] for event in tracks[rank, "step"]] == ["step 0"]
            assert [event["name"] for event in tracks[rank, "exchange"]] == ["allgatherv"]


@pytest.mark.mpi(max_size=2)
def test_unwritable_file_raises_on_all_ranks(comm, tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be written"):
        mpicomp.trace(shared(comm, tmp_path) + "/nowhere/trace.json", comm=comm)
    assert tracing.listeners == []


def test_second_trace_is_refused(tmp_path):
    with mpicomp.trace(tmp_path / "one.json", comm=alone()):
        with pytest.raises(ConfigurationError, match="finish"):
            mpicomp.trace(tmp_path / "two.json", comm=alone())
        assert tracing.listeners != []
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
    check(json.loads((tmp_path / "one.json").read_text()))


def test_full_disk_ends_the_trace_only(tmp_path):
    reducer = mpicomp.Reducer("topk", "allgather", comm=alone())
    tracer = mpicomp.trace(tmp_path / "trace.json", comm=alone())
    reducer.reduce({"w": np.ones(10, "f4")})
    tracer.flush()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "trace.json.rank-0").stat().st_size + 50, limit[1]))
    try:
        with pytest.warns(UserWarning, match="File too large"):
            [reducer.reduce({"w": np.ones(10, "f4")}), tracer.flush()]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reducer.reduce({"w": np.ones(10, "f4")})
        tracer.flush()
        tracer.finish()
    kinds = check(json.loads((tmp_path / "trace.json").read_text()))
    assert [event["name"] for event in kinds["X"] if event["cat"] == "step"] == ["step 0"]


def test_reducers_have_separate_tracks(tmp_path):
    reducers = [mpicomp.Reducer("topk", "allgather", comm=alone()) for _ in range(2)]
    with mpicomp.trace(tmp_path / "trace.json", comm=alone()):
        for _ in range(2):
            for reducer in reducers:
                reducer.reduce({"w": np.ones(10, "f4")})
    kinds = check(json.loads((tmp_path / "trace.json").read_text()))
    assert set(names(kinds)[1].values()) == TRACKS | {f"{name} 2" for name in TRACKS}


def test_drift_of_clocks_is_corrected(tmp_path, monkeypatch):
    """A clock that has lost a share of the time when the trace ends has lost the same share of each of its times."""
    transport, reducer = alone(), mpicomp.Reducer("topk", "allgather", comm=alone())
    compared, steps, offsets = [], [], iter([0.001, 0.501])

    def compare(end):
        end.offset = next(offsets)
        compared.append(time.perf_counter())
        yield from ()
        return 0.0

    monkeypatch.setattr(tracing, "compare_clocks", compare)
    with mpicomp.trace(tmp_path / "trace.json", comm=transport):
        begun = time.perf_counter()
        for _ in range(3):
            time.sleep(0.1)
            before = time.perf_counter()
            reducer.reduce({"w": np.ones(10, "f4")})
            steps.append((before, time.perf_counter()))
    ended = time.perf_counter()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    times = [event["ts"] / 1e6 for event in events if event.get("cat") == "bucket"]
    for seconds, (before, after) in zip(times, steps, strict=True):
        assert (1 + 0.5 / (ended - compared[0])) * (before - begun) <= seconds
        assert seconds <= (1 + 0.5 / (compared[1] - begun)) * (after - compared[0])


@pytest.mark.mpi(min_size=2, max_size=2)
def test_trace_of_overlap_has_rounds_during_backward(comm, tmp_path):
    torch = pytest.importorskip("torch")
    from mpicomp.torch import DistributedOptimizer

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.ReLU(), torch.nn.Linear(50, 50))
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), "topk", "allgather",
        comm=comm, overlap=True, bucket_bytes=4000, warmup=0, same_batches=True,
    )  # fmt: skip
    path = shared(comm, tmp_path) + "/trace.json"
    with mpicomp.trace(path, comm=comm):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 50)).sum().backward()
            optimizer.step()
    optimizer.close()
    if comm.rank == 0:
        with open(path) as file:
            kinds = check(json.load(file))
        tracks = by_track(kinds)
        for rank in range(comm.size):
            assert len(tracks[rank, "step"]) == 3
            buckets = [track["args"]["bucket"] for track in tracks[rank, "bucket"]]
            assert len(buckets) == 3 * len(set(buckets)) > 3
        check_causes(kinds, comm.size, 0.0)
