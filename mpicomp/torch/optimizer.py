"""An optimizer whose gradients are averaged over MPI ranks."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from mpicomp.compressors import Compressor, get_compressor
from mpicomp.errors import ConfigurationError
from mpicomp.mpi.connect import connected
from mpicomp.policies import Policy
from mpicomp.policies.schedule import with_warmup
from mpicomp.reducer import Reducer
from mpicomp.reducer.layout import LARGE_BUCKET
from mpicomp.reducer.settings import check_arguments
from mpicomp.reducer.training_reducer import TrainingReducer
from mpicomp.setting_checks import check_least
from mpicomp.torch.checks import COMPARE_EVERY, SettingsCheck
from mpicomp.torch.gradients import Gradients
from mpicomp.torch.join import copy_active_step, run_empty_steps
from mpicomp.torch.parameters import (
    NamedParameters,
    as_real,
    check_no_ddp,
    learning_rate,
    members_of,
    named_pairs,
    parameters_by_name,
)
from mpicomp.torch.plan_recorder import record_plan
from mpicomp.torch.proxy import Exchange, OptimizerProxy, check_not_nested, wrap
from mpicomp.torch.shards import check_shards, is_sharded, local_of, make_for_replicas
from mpicomp.torch.states import to_arrays

_WHO = "DistributedOptimizer"
_PLAIN = torch.optim.SGD, torch.optim.ASGD  # whose steps are as large as gradients, so that bursts cost nothing
_SMALL_BUCKET = 8 << 20  # bytes of a bucket whose elements all travel


@check_arguments(_WHO, Reducer)
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
    gradient_as_bucket_view: bool = False,
    **settings: Any,
) -> Any:
    """Make an optimizer average its gradients over the ranks, compressed, before every step.

    Collective over ``comm``, as are the steps of the returned `DistributedProxy`. A parameter that has no gradient on
    some rank counts as zeros there, and one that has none on any rank stays without. Sparse gradients are made dense.
    Gradients must not be written to between backward and ``step()`` or ``synchronize()``.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any optimizer that reads gradients once a step. LBFGS reads them many times: see `UpdateOptimizer`.
    named_parameters : iterable of (str, torch.Tensor), mapping or torch.nn.Module
        ``model.named_parameters()`` or the model, with every parameter of the optimizer that requires a gradient.
        Complex ones are exchanged as pairs of reals: their residuals have a last dimension of 2.
    compressor, collective, policy, feedback, nonfinite, comm, bucket_bytes, warmup, **settings
        See `mpicomp.Reducer`. Buckets have 32 MiB for a named compressor that selects elements, and 8 MiB for others.
    overlap : bool, optional
        True exchanges a bucket during backward, once its gradients are complete, and refuses a script that does not
        allow it; False exchanges all in ``step()``. None watches the script in two steps, then does the former where
        the script allows it, MPI has MPI_THREAD_MULTIPLE, and a network or a free core lets it pay.
    scaler : torch.amp.GradScaler, optional
        The scaler of the loss, which then finds averaged gradients, and skips a step on all ranks where one overflowed.
    compare_every : int
        Most steps between comparisons of the ranks' parameters, after steps 1, 2, 4, 8 ...; 0: before the first alone.
    same_batches : bool
        Whether ranks are meant to draw the same batches; else there is a warning of equal gradients in the first steps.
    gradient_as_bucket_view : bool
        Whether ``.grad`` lies where gradients and residuals are added: one array of a gradient's size less, for one
        sweep more. A gradient that was kept from an earlier step is overwritten.

    Raises
    ------
    ConfigurationError
        For an optimizer or parameters that cannot be served.
    DisagreementError
        Where parameters have other values on some rank, or the class or a setting of the optimizer differs.
    """
    with connected(comm) as transport:
        check = partial(
            _checked, optimizer, named_parameters, compressor, scaler, compare_every, gradient_as_bucket_view, settings
        )
        ranks = transport.group.size
        pairs, parameters, chosen = make_for_replicas(lambda: check(ranks), lambda made: made[1], transport, _WHO)
        if bucket_bytes is None and chosen is not None:
            bucket_bytes = LARGE_BUCKET if chosen.message == "sparse" else _SMALL_BUCKET
        settings |= {"bucket_bytes": bucket_bytes, "normalises": not isinstance(optimizer, _PLAIN)}
        nonfinite = nonfinite if scaler is None else "skip"
        reducer = TrainingReducer(
            chosen, collective, with_warmup(policy, warmup), feedback, nonfinite, transport, **settings
        )
    exchange = _GradientExchange(_WHO, pairs, transport, transport is not comm)
    exchange.reducer, exchange.scaler = reducer, scaler
    exchange.gradients = Gradients(
        reducer, parameters, SettingsCheck(optimizer, _WHO), bool(overlap) if gradient_as_bucket_view else overlap,
        None if scaler is None else scaler.get_scale, compare_every, same_batches, gradient_as_bucket_view,
    )  # fmt: skip
    wrapped = wrap(optimizer, DistributedProxy, "Distributed", exchange)
    if scaler is not None:
        _attach_scaler(scaler, wrapped)
    if transport.group.rank == 0:
        record_plan(wrapped, parameters, settings["normalises"])
    return wrapped


class DistributedProxy(OptimizerProxy):
    """Mixin that averages gradients before a step of an optimizer's class.

    Schedulers, hooks and replaced steps work as before; it can be neither copied nor pickled. ``state_dict()`` has this
    rank's state of the reducer under ``"mpicomp"``; ``load_state_dict()`` also takes a plain optimizer's. After
    ``close()``, which ``with`` calls at its end, it can be wrapped again.
    """

    _mpicomp: "_GradientExchange"

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Then a GradScaler calls step(), with ``found_inf`` set, also where this rank's gradients overflowed.
        return self._mpicomp.scaler is None

    @property
    def overlaps(self) -> bool:
        """Whether gradients are exchanged during backward."""
        return self._mpicomp.gradients.overlap.overlaps

    def zero_grad(self, set_to_none: bool = True) -> None:
        gradients = self._mpicomp.gradients
        gradients.overlap.clear()
        gradients.averaged = False
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def synchronize(self) -> None:
        """Average the gradients now, so that means can be clipped before ``step()``. Collective."""
        gradients = self._mpicomp.gradients
        gradients.average(learning_rate(self), gradients.check_known(members_of(self)))

    def accumulate(self) -> AbstractContextManager[None]:
        """Let backward add to gradients without exchanging them."""
        return self._mpicomp.gradients.accumulate()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Run a loop that may have more batches on some ranks than on others; entered on all ranks.

        A rank whose loop is over takes part in the steps of the others, with zeros and its residuals, until all are
        done. Means are those of the ranks that have batches. While some rank has none, policies keep their plans. An
        error that leaves the loop communicates nothing.
        """
        gradients = self._mpicomp.gradients
        with gradients.join.entered(gradients):
            yield
            run_empty_steps(self, gradients, self._mpicomp.scaler)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        plain_step = super(OptimizerProxy, self).step  # type: ignore[misc]

        def step(cached: Callable[[], Any] | None = None) -> Any:
            value = plain_step()  # without a closure: one that calls it for other gradients would not notice
            return value if cached is None else cached()

        return self._mpicomp_step(step, *(() if closure is None else (closure,)))

    step.hooked = True  # type: ignore[attr-defined]


