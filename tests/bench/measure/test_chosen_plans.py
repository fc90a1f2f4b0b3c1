"""Summaries of the plans of a run."""

import dataclasses

import numpy as np
import pytest
from mpicomp.bench.measure.chosen_plans import Choices, in_short, kept_share, leading

import mpicomp
from mpicomp.mpi import LocalWorld


def bucket(names, numel, kept, compressor, collective="allgather", gain=0.5):
    return mpicomp.BucketRecord(
        0, len(names), numel, compressor.get_config(), collective, "", getattr(compressor, "ratio", None),
        kept / numel, gain, {}, None, None, 0, 0.0, 0.0, 0, [],
    )  # fmt: skip


def record(*buckets, skipped=False):
    record = mpicomp.StepRecord(0, skipped=skipped)
    record.buckets = list(buckets)
    return record


TOPK, LESS, DENSE = mpicomp.TopK(ratio=0.1), mpicomp.TopK(ratio=0.05), mpicomp.Dense()


def test_step_is_printed_in_short():
    step = record(
        bucket(["a"], 1000, 100, TOPK, "star-topk:ring", 0.2),
        bucket(["b"], 9000, 9000, DENSE, "ring", None),
        bucket(["c"], 10, 1, TOPK, "star-topk:ring", 0.6),
    )
    assert kept_share(step) == pytest.approx(9101 / 10010)
    assert in_short(step) == "ratio 0.91  star-topk:ring  gain 0.40"
    assert in_short(record(bucket(["b"], 9, 9, DENSE, "ring", None))) == "ratio 1  ring"


def test_delay_is_waiting_over_sent_energy():
    def step(*pairs, skipped=False):
        buckets = [bucket(["a"], 10, 1, TOPK, gain=gain) for gain, _ in pairs]
        energies = [energy for _, energy in pairs]
        return record(*map(with_energy, buckets, energies), skipped=skipped)

    def with_energy(bucket, energy):
        return dataclasses.replace(bucket, energy=energy)

    choices = Choices()
    for taken in (
        step((0.1, 100.0), (1.0, 30.0)),  # 90 wait, 40 were sent
        step((0.25, 40.0), (0.5, 4.0)),  # 32 wait, 12 were sent
        step((None, 50.0), (0.5, None)),  # overflowed
        step((0.5, 8.0), skipped=True),  # nothing was delivered
        step((0.5, 4.0), (1.0, 2.0)),  # 2 wait, 4 were sent
    ):
        choices.add(taken)
    assert choices.delay() == pytest.approx(124 / 56)
    assert choices.delay(1) == pytest.approx(34 / 16)
    assert choices.delay(4) == pytest.approx(0.5)
    assert choices.delay(5) is None


@pytest.mark.parametrize("ratio", [0.1, 0.03])
def test_delay_is_of_energy_and_not_of_time(ratio):
    """So many steps' worth of a gradient's energy wait, each part of it for longer: births are counted one by one."""
    numel, steps, random = 4000, 600, np.random.default_rng(0)
    [end] = LocalWorld(1).transports
    reducer = mpicomp.Reducer(mpicomp.TopK(ratio=ratio), comm=end, policy={"warmup": 0})
    choices, waiting, aged = Choices(), np.zeros(numel), np.zeros(numel)  # energy as it was born, and times its age
    waited = left = residual = given = 0.0
    for step in range(steps):
        gradient = random.standard_normal(numel)
        mean = reducer.reduce({"a": gradient})["a"]
        choices.add(reducer.last_step)
        aged += waiting
        waiting += gradient**2
        sent = mean != 0
        if step >= steps // 2:
            waited, left = waited + aged[sent].sum(), left + waiting[sent].sum()
            residual, given = residual + (reducer.residual("a") ** 2).sum(), given + (gradient**2).sum()
        waiting[sent] = aged[sent] = 0.0
    assert choices.delay(steps // 2) == pytest.approx(residual / given, rel=0.05)
    assert waited / left > 3 * choices.delay(steps // 2)


def test_plans_by_the_elements_that_they_have_carried():
    choices = Choices()
    for step in range(8):
        large = bucket(["a"], 3000, 300, TOPK) if step < 6 else bucket(["a"], 3000, 150, LESS)
        choices.add(record(large, bucket(["b"], 1000, 1000, DENSE, "ring")))
    assert choices.ratios == pytest.approx([1300 / 4000] * 6 + [1150 / 4000] * 2)
    found = {(plan.compressor, plan.collective): (plan.share, plan.ratio_reached) for plan in choices.plans()}
    assert found[TOPK, "allgather"] == pytest.approx((18 / 32, 0.1))
    assert found[LESS, "allgather"] == pytest.approx((6 / 32, 0.05))
    assert found[DENSE, "ring"] == pytest.approx((8 / 32, 1.0))
    assert choices.plans()[0].entry() == {
        "compressor": "topk",
        "compressor_config": TOPK.get_config(),
        "ratio": 0.1,
        "collective": "allgather",
        "share": pytest.approx(18 / 32),
    }
    assert [plan.compressor for plan in choices.plans(6)] == [LESS, DENSE]


def test_leading_plan_is_of_the_leading_compressor():
    choices = Choices()
    for step in range(10):
        compressor = DENSE if step < 4 else mpicomp.TopK(ratio=0.1 / step)  # 4 dense, and no ratio twice but one
        choices.add(record(bucket(["a"], 100, 10, compressor if step != 9 else mpicomp.TopK(ratio=0.1 / 8))))
    assert choices.plans()[0].compressor == DENSE
    assert leading(choices.plans()).compressor == mpicomp.TopK(ratio=0.1 / 8)
