"""Checks that replicas have the same settings, states and parameters, different batches, and steps that exchange."""

import contextlib
import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError, DisagreementError, warn_user
from mpicomp.mpi.rounds import Group, Pending, Round, Rounds, gather_rows
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.torch.broadcast import as_bytes
from mpicomp.torch.combined import optimizers_in
from mpicomp.torch.shards import array_specs, exchanged, local_of, whole_of

COMPARE_EVERY = 500  # default steps from one comparison of replicas to the next: it costs under a thousandth
BROADCAST_ADVICE = "call mpicomp.torch.broadcast_parameters(model) before training"
DRIFT_ADVICE = (
    "replicas have drifted: load the last checkpoint, and write the same to parameters on all ranks between steps"
)
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_DIGEST_BYTES, _SETTINGS_DIGEST_BYTES = 16, 8
_BATCH_STEPS = 2  # steps of which gradients are compared: those of the first step may be the same by design
_WATCHED_STEPS = 64  # steps without a change after which settings cost nothing again: a schedule changes every step
_SAMPLED_AT, _REPORTED_AT = 10, 20  # times that backward has filled a gradient since the last step
_SAMPLE_SIZE = 64  # elements of a parameter that are compared
_FILLED = f"backward has filled gradients {_REPORTED_AT} times without a step() or synchronize()"
_MESSAGES = {
    "values": "parameter '{name}' has other values on {ranks} than on rank 0; {advice}",
    "batches": "the gradients of all {size} ranks were the same in the first steps, bit for bit, so all ranks draw the "
    "same batches and their number gains nothing; give each rank a share of the data, as by "
    "torch.utils.data.DistributedSampler(dataset, ranks, rank), or seed the sampler by the rank. Pass "
    "same_batches=True if that is intended",
    "rate": "a schedule has to follow from values that all ranks share, such as the mean of their losses; after a "
    "state was loaded on one rank call mpicomp.torch.broadcast_optimizer_state(optimizer)",
    "state": "load the same file on all ranks, or call mpicomp.torch.broadcast_optimizer_state(optimizer)",
    "residuals": "all {size} ranks have loaded the residuals of one rank, which then count {size} times, and those of "
    "the others are lost; save and load a file of each rank, or delete state['mpicomp'] to start residuals at zero",
    "stepped": f"{_FILLED}, and parameters have changed meanwhile: they are stepped by another method, such as "
    "first_step of SAM, and nothing was exchanged. Call optimizer.synchronize() before each of these, or wrap the "
    "optimizer inside, whose step() they call",
    "filled": f"{_FILLED}, so nothing was exchanged; if gradients are accumulated, put every backward but the last one "
    "into `with optimizer.accumulate():`",
}


def check_same(tensors: Mapping[str, torch.Tensor], group: Group, subsystem: str, advice: str) -> Rounds[None]:
    """Raise an error that ends in ``advice`` on all ranks where tensors of the same name and shape differ in a bit."""
    contents = (as_bytes(tensor.detach().cpu().contiguous()) for tensor in tensors.values())
    hashes = [hashlib.blake2b(content.data, digest_size=_DIGEST_BYTES).digest() for content in contents]
    digests = np.frombuffer(b"".join(hashes), np.uint8)
    rows = (yield from gather_rows(digests, group)).reshape(group.size, len(tensors), _DIGEST_BYTES)
    for name, differs in zip(tensors, (rows != rows[0]).any(axis=2).T, strict=True):
        if differs.any():
            text = _MESSAGES["values"].format(name=name, ranks=_ranks_text(differs), advice=advice)
            raise DisagreementError(f"{subsystem}: {text}")


class Fingerprint:
    """Compares replicas bit for bit after steps 1, 2, 4, 8 ... and then after each ``every`` steps; never with 0.

    A sum of all bits is compared first, eight bytes a rank. In the first steps a sum of gradients is, too, unless
    ``same_batches``: where it is the same on all ranks, they draw the same batches.
    """

    def __init__(self, every: int, subsystem: str, same_batches: bool = False) -> None:
        self.every = every
        self.same_batches = same_batches
        self._subsystem = subsystem
        self.restart()

    @property
    def needs_gradients(self) -> bool:
        """Whether gradients of the next step may be compared."""
        return self.every > 0 and not self.same_batches and self._steps < _BATCH_STEPS

    def restart(self) -> None:
        self._steps = -1
        self._equal_steps = 0  # in which all ranks had the same gradients

    def compare(
        self,
        tensors: Mapping[str, torch.Tensor],
        group: Group,
        gradients: Iterable[torch.Tensor] = (),
        advice: str = DRIFT_ADVICE,
    ) -> Rounds[None]:
        """Compare parameters, and gradients before they are averaged, if that is due; called once a step."""
        self._steps += 1
        steps = self._steps
        is_early = steps <= self.every and steps & (steps - 1) == 0
        if not self.every or not steps or not (is_early or steps % self.every == 0) or group.size == 1:
            return
        compares_batches = steps <= _BATCH_STEPS and not self.same_batches
        sums = np.array([sum_of_bits(tensors.values()), sum_of_bits(gradients if compares_batches else ())])
        rows = yield from gather_rows(sums, group)
        if (rows[:, 0] != rows[0, 0]).any():
            yield from check_same(tensors, group, self._subsystem, advice)
        self._equal_steps += bool(compares_batches and rows[0, 1] and (rows[:, 1] == rows[0, 1]).all())
        if compares_batches and self._equal_steps == _BATCH_STEPS and group.rank == 0:
            warn_user(f"{self._subsystem}: {_MESSAGES['batches'].format(size=group.size)}")


