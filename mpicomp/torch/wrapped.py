"""An optimizer that becomes one that exchanges: whichever way its step is reached, the exchange comes with it."""

import functools
import gc
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpicomp.errors import ConfigurationError, warn_user

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Those of a step, without the optimizer itself."""


class Uncopied:
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


class Wrapped(Uncopied):
    """Base class of the mixins that `wrap` puts in front of an optimizer's class.

    A subclass exchanges in `_mpicomp_before` or `_mpicomp_after`: each comes once a step, whatever is nested in it.
    """

    _mpicomp_stepping = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and exchange. Collective."""
        return self._mpicomp_step(super().step, *(() if closure is None else (closure,)))  # type: ignore[misc]

    # torch would put its profiler and the hooks around this step, too, when a state is loaded.
    step.hooked = True  # type: ignore[attr-defined]

    def _mpicomp_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Exchange with a step that ends in that of the optimizer's own class."""
        if self._mpicomp_stepping:  # a step that was put in front of this one is under way
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


def wrap(optimizer: torch.optim.Optimizer, kind: type[Wrapped], prefix: str) -> Any:
    """Make an optimizer one of a class derived from ``kind`` and its own, in place.

    A step that was put into the object before, as learning-rate schedulers, ``torch.compile`` and profilers do it, is
    called within the new one. What reaches the step of the optimizer's own class in any other way, such as a bound
    method that was looked up earlier, comes through torch's hooks.
    """
    base = type(optimizer)
    wrapped: Any = optimizer
    # torch.compile is to pass over what exchanges, and to compile the step itself.
    disable: Callable[[Any], Any] = torch.compiler.disable
    opaque = {name: disable(getattr(kind, name)) for name in ("_mpicomp_before", "_mpicomp_after")}
    wrapped.__class__ = type(f"{prefix}{base.__name__}", (kind, base), opaque)
    former = wrapped.__dict__.get("step")
    if former is not None:

        @functools.wraps(former)  # schedulers leave a mark on theirs, and look for it
        def step(self: Wrapped, *args: Any, **kwargs: Any) -> Any:
            return self._mpicomp_step(former, *args, **kwargs)

        wrapped.step = types.MethodType(step, wrapped)
    hooks = getattr(wrapped, "_optimizer_step_pre_hooks", None)
    if hooks is not None and _come_before not in hooks.values():
        handle = wrapped.register_step_pre_hook(_come_before)
        hooks.move_to_end(handle.id, last=False)
        wrapped.register_step_post_hook(_come_after)
    return wrapped


def unwrap(optimizer: Any) -> None:
    """Make it one of its own class again; its hooks and a step that `wrap` has put into it stay, for the next one."""
    optimizer.__class__ = type(optimizer).__bases__[1]


def check_no_ddp(parameters: Mapping[str, torch.Tensor], ranks: int, subsystem: str) -> None:
    """Refuse parameters of a model that DistributedDataParallel averages over as many ranks already."""
    if ranks == 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    ours = {id(parameter) for parameter in parameters.values()}
    kind = torch.nn.parallel.DistributedDataParallel
    for model in [each for each in gc.get_objects() if issubclass(type(each), kind)]:
        everywhere = (
            torch.distributed.get_world_size(model.process_group) == torch.distributed.get_world_size() == ranks
        )
        if everywhere and any(id(parameter) in ours for parameter in model.parameters()):
            raise ConfigurationError(
                f"{subsystem}: the model is in DistributedDataParallel, which averages its gradients over all {ranks} "
                "ranks already, uncompressed; train the module without it, or keep it with a plain optimizer and "
                "register mpicomp.torch.ddp_comm_hook"
            )


def warn_of_nested(optimizer: torch.optim.Optimizer, subsystem: str) -> None:
    """Warn where an optimizer holds another one, which may be stepped by itself."""
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer):
            if isinstance(inner, Wrapped):
                raise ConfigurationError(
                    f"{subsystem}: the optimizer inside, optimizer.{name}, exchanges already; leave the outer one as "
                    "it is"
                )
            warn_user(
                f"{subsystem}: {type(optimizer).__name__} holds another optimizer, optimizer.{name}. step() of the "
                "outer one exchanges; where other methods step, as in SAM, call optimizer.synchronize() before each, "
                f"or wrap optimizer.{name} in place of the outer one",
            )


def _come_before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    if optimizer._mpicomp_stepping:
        return None
    own, kwargs = optimizer._mpicomp_before(args[1:], kwargs)
    return (args[0], *own), kwargs


def _come_after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not optimizer._mpicomp_stepping:
        optimizer._mpicomp_after()
