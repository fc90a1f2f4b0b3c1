"""Mixins that are put in front of an optimizer's class, so that each of its steps exchanges."""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mpicomp.errors import ConfigurationError, warn_user
from mpicomp.mpi import Transport
from mpicomp.reducer import Reducer
from mpicomp.torch.parameters import named_group, split_group
from mpicomp.torch.shards import check_rows, rows_of
from mpicomp.torch.states import name_of, to_tensors

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a step, without the optimizer itself


class Exchange:
    """The exchange around a wrapped optimizer's steps, and the state that it adds to the optimizer's.

    A kind of exchange has ``before(optimizer, closure)``, which returns the closure to step with; ``add(parameters)``
    for a new group; ``trained(optimizer)``, the parameters that are exchanged, by name; ``state_dict()``,
    ``check_state(optimizer, state)`` and ``load_state_dict(state)``, for which None is the state of a plain optimizer;
    and ``drop_loaded()``, which leaves out a state of the reducer that was loaded.
    """

    reducer: Reducer

    def __init__(self, name: str, pairs: Sequence[tuple[str, torch.Tensor]], transport: Transport, owned: bool) -> None:
        self.name = name  # of the constructor, which errors begin with
        self.names = {id(parameter): name_of(name) for name, parameter in pairs}
        self.transport, self.owns_transport = transport, owned

    def after(self, optimizer: Any) -> None:
        """Run after a step."""

    def progress(self) -> dict[str, Any]:
        """Return the values that `mpicomp.torch.broadcast_optimizer_state` sends besides state and settings."""
        return {}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Continue from another rank's `progress`."""

    def close(self) -> None:
        self.reducer.close()
        if self.owns_transport:
            self.transport.close()