class SettingsCheck:
    """Compares the class and the settings of the ranks' optimizers before every step.

    Unchanged settings cost nothing: a rank that finds a change makes all ranks agree again. While settings change
    often, as by a schedule, digests of 8 bytes are compared in a message during the exchange.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, subsystem: str) -> None:
        self.optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self._subsystem = subsystem
        kinds = [type(member) for member in optimizers_in(optimizer)]
        plain = [kind.__bases__[-1] if hasattr(kind, "_mpicomp_before") else kind for kind in kinds]
        self._kind = " + ".join(kind.__name__ for kind in plain)
        self._values: list[Any] = []
        self._digest = b""
        self.restart()

    def restart(self) -> None:
        """Forget the last comparison, and the message of a step that a death has ended, which never arrives."""
        self._compared = b""  # the digest that all ranks had last
        self._watched_steps = 0
        self._message: Pending | None = None

    def settings(self) -> dict[str, Any]:
        """Return the class and settings by name."""
        optimizer = self.optimizer()
        groups = settings_of(optimizer)
        named = {f"param_groups[{index}]['{key}']": group[key] for index, group in enumerate(groups) for key in group}
        sizes = {
            f"the number of elements in group {index}": sum(parameter.numel() for parameter in group["params"])
            for index, group in enumerate(optimizer.param_groups)
        }
        return {"optimizer": self._kind, "param_groups": len(groups)} | sizes | named

    def begin(self, group: Group) -> Rounds[bool]:
        """Begin a step; return whether all ranks must agree again, since settings of this rank have changed."""
        self._refresh()
        if self._message is not None:  # of a step that failed
            yield self._message
            self._message = None
        if group.size == 1:
            return False
        if self._watched_steps == 0:
            return self._digest != self._compared
        send = np.frombuffer(self._digest, np.uint8)
        recv = np.empty(group.size * send.size, np.uint8)
        lengths = [send.size] * group.size
        self._message = yield Round("allgatherv", lengths, send.dtype, send=send, recv=recv, background=True)
        return False

    def finish(self, group: Group) -> Rounds[None]:
        """Compare the ranks' settings of this step before it is applied."""
        if self._message is None:
            return
        digests = (yield self._message).reshape(group.size, -1)
        self._message = None
        if (digests != digests[0]).any():
            yield from self.compare(group)
        self._watched_steps = _WATCHED_STEPS if self._digest != self._compared else self._watched_steps - 1
        self._compared = self._digest

    def compare(self, group: Group) -> Rounds[None]:
        """Raise a `DisagreementError` on all ranks that names the first setting in which they differ."""
        try:
            yield from agree(Signature(self.settings(), []), None, group, self._subsystem)
        except DisagreementError as error:
            if "param_groups[" in str(error):
                raise DisagreementError(f"{error}; {_MESSAGES['rate']}") from None
            raise
        self._values = []
        self._refresh()
        if self._compared and self._digest != self._compared:
            self._watched_steps = _WATCHED_STEPS
        self._compared = self._digest

    def _refresh(self) -> None:
        optimizer = self.optimizer()
        keys = _setting_names(optimizer)
        values = [_version(group[key]) for group in optimizer.param_groups for key in keys if key in group]
        if values != self._values:
            self._values = values
            text = json.dumps(self.settings(), sort_keys=True).encode()
            self._digest = hashlib.blake2b(text, digest_size=_SETTINGS_DIGEST_BYTES).digest()


