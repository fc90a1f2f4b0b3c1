"""An error of one rank is the same error on all ranks: none of them raises while others wait."""

import json

import numpy as np
import pytest
from checkpoints import (
    about,
    caught,
    content,
    file_of,
    load,
    load_errors,
    names,
    save,
    save_errors,
    the_one,
    write_by_hand,
)

from mpicomp.checkpoint import load_rounds, rounds, save_rounds
from mpicomp.errors import CheckpointError, ConfigurationError, DisagreementError
from mpicomp.transport import LocalWorld

DEEP = "[" * 100_000 + "]" * 100_000
DEEP_DICT = '{"a": ' * 100_000 + "1" + "}" * 100_000

ABOUTS = [
    about(token=2**63),
    about(token=-1),
    about(token=10**30),
    about(checkpoint=2**63),
    about(checkpoint=10**18),
    about(checkpoint=-5),
    about(ranks=2**64),
    about(ranks=0),
    about(ranks=1.5),
    about(rank=True),
    about(rank=-1),
    about(token=None),
    json.dumps(about()).replace("7", "1e999"),
    json.dumps(about()).replace("7", "NaN"),
    json.dumps(about()).replace("7", "7" * 5000),
    json.dumps(about()).replace("7", DEEP),
    json.dumps(about()).replace('"0.1.0"', DEEP_DICT),
    json.dumps(about()).replace('"schema": 1', f'"schema": {DEEP}'),
    json.dumps(about()).replace('"0.1.0"', "[" * 900 + "]" * 900),
    json.dumps(about()).replace('"schema": 1', f'"schema": {"[" * 900 + "]" * 900}'),
    DEEP,
    DEEP_DICT,
    "\ud800",
    "null",
    "",
]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("head", ABOUTS, ids=range(len(ABOUTS)))
def test_a_header_with_impossible_values(tmp_path, head, bad):
    save(tmp_path, [{"w": np.ones(3)}] * 2)
    path = file_of(tmp_path, bad)
    write_by_hand(path, head)
    for ranks in (1, 2, 3):
        if ranks > 1 or bad == 0:
            assert f"'{path}'" in the_one(load_errors(tmp_path, ranks))
    save(tmp_path, [{"epoch": 2}])
    assert load(tmp_path) == [{"epoch": 2}]


TREES = [
    DEEP,
    DEEP_DICT,
    '{"dict": [["a", ' * 50_000 + "1" + "]]}" * 50_000,
    '{"tuple": [' * 50_000 + "]}" * 50_000,
    '{"array": "w", "dtype": "float64", "shape": [1e999]}',
    '{"array": "w", "dtype": "float64", "shape": [18446744073709551616]}',
    '{"array": "w", "dtype": "float64", "shape": [4611686018427387904, 4]}',
    '{"array": "w", "dtype": "f8,f8", "shape": [3]}',
    '{"array": "w", "dtype": 5, "shape": [3]}',
    '{"array": ["w"], "dtype": "float64", "shape": [3]}',
    '{"tensor": "w", "dtype": "nn", "shape": [3]}',
    '{"dict": [[{"a": 1}, 1]]}',
    '{"dict": [[["a"], 1]]}',
    '{"dict": [["a"]]}',
    '{"tuple": 3}',
    '{"dtype": 1}',
    '{"array": "gone", "dtype": "<f8", "shape": [50]}',
    '{"array": "w", "dtype": "O", "shape": [3]}',
    "1" * 5000,
    "",
]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_a_tree_that_cannot_be(tmp_path, tree, bad):
    if "tensor" in tree:
        pytest.importorskip("torch")  # which is not asked for by a file alone
    save(tmp_path, [{"w": np.ones(3)}] * 2)
    path = file_of(tmp_path, bad)
    write_by_hand(path, about(ranks=2, rank=bad), tree, [("w", "F64", np.ones(3))])
    write_by_hand(file_of(tmp_path, 1 - bad), about(ranks=2, rank=1 - bad))
    text = the_one(load_errors(tmp_path, 2))
    assert f"'{path}' cannot be read" in text
    assert text.endswith(f"(on rank {bad})")


@pytest.mark.parametrize("ranks", [10**9, 2**62])
def test_a_file_of_more_ranks_than_there_are_files(tmp_path, ranks):
    write_by_hand(file_of(tmp_path, 0), about(ranks=ranks))
    for readers in (1, 2):
        assert f"rank-{ranks - 1}.safetensors' is missing" in the_one(load_errors(tmp_path, readers))


def test_a_file_with_the_last_number(tmp_path):
    write_by_hand(tmp_path / "00000001" / "rank-00000.safetensors", about(checkpoint=10**18 - 2), '{"dict": []}')
    assert load(tmp_path, 2) == [{}] * 2
    save(tmp_path, [{"epoch": 2}] * 2)
    assert load(tmp_path, 2) == [{"epoch": 2}] * 2
    before = content(tmp_path)
    text = the_one(save_errors(tmp_path, [{"epoch": 3}] * 2))
    assert f"the last number, 999999999999999999, was used in '{tmp_path}'" in text
    assert content(tmp_path) == before


