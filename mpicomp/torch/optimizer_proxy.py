"""An optimizer that becomes one that exchanges: whichever way its step is reached, the exchange comes with it."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from mpicomp.errors import ConfigurationError, warn_user
from mpicomp.rounds import Rounds
from mpicomp.torch.arguments import named_group, split_group

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Those of a step, without the optimizer itself."""


class NotCopyable:
    """An optimizer that holds a communicator, which can be neither copied nor pickled; ``with`` closes it."""

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
    """Base class of the mixins that `wrap` puts in front of an optimizer's class.

    A subclass exchanges in `_mpicomp_before` or `_mpicomp_after`: each is called once a step, whatever is nested in it.
    """

    param_groups: list[dict[str, Any]]
    _mpicomp_who: str
    _mpicomp_names: dict[int, str]
    _mpicomp_closed = False
    _mpicomp_stepping = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and exchange. Collective."""
        return self._mpicomp_step(super().step, *(() if closure is None else (closure,)))  # type: ignore[misc]

    # torch would put its profiler and the hooks around this step, too, when a state is loaded.
    step.hooked = True  # type: ignore[attr-defined]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see `torch.optim.Optimizer.add_param_group`. On all ranks, between two steps.

        Parameters that were not among ``named_parameters`` need names: ``{"params":
        head.named_parameters(prefix="head")}``. After ``close()`` no name is needed.

        Raises
        ------
        ConfigurationError
            Where a parameter has no name.
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
        """Exchange parameters of a new group, too."""

    def _mpicomp_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Exchange with a step that ends in that of the optimizer's class."""
        if self._mpicomp_stepping:  # inside a step that was put in front of this one
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
        """Work before the step: return the arguments to call it with."""
        return args, kwargs

    def _mpicomp_after(self) -> None:
        """Work after the step."""


class UpdatingProxy(OptimizerProxy):
    """Base class of mixins that exchange after the step, in `_mpicomp_rounds`."""

    _mpicomp_exchanges = True

    # A GradScaler leaves step() out where this rank's gradients overflowed, and the others would wait for it. With this
    # it calls step() on all of them, after it has set ``found_inf``.
    _step_supports_amp_scaling = True

    def rounds(self, closure: Callable[[], Any] | None = None) -> Rounds[Any]:
        """Step, then exchange where it is due, as a generator of rounds, for ranks that live in one process."""
        self._mpicomp_exchanges = False
        try:
            loss = self.step(closure)
        finally:
            self._mpicomp_exchanges = True
        yield from self._mpicomp_rounds()
        return loss

    def _mpicomp_rounds(self) -> Rounds[None]:
        """Make the exchanges that are due."""
        raise NotImplementedError


def wrap(optimizer: torch.optim.Optimizer, kind: type[OptimizerProxy], prefix: str) -> Any:
    """Make an optimizer one of a class derived from ``kind`` and its present one, in place.

    A step that was put into the object before, as learning-rate schedulers, ``torch.compile`` and profilers do it, is
    called within the new one. Other ways to the step of the optimizer's class, such as a bound method that was looked
    up earlier, pass through torch's hooks.
    """
    if isinstance(optimizer, OptimizerProxy):
        _unwrap(optimizer)
    base = type(optimizer)
    wrapped: Any = optimizer
    # torch.compile is to pass over the exchange, and to compile the step itself.
    disable: Callable[[Any], Any] = torch.compiler.disable
    opaque = {name: disable(getattr(kind, name)) for name in ("_mpicomp_before", "_mpicomp_after")}
    wrapped.__class__ = type(f"{prefix}{base.__name__}", (kind, base), opaque)
    wrapped._mpicomp_closed = False
    former = wrapped.__dict__.get("step")
    if former is not None:

        @functools.wraps(former)  # schedulers leave a mark on theirs, and look for it
        def step(self: OptimizerProxy, *args: Any, **kwargs: Any) -> Any:
            return self._mpicomp_step(former, *args, **kwargs)

        wrapped.step = types.MethodType(step, wrapped)
    hooks = getattr(wrapped, "_optimizer_step_pre_hooks", None)
    if hooks is not None and _before_step not in hooks.values():
        handle = wrapped.register_step_pre_hook(_before_step)
        hooks.move_to_end(handle.id, last=False)
        wrapped.register_step_post_hook(_after_step)
    return wrapped


def _unwrap(optimizer: Any) -> None:
    """Restore the class of an optimizer; its hooks and a step that `wrap` has put into it stay, for the next one."""
    optimizer.__class__ = type(optimizer).__bases__[1]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the closure among a step's arguments; None where there is none."""
    return args[0] if args else kwargs.get("closure")


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]) -> Arguments:
    """Return a step's arguments with another closure."""
    return ((closure, *args[1:]), kwargs) if args else (args, kwargs | {"closure": closure})


def check_not_nested(optimizer: torch.optim.Optimizer, subsystem: str) -> None:
    """Warn where an optimizer holds another one, which may be stepped by itself; refuse one that exchanges."""
    for name, inner in vars(optimizer).items():
        if isinstance(inner, OptimizerProxy):
            raise ConfigurationError(
                f"{subsystem}: the optimizer inside, optimizer.{name}, exchanges already; leave the outer one as it is"
            )
        if isinstance(inner, torch.optim.Optimizer):
            warn_user(
                f"{subsystem}: {type(optimizer).__name__} holds another optimizer, optimizer.{name}. step() of the "
                "outer one exchanges; where other methods step, as in SAM, call optimizer.synchronize() before each, "
                f"or wrap optimizer.{name} in place of the outer one",
            )


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    if optimizer._mpicomp_stepping:
        return None
    rest, kwargs = optimizer._mpicomp_before(args[1:], kwargs)
    return (args[0], *rest), kwargs


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not optimizer._mpicomp_stepping:
        optimizer._mpicomp_after()
