"""What a run is said to have come to, from numbers made up."""

import dataclasses

import numpy as np
import pytest
from mpicomp.bench.measure.chosen_plans import Ran
from mpicomp.bench.measure.probe import Probe
from mpicomp.bench.measure.timings import PHASES, Slowest
from mpicomp.bench.outcome import Outcome
from mpicomp.bench.verdict import judge, table

import mpicomp

TOPK, DENSE, HALF = mpicomp.TopK(ratio=0.01), mpicomp.Dense(), mpicomp.Dense(wire="bf16")


def phases(**seconds):
    return dict.fromkeys(PHASES, 0.0) | seconds


def outcome(**changed):
    """Give a run whose steps computed for 0.1 s, and whose exchange took 0.02 s where a dense one takes 0.2 s."""
    parts = phases(compute=0.1, compress=0.005, exchange=0.011, decode=0.004)
    plan = Ran(TOPK, 0.01, "allgather", 1.0, 0.01)
    settings = {
        "quality": 0.9, "parameters": 1000, "ranks": 4, "hosts": 4, "adapts": False, "compressor": TOPK,
        "collective": "allgather", "median_step_s": 0.12, "phases_s": parts, "choosing_s": 0.001,
        "late_step_s": 0.12,
        "late_phases_s": parts,
        "sent_bytes": 100, "wire_bytes": 100, "dense_wire_bytes": 1000, "once_bytes": 0, "gain": 0.5,
        "exchange_probe": Probe("allgather", 0.02, 0.011, 5), "dense_probe": Probe("ring", 0.2, 0.2, 5),
        "steps_timed": 95,
        "ratios": [0.01] * 100, "plans": [plan], "late_plans": [plan], "layers": [], "delay": 4.9,
    }  # fmt: skip
    return Outcome(**(settings | changed))


def test_dense_step_is_the_rest_and_the_dense_exchange():
    run = outcome()
    assert run.exchange_s == pytest.approx(0.02)
    assert run.dense_step_s == pytest.approx(0.1 + 0.2)
    assert judge(run) == (
        "compression paid in seconds: a step took 0.120 s, 2.5 times faster than the 0.300 s with a dense exchange "
        "here, and 10.0 times fewer bytes left each rank than with a dense ring; delay 4.9 steps: so many steps' worth "
        "of gradient energy wait in residuals; quality was not compared with dense exchange"
    )


def test_dense_run_adds_quality_to_the_verdict():
    dense = outcome(compressor=DENSE, quality=0.95, median_step_s=0.31)
    told = judge(outcome(), dense, "held-out accuracy")
    assert told.startswith("compression paid in seconds")
    assert told.endswith(
        "wait in residuals; held-out accuracy 0.9000, and 0.9500 with dense exchange from the same seed, whose steps "
        "took 0.310 s"
    )


def test_changed_plans_are_judged_by_later_steps():
    # Dense at first: the median of all steps is that of dense ones, and says nothing of what was found in the end.
    slow = phases(compute=0.1, exchange=0.2)
    run = outcome(adapts=True, median_step_s=0.3, phases_s=slow)
    assert run.dense_step_s == pytest.approx(0.3)
    assert "2.5 times faster" in judge(run)
    assert "seconds a step: 0.3000" in table(run, "held-out accuracy", 100)


def test_slower_compression_did_not_pay():
    run = outcome(dense_probe=Probe("ring", 0.001, 0.001, 5))
    assert judge(run).startswith("compression did not pay in seconds: a step took 0.120 s")
    assert "; use --compressor dense on this network; delay 4.9 steps" in judge(run)
    assert judge(run).endswith("; quality was not compared with dense exchange")


