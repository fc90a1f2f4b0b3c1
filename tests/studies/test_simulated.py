"""The comparison of simulated steps with labs: what it predicts, and how it writes that down."""

import pytest
import simulated
from mpicomp.bench.simulate.measured import Bucket, Gradient, Measured

from mpicomp.cost import CostModel, Network
from mpicomp.rounds import WORLD


def test_no_lab_is_compared_that_was_fitted_to():
    hosts, _ = simulated.FITTED
    assert [own for own, _ in simulated.UNSEEN] == [2, 3, 4, 8]
    assert hosts not in [own for own, _ in simulated.UNSEEN]


def test_predictions_carry_what_a_lab_adds_to_its_links_over_to_others():
    network = Network(5)
    network.set_link(WORLD, 300e-6, 2 * 8 / 100e6, 0.1)  # 200 us more than asked for, and half of the bandwidth
    gradient = Gradient("w", (1 << 10, 1 << 10), 0.1)
    measured = Measured("some", 5, 5, CostModel(network), 0.1, 0.1, 0.0, [Bucket((gradient,))])
    rows = simulated.predict(measured, 4, simulated.Network("200mbit", "500us"))
    [told] = [own["predicted_s"] for own in rows if own["plan"] == "dense ring" and not own["overlap"]]
    # 4 MiB among 4 ranks are parts of 1 MiB, in 6 steps of a neighbour's latency and 100 Mbit/s.
    least = 0.2 + 6 * (700e-6 + (1 << 20) * 8 / 100e6)
    assert least < told < least + 0.1


def test_pieces_are_made_a_few_at_a_time_and_each_once(tmp_path):
    made = []

    def write(path):
        made.append(path.stem)
        path.write_text("it")

    pieces = {tmp_path / f"{name}.json": write for name in ("measured", "predicted", "8", "4")}
    assert not simulated.make(pieces, 2)
    assert made == ["measured", "predicted"]
    assert not simulated.make(pieces, 1)
    assert simulated.make(pieces)
    assert made == ["measured", "predicted", "8", "4"]


def test_a_piece_that_is_interrupted_is_made_again(tmp_path):
    def interrupted(path):
        path.write_text("half of it")
        raise KeyboardInterrupt

    path = tmp_path / "8.json"
    with pytest.raises(KeyboardInterrupt):
        simulated.make({path: interrupted})
    assert simulated.make({path: lambda part: part.write_text("all of it")})
    assert path.read_text() == "all of it"


def test_predictions_are_written_before_any_lab_is_made(tmp_path):
    names = [path.name for path in simulated._pieces(tmp_path, "text-lstm", 24)]
    assert names == ["measured.json", "predicted.json", "8.json", "4.json", "3.json", "2.json"]


def test_a_table_has_the_median_error():
    rows = [
        {"hosts": 2, "network": "a", "plan": "x", "overlap": overlap, "predicted_s": predicted, "measured_s": 1.0,
         "error": predicted - 1}
        for overlap, predicted in ((False, 1.1), (True, 0.7), (True, 1.0))
    ]  # fmt: skip
    lines = simulated.table(rows)
    assert lines[2] == "| 2 | a | x | no | 1.100 | 1.000 | +10.0% |"
    assert lines[-1].strip() == "all: median error 10.0%, largest 30.0%"
