"""A picture with its words and its numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Table:
    """Numbers behind a picture: a header, and rows of text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Picture:
    """One picture.

    Attributes
    ----------
    name : str
        Of its files; letters, digits and hyphens.
    title : str
        What it shows, in some words.
    finding : str
        What it says, in numbers, for those who do not see it, and above its table.
    figure : Figure
    caption : str
        What a reader has to know: what was put together, and what was left out.
    table : Table or None
    """

    name: str
    title: str
    finding: str
    figure: "Figure"
    caption: str = ""
    table: Table | None = None


@dataclass
class Section:
    """Pictures that answer one question.

    Attributes
    ----------
    anchor : str
        Its name in links.
    title : str
    words : str
        What it found; it stands without the pictures.
    points : list of str
        What it found of each run.
    pictures : list of Picture
    key : list of tuple of str
        Colours that stand for something in all pictures, each with a token of `palette` and words.
    """

    anchor: str
    title: str
    words: str
    pictures: list[Picture] = field(default_factory=list)
    key: list[tuple[str, str]] = field(default_factory=list)
    points: list[str] = field(default_factory=list)
