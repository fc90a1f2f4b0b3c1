"""Averaging of the gradients in ``.grad``, and the agreements of ranks that it needs."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mpicomp.arrays import as_kind_of
from mpicomp.errors import ConfigurationError, MpicompError, RankFailedError, warn_user
from mpicomp.mpi.rounds import Group, Rounds, from_one, gather_rows
from mpicomp.mpi.thread import ProgressThread
from mpicomp.mpi.transport import Value
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import Checks, GradientInput, Signature, agree
from mpicomp.reducer.stream import Stream
from mpicomp.torch.checks import (
    BROADCAST_ADVICE,
    DRIFT_ADVICE,
    Fingerprint,
    LoadedStateCheck,
    SettingsCheck,
    StepWatch,
    check_same,
    hook_gradients,
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
        self._reducer = reducer
        self._parameters = {name: exchanged(parameter) for name, parameter in reversed(list(parameters.items()))}
        self._arrived: dict[str, None] = {}  # names in the order of backward, until ranks have agreed
        self._shards = ShardGroup(self._parameters.values())
        self._known = {id(parameter) for parameter in parameters.values()}
        self._loss_scale = loss_scale
        self._settings = settings
        self._fingerprint = Fingerprint(compare_every, _WHO, same_batches)
        self._step_watch = StepWatch(_WHO)
        self._overlap = BackwardOverlap(reducer, _WHO, overlap)
        self._problem: MpicompError | None = None
        self._accumulating = False
        # Agreed on by all ranks:
        self._agreed: list[str] | None = None  # names of exchanged parameters
        self._compared = False  # whether values were compared, too
        self._frozen_with_gradient: set[str] = set()  # on some rank, in the last step
        self._has_warned = False  # of a sparse gradient
        self.join = Join(self.group.size)
        self._views = BucketViews(reducer, as_views)
        self._hooks: dict[str, Any] = {}
        self._add_hooks()
        self._finalizer = weakref.finalize(self, _remove, self._hooks)
        self._finalizer.atexit = False

    @property
    def overlaps(self) -> bool:
        """Whether gradients are exchanged during backward."""
        return self._overlap.overlaps

    @property
    def has_begun(self) -> bool:
        """Whether a part of this step's exchange has begun, during backward."""
        return self._overlap.has_begun

    @property
    def is_sharded(self) -> bool:
        return self._shards.exists

    @property
    def group(self) -> Group:
        return self._reducer.transport.group

    def parameter(self, name: str) -> torch.Tensor:
        return self._parameters[name]

    def add(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add parameters, on all ranks."""
        added = {name: exchanged(parameter) for name, parameter in reversed(list(parameters.items()))}
        self._parameters = added | self._parameters
        self._known |= {id(parameter) for parameter in parameters.values()}
        self._compared = False
        self._add_hooks()

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

    def clear(self) -> None:
        """Note that gradients are cleared; not collective."""
        self._overlap.clear()
        self.averaged = False

    def average(self, lr: Any, problem: MpicompError | None = None) -> None:
        """Write means into ``.grad``, unless no rank has a gradient; raise ``problem`` on all ranks. Collective."""
        self._shards.begin()
        with torch.no_grad():
            try:
                for name, parameter in self._parameters.items():
                    self._make_dense(name, parameter)
                self.join.find_active(self)
                self._problem = problem or self._find_expanded() or self._overlap.find_change(self._parameters)
                self.stale = self._problem is not None or self._overlap.obstacle != 0 or self.loaded_state.is_due
                if not self.frozen and self.run(self._settings.begin(self.group)):
                    self.stale = True
                held = {name for name, p in self._parameters.items() if p.grad is not None and not p.requires_grad}
                exchanged = self._exchanged()
                self.stale = self.stale or held != self._frozen_with_gradient
                self.stale = self.stale or not self._compared or list(exchanged) != self._agreed
                dense, absent = self._gradients(exchanged)
                means = self._exchange(dense, lr, absent)
            except MpicompError as error:
                self._shards.fail(error)
                raise
            finally:
                self.join.is_known = False
                self._step_watch.end_step()
            self._write(means)
            if not self._fingerprint.needs_gradients:
                self._views.add_all(self._parameters)
        self._add_hooks()
        self.averaged = True
        self.note_means()

    def note_means(self) -> None:
        """Note the present gradients as means, in a step in which some rank is idle."""
        self.join.note(self._exchanged() if self.frozen else {})

    def run(self, exchange: Rounds[Value], activity: str | None = None) -> Value:
        if activity is not None:
            self._reducer.transport.activity.purpose = activity, ()
        return self._reducer.transport.run(exchange)

    def close(self) -> None:
        self._overlap.close()
        self._finalizer()

    # Agreements of ranks.

    def agree(self, given: GradientInput) -> Rounds[GradientInput | None]:
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        frozen = {name: parameter for name, parameter in self._parameters.items() if not parameter.requires_grad}
        as_views = self._reducer.layout.holds_gradients
        settings = {
            "compare_every": self._fingerprint.every,
            "join()": self.join.settings is not None,
            "gradient_as_bucket_view": as_views,
        }
        if self.join.is_beginning:
            settings |= self.join.settings or {}
        yield from agree(Signature(settings, array_specs(trained)), self._problem, self.group, _WHO)
        if self.join.is_beginning:
            return None
        yield from agree(Signature({}, array_specs(frozen)), None, self.group, f"{_WHO}: frozen parameters")
        if not self.frozen:  # ranks without batches receive the settings of one that has some
            yield from self._settings.compare(self.group)
        flags = [not self._compared, self._overlap.obstacle, self.loaded_state.is_due]
        flags += [parameter.grad is not None for parameter in frozen.values()]
        uncompared, obstacles, loaded, *held = (yield from gather_rows(np.array(flags, np.uint8), self.group)).T
        self._frozen_with_gradient = {name for name, ranks in zip(frozen, held, strict=True) if ranks.any()}
        if uncompared.any():
            yield from self.compare(BROADCAST_ADVICE)
        if loaded.any():
            yield from self.loaded_state.compare(loaded, self.group)
        self._overlap.handle_obstacles(obstacles, self.group)
        if self.is_sharded and self._agreed is None:
            yield from self._order_by_arrival()
        exchanged = self._exchanged()
        self._compared, self._agreed = True, list(exchanged)
        return self._gradients(exchanged)

    def _order_by_arrival(self) -> Rounds[None]:
        """Order parameters as backward of the first rank has reached them: FSDP reduces its root's last."""
        order = yield from from_one({"names": [*self._arrived, *self._parameters]}, self.group, _WHO)
        self._parameters = {name: self._parameters[name] for name in order["names"]}

    def compare(self, advice: str) -> Rounds[None]:
        """Compare all ranks' parameters bit for bit."""
        yield from check_same(dict(reversed(list(self._exchanged().items()))), self.group, _WHO, advice)

    # The exchange.

    def finish(self, finite: bool) -> Rounds[bool]:
        exchanged = self._exchanged()
        gradients = [] if self.frozen else [p.grad for p in exchanged.values() if p.grad is not None]
        advice = JOIN_ADVICE if self.join.has_empty_steps else DRIFT_ADVICE
        yield from self._fingerprint.compare(exchanged, self.group, gradients, advice)
        yield from self._settings.finish(self.group)
        return self._shards.agree_finite(finite)

    def restart(self) -> None:
        self._fingerprint.restart()
        self._settings.restart()
        self._compared, self.stale = False, True

    def _exchanged(self) -> dict[str, torch.Tensor]:
        """Return the parameters that require a gradient, or that an optimizer would step."""
        held = self._frozen_with_gradient
        return {name: p for name, p in self._parameters.items() if p.requires_grad or name in held}

    def _find_expanded(self) -> ConfigurationError | None:
        """Return an error for a gradient that a script has expanded: means cannot be written to it."""
        for name, parameter in self._parameters.items():
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
        """Return the gradients, and the names of zeros that stand for none."""
        dense: dict[str, torch.Tensor] = {}
        absent: set[str] = set()
        for name, parameter in exchanged.items():
            if parameter.grad is None or self.idle:
                absent.add(name)
                dense[name] = _zeros_like(parameter)
            else:
                dense[name] = as_real(parameter.grad)
        return dense, absent

    def _exchange(self, dense: dict[str, torch.Tensor], lr: Any, absent: set[str]) -> dict[str, torch.Tensor]:
        means: dict[str, torch.Tensor] | None = None
        stream = self._overlap.end_backward(self._new_stream)
        if stream is not None:
            try:
                means = stream.finish(dense, lr, absent)
            except RankFailedError:
                if not self._reducer.deaths.survives:
                    raise
        if means is None:
            means = self._reducer.reduce(dense, lr, absent=absent, scale=self._scale(), checks=self)
        if self.join.active.size != self.group.size:  # ranks were lost
            self.join.active = np.ones(self.group.size, bool)
        self._overlap.end_exchange()
        return means

    def exchange_zeros(self) -> None:
        """Let all ranks agree, those in a step among them. Collective."""
        self.stale, self._problem = True, None
        self._exchange({name: _zeros_like(parameter) for name, parameter in self._exchanged().items()}, None, set())

    def settings(self) -> dict[str, Any]:
        """Return the optimizer's settings by name."""
        return self._settings.settings()

    def _write(self, means: Mapping[str, torch.Tensor]) -> None:
        record = self._reducer.last_step
        assert record is not None
        factor = 1.0 if self._loss_scale is None else self._loss_scale()
        overflowed = record.skipped and self._loss_scale is not None
        for name, mean in means.items():
            parameter = self._parameters[name]
            if parameter.grad is None or parameter.grad.is_conj():
                parameter.grad = torch.empty_like(parameter)
            if parameter.grad.data_ptr() != mean.data_ptr():
                as_real(parameter.grad).copy_(mean)
            if overflowed:
                parameter.grad.fill_(torch.inf)  # a GradScaler skips the step then
            elif factor != 1:
                parameter.grad.mul_(factor)

    def _new_stream(self, thread: ProgressThread) -> Stream | None:
        return self._reducer.stream(thread, self._scale(), self)

    def _scale(self) -> float:
        """Return the factor from a mean over all ranks to one over those with batches, of unscaled gradients."""
        of_active = self.group.size / int(self.join.active.sum()) if self.frozen else 1.0
        return of_active / (1.0 if self._loss_scale is None else self._loss_scale())

    def _add_hooks(self) -> None:
        new = {name: parameter for name, parameter in self._parameters.items() if name not in self._hooks}
        self._hooks |= hook_gradients(new, self._filled)

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
        if self._agreed is None:
            self._arrived[name] = None
        if self.overlaps and not self._overlap.has_begun:
            self.join.find_active(self)
        self._overlap.take(name, parameter, self._new_stream)


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros in the place of a gradient, in the memory of one element."""
    real = as_real(parameter.detach())
    return real.new_zeros(()).expand(real.shape)


def _remove(hooks: dict[str, Any]) -> None:
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
