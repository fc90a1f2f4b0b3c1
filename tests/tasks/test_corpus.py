import os

import pytest
from mpicomp.bench.tasks import corpus
from mpicomp.bench.tasks.corpus import Vocabulary

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def library():
    return corpus.standard_library("text-lstm")


def test_nothing_is_held_out_and_trained_on(library):
    train, test = corpus.split(library)
    assert set(train) | set(test) == set(library)
    assert not set(train) & set(test)
    everything = "\0".join(train)
    assert not any(text in everything for text in test if len(text) > 200)
    assert 0.04 < sum(map(len, test)) / sum(map(len, library)) < 0.07


def test_twin_file_does_not_leak():
    documents = [f"text number {number}" for number in range(40)]
    train, test = corpus.split(documents * 3)
    assert not set(train) & set(test)
    assert sorted(train + test) == sorted(documents)


def test_works_without_optional_folders(tmp_path, monkeypatch):
    # Distributions leave out tests and the like; what is skipped may as well not be there.
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(os, "__file__", str(tmp_path / "lib" / "os.py"))
    (tmp_path / "lib" / "os.py").write_text("x = 1\n" * 200_000)
    assert len(corpus.standard_library("text-lstm")) == 1
    (tmp_path / "lib" / "test").mkdir()
    (tmp_path / "lib" / "test" / "test_os.py").write_text("y = 2\n")
    (tmp_path / "lib" / "_sysconfigdata_linux.py").write_text("z = 3\n")
    assert len(corpus.standard_library("text-lstm")) == 1


def test_blocks_put_together_are_the_text(tmp_path):
    text = "".join(f"line {number}\n" for number in range(10_000)) + "x" * 100_000
    (tmp_path / "a.txt").write_text(text)
    blocks = corpus.from_path("text-lstm", str(tmp_path / "a.txt"))
    assert "".join(blocks) == text
    assert max(map(len, blocks)) <= 2 * corpus._BLOCK


def test_folder(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"file {number}\r\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    os.mkfifo(tmp_path / "pipe")
    assert corpus.from_path("text-lstm", str(tmp_path)) == [f"file {number}\n" for number in range(30)]


def test_other_encodings_are_replaced(tmp_path):
    (tmp_path / "latin.txt").write_bytes("gr\xfc\xdfe\n".encode("latin-1"))
    assert corpus.from_path("text-lstm", str(tmp_path / "latin.txt")) == ["gr\ufffd\ufffde\n"]


def test_large_text_is_cut_and_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "LIMIT_BYTES", 1000)
    (tmp_path / "a.txt").write_text("a" * 1000)
    assert len(corpus.from_path("text-lstm", str(tmp_path))[0]) == 1000  # no warning: all of it was read
    (tmp_path / "b.txt").write_text("b")
    with pytest.warns(UserWarning, match="cut to its first"):
        corpus.from_path("text-lstm", str(tmp_path))


@pytest.mark.parametrize("content", [None, b"", b" \n \n"])
def test_path_without_text_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match="text-lstm: data: no text in"):
        corpus.from_path("text-lstm", str(tmp_path))


TEXTS = ["def f(x):\n    return x  # 12 ", "größe = 'naïve' \U0001f600\r\t\0", "", "世界", "a" * 11, "___ \n\n  \n"]


def decode(vocabulary, tokens):
    pieces = {token: piece.encode() for piece, token in vocabulary._token.items()}
    return b"".join(pieces.get(token, bytes([token % 256])) for token in tokens).decode()


@pytest.mark.parametrize("size", [256, 260, 4096])
def test_nothing_of_a_text_is_lost(size):
    vocabulary = Vocabulary(TEXTS[:2], size)
    tokens = vocabulary.encode(TEXTS)
    assert decode(vocabulary, tokens) == "".join(TEXTS)
    assert tokens.max() < len(vocabulary) <= size
