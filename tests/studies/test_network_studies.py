"""Studies of networks: regret, change, peers, and the comparison of predicted steps with labs."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
import peers
import pytest
import regret
import simulated
from change import Step, lines_of, phases_of, seen_at
from checks import Inside, instead
from lab_jobs import Network
from mpicomp.bench.simulate.measured import Bucket, Gradient, Measured

from mpicomp.cost import CostModel
from mpicomp.cost import Network as CostNetwork
from mpicomp.rounds import WORLD


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


FIXED = {
    "1gbit": {"topk allgather": 0.010, "topk star-topk:ring": 0.020, "dense ring": 0.0103},
    "50mbit": {"topk allgather": 0.200, "topk star-topk:ring": 0.100, "dense ring": 0.5},
}


def timeline():
    """Steps of 20 s: fast, slow from 10.3 s on, with the old plan for 4 more steps."""
    steps, at = [], 0.0
    while at < 20:
        slow = at >= 10.3
        late = sum(step.seconds > 0.15 for step in steps)
        plan = "topk star-topk:ring" if slow and late >= 4 else "topk allgather"
        seconds = FIXED["50mbit" if slow else "1gbit"][plan]
        steps.append(Step(at, seconds, plan))
        at += seconds + 0.001
    return steps


def test_change_counts_steps_to_the_best_plan():
    steps = timeline()
    first, second = phases_of(steps, ["1gbit", "50mbit"], 10.0, FIXED)
    changed = next(place for place, step in enumerate(steps) if step.seconds > 0.05)
    assert (first.first, first.best, first.steps, first.share) == (0, "topk allgather", 0, 1.0)
    assert (first.mostly, second.mostly) == ("topk allgather", "topk star-topk:ring")
    assert first.as_good == ("topk allgather", "dense ring")
    assert (second.first, second.best, second.steps, second.share) == (changed, "topk star-topk:ring", 4, 1.0)
    numbers, lines = [], list(lines_of(steps, [changed]))
    for line in lines:
        words = line.partition(" s  ")[2].partition(":")[0].split()
        numbers += range(int(words[1]), int(words[-1]) + 1)
    assert numbers == list(range(len(steps)))
    assert len(lines) < len(steps) / 5
    assert [f"step {changed}:" in line for line in lines if "the change is seen" in line] == [True]


def test_change_is_seen_and_an_accident_is_not():
    assert seen_at([Step(place / 10, 0.1 if place < 60 else 0.02, "a") for place in range(100)], 5.0) == 60
    random = np.random.default_rng(0)
    steps = [Step(place / 10, 0.1 * random.uniform(0.8, 1.2), "a") for place in range(100)]
    steps[50] = Step(5.0, 3.0, "a")
    assert seen_at(steps, 5.0) is None
    first, second = phases_of(steps, ["50mbit", "1gbit"], 5.0, FIXED)
    assert (first.first, first.steps, first.share) == (0, None, 0.0)
    assert (second.first, second.steps, second.share, second.mostly) == (None, None, 0.0, None)


def test_peers_run_each_job_once_and_say_why_one_fails(tmp_path, monkeypatch):
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

    monkeypatch.setattr(peers.lab_jobs, "execute", execute)
    words = ["--hosts", "2", "--exchange", "ddp,ddp-bf16,dense,topk", "--alone", "ddp-bf16", "--limit", "5"]
    for more in ([], [], ["--steps", "64"]):
        options = peers.parser().parse_args([*words, *more])
        rows = peers.rows_of(tmp_path, options, Network("1gbit", "0us"), "digits")
        assert [row["exchange"] for row in rows] == ["ddp", "ddp-bf16", "dense", "topk"]
        assert [row["problem"] for row in rows] == [None, "no end within 5 s: sizes differ", None, None]
    assert ran == ["ddp,dense,topk", "ddp-bf16"] * 2


def test_simulated_links_are_those_of_the_lab_and_what_it_adds():
    network = CostNetwork(5)
    network.set_link(WORLD, 300e-6, 2 * 8 / 100e6, 0.1)  # 200 us more than asked for, and half of the bandwidth
    gradient = Gradient("w", (1 << 10, 1 << 10), 0.1)
    measured = Measured("some", 5, 5, CostModel(network), 0.1, 0.1, 0.0, [Bucket((gradient,))])
    rows = simulated.predict(measured, 4, Network("200mbit", "500us"))
    [predicted] = [row["predicted_s"] for row in rows if row["plan"] == "dense ring" and not row["overlap"]]
    # 4 MiB among 4 ranks are parts of 1 MiB, in 6 steps of a neighbour's latency and 100 Mbit/s.
    least = 0.2 + 6 * (700e-6 + (1 << 20) * 8 / 100e6)
    assert least < predicted < least + 0.1


def test_simulated_pieces_are_made_once_and_in_whole(tmp_path):
    names = [path.name for path in simulated._pieces(tmp_path, "text-lstm", 24)]  # predictions before any lab
    assert names == ["measured.json", "predicted.json", "8.json", "4.json", "3.json", "2.json"]
    assert simulated.FITTED[0] not in [hosts for hosts, _ in simulated.UNSEEN]
    made = []

    def write(path):
        made.append(path.stem)
        path.write_text("half of it")
        if made == ["measured", "predicted"]:
            raise KeyboardInterrupt

    pieces = {tmp_path / name: write for name in names[:3]}
    with pytest.raises(KeyboardInterrupt):
        simulated.make(pieces)
    assert not simulated.make(pieces, 1)
    assert simulated.make(pieces)
    assert made == ["measured", "predicted", "predicted", "8"]


def test_inside_counts_nested_calls_once_and_waiting(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Worker:
        def work(self, seconds):
            now[0] += seconds
            return seconds

        def both(self):
            return self.work(1.0) + self.work(2.0)

        def rounds(self):
            yield self.work(4.0)
            yield self.work(8.0)

    counts = Inside()
    counted = [(Worker, name, counts.of(getattr(Worker, name))) for name in ("work", "both")]
    with instead(*counted, (Worker, "rounds", counts.of_rounds(Worker.rounds))):
        assert (Worker().both(), counts.seconds) == (3.0, 3.0)
        for _ in Worker().rounds():
            now[0] += 16.0
        assert counts.seconds == 3.0 + 4.0 + 8.0 + 2 * 16.0
    Worker().both()
    assert counts.seconds == 47.0
