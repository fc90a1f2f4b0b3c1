"""Torn, foreign and mixed files are refused."""

import json
import shutil
import subprocess
import sys
import zlib

import numpy as np
import pytest
from checkpoints import check_same, content, file_of, load, load_errors, save, save_errors, the_one
from marks import slow
from safetensors.numpy import save_file

from mpicomp.errors import CheckpointError


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


def head_of(path):
    """Return a file's header, and the place where its arrays begin."""
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
    spans = {name: entry["data_offsets"] for name, entry in head.items() if name != "__metadata__"}
    rng = np.random.default_rng(rank)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= rng.integers(1, 256)
        path.write_bytes(damaged)
        hit = [name for name, (first, stop) in spans.items() if first <= place - start < stop]
        if ranks == 1 and rank == 1 and (hit or place % 5):
            continue  # one rank reads only residuals of the other, which has none
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


def test_checksums_are_those_of_other_tools(tmp_path):
    save(tmp_path, [STATES[0]])
    path = file_of(tmp_path, 0)
    head, start = head_of(path)
    metadata = head.pop("__metadata__")
    body = path.read_bytes()[start:]
    spans = [entry["data_offsets"] for entry in head.values()]
    sums = [f"{zlib.crc32(body[start:stop]):08x}" for start, stop in spans]
    assert spans == sorted(spans)
    assert metadata["crc32"] == "".join(sums)
    whole = path.read_bytes()[8:start]
    blank = whole.replace(metadata["header_crc32"].encode(), b"00000000")
    assert metadata["header_crc32"] == f"{zlib.crc32(blank):08x}"
