"""A reducer that knows its optimizer."""

from typing import Any

from mpicomp.reducer.reducer import Reducer


class TrainingReducer(Reducer):
    """A reducer of a training loop, which knows how its optimizer uses means.

    ``normalises`` is whether the optimizer divides the mean by the root of its mean square, as Adam does: late
    gradients then arrive in bursts that make its steps smaller. ``default_policy`` is the policy where none is named.
    """

    def __init__(self, *args: Any, normalises: bool = True, default_policy: str | None = None, **settings: Any) -> None:
        self._normalises, self._default_policy = normalises, default_policy
        super().__init__(*args, **settings)
