import collections
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from worlds import Ranks

import mpicomp
from mpicomp.checkpoint import folder as folders
from mpicomp.checkpoint import load_rounds, rounds, save_rounds, weights
from mpicomp.errors import CheckpointError, ConfigurationError, DisagreementError, MpicompError
from mpicomp.transport import LocalWorld


def save(folder, states, keep=1):
    """Save one state a rank."""
    world = LocalWorld(len(states))
    world.run([save_rounds(folder, own, keep, end.group) for own, end in zip(states, world.transports, strict=True)])


def load(folder, ranks=1):
    """Give one state a rank."""
    world = LocalWorld(ranks)
    return world.run([load_rounds(folder, end.group) for end in world.transports])


def caught(asked):
    try:
        yield from asked
    except MpicompError as error:
        return error
    return None


def save_errors(folder, states, keep=1):
    world = LocalWorld(len(states))
    ends = zip(states, world.transports, strict=True)
    return world.run([caught(save_rounds(folder, own, keep, end.group)) for own, end in ends])


def load_errors(folder, ranks):
    world = LocalWorld(ranks)
    return world.run([caught(load_rounds(folder, end.group)) for end in world.transports])


def the_one(errors, kind=CheckpointError):
    """Give what all ranks raised, which is the same."""
    assert {type(error) for error in errors} == {kind}
    (text,) = {str(error) for error in errors}
    return text


def content(folder):
    """Give every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def check_same(left, right):
    """Check that two trees are the same in all types and bits."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert [(type(key), key) for key in left] == [(type(key), key) for key in right]
        for key in left:
            check_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, two in zip(left, right, strict=True):
            check_same(one, two)
    elif isinstance(left, np.ndarray | np.generic):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()
    elif type(left).__name__ == "Tensor":
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert bits(left) == bits(right)
    else:
        assert repr(left) == repr(right)  # NaN is not NaN


def bits(tensor):
    torch = sys.modules["torch"]
    return tensor.resolve_conj().clone(memory_format=torch.contiguous_format).untyped_storage().tolist()


# What can be stored


def test_a_tree_of_everything_comes_back_as_it_was(tmp_path):
    state = {
        "none": None,
        "flags": [True, False],
        "numbers": [0, -1, 10**40, 0.1, -0.0, 5e-324, float("inf"), -float("inf"), float("nan")],
        "texts": ["", "ä\n\"'\\", "\ud800", "state['x']"],
        "tuples": ((), (1, (2.0, [None])), ()),
        "lists": [[], [[]], {}],
        "keys": {0: "int", "0": "text", -5: {}, "": {"": ()}, "dict": 1, "tuple": [], "array": 2},
        "values": [
            np.float32(0.1),
            np.int8(-3),
            np.bool_(True),
            np.float64(2.5),
            np.complex128(1 - 2j),
            np.uint64(2**63),
        ],
    }
    save(tmp_path / "new" / "folder", [state])
    (loaded,) = load(tmp_path / "new" / "folder")
    check_same(loaded, state)
    assert list(loaded) == list(state)


