"""Notices an optimizer whose parameters are stepped by other methods than ``step``."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpicomp.errors import ConfigurationError, warn_user

_SAMPLED_AT, _REPORTED_AT = 10, 20  # times that backward has filled a gradient since the last step
_SAMPLE_SIZE = 64  # elements of a parameter that are compared


class StepWatch:
    """Counts how often backward fills gradients between two steps.

    Parameters
    ----------
    subsystem : str
        Start of messages.
    accumulates : bool
        Whether gradients may be accumulated for as long as one likes, so that their number alone says nothing.
    """

    def __init__(self, subsystem: str, accumulates: bool = False) -> None:
        self._subsystem = subsystem
        self._warned = accumulates
        self._steps_now = False
        self._fills: dict[str, int] = {}
        self._samples: dict[
            str, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # a parameter, and its values at the tenth fill

    def filled(self, name: str, parameter: torch.Tensor) -> None:
        """Note that backward has filled a gradient.

        Raises
        ------
        ConfigurationError
            Where all parameters are written to between backward passes though nothing was exchanged.
        """
        if self._steps_now:
            return
        count = self._fills[name] = self._fills.get(name, 0) + 1
        if count == _SAMPLED_AT:
            self._samples[name] = parameter, sample_of(parameter).clone()
        elif count == _REPORTED_AT:
            self._report()

    def hooks_of(self, parameters: Mapping[str, torch.Tensor]) -> list[Any]:
        """Have backward report when it has filled gradients; return handles that end that."""
        disable: Callable[[Any], Any] = torch.compiler.disable  # torch.compile would trace into it
        watch = weakref.ref(self)  # a model may outlive its optimizer

        def hook_of(name: str) -> Any:
            def hook(parameter: torch.Tensor) -> None:
                alive = watch()
                if alive is not None:
                    alive.filled(name, parameter)

            return disable(hook)

        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        return [p.register_post_accumulate_grad_hook(hook_of(name)) for name, p in trained.items()]  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Note that a step begins: what its closure fills belongs to it, as LBFGS fills gradients many times."""
        self._steps_now = True

    def stepped(self) -> None:
        """Note a step."""
        self._steps_now = False
        self._fills.clear()
        self._samples.clear()

    def _report(self) -> None:
        said = (
            f"{self._subsystem}: backward has filled gradients {_REPORTED_AT} times without a step() or synchronize()"
        )
        if not any(torch.equal(sample_of(parameter), values) for parameter, values in self._samples.values()):
            raise ConfigurationError(
                f"{said}, and parameters have changed meanwhile: they are stepped by another method, such as "
                "first_step of SAM, and nothing was exchanged. Call optimizer.synchronize() before each of these, or "
                "wrap the optimizer inside, whose step() they call"
            )
        if not self._warned:
            self._warned = True
            warn_user(
                f"{said}, so nothing was exchanged; if gradients are accumulated, put every backward but the last one "
                "into `with optimizer.accumulate():`",
            )


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return some elements, evenly spaced."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE_SIZE)]
