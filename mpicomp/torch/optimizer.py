"""An optimizer whose gradients are averaged over MPI ranks."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from mpicomp.compressors import Compressor, get_compressor
from mpicomp.errors import ConfigurationError
from mpicomp.policies import Policy
from mpicomp.policies.warmup import with_warmup
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import run_collectively
from mpicomp.reducer.layout import LARGE_BUCKET
from mpicomp.reducer.settings import check_settings
from mpicomp.setting_checks import check_least
from mpicomp.torch.arguments import (
    NamedParameters,
    as_real,
    check_no_ddp,
    dtype_name,
    learning_rate,
    members_of,
    named_pairs,
    parameters_by_name,
)
from mpicomp.torch.collective_optimizer import CollectiveOptimizer
from mpicomp.torch.gradients import Gradients
from mpicomp.torch.join import Join, copy_active_step
from mpicomp.torch.optimizer_proxy import (
    Arguments,
    OptimizerProxy,
    check_not_nested,
    closure_of,
    with_closure,
    wrap,
)
from mpicomp.torch.replica_checks import COMPARE_EVERY, SettingsCheck
from mpicomp.torch.states import name_of, to_arrays, to_tensors
from mpicomp.transport import Transport
from mpicomp.transport.connect import connect

_WHO = "DistributedOptimizer"
_SMALL_BUCKET = 8 << 20  # bytes of a bucket whose elements all travel


def DistributedOptimizer(  # noqa: N802, a factory that reads like the class that it stands for
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    compressor: Compressor | str | Mapping[str, Any] | None = None,
    collective: str = "auto",
    policy: Policy | str | Mapping[str, Any] | None = None,
    *,
    feedback: bool | None = None,
    nonfinite: str = "raise",
    comm: Any = None,
    overlap: bool | None = None,
    scaler: torch.amp.GradScaler | None = None,
    bucket_bytes: int | None = None,
    warmup: int | str | None = None,
    compare_every: int = COMPARE_EVERY,
    same_batches: bool = False,
    **settings: Any,
) -> Any:
    """Make an optimizer average its gradients over the ranks, compressed, before every step.

    Collective over ``comm``, as are the steps of the returned optimizer: all ranks step at the same time. A parameter
    without a gradient takes part with zeros, so that all ranks exchange the same arrays whatever their batches touched;
    a parameter without a gradient on all ranks is left without, as it would be in a single process. Sparse gradients
    are averaged row by row, uncompressed.

    Gradients are exchanged while backward goes on: a bucket as soon as backward has reached all gradients in it. For
    that they must not be written to before ``step()`` or ``synchronize()``, and backward must reach each once a step,
    unless it runs inside `accumulate`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any optimizer that reads gradients once a step. LBFGS reads them many times: see `UpdateOptimizer`.
    named_parameters : iterable of (str, torch.Tensor), mapping or torch.nn.Module
        ``model.named_parameters()`` or the model: every parameter of the optimizer that requires a gradient has to be
        among them. Parameters that are in no group of the optimizer are left out. Complex ones are exchanged as pairs
        of reals: their residuals have a last dimension of 2.
    compressor, collective, policy, feedback, nonfinite, comm, warmup
        See `mpicomp.Reducer`.
    overlap : bool, optional
        False exchanges everything in ``step()``. True exchanges while backward goes on, and refuses a script that does
        not allow it. None tries: the first two steps are exchanged in ``step()`` and watched, and once the script
        writes to gradients before ``step()``, clears them or runs backward twice, all steps are, with a warning. With
        None all are exchanged in ``step()`` also where all ranks are on one host and torch's threads use all of its
        cores: the exchange would take turns with backward. So are they in any case, with a warning, where MPI was
        started with less than MPI_THREAD_MULTIPLE.
    scaler : torch.amp.GradScaler, optional
        The scaler of the loss. ``scaler.unscale_(optimizer)`` and ``scaler.step(optimizer)`` then average gradients
        first, and a step in which some rank's gradients overflowed is skipped on all of them, residuals as they were.
    bucket_bytes : int, optional
        See `mpicomp.Reducer`. None lets mpicomp choose where it also chooses the exchange. Otherwise it means 32 MiB
        for a compressor that selects elements, since the cost of such an exchange hardly grows with a bucket, and 8 MiB
        for others, so that the exchange begins early in backward.
    compare_every : int
        Most steps from one comparison of the ranks' parameters to the next, bit for bit; the first ones are after steps
        1, 2, 4, 8 and so on. 0 compares before the first step alone.
    same_batches : bool
        Whether ranks are meant to draw the same batches: else there is a warning where the gradients of the first steps
        were the same on all of them.
    **settings
        Further settings of `mpicomp.Reducer`.

    Returns
    -------
    torch.optim.Optimizer
        The same optimizer, which from now on is of a class derived from its present one: schedulers, hooks and steps
        that were put into it, before or later, work as before. It has ``reducer``, a `mpicomp.Reducer`;
        ``synchronize()``, which averages the gradients now, so that they can be clipped before ``step()``;
        ``accumulate()``, a context in which backward adds to gradients and nothing is exchanged; ``join()``, a context
        for ranks with different numbers of batches; ``overlaps``, whether gradients are exchanged while backward goes
        on; and ``close()``, which ``with`` calls at its end. Its ``state_dict()`` has this rank's state of the reducer
        under ``"mpicomp"``. It can be neither copied nor pickled, since it holds a communicator; after ``close()`` it
        can be wrapped again.

    Raises
    ------
    ConfigurationError
        For an optimizer or parameters that cannot be served.
    DisagreementError
        Where parameters have other values on some rank, see ``compare_every``, and in every step in which the class or
        a setting of the optimizer, such as its learning rate, is another one on some rank.

    Examples
    --------
    >>> import torch
    >>> from mpicomp.transport import LocalWorld
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = DistributedOptimizer(
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     named_parameters=model.named_parameters(),
    ...     compressor="topk",
    ...     warmup=0,
    ...     comm=LocalWorld(1).transports[0],
    ... )
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> isinstance(optimizer, torch.optim.SGD), optimizer.reducer.last_step.buckets[0].collective
    (True, 'allgather')
    """
    transport = connect(comm)
    try:

        def check() -> tuple[list[tuple[str, torch.Tensor]], dict[str, torch.Tensor], Compressor | None]:
            _check_optimizer(optimizer)
            check_least(_WHO, "compare_every", compare_every, 0)
            chosen = _chosen_compressor(optimizer, compressor)
            check_settings(settings, compressor, _WHO)
            pairs = named_pairs(named_parameters, _WHO, transport.group.size)
            parameters = parameters_by_name(optimizer, pairs, _WHO)
            if scaler is not None:
                _check_not_complex(parameters)
            check_no_ddp(parameters, transport.group.size, _WHO)
            check_not_nested(optimizer, _WHO)
            return pairs, parameters, chosen

        pairs, parameters, chosen = run_collectively(check, transport, _WHO)
        if scaler is not None:
            nonfinite = "skip"
        if bucket_bytes is None and chosen is not None:
            bucket_bytes = LARGE_BUCKET if chosen.message in ("sparse", "shared") else _SMALL_BUCKET
        settings |= {"bucket_bytes": bucket_bytes}
        reducer = Reducer(chosen, collective, with_warmup(policy, warmup), feedback, nonfinite, transport, **settings)
    except BaseException:
        if transport is not comm:
            transport.close()
        raise
    loss_scale = None if scaler is None else scaler.get_scale
    settings_check = SettingsCheck(optimizer, _WHO)
    gradients = Gradients(reducer, parameters, settings_check, overlap, loss_scale, compare_every, same_batches)
    wrapped = wrap(optimizer, _Distributed, "Distributed")
    wrapped.reducer = reducer
    wrapped._mpicomp_names = {id(parameter): name_of(name) for name, parameter in pairs}
    wrapped._mpicomp_scaler = scaler
    wrapped._mpicomp_gradients = gradients
    wrapped._mpicomp_transport = None if transport is comm else transport
    weak_optimizer: Callable[[], Any] = weakref.ref(wrapped)
    gradients.loaded_state.optimizer_state = lambda: weak_optimizer()._mpicomp_state()
    if scaler is not None:
        _attach_scaler(scaler, wrapped)
    return wrapped


class _Distributed(OptimizerProxy):
    """Mixin that `DistributedOptimizer` puts in front of an optimizer's class: it averages gradients before a step."""

    reducer: Reducer
    state: dict[torch.Tensor, Any]
    _mpicomp_who = _WHO
    _mpicomp_scaler: torch.amp.GradScaler | None
    _mpicomp_gradients: Gradients
    _mpicomp_transport: Transport | None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Have a GradScaler that was not passed call step() on all ranks, with ``found_inf`` set.

        It would leave step() out where this rank's gradients overflowed, and the others would wait for it.
        """
        return self._mpicomp_scaler is None

    @property
    def overlaps(self) -> bool:
        """Whether gradients are exchanged while backward goes on."""
        return self._mpicomp_gradients.overlaps

    def synchronize(self) -> None:
        """Average the gradients over the ranks now; the next ``step()`` does not do it again. Collective."""
        problem = self._mpicomp_gradients.check_known(members_of(self))
        self._mpicomp_gradients.average(learning_rate(self), problem)

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which backward adds to gradients without exchanging them."""
        return self._mpicomp_gradients.accumulate()

    def join(self) -> AbstractContextManager[None]:
        """Return a context for a loop that has more batches on some ranks than on others, on all ranks.

        Where the loop of a rank is over, the end of the context takes part in the steps of the others, with zeros and
        its residuals, until all are done. Means are those of the ranks that have batches. While some rank has none,
        policies leave plans as they are. If an error leaves the loop, the context communicates nothing.

        Raises
        ------
        ConfigurationError
            Inside of another one, or where another optimizer is exchanged inside of it.
        DisagreementError
            At the first step, on all ranks, where some rank makes it without ``join()``, or with other settings of its
            parameter groups; at the end, where parameters were changed outside of steps.
        """
        return Join(self, self._mpicomp_gradients, self._mpicomp_scaler)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over the ranks, then step. Collective.

        A closure is called once, before the gradients are averaged, and its value is returned.
        """
        plain_step = super(OptimizerProxy, self).step  # type: ignore[misc]

        def step(cached: Callable[[], Any] | None = None) -> Any:
            value = plain_step()  # without a closure: one that calls it for other gradients would not notice
            return value if cached is None else cached()

        return self._mpicomp_step(step, *(() if closure is None else (closure,)))

    step.hooked = True  # type: ignore[attr-defined]

    def _mpicomp_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Call the closure, and average the gradients that it has left."""
        gradients = self._mpicomp_gradients
        if hasattr(self, "found_inf") and self._mpicomp_scaler is None:
            raise ConfigurationError(
                f"{_WHO}: this rank alone cannot tell whether gradients that a GradScaler has scaled overflowed; pass "
                f"scaler= to {_WHO}, or use torch.autocast with bfloat16, which needs no scaler"
            )
        closure = closure_of(args, kwargs)
        if closure is not None:
            gradients.averaged = False
            with torch.enable_grad():
                loss = closure()  # it may synchronize and clip by itself, as Lightning's does
            args, kwargs = with_closure(args, kwargs, _CachedClosure(loss))
        if not gradients.averaged:
            self.synchronize()
        gradients.averaged = False
        if gradients.frozen:
            gradients.run(copy_active_step(self, gradients))
        return args, kwargs

    def _mpicomp_add(self, parameters: dict[str, torch.Tensor]) -> None:
        self._mpicomp_gradients.add(parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; see `torch.optim.Optimizer.zero_grad`."""
        self._mpicomp_gradients.clear()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with this rank's state of the reducer under ``"mpicomp"``."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state | {"mpicomp": to_tensors(self.reducer.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, or one of the plain optimizer's `state_dict`. Not collective.

        Raises
        ------
        ConfigurationError
            Where the reducer's part does not fit.
        """
        of_reducer = to_arrays(state_dict.get("mpicomp"))
        if of_reducer is not None:
            self._mpicomp_check_residuals(of_reducer.get("residuals", {}))
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "mpicomp"})  # type: ignore[misc]
        if of_reducer is not None:
            self.reducer.load_state_dict(of_reducer)
        self._mpicomp_gradients.loaded_state.note_load([] if of_reducer is None else of_reducer["residuals"].values())

    def close(self) -> None:
        """Release the reducer's MPI resources without waiting for other ranks; a second call does nothing."""
        self._mpicomp_closed = True
        self._mpicomp_gradients.close()
        self.reducer.close()
        if self._mpicomp_transport is not None:
            self._mpicomp_transport.close()

    def _mpicomp_state(self) -> dict[str, torch.Tensor]:
        """Return tensors and numbers in the optimizer's state by parameter and key."""
        return {
            f"{self._mpicomp_names[id(parameter)]}, {key}": torch.as_tensor(value)
            for parameter in members_of(self)
            for key, value in self.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor | bool | int | float)
        }

    def _mpicomp_check_residuals(self, residuals: Mapping[str, Any]) -> None:
        """Refuse residuals of another model before anything is loaded."""
        shapes = {
            self._mpicomp_names[id(parameter)]: tuple(as_real(parameter.detach()).shape)
            for parameter in members_of(self)
        }
        for name, residual in residuals.items():
            if shapes.get(name) != tuple(residual.shape):
                present = f"shape {shapes[name]}" if name in shapes else "no such parameter"
                raise ConfigurationError(
                    f"{_WHO}: the state is of another model: it has a residual of shape {tuple(residual.shape)} for "
                    f"'{name}', and this model has {present}; delete state['mpicomp'] to start residuals at zero"
                )