DTYPES = ["?", "i1", "u1", "i2", "u2", "<i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", ">i8", ">c16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_and_layout_keep_their_bits(tmp_path, dtype):
    noise = np.random.default_rng(0).bytes(24 * 16)
    size = np.dtype(dtype).itemsize
    whole = np.frombuffer(noise[: 24 * size], np.uint8).reshape(4, 6 * size)
    whole = (whole & 1 if dtype == "?" else whole).view(dtype)  # for floats NaNs with payloads, among others
    state = {
        "whole": whole,
        "turned": whole.T,
        "part": whole[::2, 1::3],
        "back": whole[::-1],
        "one": whole[:1, ::6],
        "scalar": np.array(whole[0, 0], dtype),
        "empty": np.empty((0, 3), dtype),
        "stretched": np.broadcast_to(whole[:1], (5, 6)),
    }
    save(tmp_path, [state])
    (loaded,) = load(tmp_path)
    check_same(loaded, state)
    loaded["whole"][0, 0] = 1  # it can be trained on


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.binary().map(lambda b: np.frombuffer(b, "u1")),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=20,
    )
)
@settings(max_examples=60)
def test_any_tree_comes_back_as_it_was(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("tree")
    save(folder, [state])
    check_same(load(folder)[0], state)


def test_tensors_of_every_dtype_and_layout_keep_their_bits(tmp_path):
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (4, 96), dtype=torch.uint8, generator=generator)
    kinds = (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64"
    )
    state = {}
    for name in [*kinds.split(), "complex64", "complex128"]:
        whole = noise.view(getattr(torch, name))
        state[name] = {
            "whole": whole,
            "turned": whole.T,
            "scalar": whole[0, 0],
            "empty": whole[:0],
            "one": whole[:1, :: whole.shape[1]],
            "part": whole[:, 1::2],
        }
    state["flags"] = noise > 127
    state["conjugate"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    state["negative"] = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    state["one"] = torch.tensor([1 + 2j]).conj().imag  # contiguous
    save(tmp_path, [state])
    (loaded,) = load(tmp_path)
    assert loaded["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert loaded["negative"].tolist() == [-2, 4]
    assert loaded["one"].tolist() == [-2]
    assert loaded["bfloat16"]["turned"].is_contiguous()
    for name in ("negative", "one"):
        del loaded[name], state[name]
    check_same(loaded, state)


def test_parameters_and_kinds_of_dict_come_back_plain(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    Pair = collections.namedtuple("Pair", "left right")
    state = {
        "parameter": model.weight,
        "model": model.state_dict(),
        "default": collections.defaultdict(list, {1: Pair(1, 2)}),
        "shape": model.weight.shape,
    }
    save(tmp_path, [state])
    (loaded,) = load(tmp_path)
    assert type(loaded["parameter"]) is torch.Tensor
    assert not loaded["parameter"].requires_grad
    assert torch.equal(loaded["parameter"], model.weight)
    assert type(loaded["model"]) is dict
    assert (loaded["default"], loaded["shape"]) == ({1: (1, 2)}, (1, 2))
    torch.nn.Linear(2, 1).load_state_dict(loaded["model"])


def test_a_large_tree_of_what_json_makes_larger_is_read_again(tmp_path):
    state = {"a": '"' * 10_400_000}
    save(tmp_path, [state])
    assert load(tmp_path) == [state]


HOLDS_ITSELF = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {"b": object()}]}, r"state\['a'\]\[1\]\['b'\] is a object and cannot be stored"),
        ({"a": (1, {2, 3})}, r"state\['a'\]\[1\] is a set and"),
        ({"a": b"x"}, r"state\['a'\] is a bytes and"),
        ({3: np.array([None])}, r"state\[3\] is a numpy.ndarray of object and"),
        ({3: np.array(["x"])}, r"state\[3\] is a numpy.ndarray of <U1 and"),
        ({3: np.zeros(2, "i4,f4")}, r"state\[3\] is a numpy.ndarray of \[\("),
        ({3: np.str_("x")}, r"state\[3\] is a numpy.str_ of <U1 and"),
        ({3: np.ma.masked_array([1.0], [True])}, r"state\[3\] is a numpy.ma.*MaskedArray of float64 and"),
        ({"a": {1.5: 0}}, r"keys must be strings or ints, got 1.5 \(float\) in state\['a'\]"),
        ({"a": {True: 0}}, r"keys must be strings or ints, got True \(bool\) in state\['a'\]"),
        ({"a": {(1, 2): 0}}, r"keys must be strings or ints, got \(1, 2\) \(tuple\) in state\['a'\]"),
        (HOLDS_ITSELF, "state cannot be written as JSON: maximum recursion depth"),
        ({"a": 10**5000}, "state cannot be written as JSON: Exceeds the limit"),
        ({"a": "x" * (33 << 20)}, "at most 20971520 bytes as JSON, got 346030[0-9]{2}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_stored_is_refused_on_all_ranks_before_a_file_is_touched(tmp_path, state, message):
    folder = tmp_path / "folder"
    errors = save_errors(folder, [{"a": 1}, state, {"a": 1}])
    text = the_one(errors)
    assert text.startswith("save_checkpoint: ")
    assert text.endswith(" (on rank 1)")
    with pytest.raises(CheckpointError, match=message):
        raise errors[0]
    assert not folder.exists()


def test_tensors_that_cannot_be_stored_are_refused(tmp_path):
    torch = pytest.importorskip("torch")

    class Half(torch.Tensor):
        """Stands for tensors of which each rank has a part."""

    for tensor, what in [
        (torch.eye(3).to_sparse(), "torch.Tensor"),
        (torch.empty(3, device="meta"), "torch.Tensor"),
        (torch.eye(3).as_subclass(Half), "Half"),
    ]:
        (error,) = save_errors(tmp_path, [{"w": tensor}])
        assert f"{what} of torch.float32 and cannot be stored" in str(error)
    assert names(tmp_path) == []


# Files


def test_a_file_is_what_other_tools_can_read(tmp_path):
    save(tmp_path, [{"w": np.arange(3.0), 0: (np.zeros(2, "f4"),)}])
    path = tmp_path / "00000001" / "rank-00000.safetensors"
    arrays = load_file(path)
    assert sorted(arrays) == ["state['w']", "state[0][0]"]
    assert arrays["state['w']"].tolist() == [0, 1, 2]
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]
    about = json.loads(header["mpicomp"])
    assert about | {"token": 0} == {
        "schema": 1,
        "mpicomp": mpicomp.__version__,
        "checkpoint": 1,
        "token": 0,
        "ranks": 1,
        "rank": 0,
    }