def test_named_and_chosen_dense_are_told_apart():
    plans = [Ran(DENSE, 1.0, "ring", 0.97, 1.0), Ran(TOPK, 0.01, "allgather", 0.03, 0.01)]
    run = outcome(compressor=DENSE, collective="ring", plans=plans, late_plans=plans)
    assert judge(run) == "dense exchange: nothing was compressed; a step took 0.120 s"
    run = dataclasses.replace(run, adapts=True)
    assert judge(run) == (
        "mpicomp chose dense exchange: nothing that sends enough of the gradient beats it here; a step took 0.120 s"
    )
    plans = [
        Ran(DENSE, 1.0, "ring", 0.5, 1.0),
        Ran(DENSE, 1.0, "allreduce", 0.2, 1.0),
        Ran(TOPK, 0.01, "gtopk", 0.3, 0),
    ]
    assert "chose dense exchange for 70 % of the later steps:" in judge(dataclasses.replace(run, late_plans=plans))


def test_dense_of_16_bits_is_judged_as_compression():
    plan = Ran(HALF, 1.0, "scatter-reduce", 1.0, 1.0)
    run = outcome(adapts=True, compressor=HALF, collective="scatter-reduce", plans=[plan], late_plans=[plan])
    assert judge(run).startswith("compression paid in seconds: ")


@pytest.mark.parametrize(
    ("delay", "words"),
    [
        (0.0, "delay 0 steps"),
        (0.0004, "delay under 0.01 steps"),
        (0.163, "delay 0.16 steps"),
        (53.2, "delay 53 steps"),
        (1234.5, "delay 1234 steps"),
        (None, "no delay to measure, since there is no error feedback"),
    ],
)
def test_delay_is_told_in_words(delay, words):
    run = outcome(delay=delay)
    assert f"; {words}" in judge(run)
    assert ("delay (" in table(run, "accuracy", 100)) == (delay is not None)


def test_quality_is_left_out_without_delay():
    plans = [Ran(DENSE, 1.0, "ring", 1.0, 1.0)]
    for adapts in (False, True):
        assert "quality" not in judge(outcome(adapts=adapts, compressor=DENSE, plans=plans, late_plans=plans, delay=0))
    assert "quality" not in judge(outcome(ranks=1))
    few = [Ran(DENSE, 1.0, "ring", 0.7, 1.0), Ran(TOPK, 0.01, "allgather", 0.3, 0)]
    assert judge(outcome(adapts=True, compressor=DENSE, late_plans=few)).endswith(
        "; quality was not compared with dense exchange"
    )


def test_equal_times_make_no_difference():
    assert judge(outcome(ranks=1)).startswith("one rank: nothing was exchanged")
    assert judge(outcome(dense_probe=Probe("ring", 0.02, 0.02, 5))).startswith("compression made no difference to")


def test_missing_dense_exchange_gives_no_verdict():
    run = outcome(exchange_probe=None, dense_probe=None)
    assert run.exchange_s is run.dense_step_s is None
    assert judge(run).startswith(
        "none, since no dense exchange was measured: a step took 0.120 s, and 10.0 times fewer"
    )
    assert "; delay 4.9 steps" in judge(run)
    assert "without waiting" not in table(run, "accuracy", 100)


def test_slow_rank_is_named_unless_by_chance():
    rng = np.random.default_rng(0)
    own_s = 0.1 + 0.01 * rng.random((4, 40))
    assert not Slowest.of(own_s).matters(0.12, 0.03)
    own_s[2] += 0.05
    slowest = Slowest.of(own_s)
    assert (slowest.rank, slowest.costs_s) == (2, pytest.approx(0.05, abs=0.005))
    said = "; rank 2 is slow: a step takes it 0.05"
    assert said in judge(outcome(slowest=slowest))
    assert said not in judge(outcome(slowest=dataclasses.replace(slowest, costs_s=0.003)))
    once = 0.1 + np.zeros((2, 40))
    once[1, 7] = 2.0  # a single pause
    assert not Slowest.of(once).matters(0.12, 0.03)
    assert Slowest.of(own_s[:1]) is None
