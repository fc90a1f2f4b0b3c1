"""A training on networks that are not here: reads a job, forecasts its exchanges, and recommends one."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpicomp.bench.measure.results import show

from mpicomp.cost import CostModel, Network
from mpicomp.errors import ConfigurationError
from mpicomp.forecast import Forecast, Forecaster, Job, fastest_dense, recommended
from mpicomp.mpi.rounds import WORLD, Group, layout_groups

SCHEMA = 1
PAYLOAD = 0.95  # of the bits of a link, without headers
COLUMNS = {
    "exchange": "", "plan": "", "step_s": ".4g", "throughput": ".0%", "host_MB": ".4g", "steps": "", "quality_s": ".4g",
}  # fmt: skip
_GROWTH = {
    "allgather": "bytes of allgather", "packed-allgather": "bytes of packed-allgather", "ring": "latencies of rings",
    "two-phase": "messages to the owners of two-phase", "scatter-reduce": "messages to the owners of scatter-reduce",
}  # fmt: skip
_FASTER = (0.1, 0.2, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 200, 400, 800)  # Gbit/s of links to buy
_MEASURED_RANKS, _MEASURED_BITS = 4, (50e6, 2.5e9)  # of docs/choosing.md
_VOCABULARY, _HEAD = 50257, 64  # of GPT-2; width over layers
_BACKWARD = 0.6  # of a step


@dataclass(frozen=True)
class Links:
    """A network: ``bits`` a second of a host's link, and its latency; or a cost model that was measured."""

    hosts: int
    ppn: int
    bits: float
    latency_s: float
    measured: Network | None = None

    @property
    def group(self) -> Group:
        return layout_groups([host for host in range(self.hosts) for _ in range(self.ppn)], 0)[0]

    @property
    def network(self) -> Network:
        if self.measured is not None:
            return self.measured
        network = Network(self.hosts)
        network.set_link(WORLD, max(1e-9, self.latency_s), 8 / (PAYLOAD * self.bits), 0.1)
        return network

    def __str__(self) -> str:
        ranks = f" of {self.ppn} ranks" if self.ppn > 1 else ""
        return f"{self.hosts} hosts{ranks}, {bits_in_words(self.bits)}, {1e6 * self.latency_s:.3g} us"


def bits_in_words(bits: float) -> str:
    """Return a bandwidth in the unit that people use.

    >>> bits_in_words(2.5e9), bits_in_words(5e7)
    ('2.5 Gbit/s', '50 Mbit/s')
    """
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def read_links(path: str, hosts: Sequence[int], ppn: int) -> list[Links]:
    """Return networks of the links that ``bench collectives --calibrate`` measured."""
    network = CostModel.load(path).network
    if network.hosts < 2:
        raise ConfigurationError(f"plan: '{path}' was measured on one host, and has no link between hosts")
    return [Links(count, ppn, 8 / network.seconds_per_byte, network.latency, network) for count in hosts]


