"""The driver of the published search: it makes the checkpoint that trials begin from, and restores it."""

import copy
from collections.abc import Callable
from typing import Any

from mpicomp.errors import ConfigurationError
from mpicomp.reducer import Reducer
from mpicomp.systems.flexible.published_search import FlexibleSearch


class TrialDriver:
    """Runs the trials of `Flexible.as_published` around a training loop.

    The search requests a checkpoint before its trials, and its restoration after each of them. The script calls
    `after_step` once the mean of a step is applied to its parameters; if some rank has not done so, the next step
    raises on all ranks.

    Batches of a trial are spent, and schedules of learning rates continue. A model that is saved within a trial is the
    trial's, and a run that is resumed searches again.

    Parameters
    ----------
    reducer : Reducer
        With the policy ``{"id": "flexible", "as_published": True}``; that of `mpicomp.torch.DistributedOptimizer`
        is its ``reducer``: see `mpicomp.systems.flexible.drive_trials`.
    checkpoint : callable
        Returns a copy of this rank's parameters and of its optimizer's state.
    restore : callable
        Loads a result of ``checkpoint``; several times for each checkpoint.

    Raises
    ------
    ConfigurationError
        If the reducer has another policy, or continues after a rank has died: the others cannot undo a trial.

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
                "TrialDriver: when a rank dies the others cannot undo a trial; leave on_failure out"
            )
        self.reducer, self._policy = reducer, reducer.policy
        self._checkpoint, self._restore = checkpoint, restore
        self._kept: tuple[Any, dict[str, Any]] | None = None
        self._policy.has_driver = True

    def after_step(self) -> None:
        """Copy or restore parameters and residuals, as the search requests after a step. Not collective."""
        action, self._policy.trial_action = self._policy.trial_action, None
        if action == "keep":
            self._kept = self._checkpoint(), self.reducer.state_dict()
        elif action == "restore" and self._kept is not None:
            parameters, state = self._kept
            self._restore(parameters)
            self.reducer.load_residuals(state)


def drive_trials(optimizer: Any, model: Any = None) -> TrialDriver:
    """Return the driver of a `mpicomp.torch.DistributedOptimizer`.

    Call its ``after_step()`` after each ``optimizer.step()``. ``optimizer.join()`` is refused from then on: a trial
    that continues after it would undo steps of its last batches.
    """
    driver = TrialDriver(optimizer.reducer, *copies_of(optimizer, model))

    def join() -> Any:
        if optimizer.reducer is driver.reducer:
            raise ConfigurationError(
                f"join: trials of policy '{driver.reducer.policy.id}' would undo steps of the last batches; leave "
                "join() out, or take another policy"
            )
        return type(optimizer).join(optimizer)  # it was wrapped again

    optimizer.join = join
    return driver


def copies_of(optimizer: Any, model: Any = None) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return ``checkpoint`` and ``restore`` of an optimizer of PyTorch, and of a model's buffers, for `TrialDriver`.

    Settings of groups, such as the learning rate, stay as they are: they follow their schedule.
    """

    def checkpoint() -> Any:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        buffers = [] if model is None else list(model.buffers())
        tensors = [(tensor, tensor.detach().clone()) for tensor in [*parameters, *buffers]]
        states = [(parameter, copy.deepcopy(optimizer.state.get(parameter))) for parameter in parameters]
        return tensors, states

    def restore(kept: Any) -> None:
        tensors, states = kept
        for tensor, values in tensors:
            tensor.detach().copy_(values)
        for parameter, state in states:
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = copy.deepcopy(state)

    return checkpoint, restore