class _CachedClosure:
    """A closure that was called already: it returns its value, once."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._was_called = False

    def __call__(self) -> Any:
        if self._was_called:
            raise ConfigurationError(
                f"{_WHO}: the optimizer calls its closure several times in a step; use mpicomp.torch.UpdateOptimizer, "
                "which serves it and exchanges what its steps have changed"
            )
        self._was_called = True
        return self._value


class _ScalerProxy:
    """Mixin of a GradScaler: it averages gradients before it checks them, so that it finds the same on all ranks."""

    _mpicomp_optimizer: Callable[[], Any]

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients of the distributed optimizer, then unscale them."""
        self._mpicomp_average(optimizer)
        super().unscale_(optimizer)  # type: ignore[misc]
        if optimizer is self._mpicomp_optimizer():
            optimizer._mpicomp_gradients.snapshot()

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Average gradients of the distributed optimizer, then step, or not."""
        self._mpicomp_average(optimizer)
        return super().step(optimizer, *args, **kwargs)  # type: ignore[misc]

    def update(self, new_scale: Any = None) -> None:
        """Update the scale: gradients of a step that was skipped are averages no longer."""
        optimizer = self._mpicomp_optimizer()
        if optimizer is not None:
            optimizer._mpicomp_gradients.averaged = False
        super().update(new_scale)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy it as the GradScaler that it was."""
        state = {key: value for key, value in self.__getstate__().items() if key != "_mpicomp_optimizer"}  # type: ignore[attr-defined]
        return object.__new__, (type(self).__bases__[1],), state

    def _mpicomp_average(self, optimizer: Any) -> None:
        if optimizer is self._mpicomp_optimizer() and not optimizer._mpicomp_gradients.averaged:
            optimizer.synchronize()


