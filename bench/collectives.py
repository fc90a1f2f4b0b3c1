"""Timing of plans at full size among real ranks, and of the plans that ``collective="auto"`` chooses."""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpicomp.bench.measure.exchanges import MPI, Plan, Residuals, Runner
from mpicomp.bench.measure.feedback import Gradients
from mpicomp.bench.measure.intervals import INTERVAL_SAMPLES, is_narrow, ratio_interval
from mpicomp.bench.measure.timed_plan import TimedPlan, rows_of
from mpicomp.bench.timed_kernels import without_garbage

from mpicomp.collectives import bind, variants
from mpicomp.compressors import Compressor, Dense
from mpicomp.cost import CostModel, measure_kernels
from mpicomp.errors import IncompatiblePairError
from mpicomp.gpu import HOST, Device
from mpicomp.mpi import Transport

AUTO = "auto"

_WARMUP_STEPS = 10  # steps before the timed ones, at most
_MIN_WARMUP_STEPS = 2  # steps between the first and the timed ones, at least
_ENOUGH_SAMPLES = 30  # timed steps that suffice for a confidence interval
_MIN_SAMPLES = 3  # timed steps, at least, however long they are
_MAX_SAMPLES = 1000  # timed steps, at most, however short they are
_SLOW_FACTOR = 3.0  # times the best of a cell: a slower plan is timed once
_SKIP_FACTOR = 20.0  # times the best prediction: a plan predicted to be slower, and longer than the limit, is left out
_SETTLING_STEPS = 60, 200  # steps until auto is in its steady state, at least and at most
_LONG_FACTOR = 4  # times the limit: a plan with a longer first step runs once, and auto settles no longer
_TURNS_FACTOR = 2  # times the limit, for plans that are timed in turn
_COMPILED_NUMEL = 1 << 12  # elements of the arrays on which kernels are compiled


@dataclass(frozen=True)
class Settings:
    """Lengths, compressors and collectives to measure."""

    numels: Sequence[int]  # lengths of the arrays, which are float32
    compressors: Sequence[Compressor]  # each with the ratio at which it is measured
    # Names, each of which fits some compressor; None is all that fit. Those of `mpicomp.Dense` are measured in any case
    collectives: Sequence[str] | None = None
    auto: bool = True  # whether to measure the plans that ``collective="auto"`` chooses for each compressor, too
    limit_s: float = 10.0  # seconds of timing a plan, unless it is slower than that


def measure(
    settings: Settings,
    transport: Transport,
    model: CostModel | None,
    print_root: Callable[[str], None],
    done: Callable[[list[dict[str, Any]]], None],
    device: Device = HOST,
) -> list[dict[str, Any]]:
    """Measure everything, cell by cell. Collective."""
    bench = _Bench(settings, transport, model, print_root, device)
    found: list[dict[str, Any]] = []
    log = logging.getLogger("mpicomp.watch")
    before = log.level
    log.setLevel(logging.ERROR)  # no warnings of a training that falls behind: these gradients train nothing
    try:
        for numel in settings.numels:
            found += bench.array(numel, lambda rows: done([*found, *rows]))  # noqa: B023, called before it changes
    finally:
        log.setLevel(before)
    return found


def plans_of(compressor: Compressor, names: Sequence[str] | None, flat: bool) -> list[Plan]:
    """Return the plans of a compressor with those of the named collectives that fit it."""
    if names is None:
        return [Plan(compressor, name) for name in variants(compressor) if not (flat and "hierarchical" in name)]
    plans = []
    for name in names:
        with contextlib.suppress(IncompatiblePairError):
            bind(compressor, name)
            plans.append(Plan(compressor, name))
    return plans


