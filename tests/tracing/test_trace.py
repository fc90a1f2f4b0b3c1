"""A trace of several ranks: whole, on one clock, and in the order in which things can only have happened."""

import contextlib
import json
import pickle
import time
import warnings
from collections import defaultdict

import numpy as np
import pytest
from marks import slow
from tracing.chrome import check, names

import mpicomp
from mpicomp import cli
from mpicomp.errors import ConfigurationError
from mpicomp.reducer import trace as tracing
from mpicomp.reducer.trace_merge import NotedStep, RankInfo, merge, packed, read
from mpicomp.transport import LocalWorld

TRACKS = {"step", "compute", "bucket", "compress", "wait", "exchange", "decode"}
PAIRS = [("topk", "allgather"), ("topk", "star-topk"), ("topk", "oktopk"), ("dense", "allreduce"), ("dense", "ring")]
PAIRS += [("qsgd", "auto"), ("powersgd", "auto"), ("dense", "recursive-doubling"), ("topk", "hierarchical")]
DEFAULT = [("topk", "allgather", 2), ("dense", "ring", 1)]
CASES = [*DEFAULT, *(slow(*pair, hosts) for pair in PAIRS for hosts in (1, 2) if (*pair, hosts) not in DEFAULT)]
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
    from mpicomp.transport.mpi import MPITransport

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
        for track in ("compress", "wait", "exchange", "decode"):
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
            both = seconds["wait", *where] + seconds["exchange", *where]
            # What is begun in the background takes no time of its own.
            assert both <= bucket["phases_s"]["exchange"] + 5e-8
            assert both == pytest.approx(bucket["phases_s"]["exchange"], rel=0.2, abs=2e-4)
        wire = [event["args"]["sent"] for event in kinds["C"] if event["pid"] == rank]
        assert wire == sorted(wire)
        assert wire[-1] == pytest.approx(sum(record["wire_bytes"] for record in records[rank]), abs=1)
    check_causes(kinds, comm.size, error)
    if collective == "ring":
        check_messages(tracks, comm.size, error)


def check_causes(kinds, ranks, error):
    """Where all ranks wait for all, none is done before the last one has begun; waits end when it has."""
    tracks = by_track(kinds)
    rounds = defaultdict(lambda: [[] for _ in range(ranks)])  # by step and bucket, of each rank: what it has waited for
    for rank in range(ranks):
        events = sorted(tracks[rank, "wait"] + tracks[rank, "exchange"], key=lambda value: (value["ts"], -value["dur"]))
        begin = None
        for event in events:
            begin = event["ts"] if begin is None else begin
            if event["name"] == "wait":
                continue
            if event["name"] in ("allreduce", "allgatherv") and "group" not in event["args"]:
                key = event["args"]["step"], event["args"]["bucket"]
                rounds[key][rank].append((begin, event["ts"], event["ts"] + event["dur"]))
            begin = None
    waited = 0
    for everyones in rounds.values():
        assert len({len(values) for values in everyones}) == 1
        for item in zip(*everyones, strict=True):
            last = max(begin for begin, _, _ in item)
            assert min(end for _, _, end in item) >= last - 2 * error - 0.002
            for begin, cut, end in item:
                assert cut == pytest.approx(min(max(begin, last), end), abs=0.002)
                waited += cut > begin
    if ranks > 1 and rounds:
        assert waited > 0


def check_messages(tracks, ranks, error):
    """In a ring, all ranks do the same: none has the message of the one before it that has not begun to send it."""
    rounds = []
    for rank in range(ranks):
        events = sorted(tracks[rank, "wait"] + tracks[rank, "exchange"], key=lambda value: (value["ts"], -value["dur"]))
        item, begin = [], None
        for event in events:
            begin = event["ts"] if begin is None else begin
            if event["name"] != "wait":
                about = event["args"]
                item.append((about.get("begun", begin), begin, event["ts"], event["ts"] + event["dur"], about["from"]))
                begin = None
        rounds.append(item)
    assert len({len(slices) for slices in rounds}) == 1
    for place, everyones in enumerate(zip(*rounds, strict=True)):
        for rank, (_, begin, cut, end, sources) in enumerate(everyones):
            assert sources == [(rank - 1) % ranks], place
            sent = everyones[sources[0]][0]
            assert end >= sent - 2 * error - 0.002
            assert cut == pytest.approx(min(max(begin, sent), end), abs=0.002)


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
        parts = [f"{path}.rank-{rank}" for rank in reversed(range(comm.size))]
        assert cli.main(["trace", *parts, "-o", path]) == 0
        with open(path) as file:
            trace = json.load(file)
        tracks = by_track(check(trace))
        assert trace["otherData"]["ranks"] == comm.size
        for rank in range(comm.size):
            assert [event["name"] for event in tracks[rank, "step"]] == ["step 0"]
            assert [event["name"] for event in tracks[rank, "exchange"]] == ["allgatherv"]


