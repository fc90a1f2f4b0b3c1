"""What only a real GPU can show, as lines of a table: studies/gpu_first_hour.py runs these one by one and prints them.

Where there is no GPU those run on the stand-in that mean something there. With ``FIRST_HOUR=quick`` arrays are short,
and no speed is judged. Rank 0 appends its lines to the file that ``FIRST_HOUR_LINES`` names.
"""

import hashlib
import importlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
from device import fake_cuda
from device.kinds import has_gpu
from mpicomp.kernels import of
from mpicomp.kernels.gpu import compile as gpu_compile
from worlds import Ranks

import mpicomp
from mpicomp.gpu import HOST
from mpicomp.gpu.routes import ROUTES, RouteTable
from mpicomp.job import launcher
from mpicomp.mpi import LocalWorld

QUICK = os.environ.get("FIRST_HOUR") == "quick"


NEEDS_GPU = pytest.mark.skipif(not has_gpu(), reason="no GPU, or no CuPy")
PLACES = ["emulated", *(["cuda"] if has_gpu() else [])]
THIRD = 1 / 3  # a factor that is rounded: a product and a sum that are joined then have other bits
LARGE = 2**31 + 5  # elements that a signed 32-bit index does not reach
LARGE_BYTES = 40e9  # of memory that are to be free for them
PINNED_BYTES = 1 << 28

# Bounds that have to hold.
PINNED_RATE = 5e9  # bytes/s: PCIe 3 with 8 lanes has more
MOST_COPIES = {"topk": 2.3, "sidco": 2.6}  # copies of the array inside the device's memory
TORCH_RATIO = 5.0  # times as fast as torch.topk
PATH_RATIO = 10.0  # times as fast as with gradients that are copied whole
MORE_BYTES = 64  # over the bus, besides the message
LAUNCHES = 8  # of our kernels, in a step of one bucket
FIRST_S = 2.0  # of the first step, when no kernel was compiled before
CALLS = 150  # of Python functions of ours, a bucket and step
TEXT_GPT = 0.65  # of the step with DDP by gloo
STEPS = {  # of two ranks on one GPU: most milliseconds over a step without exchange, and most gradients of more memory
    "topk": (8.0, 1.3), "sidco": (9.0, 1.3), "qsgd": (16.0, 1.6), "onebit": (9.0, None), "dense": (None, 0.3),
    "auto": (None, 1.6),
}  # fmt: skip


@pytest.fixture
def line():
    """Write a line of the table; True, False or None, where nothing is judged, says whether it holds."""
    failed, launch, path = [], launcher.detect(), os.environ.get("FIRST_HOUR_LINES")

    def write(check, expected, measured, holds):
        if path is not None and (launch is None or launch.rank == 0):
            with open(path, "a") as file:
                file.write(json.dumps([check, expected, measured, holds]) + "\n")
        if holds is False:
            failed.append(f"{check}: expected {expected}, measured {measured}")

    yield write
    assert failed == []


@pytest.fixture
def gpu():
    return importlib.import_module("cupy")


@pytest.fixture(params=PLACES)
def cupy(request, monkeypatch):
    if request.param == "cuda":
        return request.getfixturevalue("gpu")
    request.getfixturevalue("emulated")
    return fake_cuda.install(monkeypatch, emulated=True)


def is_short(cupy):
    return QUICK or isinstance(cupy, fake_cuda.Cupy)


def numbers(rank, step, numel):
    return np.random.default_rng([rank, step]).standard_normal(numel, np.float32)


def reduced(ranks, arrays, scale=1.0):
    rounds = [reducer.rounds({"w": array}, scale=scale) for reducer, array in zip(ranks.reducers, arrays, strict=True)]
    return [means["w"] for means in ranks.world.run(rounds)]


def place_of(reducer):
    return reducer.layout.buckets[0].device


def on_device(reducers):
    return all(place_of(reducer) is not HOST for reducer in reducers)


def differing(one, other):
    return int(np.count_nonzero(one.view(np.uint32) != other.view(np.uint32)))


