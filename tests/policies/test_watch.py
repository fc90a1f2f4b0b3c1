"""What is said of a named compressor that makes training fall behind, and when nothing is."""

import re

import pytest
from networks import Link
from trainings import Training

import mpicomp
from mpicomp.policies import UserSettings, get_policy

LINK = Link(1e-5, 1e8)


def said(caplog, compressor, steps=50, size=3, signal=0.2, **settings):
    caplog.clear()
    Training(size, LINK, compressor, signal=signal, **settings).run(steps)
    return [record.getMessage() for record in caplog.records if record.name == "mpicomp.watch"]


@pytest.mark.parametrize("collective", ["auto", "allgather"])
def test_few_of_much_signal(caplog, collective):
    [words] = said(caplog, mpicomp.TopK(ratio=0.002), collective=collective)
    behind = float(re.search(r"fall behind dense by ([0-9.]+) of its steps", words)[1])
    assert 0.3 < behind <= 1
    assert "use compressor=mpicomp.QSGD(rounding='nearest') (0.0" in words
    assert "topk at a ratio of 0.002 " in words
    assert int(re.search(r"\(step (\d+)\)", words)[1]) < 50


@pytest.mark.parametrize(
    "compressor",
    [mpicomp.TopK(ratio=0.9), mpicomp.QSGD(rounding="nearest"), mpicomp.Dense(), mpicomp.Dense(wire="bf16")],
)
def test_what_loses_little(caplog, compressor):
    assert said(caplog, compressor) == []


@pytest.mark.parametrize("compressor", ["randomk", "onebit", {"id": "powersgd", "rank": 1}])
def test_other_kinds(caplog, compressor):
    [words] = said(caplog, compressor, signal=0.5)
    assert compressor if isinstance(compressor, str) else compressor["id"] in words.lower()


def test_warning_without_feedback_or_with_a_choice_is_silent(caplog):
    static = get_policy("static")
    static.configure(UserSettings(mpicomp.RandomK(ratio=0.01), feedback=False))
    assert static.survey(0) is None
    assert said(caplog, mpicomp.TopK(ratio=0.002), policy="gravac") == []
    assert said(caplog, mpicomp.TopK(ratio=0.002), size=1) == []
