"""The table of exchanges of mpicomp and of others: what did not run is told as it was."""

import argparse
import json

import peers
from mpicomp.bench.measure.networks import Network


def test_a_table_has_what_was_trained_and_what_was_not():
    known = {"quality_name": "held-out loss", "problem": None, "phases_s": None, "link_bytes": 2e6}
    phases = {"compress": 0.01, "exchange": 0.2, "decode": 0.003}
    rows = [
        {**known, "exchange": "none", "median_s": 0.1, "quality": None},
        {**known, "exchange": "topk", "median_s": 0.4, "quality": 2.5, "phases_s": phases},
        {"exchange": "ddp-bf16", "problem": "ended with status 2: no|way"},
    ]
    assert peers.table(rows)[0].endswith("| held-out loss |")
    assert peers.table(rows)[2:] == [
        "| none | 100 | 1.00 | 2 |  | ranks differ |",
        "| topk | 400 | 0.25 | 2 | 10.0, 200.0, 3.0 | 2.500 |",
        "| ddp-bf16 | ended with status 2: no/way | | | | |",
    ]


def test_what_is_in_the_folder_is_not_run_again_and_what_fails_says_why(tmp_path, monkeypatch):
    ran = []

    def execute(command, environment, log, limit_s):
        ran.append(command)
        log.write_text("terminate called\n  what():  sizes differ\nmpiexec: one has ended\n")

    monkeypatch.setattr(peers.jobs, "execute", execute)
    arguments = argparse.Namespace(hosts=2, ratio=0.1, every=4, steps=32, warm_up=24, limit=5)
    for _ in range(2):
        row = peers.row_of(tmp_path, arguments, Network("1gbit", "0us"), "digits", "ddp")
        assert row == {"exchange": "ddp", "problem": "no end within 5 s: sizes differ"}
    assert len(ran) == 1
    arguments.steps = 64
    peers.row_of(tmp_path, arguments, Network("1gbit", "0us"), "digits", "ddp")
    assert len(ran) == 2
    assert all(isinstance(json.loads(path.read_text()), dict) for path in tmp_path.glob("*.json"))