@NEEDS_GPU
def test_doctor_sees_the_gpu_and_judges_mpi(gpu, line):
    done = subprocess.run([sys.executable, "-m", "mpicomp", "doctor", "--json"], capture_output=True, text=True)
    report = json.loads(done.stdout)
    gpus, aware = report["gpus"] or ["none"], report["cuda_aware"] or {"value": False, "reason": ""}
    verdict = "yes" if aware["value"] else "no"
    line("doctor: GPU", "one for this rank", gpus[0], gpus[0] != "none")
    line("doctor: CUDA-aware MPI", "yes or no, and why", f"{verdict}: {aware['reason']}", bool(aware["reason"]))


@pytest.mark.parametrize("compressor", [mpicomp.TopK(ratio=0.1), mpicomp.OneBit(block=1024), mpicomp.Dense()], ids=str)
def test_bits_of_means_are_as_on_the_cpu(compressor, cupy, line):
    numel = 20_011 if is_short(cupy) else 2_000_003
    differ = seen = 0
    for size, scale in ((2, THIRD), (3, 1.0)):  # scaled gradients, and a mean over three
        mixed, hosts = Ranks(size, compressor), Ranks(size, compressor)
        for step in range(3):
            arrays = [numbers(rank, step, numel) for rank in range(size)]
            expected = reduced(hosts, arrays, scale)[0]
            for mean in reduced(mixed, [arrays[0], *map(cupy.asarray, arrays[1:])], scale):
                differ += differing(mean if isinstance(mean, np.ndarray) else mean.get(), expected)
                seen += numel
        assert on_device(mixed.reducers[1:])
    line(f"bits: {compressor.id}", "same on host and GPU", f"{differ:,} of {seen:,} differ", differ == 0)


