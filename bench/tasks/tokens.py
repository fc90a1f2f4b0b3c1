"""From text to token numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

# At most four letters with the space before them; a line end with the next line's indentation; one digit,
# mark or space. Whole words would fill the vocabulary with words that a few hundred steps never meet, and a
# third of the tokens of the standard library would be spelled bytes; with four letters a seventh is.
_PIECE = re.compile(r" ?[^\W\d_]{1,4}|\n[ \t]*| ?[^\w\s]|.", re.DOTALL)

_BYTES = 256  # tokens that stand for single bytes; those of pieces follow


class Vocabulary:
    """The 256 bytes and the pieces that are most frequent in the training text.

    A piece outside of the vocabulary is spelled in its UTF-8 bytes. So text in any language has its tokens,
    and a loss per token cannot be improved by calling words unknown.

    Examples
    --------
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
        """Return the token numbers of all documents, one after another."""
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
