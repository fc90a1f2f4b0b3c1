"""The driver of the published search: it makes the checkpoint that trials begin from, and goes back to it."""

from collections.abc import Callable
from typing import Any

from mpicomp.errors import ConfigurationError
from mpicomp.reducer import Reducer
from mpicomp.systems.flexible.published_search import FlexibleSearch


class TrialDriver:
    """Runs the trials of `Flexible.as_published` around a training loop.

    The search asks for a checkpoint before its trials, and for a way back after each of them. The script calls
    `after_step` once its parameters have taken the mean of a step; a step before which some rank has not done so is an
    error on all ranks.

    Batches of a trial are spent, and schedules of learning rates go on. A model that is saved within a trial is the
    trial's, and a run that is resumed searches again.

    Parameters
    ----------
    reducer : Reducer
        With the policy ``{"id": "flexible", "as_published": True}``; that of `mpicomp.torch.DistributedOptimizer`
        is its ``reducer``: see `mpicomp.systems.flexible.torch_state.drive_trials`.
    checkpoint : callable
        Returns a copy of this rank's parameters and of its optimizer's state.
    restore : callable
        Loads what ``checkpoint`` returned; several times for each checkpoint.

    Raises
    ------
    ConfigurationError
        Where the reducer has another policy, or goes on after a rank has died: ranks that are left cannot undo a trial.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> from mpicomp.transport import LocalWorld
    >>> search = {"id": "flexible", "as_published": True, "solver": "exact"}
    >>> reducer = mpicomp.Reducer(policy=search, comm=LocalWorld(1).transports[0])
    >>> weights = np.ones(1000)
    >>> def restore(kept):
    ...     weights[:] = kept
    >>> driver = TrialDriver(reducer, weights.copy, restore)
    >>> for step in range(2):
    ...     weights -= 0.1 * reducer.reduce({"weights": weights - step})["weights"]
    ...     driver.after_step()
    >>> reducer.last_step.buckets[0].reason
    'flexible: ratio 0.001 by allgather, trial 1 of 5'
    """

    def __init__(self, reducer: Reducer, checkpoint: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        if not isinstance(reducer.policy, FlexibleSearch):
            raise ConfigurationError(
                f"TrialDriver: the policy must be flexible with as_published, got '{reducer.policy.id}'; other "
                "policies need no driver"
            )
        if reducer.survives:
            raise ConfigurationError(
                "TrialDriver: ranks that are left when one dies cannot undo a trial; leave on_failure out"
            )
        self.reducer, self._policy = reducer, reducer.policy
        self._checkpoint, self._restore = checkpoint, restore
        self._kept: tuple[Any, dict[str, Any]] | None = None
        self._policy.has_driver = True

    def after_step(self) -> None:
        """Do what the search asks for after a step: copy parameters and residuals, or restore them. Not collective."""
        action, self._policy.trial_action = self._policy.trial_action, None
        if action == "keep":
            self._kept = self._checkpoint(), self.reducer.state_dict()
        elif action == "restore" and self._kept is not None:
            parameters, state = self._kept
            self._restore(parameters)
            self.reducer.load_residuals(state)