def test_a_folder_of_twenty_digits(tmp_path):
    save(tmp_path, [{"epoch": 1}] * 2)
    (tmp_path / "00000001").rename(tmp_path / "99999999999999999999")
    before = content(tmp_path)
    assert load(tmp_path, 2) == [None] * 2
    save(tmp_path, [{"epoch": 2}] * 2)
    assert load(tmp_path, 2) == [{"epoch": 2}] * 2
    assert names(tmp_path) == ["00000001", "99999999999999999999"]
    assert before.items() <= content(tmp_path).items()


@pytest.mark.parametrize("wrong", [None, b"bytes", 3, object()])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_folder_that_is_no_path_on_one_rank(tmp_path, wrong, bad):
    folders = [wrong if rank == bad else str(tmp_path / "a") for rank in range(2)]
    world = LocalWorld(2)
    ends = list(zip(folders, world.transports, strict=True))
    saved = world.run([caught(save_rounds(folder, {}, 1, end.group)) for folder, end in ends])
    loaded = world.run([caught(load_rounds(folder, end.group)) for folder, end in ends])
    for verb, errors in [("save", saved), ("load", loaded)]:
        text = the_one(errors, ConfigurationError)
        assert text.startswith(f"{verb}_checkpoint: folder must be a str or a path, got ")
        assert text.endswith(f"(on rank {bad})")
    assert names(tmp_path) == []


@pytest.mark.parametrize("folder", ["a\0b", "x" * 5000])
def test_a_folder_that_no_system_knows(tmp_path, folder):
    assert "cannot write below" in the_one(save_errors(f"{tmp_path}/{folder}", [{}, {}]))
    assert "cannot look into" in the_one(load_errors(f"{tmp_path}/{folder}", 2))


class Odd(dict):
    """A dict that cannot be walked."""

    def items(self):
        raise RuntimeError("nobody knows")

    def __iter__(self):
        return iter([])


@pytest.mark.parametrize("bad", [0, 1])
def test_a_state_that_raises_on_one_rank(tmp_path, bad):
    text = the_one(save_errors(tmp_path / "a", [{"w": Odd() if rank == bad else 1} for rank in range(2)]))
    assert text == f"save_checkpoint: state cannot be stored: RuntimeError: nobody knows (on rank {bad})"
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("odd"), MemoryError("odd"), RecursionError("odd"), OSError("odd")])
@pytest.mark.parametrize("name", ["begin", "write_file", "finish", "newest", "RankFile", "Redistribution"])
def test_whatever_a_step_raises_is_raised_on_all(tmp_path, monkeypatch, name, error):
    save(tmp_path, [{"epoch": 1}] * 2)
    before = content(tmp_path)

    def broken(*args, **settings):
        raise error

    monkeypatch.setattr(rounds, name, broken)
    loads = name in ("newest", "RankFile", "Redistribution")
    errors = load_errors(tmp_path, 2) if loads else save_errors(tmp_path, [{}] * 2)
    assert "odd" in the_one(errors)
    assert content(tmp_path) == before
    assert names(tmp_path) == ["00000001"]


def damaged(whole, rng):
    """Damage a file in one or several places."""
    data = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        place, length = int(rng.integers(len(data))), int(rng.integers(1, 200))
        match rng.integers(6):
            case 0:
                data[place] ^= int(rng.integers(1, 256))
            case 1:
                del data[place:]
            case 2:
                data[place:place] = rng.bytes(length)
            case 3:
                del data[place : place + length]
            case 4:
                data[place : place + length] = bytes(min(length, len(data) - place))
            case 5:
                other = int(rng.integers(len(data)))
                data[place : place + length] = data[other : other + length]
        if not data:
            break
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_file_is_one_error_of_all_ranks(tmp_path, seed):
    rng = np.random.default_rng(seed)
    states = [{"schema": 1, "residuals": {"w": np.arange(5.0) + rank}, "velocities": {}} for rank in range(3)]
    save(tmp_path, [{"r": state, "f": (np.float32(1), [np.ones(3, bool), "é"])} for state in states])
    files = [file_of(tmp_path, rank) for rank in range(3)]
    wholes = [path.read_bytes() for path in files]
    for _ in range(200):
        rank, ranks = int(rng.integers(3)), int(rng.integers(1, 5))
        data = damaged(wholes[rank], rng)
        if data == wholes[rank]:
            continue
        files[rank].write_bytes(data)
        assert f"'{files[rank]}'" in the_one(load_errors(tmp_path, ranks))
        files[rank].write_bytes(wholes[rank])
    save(tmp_path, [{}])
    assert names(tmp_path) == ["00000002"]


def test_disagreement_is_raised_before_a_problem_of_one_rank(tmp_path):
    world = LocalWorld(2)
    with pytest.raises(DisagreementError):
        world.run([save_rounds(tmp_path / n, {}, 1, end.group) for n, end in zip("ab", world.transports, strict=True)])
    with pytest.raises(CheckpointError, match="cannot be stored"):
        world.run([save_rounds(tmp_path, {1: {2}} if end.group.rank else {}, 1, end.group) for end in world.transports])
