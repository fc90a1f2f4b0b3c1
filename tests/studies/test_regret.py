"""The study of regret."""

import pytest
import regret


def row(compressor, collective, median_s, predicted_s=None, numel=10, **more):
    plain = {"bandwidth": "1gbit", "latency": "0us", "config": {"id": compressor}, "span_s": median_s, "ratio": 0.01}
    plain |= {"compressor": compressor, "collective": collective, "numel": numel, "median_s": median_s}
    return (
        plain | dict.fromkeys(("chosen", "regret", "regret_low", "best_dense_s")) | {"predicted_s": predicted_s} | more
    )


def auto(median_s, regret, best_dense_s, low=None):
    facts = {"chosen": "topk allgather", "regret": regret, "regret_low": low, "best_dense_s": best_dense_s}
    return row("topk", "auto", median_s, median_s, **facts)


def test_regret_prediction_errors_are_those_of_the_cell():
    rows = [
        row("dense", "ring", 1.0, 1.5),
        row("topk", "allgather", 1.0, 0.9),
        row("sidco", "allgather", 1.0, 7.0),
        row("topk", "allgather", 1.0, 8.0, numel=11),
        row("topk", "star-topk", None, 9.0),
        auto(1.0, 0.0, 1.0),
    ]
    *others, last = [row["prediction_error"] for row in regret.judged(rows)]
    assert (others, last) == ([None] * 5, pytest.approx(0.1))
    assert regret.prediction_errors(rows) == pytest.approx([0.5, 0.1, 6.0, 7.0, 0.0])


@pytest.mark.parametrize(
    ("median_s", "dense_s", "behind"),
    [(1.02, 1.0, False), (1.04, 1.0, True), (4.1e-3, 4.0e-3, False), (4.3e-3, 4.0e-3, True), (6.2e-3, 6.0e-3, True)],
)
def test_regret_is_behind_the_best_dense_plan(median_s, dense_s, behind):
    assert regret.judged([auto(median_s, 0.0, dense_s)])[0]["is_behind"] is behind
