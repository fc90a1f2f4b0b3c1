"""Steps for a trial, after which parameters, the optimizer's state and residuals are what they were before."""

from collections.abc import Callable
from typing import Any

from mpicomp.errors import ConfigurationError
from mpicomp.reducer.core import Core


class Rewinding:
    """Copies what a trial begins from, and puts it back when the policy says so.

    Parameters
    ----------
    checkpoint, restore
        See `mpicomp.Reducer`; given where the policy rewinds.
    """

    def __init__(self, checkpoint: Callable[[], Any] | None, restore: Callable[[Any], None] | None) -> None:
        self._checkpoint, self._restore = checkpoint, restore
        self._kept: tuple[Any, dict[str, Any]] | None = None

    def follow(self, core: Core) -> None:
        """Do what the policy asked for in the last step; nothing where it was done."""
        owed, core.owed = core.owed, None
        if owed == "keep":
            assert self._checkpoint is not None
            self._kept = self._checkpoint(), core.layout.state()
        elif owed == "restore" and self._kept is not None:
            assert self._restore is not None
            own, state = self._kept
            self._restore(own)
            core.layout.load(state)


def check_rewinds(policy: str, checkpoint: object, restore: object, survives: bool) -> None:
    """Raise `ConfigurationError` where a policy that makes steps for a trial cannot do so."""
    if not (callable(checkpoint) and callable(restore)):
        raise ConfigurationError(
            f"{policy}: makes steps for a trial and then puts parameters back, for which Reducer needs checkpoint= and "
            "restore=, and a call of reducer.applied() each time the means have been applied; pass them, or use "
            "mpicomp.torch.DistributedOptimizer, which has them"
        )
    if survives:
        raise ConfigurationError(
            f"{policy}: makes steps for a trial, which ranks that are left cannot take back; leave on_failure out"
        )