def test_a_file_is_on_the_disk_as_a_whole_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    events = []

    def fsync(handle):
        events.append((os.fstat(handle).st_ino, os.fstat(handle).st_size))

    rename = Path.rename
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("rename"), rename(path, to))[1])
    save(tmp_path, [{"w": np.ones(1000)}, {"w": np.ones(10)}])
    written = [(path.stat().st_ino, path.stat().st_size) for path in sorted((tmp_path / "00000001").iterdir())]
    assert len(written) == 2
    assert set(written) <= set(events[: events.index("rename")])
    inodes = [event[0] for event in events if event != "rename"]
    assert inodes.index((tmp_path / "00000001").stat().st_ino) < events.index("rename")
    assert tmp_path.stat().st_ino in inodes[events.index("rename") :]


def test_older_ones_are_removed_and_what_is_none_is_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "12").mkdir()
    (tmp_path / "model.part").write_text("mine")
    others = names(tmp_path)
    for epoch in range(1, 6):
        save(tmp_path, [{"epoch": epoch}], keep=2)
        expected = [f"{number:08d}" for number in range(max(1, epoch - 1), epoch + 1)]
        assert names(tmp_path) == sorted(others + expected)
        assert load(tmp_path) == [{"epoch": epoch}]
    save(tmp_path, [{"epoch": 6}])
    assert names(tmp_path) == sorted([*others, "00000006"])


def test_where_there_is_none_none_is_loaded(tmp_path):
    assert load(tmp_path / "nowhere", 3) == [None] * 3
    (tmp_path / "00000003.part").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert load(tmp_path, 2) == [None] * 2
    assert names(tmp_path) == ["00000003.part", "notes.txt"]


def test_numbers_go_on_above_what_a_crash_left(tmp_path):
    (tmp_path / "00000007.part").mkdir()
    save(tmp_path, [{}])
    assert names(tmp_path) == ["00000008"]


@pytest.mark.parametrize("keep", [0, -1, 1.0, True, "2", None])
def test_keep_is_a_number_of_checkpoints(tmp_path, keep):
    text = the_one(save_errors(tmp_path, [{}, {}], keep), ConfigurationError)
    assert text == f"save_checkpoint: keep must be at least 1, got {keep!r}"
    assert names(tmp_path) == []


def test_ranks_that_mean_different_folders_are_told(tmp_path):
    world = LocalWorld(2)
    with pytest.raises(
        DisagreementError, match=r"save_checkpoint: folder must be the same on all ranks, got .*a on rank 0"
    ):
        world.run([save_rounds(tmp_path / n, {}, 1, end.group) for n, end in zip("ab", world.transports, strict=True)])
    with pytest.raises(DisagreementError, match="load_checkpoint: folder must be the same on all ranks"):
        world.run([load_rounds(tmp_path / n, end.group) for n, end in zip("ab", world.transports, strict=True)])
    assert names(tmp_path) == []


# Damage


@pytest.fixture
def two_ranks(tmp_path):
    """Give a folder with a checkpoint of two ranks."""
    folder = tmp_path / "two"
    save(folder, [{"w": np.full(50, rank), "name": f"rank {rank}"} for rank in range(2)])
    return folder


def file_of(folder, rank, number=1):
    return folder / f"{number:08d}" / f"rank-{rank:05d}.safetensors"


