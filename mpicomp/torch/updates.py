"""`UpdateOptimizer`: each rank steps by itself, and changes of parameters are averaged."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpicomp.collectives import fitting
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.errors import ConfigurationError
from mpicomp.job import abort, print_stderr
from mpicomp.mpi.connect import connected
from mpicomp.mpi.rounds import Group, Rounds, gather_rows
from mpicomp.policies import Policy, get_policy
from mpicomp.policies.interval import Interval
from mpicomp.policies.schedule import with_warmup
from mpicomp.reducer import Reducer
from mpicomp.reducer.settings import check_arguments
from mpicomp.reducer.training_reducer import TrainingReducer
from mpicomp.setting_checks import check_flag, check_least
from mpicomp.torch.checks import COMPARE_EVERY, GradientHooks, StepWatch
from mpicomp.torch.combined import CombinedOptimizer, optimizers_in
from mpicomp.torch.parameters import (
    NamedParameters,
    check_no_ddp,
    learning_rate,
    members_of,
    named_pairs,
    parameters_by_name,
)
from mpicomp.torch.proxy import Exchange, OptimizerProxy, check_not_nested, wrap
from mpicomp.torch.shards import check_shards, is_sharded, local_of, make_for_replicas
from mpicomp.torch.shared import SharedParameters

WHO = "UpdateOptimizer"
AUTO = "auto"
_OUTER = ("lr", "momentum", "nesterov", "dampening", "weight_decay", "sign")


@check_arguments(WHO, Reducer)
def UpdateOptimizer(  # noqa: N802, a factory that reads like the class that it stands for
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    named_parameters: NamedParameters,
    sync_every: int | str = 1,
    compressor: Compressor | str | Mapping[str, Any] | None = None,
    collective: str = "auto",
    policy: Policy | str | Mapping[str, Any] | None = None,
    *,
    outer: Mapping[str, Any] | None = None,
    feedback: bool | None = None,
    feedback_decay: float = 1.0,
    nonfinite: str = "raise",
    comm: Any = None,
    warmup: int | str | None = None,
    compare_every: int = COMPARE_EVERY,
    same_batches: bool = False,
    **settings: Any,
) -> Any:
    """Make ranks exchange the changes of parameters, compressed, in place of gradients.

    Each rank steps on its gradient. After every ``sync_every`` steps the changes of parameters are averaged, with error
    feedback, and all ranks continue from the same bits; with one rank and ``outer=None`` it is the optimizer itself.
    Collective over ``comm``, as are the steps of the returned `UpdateProxy`: all ranks make equally many.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer or sequence of them
        Any, also one that calls closures or takes sparse gradients; its state stays on its rank, and learning rates
        must be the same. Several, each with parameters of its own, become one with the groups of all.
    named_parameters, nonfinite, same_batches
        See `mpicomp.torch.DistributedOptimizer`, of changes. With ``nonfinite="skip"`` a rank skips its own step where
        its gradients are not finite, so that no NaN enters its optimizer.
    sync_every : int or "auto"
        Steps from one exchange to the next. ``"auto"`` is the policy `interval`, which chooses steps and bits together.
    compressor, collective, policy, feedback, feedback_decay, comm, warmup, **settings
        See `mpicomp.Reducer`; its steps are exchanges.
    outer : mapping, optional
        Settings of a `torch.optim.SGD` that moves the shared parameters along the mean change (DiLoCo: Douillard et al.
        2023, arXiv 2311.08105; SparseLoCo: Sarfi et al. 2025, arXiv 2508.15706). With ``"sign": True`` the mean change
        counts by its sign, times the learning rate of the first group, and no exchange is dense. None moves them by the
        mean.
    compare_every : int
        Most exchanges from one comparison of the ranks' shared parameters, bit for bit, to the next; the first ones are
        after 1, 2, 4, 8 and so on. 0 compares them only at the first and where a script has written to parameters.

    Raises
    ------
    ConfigurationError
        For an optimizer, parameters or settings that cannot be served.
    DisagreementError
        At an exchange where parameters that the ranks began with or that a script has written differ, or the class or a
        setting of the optimizer.
    NonFiniteError
        With ``nonfinite="raise"``, on all ranks; the parameters then are those of the last exchange.
    """
    settings |= {"feedback_decay": feedback_decay}
    compared = {"sync_every": sync_every, "outer": outer and dict(outer), "compare_every": compare_every}
    with connected(comm) as transport:

        def check() -> Any:
            pairs = named_pairs(named_parameters, WHO, transport.group.size)
            one: Any = CombinedOptimizer(optimizer, WHO) if isinstance(optimizer, list | tuple) else optimizer
            found = _check_arguments(one, pairs, compressor, policy, compared, settings, transport.group.size)
            return one, pairs, *found

        inner, pairs, parameters, chosen = make_for_replicas(check, lambda made: made[2], transport, WHO)
        if outer is not None and outer.get("sign"):
            collective = _never_dense(chosen, collective, policy)
        reducer = TrainingReducer(
            chosen, collective, with_warmup(policy, warmup), feedback, nonfinite, transport, normalises=False,
            default_policy=Interval.id if sync_every == AUTO else None, **settings,
        )  # fmt: skip
        if sync_every == AUTO:
            reducer.policy.chooses_steps = True  # type: ignore[attr-defined]
        shared = SharedParameters(reducer, parameters, compared, inner, outer, compare_every, same_batches)
    exchange = _UpdateExchange(WHO, pairs, transport, transport is not comm)
    exchange.begin(shared, parameters, sync_every, nonfinite == "skip")
    return wrap(inner, UpdateProxy, "Updating", exchange)


class UpdateProxy(OptimizerProxy):
    """Mixin that exchanges changes of parameters after steps of an optimizer's class.

    A GradScaler works as in a single process: a rank whose gradients overflowed skips its step, and takes part in the
    exchange. Writes of a script to parameters, between an exchange and the next step and the same on all ranks, are
    copied to the shared ones; at other times they are a part of that rank's change. ``state_dict()`` and the model's,
    saved on each rank, resume training bit for bit.
    """

    _mpicomp: "_UpdateExchange"
    _step_supports_amp_scaling = True  # a GradScaler calls step() also where this rank's gradients overflowed

    @property
    def sync_every(self) -> int:
        return self._mpicomp.every

    def shared(self) -> dict[str, torch.Tensor]:
        """Return the shared parameters by name, the same bits on all ranks; do not write to them."""
        return self._mpicomp.shared.shared()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Run a loop that may have more batches on some ranks than on others; entered on all ranks.

        A rank whose loop is over takes part in the exchanges of the others, with its residuals, until all are done. An
        error that leaves the loop communicates nothing.
        """
        exchange = self._mpicomp
        if exchange.join is not None:
            raise ConfigurationError(f"{WHO}: join() inside of join(); put the whole loop into one")
        exchange.join = progress = JoinProgress()
        try:
            yield
            progress.is_idle = True
            while not progress.is_over:
                self.step()
        finally:
            exchange.join = None
            exchange.shared.leave_join()

    def rounds(self, closure: Callable[[], Any] | None = None) -> Rounds[Any]:
        """Make a step as a generator of rounds, for ranks that live in one process."""
        self._mpicomp.runs = False
        try:
            loss = self.step(closure)
        finally:
            self._mpicomp.runs = True
        yield from self._mpicomp.rounds(self)
        return loss

    def synchronize(self) -> None:
        """Exchange all changes, as before a checkpoint or the end where ``sync_every`` has left some. Collective."""
        self._mpicomp.transport.run(self.synchronizing())

    def synchronizing(self) -> Rounds[None]:
        """Synchronize as a generator of rounds, for ranks that live in one process."""
        shared = self._mpicomp.shared
        if not shared.fresh:
            yield from shared.exchange_changes(learning_rate(self))


