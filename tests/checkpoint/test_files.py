"""What lies in the folder, and which of it is removed."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoints import load, names, save, save_errors, the_one
from safetensors.numpy import load_file

import mpicomp
from mpicomp.checkpoint import load_rounds, save_rounds
from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.transport import LocalWorld


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


def test_save_syncs_files_before_it_renames_the_folder(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("keep", [0, -1, 1.0, True, "2", None])
def test_keep_is_a_number_of_checkpoints(tmp_path, keep):
    text = the_one(save_errors(tmp_path, [{}, {}], keep), ConfigurationError)
    assert text == f"save_checkpoint: keep must be at least 1, got {keep!r}"
    assert names(tmp_path) == []


def test_folders_that_differ_between_ranks_are_refused(tmp_path):
    world = LocalWorld(2)
    with pytest.raises(
        DisagreementError, match=r"save_checkpoint: folder must be the same on all ranks, got .*a on rank 0"
    ):
        world.run([save_rounds(tmp_path / n, {}, 1, end.group) for n, end in zip("ab", world.transports, strict=True)])
    with pytest.raises(DisagreementError, match="load_checkpoint: folder must be the same on all ranks"):
        world.run([load_rounds(tmp_path / n, end.group) for n, end in zip("ab", world.transports, strict=True)])
    assert names(tmp_path) == []