def refused(folder, message, ranks=2):
    before = content(folder)
    errors = load_errors(folder, ranks)
    text = the_one(errors)
    assert text.startswith("load_checkpoint: '")
    with pytest.raises(CheckpointError, match=message):
        raise errors[0]
    assert content(folder) == before
    return text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_torn_file_is_refused(two_ranks, rank, ranks):
    path = file_of(two_ranks, rank)
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        text = refused(two_ranks, "is torn, or no safetensors file", ranks)
        assert f"'{path}'" in text
        assert "moving this folder away loads that one" in text
    path.write_bytes(whole)
    assert load(two_ranks, 2)[1]["name"] == "rank 1"


def test_a_missing_file_is_named(two_ranks):
    path = file_of(two_ranks, 1)
    path.unlink()
    assert f"'{path}' is missing" in refused(two_ranks, "is missing; where an older checkpoint was kept")
    file_of(two_ranks, 0).unlink()
    refused(two_ranks, "rank-00000.safetensors' is missing")


def test_the_older_one_is_loaded_when_the_bad_one_is_moved_away(two_ranks):
    save(two_ranks, [{"name": "new"}] * 2, keep=2)
    file_of(two_ranks, 0, 2).write_bytes(b"")
    refused(two_ranks, "00000002")
    shutil.rmtree(two_ranks / "00000002")
    assert load(two_ranks, 2)[0]["name"] == "rank 0"


def test_files_of_different_saves_are_not_mixed(two_ranks, tmp_path):
    other = tmp_path / "other"
    save(other, [{"w": np.zeros(50)}] * 2)
    shutil.copy(file_of(other, 1), file_of(two_ranks, 1))  # the same number, rank and ranks
    refused(
        two_ranks, r"rank-00001.*is the file of rank 1 of 2 of checkpoint 00000001-\w{16}, where that of rank 1 of 2"
    )
    save(other, [{"w": np.zeros(50)}] * 3)
    shutil.copy(file_of(other, 1, 2), file_of(two_ranks, 1))
    refused(two_ranks, r"is the file of rank 1 of 3 of checkpoint 00000002-\w{16}, where that of rank 1 of 2")


def test_a_file_under_another_rank_s_name_is_refused(two_ranks):
    shutil.copy(file_of(two_ranks, 0), file_of(two_ranks, 1))
    refused(two_ranks, "is the file of rank 0 of 2 .*, where that of rank 1 of 2")
    shutil.copy(file_of(two_ranks, 0), file_of(two_ranks, 2))
    file_of(two_ranks, 0).unlink()
    file_of(two_ranks, 1).rename(file_of(two_ranks, 0))
    file_of(two_ranks, 2).rename(file_of(two_ranks, 1))
    refused(two_ranks, "rank-00001.*is the file of rank 0 of 2")


def test_foreign_files_are_refused(two_ranks):
    path = file_of(two_ranks, 1)
    path.write_text("{}" * 100)
    refused(two_ranks, "is torn, or no safetensors file")
    foreign = "is a safetensors file, but not one of a checkpoint of mpicomp"
    for metadata in [
        None,
        {"format": "pt"},
        {"mpicomp": "{"},
        {"mpicomp": "[1]"},
        {"mpicomp": '{"schema": 1}'},
        {"mpicomp": '{"schema": 1, "mpicomp": "0", "checkpoint": 1, "token": 0, "ranks": 0, "rank": 0}'},
        {"mpicomp": '{"schema": 1, "mpicomp": "0", "checkpoint": 1, "token": "x", "ranks": 2, "rank": 0}'},
    ]:
        save_file({"w": np.zeros(3)}, path, metadata)
        refused(two_ranks, foreign)
    shutil.copy(path, file_of(two_ranks, 0))
    refused(two_ranks, foreign)
    about = {"schema": 2, "mpicomp": "9.1", "new": []}
    save_file({"w": np.zeros(3)}, path, {"mpicomp": json.dumps(about)})
    shutil.copy(path, file_of(two_ranks, 0))
    text = refused(two_ranks, "has schema 2 of mpicomp 9.1, and mpicomp .* reads schema 1")
    assert text.endswith("load it with that version (on rank 0)")


