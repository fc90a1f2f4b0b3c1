"""What rows of a grid come to."""

import pytest
import regret
from mpicomp.bench.measure.networks import Network
from regret import judged, prediction_errors, summary
from study_words import call

from mpicomp.errors import ConfigurationError


def row(compressor, collective, median_s, predicted_s=None, numel=10, **more):
    links = {"bandwidth": "1gbit", "latency": "0us"}
    config = {"id": compressor}
    plain = {"chosen": None, "regret": None, "regret_low": None, "best_dense_s": None, "ratio": 0.01}
    named = {"compressor": compressor, "collective": collective, "numel": numel, "config": config}
    return links | named | {"median_s": median_s, "span_s": median_s, "predicted_s": predicted_s} | plain | more


def auto(median_s, regret, best_dense_s, low=None, numel=10):
    facts = {"chosen": "topk allgather", "regret": regret, "regret_low": low, "best_dense_s": best_dense_s}
    return row("topk", "auto", median_s, median_s, numel, **facts)


def test_errors_of_predictions_are_those_of_the_cell():
    rows = [
        row("dense", "ring", 1.0, 1.5),
        row("topk", "allgather", 1.0, 0.9),
        row("sidco", "allgather", 1.0, 7.0),
        row("topk", "allgather", 1.0, 8.0, numel=11),
        row("topk", "star-topk", None, 9.0),
        auto(1.0, 0.0, 1.0),
    ]
    found = judged(rows)
    assert [own["prediction_error"] for own in found[:-1]] == [None] * 5
    assert found[-1]["prediction_error"] == pytest.approx(0.1)
    assert prediction_errors(rows) == pytest.approx([0.5, 0.1, 6.0, 7.0, 0.0])


@pytest.mark.parametrize(
    ("median_s", "dense_s", "behind"),
    [
        (1.02, 1.0, False),
        (1.04, 1.0, True),
        (0.5, 1.0, False),
        (4.1e-3, 4.0e-3, False),
        (4.3e-3, 4.0e-3, True),
        (6.1e-3, 6.0e-3, False),
        (6.2e-3, 6.0e-3, True),
    ],
)
def test_behind_the_best_dense_plan(median_s, dense_s, behind):
    (found,) = judged([auto(median_s, 0.0, dense_s)])
    assert found["is_behind"] is behind


def test_the_summary():
    cells = judged([auto(1.0, 0.02, 1.0, low=-0.1), auto(1.1, 0.3, 1.0, low=0.25), auto(1.0, -0.01, 2.0)])
    text = "\n".join(summary(cells, [0.1, 0.2, 0.4]))
    assert "cells: 3" in text
    assert "median +2.0%, worst +30.0% (1gbit, 0us, 10 elements, ratio 0.01)" in text
    assert "lower end of an interval of regret: +25.0%" in text
    assert "1 of 3" in text
    assert "median error 20.0% of 3 rows" in text


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("1gbit", "a network must be like 50mbit/1ms, got '1gbit'"),
        ("1/0us", "bandwidth must be a number with"),
        ("1gbit/0", "latency must be"),
    ],
)
def test_networks_that_are_none(word, text):
    with pytest.raises(ConfigurationError, match=text):
        Network.read(word)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--networks", "1gbit"], "lab: a network must be like 50mbit/1ms, got '1gbit'"),
        (["--networks", ","], "regret: --networks names nothing"),
        (["--hosts", "0"], "regret: --hosts must be at least 1, got 0"),
        (["--numel", "0"], "regret: --numel must be at least 1, got 0"),
        (["--json", "/nonexistent/out.json"], "regret: '/nonexistent/out.json' cannot be written"),
    ],
)
def test_bad_words_are_told_before_anything_is_measured(words, text, capsys):
    assert call(regret, words) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("mpicomp: ")
    assert text in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_labs_need_root(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert call(regret, []) == 2
    assert "a lab needs root to make network namespaces" in capsys.readouterr().err