@pytest.mark.parametrize(
    ("compressor", "collective"), [(mpicomp.TopK(ratio=0.01), "allgather"), (mpicomp.Dense(), "allreduce")], ids=str
)
def test_bytes_over_the_bus_are_the_messages(compressor, collective, cupy, line, monkeypatch):
    launched, kernel = [], gpu_compile._kernel
    monkeypatch.setattr(gpu_compile, "_kernel", lambda *words: launched.append(words[3]) or kernel(*words))
    size, ranks = 2, Ranks(2, compressor, collective)
    for step in range(4):
        arrays = [cupy.asarray(numbers(rank, step, 40_000 if is_short(cupy) else 1_000_000)) for rank in range(size)]
        place = place_of(ranks.reducers[0]) if step else None
        before = (place.to_host_bytes, place.from_host_bytes, place.reads) if step else ()
        launched.clear()
        reduced(ranks, arrays)
    assert on_device(ranks.reducers)
    after = place.to_host_bytes, place.from_host_bytes, place.reads
    up, down, reads = ((new - old) // size for new, old in zip(after, before, strict=True))  # ranks share the GPU
    sent, name = ranks.reducers[0].last_step.buckets[0].sent_bytes, compressor.id
    messages = size * sent if name == "topk" else sent
    in_bounds = sent <= up <= sent + MORE_BYTES
    line(f"bytes: {name}, to the host", f"{sent:,} to {sent + MORE_BYTES:,}", f"{up:,}", in_bounds)
    line(f"bytes: {name}, to the GPU", f"{messages:,}", f"{down:,}", down == messages)
    if name == "topk":
        count = len(launched) / size
        line("numbers that the host waits for: topk", "at most 1 read", f"{reads}", reads <= 1)
        line("launches: topk", f"at most {LAUNCHES}", f"{count:g}", 0 < count <= LAUNCHES)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_path_on_the_gpu_has_the_bits_of_whole_copies(comm, cupy, line):
    """Two ranks on one GPU, with gradients that are copied whole and with gradients that stay there."""
    numel, steps, warm = (100_000, 3, 2) if is_short(cupy) else (25_600_000, 10, 5)
    pool = [numbers(comm.rank, step, numel) for step in range(2)]
    there = [cupy.asarray(array) for array in pool]
    whole, staying, exact = (
        mpicomp.Reducer(compressor, collective, policy={"warmup": 0}, comm=comm)
        for compressor, collective in (*[(mpicomp.TopK(ratio=0.01), "allgather")] * 2, (mpicomp.Dense(), "allreduce"))
    )
    seconds, summed, differ = [], np.zeros(numel), 0
    for step in range(warm + steps):
        array, start = there[step % 2], time.perf_counter()
        expected = cupy.asarray(whole.reduce({"w": array.get()})["w"])
        expected[:1].get()  # wait for the stream
        between = time.perf_counter()
        found = staying.reduce({"w": array})["w"]
        found[:1].get()
        seconds.append((between - start, time.perf_counter() - between))
        differ += differing(found.get(), expected.get())
        summed += found.get()
    line("two ranks on one GPU: means", "same bits as with whole copies", f"{differ:,} differ",
         differ == 0 and on_device([staying]))  # fmt: skip
    done = warm + steps
    entered = (done + 1) // 2 * pool[0].astype(np.float64) + done // 2 * pool[1].astype(np.float64)
    entered, left = (
        comm.size * exact.reduce({"w": array})["w"].copy() for array in (entered, staying.residual("w").astype(float))
    )
    lost = float(np.abs(entered - comm.size * summed - left).max())
    room = 8 * done * comm.size * float(np.finfo(np.float32).eps) * float(np.abs(entered).max())
    line("two ranks on one GPU: nothing is lost", f"at most {room:.2g}", f"{lost:.2g}", lost <= room)
    old, new = (statistics.median(times) for times in zip(*seconds[warm:], strict=True))
    ratio = f"{old / new:.1f}: {1e3 * old:.3g} ms to {1e3 * new:.3g} ms"
    fast = None if is_short(cupy) else old / new >= PATH_RATIO
    line("two ranks on one GPU: times as fast", f"at least {PATH_RATIO:g}", ratio, fast)
    line("two ranks on one GPU: route", "staged, or direct where faster", routes_of(staying.layout.routes), None)


def routes_of(routes):
    """Return how long a message of each size takes by each route."""
    if routes is None:
        return "staged"
    times = zip(routes.sizes, zip(*routes.seconds.values(), strict=True), strict=True)
    by = "/".join(routes.seconds)
    return ", ".join(
        f"{size:,} B {'/'.join(f'{1e6 * seconds:.3g}' for seconds in took)} us {by}" for size, took in times
    )


@NEEDS_GPU
def test_kernels_are_as_fast_as_they_should_be(gpu, line, tmp_path):
    numel, repeats = (1 << 22, 5) if QUICK else (1 << 26, 20)
    words = ["--device", "gpu", "--numel", str(numel), "--ratio", "0.001", "--compressor", "topk,sidco"]
    words += ["--repeats", str(repeats), "--json", str(tmp_path / "kernels.json")]
    subprocess.run([sys.executable, "-m", "mpicomp", "bench", "kernels", *words], check=True, capture_output=True)
    rows = {row["name"]: row for row in json.loads((tmp_path / "kernels.json").read_text())["rows"]}
    for name, most in MOST_COPIES.items():
        row = rows[f"{name}.compress"]
        measured = f"{row['behind_copies']:.2f}, {1e3 * row['behind_s']:.3g} ms ({1e3 * row['median_s']:.3g} on an idle"
        holds = None if QUICK else row["behind_copies"] <= most
        line(f"kernels: {name}, in copies", f"at most {most:g}", f"{measured} GPU)", holds)
    ratio, idle = (rows["torch.topk"][key] / rows["topk.compress"][key] for key in ("behind_s", "median_s"))
    holds = None if QUICK else ratio >= TORCH_RATIO
    line("kernels: times torch.topk's speed", f"at least {TORCH_RATIO:g}", f"{ratio:.1f} ({idle:.1f} on an idle GPU)",
         holds)  # fmt: skip
    copied = 8 * rows["memcpy"]["numel"] / rows["memcpy"]["behind_s"]
    line("kernels: memory of the GPU", "as its data sheet says", f"{copied / 1e9:.0f} GB/s", None)


@NEEDS_GPU
@pytest.mark.parametrize("compressor", [mpicomp.Dense(), mpicomp.TopK(ratio=1.0)], ids=str)
def test_streams_of_torch_are_waited_for(compressor, gpu, line):
    torch = pytest.importorskip("torch")
    reducer = mpicomp.Reducer(compressor, comm=LocalWorld(1).transports[0], policy={"warmup": 0})
    stream, wrong = torch.cuda.Stream(), 0
    for step in range(6):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # an exchange that does not wait comes too early
            mean = reducer.reduce({"w": torch.full((1 << 20,), float(step), device="cuda") + 1})["w"]
            wrong += int((mean * 2 != 2 * step + 2).sum())
    line(f"torch: side stream, {compressor.id}", "right values", f"{wrong:,} are wrong", wrong == 0)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    # By name: the collective that "auto" takes, dense ones too, depends on what it has timed.
    ("compressor", "collective"),
    [(mpicomp.Dense(), "allreduce"), (mpicomp.TopK(ratio=0.05), "allgather")],
    ids=str,
)
@pytest.mark.parametrize("where", PLACES)
def test_overlap_with_backward_changes_no_parameter(where, compressor, collective, comm, line):
    torch = pytest.importorskip("torch")
    import mpicomp.torch

    ended, overlaps, kind = [], False, "cuda" if where == "cuda" else "cpu"
    for overlap in (True, False):
        torch.manual_seed(0)
        layers = [part for _ in range(4) for part in (torch.nn.Linear(128, 128), torch.nn.Tanh())]
        model = torch.nn.Sequential(*layers).to(kind)
        optimizer = mpicomp.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compressor, collective,
            comm=comm, overlap=overlap, warmup=0, bucket_bytes=1,  # one for each array, in whatever order they come
        )  # fmt: skip
        for step in range(20 if where == "cuda" and not QUICK else 4):
            inputs = torch.from_numpy(numbers(comm.rank, step, 32 * 128).reshape(32, 128)).to(kind)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        overlaps = overlaps or optimizer.overlaps
        ended.append([parameter.detach().cpu() for parameter in model.parameters()])
        optimizer.close()
    differ = sum(int((one != other).sum()) for one, other in zip(*ended, strict=True))
    measured = f"{differ:,} differ" + ("" if overlaps else ", and nothing overlapped")
    line(f"torch: overlap, {compressor.id}", "same parameters as without", measured, differ == 0 and overlaps)


