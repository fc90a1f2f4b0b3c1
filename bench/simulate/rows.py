"""Rows of a simulation: seconds of plans among ranks, compared with dense exchange and with none."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpicomp.bench.simulate.automatic import choose
from mpicomp.bench.simulate.compute_time import ComputeTime
from mpicomp.bench.simulate.measured import Bucket, Measured
from mpicomp.bench.simulate.steps import Exchanges, Seconds, step_seconds
from mpicomp.bench.simulate.topology import Topology

from mpicomp.collectives import bind
from mpicomp.compressors import Compressor, Dense
from mpicomp.policies.plan_selector import collectives_for

AUTO = "auto"

_DTYPE = np.dtype(np.float32)


@dataclass(frozen=True)
class Plan:
    """A compressor and a collective to simulate."""

    compressor: Compressor | None  # none lets mpicomp choose, bucket by bucket
    # A name, or ``"auto"`` for the fastest of those that deliver all that the compressor selects
    collective: str = AUTO

    @property
    def title(self) -> str:
        if self.compressor is None:
            return AUTO
        ratio = getattr(self.compressor, "ratio", None)
        words = [self.compressor.id, *([] if ratio is None else [f"{ratio:g}"])]
        return " ".join(words + ([] if self.collective == AUTO else [self.collective]))


class Simulation:
    """Simulates plans among the ranks of one topology."""

    def __init__(self, measured: Measured, topology: Topology, compute_time: ComputeTime) -> None:
        self._measured = measured
        self._topology = topology
        self._exchanges = Exchanges(topology, compute_time, measured.corrections(topology.ranks))
        self._dense: list[tuple[str, Seconds]] | None = None

    def row(self, plan: Plan, overlap: bool) -> dict[str, Any]:
        """Return a row; docs/simulate.md says what is in it."""
        if plan.compressor is None:
            plans, exchanged = choose(self._measured, self._topology, overlap, self._exchanges)
            ran = [
                (f"{plan.scheme.compressor!r} {plan.scheme.id}", seconds)
                for plan, seconds in zip(plans, exchanged, strict=True)
            ]
        elif plan == Plan(Dense()):
            ran = self._fastest_dense()
        else:
            ran = [self._fastest(plan.compressor, plan.collective, bucket) for bucket in self._measured.buckets]
        dense_s = self._step(self._fastest_dense(), overlap)
        step_s = self._step(ran, overlap)
        return {
            "plan": plan.title,
            "compressor": None if plan.compressor is None else plan.compressor.get_config(),
            "ranks": self._topology.ranks,
            "hosts": self._topology.hosts,
            "overlap": overlap,
            "step_s": step_s,
            "exchange_s": sum(seconds.whole for _, seconds in ran),
            "own_work_s": sum(seconds.compute for _, seconds in ran),
            "dense_step_s": dense_s,
            "speedup": dense_s / step_s,
            "efficiency": self._measured.compute_s / step_s,
            "ran": [what for what, _ in ran],
        }

    def _step(self, ran: Sequence[tuple[str, Seconds]], overlap: bool) -> float:
        return step_seconds(self._measured, [seconds.whole for _, seconds in ran], overlap)

    def _fastest_dense(self) -> list[tuple[str, Seconds]]:
        if self._dense is None:
            self._dense = [self._fastest(Dense(), AUTO, bucket) for bucket in self._measured.buckets]
        return self._dense

    def _fastest(self, compressor: Compressor, collective: str, bucket: Bucket) -> tuple[str, Seconds]:
        """Return the fastest of the collectives that are meant for one bucket, and what it takes."""
        bound = compressor.bind(bucket.names, bucket.sizes, bucket.shapes, warm_up=False)
        names = [collective]
        if collective == AUTO:
            names = collectives_for(bound, self._topology.group(0), complete=True)
        best: tuple[str, Seconds] | None = None
        for name in names:
            most = math.inf if best is None else best[1].whole
            found = self._exchanges.seconds(bind(bound, name), bucket.numel, _DTYPE, most)
            if found is not None and (best is None or found.whole < best[1].whole):
                best = f"{compressor!r} {name}", found
        assert best is not None
        return best


def simulate(
    measured: Measured, topologies: Sequence[Topology], plans: Sequence[Plan], overlaps: Sequence[bool]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each topology, plan and kind of overlap, as soon as it is known."""
    compute_time = ComputeTime(measured.cost)
    for topology in topologies:
        simulation = Simulation(measured, topology, compute_time)
        for plan in plans:
            for overlap in overlaps:
                yield simulation.row(plan, overlap)
