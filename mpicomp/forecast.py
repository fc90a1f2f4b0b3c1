"""Forecast of a training on a network: seconds of a step, bytes and steps of each exchange, from one rank's steps."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import bind
from mpicomp.compressors import Compressor, Dense, OneBit, Quantiser, TopK
from mpicomp.cost import Network, Terms, sample_views
from mpicomp.cost.formulas import ring, tree
from mpicomp.cost.kernel_costs import KernelCost
from mpicomp.cost.model import scheme_key
from mpicomp.errors import ConfigurationError
from mpicomp.mpi.rounds import Group
from mpicomp.policies.auto import BUSY_OVERLAP, bucket_length
from mpicomp.policies.convergence_penalty import ElementStatistics
from mpicomp.policies.plan_selector import collectives_for
from mpicomp.policies.plan_tradeoff import PlanTradeoff
from mpicomp.policies.ratio_levels import at_ratio, ladder, suggested_compressors

MUON_EVERY = 2, 10, 40  # steps between exchanges of LocalMuon that are forecast
NOISE = 0.03  # relative differences of seconds that are below it recommend nothing
SCHEMA = 1  # of a job as JSON

_LATE_STEP = 1 << 30  # a step in the long run
_DDP_FIRST_BYTES, _DDP_BYTES = 1 << 20, 25 << 20  # of PyTorch's buckets
_MAX_BYTES = 32 << 20  # of mpicomp's
_LIMIT = 0.3  # of the steps that `auto` may lose
_MAX_LADDER_RANKS = 1024  # beyond, selections are forecast at 1 % alone
# Where kernels were not measured: of a core, and of a GPU whose messages cross PCIe, by docs/gpu.md.
_KERNELS = {"cpu": KernelCost(2e-4, 3e-9, 1.5e-8), "cuda": KernelCost(3e-4, 2e-11, 1e-10)}
_DENSE_SHARE = 0.25  # of the seconds an element, of a dense exchange
_S_PER_COPIED_BYTE = {"cpu": 0.0, "cuda": 1 / 55e9}
_OVERLAP = {"cpu": BUSY_OVERLAP, "cuda": 1.0}  # share of backward that hides rounds
_MAX_SPREAD = 1.5  # of a step's seconds over the median
_MUON_SHARE = 0.05  # of a step, where Muon's was not measured
_ADVICE_RATIO = 1.25  # of seconds of a step, from which on another exchange is advised
# Shares of its steps by which a GPT falls behind, of docs/policies.md: where no gradient was measured.
_GPT_QUANTISED = {8: 0.0, 4: 0.03, 3: 0.1, 2: 0.47}
_GPT_SELECTED = (0.01, 0.05, 0.1, 0.2, 1.0), (0.84, 0.79, 0.63, 0.25, 0.0)
# Of 22 measured penalties, 80 % lie between the prediction less the first and plus the second: docs/policies.md.
_PENALTY_SPREAD = 0.18, 0.07
_MAX_PENALTY = 0.9  # a larger one counts as this
_SMALL_PENALTY_SPREAD = 0.04, 0.04  # of those below 0.05
# Steps of LocalMuon to the quality of dense AdamW, over its steps, by steps between exchanges, with the least and the
# most. Every ten: `text-gpt` after 120 steps (docs/results.md) and 1,000 (docs/updates.md); the most is nanoGPT's, with
# the settings before. Every two: between dense Muon (0.42) and every ten. Every 40: about 950 steps to AdamW's 1,000.
_MUON_STEPS = {2: (0.5, 0.42, 0.74), 10: (0.6, 0.55, 0.93), 40: (0.95, 0.7, 1.3)}


@dataclass(frozen=True)
class Job:
    """Steps of one rank without an exchange; parameters are in the order of backward."""

    sizes: Sequence[int]  # elements of each parameter
    ready_s: Sequence[float]  # when the gradient of each is ready, relative to the last one: at most 0
    compute_s: float  # of a step, median
    muon_s: float | None = None  # that Muon's step adds; None where it was not measured
    hidden: float = 0.0  # share of the elements that Muon would step; 0 where the model is not like a GPT
    steps: int = 1000  # of the training
    normalises: bool = True  # whether the optimizer divides by the root of a mean square, as Adam does
    statistics: Sequence[ElementStatistics] = ()  # of the gradients of several buckets; none takes those of a GPT
    kernels: Mapping[str, KernelCost] = field(default_factory=dict)  # by `scheme_key` of a ladder, that were measured
    device: str = "cpu"  # of the gradients: cpu or cuda
    spread_s: Sequence[float] = ()  # seconds of several steps: an exchange waits for the slowest rank
    core_share: float = 1.0  # of a core that a rank had: one that waits leaves its share to those it waits for

    @property
    def numel(self) -> int:
        """Elements of the model."""
        return sum(self.sizes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able object for `from_json`."""
        statistics = [{"numel": each.numel} | each.state_dict() for each in self.statistics]
        kernels = {key: vars(kernel).copy() for key, kernel in self.kernels.items()}
        return {"schema": SCHEMA} | vars(self) | {"statistics": statistics, "kernels": kernels}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Job":
        """Build one from the result of `to_json`; other content raises KeyError, TypeError or ValueError."""
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}, and this mpicomp reads {SCHEMA}")
        fields = {name: content[name] for name in cls.__dataclass_fields__}
        quantisers, saved = suggested_compressors(None, fields["normalises"])[1], fields["statistics"]
        of_buckets = [ElementStatistics(each["numel"], len(quantisers), fields["normalises"]) for each in saved]
        for statistics, each in zip(of_buckets, saved, strict=True):
            statistics.load_state_dict(each)
        kernels = {key: KernelCost(**kernel) for key, kernel in fields["kernels"].items()}
        if not fields["sizes"] or not fields["compute_s"] > 0:
            raise ValueError("it has no timings")
        return cls(**fields | {"statistics": of_buckets, "kernels": kernels})