@NEEDS_GPU
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    ("compressor", "collective"),
    [
        (mpicomp.Dense(), "ring"), (mpicomp.Dense(), "allreduce"), (mpicomp.TopK(ratio=0.01), "allgather"),
        (mpicomp.TopK(ratio=0.01), "oktopk"), (mpicomp.OneBit(block=64), "two-phase"),
    ],
    ids=str,
)  # fmt: skip
def test_routes_direct_and_staged_have_the_same_bits(compressor, collective, comm, gpu, line):
    found = {}
    for route in ROUTES:
        reducer = mpicomp.Reducer(compressor, collective, policy={"warmup": 0}, comm=comm)
        if not reducer.transport.takes_device_memory:
            pytest.skip("this MPI takes no GPU memory")
        for step in range(4):
            if step:  # the first one measures
                reducer.layout.routes = RouteTable.always(route)
            mean = reducer.reduce({"w": gpu.asarray(numbers(comm.rank, step, 20_011 if QUICK else 2_000_003))})["w"]
            found.setdefault(route, []).append(mean.get())
    differ = sum(differing(one, other) for one, other in zip(*found.values(), strict=True))
    line(f"direct route: {compressor.id} by {collective}", "same bits as staged", f"{differ:,} differ", differ == 0)


@NEEDS_GPU
def test_pinned_copies_are_fast_and_exact(gpu, line):
    from cupyx import empty_pinned

    cuda, memory, array = gpu.cuda, empty_pinned(PINNED_BYTES, np.uint8), gpu.zeros(PINNED_BYTES, np.uint8)
    memory[:] = 7
    array[:1].get()
    stream, event = cuda.Stream(non_blocking=True), cuda.Event(disable_timing=True)
    host, there = memory.ctypes.data, array.data.ptr
    copies = {
        "to the GPU": (there, host, PINNED_BYTES, cuda.runtime.memcpyHostToDevice),
        "to the host": (host, there, PINNED_BYTES, cuda.runtime.memcpyDeviceToHost),
    }
    for name, copy in copies.items():
        times = []
        for _ in range(6):
            start = time.perf_counter()
            cuda.runtime.memcpyAsync(*copy, stream.ptr)
            event.record(stream)
            event.synchronize()
            times.append(time.perf_counter() - start)
        if name == "to the GPU":
            memory[:] = 0
        rate = PINNED_BYTES / min(times)
        least = f"at least {PINNED_RATE / 1e9:g} GB/s"
        line(f"pinned copies {name}", least, f"{rate / 1e9:.1f} GB/s", rate >= PINNED_RATE)
    same = bool((memory == 7).all())
    line("pinned copies: bytes", "as they were sent", "the same" if same else "others", same)


