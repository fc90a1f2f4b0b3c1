"""The same plan for every bucket at every step."""

from collections.abc import Sequence
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
    >>> plan = Static(TopK(), "auto").plan(["weight"], [100])
    >>> plan.scheme.id, plan.reason
    ('allgather', "static: first collective that fits 'topk'")
    """

    id = "static"

    def __init__(self, compressor: Compressor, collective: str = "auto") -> None:
        self._compressor = compressor
        self._collective = collective
        self._reason = "static: pinned"
        if collective == "auto":
            self._collective = fitting(compressor)[0]
            self._reason = f"static: first collective that fits '{compressor.id}'"
        self._plans: dict[tuple[tuple[str, ...], tuple[int, ...]], Plan] = {}
        bind(compressor, self._collective)  # what does not fit is refused here

    def plan(self, names: Sequence[str], sizes: Sequence[int]) -> Plan:
        """Give the plan for a bucket of parameters with these names and numbers of elements."""
        bucket = (tuple(names), tuple(sizes))
        if bucket not in self._plans:
            compressor = self._compressor.within(names, sizes)
            self._plans[bucket] = Plan(bind(compressor, self._collective), self._reason)
        return self._plans[bucket]
