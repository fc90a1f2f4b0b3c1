"""`Beside`: exchanges that belong to a step but to none of its buckets, such as sparse gradients."""

from collections.abc import Collection, Mapping
from typing import Any

from mpicomp.rounds import Rounds

Given = tuple[Mapping[str, Any], Collection[str]]
"""Arrays by name, and those of them that stand for no gradient; see `mpicomp.Reducer.reduce`."""


class Beside:
    """Exchanges that belong to a step but to none of its buckets; by default there are none.

    Attributes
    ----------
    stale : bool
        Whether ranks have to agree anew in this step, for a reason that arrays do not show.
    idle : bool
        Whether this rank has no gradients of its own, only residuals: then all of its arrays are absent, and none of
        them is exchanged in another way for that.
    frozen : bool
        Whether some rank is idle, the same on all ranks: policies then leave plans as they are and learn nothing.
    """

    stale = False
    idle = False
    frozen = False

    def agree(self, given: Given) -> Rounds[Given | None]:
        """Compare what only the caller knows of, when ranks agree anew, and return what is to be reduced. As rounds.

        None ends the step here, on all ranks alike: nothing was reduced then, and no step is counted.
        """
        return given
        yield

    def exchange(self) -> Rounds[bool]:
        """Exchange gradients outside buckets; return whether they are finite, the same on all ranks. As rounds."""
        return True
        yield
