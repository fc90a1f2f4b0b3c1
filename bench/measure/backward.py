"""Records when backward has completed each gradient."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Backward:
    """Notes, step by step, when each parameter's gradient is complete."""

    def __init__(self, parameters: Sequence[tuple[str, Any]]) -> None:
        self.names = [name for name, _ in parameters]
        self.shapes = {name: tuple(own.shape) for name, own in parameters}
        self._rows: list[NDArray[np.float64]] = []
        self._now = np.full(len(parameters), np.nan)
        self._hooks = [
            own.register_post_accumulate_grad_hook(self._note(place)) for place, (_, own) in enumerate(parameters)
        ]

    def _note(self, place: int) -> Any:
        def hook(_: Any) -> None:
            self._now[place] = time.perf_counter()

        return hook

    def add(self, began: float, forward: float, ended: float, update_s: float) -> None:
        """Note a step whose backward is over."""
        ready = np.where(np.isnan(self._now), ended, self._now) - forward  # what backward does not reach is zero then
        self._rows.append(np.concatenate(([forward - began, ended - forward, update_s], ready)))
        self._now = np.full(len(self.names), np.nan)

    def rows(self) -> NDArray[np.float64]:
        """Return a row a step: seconds of forward, backward and update, and when each gradient was complete."""
        return np.array(self._rows)

    def close(self) -> None:
        """Take the hooks out of the model."""
        for hook in self._hooks:
            hook.remove()
