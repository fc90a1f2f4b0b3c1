"""Seconds that contention adds to every plan at random: a rank has no core, or other traffic has the link."""

import itertools
import math
import statistics
from collections import defaultdict, deque

_RECENT = 32  # pairs of measurements that count
_FEW = 3  # pairs from which on they say something
_ENOUGH = 8  # pairs of one plan from which on that plan is told from others
_ALIKE = 2.0  # times what the plan that differs least differs by; what differs by more has something of its own
_USUAL = 0.3  # share of a plan's seconds by which two measurements may differ without anything in the way
_OF_MEDIAN = 1.44  # of an exponential distribution, the mean over the median: 1 / ln 2


class Contention:
    """Estimates the seconds that contention adds to each of a bucket's exchanges, whatever the plan.

    Contention only adds seconds, and other ones at each step, so two steps of one plan in a row show how many: where
    they are exponential, the mean difference of two steps is the mean of what is added. A plan whose steps differ by
    far more than those of another plan has noise of its own, and is left out: contention would slow that other one too.
    """

    def __init__(self) -> None:
        self._before: tuple[int, float] | None = None
        self._apart: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self.seconds = 0.0
        """Mean seconds that are added."""

    def observe(self, plan: int, seconds: float) -> None:
        """Learn from the measured seconds of a plan, in the order of steps."""
        before, self._before = self._before, (plan, seconds)
        if before is None or before[0] != plan:
            return
        usual = _USUAL * min(before[1], seconds)
        self._apart.append((plan, max(0.0, (before[1] - seconds) ** 2 - usual**2) ** 0.5))
        apart: defaultdict[int, list[float]] = defaultdict(list)
        for own, difference in self._apart:
            apart[own].append(difference)
        known = [(statistics.median(own), own) for own in apart.values() if len(own) >= _ENOUGH]
        least, _ = min(known, default=(math.inf, []))
        alike = [own for median, own in known if median <= _ALIKE * least] or list(apart.values())
        pairs = list(itertools.chain.from_iterable(alike))
        self.seconds = _OF_MEDIAN * statistics.median(pairs) if len(pairs) >= _FEW else 0.0
