"""Learned codes in the joint choice: taken up where they pay for all that they cost, and nowhere else."""

import json

import numpy as np
import pytest
from networks import Link
from trainings import Training
from worlds import Ranks

from mpicomp.collectives import bind
from mpicomp.cost import CostModel, Network
from mpicomp.cost.kernel_costs import KernelCost
from mpicomp.cost.model import scheme_key
from mpicomp.errors import ConfigurationError
from mpicomp.policies import codes as module
from mpicomp.policies.codes import Codes
from mpicomp.policies.policy import Shape
from mpicomp.systems.lgc import LGC

SHAPES = {"embedding": (200, 60), "weight": (60, 50), "bias": (64,)}
SLOW, FAST = Link(1e-5, 2e6, small=0), Link(1e-6, 1e11)
LINEAR = {"id": "lgc", "ratio": 0.2, "code": "linear", "training_steps": 20}
ASKED = 40  # twice the steps of learning
LEARNING, CODED = "lgc: learning", "lgc: linear code, ring"


PATIENT = {"id": "auto", "fidelity": 0.1}  # after forty steps much of what was sent seldom still waits


def training(network=SLOW, compressor=LINEAR, policy=PATIENT, size=3, **settings):
    return Training(size, network, compressor, policy=policy, computing=0.001, shapes=SHAPES, **settings)


def notes(steps):
    """Give what records say of codes, where a code is at work."""
    return [own.reason.rpartition("; ")[2] for buckets in steps for own in buckets if own.compressor["id"] == "lgc"]


def test_a_code_that_pays_is_learnt_and_used():
    steps = training().run(120)
    assert {own.compressor["id"] for buckets in steps[:ASKED] for own in buckets} == {"dense"}
    learning, coded = notes(steps[ASKED : ASKED + 20]), notes(steps[ASKED + 20 + 5 :])
    assert learning == [LEARNING] * 20
    assert "learning a code that is predicted to pay" in steps[ASKED][0].reason
    assert coded.count(CODED) > 50
    assert set(coded) == {CODED}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_number_of_ranks(size):
    ran = notes(training(size=size).run(70))
    assert set(ran) == (set() if size == 1 else {LEARNING, CODED})


def test_where_exchanges_take_next_to_no_time_none_is_learnt():
    steps = training(FAST).run(4 * ASKED)
    assert {own.compressor["id"] for buckets in steps for own in buckets} == {"dense"}


def known(own_work):
    """Give a cost model that has measured the own work of some forms of a code."""
    model = CostModel(Network(3))
    code = LGC(**{name: value for name, value in LINEAR.items() if name != "id"} | {"dense_steps": 0})
    for form, seconds in own_work.items():
        scheme = bind(getattr(code, form) if form == "learning" else code, "learned:allreduce")
        model.kernels[scheme_key(scheme, ladder=True)] = KernelCost(seconds, 0.0)
    return model


@pytest.mark.parametrize("own_work", [{"learning": 1.0, "coded": 0.0}, {"learning": 0.0, "coded": 1.0}])
def test_own_work_has_to_pay(own_work):
    steps = training(cost=known(own_work)).run(2 * ASKED + 10)
    assert {own.compressor["id"] for buckets in steps for own in buckets} == {"dense"}
    assert notes(training(cost=known(dict.fromkeys(own_work, 0.0))).run(ASKED + 10))


def test_what_takes_too_long_to_learn_pays_later():
    """Learning takes the seconds of some dense steps: of 40 steps it does not pay, of 160 it does."""
    first = np.flatnonzero([bool(notes([own])) for own in training(cost=known({"learning": 0.6, "coded": 0})).run(170)])
    assert first[0] > ASKED + 1
    assert first[0] % ASKED <= 1


@pytest.mark.parametrize("steps", [20, 60, 200])
def test_the_mean_of_all_phases_is_predicted(steps):
    """The prediction against a run of as many steps, in which the code is learnt and given to all ranks."""
    code = LGC(**{name: value for name, value in LINEAR.items() if name != "id"} | {"dense_steps": 0})
    link = Link(1e-5, 2e6, small=0)
    run = Training(3, link, code, "learned:allreduce", computing=0.0, shapes=SHAPES)
    run.run(steps)
    seconds = max(end.seconds for end in run.ranks.world.transports)
    group = run.ranks.world.transports[0].group
    network = Network(3)
    network.set_link("world", 1e-5, 8 / 2e6, 0.1)
    codes = Codes([code])
    names = tuple(SHAPES)
    sizes = tuple(int(np.prod(own)) for own in SHAPES.values())
    codes.start([Shape(names, sizes, tuple(SHAPES.values()), np.dtype(np.float32))])
    for _ in range(steps):
        codes.pass_step([])
    predicted = codes._seconds(code, 0, lambda _: ["learned:allreduce"], CostModel(network), group)
    assert predicted == pytest.approx(seconds / steps, rel=0.05)


def test_a_code_that_makes_gradients_too_late_is_left_again(monkeypatch):
    monkeypatch.setattr(module, "_LATER", 0.02)  # taken to lose next to nothing
    steps = training(policy={"id": "auto", "fidelity": 0.98}, signal=0.1).run(200)
    assert CODED in notes(steps)
    assert {own.compressor["id"] for buckets in steps[-20:] for own in buckets} == {"dense"}


@pytest.mark.parametrize("after", [ASKED + 8, ASKED + 30])
def test_it_goes_on_after_a_restart(after):
    before = training()
    before.run(after)
    states = [reducer.state_dict() for reducer in before.ranks.reducers]
    json.dumps(states[0]["policy"])
    again = training()
    again.step()
    for reducer, state in zip(again.ranks.reducers, states, strict=True):
        reducer.load_state_dict(state)
    ran = notes(again.run(40))
    learnt = min(20, after - ASKED)
    assert ran[:20].count(LEARNING) <= 20 - learnt
    assert ran[-5:] == [CODED] * 5


@pytest.mark.slow
def test_a_named_collective_for_codes(monkeypatch):
    """Where nothing but codes and dense is left, ratio and wire are chosen, of codes that all ranks can learn."""
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    steps = Training(3, SLOW, collective="learned", policy=PATIENT, computing=0.001, shapes=SHAPES).run(480)
    ran = {(own.compressor["id"], own.collective.partition(":")[0]) for buckets in steps for own in buckets}
    assert ("lgc", "learned") in ran
    assert {collective for name, collective in ran if name == "lgc"} == {"learned"}
    assert {own.compressor["code"] for buckets in steps for own in buckets if "code" in own.compressor} == {"linear"}


def test_where_nothing_is_named_top_k_is_cheaper():
    steps = Training(3, SLOW, computing=0.001, shapes=SHAPES).run(330)
    assert "lgc" not in {own.compressor["id"] for buckets in steps for own in buckets}


def test_other_parameters_have_to_learn_anew():
    run = training()
    run.run(ASKED + 30)
    other = {"other": (100, 90)}
    run.scale = {name: run.random.pareto(3, shape) for name, shape in other.items()}
    run.common = {name: own * run.random.standard_normal(own.shape) for name, own in run.scale.items()}
    for reducers in [run.ranks.reducers]:
        means = run.ranks.reduce(run.gradients(), 0.1)
        assert len(means) == len(reducers)
    assert run.ranks.reducers[0].last_step.buckets[0].compressor["id"] == "dense"


def test_what_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("mpicomp.systems.lgc.compressor.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="lgc: code='autoencoder' is trained with torch"):
        Ranks(2, "lgc", policy="auto")
