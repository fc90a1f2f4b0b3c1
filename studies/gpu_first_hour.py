"""All checks that need a GPU, in ten minutes: ``python studies/gpu_first_hour.py``, once there is one.

Each check runs in a process of its own with a time limit, so that one that crashes or hangs takes no other with it.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpicomp.bench.devices import device_name
from mpicomp.bench.measure import results
from mpicomp.kernels import of
from numpy.typing import NDArray

import mpicomp
from mpicomp.cli import run_program
from mpicomp.cli.options import check_writable
from mpicomp.compressors import Compressor
from mpicomp.places import HOST, RouteTable
from mpicomp.places import driver as places_driver
from mpicomp.system import launcher
from mpicomp.transport import LocalWorld, Transport
from mpicomp.transport.connect import connect
from mpicomp.transport.routes import ROUTES

_STUDY = "gpu_first_hour"
_COLUMNS = {"check": "", "expected": "", "measured": "", "holds": ""}
_ROOT = Path(__file__).resolve().parents[1]
_TOTAL_S = 600.0  # seconds for all checks
_ENDING_S = 5.0  # seconds that a process has to end after it was told to
NO_GPU = 3
"""Exit status where there is no GPU, or no CuPy to use it with."""

_THIRD = 1 / 3  # a factor that is rounded: a product and a sum that are joined then give other bits
_LARGE = 2**31 + 5  # elements that a signed 32-bit index does not reach
_LARGE_BYTES = 40e9  # of memory that are to be free for them
_PINNED_BYTES = 1 << 28
_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_FOUND = 99  # what compute-sanitizer exits with where it has found something

# Bounds that have to hold.
_PINNED_RATE = 5e9  # bytes/s: PCIe 3 with 8 lanes gives more
_TOPK_COPIES, _SIDCO_COPIES = 2.5, 3.0  # copies of the array inside the device's memory
_TORCH_RATIO = 5.0  # times as fast as torch.topk
_PATH_RATIO = 10.0  # times as fast as with gradients that are copied whole
_MORE_BYTES = 64  # over the bus, beside the message
_LAUNCHES = 12  # of our kernels, in a step of one bucket


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes
    ----------
    check, expected, measured : str
        What was looked at, what it should be, and what it was.
    holds : bool or None
        None where nothing was measured, for the reason in ``measured``.
    """

    check: str
    expected: str
    measured: str
    holds: bool | None


@dataclass(frozen=True)
class Setting:
    """What a check works with.

    Attributes
    ----------
    emulated : bool
        Whether the stand-in of the tests takes the place of a GPU.
    quick : bool
        Whether arrays are short.
    cupy : module or None
        CuPy, or what stands in for it; None for checks that start others.
    scratch : Path
        A folder for files.
    job : bool
        Whether this is one of several processes that make the check.
    """

    emulated: bool
    quick: bool
    cupy: Any
    scratch: Path
    job: bool = False

    @property
    def small(self) -> bool:
        """Whether arrays are short."""
        return self.emulated or self.quick


@dataclass(frozen=True)
class Check:
    """One check; it may give several lines.

    Attributes
    ----------
    title, expected : str
        Of the line where it could not be made or did not end.
    run : callable
        Gives the lines.
    limit_s : float
        Seconds that it may take.
    emulated : bool
        Whether it means something without a GPU.
    ranks : int
        Number of processes that it runs in, where there is an mpiexec.
    """

    title: str
    expected: str
    run: Callable[[Setting], list[Line]]
    limit_s: float
    emulated: bool = False
    ranks: int = 1