def test_large_arrays_are_swept_whole(cupy, line):
    large = 100_003 if isinstance(cupy, fake_cuda.Cupy) else LARGE
    free = LARGE_BYTES if large < LARGE else cupy.cuda.runtime.memGetInfo()[0]
    if free < LARGE_BYTES:
        pytest.skip(f"needs {LARGE_BYTES / 1e9:g} GB of free GPU memory, {free / 1e9:.1f} are")
    gradient, out = (cupy.zeros(large, np.float32) for _ in range(2))
    gradient.fill(1)
    kernels = of(out)
    special = {0: 8.0, large - 6: 4.0, large - 5: 2.0, large - 1: 6.0}  # on both sides of 2**31
    for place, value in special.items():
        out[place] = value
    moments = kernels.accumulate(gradient, out, out)
    counts, energies = cupy.zeros(kernels.BINS, np.int64), cupy.zeros(kernels.BINS, np.float64)
    kernels.spectrum(out, counts, energies)
    rest = large - len(special)
    total, energy = (rest + sum((value + 1) ** power for value in special.values()) for power in (1, 2))
    right = all(float(out[place]) == value + 1 for place, value in special.items())
    right &= int(moments.nonzero) == large
    right &= math.isclose(float(moments.total), total, rel_tol=1e-9)
    right &= math.isclose(float(moments.energy), energy, rel_tol=1e-9)
    line(f"{large:,} elements: accumulate", "all are seen", f"{int(moments.nonzero):,}", right)
    seen, powers = counts.get(), energies.get()
    binned = int(seen.sum()) == large and int(seen.max()) == rest and math.isclose(powers.sum(), energy, rel_tol=1e-4)
    line(f"{large:,} elements: spectrum", "all are seen", f"{int(seen.sum()):,}", binned)


def exchanged_by(exchange, optimizer, model, comm):
    """Return the optimizer with an exchange, gradients in its buckets; "onebit" exchanges changes of parameters."""
    from mpicomp.torch import DistributedOptimizer, UpdateOptimizer

    if exchange == "onebit":
        return UpdateOptimizer(optimizer, model.named_parameters(), 1, mpicomp.OneBit(), warmup=0, comm=comm)
    named = {
        "topk": (mpicomp.TopK(ratio=0.01), "allgather"),
        "sidco": (mpicomp.SIDCo(ratio=0.01), "allgather"),
        "qsgd": (mpicomp.QSGD(bits=4, rounding="nearest"), "two-phase"),
        "dense": (mpicomp.Dense(),),
        "auto": (),
    }[exchange]
    warmup = {} if exchange == "auto" else {"warmup": 0}
    return DistributedOptimizer(
        optimizer, model.named_parameters(), *named, comm=comm, gradient_as_bucket_view=True, **warmup
    )


def bound(limit, unit):
    return "no bound" if limit is None else f"at most {limit:g} {unit}"


