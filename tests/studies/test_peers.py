"""The table of exchanges of mpicomp and of others: what did not run is told as it was."""

import itertools
import json
from pathlib import Path

import peers
from mpicomp.bench.measure.networks import Network


def test_a_table_has_what_was_trained_and_what_was_not():
    known = {"quality_name": "held-out loss", "problem": None, "phases_s": None, "link_bytes": 2e6, "in_turn": True}
    known["of_none"] = None
    phases = {"compress": 0.01, "exchange": 0.2, "decode": 0.003}
    rows = [
        {**known, "exchange": "none", "median_s": 0.1, "quality": None, "of_none": 1.0},
        {**known, "exchange": "ddp", "median_s": 0.2, "quality": 2.0},
        {**known, "exchange": "ddp-powersgd", "median_s": 0.3, "quality": 2.0, "in_turn": False},
        {**known, "exchange": "topk", "median_s": 0.4, "quality": 2.5, "phases_s": phases, "of_none": 0.25},
        {"exchange": "ddp-bf16", "problem": "ended with status 2: no|way"},
    ]
    assert peers.table(rows)[0].endswith("| held-out loss |")
    assert peers.table(rows)[2:] == [
        "| none | 100 | 0.50 | 1.00 | 2 |  | ranks differ |",
        "| ddp | 200 | 1.00 |  | 2 |  | 2.000 |",
        "| ddp-powersgd | 300 |  |  | 2 |  | 2.000 |",
        "| topk | 400 | 2.00 | 0.25 | 2 | 10.0, 200.0, 3.0 | 2.500 |",
        "| ddp-bf16 | ended with status 2: no/way | | | | | |",
    ]


def test_what_is_in_the_folder_is_not_run_again_and_what_fails_says_why(tmp_path, monkeypatch):
    ran = []

    def execute(command, environment, log, limit_s):
        words = dict(itertools.pairwise(command))
        ran.append(words["--exchange"])
        if words["--exchange"] == "ddp-bf16":
            log.write_text("terminate called\n  what():  sizes differ\nmpiexec: one has ended\n")
            return None
        rows = [{"exchange": name} for name in words["--exchange"].split(",")]
        Path(words["--json"]).write_text(json.dumps({"rows": rows}))
        return 0

    monkeypatch.setattr(peers.jobs, "execute", execute)
    options = ["--hosts", "2", "--exchange", "ddp,ddp-bf16,dense,topk", "--alone", "ddp-bf16", "--limit", "5"]
    network = Network("1gbit", "0us")
    for _ in range(2):
        rows = peers.rows_of(tmp_path, peers.parser().parse_args(options), network, "digits")
        assert [row["exchange"] for row in rows] == ["ddp", "ddp-bf16", "dense", "topk"]
        problems = [None, "no end within 5 s: sizes differ", None, None]
        assert [row["problem"] for row in rows] == problems
    assert ran == ["ddp,dense,topk", "ddp-bf16"]
    peers.rows_of(tmp_path, peers.parser().parse_args([*options, "--steps", "64"]), network, "digits")
    assert ran == ["ddp,dense,topk", "ddp-bf16"] * 2