class _GradientExchange(Exchange):
    """Averages gradients before a step."""

    gradients: Gradients
    scaler: torch.amp.GradScaler | None

    def before(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        gradients = self.gradients
        if hasattr(optimizer, "found_inf") and self.scaler is None:
            raise ConfigurationError(
                f"{_WHO}: this rank alone cannot tell whether gradients that a GradScaler has scaled overflowed; pass "
                f"scaler= to {_WHO}, or use torch.autocast with bfloat16, which needs no scaler"
            )
        if closure is not None:
            gradients.averaged = False
            with torch.enable_grad():
                loss = closure()  # it may synchronize and clip by itself, as Lightning's does
            closure = _cached_closure(loss)
        if not gradients.averaged:
            optimizer.synchronize()
        gradients.averaged = False
        if gradients.frozen:
            self.transport.run(copy_active_step(optimizer, gradients))
        return closure

    def add(self, parameters: dict[str, torch.Tensor]) -> None:
        self.gradients.add(parameters)

    def trained(self, optimizer: Any) -> dict[str, torch.Tensor]:
        return {self.names[id(p)]: p for p in members_of(optimizer) if id(p) in self.names}

    def state_dict(self) -> dict[str, Any]:
        return self.reducer.state_dict()

    def check_state(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        shapes = {name: as_real(local_of(p).detach()).shape for name, p in self.trained(optimizer).items()}
        for name, residual in state.get("residuals", {}).items():
            if shapes.get(name) != residual.shape:
                present = f"shape {tuple(shapes[name])}" if name in shapes else "no such parameter"
                raise ConfigurationError(
                    f"{_WHO}: the state is of another model: it has a residual of shape {tuple(residual.shape)} for "
                    f"'{name}', and this model has {present}; delete state['mpicomp'] to start residuals at zero"
                )

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        arrays = to_arrays(state)
        if arrays is not None:
            self.reducer.load_state_dict(arrays)
        self.gradients.loaded_state.note_load([] if arrays is None else arrays["residuals"].values())

    def drop_loaded(self) -> None:
        self.reducer.drop_loaded_state()
        self.gradients.loaded_state.note_load([])

    def close(self) -> None:
        self.gradients.close()
        super().close()


def _cached_closure(value: Any) -> Callable[[], Any]:
    values = [value]

    def closure() -> Any:
        if not values:
            raise ConfigurationError(
                f"{_WHO}: the optimizer calls its closure several times in a step; use mpicomp.torch.UpdateOptimizer, "
                "which serves it and exchanges the changes of its steps"
            )
        return values.pop()

    return closure


class _ScalerProxy:
    """Mixin of a GradScaler that averages gradients before it checks them, so that all ranks find the same."""

    _mpicomp_optimizer: Callable[[], Any]

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self._mpicomp_average(optimizer)
        super().unscale_(optimizer)  # type: ignore[misc]
        if optimizer is self._mpicomp_optimizer():
            optimizer._mpicomp.gradients.note_means()

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._mpicomp_average(optimizer)
        return super().step(optimizer, *args, **kwargs)  # type: ignore[misc]

    def update(self, new_scale: Any = None) -> None:
        optimizer = self._mpicomp_optimizer()
        if optimizer is not None:
            optimizer._mpicomp.gradients.averaged = False  # also where the step was skipped
        super().update(new_scale)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is of the scaler's former class.
        state = {key: value for key, value in self.__getstate__().items() if key != "_mpicomp_optimizer"}  # type: ignore[attr-defined]
        return object.__new__, (type(self).__bases__[1],), state

    def _mpicomp_average(self, optimizer: Any) -> None:
        if optimizer is self._mpicomp_optimizer() and not optimizer._mpicomp.gradients.averaged:
            optimizer.synchronize()


def _attach_scaler(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    changed: Any = scaler
    kind = type(scaler)
    if not isinstance(scaler, _ScalerProxy):
        changed.__class__ = type(f"Distributed{kind.__name__}", (_ScalerProxy, kind), {})
    changed._mpicomp_optimizer = weakref.ref(optimizer)


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"{_WHO}: a torch optimizer is needed, got {type(optimizer).__name__}")
    if isinstance(optimizer, DistributedProxy):
        if not optimizer._mpicomp_closed:
            raise ConfigurationError(f"{_WHO}: this optimizer is distributed already; close() it first")
    elif isinstance(optimizer, OptimizerProxy):
        raise ConfigurationError(f"{_WHO}: {type(optimizer).__name__} exchanges by itself; use it without this wrapper")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigurationError(
            f"{_WHO}: SparseAdam takes no dense gradients, and means are dense; use torch.optim.Adam, or "
            "mpicomp.torch.UpdateOptimizer, whose ranks step on sparse gradients"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            f"{_WHO}: LBFGS asks for gradients many times in a step; use mpicomp.torch.UpdateOptimizer, which serves "
            "it and exchanges the changes of its steps"
        )


def _checked(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    compressor: Compressor | str | Mapping[str, Any] | None,
    scaler: torch.amp.GradScaler | None,
    compare_every: int,
    as_views: bool,
    settings: Mapping[str, Any],
    ranks: int,
) -> tuple[list[tuple[str, torch.Tensor]], dict[str, torch.Tensor], Compressor | None]:
    _check_optimizer(optimizer)
    check_least(_WHO, "compare_every", compare_every, 0)
    chosen = None if compressor is None else get_compressor(compressor)
    momenta = [group["momentum"] for group in optimizer.param_groups if group.get("momentum")]
    if chosen is not None and chosen.entry.momentum and momenta:
        raise ConfigurationError(
            f"{_WHO}: {chosen!r} applies momentum before the exchange, and the optimizer would apply another one, "
            f"{momenta[0]}, once more; set momentum=0 in one of them"
        )
    pairs = named_pairs(named_parameters, _WHO, ranks)
    parameters = parameters_by_name(optimizer, pairs, _WHO)
    for name, parameter in parameters.items():
        if scaler is not None and parameter.is_complex():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ConfigurationError(
                f"{_WHO}: a GradScaler of torch takes no complex gradients, and '{name}' is of {kind}; use "
                "torch.autocast with bfloat16, which needs no scaler"
            )
    check_shards(parameters, settings, _WHO)
    check_no_ddp(parameters, ranks, _WHO)
    check_not_nested(optimizer, _WHO, averages_gradients=True)
    if as_views:
        _check_views(parameters, chosen, settings)
    return pairs, parameters, chosen


def _check_views(
    parameters: Mapping[str, torch.Tensor], compressor: Compressor | None, settings: Mapping[str, Any]
) -> None:
    problem = None
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            problem = f"'{name}' is sharded, and FSDP makes its gradient"
        elif parameter.device.type not in ("cpu", "cuda"):
            problem = f"'{name}' is on {parameter.device}, and only gradients on the host or on a GPU can be views"
    if compressor is not None and compressor.entry.momentum:
        problem = f"{compressor!r} applies momentum, which could not be undone"
    elif settings.get("on_failure", "abort") != "abort":
        problem = "with on_failure a step in which a rank has died is repeated, with gradients that would be gone"
    if problem is not None:
        raise ConfigurationError(f"{_WHO}: gradient_as_bucket_view: {problem}; leave it out")
