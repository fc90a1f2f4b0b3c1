"""Detection of optimizers that step by other methods than ``step``."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpicomp.errors import ConfigurationError, warn_user
from mpicomp.torch.shards import exchanged

_SAMPLED_AT, _REPORTED_AT = 10, 20  # times that backward has filled a gradient since the last step
_SAMPLE_SIZE = 64  # elements of a parameter that are compared


class StepWatch:
    """Counts how often backward fills gradients between two steps; ``accumulates`` allows any number."""

    def __init__(self, subsystem: str, accumulates: bool = False) -> None:
        self._subsystem = subsystem
        self._warned = accumulates
        self._is_in_step = False
        self._fills: dict[str, int] = {}
        self._samples: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # a parameter, its values at the tenth fill

    def filled(self, name: str, parameter: torch.Tensor) -> None:
        """Note that backward has filled a gradient; refuse parameters that change without an exchange."""
        if self._is_in_step:
            return
        count = self._fills[name] = self._fills.get(name, 0) + 1
        if count == _SAMPLED_AT:
            self._samples[name] = parameter, sample_of(parameter).clone()
        elif count == _REPORTED_AT:
            self._report()

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._is_in_step = True  # a closure may fill gradients many times, as that of LBFGS

    def end_step(self) -> None:
        """Note that a step ends."""
        self._is_in_step = False
        self._fills.clear()
        self._samples.clear()

    def _report(self) -> None:
        finding = (
            f"{self._subsystem}: backward has filled gradients {_REPORTED_AT} times without a step() or synchronize()"
        )
        if not any(torch.equal(sample_of(parameter), values) for parameter, values in self._samples.values()):
            raise ConfigurationError(
                f"{finding}, and parameters have changed meanwhile: they are stepped by another method, such as "
                "first_step of SAM, and nothing was exchanged. Call optimizer.synchronize() before each of these, or "
                "wrap the optimizer inside, whose step() they call"
            )
        if not self._warned:
            self._warned = True
            warn_user(
                f"{finding}, so nothing was exchanged; if gradients are accumulated, put every backward but the last "
                "one into `with optimizer.accumulate():`",
            )


def hook_gradients(
    parameters: Mapping[str, torch.Tensor], method: Callable[[str, torch.Tensor], None]
) -> dict[str, Any]:
    """Call a bound method for each gradient that backward completes; return the handles of hooks by name."""
    weak_method = weakref.WeakMethod(method)  # a model may outlive its optimizer
    disable: Callable[[Any], Any] = torch.compiler.disable  # torch.compile would trace into it

    def hook_of(name: str) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            alive = weak_method()
            if alive is not None:
                alive(name, parameter)

        return disable(hook)

    return {
        name: exchanged(parameter).register_post_accumulate_grad_hook(hook_of(name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters.items()
        if parameter.requires_grad
    }


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return some evenly spaced elements."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE_SIZE)]
