"""Text to learn from: the standard library's sources, or the user's files."""

from __future__ import annotations

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

# A few hundred steps see less than a megabyte; more than this only costs every rank time and memory.
LIMIT_BYTES = 16_000_000

# Skipped wherever they stand: packages that distributions leave out or Python removed (so that corpora differ little
# between installations), tests, and tables of numbers.
_SKIPPED = frozenset({"distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo", "venv"})
_SKIPPED |= {"__pycache__", "dist-packages", "encodings", "site-packages", "test", "tests"}

_SPLIT_SEED = 20  # seed of the split into training and held-out documents, the same for all runs
_HELD_OUT = 0.05  # share of the held-out part
_BLOCK = 16_384


def standard_library(task: str) -> list[str]:
    """Return the standard library's sources, one string a file, in the order of their paths."""
    root = os.path.dirname(os.__file__)
    documents = [
        _decoded(Path(path).read_bytes())
        for path in _files(root, _SKIPPED)
        # _sysconfigdata holds this build's paths and flags.
        if path.endswith(".py") and not os.path.basename(path).startswith("_sysconfigdata")
    ]
    if sum(map(len, documents)) < 1_000_000:
        raise ValueError(f"{task}: the standard library of this Python has no sources; expected a text file as data")
    return documents


def from_path(task: str, path: str) -> list[str]:
    """Return the user's text: one string a file of a folder, or blocks of lines of a single file."""
    if not os.path.exists(path):
        raise ValueError(f"{task}: data: {path!r} does not exist; expected a text file or a folder of text files")
    folder = os.path.isdir(path)
    documents = []
    left = LIMIT_BYTES
    try:
        for file in _files(path, frozenset()) if folder else [path]:
            with open(file, "rb") as opened:
                content = opened.read(left + 1)  # one byte more than allowed tells a cut from an end
            if folder and b"\0" in content[:1024]:  # a binary file
                continue
            left -= len(content)
            documents.append(_decoded(content))
            if left < 0:
                break
    except OSError as error:
        raise ValueError(f"{task}: data: cannot read {error.filename or path!r}: {error.strerror}") from error
    if left < 0:
        warnings.warn(f"{task}: data: {path!r} is cut to its first {LIMIT_BYTES // 1_000_000} MB", stacklevel=2)
    if not any(document.strip() for document in documents):
        raise ValueError(f"{task}: data: no text in {path!r}; expected a text file or a folder of text files")
    # Too few files to hold some of them out: cut them up.
    if len(documents) < 1 / _HELD_OUT:
        documents = [block for text in documents for block in _blocks(text)]
    return documents


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Return training and held-out documents, whole ones, about a twentieth of the text, whatever the run's seed."""
    # A document that occurs twice could end on both sides.
    documents = list(dict.fromkeys(documents))
    total = sum(map(len, documents))
    held_out: set[int] = set()
    size = 0
    for index in np.random.default_rng(_SPLIT_SEED).permutation(len(documents)):
        if size >= _HELD_OUT * total:
            break
        # A few large files would be most of the measurement.
        if len(documents[index]) <= 2 * total / len(documents):
            held_out.add(int(index))
            size += len(documents[index])
    train = [text for index, text in enumerate(documents) if index not in held_out]
    return train, [documents[index] for index in sorted(held_out)]


def _files(root: str, skipped: frozenset[str]) -> Iterator[str]:
    # In an order that does not depend on the file system.
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        paths = (os.path.join(folder, name) for name in sorted(files) if not name.startswith("."))
        # Opening a named pipe would wait for its writer.
        yield from filter(os.path.isfile, paths)


def _decoded(content: bytes) -> str:
    return content.decode("utf-8", errors="replace").replace("\r\n", "\n")


def _blocks(text: str) -> Iterator[str]:
    # At line ends; a line longer than a block is cut where the block ends.
    start = 0
    while start < len(text):
        end = text.find("\n", start + _BLOCK - 1, start + 2 * _BLOCK) + 1
        end = end if end > 0 else start + _BLOCK
        yield text[start:end]
        start = end


# At most four letters with the space before them; a line end with the next line's indentation; one digit,
# mark or space. Whole words would fill the vocabulary with words that a few hundred steps never meet, and a
# third of the tokens of the standard library would be spelled bytes; with four letters a seventh is.
_PIECE = re.compile(r" ?[^\W\d_]{1,4}|\n[ \t]*| ?[^\w\s]|.", re.DOTALL)

_BYTES = 256  # tokens that stand for single bytes; those of pieces follow


class Vocabulary:
    """The 256 bytes and the pieces that are most frequent in the training text.

    A piece outside of the vocabulary is spelled in its UTF-8 bytes. So text in any language has its tokens,
    and a loss per token cannot be improved by calling words unknown.

    >>> vocabulary = Vocabulary(["if x: x", "if y: x"], size=258)  # keeps " x" and ":"
    >>> len(vocabulary)
    258
    >>> vocabulary.encode([" x: xx"]).tolist()
    [256, 257, 32, 120, 120]
    """

    def __init__(self, documents: Sequence[str], size: int) -> None:
        pieces, numbers = _pieces(documents)
        counts = np.bincount(numbers, minlength=len(pieces))
        # Equally frequent pieces go by their text: the order of counting would depend on the order of
        # documents.
        frequent = sorted(range(len(pieces)), key=lambda piece: (-counts[piece], pieces[piece]))
        self._token = {pieces[piece]: _BYTES + rank for rank, piece in enumerate(frequent[: size - _BYTES])}

    def __len__(self) -> int:
        return _BYTES + len(self._token)

    def encode(self, documents: Sequence[str]) -> np.ndarray:
        pieces, numbers = _pieces(documents)
        # Spelling is decided once for each distinct piece; the text itself is only looked up, by NumPy.
        spelled = [
            [self._token[piece]] if piece in self._token else list(piece.encode("utf-8", "replace")) for piece in pieces
        ]
        lengths = np.array([len(tokens) for tokens in spelled], np.int64)
        starts = np.cumsum(lengths) - lengths
        tokens = np.array([token for tokens in spelled for token in tokens], np.int32)
        repeats = lengths[numbers]
        # Position of each output token within its piece.
        within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        places: np.ndarray = tokens[np.repeat(starts[numbers], repeats) + within]
        return places


def _pieces(documents: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return the distinct pieces in order of appearance, and the text as numbers of pieces."""
    number: defaultdict[str, int] = defaultdict()
    number.default_factory = number.__len__
    # Document by document, so that never more than one is held as a list of strings.
    texts = [np.fromiter(map(number.__getitem__, _PIECE.findall(text)), np.int32) for text in documents]
    return list(number), np.concatenate(texts) if texts else np.empty(0, np.int32)
