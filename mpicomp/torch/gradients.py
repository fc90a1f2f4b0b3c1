"""Averaging of the gradients in ``.grad``, and the agreements of ranks that it needs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mpicomp.arrays import as_kind_of
from mpicomp.errors import ConfigurationError, MpicompError, RankFailedError, warn_user
from mpicomp.mpi.rounds import Group, Rounds, from_one, gather_rows
from mpicomp.mpi.thread import ProgressThread
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import Checks, GradientInput, Signature, agree
from mpicomp.reducer.stream import Stream
from mpicomp.torch.checks import (
    BROADCAST_ADVICE,
    DRIFT_ADVICE,
    Fingerprint,
    GradientHooks,
    LoadedStateCheck,
    SettingsCheck,
    StepWatch,
    check_same,
)
from mpicomp.torch.join import JOIN_ADVICE, Join
from mpicomp.torch.overlap import BackwardOverlap
from mpicomp.torch.parameters import as_real
from mpicomp.torch.shards import ShardGroup, array_specs, exchanged

_WHO = "DistributedOptimizer"


class BucketViews:
    """Gradients that lie in the reducer's buckets, if that is ``wanted``."""

    def __init__(self, reducer: Reducer, wanted: bool) -> None:
        reducer.layout.holds_gradients = wanted
        self._layout = reducer.layout
        self._buckets: object = None  # that gradients lie in
        self._views: dict[str, torch.Tensor] = {}

    def add_all(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Move gradients into the buckets, once these exist."""
        layout = self._layout
        if not layout.holds_gradients or self._buckets is layout.buckets:
            return
        self._buckets, self._views = layout.buckets, {}
        for name, parameter in parameters.items():
            memory = layout.gradient(name)
            if memory is None or parameter.layout is not torch.strided or parameter.is_complex():
                continue
            view = as_kind_of(parameter, memory)
            if view.device == parameter.device:  # without CuPy, buckets of gradients on a GPU are on the host
                self._views[name] = view
                self.move(name, parameter)

    def move(self, name: str, parameter: torch.Tensor) -> None:
        """Move a gradient that lies elsewhere into its view, if it has one."""
        view, gradient = self._views.get(name), parameter.grad
        if view is not None and gradient is not None and gradient.data_ptr() != view.data_ptr():
            parameter.grad = view.copy_(gradient.detach())


@dataclass
class _Agreed:
    """State that is the same on all ranks."""

    names: list[str] | None = None  # of exchanged parameters
    compared: bool = False  # whether values were compared, too
    frozen_with_gradient: set[str] = field(default_factory=set)  # on some rank, in the last step


class Gradients(Checks):
    """Averages parameters' gradients; ``averaged`` is True while ``.grad`` holds means. Collective, as is `average`."""

    def __init__(
        self,
        reducer: Reducer,
        parameters: Mapping[str, torch.Tensor],
        settings: SettingsCheck,
        overlap: bool | None = None,
        loss_scale: Callable[[], float] | None = None,
        compare_every: int = 0,
        same_batches: bool = False,
        as_views: bool = False,
    ) -> None:
        self.averaged = False
        self.loaded_state = LoadedStateCheck(_WHO, same_batches)
        self.reducer = reducer
        self.parameters = {name: exchanged(parameter) for name, parameter in reversed(list(parameters.items()))}
        self.shards = ShardGroup(self.parameters.values())
        self._known = {id(parameter) for parameter in parameters.values()}
        self._loss_scale = loss_scale
        self.settings = settings
        self._fingerprint = Fingerprint(compare_every, _WHO, same_batches)
        self._step_watch = StepWatch(_WHO)
        self.overlap = BackwardOverlap(reducer, _WHO, overlap)
        self._problem: MpicompError | None = None
        self._accumulating = False
        self._agreed = _Agreed()
        self._has_warned = False  # of a sparse gradient
        self.join = Join(self.group.size)
        self._views = BucketViews(reducer, as_views)
        self._hooks = GradientHooks(self._filled, self.parameters)

    @property
    def group(self) -> Group:
        return self.reducer.transport.group

    def add(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add parameters, on all ranks."""
        added = {name: exchanged(parameter) for name, parameter in reversed(list(parameters.items()))}
        self.parameters = added | self.parameters
        self._known |= {id(parameter) for parameter in parameters.values()}
        self._agreed.compared = False
        self._hooks.add(self.parameters)

    def check_known(self, parameters: Iterable[torch.Tensor]) -> MpicompError | None:
        """Return the error of a parameter that would be trained without an exchange."""
        for parameter in parameters:
            if (parameter.requires_grad or parameter.grad is not None) and id(parameter) not in self._known:
                return ConfigurationError(
                    f"{_WHO}: param_groups holds a parameter of shape {tuple(parameter.shape)} that is not exchanged; "
                    "add parameters with add_param_group, on all ranks"
                )
        return None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let backward add to gradients without exchanging them."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def average(self, lr: Any, problem: MpicompError | None = None) -> None:
        """Write means into ``.grad``, unless no rank has a gradient; raise ``problem`` on all ranks. Collective."""
        self.shards.begin()
        with torch.no_grad():
            try:
                for name, parameter in self.parameters.items():
                    self._make_dense(name, parameter)
                self.join.find_active(self)
                self._problem = problem or self._find_expanded() or self.overlap.find_change(self.parameters)
                self.stale = self._problem is not None or self.overlap.obstacle != 0 or self.loaded_state.is_due
                if not self.frozen and self.reducer.transport.run(self.settings.begin(self.group)):
                    self.stale = True
                held = {name for name, p in self.parameters.items() if p.grad is not None and not p.requires_grad}
                exchanged = self._exchanged()
                self.stale = self.stale or held != self._agreed.frozen_with_gradient
                self.stale = self.stale or not self._agreed.compared or list(exchanged) != self._agreed.names
                dense, absent = self._gradients(exchanged)
                means = self._exchange(dense, lr, absent)
            except MpicompError as error:
                self.shards.fail(error)
                raise
            finally:
                self.join.is_known = False
                self._step_watch.end_step()
            self._write(means)
            if not self._fingerprint.needs_gradients:
                self._views.add_all(self.parameters)
        self._hooks.add(self.parameters)
        self.averaged = True
        self.note_means()

    def note_means(self) -> None:
        """Note the present gradients as means, in a step in which some rank is idle."""
        means = {name: parameter.grad for name, parameter in self._exchanged().items()} if self.frozen else {}
        self.join.means = {name: (mean, None if mean is None else mean._version) for name, mean in means.items()}

    def close(self) -> None:
        self.overlap.close()
        self._hooks.remove()

    # Agreements of ranks.

    def agree(self, given: GradientInput) -> Rounds[GradientInput | None]:
        trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        frozen = {name: parameter for name, parameter in self.parameters.items() if not parameter.requires_grad}
        as_views = self.reducer.layout.holds_gradients
        settings = {
            "compare_every": self._fingerprint.every,
            "join()": self.join.settings is not None,
            "gradient_as_bucket_view": as_views,
        }
        entering = None if self.join.has_begun else self.join.settings
        yield from agree(Signature(settings | (entering or {}), array_specs(trained)), self._problem, self.group, _WHO)
        if entering is not None:
            return None
        yield from agree(Signature({}, array_specs(frozen)), None, self.group, f"{_WHO}: frozen parameters")
        if not self.frozen:  # ranks without batches receive the settings of one that has some
            yield from self.settings.compare(self.group)
        flags = [not self._agreed.compared, self.overlap.obstacle, self.loaded_state.is_due]
        flags += [parameter.grad is not None for parameter in frozen.values()]
        uncompared, obstacles, loaded, *held = (yield from gather_rows(np.array(flags, np.uint8), self.group)).T
        self._agreed.frozen_with_gradient = {name for name, ranks in zip(frozen, held, strict=True) if ranks.any()}
        if uncompared.any():
            yield from self.compare(BROADCAST_ADVICE)
        if loaded.any():
            yield from self.loaded_state.compare(self.settings.optimizer(), self.parameters, loaded, self.group)
        self.overlap.handle_obstacles(obstacles, self.group)
        if self.shards.exists and self._agreed.names is None:
            names = [*self.shards.arrived, *self.parameters]  # in the order of backward: FSDP reduces its root's last
            order = yield from from_one({"names": names}, self.group, _WHO)
            self.parameters = {name: self.parameters[name] for name in order["names"]}
        exchanged = self._exchanged()
        self._agreed.compared, self._agreed.names = True, list(exchanged)
        return self._gradients(exchanged)

    def compare(self, advice: str) -> Rounds[None]:
        """Compare all ranks' parameters bit for bit."""
        yield from check_same(dict(reversed(list(self._exchanged().items()))), self.group, _WHO, advice)

    # The exchange.

    def finish(self, finite: bool) -> Rounds[bool]:
        exchanged = self._exchanged()
        gradients = [] if self.frozen else [p.grad for p in exchanged.values() if p.grad is not None]
        advice = JOIN_ADVICE if self.join.has_empty_steps else DRIFT_ADVICE
        yield from self._fingerprint.compare(exchanged, self.group, gradients, advice)
        yield from self.settings.finish(self.group)
        return self.shards.agree_finite(finite)

    def restart(self) -> None:
        self._fingerprint.restart()
        self.settings.restart()
        self._agreed.compared, self.stale = False, True

    def _exchanged(self) -> dict[str, torch.Tensor]:
        held = self._agreed.frozen_with_gradient  # which an optimizer would step, too
        return {name: p for name, p in self.parameters.items() if p.requires_grad or name in held}

    def _find_expanded(self) -> ConfigurationError | None:
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None or gradient.is_contiguous():
                continue
            if any(stride == 0 < size - 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)):
                return ConfigurationError(
                    f"{_WHO}: the gradient of '{name}' is expanded, so that several of its elements are one in memory, "
                    "and the mean cannot be written to it; assign .grad = gradient.contiguous()"
                )
        return None

    def _gradients(self, exchanged: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
        dense: dict[str, torch.Tensor] = {}
        absent: set[str] = set()  # names of zeros that stand for none
        for name, parameter in exchanged.items():
            if parameter.grad is None or self.idle:
                absent.add(name)
                dense[name] = _zeros_like(parameter)
            else:
                dense[name] = as_real(parameter.grad)
        return dense, absent

    def _exchange(self, dense: dict[str, torch.Tensor], lr: Any, absent: set[str]) -> dict[str, torch.Tensor]:
        means: dict[str, torch.Tensor] | None = None
        stream = self.overlap.end_backward(self._new_stream)
        if stream is not None:
            try:
                means = stream.finish(dense, lr, absent)
            except RankFailedError:
                if not self.reducer.deaths.survives:
                    raise
        if means is None:
            means = self.reducer.reduce(dense, lr, absent=absent, scale=self._scale(), checks=self)
        if self.join.active.size != self.group.size:  # ranks were lost
            self.join.active = np.ones(self.group.size, bool)
        self.overlap.end_exchange()
        return means

    def exchange_zeros(self) -> None:
        """Let all ranks agree, those in a step among them. Collective."""
        self.stale, self._problem = True, None
        self._exchange({name: _zeros_like(parameter) for name, parameter in self._exchanged().items()}, None, set())

    def _write(self, means: Mapping[str, torch.Tensor]) -> None:
        record = self.reducer.last_step
        assert record is not None
        factor = 1.0 if self._loss_scale is None else self._loss_scale()
        overflowed = record.skipped and self._loss_scale is not None
        for name, mean in means.items():
            parameter = self.parameters[name]
            if parameter.grad is None or parameter.grad.is_conj():
                parameter.grad = torch.empty_like(parameter)
            if parameter.grad.data_ptr() != mean.data_ptr():
                as_real(parameter.grad).copy_(mean)
            if overflowed:
                parameter.grad.fill_(torch.inf)  # a GradScaler skips the step then
            elif factor != 1:
                parameter.grad.mul_(factor)

    def _new_stream(self, thread: ProgressThread) -> Stream | None:
        return self.reducer.stream(thread, self._scale(), self)

    def _scale(self) -> float:
        # From a mean over all ranks to one over those with batches, of unscaled gradients.
        of_active = self.group.size / int(self.join.active.sum()) if self.frozen else 1.0
        return of_active / (1.0 if self._loss_scale is None else self._loss_scale())

    def _make_dense(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is None or not parameter.grad.is_sparse:
            return
        parameter.grad = parameter.grad.to_dense()
        if not self._has_warned and self.group.rank == 0:
            warn_user(
                f"{_WHO}: the gradient of '{name}' is sparse and is made dense before it is exchanged; leave out "
                "sparse=True, or use mpicomp.torch.UpdateOptimizer, whose ranks step on sparse gradients"
            )
        self._has_warned = True

    def _filled(self, name: str, parameter: torch.Tensor) -> None:
        self.averaged = False
        self._make_dense(name, parameter)
        self._views.move(name, parameter)
        if self._accumulating:
            return
        self._step_watch.filled(name, parameter)
        if self._agreed.names is None:
            self.shards.arrived[name] = None
        if self.overlap.overlaps and not self.overlap.has_begun:
            self.join.find_active(self)
        self.overlap.take(name, parameter, self._new_stream)


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    real = as_real(parameter.detach())
    return real.new_zeros(()).expand(real.shape)  # in the memory of one element