class _Bench:
    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        model: CostModel | None,
        print_root: Callable[[str], None],
        device: Device,
    ) -> None:
        self.settings = settings
        self.transport = transport
        self.model = model
        self.print_root = print_root
        self.device = device
        group = transport.group
        self.where = {"ranks": group.size, "hosts": group.hosts, "device": "cpu" if device is HOST else "gpu"}
        self.residuals = Residuals(group.rank)
        self.compiled: list[Plan] = []

    def array(self, numel: int, done: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
        settings, group = self.settings, self.transport.group
        flat = group.hosts in (1, group.size)
        gradients = Gradients(numel, group.rank, self.device)
        dense_plans = plans_of(Dense(), None, flat)
        named = plans_of(Dense(), settings.collectives, flat) if Dense() in settings.compressors else []
        dense = self._expect([*dense_plans, *(plan for plan in named if plan not in dense_plans)], numel)
        others = []
        for compressor in settings.compressors:
            late = compressor.bind([], [], warm_up=False)
            plans = plans_of(late, settings.collectives, flat) if compressor != Dense() else []
            others.append(self._expect(plans, numel))
        everything = [*dense, *(timing for timings in others for timing in timings)]
        self._time_all(dense, everything, [], gradients)
        library = [TimedPlan(Plan(Dense(), MPI), numel)] if self.device is HOST else []
        self._time_all(library, everything, dense, gradients)
        rows = rows_of([*dense, *library], dense, self.where)
        done(rows)
        for compressor, timings in zip(settings.compressors, others, strict=True):
            self._time_all(timings, [*dense, *timings], dense, gradients)
            if settings.auto:
                timings.append(self._auto(compressor, [*dense, *timings], dense, library, gradients))
            rows += rows_of(timings, dense, self.where)
            done(rows)
        return rows

    def _expect(self, plans: Sequence[Plan], numel: int) -> list[TimedPlan]:
        timings = [TimedPlan(plan, numel) for plan in plans]
        model = self._copy()
        if model is not None and plans:
            schemes = [bind(plan.compressor.bind([""], [numel]), plan.collective) for plan in plans]
            feedback, group, there = plans[0].compressor.feedback, self.transport.group, self.device is not HOST
            measuring = measure_kernels(model, schemes, feedback, self.transport, device=self.device, on_device=there)
            self.transport.run(measuring)
            expected = model.candidates(schemes, numel, np.dtype(np.float32), group, on_device=there).seconds()
            for timing, seconds in zip(timings, expected, strict=True):
                timing.expected_s = float(seconds)
            timings.sort(key=lambda timing: timing.expected_s or 0.0)
        return timings

    def _time_all(
        self,
        timings: Sequence[TimedPlan],
        rivals: Sequence[TimedPlan],
        before: Sequence[TimedPlan],
        gradients: Gradients,
    ) -> None:
        predicted = [timing.expected_s for timing in rivals if timing.expected_s is not None]
        for place, timing in enumerate(timings):
            if place > 0 and timing.expected_s is not None:
                longest = max(_SKIP_FACTOR * min(predicted), self.settings.limit_s)
                if timing.expected_s > longest:
                    self.print_root(f"{timing.title}: not run, predicted to take {timing.expected_s:.3g} s")
                    continue
            best = min((other.median_s for other in [*before, *timings[:place]]), default=np.inf)
            self._time(timing, best, gradients)
            self.print_root(f"{timing.title}: {timing.outcome}")

    def _time(self, timing: TimedPlan, best: float, gradients: Gradients) -> None:
        if timing.plan not in self.compiled:
            self.compiled.append(timing.plan)
            short = self._runner(timing.plan, Gradients(_COMPILED_NUMEL, device=self.device), None)
            short.step()
            short.step()
            short.close()
        timing.runner = runner = self._runner(timing.plan, gradients, self._copy())
        limit = self.settings.limit_s
        with without_garbage():
            runner.step(check=True)
            if runner.slowest()[0] > _LONG_FACTOR * limit:
                timing.stopped = "once"
            else:
                timing.first = self._warm_up(runner)
                slow = min(runner.slowest()[1:]) > _SLOW_FACTOR * best
                timing.stopped = "once" if slow else self._sample(timing)
        runner.close()

    def _warm_up(self, runner: Runner) -> int:
        """Do the steps that are not timed, one more at the end, and return the first that counts."""
        share = self.settings.limit_s / 4
        for _ in range(_MIN_WARMUP_STEPS):
            runner.step()
        runner.catch_up()
        while len(runner.steps) < _WARMUP_STEPS and sum(runner.slowest()[1:]) + runner.slowest()[-1] < share:
            runner.step()
            runner.catch_up()
        return len(runner.steps) - 1

    def _sample(self, timing: TimedPlan) -> str:
        assert timing.runner is not None
        limit = self.settings.limit_s
        while True:
            samples = timing.samples
            if len(samples) >= _ENOUGH_SAMPLES and is_narrow(samples):
                stopped = "interval"
                break
            # The next sample is expected to take as long as the last.
            enough = len(samples) >= _MIN_SAMPLES and sum(samples) + samples[-1] > limit
            if len(samples) >= _MAX_SAMPLES or enough:
                stopped = "limit"
                break
            timing.runner.step()
        timing.runner.catch_up()
        return stopped

    def _auto(
        self,
        compressor: Compressor,
        fixed: Sequence[TimedPlan],
        dense: Sequence[TimedPlan],
        library: Sequence[TimedPlan],
        gradients: Gradients,
    ) -> TimedPlan:
        """Time ``auto`` in its steady state, in turn with the best plans and MPI's sum without a model."""
        limit = self.settings.limit_s
        best = min((timing for timing in fixed if _may_choose(timing.plan)), key=lambda timing: timing.median_s)
        best_dense = min(dense, key=lambda timing: timing.median_s)
        timing = TimedPlan(Plan(compressor, AUTO), gradients.numel)
        timing.runner = auto = self._runner(timing.plan, gradients, self._copy())
        plans = [best.plan]
        for other in (best_dense, *library):
            if other.plan not in plans and other.median_s <= _SLOW_FACTOR * best.median_s:
                plans.append(other.plan)
        rivals = [self._runner(plan, gradients, None) for plan in plans]
        runners = [auto, *rivals]
        with without_garbage():
            for rival in rivals:
                rival.step()
                self._warm_up(rival)
            least, most = _SETTLING_STEPS
            while (done := len(auto.steps)) < least or (done < most and sum(auto.slowest()) < _LONG_FACTOR * limit):
                auto.step()
            auto.catch_up()
            timing.first = len(auto.steps)
            firsts = [len(runner.steps) for runner in runners]
            timing.stopped = _interleave(runners, firsts, limit)
            times = [runner.slowest()[first:] for runner, first in zip(runners, firsts, strict=True)]
            auto.step(check=True)
            auto.steps.pop()  # it was checked, not timed
        medians = [float(np.median(seconds)) for seconds in times[1:]]
        best_s = medians[0]
        dense_s = medians[plans.index(best_dense.plan)] if best_dense.plan in plans else best_dense.median_s
        low, high = ratio_interval(times[0], times[1]) or (None, None)
        ran = Counter(step.plan for step in auto.ran[timing.first : len(auto.steps)])
        timing.facts = {
            "chosen": ran.most_common(1)[0][0],
            "best": best.plan.name,
            "best_s": best_s,
            "regret": timing.median_s / best_s - 1,
            "regret_low": None if low is None else low - 1,
            "regret_high": None if high is None else high - 1,
            "best_dense": best_dense.plan.name,
            "best_dense_s": dense_s,
            "behind_dense": timing.median_s / dense_s - 1,
            "mpi_s": medians[-1] if plans[-1].collective == MPI else None,
        }
        for runner in runners:
            runner.close()
        self.print_root(f"{timing.title}: {timing.outcome}, ran {timing.facts['chosen']}, best is {best.plan.name}")
        return timing

    def _runner(self, plan: Plan, gradients: Gradients, model: CostModel | None) -> Runner:
        return Runner(plan, gradients, self.transport, self.residuals, model)

    def _copy(self) -> CostModel | None:
        # Plans teach each their own.
        return None if self.model is None else CostModel.from_json(self.model.to_json())


def _may_choose(plan: Plan) -> bool:
    # As `mpicomp.policies.Static` does for a compressor that was named.
    others = (bind(plan.compressor, name).may_drop_selected for name in variants(plan.compressor))
    return not bind(plan.compressor, plan.collective).may_drop_selected or all(others)


def _interleave(runners: Sequence[Runner], firsts: Sequence[int], limit_s: float) -> str:
    """Time runners in turn until their medians are known well, or the time is over; return which."""
    while True:
        samples = [runner.slowest()[first:] for runner, first in zip(runners, firsts, strict=True)]
        number = min(map(len, samples))
        if number >= _ENOUGH_SAMPLES and all(is_narrow(sample) for sample in samples):
            stopped = "interval"
            break
        if number >= _MAX_SAMPLES or (
            number >= INTERVAL_SAMPLES and sum(map(sum, samples)) >= _TURNS_FACTOR * limit_s * len(runners)
        ):
            stopped = "limit"
            break
        turn = len(runners[0].steps) % len(runners)  # another one begins every time
        for runner in [*runners[turn:], *runners[:turn]]:
            runner.step()
    for runner in runners:
        runner.catch_up()
    return stopped
