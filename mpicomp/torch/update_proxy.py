"""The mixin of `mpicomp.torch.UpdateOptimizer`, which exchanges the changes of parameters."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpicomp.errors import ConfigurationError
from mpicomp.policies.interval import Interval
from mpicomp.reducer import Reducer
from mpicomp.rounds import Group, Rounds, gather_rows
from mpicomp.system import abort, say
from mpicomp.torch.arguments import learning_rate, members_of
from mpicomp.torch.optimizer_proxy import Arguments, OptimizerProxy, closure_of, with_closure
from mpicomp.torch.shards import check_rows, local_of, rows_of
from mpicomp.torch.shared_parameters import SharedParameters
from mpicomp.torch.states import to_tensors
from mpicomp.torch.step_watch import StepWatch, hook_gradients
from mpicomp.transport import Transport

WHO = "UpdateOptimizer"


class UpdateProxy(OptimizerProxy):
    """Mixin that exchanges changes of parameters after steps of an optimizer's class."""

    _mpicomp_who = WHO
    _mpicomp_exchanges = True
    _step_supports_amp_scaling = True  # a GradScaler calls step() also where this rank's gradients overflowed
    _mpicomp_steps: int
    _mpicomp_interval: Interval | None  # the policy that chooses the number of steps to an exchange
    _mpicomp_every: int
    _mpicomp_shared: SharedParameters
    _mpicomp_skips: bool
    _mpicomp_transport: Transport
    _mpicomp_owns_transport: bool
    _mpicomp_watch: StepWatch
    _mpicomp_hooks: dict[str, Any]
    _mpicomp_end: "weakref.finalize[Any, Any]"  # reports steps that were not exchanged, at close(), exit or collection
    _mpicomp_state_reported = False
    _mpicomp_idle = False
    _mpicomp_join: "JoinProgress | None" = None
    _mpicomp_hidden: tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]] = ({}, [])

    @property
    def reducer(self) -> Reducer:
        return self._mpicomp_shared.reducer

    @property
    def sync_every(self) -> int:
        return self._mpicomp_every

    def shared(self) -> dict[str, torch.Tensor]:
        """Return the shared parameters by name, the same bits on all ranks; do not write to them."""
        return self._mpicomp_shared.shared()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Run a loop that may have more batches on some ranks than on others; entered on all ranks.

        A rank whose loop is over takes part in the exchanges of the others, with its residuals, until all are done. An
        error that leaves the loop communicates nothing.
        """
        if self._mpicomp_join is not None:
            raise ConfigurationError(f"{WHO}: join() inside of join(); put the whole loop into one")
        self._mpicomp_join = progress = JoinProgress()
        try:
            yield
            self._mpicomp_idle = True
            while not progress.is_over:
                self.step()
        finally:
            self._mpicomp_join, self._mpicomp_idle = None, False
            self._mpicomp_shared.leave_join()

    def rounds(self, closure: Callable[[], Any] | None = None) -> Rounds[Any]:
        """Make a step as a generator of rounds, for ranks that live in one process."""
        self._mpicomp_exchanges = False
        try:
            loss = self.step(closure)
        finally:
            self._mpicomp_exchanges = True
        yield from self._mpicomp_rounds()
        return loss

    def synchronize(self) -> None:
        """Exchange all changes. Collective."""
        self._mpicomp_transport.run(self.synchronizing())

    def synchronizing(self) -> Rounds[None]:
        """Synchronize as a generator of rounds, for ranks that live in one process."""
        if not self._mpicomp_shared.fresh:
            yield from self._mpicomp_shared.exchange_changes(learning_rate(self))

    def _mpicomp_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Copy writes of a script to parameters, and hide gradients that are not finite."""
        self._mpicomp_watch.begin_step()
        self._mpicomp_shared.copy_written()
        of_scaler: dict[str, Any] = {
            name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__
        }
        self._mpicomp_hidden = of_scaler, []
        factor, overflowed = of_scaler.get("grad_scale"), of_scaler.get("found_inf")
        if factor is not None:
            for _, gradient in self._mpicomp_gradients():
                gradient.mul_(1 / factor.to(gradient.device))
        closure = closure_of(args, kwargs)
        if closure is None:
            self._mpicomp_hide(overflowed)
        elif self._mpicomp_skips:

            def checked() -> Any:
                loss = closure()
                self._mpicomp_hide(None)
                return loss

            args, kwargs = with_closure(args, kwargs, checked)
        return args, kwargs

    def _mpicomp_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(parameter, parameter.grad) for parameter in members_of(self) if parameter.grad is not None]

    def _mpicomp_hide(self, overflowed: torch.Tensor | None) -> None:
        """Hide gradients that are not finite, or those of an idle rank, from this rank's step."""
        gradients = self._mpicomp_gradients()
        if overflowed is not None:
            is_spoilt = bool(overflowed)
        else:
            is_spoilt = self._mpicomp_skips and not self._mpicomp_shared.is_finite(
                all(_is_finite(local_of(gradient)) for _, gradient in gradients)
            )
        if is_spoilt or self._mpicomp_idle:
            for parameter, _ in gradients:
                parameter.grad = None  # optimizers pass over such parameters
            self._mpicomp_hidden = self._mpicomp_hidden[0], gradients

    def _mpicomp_after(self) -> None:
        self._mpicomp_watch.end_step()
        of_scaler, gradients = self._mpicomp_hidden
        self.__dict__.update(of_scaler)  # the scaler removes them
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._mpicomp_hidden = {}, []
        self._mpicomp_steps += 1
        if self._mpicomp_join is not None and not self._mpicomp_idle:
            self._mpicomp_join.batches += 1
        if self._mpicomp_exchanges:
            self._mpicomp_transport.run(self._mpicomp_rounds())

    def _mpicomp_rounds(self) -> Rounds[None]:
        if self._mpicomp_steps % self._mpicomp_every:
            return
        if self._mpicomp_join is not None:
            yield from self._mpicomp_find_active(self._mpicomp_join)
            if self._mpicomp_join.is_over:
                return
        yield from self._mpicomp_shared.exchange_changes(learning_rate(self))
        if self._mpicomp_interval is not None:
            self._mpicomp_steps, self._mpicomp_every = 0, self._mpicomp_interval.sync_every

    def _mpicomp_find_active(self, join: "JoinProgress") -> Rounds[None]:
        """Agree on the ranks that have had batches since the last exchange."""
        if not join.is_enabled:
            yield from self._mpicomp_shared.enable_join()
            join.is_enabled = True
        rows = yield from gather_rows(np.uint8(join.batches > 0), self._mpicomp_transport.group)
        active, idle = int(rows.sum()), join.batches == 0
        join.batches, join.is_over = 0, active == 0
        self._mpicomp_shared.set_active(max(active, 1), idle)

    def _mpicomp_add(self, parameters: dict[str, torch.Tensor]) -> None:
        self._mpicomp_shared.add(parameters)
        self._mpicomp_hooks |= hook_gradients(parameters, self._mpicomp_watch.filled)

    def state_dict(self) -> dict[str, Any]:
        if not self._mpicomp_state_reported and has_own_steps(self._mpicomp_shared, self._mpicomp_transport.group):
            self._mpicomp_state_reported = True
            say(
                f"rank {self._mpicomp_transport.group.rank}: {WHO}: state_dict() between two exchanges has steps of "
                "this rank alone; save it, and the model's, on every rank, or call optimizer.synchronize() on all "
                "ranks first"
            )
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        rows = rows_of(self._mpicomp_shared.trained())
        added = self._mpicomp_progress() | ({"rows": rows} if rows else {}) | self._mpicomp_shared.state_dict()
        return state | {"mpicomp": to_tensors(added)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = to_tensors(state_dict.get("mpicomp"))
        if state is not None:
            check_rows(state.get("rows", {}), self._mpicomp_shared.trained(), WHO)
            self._mpicomp_shared.check_fits(state)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "mpicomp"})  # type: ignore[misc]
        if state is None:
            return
        self._mpicomp_shared.load_state_dict(state)
        self._mpicomp_steps = int(state["steps"])
        if self._mpicomp_interval is not None:
            self._mpicomp_every = int(state["sync_every"])

    def _mpicomp_has_loaded(self) -> bool:
        return self.reducer.loaded is not None

    def _mpicomp_drop_loaded(self) -> None:
        self._mpicomp_shared.drop_loaded_state()

    def _mpicomp_progress(self) -> dict[str, Any]:
        """Return what `mpicomp.torch.broadcast_optimizer_state` sends besides state and settings."""
        return {"steps": self._mpicomp_steps, "sync_every": self._mpicomp_every}

    def _mpicomp_load_progress(self, progress: Mapping[str, Any]) -> None:
        self._mpicomp_steps, self._mpicomp_every = progress["steps"], progress["sync_every"]

    def close(self) -> None:
        self._mpicomp_closed = True
        if sys.exc_info()[0] is None:
            self._mpicomp_end()
        self._mpicomp_end.detach()
        while self._mpicomp_hooks:
            self._mpicomp_hooks.popitem()[1].remove()
        self._mpicomp_shared.close()
        if self._mpicomp_owns_transport:
            self._mpicomp_transport.close()


def has_own_steps(shared: SharedParameters, group: Group) -> bool:
    """Return whether this rank has made steps that were not exchanged with others."""
    return group.size > 1 and not shared.fresh


def report_own_steps(shared: SharedParameters, group: Group) -> None:
    """Tell the user where an optimizer ends between two exchanges."""
    if abort.status == 0 and has_own_steps(shared, group):
        say(
            f"rank {group.rank}: {WHO} ends with steps that were not exchanged, so that the ranks' models differ; call "
            "optimizer.synchronize() on all ranks after the last step"
        )


@dataclass
class JoinProgress:
    """State of `UpdateProxy.join`."""

    batches: int = 0  # steps of this rank with batches since the last exchange
    is_enabled: bool = False  # all ranks have agreed that they may run out of batches
    is_over: bool = False  # no rank has had any batch since the exchange before


def _is_finite(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())
