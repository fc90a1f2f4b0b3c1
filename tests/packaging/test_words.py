"""Words that the project does not use: its names and sentences are those of the field, in plain American English."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("mpicomp", "kernels", "bench", "studies", "docs", "slurm", "tests")
SOURCE = ("mpicomp/", "kernels/", "bench/", "studies/")
SUFFIXES = (".py", ".pyi", ".md", ".cu", ".cuh", ".sh", ".sbatch")
FILES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES),
]
# Each with what is written instead: data do not speak, and the others have gone out of use.
WORDS = {
    r"\b(?:un)?told\b": "reported, known",
    r"\bbeside\b": "next to, in addition to, during",
    r"\bupon\b": "on",
    r"\banew\b": "again",
    r"\b[Ww]hoever\b": "code that, a rank that",
    r"\b(?:over)?hear[sd]?\b": "receive",
    r"\bfor own in\b|\bown(?:\.\w|\[| = )": "the name of what it is",
}
NAMES = {"own", "apart", "together"}
"""No names in code: as words of a sentence they are fine."""
ANY_NAME = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")
EXCEPTIONS = ("tests/packaging/test_words.py",)
# Words in comments, docstrings and messages of the source, each with what is written instead.
SENTENCES = {
    r"\bat last\b": "in the end, then",
    r"\balike\b": "equal, the same",
    r"\bnone of\b": "not of, no",
    r"\bso (?:many|long|much)\b": "the name of the number",
    r"\b(?:nobody|somebody)\b": "no rank, another rank, the reader",
    r"\b(?:goes?|went|going) on\b": "continue",
    r"\b(?:comes?|came|coming) (?:to|out|back)\b": "the verb that is meant",
    r"\bas (?:it|they) (?:is|are|was|were)\b": "unchanged, uncoded",
    r"\b(?:says|said|saying)\b": "warn, print, announce, name",
    r"(?<!')\b[Ww]hat\b(?! to\b|: str)": "a noun",
}


def banned_words(text, words):
    """Return the lines of a text with a banned word, each with what is written instead."""
    if not re.search("|".join(words), text, re.MULTILINE):
        return []
    return [
        f"{number}: {match[0]!r}: {better}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, better in words.items()
        if (match := re.search(pattern, line))
    ]


def banned_names(path):
    """Return the lines of a Python file with a banned name."""
    with tokenize.open(path) as file:
        text = file.read()
    if not ANY_NAME.search(text):  # most files: reading their tokens takes seconds
        return []
    lines = io.StringIO(text).readline
    tokens = [token for token in tokenize.generate_tokens(lines) if token.type == tokenize.NAME]
    return [f"{token.start[0]}: the name {token.string!r}" for token in tokens if token.string in NAMES]


@pytest.mark.quick
def test_files_have_no_banned_words():
    found = []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        if not name.startswith(EXCEPTIONS) and "_build" not in path.parts:
            lines = banned_words(path.read_text(), WORDS) + (banned_names(path) if path.suffix == ".py" else [])
            found += [f"{name}:{line}" for line in lines]
    assert not found, "\n".join(found)


@pytest.mark.quick
def test_sentences_of_the_source_are_plain():
    found = []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        if name.startswith(SOURCE):
            found += [f"{name}:{line}" for line in banned_words(path.read_text(), SENTENCES)]
    assert not found, "\n".join(found)
