"""Mixins that are put in front of an optimizer's class, so that each of its steps exchanges."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from mpicomp.errors import ConfigurationError, warn_user
from mpicomp.torch.parameters import named_group, split_group

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a step, without the optimizer itself


class NotCopyable:
    """Base of optimizers that hold a communicator and can be neither copied nor pickled; ``with`` closes them."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            f"{type(self).__name__}: it holds an MPI communicator and can be neither copied nor pickled; save or copy "
            "its state_dict(), and load that into an optimizer that was made in the same way"
        )


class OptimizerProxy(NotCopyable):
    """Base of mixins that exchange in `_mpicomp_before` or `_mpicomp_after`, which are called once a step."""

    param_groups: list[dict[str, Any]]
    _mpicomp_who: str
    _mpicomp_names: dict[int, str]
    _mpicomp_closed = False
    _mpicomp_stepping = False

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
        plain, named = named_group(self, param_group, self._mpicomp_names, self._mpicomp_who)
        super().add_param_group(plain)  # type: ignore[misc]
        self._mpicomp_names |= {id(parameter): name for name, parameter in named.items()}
        self._mpicomp_add(named)

    def _mpicomp_add(self, parameters: dict[str, torch.Tensor]) -> None:
        """Add parameters of a new group to the exchange."""

    def _mpicomp_has_loaded(self) -> bool:
        """Return whether a state of its reducer was loaded since the last exchange."""
        return False

    def _mpicomp_drop_loaded(self) -> None:
        """Leave out that state."""

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
        """Return the arguments to call the step with."""
        return args, kwargs

    def _mpicomp_after(self) -> None:
        """Run after the step."""


def wrap(optimizer: torch.optim.Optimizer, kind: type[OptimizerProxy], prefix: str) -> Any:
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
    wrapped._mpicomp_closed = False
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


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the closure among a step's arguments, or None."""
    return args[0] if args else kwargs.get("closure")


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]) -> Arguments:
    """Return a step's arguments with another closure."""
    return ((closure, *args[1:]), kwargs) if args else (args, kwargs | {"closure": closure})


def check_not_nested(optimizer: torch.optim.Optimizer, subsystem: str, averages_gradients: bool) -> None:
    """Warn of an optimizer inside of an optimizer, which may be stepped by itself; refuse one that exchanges."""
    for name, inner in vars(optimizer).items():
        if isinstance(inner, OptimizerProxy):
            raise ConfigurationError(
                f"{subsystem}: the optimizer inside, optimizer.{name}, exchanges already; leave the outer one as it is"
            )
        if isinstance(inner, torch.optim.Optimizer):
            kind = type(optimizer)
            inner_name = f"optimizer.{name}"
            inside = f"wrap {inner_name} in place of the outer one: {inner_name} = {subsystem}({inner_name}, model)"
            if averages_gradients and hasattr(kind, "clip_and_accumulate"):  # as opacus' DPOptimizer has
                raise ConfigurationError(
                    f"{subsystem}: step() of {kind.__name__} computes .grad from gradients of samples, after the outer "
                    f"one has averaged what it replaces; {inside}"
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