class LoadedStateCheck:
    """Compares the ranks' optimizers once after a load: their state must be the same, and residuals must differ."""

    def __init__(self, subsystem: str, same_batches: bool) -> None:
        self.is_due = False
        self._subsystem = subsystem
        self._same_batches = same_batches
        self._residual_sum = np.int64(0)

    def note_load(self, residuals: Iterable[Any]) -> None:
        """Note that this rank has loaded a state with residuals."""
        self.is_due = True
        self._residual_sum = sum_of_bits([torch.as_tensor(residual) for residual in residuals])

    def compare(
        self, optimizer: Any, parameters: Mapping[str, torch.Tensor], loaded: NDArray[np.uint8], group: Group
    ) -> Rounds[None]:
        """Compare the states of parameters, which ``loaded`` ranks have loaded."""
        state = {
            f"{name}, {key}": torch.as_tensor(local_of(value))
            for name, parameter in parameters.items()
            for key, value in optimizer.state.get(whole_of(parameter), {}).items()
            if isinstance(value, torch.Tensor | bool | int | float)
        }
        who = f"{self._subsystem}: the optimizer's state"
        if not loaded.all():
            who += f", which was loaded on {_ranks_text(loaded)} alone"
        try:
            yield from agree(Signature({}, array_specs(state)), None, group, who)
        except DisagreementError as error:
            raise DisagreementError(f"{error}; {_MESSAGES['state']}") from None
        yield from check_same(state, group, who, _MESSAGES["state"])
        sums = yield from gather_rows(self._residual_sum, group)
        are_copies = group.size > 1 and sums.any() and (sums == sums[0]).all()
        if are_copies and not self._same_batches and group.rank == 0:
            warn_user(f"{self._subsystem}: {_MESSAGES['residuals'].format(size=group.size)}")
        self.is_due, self._residual_sum = False, np.int64(0)


class StepWatch:
    """Counts how often backward fills gradients between two steps; ``accumulates`` allows any number."""

    def __init__(self, subsystem: str, accumulates: bool = False) -> None:
        self._subsystem = subsystem
        self._warned = accumulates
        self.is_in_step = False
        self._fills: dict[str, int] = {}
        self._samples: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # a parameter, its values at the tenth fill

    def filled(self, name: str, parameter: torch.Tensor) -> None:
        """Note that backward has filled a gradient; refuse parameters that change without an exchange."""
        if self.is_in_step:
            return
        count = self._fills[name] = self._fills.get(name, 0) + 1
        if count == _SAMPLED_AT:
            self._samples[name] = parameter, sample_of(parameter).clone()
        elif count == _REPORTED_AT:
            if not any(torch.equal(sample_of(parameter), values) for parameter, values in self._samples.values()):
                raise ConfigurationError(f"{self._subsystem}: {_MESSAGES['stepped']}")
            if not self._warned:
                self._warned = True
                warn_user(f"{self._subsystem}: {_MESSAGES['filled']}")

    def end_step(self) -> None:
        self.is_in_step = False
        self._fills.clear()
        self._samples.clear()


class GradientHooks:
    """Calls a bound method for each gradient that backward completes, while the method's object lives."""

    def __init__(self, method: Callable[[str, torch.Tensor], None], parameters: Mapping[str, torch.Tensor]) -> None:
        self._method: Any = weakref.WeakMethod(method)  # a model may outlive its optimizer
        self._handles: dict[str, Any] = {}
        weakref.finalize(method.__self__, self.remove).atexit = False  # type: ignore[attr-defined]
        self.add(parameters)

    def add(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Watch these parameters, too, if they require a gradient and are not watched yet."""
        for name, parameter in parameters.items():
            if name not in self._handles and parameter.requires_grad:
                hook = _hook_of(self._method, name)
                held: Any = exchanged(parameter)
                self._handles[name] = held.register_post_accumulate_grad_hook(hook)

    def remove(self) -> None:
        while self._handles:
            self._handles.popitem()[1].remove()


def _hook_of(weak_method: Callable[[], Any], name: str) -> Any:
    def hook(parameter: torch.Tensor) -> None:
        method = weak_method()
        if method is not None:
            method(name, parameter)

    disable: Callable[[Any], Any] = torch.compiler.disable  # torch.compile would trace into it
    return disable(hook)


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return some evenly spaced elements."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE_SIZE)]


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the JSON-able settings in an optimizer's groups."""
    groups = []
    for group in optimizer.param_groups:
        settings = {}
        for key in sorted(_setting_names(optimizer) & set(group)):
            with contextlib.suppress(TypeError):
                settings[key] = _to_json(group[key])
        groups.append(settings)
    return groups


def sum_of_bits(tensors: Iterable[torch.Tensor]) -> np.int64:
    """Return a checksum of tensors."""
    sums = []
    for tensor in tensors:
        values = tensor.detach()
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        words = values.reshape(-1).view(WORDS[values.element_size()])
        if words.device.type == "cpu":  # where torch would make a copy in 64 bits first
            sums.append(torch.tensor(words.numpy().sum(dtype=np.int64)))
        else:
            sums.append(words.sum(dtype=torch.int64))
    if not sums:
        return np.int64(0)
    host = torch.stack([part.to(sums[0].device) for part in sums]).cpu().numpy()
    with np.errstate(over="ignore"):  # sums wrap around
        return np.int64((host * np.arange(1, host.size + 1)).sum())


def _ranks_text(flags: NDArray[Any]) -> str:
    ranks = np.flatnonzero(flags).tolist()
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _setting_names(optimizer: torch.optim.Optimizer) -> set[str]:
    return {name for member in optimizers_in(optimizer) for name in member.defaults}


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _to_json(value.tolist())
    if isinstance(value, np.generic):
        return _to_json(value.item())
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(type(value).__name__)


def _version(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_version(item) for item in value]
    # Of a tensor its version: values may be on a device and are not read.
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value
