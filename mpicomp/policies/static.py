"""The same plan for every bucket at every step."""

from dataclasses import dataclass
from typing import Any

from mpicomp.collectives import Scheme, bind, fitting
from mpicomp.compressors import Compressor


@dataclass(frozen=True)
class Plan:
    """A scheme for one bucket in one step, and why it was taken."""

    scheme: Scheme[Any]
    reason: str


class Static:
    """One compressor and one collective, as they were named.

    Parameters
    ----------
    compressor : Compressor
        What every bucket uses.
    collective : str
        ``"auto"`` stands for the first one that fits the compressor.

    Raises
    ------
    UnknownNameError, IncompatiblePairError
        See `mpicomp.collectives.bind`.

    Examples
    --------
    >>> from mpicomp import TopK
    >>> plan = Static(TopK(), "auto").plan()
    >>> plan.scheme.id, plan.reason
    ('allgather', "static: first collective that fits 'topk'")
    """

    id = "static"

    def __init__(self, compressor: Compressor, collective: str = "auto") -> None:
        if collective == "auto":
            self._plan = Plan(
                bind(compressor, fitting(compressor)[0]),
                f"static: first collective that fits '{compressor.id}'",
            )
        else:
            self._plan = Plan(bind(compressor, collective), "static: pinned")

    def plan(self) -> Plan:
        """Give the plan."""
        return self._plan
