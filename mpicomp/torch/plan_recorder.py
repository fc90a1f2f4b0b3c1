"""The job of a script, which `mpicomp plan` reads, recorded in its first steps: ``MPICOMP_PLAN=FILE``."""

import json
import logging
import os
import time
import timeit
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from mpicomp.collectives import bind
from mpicomp.compressors import Compressor, Dense, OneBit
from mpicomp.cost import CostModel, Network, measure_kernels
from mpicomp.cost.kernel_costs import KernelCost
from mpicomp.forecast import Job, advice
from mpicomp.job import print_stderr, whole_file
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import layout_groups
from mpicomp.policies.convergence_penalty import ElementStatistics, ElementSurvey
from mpicomp.policies.plan_selector import collectives_for
from mpicomp.policies.ratio_levels import at_ratio, suggested_compressors
from mpicomp.torch.muon import hidden_matrices, muon_seconds
from mpicomp.torch.shards import is_sharded

VARIABLE = "MPICOMP_PLAN"
STEPS = 30  # after which the record is complete
_BUCKETS = 4  # whose gradients are surveyed by themselves
_UNTIMED_STEPS = 5  # which compile, agree and grow buffers
_ADVICE_STEPS = 100  # after which costs are known well

_log = logging.getLogger("mpicomp.watch")


def record_plan(optimizer: Any, parameters: Mapping[str, torch.Tensor], normalises: bool) -> None:
    """Record the job of a `DistributedOptimizer`, if the user asks for it; else log advice once, on several hosts."""
    path, group = os.environ.get(VARIABLE), optimizer.reducer.transport.group
    if path:
        PlanRecorder(optimizer, parameters, normalises, path)
    if path or group.hosts == 1 or any(map(is_sharded, parameters.values())):
        return
    ends: list[float] = []

    def after_step(optimizer: Any, *_: Any) -> None:
        ends.append(time.perf_counter())
        if len(ends) < _ADVICE_STEPS:
            return
        handle.remove()
        reducer = optimizer.reducer
        times = getattr(reducer.policy, "step_times", None)  # of policies that measure
        if times is not None and reducer.cost is not None and times.compute_s:
            job = job_of(parameters, times.compute_s)
            text = advice(job, reducer.cost.network, group, median(np.diff(ends[-STEPS:]).tolist()))
            if text is not None:
                _log.warning("mpicomp: %s", text)

    handle = optimizer.register_step_post_hook(after_step)


def job_of(parameters: Mapping[str, torch.Tensor], compute_s: float) -> Job:
    """Return the job of a model as one bucket, with the seconds of a step without an exchange; times Muon here."""
    muon_s, hidden = _muon(parameters)
    return Job([sum(parameter.numel() for parameter in parameters.values())], [0.0], compute_s, muon_s, hidden)


