"""Checkpoints of a training: what goes into one, when it is due, and how a later job goes on from it."""

from typing import Any

import torch
from mpicomp.bench.tasks import Task
from mpicomp.bench.tasks.updating import Updater

from mpicomp.checkpoint import load_checkpoint, save_checkpoint
from mpicomp.errors import ConfigurationError
from mpicomp.transport import Transport


class Checkpoints:
    """Checkpoints of one training, below one folder."""

    def __init__(self, folder: str, every: int, run: dict[str, Any]) -> None:
        self.folder = folder
        self._every = every
        self._run = run
        self._due = False

    def load(self, task: Task, model: torch.nn.Module, optimizer: Any, updater: Updater, transport: Transport) -> int:
        """Load the newest checkpoint, if there is one, and return the steps that were made until it. Collective."""
        saved = load_checkpoint(self.folder, comm=transport)
        if saved is None:
            return 0
        ours, theirs = self._of(task), saved["run"]
        for name in ours:
            if theirs.get(name) != ours[name]:
                raise ConfigurationError(
                    f"train: the checkpoint in '{self.folder}' is of a run with {name} {theirs.get(name)}, and this "
                    f"one has {ours[name]}; name another folder, or start the command that wrote it"
                )
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        updater.load_state_dict(saved["updater"])
        torch.set_rng_state(saved["random"])
        return int(saved["step"])

    def due(self, step: int, exchanged: bool) -> bool:
        """Return whether one is due after so many steps, the last of which has exchanged something or not."""
        self._due = self._due or step % self._every == 0
        return self._due and exchanged

    def save(
        self, step: int, task: Task, model: torch.nn.Module, optimizer: Any, updater: Updater, transport: Transport
    ) -> None:
        """Write a checkpoint after so many steps. Collective; ranks that have stepped by themselves exchange first."""
        if self._run["exchange"] != "gradients":
            optimizer.synchronize()
        state = {
            "run": self._of(task),
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "updater": updater.state_dict(),
            "random": torch.get_rng_state(),
        }
        save_checkpoint(self.folder, state, comm=transport)
        self._due = False

    def _of(self, task: Task) -> dict[str, Any]:
        return {"task": task.name, "shards": task.shards} | self._run
