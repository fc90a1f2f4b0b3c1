"""What changed since it was written is an error, and what was written before there were checksums is not."""

import json
import zlib

import numpy as np
import pytest
from checkpoints import about, check_same, content, file_of, load, load_errors, save, the_one, write_before
from marks import slow


def head_of(path):
    """Read a file's header, and give it with the place where its arrays begin."""
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + size]), 8 + size


STATES = [
    {
        "w": np.arange(6, dtype="f4") + rank,
        "flags": np.array([True, False]),
        "deep": [(np.arange(3, dtype=">i2"), 0.5), np.float64(2.5)],
        "empty": np.zeros((0, 2)),
    }
    for rank in range(2)
]


@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), slow(2, 0), *(slow(n, rank) for n in (1, 3) for rank in (0, 1))])
def test_load_of_a_flipped_byte_names_file_and_array(tmp_path, rank, ranks):
    save(tmp_path, STATES)
    path = file_of(tmp_path, rank)
    whole = path.read_bytes()
    head, start = head_of(path)
    spans = {name: item["data_offsets"] for name, item in head.items() if name != "__metadata__"}
    rng = np.random.default_rng(rank)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= rng.integers(1, 256)
        path.write_bytes(damaged)
        hit = [name for name, (first, stop) in spans.items() if first <= place - start < stop]
        if ranks == 1 and rank == 1 and (hit or place % 5):
            continue  # one rank reads the other's residuals only, of which there are none here
        if ranks == 1 and rank == 1:
            load_errors(tmp_path, ranks)
            continue
        text = the_one(load_errors(tmp_path, ranks))
        assert f"'{path}'" in text
        assert not hit or f"cannot be read: {hit[0]} has changed since it was written" in text
    path.write_bytes(whole)
    if ranks == 2:
        for loaded, state in zip(load(tmp_path, 2), STATES, strict=True):
            check_same(loaded, state)


def test_checksums_whose_names_are_damaged_are_missed(tmp_path):
    save(tmp_path, [{"epoch": 85}])
    path = file_of(tmp_path, 0)
    whole = path.read_bytes()
    damaged = whole.replace(b'"header_crc32"', b'"ieader_crc32"').replace(b'"crc32"', b'"crc12"')
    path.write_bytes(damaged.replace(b'epoch\\", 85', b'epoch\\", 60'))
    assert f"'{path}' cannot be read: its header has changed" in the_one(load_errors(tmp_path, 1))


def test_load_of_a_flipped_byte_is_an_error_of_all_ranks(tmp_path):
    def state(rank):
        kept = {"w": np.full(50, 1.0 + rank)}
        return {"reducer": {"schema": 1, "step": 3, "residuals": kept, "velocities": {}}}

    save(tmp_path, [state(rank) for rank in range(4)])
    path = file_of(tmp_path, 3)  # of two ranks the second reads 2 and 3
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    text = the_one(load_errors(tmp_path, 2))
    assert text.startswith(f"load_checkpoint: '{path}' cannot be read: state['reducer']['residuals']['w'] has changed")
    assert text.endswith("(on rank 1)")


def test_tensors_have_checksums(tmp_path):
    torch = pytest.importorskip("torch")
    save(tmp_path, [{"half": torch.ones(5, dtype=torch.bfloat16), "w": torch.ones(3)}])
    path = file_of(tmp_path, 0)
    whole = path.read_bytes()
    head, start = head_of(path)
    for name in ("state['half']", "state['w']"):
        place = start + head[name]["data_offsets"][0]
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 128]) + whole[place + 1 :])
        assert f"{name} has changed" in the_one(load_errors(tmp_path, 2))


def test_the_checksums_are_those_that_other_tools_give(tmp_path):
    save(tmp_path, [STATES[0]])
    path = file_of(tmp_path, 0)
    head, start = head_of(path)
    metadata = head.pop("__metadata__")
    body = path.read_bytes()[start:]
    sums = [f"{zlib.crc32(body[slice(*item['data_offsets'])]):08x}" for item in head.values()]
    assert [entry["data_offsets"][0] for entry in head.values()] == sorted(
        item["data_offsets"][0] for item in head.values()
    )
    assert metadata["crc32"] == "".join(sums)
    whole = path.read_bytes()[8:start]
    blank = whole.replace(metadata["header_crc32"].encode(), b"00000000")
    assert metadata["header_crc32"] == f"{zlib.crc32(blank):08x}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_checkpoints_from_before_are_loaded(tmp_path, ranks):
    def state(rank):
        kept = {"array": "state['r']['residuals']['w']", "dtype": "float32", "shape": [2, 2]}
        reducer = [["schema", 1], ["step", 5], ["residuals", {"dict": [["w", kept]]}], ["velocities", {"dict": []}]]
        high = {"array": "state['high']", "dtype": ">f8", "shape": [2]}
        return {"dict": [["r", {"dict": reducer}], ["high", high], ["place", {"tuple": [rank, None, "x"]}]]}

    for rank in range(2):
        arrays = [
            ("state['r']['residuals']['w']", "F32", np.full((2, 2), 1 + rank, "<f4")),
            ("state['high']", "U8", np.frombuffer(np.array([rank, 0.5], ">f8").tobytes(), "u1")),
        ]
        write_before(file_of(tmp_path, rank, 12), about(checkpoint=12, ranks=2, rank=rank), state(rank), arrays)
    before = content(tmp_path)
    for rank, loaded in enumerate(load(tmp_path, ranks)):
        old = rank * 2 // ranks
        value = 1.5 if ranks == 1 else 1.0 + old
        expected = {
            "r": {"schema": 1, "step": 5, "residuals": {"w": np.full((2, 2), value, "f4")}, "velocities": {}},
            "high": np.array([old, 0.5], ">f8"),
            "place": (old, None, "x"),
        }
        check_same(loaded, expected)
    assert content(tmp_path) == before
    save(tmp_path, [{"epoch": 1}])
    assert load(tmp_path) == [{"epoch": 1}]
    assert len(list(tmp_path.iterdir())) == 1