def _attach_scaler(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """Have a GradScaler average gradients of an optimizer before it checks them."""
    changed: Any = scaler
    kind = type(scaler)
    if not isinstance(scaler, _ScalerProxy):
        changed.__class__ = type(f"Distributed{kind.__name__}", (_ScalerProxy, kind), {})
    changed._mpicomp_optimizer = weakref.ref(optimizer)


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"{_WHO}: a torch optimizer is needed, got {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        if not optimizer._mpicomp_closed:
            raise ConfigurationError(f"{_WHO}: this optimizer is distributed already; close() it first")
    elif isinstance(optimizer, CollectiveOptimizer | OptimizerProxy):
        raise ConfigurationError(f"{_WHO}: {type(optimizer).__name__} exchanges by itself; use it as it is")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            f"{_WHO}: LBFGS asks for gradients many times in a step; use mpicomp.torch.UpdateOptimizer, which serves "
            "it and exchanges what its steps have changed"
        )


def _chosen_compressor(
    optimizer: torch.optim.Optimizer, compressor: Compressor | str | Mapping[str, Any] | None
) -> Compressor | None:
    if compressor is None:
        return None
    chosen = get_compressor(compressor)
    momenta = [group["momentum"] for group in optimizer.param_groups if group.get("momentum")]
    if chosen.entry.momentum and momenta:
        raise ConfigurationError(
            f"{_WHO}: {chosen!r} applies momentum before the exchange, and the optimizer would apply another one, "
            f"{momenta[0]}, once more; set momentum=0 in one of them"
        )
    return chosen


def _check_not_complex(parameters: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ConfigurationError(
                f"{_WHO}: a GradScaler of torch takes no complex gradients, and '{name}' is of {dtype_name(parameter)}"
                "; use torch.autocast with bfloat16, which needs no scaler"
            )