def calls_of_ours(step):
    """Return how many Python functions of mpicomp and its kernels a step calls in this thread."""
    count, folders = 0, tuple(os.path.dirname(module.__file__) + os.sep for module in (mpicomp, mpicomp.kernels))

    def see(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(folders)

    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("exchange", STEPS)
@pytest.mark.parametrize("where", PLACES)
def test_numbers_of_a_step(where, exchange, comm, line, tmp_path, monkeypatch):
    """101 million parameters; a step without exchange is timed before, by the same model."""
    torch = pytest.importorskip("torch")
    there, short = where == "cuda", where != "cuda" or QUICK
    width, layers, steps = (64, 2, 4) if short else (2048, 24, 20)
    monkeypatch.setenv("CUPY_CACHE_DIR", comm.bcast(str(tmp_path)))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to("cuda" if there else "cpu")
    numel = sum(parameter.numel() for parameter in model.parameters())
    inputs = torch.from_numpy(numbers(comm.rank, 0, 64 * width).reshape(64, width)).to(model[0].weight.device)
    wait = torch.cuda.synchronize if there else lambda: None
    reserved = torch.cuda.memory_reserved if there else lambda: 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()
        optimizer.step()
        wait()
        return time.perf_counter() - begin

    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0  # ranks stay equal without exchange
    none_s = statistics.median([step() for _ in range(steps)])
    optimizer.param_groups[0]["lr"] = rate
    if there:
        torch.cuda.empty_cache()
    before = reserved()
    optimizer = exchanged_by(exchange, optimizer, model, comm)
    first_s = step()
    for _ in range(60 if exchange == "auto" and not short else 5):  # until plans stay as they are
        step()
    over_ms = 1e3 * (statistics.median([step() for _ in range(steps)]) - none_s)
    calls = calls_of_ours(step) / len(optimizer.reducer.last_step.buckets)
    if there:
        torch.cuda.empty_cache()
    more = (reserved() - before) / (4 * numel)
    ended = [parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()]
    equal = len(set(comm.allgather(hashlib.sha256(b"".join(ended)).hexdigest()))) == 1
    optimizer.close()
    most_ms, most = STEPS[exchange]
    line(f"step: {exchange}", "same parameters on both ranks", "the same" if equal else "others", equal)
    judged = lambda limit, value: None if short or limit is None else value <= limit  # noqa: E731
    line(f"step: {exchange}, over none ({1e3 * none_s:.1f} ms)", bound(most_ms, "ms"), f"{over_ms:.1f} ms",
         judged(most_ms, over_ms))  # fmt: skip
    line(f"step: {exchange}, more memory", bound(most, "gradients"), f"{more:.2f}", judged(most, more))
    line(f"step: {exchange}, our calls a bucket", f"at most {CALLS}", f"{calls:.0f}", judged(CALLS, calls))
    if exchange == "topk":
        holds = judged(FIRST_S, first_s)
        line("step: the first, nothing compiled", f"at most {FIRST_S:g} s", f"{first_s:.2f} s", holds)


@NEEDS_GPU
def test_text_gpt_against_ddp(line, tmp_path):
    words = ["mpiexec", "-n", "2", sys.executable, "-m", "mpicomp", "bench", "training", "--device", "gpu", "--task"]
    words += ["text-gpt", "--exchange", "topk:allgather,ddp", "--json", str(tmp_path / "rows.json")]
    subprocess.run([*words, *(["--steps", "10", "--warm-up", "5"] if QUICK else [])], check=True, capture_output=True)
    rows = {row["exchange"]: row["median_s"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    topk_s, ddp_s = rows["topk:allgather"], rows["ddp"]
    measured = f"{topk_s / ddp_s:.2f}: {1e3 * topk_s:.1f} ms to {1e3 * ddp_s:.1f} ms"
    line("text-gpt: top-k's step over DDP's by gloo", f"at most {TEXT_GPT:g}", measured,
         None if QUICK else topk_s / ddp_s <= TEXT_GPT)  # fmt: skip


def test_short_arrays_in_memory_of_their_own(cupy, line):
    """For compute-sanitizer: each array in separate memory, since a pool hides what is out of bounds."""
    pooled = hasattr(cupy.cuda, "set_allocator")
    if pooled:
        cupy.cuda.set_allocator(None)
    try:
        for compressor in (mpicomp.TopK(ratio=0.01), mpicomp.SIDCo(ratio=0.01)):
            ranks = Ranks(2, compressor, "allgather")
            for step in range(3):
                means = reduced(ranks, [cupy.asarray(numbers(rank, step, 20_011)) for rank in range(2)])
                assert differing(means[0].get(), means[1].get()) == 0
    finally:
        if pooled:
            cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