@pytest.mark.parametrize(
    "tree",
    [
        "{",
        '{"dict": 3}',
        '{"array": "gone", "dtype": "<f8", "shape": [50]}',
        '{"array": "w", "dtype": "O", "shape": [3]}',
    ],
)
def test_a_tree_that_does_not_fit_its_arrays_is_refused(two_ranks, tree):
    path = file_of(two_ranks, 1)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    metadata = json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]
    save_file({"w": np.zeros(3)}, path, metadata | {"state": tree})
    refused(two_ranks, "rank-00001.* cannot be read")


def test_a_folder_that_is_none(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    text = the_one(save_errors(path, [{}, {}]))
    assert text.startswith(f"save_checkpoint: cannot write below '{path}'")
    text = the_one(load_errors(path, 2))
    assert text.startswith(f"load_checkpoint: cannot look into '{path}'")


def test_tensors_need_torch(tmp_path):
    torch = pytest.importorskip("torch")
    save(tmp_path, [{"w": torch.ones(3)}])
    code = f"""if True:
        import sys, mpicomp
        from mpicomp.transport import LocalWorld
        try:
            mpicomp.load_checkpoint({str(tmp_path)!r}, LocalWorld(1).transports[0])
        except mpicomp.MpicompError as error:
            print(error, "torch" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip().endswith("holds torch tensors; import torch before it False")


# Crashes, and errors of one rank

CHILD = """
import os, pathlib, shutil, signal, sys
import numpy as np
import mpicomp
from mpicomp.checkpoint import file, rounds
from mpicomp.transport import LocalWorld

folder, moment, keep = sys.argv[1], sys.argv[2], int(sys.argv[3])
alone = LocalWorld(1).transports[0]
mpicomp.save_checkpoint(folder, {"epoch": 1, "w": np.full(10_000, 1.0), "v": np.zeros(3)}, alone, keep)

def die(*args, **settings):
    os.kill(os.getpid(), signal.SIGKILL)

def half(value):
    file._bytes_of = die
    return bytes_of(value)

bytes_of = file._bytes_of
match moment:
    case "nothing written":
        rounds.write_file = die
    case "half written":
        file._bytes_of = half
    case "not synced":
        os.fsync = die
    case "not renamed":
        pathlib.Path.rename = die
    case "renamed":
        rounds.drop_older = die
    case "half removed":
        shutil.rmtree = lambda path, **settings: (next(path.iterdir()).unlink(), die())
mpicomp.save_checkpoint(folder, {"epoch": 2, "w": np.full(10_000, 2.0), "v": np.zeros(3)}, alone, keep)
"""


@pytest.mark.parametrize(
    ("moment", "epoch", "left"),
    [
        ("nothing written", 1, ["00000001", "00000002.part"]),
        ("half written", 1, ["00000001", "00000002.part"]),
        ("not synced", 1, ["00000001", "00000002.part"]),
        ("not renamed", 1, ["00000001", "00000002.part"]),
        ("renamed", 2, ["00000001", "00000002"]),
        ("half removed", 2, ["00000001.part", "00000002"]),
    ],
)
def test_a_job_killed_at_any_moment_leaves_a_checkpoint(tmp_path, moment, epoch, left):
    command = [sys.executable, "-c", CHILD, str(tmp_path), moment, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-9, "")
    assert names(tmp_path) == left
    (loaded,) = load(tmp_path)
    assert loaded["epoch"] == epoch
    assert loaded["w"].tolist() == [epoch] * 10_000
    assert names(tmp_path) == left
    save(tmp_path, [{"epoch": 3}])
    assert names(tmp_path) == ["00000003"]


JOB = """
import os, signal, sys
from mpi4py import MPI
import mpicomp
from mpicomp.checkpoint import rounds

mpicomp.save_checkpoint(sys.argv[1], {"epoch": 1, "rank": MPI.COMM_WORLD.rank})
if MPI.COMM_WORLD.rank == 1:
    rounds.write_file = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
mpicomp.save_checkpoint(sys.argv[1], {"epoch": 2, "rank": MPI.COMM_WORLD.rank})
"""


def test_a_rank_that_dies_while_it_saves(mpiexec, tmp_path):
    assert mpiexec(3, "-c", JOB, tmp_path, timeout=60).returncode != 0
    assert names(tmp_path) == ["00000001", "00000002.part"]
    assert load(tmp_path, 3) == [{"epoch": 1, "rank": rank} for rank in range(3)]
    save(tmp_path, [{}])
    assert names(tmp_path) == ["00000003"]


FULL = """
import resource, sys
import numpy as np
from mpicomp import checkpoint, errors
from mpicomp.transport import LocalWorld

world = LocalWorld(3)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
states = [{"w": np.ones(10_000 if rank == 1 else 10)} for rank in range(3)]
def caught(asked):
    try:
        yield from asked
    except errors.CheckpointError as error:
        return str(error)
for text in world.run([
    caught(checkpoint.save_rounds(sys.argv[1], own, 1, end.group)) for own, end in zip(states, world.transports)
]):
    print(text)
"""


def test_a_file_that_the_system_does_not_take(two_ranks):
    before = content(two_ranks)
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(two_ranks)], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert len(set(lines)) == 1
    assert lines[0].startswith("save_checkpoint: cannot write the file of rank 1: ")
    assert os.strerror(errno.EFBIG) in lines[0]
    assert lines[0].endswith("Those before are as they were (on rank 1)")
    assert content(two_ranks) == before
    assert names(two_ranks) == ["00000001"]


@pytest.mark.parametrize("bad", [0, 2])
def test_an_error_of_one_rank_is_raised_on_all_and_changes_nothing(two_ranks, monkeypatch, bad):
    write = rounds.write_file

    def full(path, header, *rest):
        if header.rank == bad:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, header, *rest)

    before = content(two_ranks)
    monkeypatch.setattr(rounds, "write_file", full)
    text = the_one(save_errors(two_ranks, [{}] * 3))
    assert f"cannot write the file of rank {bad}: [Errno 28] No space left on device; the folder must be" in text
    assert content(two_ranks) == before
    assert names(two_ranks) == ["00000001"]
    monkeypatch.undo()
    save(two_ranks, [{}] * 3)


def test_an_error_of_rank_0_in_the_end_is_raised_on_all(two_ranks, monkeypatch):
    def rename(path, to):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    before = content(two_ranks)
    monkeypatch.setattr(Path, "rename", rename)
    assert "Read-only file system" in the_one(save_errors(two_ranks, [{}] * 2))
    assert content(two_ranks) == before
    assert names(two_ranks) == ["00000001"]


def test_a_folder_that_ranks_do_not_share(tmp_path, monkeypatch):
    write = rounds.write_file
    monkeypatch.setattr(
        rounds, "write_file", lambda path, header, *rest: header.rank == 1 or write(path, header, *rest)
    )
    text = the_one(save_errors(tmp_path, [{}] * 2))
    assert "rank 0 does not see the file of rank 1" in text
    assert "must be on a file system that all ranks share" in text
    assert names(tmp_path) == []


# Another number of ranks


@pytest.mark.parametrize(
    ("written", "ranks", "by_hand"),
    [
        (4, 2, [{0: 1 / 2, 1: 1 / 2}, {2: 1 / 2, 3: 1 / 2}]),
        (2, 4, [{0: 1}, {0: 1}, {1: 1}, {1: 1}]),
        (3, 2, [{0: 2 / 3, 1: 1 / 3}, {1: 1 / 3, 2: 2 / 3}]),
        (1, 3, [{0: 1}, {0: 1}, {0: 1}]),
        (2, 3, [{0: 1}, {0: 1 / 2, 1: 1 / 2}, {1: 1}]),
        (3, 3, [{0: 1}, {1: 1}, {2: 1}]),
    ],
)
def test_the_shares_by_hand(written, ranks, by_hand):
    for rank in range(ranks):
        found = weights(rank, ranks, written)
        assert found.keys() == by_hand[rank].keys()
        assert found == pytest.approx(by_hand[rank])


def slow(residuals, ranks):
    """Cut every old rank's residual into as many parts as there are new ranks, and give each new rank its share."""
    parts = [residual for residual in residuals for _ in range(ranks)]
    written = len(residuals)
    return [np.mean(parts[rank * written : (rank + 1) * written], axis=0) for rank in range(ranks)]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_mean_over_ranks_is_conserved(written, ranks, seed):
    residuals = np.random.default_rng(seed).normal(size=(written, 3))
    shares = [weights(rank, ranks, written) for rank in range(ranks)]
    new = [sum(share * residuals[source] for source, share in own.items()) for own in shares]
    np.testing.assert_allclose(np.mean(new, axis=0), residuals.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(new, slow(residuals, ranks), atol=1e-12)
    assert all(share > 0 for own in shares for share in own.values())


def gradients(step, rank, size=20):
    rng = np.random.default_rng((step, rank))
    return {
        "w": rng.normal(size=(size, 3)).astype(np.float32),
        "wide": rng.normal(size=size),
        "one": np.array(rng.normal(), np.float32),
        "empty": np.zeros((0, 2), np.float32),
    }


@pytest.mark.parametrize(("written", "ranks"), [(1, 1), (4, 4), (4, 2), (2, 4), (3, 2), (1, 3), (5, 1)])
def test_residuals_and_velocities_are_distributed_anew(tmp_path, written, ranks):
    settings = {"compressor": mpicomp.DGC(ratio=0.05, momentum=0.9), "collective": "allgather"}
    old = Ranks(written, **settings)
    for step in range(4):
        old.reduce([gradients(step, rank) for rank in range(written)])
    states = [reducer.state_dict() for reducer in old.reducers]
    assert all(state["velocities"]["w"].any() for state in states)
    save(tmp_path, [{"deep": [({7: state}, rank)]} for rank, state in enumerate(states)])
    loaded = load(tmp_path, ranks)
    for rank, tree in enumerate(loaded):
        ((own, nearest),) = tree["deep"]
        assert nearest == rank * written // ranks
        rest = {key: value for key, value in own[7].items() if key not in ("residuals", "velocities")}
        check_same(rest, {key: states[nearest][key] for key in rest})
        assert rest["step"] == 4
    for kind in ("residuals", "velocities"):
        for name in states[0][kind]:
            before = [state[kind][name] for state in states]
            after = [tree["deep"][0][0][7][kind][name] for tree in loaded]
            assert {(own.dtype, own.shape, type(own)) for own in after} == {
                (before[0].dtype, before[0].shape, np.ndarray)
            }
            np.testing.assert_allclose(after, slow([own.astype("f8") for own in before], ranks), rtol=1e-6, atol=1e-7)
            if written == ranks:
                assert [own.tobytes() for own in after] == [own.tobytes() for own in before]
    new = Ranks(ranks, **settings)
    for reducer, tree in zip(new.reducers, loaded, strict=True):
        reducer.load_state_dict(tree["deep"][0][0][7])
    new.reduce([gradients(9, rank) for rank in range(ranks)])
    assert new.reducers[0].last_step.step == 4


def test_only_the_files_that_are_needed_are_read(tmp_path, monkeypatch):
    opened = []

    class Counting(rounds.RankFile):
        def __init__(self, path):
            opened.append(int(path.stem.removeprefix("rank-")))
            super().__init__(path)

    states = Ranks(4, "topk")
    states.reduce([gradients(0, rank) for rank in range(4)])
    save(tmp_path, [{"reducer": reducer.state_dict()} for reducer in states.reducers])
    monkeypatch.setattr(rounds, "RankFile", Counting)
    monkeypatch.setattr(folders, "RankFile", Counting)
    load(tmp_path, 4)
    assert sorted(opened) == [0, 0, 1, 2, 3]  # rank 0 looks which checkpoint it is, first
    opened.clear()
    load(tmp_path, 8)
    assert sorted(opened) == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    opened.clear()
    load(tmp_path, 2)
    assert set(opened[1:]) == {0, 1, 2, 3}
    assert len(opened) == 7


def test_reducers_that_differ_between_ranks_are_refused(tmp_path):
    def state(**arrays):
        return {"optimizer": {"mpicomp": {"schema": 1, "step": 0, "residuals": arrays, "velocities": {}}}}

    for other, message in [
        (
            {"v": np.zeros(3)},
            r"'state\['optimizer'\]\['mpicomp'\]\['residuals'\]\['w'\]' is on rank 0 but not on rank 1",
        ),
        ({"w": np.zeros(4)}, "must have the same shape on all ranks"),
        ({"w": np.zeros(3, "f4")}, "must have the same dtype on all ranks"),
    ]:
        text = the_one(save_errors(tmp_path, [state(w=np.zeros(3)), state(**other)]), DisagreementError)
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(text)
    assert names(tmp_path) == []


def test_what_is_no_reducer_s_state_is_not_mixed(tmp_path):
    states = [
        {
            "a": {"residuals": {"w": np.full(3, rank)}, "velocities": {}},
            "b": {"schema": 1, "residuals": np.full(3, rank)},
        }
        for rank in range(2)
    ]
    save(tmp_path, states)
    check_same(load(tmp_path, 1)[0], states[0])


# Over MPI


def shared(comm, tmp_path):
    return Path(comm.bcast(str(tmp_path)))


@pytest.mark.mpi
def test_each_rank_gets_its_own(comm, tmp_path):
    folder = shared(comm, tmp_path) / "checkpoints"
    assert mpicomp.load_checkpoint(folder, comm) is None
    for epoch in range(3):
        mpicomp.save_checkpoint(folder, {"epoch": epoch, "rank": comm.rank, "w": np.full(comm.rank, 3.0)}, comm, keep=2)
    loaded = mpicomp.load_checkpoint(str(folder), comm)
    assert (loaded["epoch"], loaded["rank"], loaded["w"].tolist()) == (2, comm.rank, [3] * comm.rank)
    assert names(folder) == ["00000002", "00000003"]
    assert len(names(folder / "00000003")) == comm.size


@pytest.mark.mpi
def test_errors_of_the_last_rank_reach_all(comm, tmp_path, monkeypatch):
    folder, last = shared(comm, tmp_path), comm.size - 1
    mpicomp.save_checkpoint(folder, {"epoch": 1}, comm)
    with pytest.raises(CheckpointError, match=r"state\['x'\] is a object and cannot be stored"):
        mpicomp.save_checkpoint(folder, {"x": object() if comm.rank == last else 0}, comm)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if comm.rank == last:
        monkeypatch.setattr(rounds, "write_file", full)
    with pytest.raises(CheckpointError, match=f"cannot write the file of rank {last}: .* No space left"):
        mpicomp.save_checkpoint(folder, {"epoch": 2}, comm)
    comm.Barrier()
    assert names(folder) == ["00000001"]
    assert mpicomp.load_checkpoint(folder, comm) == {"epoch": 1}
    comm.Barrier()
    if comm.rank == 0:
        path = folder / "00000001" / f"rank-{last:05d}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    comm.Barrier()
    with pytest.raises(CheckpointError, match=f"rank-{last:05d}.safetensors' is torn"):
        mpicomp.load_checkpoint(folder, comm)


@pytest.mark.mpi
def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(comm, tmp_path):
    folder = shared(comm, tmp_path)

    def make():
        return mpicomp.Reducer(mpicomp.TopK(ratio=0.1), "allgather", comm=comm)

    straight, means = make(), []
    for step in range(6):
        mean = straight.reduce(gradients(step, comm.rank))
        means.append({name: array.copy() for name, array in mean.items()})
        if step == 2:
            mpicomp.save_checkpoint(folder, {"reducer": straight.state_dict()}, straight.transport)
    resumed = make()
    resumed.load_state_dict(mpicomp.load_checkpoint(folder, resumed.transport)["reducer"])
    for step in range(3, 6):
        check_same(resumed.reduce(gradients(step, comm.rank)), means[step])
    straight.close()
    resumed.close()


@pytest.mark.mpi
def test_fewer_and_more_ranks(comm, tmp_path):
    few = comm.Split(int(comm.rank >= max(1, comm.size - 1)), comm.rank)  # all but the last one, and the last one
    alone = comm.size > 1 and comm.rank == comm.size - 1
    residual = np.arange(5, dtype=np.float32) + 10 * comm.rank

    def state(array):
        return {"mpicomp": {"schema": 1, "step": 3, "residuals": {"w": array}, "velocities": {}}}

    def mean(array, among):
        total = np.empty_like(array)
        among.Allreduce(array, total)
        return total / among.size

    folder = shared(comm, tmp_path)
    mpicomp.save_checkpoint(folder / "all", state(residual), comm)
    expected = mean(residual, comm)
    if not alone:
        loaded = mpicomp.load_checkpoint(folder / "all", few)["mpicomp"]["residuals"]["w"]
        np.testing.assert_allclose(mean(loaded, few), expected, rtol=1e-6)
        mpicomp.save_checkpoint(folder / "few", state(residual), few)
        expected = mean(residual, few)
    comm.Barrier()
    expected = comm.bcast(expected)
    loaded = mpicomp.load_checkpoint(folder / "few", comm)["mpicomp"]["residuals"]["w"]
    np.testing.assert_allclose(mean(loaded, comm), expected, rtol=1e-6)
    few.Free()