@dataclass(frozen=True)
class Forecast:
    """An exchange on a network."""

    exchange: str
    plan: str  # compressor, collective
    step_s: float
    throughput: float  # share of that without an exchange
    host_bytes: float  # that leave a host in a step
    steps_ratio: float | None = None  # steps to the quality of dense exchange, over its steps; None where unknown
    steps_low: float | None = None  # least and most of it
    steps_high: float | None = None
    quality_s: float | None = None  # seconds to the quality at which dense exchange ends


class _Cost(NamedTuple):
    """Seconds of a scheme's rounds and kernels, and its bytes; affine in the elements of a bucket."""

    name: str
    rounds: KernelCost
    kernels: KernelCost
    sent_bytes: float = 0.0  # an element, that leave a host
    kept: float = 1.0  # share of the elements


class Forecaster:
    """Forecasts the exchanges of a job among the ranks of a group, on links that are given or were measured."""

    def __init__(self, job: Job, network: Network, group: Group, overlap: bool = True) -> None:
        if group.size < 2 or not job.sizes:
            raise ConfigurationError("plan: an exchange needs two ranks, and a model with parameters")
        self._job, self._network, self._group = job, network, group
        self._overlap = _OVERLAP[job.device] if overlap else 0.0
        spread = np.array(job.spread_s or [job.compute_s])
        # Steps are drawn from those that were timed; another program may have delayed one.
        typical = np.minimum(np.sort(spread), _MAX_SPREAD * np.median(spread))
        shares = (np.arange(len(typical) + 1) / len(typical)) ** group.size
        self._mean_s = float(typical.mean())
        self._waited_s = job.core_share * max(0.0, float(typical @ np.diff(shares)) - job.compute_s)

    def all(self) -> list[Forecast]:
        """Return a forecast of every exchange: none, DDP's, the likely plan of `auto`, top-k, and LocalMuon."""
        topk = TopK(ratio=0.01)
        return [
            Forecast("none", "", self._job.compute_s, 1.0, 0.0),
            self._ddp("ddp", 4),
            self._ddp("ddp-fp16", 2),
            self._auto(),
            self._plan("topk 1 %", topk, self._best(topk, _MAX_BYTES), _MAX_BYTES),
            *map(self.muon, MUON_EVERY),
        ]

    def _step_s(self, cost: _Cost, nbytes: float, first: float | None = None) -> float:
        """Return the seconds of a step with buckets of some bytes; kernels delay backward, and rounds do not."""
        kernels_s, end_s, numel, limit = 0.0, -math.inf, 0, nbytes if first is None else first
        last = len(self._job.sizes) - 1
        for place, (size, ready_s) in enumerate(zip(self._job.sizes, self._job.ready_s, strict=True)):
            numel += size
            if 4 * numel >= limit or place == last:
                kernels_s += cost.kernels.seconds(numel, round(cost.kept * numel))
                end_s = max(end_s, self._overlap * ready_s + kernels_s) + cost.rounds.seconds(numel, 0)
                numel, limit = 0, nbytes
        return self._job.compute_s + self._waited_s + max(end_s, kernels_s)

    def _cost(self, compressor: Compressor, name: str) -> _Cost:
        """Return the cost of a scheme from its rounds at two lengths."""
        few, many = (max(self._group.size, share) for share in (self._job.numel // 16, self._job.numel))
        rows = [_coefficients(compressor, name, numel, self._group) for numel in (few, many)]
        few_s, many_s = map(self._network.seconds, rows)
        per_element_s = max(0.0, (many_s - few_s) / max(1, many - few))
        kernels = self._job.kernels.get(scheme_key(bind(compressor, name), ladder=True))
        if kernels is None:
            typical, share = _KERNELS[self._job.device], _DENSE_SHARE if compressor == Dense() else 1.0
            per_kept = typical.per_kept * compressor.selects_by_ratio
            kernels = KernelCost(typical.fixed, share * typical.per_element, per_kept)
        by_group = rows[1].reshape(3, -1, 2)[..., 1].sum(axis=1)  # inside a host the second of each pair
        sent = float(by_group[0] + by_group[2]) / many if self._group.hosts > 1 else 0.0
        copied_s = (compressor.wire_bytes_per_element(4) + sent) * _S_PER_COPIED_BYTE[self._job.device]
        others = max(0, self._group.size - 2)  # whose messages are decoded beyond the one that was measured
        per_element = kernels.per_element * (1 + 0.2 * others * (name == "packed-allgather")) + copied_s
        per_kept = kernels.per_kept * (1 + 0.5 * others * (name == "allgather"))
        return _Cost(
            name,
            KernelCost(max(0.0, many_s - many * per_element_s), per_element_s),
            KernelCost(kernels.fixed, per_element, per_kept),
            sent,
            compressor.expected(many) / many,
        )

    def _best(self, compressor: Compressor, nbytes: float) -> _Cost:
        names = collectives_for(compressor, self._group, complete=True)
        if self._group.size > _MAX_LADDER_RANKS:
            names = [name for name in names if not name.endswith(("ring", "parameter-server"))] or names
        return min((self._cost(compressor, name) for name in names), key=lambda cost: self._step_s(cost, nbytes))

    def _row(
        self, exchange: str, plan: str, seconds: float, sent: float, steps: tuple[float, float, float] | None
    ) -> Forecast:
        """Return the forecast of a step with its seconds, and with its steps to a quality over those of dense."""
        throughput = self._job.compute_s / seconds if seconds else 1.0
        if steps is None:
            return Forecast(exchange, plan, seconds, throughput, sent)
        return Forecast(exchange, plan, seconds, throughput, sent, *steps, steps[0] * self._job.steps * seconds)

    def _plan(self, exchange: str, compressor: Compressor, cost: _Cost, nbytes: float) -> Forecast:
        name = compressor.id + (f" {compressor.ratio:.2g}" if hasattr(compressor, "ratio") else "")
        name += f" {compressor.bits} bits" if hasattr(compressor, "bits") else ""
        name += f" {wire}" if (wire := getattr(compressor, "wire", None)) else ""
        seconds, sent = self._step_s(cost, nbytes), self._job.numel * cost.sent_bytes
        return self._row(exchange, f"{name}, {cost.name}", seconds, sent, _steps_of(self.penalty(compressor)))

    def _ddp(self, exchange: str, itemsize: int) -> Forecast:
        """Forecast DDP: a ring that crosses each host's link once, or a tree where its latencies are fewer."""
        group, network = self._group, self._network
        terms = ring(group.hosts if group.hosts > 1 else group.size, itemsize)
        latencies = min(2 * (group.size - 1), 2 * tree(group.size, 0).latency)
        kernels = self._job.kernels.get(exchange, KernelCost(0, 0))
        copied_s = 2 * itemsize * _S_PER_COPIED_BYTE[self._job.device]
        cost = _Cost(
            exchange,
            KernelCost(Terms(latencies, 0).seconds(network.latency, 0), terms.volume * network.seconds_per_byte),
            KernelCost(kernels.fixed, kernels.per_element + copied_s, kernels.per_kept),
        )
        sent = self._job.numel * terms.volume if group.hosts > 1 else 0.0
        seconds = self._step_s(cost, _DDP_BYTES, _DDP_FIRST_BYTES)
        return self._row(exchange, f"float{8 * itemsize}, sums of gloo or NCCL", seconds, sent, (1.0, 1.0, 1.0))

    def _auto(self) -> Forecast:
        """Forecast the plan that `auto` likely runs, one for all buckets, by its own tradeoff."""
        wires, quantisers = suggested_compressors(None, self._job.normalises)
        ratios = ladder(0.001, 0.25, 2.0) if self._group.size <= _MAX_LADDER_RANKS else []
        levels: list[Compressor] = [at_ratio(wire, ratio) for wire in wires for ratio in ratios]
        levels += [*quantisers, Dense(wire="bf16"), Dense()]
        nbytes = min(_MAX_BYTES, bucket_length(self._network, self._group.size, 4 * self._job.numel, self._overlap))
        costs, compute_s = [self._best(compressor, nbytes) for compressor in levels], self._job.compute_s
        seconds = np.array([self._step_s(cost, nbytes) for cost in costs])
        penalties = np.array([self.penalty(level) for level in levels])
        tradeoff = PlanTradeoff([penalties], [seconds - compute_s], [1.0], [0.0], compute_s, _LIMIT)
        dense = [level for level, compressor in enumerate(levels) if isinstance(compressor, Dense)]
        selecting = [np.array([compressor.selects_by_ratio for compressor in levels])]
        [chosen] = tradeoff.best_over([min(dense, key=lambda level: float(seconds[level]))], selecting)
        return self._plan("auto", levels[chosen], costs[chosen], nbytes)

    def muon(self, every: int) -> Forecast:
        """Forecast LocalMuon: changes in one bit, after the step of every ``every``-th one."""
        job, cost = self._job, self._best(OneBit(), math.inf)
        more_s = _MUON_SHARE * job.compute_s if job.muon_s is None else job.muon_s
        exchange_s = cost.kernels.seconds(job.numel, round(cost.kept * job.numel)) + cost.rounds.seconds(job.numel, 0)
        waited_s = self._waited_s / math.sqrt(every)  # the sums of several steps differ less
        seconds = self._mean_s + more_s + waited_s + exchange_s / every
        steps, sent = _MUON_STEPS[every] if job.hidden > 0.5 else None, job.numel * cost.sent_bytes / every
        return self._row(f"muon every {every}", f"one bit, {cost.name}", seconds, sent, steps)

    def penalty(self, compressor: Compressor) -> float:
        """Return the share of its steps by which a training falls behind dense exchange."""
        if isinstance(compressor, Dense):
            return 0.0
        ranks, age, statistics = self._group.size, self._job.steps / 2, self._job.statistics
        if isinstance(compressor, Quantiser):
            if not statistics:
                return _GPT_QUANTISED.get(getattr(compressor, "bits", 1), 0.8)
            index = suggested_compressors(None, self._job.normalises)[1].index(compressor)
            penalties = [each.quantiser_penalty(index, ranks, age) for each in statistics]
        else:
            ratio = np.array([compressor.ratio])  # type: ignore[attr-defined]
            if not statistics:
                return float(np.interp(np.log(ratio), np.log(_GPT_SELECTED[0]), _GPT_SELECTED[1])[0])
            penalties = [float(each.selection_penalties(ratio, ranks, age)[0][0]) for each in statistics]
        return float(np.average(penalties, weights=[max(each.importance, 1e-9) for each in statistics]))


@functools.lru_cache(maxsize=1024)
def _coefficients(compressor: Compressor, name: str, numel: int, group: Group) -> NDArray[np.float64]:
    """Return a scheme's coefficients, which are the same on all links."""
    scheme, views = bind(compressor, name), sample_views(group)
    rounds = [scheme.rounds(numel, np.dtype(np.float32), view, _LATE_STEP) for view in views]
    return Network(group.hosts).coefficients(rounds, views)


def fastest_dense(rows: Sequence[Forecast]) -> Forecast:
    """Return DDP's exchange, in 32 or 16 bits, that is faster."""
    return min((row for row in rows if row.exchange.startswith("ddp")), key=lambda row: row.step_s)


def recommended(rows: Sequence[Forecast]) -> Forecast:
    """Return the exchange of least seconds to a quality; dense where none is clearly faster, in its step too."""
    dense = fastest_dense(rows)
    faster = [row for row in rows if row.quality_s is not None and row.step_s < (1 - NOISE) * dense.step_s]
    best = min(faster, key=lambda row: row.quality_s or math.inf, default=dense)
    assert dense.quality_s is not None
    assert best.quality_s is not None
    return best if best.quality_s < (1 - NOISE) * dense.quality_s else dense


def advice(job: Job, network: Network, group: Group, step_s: float) -> str | None:
    """Return a line that names LocalMuon, where its step is clearly shorter than the measured ``step_s``."""
    muon = Forecaster(job, network, group).muon(10)
    if muon.steps_ratio is None or _ADVICE_RATIO * muon.step_s > step_s:
        return None
    return (
        "links are slow: a step of mpicomp.torch.LocalMuon, one bit an element every 10 steps, is predicted to take "
        f"{muon.step_s:.3g} s in place of {step_s:.3g}; see docs/updates.md, and `mpicomp plan` for other exchanges"
    )


def _steps_of(penalty: float) -> tuple[float, float, float]:
    """Return the steps to a quality over those of dense exchange, with the least and the most."""
    less, more = (0.0, 0.0) if not penalty else _PENALTY_SPREAD if penalty >= 0.05 else _SMALL_PENALTY_SPREAD
    ratio, low, high = (
        1 / (1 - min(max(share, 0.0), _MAX_PENALTY)) for share in (penalty, penalty - less, penalty + more)
    )
    return ratio, low, high
