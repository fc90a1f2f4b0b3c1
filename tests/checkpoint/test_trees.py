"""What can be stored, and how it comes back."""

import collections

import numpy as np
import pytest
from checkpoints import check_same, load, names, save, save_errors, the_one

from mpicomp import checkpoint
from mpicomp.errors import CheckpointError


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


DTYPES = ["?", "i1", "u8", "f2", "f4", "c16", ">f4"]


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


def test_tensors_of_every_dtype_and_layout_keep_their_bits(tmp_path):
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (4, 96), dtype=torch.uint8, generator=generator)
    state = {}
    for name in ("float32", "bfloat16", "float8_e5m2", "int64", "uint16", "complex64"):
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


def test_tree_that_safetensors_could_not_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_MAX_HEADER_BYTES", 1000)
    text = the_one(save_errors(tmp_path, [{}, {"a": "x" * 1000}]))
    assert "cannot write the file of rank 1: state without its arrays may have at most 1000 bytes as JSON" in text
    assert names(tmp_path) == []


HOLDS_ITSELF = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {"b": object()}]}, r"state\['a'\]\[1\]\['b'\] is a object and cannot be stored"),
        ({"a": (1, {2, 3})}, r"state\['a'\]\[1\] is a set and"),
        ({3: np.array([None])}, r"state\[3\] is a numpy.ndarray of object and"),
        ({3: np.str_("x")}, r"state\[3\] is a numpy.str_ of <U1 and"),
        ({3: np.ma.masked_array([1.0], [True])}, r"state\[3\] is a numpy.ma.*MaskedArray of float64 and"),
        ({"a": {True: 0}}, r"keys must be strings or ints, got True \(bool\) in state\['a'\]"),
        ({"a": {(1, 2): 0}}, r"keys must be strings or ints, got \(1, 2\) \(tuple\) in state\['a'\]"),
        (HOLDS_ITSELF, "state cannot be stored: RecursionError: maximum recursion depth"),
        ({"a": 10**5000}, "state cannot be stored: ValueError: Exceeds the limit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_save_of_a_bad_tree_is_refused_on_all_ranks(tmp_path, state, message):
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
