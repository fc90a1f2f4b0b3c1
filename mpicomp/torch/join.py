"""Ranks that run out of batches at different times: one without any steps with zeros until none has any."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpicomp.errors import ConfigurationError
from mpicomp.mpi.rounds import Rounds, from_one, gather_rows
from mpicomp.torch.broadcast import from_root
from mpicomp.torch.checks import settings_of
from mpicomp.torch.parameters import members_of

if TYPE_CHECKING:
    from mpicomp.torch.gradients import Gradients

JOIN_ADVICE = (
    "while some ranks had no batches left, others changed it outside the optimizer's step: do so in a hook of "
    "register_step_post_hook, which runs on all ranks"
)

_joined: "Join | None" = None  # the one in whose loop this process is


class Join:
    """Which ranks have batches, while the loops of all run inside of an optimizer's ``join()``."""

    def __init__(self, size: int) -> None:
        self.settings: dict[str, Any] | None = None  # of the optimizer when its loop began; None outside of one
        self.is_known = False  # whether ranks know in this step which of them have batches
        self.active = np.ones(size, bool)
        self.has_empty_steps = False  # whether some rank has made a step without a batch
        self.has_begun = False  # whether ranks have agreed that all have entered
        self.means: dict[str, tuple[torch.Tensor | None, int | None]] = {}  # before a script changes them; and versions

    @contextmanager
    def entered(self, gradients: "Gradients") -> Iterator[None]:
        """Let ranks run out of batches inside; not collective."""
        global _joined
        problem = None
        if gradients.shards.exists:
            problem = (
                "the model is sharded, and torch would wait for the shards of a rank that has no batches left; give "
                "all ranks equally many, as torch.utils.data.DistributedSampler does"
            )
        elif _joined is not None:
            problem = "one optimizer's join() at a time: a rank that has no batches left takes part in the steps of one"
        elif gradients.overlap.has_begun:
            problem = "it began after backward(), which had begun the exchange; put the whole loop into it"
        if problem is not None:
            raise ConfigurationError(f"join: {problem}")
        self.settings = gradients.settings.settings()  # compared after "join()", so that an error names that first
        self.has_begun = self.is_known = self.has_empty_steps = False
        _joined = self
        try:
            yield
        finally:
            _joined = self.settings = None
            self.is_known = gradients.idle = gradients.frozen = False

    def find_active(self, gradients: "Gradients") -> None:
        """Find out which ranks have batches in this step. Collective where some may have none."""
        if _joined is not None and _joined is not self and gradients.group.size > 1:
            raise ConfigurationError(
                "join: another optimizer than the one that joins steps inside of it, and ranks without batches take no "
                "part in its exchange; use one optimizer in the loop"
            )
        if self.settings is None or self.is_known:
            return
        if not self.has_begun:
            gradients.exchange_zeros()  # ranks that have not entered are in a step
            self.has_begun = True
        transport = gradients.reducer.transport
        transport.activity.purpose = "join(): who has batches left", ()
        self.active = transport.run(gather_rows(np.uint8(not gradients.idle), gradients.group)).astype(bool)
        self.has_empty_steps = self.has_empty_steps or gradients.frozen
        gradients.frozen = not self.active.all()
        self.is_known = True


def run_empty_steps(optimizer: Any, gradients: "Gradients", scaler: torch.amp.GradScaler | None) -> None:
    """Step without gradients until no rank has batches left. Collective."""
    join, gradients.idle = gradients.join, True
    if gradients.overlap.has_begun:
        gradients.average(
            None,
            ConfigurationError(
                "join: the loop of this rank ended between backward() and step(), when the exchange had begun already; "
                "step after every backward, or put it into `with optimizer.accumulate():`"
            ),
        )
    parameters = list(members_of(optimizer))
    before = [parameter.grad for parameter in parameters]
    try:
        while True:
            join.find_active(gradients)
            if not join.active.any():
                break
            for parameter in parameters:
                parameter.grad = None
            if scaler is None:
                optimizer.step()
            else:
                scaler.scale(torch.zeros((), device=parameters[0].device))  # it may never have had a loss
                scaler.step(optimizer)
                scaler.update()
        if join.has_empty_steps:
            gradients.reducer.transport.run(gradients.compare(JOIN_ADVICE))
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def copy_active_step(optimizer: Any, gradients: "Gradients") -> Rounds[None]:
    """Copy the first active rank's settings and changed means to idle ranks, such as learning rates and clipping."""
    root = int(gradients.join.active.argmax())
    changed = {}
    for name, (mean, version) in gradients.join.means.items() if gradients.group.rank == root else ():
        present = gradients.parameters[name].grad
        if present is not mean or (present is not None and present._version != version):
            changed[name] = present
    has_gradient = {name: gradient is not None for name, gradient in changed.items()}
    content = {"groups": settings_of(optimizer), "changed": has_gradient}
    received = yield from from_one(content, gradients.group, "join", root)
    for name, is_present in received["changed"].items():
        parameter = gradients.parameters[name]
        gradient = changed[name] if name in changed else torch.empty_like(parameter) if is_present else None
        if gradient is not None:
            yield from from_root(gradient, root, gradients.group)
        if gradients.idle:
            parameter.grad = gradient
    if gradients.idle:
        for group, settings in zip(optimizer.param_groups, received["groups"], strict=True):
            group.update({key: _like(group.get(key), value) for key, value in settings.items()})


def _like(present: Any, value: Any) -> Any:
    if isinstance(present, list | tuple):
        return type(present)(_like(old, new) for old, new in zip(present, value, strict=True))
    if isinstance(present, torch.Tensor):
        with torch.no_grad():
            return present.copy_(torch.tensor(value, dtype=present.dtype))
    return value
