"""Checks of what replicas must have in common, and of what must differ: settings, parameters, batches."""

import contextlib
import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from mpicomp.errors import DisagreementError
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.reducer.beside import Beside, Given
from mpicomp.rounds import Group, Pending, Round, Rounds
from mpicomp.torch.comparing import COMPARE_EVERY, Fingerprint, check_same

_BYTE = np.dtype(np.uint8)
_DIGEST_BYTES = 8
_WATCHED_STEPS = 64  # steps without a change after which settings cost nothing again: a schedule changes every step
_RATE_ADVICE = (
    "a schedule has to follow from what all ranks share, such as the mean of their losses; after a state was loaded on "
    "one rank call mpicomp.torch.broadcast_optimizer_state(optimizer)"
)


class SettingsCheck:
    """Compares the class and the settings of the ranks' optimizers before every step.

    While settings stay as they are that costs nothing: a rank that finds a change asks all ranks to agree anew. As long
    as they change often, as by a schedule, digests of 8 bytes are compared, in a message that goes beside the exchange.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        This rank's.
    subsystem : str
        Start of error messages.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, subsystem: str) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._subsystem = subsystem
        kind = type(optimizer)
        self._kind = (kind.__bases__[-1] if hasattr(kind, "_mpicomp_before") else kind).__name__
        self._values: list[Any] = []
        self._digest = b""
        self._compared = b""
        self._watched_steps = 0
        self._message: Pending | None = None

    def settings(self) -> dict[str, Any]:
        """Return the class and the settings, JSON-able and by name."""
        optimizer = self._optimizer()
        assert optimizer is not None
        groups = settings_of(optimizer)
        named = {
            f"param_groups[{at}]['{key}']": value for at, group in enumerate(groups) for key, value in group.items()
        }
        return {"optimizer": self._kind, "param_groups": len(groups)} | named

    def begin(self, group: Group) -> Rounds[bool]:
        """Begin a step; return whether settings have changed so that all ranks have to agree anew. As rounds."""
        values = self._current()
        if values != self._values:
            self._values = values
            self._digest = _digest(self.settings())
        if self._message is not None:  # of a step that failed
            yield self._message
            self._message = None
        if group.size == 1:
            return False
        if self._watched_steps == 0:
            return self._digest != self._compared
        send = np.frombuffer(self._digest, _BYTE)
        recv = np.empty(group.size * send.size, _BYTE)
        self._message = yield Round(
            "allgatherv", [send.size] * group.size, _BYTE, send=send, recv=recv, background=True
        )
        return False

    def finish(self, group: Group) -> Rounds[None]:
        """Compare the ranks' settings of this step before it is applied. As rounds.

        Raises
        ------
        DisagreementError
            On all ranks where they differ.
        """
        if self._message is None:
            return
        digests = (yield self._message).reshape(group.size, -1)
        self._message = None
        if (digests != digests[0]).any():
            yield from self.compare(group)
        self._watched_steps = _WATCHED_STEPS if self._digest != self._compared else self._watched_steps - 1
        self._compared = self._digest

    def compare(self, group: Group) -> Rounds[None]:
        """Compare the ranks' settings by name. As rounds.

        Raises
        ------
        DisagreementError
            On all ranks where they differ.
        """
        settings = self.settings()
        try:
            yield from agree(Signature(settings, []), None, group, self._subsystem)
        except DisagreementError as error:
            if "param_groups[" in str(error):
                raise DisagreementError(f"{error}; {_RATE_ADVICE}") from None
            raise
        self._values, self._digest = self._current(), _digest(settings)
        if self._compared and self._digest != self._compared:
            self._watched_steps = _WATCHED_STEPS
        self._compared = self._digest

    def _current(self) -> list[Any]:
        """Return the settings for a comparison with those of the step before; tensors by their versions."""
        optimizer = self._optimizer()
        assert optimizer is not None
        keys = optimizer.defaults
        return [_mark(group[key]) for group in optimizer.param_groups for key in keys if key in group]


class ReplicaChecks(Beside):
    """The checks of an optimizer or hook whose ranks hold the same parameters.

    Parameters
    ----------
    subsystem : str
        Start of error messages.
    parameters : callable
        Returns the parameters by name, in the model's order.
    group : Group
        All ranks.
    settings : SettingsCheck, optional
        Of the optimizer.
    same_batches : bool
        Whether ranks are meant to draw the same batches.

    Attributes
    ----------
    gradients : iterable of torch.Tensor or None
        This rank's in the step; None takes those in ``.grad``.
    """

    def __init__(
        self,
        subsystem: str,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        group: Group,
        settings: SettingsCheck | None = None,
        same_batches: bool = False,
    ) -> None:
        self.stale = True
        self.gradients: Iterable[torch.Tensor] | None = None
        self._subsystem = subsystem
        self._parameters = parameters
        self._settings = settings
        self._fingerprint = Fingerprint(COMPARE_EVERY, subsystem, same_batches)
        self._group = group

    def begin(self) -> Rounds[None]:
        """Begin a step. As rounds."""
        if self._settings is not None and (yield from self._settings.begin(self._group)):
            self.stale = True

    def agree(self, given: Given) -> Rounds[Given]:
        """Compare settings and parameters, as rounds."""
        if self._settings is not None:
            yield from self._settings.compare(self._group)
        yield from check_same(
            self._parameters(),
            self._group,
            self._subsystem,
            "call mpicomp.torch.broadcast_parameters(model) before training",
        )
        self.stale = False
        return given

    def exchange(self) -> Rounds[bool]:
        """Compare parameters, batches and settings where it is time to, as rounds."""
        parameters = self._parameters()
        gradients = self.gradients
        if gradients is None:
            gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
        yield from self._fingerprint.look(parameters, self._group, gradients)
        if self._settings is not None:
            yield from self._settings.finish(self._group)
        return True


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the settings in an optimizer's groups, JSON-able; others are left out."""
    groups = []
    for group in optimizer.param_groups:
        settings = {}
        for key in sorted(set(optimizer.defaults) & set(group)):
            with contextlib.suppress(TypeError):
                settings[key] = _plain(group[key])
        groups.append(settings)
    return groups


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(type(value).__name__)


def _mark(value: Any) -> Any:
    """Return what tells whether a setting has changed; a tensor's values may be on a device and are not read."""
    if isinstance(value, tuple | list):
        return [_mark(each) for each in value]
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value


def _digest(settings: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).digest()
