"""The examples of docs/extending.md keep the laws, and the joint choice takes them as it takes what is built in."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from networks import Link
from worlds import Ranks

import mpicomp
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.registry import REGISTRIES
from mpicomp.testing import checks

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
EXAMPLE_FILES = "sign_topk", "int8", "tree", "ring_gather", "flush"
SLOW = Link(50e-6, 1e9)


@pytest.fixture(scope="module", autouse=True)
def examples():
    """Have the examples registered in this file alone."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in REGISTRIES.values():
            registry.names()  # built-in ones are there to stay
            patch.setattr(registry, "_classes", dict(registry._classes))
        patch.syspath_prepend(EXAMPLES)
        for name in EXAMPLE_FILES:
            importlib.import_module(name)
        yield
        for name in EXAMPLE_FILES:
            del sys.modules[name]


def sign_topk(ratio):
    return mpicomp.get_compressor({"id": "sign-topk", "ratio": ratio})


def gradients(step, ranks, numel=20_000):
    return [{"w": np.random.default_rng((step, rank)).standard_t(3, numel).astype(np.float32)} for rank in range(ranks)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: sign_topk(0.05),
        lambda: mpicomp.get_compressor("int8"),
        lambda: mpicomp.collectives.collective_class("tree"),
        lambda: mpicomp.collectives.collective_class("ring-gather"),
        lambda: mpicomp.policies.get_policy({"id": "flush", "every": 4}),
    ],
    ids=EXAMPLE_FILES,
)
def test_example_keeps_the_laws(make):
    for check in checks(make()):
        check()


def test_sign_topk_message_is_never_cut_or_summed():
    with pytest.raises(IncompatiblePairError, match=r"sign-topk: does not fit collective 'star-topk', .*allgather"):
        mpicomp.collectives.bind(sign_topk(0.1), "star-topk")
    with pytest.raises(IncompatiblePairError, match=r"TopK\(wire='signs'\): does not fit collective 'oktopk'"):
        mpicomp.collectives.bind(mpicomp.TopK(wire="signs"), "oktopk")
    with pytest.raises(ConfigurationError, match=r"sign-topk: ratio is the kept fraction and must be in \(0, 1\]"):
        sign_topk(2)


def test_auto_varies_the_ratio_of_sign_topk():
    ranks = Ranks(4, sign_topk(0.01), policy="auto", network=SLOW)
    seen = set()
    for step in range(120):
        ranks.reduce(gradients(step, 4))
        [bucket] = ranks.reducers[0].last_step.buckets
        assert bucket.compressor["id"] in ("sign-topk", "dense")
        if bucket.compressor["id"] == "sign-topk":
            seen.add(bucket.compressor["ratio"])
    assert len(seen) > 1


def test_auto_considers_a_compressor_that_its_class_suggests(monkeypatch):
    classes = {name: type(mpicomp.get_compressor(name)) for name in ("sign-topk", "topk", "qsgd")}
    for name, cls in classes.items():
        mine = [cls()] if name == "sign-topk" else []
        monkeypatch.setattr(cls, "suggested", classmethod(lambda _, normalises=True, mine=mine: mine))
    ranks = Ranks(4, policy="auto", network=SLOW)
    seen = set()
    for step in range(40):
        ranks.reduce(gradients(step, 4))
        seen |= {bucket.compressor["id"] for bucket in ranks.reducers[0].last_step.buckets}
    assert seen == {"sign-topk", "dense"}


def test_auto_considers_the_collective_of_the_example():
    seconds = {"bcast": 1e-5, "sendrecv": 1e-4}  # where messages between two ranks are cheap
    ranks = Ranks(3, "dense", network=lambda task, group: seconds.get(task.operation, 1e-2))
    seen = set()
    for step in range(40):
        means = ranks.reduce(gradients(step, 3))
        seen.add(ranks.reducers[0].last_step.buckets[0].collective)
    assert "tree" in seen
    expected = np.mean([gradient["w"] for gradient in gradients(39, 3)], axis=0)
    np.testing.assert_allclose(means[2]["w"], expected, rtol=1e-5, atol=1e-6)
