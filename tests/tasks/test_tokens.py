import numpy as np
import pytest
from mpicomp.bench.tasks.tokens import Vocabulary

pytestmark = pytest.mark.timeout(30)

TEXTS = [
    "def f(x):\n    return x  # 12 ",
    "größe = 'naïve' \U0001f600\r\t\0",
    "",
    "世界",
    "a" * 11,
    "___ \n\n  \n",
]


def decode(vocabulary, tokens):
    pieces = {token: piece.encode() for piece, token in vocabulary._token.items()}
    return b"".join(pieces.get(token, bytes([token % 256])) for token in tokens).decode()


@pytest.mark.parametrize("size", [256, 260, 4096])
def test_nothing_of_a_text_is_lost(size):
    vocabulary = Vocabulary(TEXTS[:2], size)
    tokens = vocabulary.encode(TEXTS)
    assert decode(vocabulary, tokens) == "".join(TEXTS)
    assert tokens.max() < len(vocabulary) <= size


def test_documents_in_another_order_give_the_same_vocabulary():
    assert Vocabulary(TEXTS, 270)._token == Vocabulary(TEXTS[::-1], 270)._token


def test_empty_text_is_refused():
    assert len(Vocabulary([], 300)) == 256
    assert Vocabulary([], 300).encode([]).tolist() == []
    assert Vocabulary(["abc"], 300).encode(["", ""]).dtype == np.int32
