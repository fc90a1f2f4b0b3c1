"""Folders that mpicomp did not make: nothing in them is removed, renamed, loaded or numbered after."""

import os
import shutil

import numpy as np
import pytest
from checkpoints import about, content, file_of, load, load_errors, names, save, save_errors, the_one, write_by_hand
from safetensors.numpy import save_file


def tree_of(folder):
    """Return every path below a folder, also of empty folders, with its bytes."""
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def make(path):
    """Make a folder of somebody's results."""
    path.mkdir(parents=True)
    (path / "results.csv").write_text("step,loss\n1,0.5\n")


NUMERIC = ["20240511", "20240511.part", "00000001", "00000002.part", "99999999999999999999", "9" * 60, "000000003"]
EMPTY = ["20240511", "20240511.part", "99999999999999999999", "99999999999999999999.part"]


@pytest.mark.parametrize(
    ("name", "is_empty"), [*((name, False) for name in NUMERIC), *((name, True) for name in EMPTY)]
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_foreign_folder_with_a_number_stays(tmp_path, name, is_empty, ranks):
    if is_empty:
        (tmp_path / name).mkdir()
    else:
        make(tmp_path / name)
    before = tree_of(tmp_path / name)
    assert load(tmp_path, ranks) == [None] * ranks
    for epoch in range(4):
        save(tmp_path, [{"epoch": epoch, "rank": rank} for rank in range(ranks)])
        assert load(tmp_path, ranks) == [{"epoch": epoch, "rank": rank} for rank in range(ranks)]
        assert tree_of(tmp_path / name) == before
        assert len(names(tmp_path)) == 2
        (mine,) = set(names(tmp_path)) - {name}
        assert int(mine) <= epoch + 3


def test_files_and_links_with_a_number_as_name_are_left_alone(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    folder = tmp_path / "folder"
    save(elsewhere, [{"epoch": 7}])
    folder.mkdir()
    (folder / "00000001").write_text("a file")
    (folder / "00000002").symlink_to(tmp_path / "nowhere")
    (folder / "00000001.part").symlink_to(elsewhere / "00000001")
    (folder / "00000005").symlink_to(elsewhere / "00000001")
    before = content(elsewhere)
    for epoch in range(3):
        save(folder, [{"epoch": epoch}])
        assert load(folder) == [{"epoch": epoch}]
        assert len(names(folder)) == 5
    assert content(elsewhere) == before


@pytest.mark.parametrize("extra", ["notes.txt", "rank-00000.safetensors.bak", "rank-0.safetensors", "model/weights"])
def test_save_keeps_a_checkpoint_with_a_foreign_file(tmp_path, extra):
    save(tmp_path, [{"epoch": 1}])
    path = tmp_path / "00000001" / extra
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    before = tree_of(tmp_path)
    assert load(tmp_path) == [{"epoch": 1}]
    for epoch in range(2, 5):
        save(tmp_path, [{"epoch": epoch}])
        assert load(tmp_path) == [{"epoch": epoch}]
        assert names(tmp_path) == ["00000001", f"{epoch:08d}"]
    after = {name: data for name, data in tree_of(tmp_path).items() if name.startswith("00000001")}
    assert after == before


def test_other_ones_go_on_being_removed(tmp_path):
    for epoch in range(1, 4):
        save(tmp_path, [{"epoch": epoch}], keep=3)
    (tmp_path / "00000002" / "notes.txt").write_text("mine")
    save(tmp_path, [{"epoch": 4}], keep=2)
    assert names(tmp_path) == ["00000002", "00000003", "00000004"]
    (tmp_path / "00000003.part").mkdir()
    (tmp_path / "00000003.part" / "x").write_text("mine")  # where 3 would be moved to before it is removed
    save(tmp_path, [{"epoch": 5}], keep=1)
    assert names(tmp_path) == ["00000002", "00000003", "00000003.part", "00000005"]


def test_save_keeps_copies_under_another_number(tmp_path):
    save(tmp_path, [{"epoch": 1}])
    shutil.copytree(tmp_path / "00000001", tmp_path / "20240511")
    shutil.copytree(tmp_path / "00000001", tmp_path / "20240512.part")
    for epoch in range(2, 4):
        save(tmp_path, [{"epoch": epoch}])
        assert load(tmp_path) == [{"epoch": epoch}]
        assert names(tmp_path) == [f"{epoch:08d}", "20240511", "20240512.part"]
    shutil.rmtree(tmp_path / "00000003")
    assert load(tmp_path) == [{"epoch": 1}]  # a copy is a checkpoint all the same


def test_rank_files_of_others_are_left_alone(tmp_path):
    for name, metadata in [("20240511", {"format": "pt"}), ("20240512.part", None), ("20240513", {"mpicomp": "[]"})]:
        (tmp_path / name).mkdir()
        save_file({"w": np.zeros(3)}, tmp_path / name / "rank-00000.safetensors", metadata)
    (tmp_path / "20240514").mkdir()
    (tmp_path / "20240514" / "rank-00000.safetensors").write_bytes(b"torn")
    (tmp_path / "20240515" / "rank-00000.safetensors").mkdir(parents=True)
    before = tree_of(tmp_path)
    for epoch in range(3):
        save(tmp_path, [{"epoch": epoch}])
        assert load(tmp_path) == [{"epoch": epoch}]
        now = tree_of(tmp_path)
        assert {name: data for name, data in now.items() if name.startswith("2024")} == before
        assert len(now) == len(before) + 2


@pytest.mark.parametrize("size", [0, 300, None])
def test_what_a_crash_left_half_written_is_removed(tmp_path, size):
    save(tmp_path, [{"epoch": 1}])
    part = tmp_path / "00000002.part"
    part.mkdir()
    save(tmp_path / "other", [{"w": np.ones(100)}, {"w": np.ones(9)}])
    save(tmp_path / "other", [{"w": np.ones(100)}, {"w": np.ones(9)}])
    shutil.copy(file_of(tmp_path / "other", 1, 2), part)
    (part / "rank-00000.safetensors").write_bytes(file_of(tmp_path / "other", 0, 2).read_bytes()[:size])
    assert load(tmp_path) == [{"epoch": 1}]
    save(tmp_path, [{"epoch": 2}])
    assert names(tmp_path) == ["00000003", "other"]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("text", [b"x", b"what is this", b" " * 8 + b'{"__metadata__": {"mpicomp": '])
def test_half_written_ones_that_hold_more_are_left_alone(tmp_path, alone, text):
    part = tmp_path / "00000002.part"
    save(tmp_path / "other", [{}])
    if not alone:
        write_by_hand(part / "rank-00001.safetensors", about(checkpoint=2, ranks=2, rank=1))
    part.mkdir(exist_ok=True)
    (part / "rank-00000.safetensors").write_bytes(text)
    before = tree_of(part)
    for epoch in range(2):
        save(tmp_path, [{"epoch": epoch}])
        assert load(tmp_path) == [{"epoch": epoch}]
    assert tree_of(part) == before
    assert names(tmp_path)[0] == "00000002.part"


def test_checkpoints_of_later_versions_are_left_alone_and_said(tmp_path):
    write_by_hand(file_of(tmp_path, 0, 3), {"schema": 7, "mpicomp": "9.1"})
    assert "has schema 7 of mpicomp 9.1" in the_one(load_errors(tmp_path, 2))
    save(tmp_path, [{"epoch": 4}])
    assert names(tmp_path) == ["00000003", "00000004"]
    assert load(tmp_path) == [{"epoch": 4}]


def test_a_name_that_somebody_takes_meanwhile_is_an_error_of_all(tmp_path, monkeypatch):
    from mpicomp.checkpoint import rounds

    write = rounds.write_file

    def late(path, header, *rest):
        if header.rank == 1:
            make(tmp_path / "00000001")
        write(path, header, *rest)

    monkeypatch.setattr(rounds, "write_file", late)
    assert os.strerror(39) in the_one(save_errors(tmp_path, [{}, {}]))
    assert names(tmp_path) == ["00000001"]
    assert names(tmp_path / "00000001") == ["results.csv"]