class _World:
    """A few ranks: all of them in this process, or the processes of this job."""

    def __init__(self, size: int, job: bool = False) -> None:
        self._local: LocalWorld | None = None
        self.ends: list[Transport]
        if job:
            self.ends = [connect(None)]
        else:
            self._local = LocalWorld(size)
            self.ends = list(self._local.transports)
        self.size = size

    @property
    def ranks(self) -> list[int]:
        """Those of this process."""
        return [end.group.rank for end in self.ends]

    def reducers(self, compressor: Compressor, collective: str = "auto", **settings: Any) -> list[mpicomp.Reducer]:
        """Make one for each rank of this process, without a warm-up."""
        return [mpicomp.Reducer(compressor, collective, comm=end, warmup=0, **settings) for end in self.ends]

    def reduce(self, reducers: Sequence[mpicomp.Reducer], given: Sequence[Any], scale: float = 1.0) -> list[Any]:
        """Average one array of each rank; return the means of the ranks of this process."""
        pairs = zip(reducers, given, strict=True)
        if self._local is None:
            return [reducer.reduce({"w": own}, scale=scale)["w"] for reducer, own in pairs]
        rounds = [reducer.rounds({"w": own}, scale=scale) for reducer, own in pairs]
        return [means["w"] for means in self._local.run(rounds)]

    def sum(self, own: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return the sum of one array of each rank."""
        summed: NDArray[np.float64] = self.reduce(self.reducers(mpicomp.Dense()), own)[0] * self.size
        return summed


def _numbers(rank: int, step: int, numel: int) -> NDArray[np.float32]:
    return np.random.default_rng([rank, step]).standard_normal(numel, np.float32)


def _place(reducer: mpicomp.Reducer) -> Any:
    """Return where a reducer's first bucket lives."""
    return reducer._core.layout.buckets[0].place


def _on_device(reducers: Sequence[mpicomp.Reducer]) -> bool:
    return all(_place(reducer) is not HOST for reducer in reducers)


def _wait(array: Any) -> None:
    """Wait until an array is there, and all that was put into the current stream before it."""
    array[:1].get()


# Checks, in the order in which they are made: what is looked at first when the time runs out is what matters most.


def look_at_job(setting: Setting) -> list[Line]:
    """Ask the doctor."""
    command = [sys.executable, "-m", "mpicomp", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        said = _last(done.stderr) or f"status {done.returncode}"
        return [Line("doctor", "a report", said, False)]
    gpus, aware = report["gpus"] or ["none"], report["cuda_aware"] or {"value": False, "reason": ""}
    verdict = "yes" if aware["value"] else "no"
    seen = gpus[0] != "none"
    return [
        Line("doctor: GPU", "one for this rank", gpus[0], None if setting.emulated and not seen else seen),
        Line("doctor: CUDA-aware MPI", "yes or no, and why", f"{verdict}: {aware['reason']}", bool(aware["reason"])),
    ]


def compare_bits(setting: Setting) -> list[Line]:
    """Compare the means of ranks on the GPU with those of ranks on the host, by a factor that is rounded."""
    numel = 20_011 if setting.small else 2_000_003
    lines = []
    for compressor in (mpicomp.TopK(ratio=0.1), mpicomp.OneBit(block=1024), mpicomp.Dense()):
        differ = seen = 0
        on_device = True
        # Scaled gradients, and a mean over three.
        for size, scale in ((2, _THIRD), (3, 1.0)):
            world, alike = _World(size), _World(size)
            mixed, hosts = world.reducers(compressor), alike.reducers(compressor)
            for step in range(3):
                given = [_numbers(rank, step, numel) for rank in range(size)]
                there = [given[0], *map(setting.cupy.asarray, given[1:])]
                expected = alike.reduce(hosts, given, scale)[0].view(np.uint32)
                for mean in world.reduce(mixed, there, scale):
                    found = mean if isinstance(mean, np.ndarray) else mean.get()
                    differ += int(np.count_nonzero(found.view(np.uint32) != expected))
                    seen += numel
            on_device = on_device and _on_device(mixed[1:])
        where = "" if on_device else ", not on the GPU"
        lines.append(
            Line(f"bits: {compressor.id}", "same on host and GPU", f"{differ:,} of {seen:,} differ{where}",
                 differ == 0 and on_device)
        )  # fmt: skip
    return lines


def count_bytes(setting: Setting) -> list[Line]:
    """Count what crosses the bus in a step, what the host waits for, and what is launched."""
    launched = _counted(setting.cupy)
    numel, size = 40_000 if setting.small else 1_000_000, 2
    lines = []
    for compressor, collective in ((mpicomp.TopK(ratio=0.01), "allgather"), (mpicomp.Dense(), "allreduce")):
        world = _World(size)
        reducers = world.reducers(compressor, collective)
        for step in range(4):
            given = [setting.cupy.asarray(_numbers(rank, step, numel)) for rank in world.ranks]
            places = [_place(reducer) for reducer in reducers] if step else []
            before = [(place.to_host_bytes, place.from_host_bytes, place.reads) for place in places]
            launched.clear()
            world.reduce(reducers, given)
        if not _on_device(reducers):
            lines.append(Line(f"bytes: {compressor.id}", "on the GPU", "on the host", False))
            continue
        after = [(place.to_host_bytes, place.from_host_bytes, place.reads) for place in places]
        up, down, reads = (new - old for new, old in zip(after[0], before[0], strict=True))
        record = reducers[0].last_step
        assert record is not None
        sent = record.buckets[0].sent_bytes
        messages = size * sent if compressor.id == "topk" else sent
        ours = (
            bool(launched) or not setting.emulated
        )  # without a compiler the stand-in has the host's kernels, which tell more numbers
        lines += [
            Line(f"bytes: {compressor.id}, to the host", f"{sent:,} to {sent + _MORE_BYTES:,}", f"{up:,}",
                 sent <= up <= sent + _MORE_BYTES if ours else None),
            Line(f"bytes: {compressor.id}, to the GPU", f"{messages:,}", f"{down:,}", down == messages),
        ]  # fmt: skip
        if compressor.id == "topk":
            number = len(launched) / size
            lines += [
                Line(
                    "numbers that the host waits for: topk", "at most 1 read", f"{reads}", reads <= 1 if ours else None
                ),
                Line("launches: topk", f"at most {_LAUNCHES}", f"{number:g}", number <= _LAUNCHES if ours else None),
            ]
    return lines


def compare_paths(setting: Setting) -> list[Line]:
    """Time two ranks on one GPU, with gradients that are copied whole and with gradients that stay there."""
    cupy, world = setting.cupy, _World(2, setting.job)
    numel, steps, warm = (100_000, 3, 2) if setting.small else (25_600_000, 10, 5)
    pools = [[_numbers(rank, step, numel) for step in range(2)] for rank in world.ranks]
    there = [[cupy.asarray(own) for own in pool] for pool in pools]
    whole, staying = (world.reducers(mpicomp.TopK(ratio=0.01), "allgather") for _ in range(2))
    seconds: dict[str, list[float]] = {"whole": [], "staying": []}
    summed, differ = np.zeros(numel), 0
    for step in range(warm + steps):
        arrays = [pool[step % 2] for pool in there]
        start = time.perf_counter()
        means = world.reduce(whole, [array.get() for array in arrays])
        copied = [cupy.asarray(mean) for mean in means]
        _wait(copied[-1])
        between = time.perf_counter()
        found = world.reduce(staying, arrays)
        _wait(found[-1])
        end = time.perf_counter()
        if step >= warm:
            seconds["whole"].append(between - start)
            seconds["staying"].append(end - between)
        for own, expected in zip(found, copied, strict=True):
            host = own.get()
            differ += int(np.count_nonzero(host.view(np.uint32) != expected.get().view(np.uint32)))
        summed += host
    done = warm + steps
    times = [(done + 1) // 2, done // 2]
    given = world.sum([_weighted(pool, times) for pool in pools])
    left = world.sum([reducer.residual("w").astype(np.float64) for reducer in staying])
    lost = float(np.abs(given - world.size * summed - left).max())
    room = 8 * done * world.size * float(np.finfo(np.float32).eps) * float(np.abs(given).max())
    old, new = (statistics.median(own) for own in seconds.values())
    said = f"{old / new:.1f}: {1e3 * old:.3g} ms to {1e3 * new:.3g} ms"
    fast = old / new >= _PATH_RATIO
    routes = getattr(_place(staying[0]), "routes", None)
    told = "staged" if routes is None else ", ".join(_times(routes, place) for place in range(len(routes.sizes)))
    return [
        Line("two ranks on one GPU: means", "same bits as with whole copies", f"{differ:,} differ",
             differ == 0 and _on_device(staying)),
        Line("two ranks on one GPU: nothing is lost", f"at most {room:.2g}", f"{lost:.2g}", lost <= room),
        Line("two ranks on one GPU: times as fast", f"at least {_PATH_RATIO:g}",
             f"{said} (of a stand-in)" if setting.emulated else said, None if setting.small else fast),
        Line("two ranks on one GPU: route", "staged, or direct where faster", told, True),
    ]  # fmt: skip


def _times(routes: RouteTable, place: int) -> str:
    """Return how long a message of each size takes by each route."""
    own = "/".join(f"{1e6 * seconds[place]:.3g}" for seconds in routes.seconds.values())
    return f"{routes.sizes[place]:,} B {own} us {'/'.join(routes.seconds)}"


def _weighted(pool: Sequence[NDArray[np.float32]], times: Sequence[int]) -> NDArray[np.float64]:
    """Return the sum of arrays that were given so many times."""
    total = np.zeros(pool[0].size)
    for own, count in zip(pool, times, strict=True):
        total += count * own.astype(np.float64)
    return total


def time_kernels(setting: Setting) -> list[Line]:
    """Time kernels against a copy in the device's memory and against torch."""
    path = setting.scratch / "kernels.json"
    numel, repeats = (1 << 22, 5) if setting.quick else (1 << 26, 20)
    words = ["--device", "gpu", "--numel", str(numel), "--ratio", "0.001", "--compressor", "topk,sidco"]
    command = [sys.executable, "-m", "mpicomp", "bench", "kernels", *words, "--repeats", str(repeats)]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return [Line("bench kernels", "ends well", _last(done.stderr) or f"status {done.returncode}", False)]
    return lines_of_kernels(json.loads(path.read_text())["rows"], setting.quick)


def lines_of_kernels(rows: Sequence[Mapping[str, Any]], quick: bool = False) -> list[Line]:
    """Judge the rows of ``bench kernels --device gpu``; not their speed where arrays are short."""
    found = {row["name"]: row for row in rows}
    lines = []
    for name, most in (("topk", _TOPK_COPIES), ("sidco", _SIDCO_COPIES)):
        row = found[f"{name}.compress"]
        holds = None if quick else row["behind_copies"] <= most
        said = (
            f"{row['behind_copies']:.2f}, {1e3 * row['behind_s']:.3g} ms ({1e3 * row['median_s']:.3g} on an idle GPU)"
        )
        lines.append(Line(f"kernels: {name}, in copies", f"at most {most:g}", said, holds))
    rival = found.get("torch.topk")
    if rival is None:
        lines.append(
            Line("kernels: times torch.topk's speed", f"at least {_TORCH_RATIO:g}", "needs torch for CUDA", None)
        )
    else:
        ratio, idle = (rival[time] / found["topk.compress"][time] for time in ("behind_s", "median_s"))
        holds = None if quick else ratio >= _TORCH_RATIO
        said = f"{ratio:.1f} ({idle:.1f} on an idle GPU)"
        lines.append(Line("kernels: times torch.topk's speed", f"at least {_TORCH_RATIO:g}", said, holds))
    copied = 8 * found["memcpy"]["numel"] / found["memcpy"]["behind_s"]
    lines.append(Line("kernels: memory of the GPU", "as its data sheet says", f"{copied / 1e9:.0f} GB/s", True))
    return lines


def follow_streams(setting: Setting) -> list[Line]:
    """Hand over what torch makes in a stream of its own, and use the mean there at once."""
    title, expected = "torch: side stream", "right values"
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return [Line(title, expected, "needs torch for CUDA", None)]
    lines = []
    for compressor in (mpicomp.Dense(), mpicomp.TopK(ratio=1.0)):
        reducer = mpicomp.Reducer(compressor, comm=LocalWorld(1).transports[0], warmup=0)
        stream, wrong = torch.cuda.Stream(), 0
        for step in range(6):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # whoever does not wait comes too early
                mean = reducer.reduce({"w": torch.full((1 << 20,), float(step), device="cuda") + 1})["w"]
                wrong += int((mean * 2 != 2 * step + 2).sum())
        lines.append(Line(f"{title}, {compressor.id}", expected, f"{wrong:,} are wrong", wrong == 0))
    return lines


def overlap_with_backward(setting: Setting) -> list[Line]:
    """Train a small model on two ranks, with gradients that travel during backward and after it."""
    title, expected = "torch: overlap", "same parameters as without"
    torch, world = _torch(), _World(2, setting.job)
    if torch is None or not (setting.emulated or torch.cuda.is_available()):
        return [Line(title, expected, "needs torch for CUDA", None)]
    if len(world.ends) > 1:
        return [Line(title, expected, "needs mpiexec", None)]
    importlib.import_module("mpicomp.torch")
    device = "cpu" if setting.emulated else "cuda"
    [end], steps = world.ends, 4 if setting.small else 20
    lines = []
    # Collectives by name: which one "auto" takes, dense ones too, depends on what it has timed.
    for compressor, collective in ((mpicomp.Dense(), "allreduce"), (mpicomp.TopK(ratio=0.05), "allgather")):
        ended, overlaps = [], False
        for overlap in (True, False):
            torch.manual_seed(0)
            layers = [part for _ in range(4) for part in (torch.nn.Linear(128, 128), torch.nn.Tanh())]
            model = torch.nn.Sequential(*layers).to(device)
            optimizer = mpicomp.torch.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compressor, collective,
                comm=end, overlap=overlap, warmup=0, bucket_bytes=1,  # one for each array, in whatever order they come
            )  # fmt: skip
            for step in range(steps):
                inputs = torch.from_numpy(_numbers(end.group.rank, step, 32 * 128).reshape(32, 128)).to(device)
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            overlaps = overlaps or optimizer.overlaps
            ended.append([own.detach().cpu() for own in model.parameters()])
            optimizer.close()
        differ = sum(int((one != other).sum()) for one, other in zip(*ended, strict=True))
        said = f"{differ:,} differ" + ("" if overlaps else ", and nothing overlapped")
        lines.append(Line(f"{title}, {compressor.id}", expected, said, differ == 0 and overlaps))
    return lines


def compare_routes(setting: Setting) -> list[Line]:
    """Send the same by way of pinned memory and with pointers to the GPU, and time both."""
    title, expected = "direct route", "same bits as staged"
    world = _World(2, setting.job)
    if len(world.ends) > 1:
        return [Line(title, expected, "needs mpiexec", None)]
    if not world.ends[0].takes_device_memory:
        return [Line(title, expected, "this MPI takes no GPU memory", None)]
    numel = 20_011 if setting.small else 2_000_003
    lines = []
    for compressor, collective in (
        (mpicomp.Dense(), "ring"), (mpicomp.Dense(), "allreduce"), (mpicomp.TopK(ratio=0.01), "allgather"),
        (mpicomp.TopK(ratio=0.01), "gtopk"), (mpicomp.OneBit(block=64), "two-phase"),
    ):  # fmt: skip
        found: dict[str, list[NDArray[np.uint32]]] = {}
        for route in ROUTES:
            [reducer] = world.reducers(compressor, collective)
            found[route] = []
            for step in range(4):
                if step:  # the first one measures
                    _place(reducer).routes = RouteTable.always(route)
                there = setting.cupy.asarray(_numbers(world.ranks[0], step, numel))
                found[route] += [mean.get().view(np.uint32) for mean in world.reduce([reducer], [there])]
        differ = sum(int(np.count_nonzero(one != other)) for one, other in zip(*found.values(), strict=True))
        named = f"{title}: {compressor.id} by {collective}"
        lines.append(Line(named, expected, f"{differ:,} differ", differ == 0))
    return lines


def time_pinned(setting: Setting) -> list[Line]:
    """Time copies between pinned memory and the GPU."""
    driver = places_driver.driver()
    assert driver is not None
    memory, array = driver.pinned(_PINNED_BYTES), setting.cupy.zeros(_PINNED_BYTES, np.uint8)
    memory[:] = 7
    _wait(array)
    stream, event, lines = driver.stream(0), driver.event(0), []
    host, there = memory.ctypes.data, array.data.ptr
    copies = {
        "to the GPU": functools.partial(driver.send, 0, there, host),
        "to the host": functools.partial(driver.fetch, 0, host, there),
    }
    for name, copy in copies.items():
        times = []
        for _ in range(6):
            start = time.perf_counter()
            copy(_PINNED_BYTES, stream)
            driver.record(0, event, stream)
            driver.wait(0, event)
            times.append(time.perf_counter() - start)
        if name == "to the GPU":
            memory[:] = 0
        rate = _PINNED_BYTES / min(times)
        least = f"at least {_PINNED_RATE / 1e9:g} GB/s"
        lines.append(Line(f"pinned copies {name}", least, f"{rate / 1e9:.1f} GB/s", rate >= _PINNED_RATE))
    same = bool((memory == 7).all())
    return [*lines, Line("pinned copies: bytes", "as they were sent", "the same" if same else "others", same)]


def sweep_large(setting: Setting) -> list[Line]:
    """Sweep over more elements than a signed 32-bit index reaches."""
    title, expected, cupy = f"{_LARGE:,} elements", "all are seen", setting.cupy
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < _LARGE_BYTES:
        said = f"needs {_LARGE_BYTES / 1e9:g} GB of free GPU memory, {free / 1e9:.1f} are"
        return [Line(title, expected, said, None)]
    gradient, out = (cupy.zeros(_LARGE, np.float32) for _ in range(2))
    gradient.fill(1)
    kernels = of(out)
    special = {0: 8.0, _LARGE - 6: 4.0, _LARGE - 5: 2.0, _LARGE - 1: 6.0}  # on both sides of 2**31
    for place, value in special.items():
        out[place] = value
    moments = kernels.accumulate(gradient, out, out)
    counts, energies = cupy.zeros(kernels.BINS, np.int64), cupy.zeros(kernels.BINS, np.float64)
    kernels.spectrum(out, counts, energies)
    rest = _LARGE - len(special)
    total, energy = (
        rest + sum(own + 1 for own in special.values()),
        rest + sum((own + 1) ** 2 for own in special.values()),
    )
    right = [
        all(float(out[place]) == value + 1 for place, value in special.items()),
        int(moments.nonzero) == _LARGE,
        math.isclose(float(moments.total), total, rel_tol=1e-9),
        math.isclose(float(moments.energy), energy, rel_tol=1e-9),
    ]
    seen, powers = counts.get(), energies.get()
    binned = [int(seen.sum()) == _LARGE, int(seen.max()) == rest, math.isclose(powers.sum(), energy, rel_tol=1e-4)]
    return [
        Line(f"{title}: accumulate", expected, f"{int(moments.nonzero):,}", all(right)),
        Line(f"{title}: spectrum", expected, f"{int(seen.sum()):,}", all(binned)),
    ]


def sanitize(setting: Setting, tool: str) -> list[Line]:
    """Have compute-sanitizer watch top-k and SIDCo on a short array."""
    title, expected = f"compute-sanitizer: {tool}", "no error"
    sanitizer = _sanitizer()
    if sanitizer is None:
        return [Line(title, expected, "not installed", None)]
    words = [sanitizer, "--tool", tool, "--error-exitcode", str(_FOUND)]
    program = [sys.executable, str(Path(__file__).resolve()), "--check", "short", "--scratch", str(setting.scratch)]
    done = subprocess.run([*words, *program], capture_output=True, text=True, check=False)
    summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
    said = summary[-1].strip("= ") if summary else _last(done.stderr or done.stdout)
    return [Line(title, expected, f"{said} (status {done.returncode})", done.returncode == 0)]


def find_planted(setting: Setting) -> list[Line]:
    """Have compute-sanitizer watch a kernel that writes where it must not: whether its silence means anything."""
    title, expected = "compute-sanitizer: a planted fault", "found"
    sanitizer = _sanitizer()
    if sanitizer is None:
        return [Line(title, expected, "not installed", None)]
    words = [sanitizer, "--tool", "memcheck", "--error-exitcode", str(_FOUND)]
    program = [sys.executable, str(Path(__file__).resolve()), "--check", "fault", "--scratch", str(setting.scratch)]
    status = subprocess.run([*words, *program], capture_output=True, check=False).returncode
    return [Line(title, expected, "found" if status == _FOUND else f"status {status}", status == _FOUND)]


def run_fault(setting: Setting) -> list[Line]:
    """Write behind the end of an array, in a kernel."""
    cupy = setting.cupy
    cupy.cuda.set_allocator(None)
    code = 'extern "C" __global__ void f(float* array) { array[threadIdx.x * 4096] = 1; }'
    cupy.RawModule(code=code).get_function("f")((1,), (32,), (cupy.zeros(64, np.float32),))
    cupy.cuda.Device().synchronize()
    return []


def run_short(setting: Setting) -> list[Line]:
    """Run top-k and SIDCo on a short array, each array in memory of its own: a pool hides what is out of bounds."""
    if not setting.emulated:
        setting.cupy.cuda.set_allocator(None)
    world = _World(2)
    for compressor in (mpicomp.TopK(ratio=0.01), mpicomp.SIDCo(ratio=0.01)):
        reducers = world.reducers(compressor, "allgather")
        for step in range(3):
            world.reduce(reducers, [setting.cupy.asarray(_numbers(rank, step, 20_011)) for rank in world.ranks])
    return []


def run_tests(setting: Setting) -> list[Line]:
    """Run the tests of kernels, on the GPU or in the emulation."""
    title, kind = "tests/gpu", "emulated" if setting.emulated else "device"
    files = ["tests/gpu/test_pieces.py"] if setting.small else ["tests/gpu"]
    several = ["-n", "8"] if importlib.util.find_spec("xdist") is not None and not setting.small else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *several, *files]
    command += ["-k", f"[{kind} or -{kind}"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    last = _last(done.stdout) or _last(done.stderr)
    return [Line(title, "all pass", last.strip("= "), done.returncode == 0 and " passed" in last)]


CHECKS: dict[str, Check] = {
    "doctor": Check("doctor", "a GPU, and whether MPI takes its memory", look_at_job, 90, emulated=True),
    "bits": Check("bits", "same on host and GPU", compare_bits, 90, emulated=True),
    "bytes": Check("bytes over the bus", "the messages", count_bytes, 60, emulated=True),
    "paths": Check("two ranks on one GPU", "as fast as it should be", compare_paths, 150, emulated=True, ranks=2),
    "kernels": Check("kernels", "as fast as they should be", time_kernels, 120),
    "streams": Check("torch: side stream", "right values", follow_streams, 60),
    "overlap": Check("torch: overlap", "same as without", overlap_with_backward, 90, emulated=True, ranks=2),
    "routes": Check("direct route", "same bits as staged", compare_routes, 60, ranks=2),
    "pinned": Check("pinned copies", f"at least {_PINNED_RATE / 1e9:g} GB/s", time_pinned, 60),
    "large": Check(f"{_LARGE:,} elements", "all are seen", sweep_large, 60),
    **{
        tool: Check(f"compute-sanitizer: {tool}", "no error", functools.partial(sanitize, tool=tool), 60)
        for tool in _TOOLS
    },
    "planted": Check("compute-sanitizer: a planted fault", "found", find_planted, 60),
    "tests": Check("tests/gpu", "all pass", run_tests, 240, emulated=True),
}
"""By name, in their order."""

_WATCHED = {"short": run_short, "fault": run_fault}  # what compute-sanitizer watches
_BARE = {
    "doctor",
    "kernels",
    "tests",
    "planted",
    *_TOOLS,
}  # checks that start other processes, and use no GPU themselves


def _torch() -> Any:
    return importlib.import_module("torch") if importlib.util.find_spec("torch") is not None else None


def _sanitizer() -> str | None:
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [os.environ.get("PATH", ""), *(str(Path(home) / "bin") for home in homes if home), "/usr/local/cuda/bin"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _cause(text: str) -> str:
    """Return the line of an error, or the last line where none looks like one."""
    errors = [line.strip() for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors[-1] if errors else _last(text))[:100]


class _Counted:
    """A module of kernels that notes what is launched."""

    def __init__(self, module: Any, launched: list[str]) -> None:
        self._module, self._launched = module, launched

    def get_function(self, name: str) -> Callable[..., Any]:
        """Return a kernel."""
        kernel = self._module.get_function(name)

        def launch(*arguments: Any) -> Any:
            self._launched.append(name)
            return kernel(*arguments)

        return launch


def _counted(cupy: Any) -> list[str]:
    """Return a list that gets the name of each of our kernels when it is launched; none may have been before."""
    launched: list[str] = []
    make = cupy.RawModule
    cupy.RawModule = lambda *args, **settings: _Counted(make(*args, **settings), launched)
    return launched


class _Patch:
    """Puts the stand-in in its place, for as long as this process lives; tests have pytest's monkeypatch for it."""

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        setattr(owner, name, value)

    def setitem(self, owner: Any, name: Any, value: Any) -> None:
        """Set an item."""
        owner[name] = value


def _stand_in(scratch: Path) -> Any:
    """Return the stand-in for CuPy, with kernels in an emulation where there is a compiler for it."""
    sys.path.insert(0, str(_ROOT / "tests"))
    device: Any = importlib.import_module("gpu.device")
    standin: Any = importlib.import_module("gpu.standin")
    emulated = shutil.which(standin.COMPILER) is not None and platform.machine() in ("x86_64", "AMD64")
    standin.folder = scratch
    return device.install(_Patch(), emulated=emulated)


def _describe() -> list[Line]:
    """Return the name of the GPU; nothing where there is none."""
    driver = places_driver.driver()
    if driver is None or not driver.count():
        return []
    if importlib.util.find_spec("cupy") is None:
        return [Line("CuPy", "installed", "not installed; pip install 'mpicomp[cuda12]' or 'mpicomp[cuda13]'", False)]
    return [Line("GPU", "one", device_name("gpu_first_hour"), True)]


def _run_child(arguments: argparse.Namespace) -> int:
    """Make one check in this process."""
    scratch, name = Path(arguments.scratch), arguments.check
    if name == "look":
        lines = _describe()
    else:
        cupy = None
        if name not in _BARE:
            cupy = _stand_in(scratch) if arguments.emulated else importlib.import_module("cupy")
        setting = Setting(arguments.emulated, arguments.quick, cupy, scratch, arguments.job)
        lines = (_WATCHED.get(name) or CHECKS[name].run)(setting)
    launch = launcher.detect()
    if launch is None or launch.rank == 0:
        (scratch / f"{name}.lines").write_text(json.dumps([asdict(line) for line in lines]))
    return 0


def _children(
    name: str, check: Check, arguments: argparse.Namespace, scratch: Path, limit_s: float
) -> tuple[list[Line], str | None]:
    """Make a check in processes of its own; return its lines, and why it did not come to its end."""
    words = [sys.executable, str(Path(__file__).resolve()), "--check", name, "--scratch", str(scratch)]
    words += [f"--{flag}" for flag in ("emulated", "quick") if getattr(arguments, flag)]
    mpiexec = Path(sys.executable).parent / "mpiexec"
    found = str(mpiexec) if os.access(mpiexec, os.X_OK) else shutil.which("mpiexec")
    if check.ranks > 1 and found is not None:
        words = [found, "-n", str(check.ranks), *words, "--job"]
    more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    path, log = scratch / f"{name}.lines", scratch / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=os.environ | more,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return [], f"no end after {limit_s:.0f} s"
        finally:
            _end(process)
    if status != 0 or not path.exists():
        return [], f"{_how(status)}: {_cause(log.read_text(errors='replace'))}"
    return [Line(**line) for line in json.loads(path.read_text())], None


def _how(status: int) -> str:
    return f"status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that may still run, and all that it has started."""
    if process.poll() is None:
        process.terminate()  # a launcher then ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(arguments: argparse.Namespace, scratch: Path, begin: float) -> Iterator[Line]:
    """Make all checks, one after the other."""
    for name, check in CHECKS.items():
        if arguments.emulated and not check.emulated:
            yield Line(check.title, check.expected, "needs a GPU", None)
            continue
        left_s = _TOTAL_S - (time.monotonic() - begin)
        if left_s < 1:
            yield Line(check.title, check.expected, f"not begun: {_TOTAL_S:.0f} s are over", False)
            continue
        start = time.monotonic()
        lines, problem = _children(name, check, arguments, scratch, min(check.limit_s, left_s))
        print(f"{_STUDY}: {check.title}, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        yield from lines
        if problem is not None:
            yield Line(check.title, check.expected, problem, False)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog=f"studies/{_STUDY}.py", description="make all checks that need a GPU")
    made.add_argument("--quick", action="store_true", help="short arrays: no time is judged")
    made.add_argument("--emulated", action="store_true", help="without a GPU: a stand-in, for what makes sense with it")
    made.add_argument("--json", metavar="F", help="write the lines to F as one JSON object")
    made.add_argument("--check", choices=[*CHECKS, "look", *_WATCHED], help=argparse.SUPPRESS)
    made.add_argument("--scratch", help=argparse.SUPPRESS)
    made.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    return made


def _parse() -> argparse.Namespace:
    arguments = parser().parse_args()
    arguments.alone = arguments.check is None
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """Make the checks, print the table, and return the exit status."""
    if arguments.check is not None:
        return _run_child(arguments)
    if arguments.json is not None:
        check_writable(_STUDY, arguments.json)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mpicomp-study-", ignore_cleanup_errors=True) as folder:
        scratch, device = Path(folder), "a stand-in"
        if not arguments.emulated:
            seen, problem = _children("look", Check("GPU", "one", lambda setting: [], 60), arguments, scratch, 60)
            if problem is not None or not seen or not seen[0].holds:
                why = problem or (f"CuPy is {seen[0].measured}" if seen else "there is none here")
                print(f"{_STUDY}: no GPU to use: {why}; --emulated tries this script without one", flush=True)
                return NO_GPU
            device = seen[0].measured
        print(f"{_STUDY}: {device}", flush=True)
        lines = list(_lines(arguments, scratch, begin))
    words = {True: "yes", False: "no", None: "-"}
    results.show([asdict(line) | {"holds": words[line.holds]} for line in lines], _COLUMNS)
    failed = sum(line.holds is False for line in lines)
    print(f"{_STUDY}: {sum(line.holds is True for line in lines)} hold, {failed} do not, ", end="")
    print(
        f"{sum(line.holds is None for line in lines)} were not looked at; {time.monotonic() - begin:.0f} s", flush=True
    )
    if arguments.json is not None:
        results.write(arguments.json, [asdict(line) for line in lines], 1, device)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_program(_parse, run))
