"""Verdicts on outcomes that are made up, compared with tests/golden/verdict.txt."""

import pytest
import recordings
from golden import check_golden
from mpicomp.bench.measure.chosen_plans import ChosenPlan
from mpicomp.bench.measure.probe import Probe
from mpicomp.bench.measure.run_fields import PHASES, RunObject
from mpicomp.bench.train import Trained, estimate, judge, table

import mpicomp

TOPK, DENSE, HALF = mpicomp.TopK(ratio=0.01), mpicomp.Dense(), mpicomp.Dense(wire="bf16")


def phases(**seconds):
    return dict.fromkeys(PHASES, 0.0) | seconds


def ran(compressor, share=1.0, collective="ring"):
    return ChosenPlan(compressor, getattr(compressor, "ratio", 1.0), collective, share, 0.01)


def outcome(value=0.9, **changed):
    """Return a run whose steps computed for 0.1 s, and whose exchange took 0.02 s where a dense one takes 0.2 s."""
    parts = phases(compute=0.1, compress=0.005, exchange=0.011, decode=0.004)
    plan = ran(TOPK, collective="allgather")
    of_run = {
        "quality": {"name": "held-out accuracy", "value": value, "better": "higher"}, "parameters": 1000, "ranks": 4,
        "hosts": 4, "median_step_s": 0.12, "phases_s": parts, "choosing_s": 0.001, "sent_bytes": 100,
        "wire_bytes": 100, "dense_wire_bytes": 1000, "once_bytes": 0, "gain": 0.5, "delay": 4.9, "verdict": "",
    }  # fmt: skip
    besides = {
        "adapts": False, "compressor": TOPK, "steps_timed": 95, "late_step_s": 0.12, "plans": [plan],
        "late_plans": [plan], "exchange_probe": Probe("allgather", 0.02, 0.011, 5),
        "dense_probe": Probe("ring", 0.2, 0.2, 5),
    }  # fmt: skip
    besides |= {name: changed.pop(name) for name in besides if name in changed}
    exchange, dense = besides["exchange_probe"], besides["dense_probe"]
    if dense is not None:
        exchange_s, dense_step_s = estimate(besides["late_step_s"], parts, exchange, dense)
        of_run |= {"exchange_s": exchange_s, "dense_step_s": dense_step_s}
        of_run |= {"dense_exchange_s": dense.seconds, "dense_collective": dense.collective}
    else:
        of_run |= dict.fromkeys(("exchange_s", "dense_step_s", "dense_exchange_s", "dense_collective"))
    return Trained(RunObject(**recordings.outcome(100) | of_run | changed), **besides)


def dense(*plans, **changed):
    plans = list(plans) or [ran(DENSE)]
    return outcome(**{"compressor": DENSE, "plans": plans, "late_plans": plans} | changed)


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
}


def test_verdict_reads_as_the_file():
    lines = [f"{name}: {judge(run)}" for name, run in CASES.items()]
    lines.append(f"dense run: {judge(outcome(), dense(value=0.95, median_step_s=0.31).run)}")
    shown = ("paid", "later steps count", "no dense exchange")
    tables = [f"{name}:\n{table(CASES[name])}" for name in shown]
    check_golden("verdict", "\n\n".join([*lines, *tables]))


def test_dense_step_is_the_rest_and_the_dense_exchange():
    parts = phases(compute=0.1, compress=0.005, exchange=0.011, decode=0.004)
    exchange, dense = Probe("allgather", 0.02, 0.011, 5), Probe("ring", 0.2, 0.2, 5)
    assert estimate(0.12, parts, exchange, dense) == pytest.approx((0.02, 0.1 + 0.2))
    assert estimate(0.05, parts, exchange, dense, every=11.0) == pytest.approx((0.01, 0.1 + 0.2))  # computing is left