def _muon(parameters: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Return the seconds of Muon's step, and the share of the elements that it steps; 0 with convolutions."""
    hidden = [parameters[name] for name in hidden_matrices(parameters, None)]
    total = sum(parameter.numel() for parameter in parameters.values())
    is_like_gpt = all(parameter.ndim <= 2 for parameter in parameters.values())
    return muon_seconds(hidden), is_like_gpt * sum(parameter.numel() for parameter in hidden) / total


class PlanRecorder:
    """Times steps of a `DistributedOptimizer` without their exchange, and surveys gradients of this rank."""

    def __init__(
        self, optimizer: Any, parameters: Mapping[str, torch.Tensor], normalises: bool, path: str | None = None
    ) -> None:
        self.job: Job | None = None
        """The record, after `STEPS` steps."""
        self._path, self._normalises = path, normalises
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._device = next(iter(self._parameters.values())).device
        self._seconds: list[float] = []  # of steps
        self._ready: list[dict[str, float]] = []  # of odd steps, in which gradients on a GPU are waited for
        self._filled: dict[str, float] = {}  # by name, when backward was done with a gradient
        self._steps, self._own_s, self._begun, self._averaged = 0, 0.0, 0.0, 0.0
        self._start = 0.0, 0.0  # of the timed steps: seconds of this thread, and of the clock
        self._handles = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._buckets: list[_Sampled] = []
        waiting, total = list(self._parameters), sum(parameter.numel() for parameter in self._parameters.values())
        while waiting:  # the last parameters are exchanged first
            sizes: dict[str, int] = {}
            while waiting and _BUCKETS * sum(sizes.values()) < total:
                name = waiting.pop()
                sizes[name] = self._parameters[name].numel()
            self._buckets.append(_Sampled(list(sizes.values()), normalises))
            first = 0
            for name, numel in sizes.items():
                hook: Any = partial(self._on_gradient, name, self._buckets[-1], first)
                self._handles.append(self._parameters[name].register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                first += numel

    def _on_gradient(self, name: str, bucket: "_Sampled", first: int, parameter: torch.Tensor) -> None:
        if self._steps % 2:
            self._synchronize()
        begin = self._filled[name] = time.perf_counter()
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            bucket.read(first, parameter.grad.detach().reshape(-1))
        self._own_s += time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _before_update(self, *_: Any) -> None:
        self._averaged = time.perf_counter()

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._synchronize()
        end = time.perf_counter()
        if self._steps == _UNTIMED_STEPS - 1:
            self._start = time.thread_time(), end
        if self._filled and self._steps >= _UNTIMED_STEPS:
            last = max(self._filled.values())
            if self._steps % 2:
                self._ready.append({name: at - last for name, at in self._filled.items()})
            if self._steps % 2 == 0 or self._device.type == "cpu":
                # With overlap the part of the exchange after backward
                exchange_s = min(optimizer.reducer.last_step.seconds, self._averaged - last)
                self._seconds.append(end - self._begun - exchange_s - self._own_s)
            for bucket in self._buckets:
                bucket.observe(self._steps)
        self._steps += 1
        if self._steps == STEPS:
            self._finish()
        self._filled.clear()
        self._own_s, self._begun = 0.0, time.perf_counter()

    def _finish(self) -> None:
        for handle in self._handles:
            handle.remove()
        thread_s, seconds = time.thread_time() - self._start[0], time.perf_counter() - self._start[1]
        on_host = self._device.type == "cpu"
        # Kernels are timed in seconds of a core, for which a rank that shares its cores has to wait.
        slowed = max(1.0, seconds / thread_s) if on_host else 1.0
        ready = {name: median(times.get(name, 0.0) for times in self._ready) for name in self._parameters}
        order = sorted(ready, key=ready.__getitem__)
        muon_s, hidden = _muon(self._parameters)
        self.job = Job(
            sizes=[self._parameters[name].numel() for name in order],
            ready_s=[ready[name] for name in order],
            compute_s=median(self._seconds),
            muon_s=slowed * muon_s,
            hidden=hidden,
            normalises=self._normalises,
            statistics=[bucket.statistics for bucket in self._buckets if not bucket.statistics.is_zero],
            kernels=_kernels(sum(bucket.numel for bucket in self._buckets), self._normalises, slowed)
            if on_host
            else {},
            device=self._device.type,
            spread_s=self._seconds,
            core_share=1 / slowed,
        )
        if self._path is not None:
            with whole_file(self._path) as file:
                json.dump(self.job.to_json(), file)
            print_stderr(
                f"'{self._path}' is the record of this script; next: mpicomp plan --from {self._path} --hosts N"
            )


def _kernels(numel: int, normalises: bool, slowed: float) -> dict[str, KernelCost]:
    """Return the seconds of the kernels of all schemes that are forecast, times ``slowed``."""
    [alone] = LocalWorld(1).transports
    model = CostModel(Network(2))
    group = layout_groups([0, 0, 1, 1], 0)[0]  # on which all collectives run
    wires, quantisers = suggested_compressors(None, normalises)
    compressors: list[Compressor] = [at_ratio(wire, ratio) for wire in wires for ratio in (0.001, 0.25)]
    compressors += [*quantisers, Dense(wire="bf16"), Dense(), OneBit()]
    schemes = [bind(each, name) for each in compressors for name in collectives_for(each, group, complete=True)]
    alone.clock = time.thread_time  # type: ignore[method-assign]
    alone.run(measure_kernels(model, schemes, True, alone, ladder=True))
    array = torch.zeros(numel)
    works = array.clone, lambda: array.copy_(array.half())  # DDP copies into its buckets, and out of them
    copy_s, cast_s = (min(timeit.repeat(work, timer=time.thread_time, repeat=3, number=1)) / numel for work in works)
    model.kernels |= {"ddp": KernelCost(0.0, copy_s), "ddp-fp16": KernelCost(0.0, copy_s + cast_s)}
    return {
        key: KernelCost(slowed * kernel.fixed, slowed * (kernel.per_element + copy_s), slowed * kernel.per_kept)
        for key, kernel in model.kernels.items()
    }  # means are copied into gradients


class _Sampled:
    """Some elements of a bucket's gradients, read by their positions in all of them, and their statistics."""

    def __init__(self, sizes: Sequence[int], normalises: bool) -> None:
        quantisers = suggested_compressors(None, normalises)[1]
        self.numel, self._sizes, self._survey = sum(sizes), sizes, ElementSurvey(sizes, quantisers)
        self._positions = self._survey.positions
        self._values = np.zeros(self._positions.size, np.float32)
        self.statistics = ElementStatistics(self.numel, len(quantisers), normalises)

    def read(self, first: int, gradient: torch.Tensor) -> None:
        """Keep the elements of a gradient, which begins at element ``first`` of the bucket."""
        part = slice(*np.searchsorted(self._positions, (first, first + gradient.numel())))
        places = torch.from_numpy(self._positions[part] - first).to(gradient.device)
        self._values[part] = gradient[places].real.float().cpu().numpy()

    def __getitem__(self, positions: Any) -> Any:
        return self._values[np.searchsorted(self._positions, positions)]

    def observe(self, step: int) -> None:
        self.statistics.observe(self._survey.measure(self, None, self._sizes, step)[None])  # type: ignore[arg-type]
