"""Parts of a report's sections: numbers as people write them, points of curves, tables and pictures."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

_MAX_POINTS = 100  # of a curve: as many as a narrow picture can show
_STEPS_PER_POINT = 5  # at least, where there are many more steps


def seconds(value: float) -> str:
    """Return seconds with three digits and the unit that fits.

    >>> seconds(0.02154), seconds(75.3), seconds(8.2e-6), seconds(5000)
    ('21.5 ms', '75.3 s', '8.2 us', '1 h 23 min')
    """
    if not math.isfinite(value):
        return "unknown"
    if value >= 3600:
        return f"{value // 3600:.0f} h {value % 3600 / 60:.0f} min"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value * 1e6)} us"


def amount(value: float) -> str:
    """Return bytes with three digits and a decimal unit.

    >>> amount(153128), amount(17), amount(2.5e9)
    ('153 kB', '17 B', '2.5 GB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value)} B"


def digits(value: float, count: int = 3) -> str:
    """Return a number with ``count`` digits, without an exponent where that is short.

    >>> digits(1234567.0), digits(0.98765), digits(0.000012), digits(20.0)
    ('1,234,567', '0.988', '1.2e-05', '20')
    """
    if not math.isfinite(value):
        return "none"
    return f"{value:,.0f}" if abs(value) >= 10 ** (count - 1) else f"{value:.{count}g}"


def times(value: float) -> str:
    """Return a factor, such as ``4.2 times``."""
    return f"{digits(value, 2)} times"


def percent(share: float) -> str:
    """Return a share as whole percent, such as ``42 %``."""
    return f"{100 * share:.0f} %"


def listed(parts: list[str]) -> str:
    """Join with commas and a last "and".

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def capital(text: str) -> str:
    """Return a text with its first letter as a capital."""
    return text[:1].upper() + text[1:]


def step_number(value: float) -> str:
    """Return the number of a step."""
    return digits(value, 7)


Statistic = Literal["min", "median", "max", "mean"]


@dataclass(frozen=True)
class Bins:
    """Neighbouring steps that become one point of a curve."""

    edges: NDArray[np.intp]  # index of the first step of each bin, and the number of steps

    @classmethod
    def of(cls, steps: int) -> "Bins":
        """Return bins of about equal size."""
        many = steps >= 8 * _STEPS_PER_POINT
        count = min(_MAX_POINTS, steps // _STEPS_PER_POINT) if many else steps
        return cls(np.linspace(0, steps, count + 1).round().astype(np.intp))

    def reduce(self, statistic: Statistic, values: Array) -> Array:
        """Return a statistic over the steps of each bin that leaves NaN out, shape (bins, ...); NaN where all are."""
        function: Any = {"min": np.nanmin, "median": np.nanmedian, "max": np.nanmax, "mean": np.nanmean}[statistic]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of bins where all are NaN
            parts = zip(self.edges, self.edges[1:], strict=False)
            return np.array([function(values[first:end], axis=0) for first, end in parts])

    def last(self, values: Array) -> Array:
        return values[self.edges[1:] - 1]

    def caption(self, what: str = "point", spread: str = "") -> str:
        """Return how steps became points; ``spread`` explains lines and bands, which need bins of several steps.

        >>> Bins.of(10_000).caption()
        'Each point stands for 100 steps'
        """
        least, largest = int(np.diff(self.edges).min()), int(np.diff(self.edges).max())
        if largest == 1:
            return f"Each {what} is one step"
        count = f"{largest}" if least == largest else f"{least} or {largest}"
        return f"Each {what} stands for {count} steps{spread}"


@dataclass(frozen=True)
class Curve:
    """Least, median and greatest value of each bin, against its last step, second or byte."""

    x: Array
    low: Array
    middle: Array
    high: Array

    @classmethod
    def of(cls, bins: Bins, x: Array, values: Array) -> "Curve":
        """Return the curve of values over steps."""
        return cls(bins.last(x), bins.reduce("min", values), bins.reduce("median", values), bins.reduce("max", values))

    @property
    def known(self) -> Array:
        """Medians that are there; one NaN where none is."""
        known = self.middle[np.isfinite(self.middle)]
        return known if known.size else np.array([np.nan])

    def rows(self, form: Callable[[float], str], *head: str) -> list[list[str]]:
        """Return rows of a table: ``head``, x, least, median, greatest."""
        points = zip(self.x, self.low, self.middle, self.high, strict=True)
        return [[*head, form(at), *map(digits, values)] for at, *values in points]


@dataclass
class Table:
    """Numbers of a picture: a header, and rows of text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Picture:
    """One picture with its words and its numbers."""

    name: str  # name of its files
    title: str
    finding: str  # what it shows, in numbers, for people who do not see it
    figure: "Figure"
    caption: str  # how steps were summarized, and what was left out
    table: Table

    @property
    def height(self) -> int:
        """Pixels."""
        return round(72 * self.figure.get_figheight())


@dataclass
class Section:
    """Pictures that answer one question."""

    anchor: str  # name in links
    title: str
    words: str  # the finding; it stands without the pictures
    pictures: list[Picture] = field(default_factory=list)
    points: list[str] = field(default_factory=list)  # the finding of each run
    key: dict[str, str] = field(default_factory=dict)  # meaning of each colour, by its token
