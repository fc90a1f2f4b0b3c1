"""The same plan for every bucket at every step."""

from collections.abc import Generator, Sequence
from typing import Any

from mpicomp.collectives import bind
from mpicomp.compressors import Compressor
from mpicomp.policies.policy import Plan, Policy, Shape
from mpicomp.transport.base import Asked, Transport


class Static(Policy):
    """One compressor and one collective, as they were named.

    Parameters
    ----------
    compressor : Compressor
        What every bucket uses.
    collective : str
        What carries it.

    Raises
    ------
    UnknownNameError, IncompatiblePairError
        See `mpicomp.collectives.bind`.
    """

    id = "static"

    def __init__(self, compressor: Compressor, collective: str) -> None:
        self._compressor = compressor
        self._collective = collective
        self._plans: list[Plan] = []
        bind(compressor, collective)  # what does not fit is refused here

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Generator[Asked, Any, None]:
        """See `Policy.start`; there are no rounds."""
        own = [self._compressor.within(shape.names, shape.sizes, shape.shapes) for shape in shapes]
        self._plans = [Plan(bind(compressor, self._collective), "static: pinned") for compressor in own]
        return
        yield

    def plan(self, bucket: int) -> Plan:
        """See `Policy.plan`."""
        return self._plans[bucket]
