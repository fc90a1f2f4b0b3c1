"""Verdicts on outcomes that are made up, compared with tests/golden/verdict.txt."""

import dataclasses

import numpy as np
import pytest
from golden import check_golden
from mpicomp.bench.measure.chosen_plans import Ran
from mpicomp.bench.measure.probe import Probe
from mpicomp.bench.measure.timings import PHASES, Slowest
from mpicomp.bench.train import Outcome, judge, table

import mpicomp

TOPK, DENSE, HALF = mpicomp.TopK(ratio=0.01), mpicomp.Dense(), mpicomp.Dense(wire="bf16")


def phases(**seconds):
    return dict.fromkeys(PHASES, 0.0) | seconds


def ran(compressor, share=1.0, collective="ring"):
    return Ran(compressor, getattr(compressor, "ratio", 1.0), collective, share, 0.01)


def outcome(**changed):
    """Return a run whose steps computed for 0.1 s, and whose exchange took 0.02 s where a dense one takes 0.2 s."""
    parts = phases(compute=0.1, compress=0.005, exchange=0.011, decode=0.004)
    plan = ran(TOPK, collective="allgather")
    settings = {
        "quality": 0.9, "parameters": 1000, "ranks": 4, "hosts": 4, "adapts": False, "compressor": TOPK,
        "collective": "allgather", "median_step_s": 0.12, "phases_s": parts, "choosing_s": 0.001, "late_step_s": 0.12,
        "late_phases_s": parts, "sent_bytes": 100, "wire_bytes": 100, "dense_wire_bytes": 1000, "once_bytes": 0,
        "gain": 0.5, "exchange_probe": Probe("allgather", 0.02, 0.011, 5), "dense_probe": Probe("ring", 0.2, 0.2, 5),
        "steps_timed": 95, "ratios": [0.01] * 100, "plans": [plan], "late_plans": [plan], "delay": 4.9,
    }  # fmt: skip
    return Outcome(**(settings | changed))


def dense(*plans, **changed):
    plans = list(plans) or [ran(DENSE)]
    return outcome(**{"compressor": DENSE, "collective": "ring", "plans": plans, "late_plans": plans} | changed)


def slow_rank(costs_s):
    return outcome(slowest=Slowest(2, costs_s, 0.0001))


FEW = [ran(DENSE, 0.5), ran(DENSE, 0.2, "allreduce"), ran(TOPK, 0.3, "oktopk")]
SLOW = phases(compute=0.1, exchange=0.2)  # dense at first: the median of all steps says nothing of the later ones
CASES = {
    "paid": outcome(),
    "did not pay": outcome(dense_probe=Probe("ring", 0.001, 0.001, 5)),
    "no difference": outcome(dense_probe=Probe("ring", 0.02, 0.02, 5)),
    "later steps count": outcome(adapts=True, median_step_s=0.3, phases_s=SLOW),
    "dense, named": dense(ran(DENSE, 0.97), ran(TOPK, 0.03, "allgather")),
    "dense, chosen": dense(ran(DENSE, 0.97), ran(TOPK, 0.03, "allgather"), adapts=True),
    "dense, chosen for some": dense(*FEW, adapts=True),
    "dense of 16 bits": dense(ran(HALF, collective="scatter-reduce"), adapts=True, compressor=HALF),
    "one rank": outcome(ranks=1),
    "no dense exchange": outcome(exchange_probe=None, dense_probe=None),
    "nothing is late": dense(delay=0),
    **{f"delay {delay}": outcome(delay=delay) for delay in (0.0, 0.0004, 0.163, 53.2, 1234.5, None)},
    "slow rank": slow_rank(0.05),
    "slow rank, hardly": slow_rank(0.003),
}


def test_verdict_reads_as_the_file():
    lines = [f"{name}: {judge(run)}" for name, run in CASES.items()]
    lines.append(f"dense run: {judge(outcome(), dense(quality=0.95, median_step_s=0.31), 'held-out accuracy')}")
    shown = ("paid", "later steps count", "no dense exchange")
    tables = [f"{name}:\n{table(CASES[name], 'held-out accuracy', 100)}" for name in shown]
    check_golden("verdict", "\n\n".join([*lines, *tables]))


def test_dense_step_is_the_rest_and_the_dense_exchange():
    run = outcome()
    assert run.exchange_s == pytest.approx(0.02)
    assert run.dense_step_s == pytest.approx(0.1 + 0.2)
    assert CASES["later steps count"].dense_step_s == pytest.approx(0.3)
    assert CASES["no dense exchange"].exchange_s is CASES["no dense exchange"].dense_step_s is None


def test_slow_rank_is_found_unless_by_chance():
    rng = np.random.default_rng(0)
    compute_s = 0.1 + 0.01 * rng.random((4, 40))
    assert not Slowest.of(compute_s).matters(0.12, 0.03)
    compute_s[2] += 0.05
    slowest = Slowest.of(compute_s)
    assert (slowest.rank, slowest.costs_s) == (2, pytest.approx(0.05, abs=0.005))
    assert slowest.matters(0.12, 0.03)
    assert not dataclasses.replace(slowest, costs_s=0.003).matters(0.12, 0.03)
    once = 0.1 + np.zeros((2, 40))
    once[1, 7] = 2.0  # a single pause
    assert not Slowest.of(once).matters(0.12, 0.03)
    assert Slowest.of(compute_s[:1]) is None