def test_merging_another_file_names_it(tmp_path, capsys):
    torn, foreign = tmp_path / "torn.rank-0", tmp_path / "foreign.rank-0"
    torn.write_bytes(packed((0, 0, 1, 0.0))[:-3])
    foreign.write_bytes(pickle.dumps(np.float64(1)))  # it would load a module
    for part in (torn, foreign):
        assert cli.main(["trace", str(part), "-o", str(tmp_path / "t.json")]) == 2
        assert f"'{part}' is not the file of a rank's trace" in capsys.readouterr().err
    assert cli.main(["trace", str(tmp_path / "none"), "-o", str(tmp_path / "t.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


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


def test_trace_without_steps_is_a_trace(tmp_path):
    tracer = mpicomp.trace(tmp_path / "trace.json", comm=alone())
    tracer.finish()
    tracer.finish()
    assert check(json.loads((tmp_path / "trace.json").read_text()))["X"] == []


def test_trace_without_a_folder_is_in_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mpicomp.trace("trace.json", comm=alone()).finish()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_full_disk_ends_the_trace_only(tmp_path, monkeypatch):
    reducer = mpicomp.Reducer("topk", "allgather", comm=alone())
    tracer = mpicomp.trace(tmp_path / "trace.json", comm=alone())
    reducer.reduce({"w": np.ones(10, "f4")})
    tracer.flush()
    tracer._file.close()  # what is written next cannot be

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        close = flush = lambda self: None

    tracer._file = Full()
    reducer.reduce({"w": np.ones(10, "f4")})
    with pytest.warns(UserWarning, match="No space left"):
        tracer.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reducer.reduce({"w": np.ones(10, "f4")})
        tracer.flush()
        tracer.finish()
    kinds = check(json.loads((tmp_path / "trace.json").read_text()))
    assert [event["name"] for event in kinds["X"] if event["cat"] == "step"] == ["step 0"]


def test_steps_are_written_after_a_quarter_of_a_second(tmp_path):
    reducer = mpicomp.Reducer("topk", "allgather", comm=alone())
    tracer = mpicomp.trace(tmp_path / "trace.json", comm=alone())

    def written():
        return [step.step for step in read(str(tmp_path / "trace.json.rank-0"))[1]]

    begin = time.monotonic()
    while time.monotonic() - begin < 0.3 or reducer.last_step.step < 3:
        reducer.reduce({"w": np.ones(10, "f4")})
    time.sleep(0.3)
    reducer.reduce({"w": np.ones(10, "f4")})
    last = reducer.last_step.step
    assert written() == list(range(last + 1))
    for _ in range(tracing._MAX_STEPS):
        reducer.reduce({"w": np.ones(10, "f4")})
        assert len(tracer._steps) < tracing._MAX_STEPS
    tracer.flush()
    assert written() == list(range(last + 1 + tracing._MAX_STEPS))
    tracer.finish()


def test_reducers_have_separate_tracks(tmp_path):
    reducers = [mpicomp.Reducer("topk", "allgather", comm=alone()) for _ in range(2)]
    with mpicomp.trace(tmp_path / "trace.json", comm=alone()):
        for _ in range(2):
            for reducer in reducers:
                reducer.reduce({"w": np.ones(10, "f4")})
    kinds = check(json.loads((tmp_path / "trace.json").read_text()))
    assert set(names(kinds)[1].values()) == TRACKS | {f"{name} 2" for name in TRACKS}


def test_drift_of_clocks_is_corrected(tmp_path):
    """Rank 1's clock was right in the beginning and is late by a thousandth of what has passed since."""
    nothing = dict.fromkeys(NotedStep._fields, 0) | {"since": None, "buckets": []}
    parts = []
    for rank, drift in enumerate([0.0, 0.001]):
        part = tmp_path / f"{rank}"
        times = [second / (1 + drift) for second in range(5)]
        steps = [tuple((nothing | {"begin": time, "end": time + 1e-6}).values()) for time in times]
        part.write_bytes(packed(tuple(RankInfo(rank, 0, 2, 0.0))) + packed(steps))
        parts.append(part)
    world = LocalWorld(2)
    path = tmp_path / "trace.json"
    world.run(
        [
            merge(str(part), str(path), end.group, drift, 0.0)
            for part, end, drift in zip(parts, world.transports, [0.0, 0.001], strict=True)
        ]
    )
    events = json.loads(path.read_text())["traceEvents"]
    times = [event["ts"] for event in events if event["ph"] == "X"]
    assert sorted(times) == pytest.approx(np.repeat(np.arange(5), 2) * 1e6, abs=0.002)


def test_drift_is_what_clocks_gained_over_the_trace(tmp_path, monkeypatch):
    """A clock that has gained 3 ms when the trace ends has gained them since it began."""
    seen, transport = [], alone()

    def compared(end):
        end.offset = 0.001 + 0.003 * len(seen)
        seen.append(time.perf_counter())
        yield from ()
        return 0.0

    def merged(part, path, group, drift, error, alive):
        seen.append(drift)
        yield from merge(part, path, group, drift, error, alive)

    monkeypatch.setattr(tracing, "compare_clocks", compared)
    monkeypatch.setattr(tracing, "merge", merged)
    tracer = mpicomp.trace(tmp_path / "trace.json", comm=transport)
    time.sleep(0.3)
    tracer.finish()
    begun, ended, drift = seen
    assert drift == pytest.approx(0.003 / (ended - begun), rel=0.2)


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
            assert (
                len(tracks[rank, "bucket"])
                == 3 * len({track["args"]["bucket"] for track in tracks[rank, "bucket"]})
                > 3
            )
        check_causes(kinds, comm.size, 0.0)
