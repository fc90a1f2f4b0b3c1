"""Ranges: profilers are told of each phase of an exchange, in the thread and at the moment in which it begins and ends.

Who shows ranges adds a marker. Without one, or while no profiler runs, a range costs nothing that can be measured.
"""

import os
from collections.abc import Callable

Marker = Callable[[str], Callable[[], object] | None]
"""Begins a range of a name and returns what ends it; None while nobody looks."""

markers: list[Marker] = []
"""All that are told of ranges, in this process."""

UNDER_NSIGHT = "NVTX_INJECTION64_PATH" in os.environ
"""Whether a tool that collects NVTX ranges has started this process."""


class Ranges:
    """The range that is shown at the moment, one after the other; it is begun and ended in the same thread."""

    def __init__(self) -> None:
        self._ends: list[Callable[[], object]] = []

    def show(self, phase: str | None) -> None:
        """End the range of the phase before, and begin one of the name ``mpicomp::phase``; None begins none."""
        while self._ends:
            self._ends.pop()()
        if phase is not None and markers:
            self._ends = [end for marker in markers if (end := marker(f"mpicomp::{phase}")) is not None]


def _add_nvtx() -> None:
    """Show ranges by the package nvtx, where it is installed."""
    try:
        import nvtx
    except ImportError:
        return

    def mark(name: str) -> Callable[[], object]:
        nvtx.push_range(name)
        return lambda: nvtx.pop_range()

    markers.append(mark)


if UNDER_NSIGHT:
    _add_nvtx()
