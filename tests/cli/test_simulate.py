"""mpicomp simulate: a step by the cost model, from a run or from two numbers."""

import json

import pytest
from mpicomp.bench.commands.simulate import simulate
from tables import check_types, documented

from mpicomp import cli, get_compressor

LATENCY_S, BYTES_PER_S, NUMEL = 2e-3, 50e6 / 8, 1 << 20
MODEL = ["--parameters", "100000", "--step-seconds", "0.1"]


def rows(hosts, compressor, collective):
    compressors = [get_compressor(compressor)]
    found = list(simulate(hosts, LATENCY_S, 1 / BYTES_PER_S, NUMEL, 0.5, compressors, collective))
    return found[1::2]


@pytest.mark.parametrize("hosts", [2, 4, 16])
def test_a_ring_takes_what_its_messages_take(hosts):
    [row] = rows([hosts], {"id": "dense", "wire": "bf16"}, "scatter-reduce")
    part_s = 2 * NUMEL / hosts / BYTES_PER_S
    assert row["exchange_s"] - row["kernels_s"] == pytest.approx(
        2 * (hosts - 1) * part_s, abs=2 * hosts * LATENCY_S + 0.01 * part_s
    )
    assert row["wire_bytes"] == pytest.approx(2 * 2 * NUMEL * (hosts - 1) / hosts, rel=1e-3)


def test_one_bit_by_two_phases_takes_what_its_bytes_take():
    """Signs and a magnitude of 1024 each, to the owners of a quarter and from them."""
    [row] = rows([4], "onebit", "two-phase")
    quarter_bytes = NUMEL / 4 * (1 / 8 + 4 / 1024)
    rounds_s = 3 * LATENCY_S + 2 * LATENCY_S + 6 * quarter_bytes / BYTES_PER_S  # back by recursive doubling
    assert row["exchange_s"] - row["kernels_s"] == pytest.approx(rounds_s, rel=0.01)
    assert row["step_s"] == 0.5 + row["exchange_s"]
    assert row["efficiency"] == 0.5 / row["step_s"]
    assert row["speedup"] > 1


def test_rows_are_as_documented(tmp_path, capsys):
    path, run = tmp_path / "rows.json", tmp_path / "run.json"
    phases = {"compute": 0.08, "update": 0.02, "exchange": 7.0}
    run.write_text(json.dumps({"parameters": 100_000, "phases_s": phases}))
    words = ["simulate", "--hosts", "2,16", "--bandwidth", "100mbit", "--compressor", "qsgd", "--json", str(path)]
    assert cli.main([*words, "--from", str(run)]) == 0
    text = capsys.readouterr().out
    assert "100,000 elements in one bucket, 0.1 s a step without exchange" in text
    found = json.loads(path.read_text())["rows"]
    fields = documented("simulate.md", "What comes out")
    for row in found:
        assert set(row) == set(fields)
        check_types(row, fields)
    assert [(row["hosts"], row["plan"].split("(")[0]) for row in found] == [
        (hosts, plan) for hosts in (2, 16) for plan in ("Dense", "QSGD")
    ]
    assert [row["speedup"] for row in found[::2]] == [1.0, 1.0]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "simulate: the model is not known; name --from FILE"),
        ([*MODEL, "--hosts", "1"], "simulate: --hosts must be an integer of at least 2, got 1"),
        ([*MODEL, "--hosts", "two"], "simulate: --hosts must be whole numbers such as 2,64, got 'two'"),
        ([*MODEL, "--bandwidth", "fast"], "simulate: "),
        (
            ["--parameters", "0", "--step-seconds", "1"],
            "simulate: --parameters must be an integer of at least 1, got 0",
        ),
        (["--parameters", "5", "--step-seconds", "nan"], "simulate: --step-seconds must be a number of at least 0"),
        (["--from", "/nowhere"], "simulate: '/nowhere' cannot be read: No such file or directory"),
        ([*MODEL, "--compressor", "topq"], "did you mean 'topk'"),
        ([*MODEL, "--collective", "allreduce"], "does not fit collective 'allreduce'"),
    ],
)
def test_wrong_words_are_refused(words, text, capsys):
    assert cli.main(["simulate", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_file_of_another_kind_is_refused(tmp_path, capsys):
    path = tmp_path / "other.json"
    for content in ("[", "[1]", '{"parameters": "many"}', "[" * 100_000):
        path.write_text(content)
        assert cli.main(["simulate", "--from", str(path)]) == 2
        assert "was not written by `mpicomp train --json FILE`" in capsys.readouterr().err