def read_job(path: str, steps: int | None) -> tuple[Job, bool]:
    """Return the job in a file of ``mpicomp train --json`` or ``MPICOMP_PLAN``, and whether all of it was measured."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if "sizes" in content:
            return Job.from_json(content | ({} if steps is None else {"steps": steps})), True
        phases = content["phases_s"]
        seconds = float(phases["compute"] + phases["update"] + phases["other"])
        return gpt_job(int(content["parameters"]), seconds, steps or int(content["steps"]), "cpu"), False
    except OSError as error:
        raise ConfigurationError(f"plan: '{path}' cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"plan: '{path}' has no timings that this mpicomp can read ({type(error).__name__}: {error}); write one "
            "with `mpicomp train --json FILE`, or run 30 steps of your script with MPICOMP_PLAN=FILE"
        ) from None


def gpt_job(parameters: int, step_s: float, steps: int | None = None, device: str = "cuda") -> Job:
    """Return a job with the layers of a GPT, in whose backward gradients are ready at a steady pace."""
    layers = max(1, round((parameters / (12 * _HEAD**2)) ** (1 / 3)))
    embedding = min(_VOCABULARY * _HEAD * layers, parameters * 3 // 10)
    width = math.isqrt((parameters - embedding) // (12 * layers))
    sizes = [4 * width**2, 4 * width**2, width**2, 3 * width**2] * layers
    ready_s = [_BACKWARD * step_s * ((place + 1) / len(sizes) - 1) for place in range(len(sizes))]
    hidden, rest = sum(sizes) / parameters, parameters - sum(sizes)
    return Job([*sizes, rest], [*ready_s, 0.0], step_s, None, hidden, steps or 1000, device=device)


def task_job(name: str, steps: int | None) -> Job:
    """Return the job of a task, of which some steps are trained here on one rank."""
    from mpicomp.bench.tasks import get_task
    from mpicomp.bench.trainer import MpicompReplica, train

    from mpicomp.mpi import LocalWorld
    from mpicomp.torch.plan_recorder import STEPS, PlanRecorder

    task = get_task(name)
    [alone] = LocalWorld(1).transports
    replica = MpicompReplica(task, alone, STEPS, compressor="dense")
    recorder = PlanRecorder(replica.optimizer, dict(replica.model.named_parameters()), normalises=True)
    train(task, replica, range(STEPS), lambda *_: None)
    assert recorder.job is not None
    return Job.from_json(recorder.job.to_json() | {"steps": steps or task.steps})


def plan(job: Job, links: Links, is_measured: bool) -> dict[str, Any]:
    """Return the forecasts of all exchanges on a network, the recommended one, and why."""
    rows = Forecaster(job, links.network, links.group).all()
    best = recommended(rows)
    return {
        "hosts": links.hosts, "ppn": links.ppn, "bits": links.bits, "latency_s": links.latency_s,
        "rows": [asdict(row) for row in rows], "recommended": best.exchange, "reason": _reason(rows, best),
        "faster": list(_faster(job, links, best)), "notes": list(_notes(links, rows, is_measured)),
    }  # fmt: skip


def _reason(rows: Sequence[Forecast], best: Forecast) -> str:
    dense = fastest_dense(rows)
    if best is dense:
        return (
            f"dense exchange is best here: {dense.exchange} leaves {dense.throughput:.0%} of the throughput, and "
            "nothing is faster by 3 % in a step and to a quality"
        )
    assert best.quality_s is not None
    assert dense.quality_s is not None
    text = (
        f"take {best.exchange} ({best.plan}): a step takes {best.step_s:.3g} s in place of {dense.step_s:.3g} with "
        f"{dense.exchange}, and dense's quality {best.quality_s / dense.quality_s:.2f} of its time"
    )
    if best.exchange.startswith("muon"):
        same = recommended([row for row in rows if not row.exchange.startswith("muon")])
        text += f"; with the optimizer that you have: {same.exchange}"
    return text


def _faster(job: Job, links: Links, best: Forecast) -> Iterator[dict[str, float]]:
    if links.measured is not None or best.quality_s is None:
        return
    for bits in [1e9 * gbits for gbits in _FASTER if 1e9 * gbits > 1.01 * links.bits][:2]:
        faster = Links(links.hosts, links.ppn, bits, links.latency_s)
        rows = Forecaster(job, faster.network, faster.group).all()
        then = [row.quality_s for row in rows if row.exchange in (best.exchange, recommended(rows).exchange)]
        yield {"bits": bits, "speedup": best.quality_s / min(s for s in then if s is not None)}


def _notes(links: Links, rows: Sequence[Forecast], is_measured: bool) -> Iterator[str]:
    ranks, (low, high) = links.hosts * links.ppn, _MEASURED_BITS
    if not is_measured:
        yield "layers, gradients and kernels are assumed: those of a GPT, on a GPU unless `mpicomp train` has run"
    if ranks > _MEASURED_RANKS or not low <= links.bits <= high:
        yield (
            f"computed only: steps were measured on {_MEASURED_RANKS} hosts, from {bits_in_words(low)} to "
            f"{bits_in_words(high)}"
        )
    if ranks > 64:
        names = {row.plan.rpartition(", ")[2].rpartition(":")[2] for row in rows}
        yield "these grow with the ranks: " + ", ".join(text for name, text in _GROWTH.items() if name in names)


def print_plan(job: Job, links: Links, found: dict[str, Any]) -> None:
    """Print a network's table, the recommendation first."""
    print(f"\n{links}; {job.numel:,} parameters, {job.compute_s:.4g} s a step without exchange, {job.steps} steps")
    print(found["reason"])
    show([row | {"host_MB": row["host_bytes"] / 1e6, "steps": _steps(row)} for row in found["rows"]], COLUMNS)
    for faster in found["faster"]:
        print(f"{bits_in_words(faster['bits'])}: {faster['speedup']:.2g} times as fast")
    for note in found["notes"]:
        print(note)


def _steps(row: dict[str, Any]) -> str:
    """Return the steps to dense's quality, relative to those of dense."""
    if row["steps_ratio"] is None:
        return "" if row["exchange"] == "none" else "unknown"
    ratio, low, high = (row[name] - 1 for name in ("steps_ratio", "steps_low", "steps_high"))
    return "as dense" if low == high == 0 else f"{ratio:+.0%} ({low:+.0%} to {high:+.0%})"