class OptimizerProxy:
    """Mixin that is put in front of an optimizer's class, so that each step exchanges, once.

    It holds a communicator and can be neither copied nor pickled; ``with`` closes it.
    """

    param_groups: list[dict[str, Any]]
    _mpicomp: Any  # the `Exchange`
    _mpicomp_closed = False
    _mpicomp_stepping = False

    @property
    def reducer(self) -> Reducer:
        found: Reducer = self._mpicomp.reducer
        return found

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            f"{type(self).__name__}: it holds an MPI communicator and can be neither copied nor pickled; save or copy "
            "its state_dict(), and load that into an optimizer that was made in the same way"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._mpicomp_step(super().step, *(() if closure is None else (closure,)))  # type: ignore[misc]

    # Otherwise torch wraps this step in its profiler and hooks, too, when a state is loaded.
    step.hooked = True  # type: ignore[attr-defined]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on all ranks, between two steps.

        Parameters that were not among ``named_parameters`` need names: ``{"params":
        head.named_parameters(prefix="head")}``. After ``close()`` no name is needed.
        """
        if self._mpicomp_closed:
            plain, _ = split_group(self, param_group)
            super().add_param_group(plain)  # type: ignore[misc]
            return
        exchange = self._mpicomp
        plain, named = named_group(self, param_group, exchange.names, exchange.name)
        super().add_param_group(plain)  # type: ignore[misc]
        exchange.names |= {id(parameter): name for name, parameter in named.items()}
        exchange.add(named)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        rows = rows_of(self._mpicomp.trained(self))
        added = self._mpicomp.progress() | self._mpicomp.state_dict() | ({"rows": rows} if rows else {})
        return state | {"mpicomp": to_tensors(added)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        added = to_tensors(state_dict.get("mpicomp"))
        if added is not None:
            check_rows(added.pop("rows", {}), self._mpicomp.trained(self), self._mpicomp.name)
            self._mpicomp.check_state(self, added)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "mpicomp"})  # type: ignore[misc]
        self._mpicomp.load_state_dict(added)

    def close(self) -> None:
        self._mpicomp_closed = True
        self._mpicomp.close()

    def _mpicomp_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._mpicomp_stepping:  # inside a step that wraps this one
            return step(*args, **kwargs)
        args, kwargs = self._mpicomp_before(args, kwargs)
        self._mpicomp_stepping = True
        try:
            value = step(*args, **kwargs)
        finally:
            self._mpicomp_stepping = False
        self._mpicomp_after()
        return value

    def _mpicomp_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        closure = args[0] if args else kwargs.get("closure")
        changed = self._mpicomp.before(self, closure)
        if changed is not closure:
            return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {"closure": changed})
        return args, kwargs

    def _mpicomp_after(self) -> None:
        self._mpicomp.after(self)


def wrap(optimizer: torch.optim.Optimizer, kind: type[OptimizerProxy], prefix: str, exchange: Exchange) -> Any:
    """Change an optimizer's class to one derived from ``kind`` and its present one.

    A step that the object holds, as set by schedulers, ``torch.compile`` and profilers, is called within the new one.
    Other calls of the step of the optimizer's class, such as by a bound method, reach the exchange by torch's hooks.
    """
    wrapped: Any = optimizer
    if isinstance(optimizer, OptimizerProxy):
        wrapped.__class__ = type(optimizer).__bases__[1]  # hooks and a step in the object are used again
    base = type(optimizer)
    # torch.compile must skip the exchange, and compile the step itself.
    disable: Callable[[Any], Any] = torch.compiler.disable
    opaque = {name: disable(getattr(kind, name)) for name in ("_mpicomp_before", "_mpicomp_after")}
    wrapped.__class__ = type(f"{prefix}{base.__name__}", (kind, base), opaque)
    wrapped._mpicomp, wrapped._mpicomp_closed = exchange, False
    former = wrapped.__dict__.get("step")
    if former is not None:

        @functools.wraps(former)  # schedulers mark theirs, and look for the mark
        def step(self: OptimizerProxy, *args: Any, **kwargs: Any) -> Any:
            return self._mpicomp_step(former, *args, **kwargs)

        wrapped.step = types.MethodType(step, wrapped)
    hooks = getattr(wrapped, "_optimizer_step_pre_hooks", None)
    if hooks is not None and _before_step not in hooks.values():
        handle = wrapped.register_step_pre_hook(_before_step)
        hooks.move_to_end(handle.id, last=False)
        wrapped.register_step_post_hook(_after_step)
    return wrapped


def check_not_nested(optimizer: torch.optim.Optimizer, subsystem: str, averages_gradients: bool) -> None:
    """Warn of an optimizer inside of an optimizer, which may be stepped by itself; refuse one that exchanges."""
    for name, inner in vars(optimizer).items():
        if isinstance(inner, OptimizerProxy):
            raise ConfigurationError(
                f"{subsystem}: the optimizer inside, optimizer.{name}, exchanges already; do not wrap the outer one"
            )
        if isinstance(inner, torch.optim.Optimizer):
            kind = type(optimizer)
            inner_name = f"optimizer.{name}"
            inside = f"wrap {inner_name} in place of the outer one: {inner_name} = {subsystem}({inner_name}, model)"
            if averages_gradients and hasattr(kind, "clip_and_accumulate"):  # as opacus' DPOptimizer has
                raise ConfigurationError(
                    f"{subsystem}: step() of {kind.__name__} computes .grad from gradients of samples, after the outer "
                    f"one has averaged the present .grad; {inside}"
                )
            warn_user(
                f"{subsystem}: {kind.__name__} holds another optimizer, optimizer.{name}. step() of the outer one "
                "exchanges; where other methods step, as in SAM, call optimizer.synchronize() before each; where "
                f"step() computes .grad, {inside}"
            )


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    if optimizer._mpicomp_stepping:
        return None
    rest, kwargs = optimizer._mpicomp_before(args[1:], kwargs)
    return (args[0], *rest), kwargs


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not optimizer._mpicomp_stepping:
        optimizer._mpicomp_after()