@dataclass
class JoinProgress:
    """State of `UpdateProxy.join`."""

    batches: int = 0  # steps of this rank with batches since the last exchange
    is_idle: bool = False  # this rank has no batches left
    is_enabled: bool = False  # all ranks have agreed that they may run out of batches
    is_over: bool = False  # no rank has had any batch since the exchange before


class _UpdateExchange(Exchange):
    """Exchanges the changes that an optimizer's steps have made to shared parameters, after every n-th of them."""

    shared: SharedParameters
    join: JoinProgress | None = None
    runs = True  # whether a step exchanges by itself, or its caller by `rounds`

    def begin(
        self, shared: SharedParameters, parameters: Mapping[str, torch.Tensor], sync_every: int | str, skips: bool
    ) -> None:
        """Begin with steps of these parameters; ``skips`` leaves out those with gradients that are not finite."""
        self.shared, self.reducer, self._skips = shared, shared.reducer, skips
        self._interval: Any = self.reducer.policy if sync_every == AUTO else None
        self._steps, self.every = 0, 1 if isinstance(sync_every, str) else sync_every
        self._watch = StepWatch(WHO, accumulates=True)
        self._hooks = GradientHooks(self._watch.filled, parameters)
        self._end = weakref.finalize(self, report_own_steps, shared, self.transport.group)
        self._state_reported = False
        self._hidden: tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]] = {}, []

    def before(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Copy writes of a script to parameters, and hide gradients that are not finite."""
        self._watch.is_in_step = True  # a closure may fill gradients many times, as that of LBFGS
        self.shared.copy_written()
        of_scaler: dict[str, Any] = {
            name: optimizer.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in optimizer.__dict__
        }
        self._hidden = of_scaler, []
        factor, overflowed = of_scaler.get("grad_scale"), of_scaler.get("found_inf")
        if factor is not None:
            for _, gradient in _gradients_of(optimizer):
                gradient.mul_(1 / factor.to(gradient.device))
        if closure is None:
            self._hide(optimizer, overflowed)
        if closure is None or not self._skips:
            return closure

        def checked() -> Any:
            loss = closure()
            self._hide(optimizer, None)
            return loss

        return checked

    def _hide(self, optimizer: Any, overflowed: torch.Tensor | None) -> None:
        gradients = _gradients_of(optimizer)
        is_spoilt = overflowed is not None and bool(overflowed)
        if overflowed is None and self._skips:
            local = [local_of(gradient) for _, gradient in gradients]
            values = [part.coalesce().values() if part.is_sparse else part for part in local]
            is_spoilt = not self.shared.shards.all(all(bool(part.isfinite().all()) for part in values))
        if is_spoilt or (self.join is not None and self.join.is_idle):
            for parameter, _ in gradients:
                parameter.grad = None  # optimizers pass over such parameters
            self._hidden = self._hidden[0], gradients

    def after(self, optimizer: Any) -> None:
        self._watch.end_step()
        of_scaler, gradients = self._hidden
        optimizer.__dict__.update(of_scaler)  # the scaler removes them
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._hidden = {}, []
        self._steps += 1
        if self.join is not None and not self.join.is_idle:
            self.join.batches += 1
        if self.runs:
            self.transport.run(self.rounds(optimizer))

    def rounds(self, optimizer: Any) -> Rounds[None]:
        """Exchange changes after a step, where that is due."""
        if self._steps % self.every:
            return
        if self.join is not None:
            yield from self._find_active(self.join)
            if self.join.is_over:
                return
        yield from self.shared.exchange_changes(learning_rate(optimizer))
        if self._interval is not None:
            self._steps, self.every = 0, self._interval.sync_every

    def _find_active(self, join: JoinProgress) -> Rounds[None]:
        if not join.is_enabled:
            yield from self.shared.enable_join()
            join.is_enabled = True
        rows = yield from gather_rows(np.uint8(join.batches > 0), self.transport.group)
        active, idle = int(rows.sum()), join.batches == 0
        join.batches, join.is_over = 0, active == 0
        self.shared.set_active(max(active, 1), idle)

    def add(self, parameters: dict[str, torch.Tensor]) -> None:
        self.shared.add(parameters)
        self._hooks.add(parameters)

    def trained(self, optimizer: Any) -> dict[str, torch.Tensor]:
        return self.shared.trained()

    def state_dict(self) -> dict[str, Any]:
        group = self.transport.group
        if not self._state_reported and group.size > 1 and not self.shared.fresh:
            self._state_reported = True
            print_stderr(
                f"rank {group.rank}: {WHO}: state_dict() between two exchanges has steps of this rank alone; save it, "
                "and the model's, on every rank, or call optimizer.synchronize() on all ranks first"
            )
        return self.shared.state_dict()

    def check_state(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        self.shared.check_fits(state)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            self.shared.load_state_dict(state)
            self._steps = int(state["steps"])
            if self._interval is not None:
                self.every = int(state["sync_every"])

    def drop_loaded(self) -> None:
        self.shared.drop_loaded_state()

    def progress(self) -> dict[str, Any]:
        return {"steps": self._steps, "sync_every": self.every}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        self._steps, self.every = progress["steps"], progress["sync_every"]

    def close(self) -> None:
        if sys.exc_info()[0] is None:
            self._end()
        self._end.detach()
        self._hooks.remove()
        super().close()


def _gradients_of(optimizer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(parameter, parameter.grad) for parameter in members_of(optimizer) if parameter.grad is not None]


def report_own_steps(shared: SharedParameters, group: Group) -> None:
    """Tell the user where an optimizer ends between two exchanges."""
    if abort.status == 0 and group.size > 1 and not shared.fresh:
        print_stderr(
            f"rank {group.rank}: {WHO} ends with steps that were not exchanged, so that the ranks' models differ; call "
            "optimizer.synchronize() on all ranks after the last step"
        )


def _never_dense(chosen: Compressor | None, collective: str, policy: Any) -> str:
    # The mean of dense steps has other signs; a named collective or a policy's stays.
    is_named = collective != "auto" or getattr(policy, "id", policy) not in (None, "static")
    if is_named or chosen is None or chosen.message == "dense" or not chosen.can_fall_back_to_dense:
        return collective
    return fitting(chosen)[0]


def _check_arguments(
    optimizer: Any,
    pairs: Sequence[tuple[str, torch.Tensor]],
    compressor: Compressor | str | Mapping[str, Any] | None,
    policy: Any,
    compared: Mapping[str, Any],
    settings: Mapping[str, Any],
    ranks: int,
) -> tuple[dict[str, torch.Tensor], Compressor | None]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"{WHO}: a torch optimizer is needed, got {type(optimizer).__name__}")
    is_closed = isinstance(optimizer, UpdateProxy) and optimizer._mpicomp_closed
    if isinstance(optimizer, OptimizerProxy) and not is_closed:
        raise ConfigurationError(f"{WHO}: {type(optimizer).__name__} exchanges already; pass a plain optimizer")
    sync_every = compared["sync_every"]
    if isinstance(sync_every, str) and sync_every != AUTO:
        raise ConfigurationError(f"{WHO}: sync_every must be an integer of at least 1, or '{AUTO}', got {sync_every!r}")
    if sync_every != AUTO:
        check_least(WHO, "sync_every", sync_every)
    check_least(WHO, "compare_every", compared["compare_every"], 0)
    if compared["outer"] is not None:
        _check_outer(compared["outer"])
    chosen = None if compressor is None else get_compressor(compressor)
    if chosen is not None and chosen.entry.momentum:
        raise ConfigurationError(
            f"{WHO}: {chosen!r} applies momentum to gradients, and changes of parameters, which are exchanged here, "
            "hold the optimizer's momentum already; set momentum=0 in it"
        )
    parameters = parameters_by_name(optimizer, pairs, WHO)
    check_shards(parameters, settings, WHO)
    if sync_every == AUTO and any(map(is_sharded, parameters.values())):
        raise ConfigurationError(
            f"{WHO}: sync_every='{AUTO}' would choose for each shard alone, and all of a model has to be exchanged at "
            "the same steps; name a number"
        )
    check_no_ddp(parameters, ranks, WHO)
    for plain in optimizers_in(optimizer):
        check_not_nested(plain, WHO, averages_gradients=False)
    if sync_every == AUTO and policy is not None:
        named = get_policy({"id": Interval.id} | dict(policy) if isinstance(policy, Mapping) else policy)
        if not isinstance(named, Interval):
            raise ConfigurationError(
                f"{WHO}: sync_every='{AUTO}' is policy '{Interval.id}', got policy='{named.id}'; name a number of steps"
            )
    return parameters, chosen


def _check_outer(outer: Mapping[str, Any]) -> None:
    unknown = sorted(set(outer) - set(_OUTER))
    if unknown:
        raise ConfigurationError(f"{WHO}: outer must have some of {', '.join(_OUTER)}, got {unknown[0]!r}")
    check_flag(WHO, "outer['sign']", outer.get("sign", False))
    if outer.get("sign") and outer.get("momentum"):
        raise ConfigurationError(
            f"{WHO}: outer has momentum and takes the sign of changes, which have no scale any more; leave momentum "
            "out: residuals are one, with feedback_decay"
        )
    try:
        torch.optim.SGD([torch.zeros(1)], **{name: value for name, value in outer.items() if name != "sign"})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{WHO}: outer: {error}") from None
