"""The kit passes every compressor and collective there is, and catches each way to be wrong."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from schemes import OWN, UNBIASED, USERS

import mpicomp
from mpicomp.collectives import COLLECTIVES
from mpicomp.collectives.dense import Allreduce
from mpicomp.compressors import COMPRESSORS, SharedSparsifier
from mpicomp.errors import ConfigurationError
from mpicomp.mpi.rounds import Round
from mpicomp.policies import POLICIES, Static
from mpicomp.testing import checks, example

COMPRESSORS_AT_DEFAULTS = [example(cls) for cls in COMPRESSORS.classes() if COMPRESSORS.plugin(cls.id) is None]
VARIANTS = [compressor for compressor in OWN + UNBIASED + USERS if compressor not in COMPRESSORS_AT_DEFAULTS]
OURS = [cls for cls in COLLECTIVES.classes() if COLLECTIVES.plugin(cls.id) is None]
# One of each kind; test_all_compressors and test_laws have the rest, and test_policy_laws all policies.
KINDS = {
    *("topk", "sidco", "randomk", "qsgd", "onebit", "dense", "powersgd"),
    *("ring", "allgather", "two-phase", "hierarchical"),
}


def laws(subjects, name=str, slow=False):
    return [
        pytest.param(
            law, id=f"{name(subject)}-{law.__name__}", marks=[pytest.mark.slow] * (slow or subject.id not in KINDS)
        )
        for subject in subjects
        for law in checks(subject)
    ]


@pytest.mark.parametrize("check", laws(COMPRESSORS_AT_DEFAULTS) + laws(VARIANTS, slow=True))
def test_every_compressor(check):
    check()


@pytest.mark.parametrize("check", laws(OURS, lambda cls: cls.id))
def test_every_collective(check):
    check()


def test_object_without_laws_is_refused():
    for subject in ("topk", mpicomp.TopK, object()):
        with pytest.raises(ConfigurationError, match="checks are for a compressor, a collective's class or a policy"):
            checks(subject)


@pytest.fixture
def registry(monkeypatch):
    """Names that are registered in a test are gone after it."""
    for registry in (COMPRESSORS, COLLECTIVES, POLICIES):
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))


def check_is_found(subject, law, message):
    """Run one of the checks of an object, which has to find what is wrong with it."""
    [check] = [check for check in checks(subject) if check.__name__ == law]
    with pytest.raises((AssertionError, TypeError, mpicomp.MpicompError), match=message):
        check()


def selects(change):
    """A top-k whose selection is changed by a function of it, the sum and the context."""

    @mpicomp.register
    @dataclass(frozen=True)
    class Broken(mpicomp.TopK):
        id: ClassVar[str] = "test-broken"

        def select(self, accumulated, context):
            selection = super().select(accumulated, context)
            return change(selection, accumulated, context) or selection

    return Broken(ratio=0.05)


def written(indices=lambda indices: indices, values=lambda values: values):
    return lambda selection, *_: mpicomp.Selection(indices(selection.indices), values(selection.values))


def depends_on_the_call(selection, accumulated, context):
    calls.append(1)
    if len(calls) % 2 == 0:
        indices = np.arange(selection.indices.size, dtype=np.uint32)
        return mpicomp.Selection(indices, accumulated.array()[indices])
    return None


def fails_on_nan(selection, accumulated, context):
    assert accumulated.finite, "this one wants finite gradients"


calls: list[int] = []


@pytest.mark.parametrize(
    ("change", "law", "message"),
    [
        (written(lambda i: i[::-1].copy(), lambda v: v[::-1].copy()), "selection", "ascend"),
        (written(values=lambda v: 2 * v), "selection", "values are not the array's"),
        (written(lambda i: i[1:], lambda v: v[1:]), "selection", "count promises"),
        (written(lambda i: i.astype(np.int64)), "selection", "not uint32"),
        (lambda s, a, _: a.array().put(s.indices, 0), "input_is_left_alone", "wrote to the sum"),
        (lambda s, a, context: context.memory.update(last=s.indices), "memory", "memory must hold finite numbers"),
        (depends_on_the_call, "memory", "selects other elements"),
        (fails_on_nan, "awkward_arrays", "finite"),
        (lambda s, a, _: a.array().put(s.indices, 0), "nothing_is_lost", "lost"),
        (written(values=lambda v: 2 * v), "message", "lost energy"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_wrong_selections_are_found(change, law, message):
    calls.clear()
    check_is_found(selects(change), law, message)


class Positions(SharedSparsifier):
    """Random positions, with one thing wrong."""

    paper: ClassVar[str] = "none"
    shared: ClassVar[bool] = True

    def count(self, numel):
        return max(1, numel // 10)

    def positions(self, numel, context, out):
        out[:] = np.sort(context.random(self.shared).choice(numel, out.size, replace=False))


def rounds_to_the_nearest(self, array, message, sent, key):
    return mpicomp.QSGD(rounding="nearest").pack(array, message, sent, key)


def shrinks(self, array, message, sent, key):
    return mpicomp.QSGD.pack(self, array * array.dtype.type(0.99), message, sent, key)


@pytest.mark.parametrize(
    ("base", "members", "law", "message"),
    [
        (Positions, {"shared": False}, "positions", "positions differ between ranks"),
        (mpicomp.QSGD, {"pack": rounds_to_the_nearest}, "unbiased", r"off by [\d.]+ standard errors"),
        (mpicomp.QSGD, {"pack": shrinks}, "unbiased", r"off by [\d.]+ standard errors"),
        (mpicomp.TopK, {"get_config": lambda self: {"id": self.id}}, "configuration", "does not give an equal"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_wrong_compressors_are_found(base, members, law, message):
    made = mpicomp.register(dataclass(frozen=True)(type("Own", (base,), {"id": "test-own", **members})))
    check_is_found(made(ratio=0.3) if base is mpicomp.TopK else made(), law, message)


def changes(change):
    """An allreduce whose result is changed by a function of it and the rank."""

    @mpicomp.register
    class Broken(Allreduce):
        id: ClassVar[str] = "test-broken"

        def exchange(self, accumulated, context):
            result = yield from super().exchange(accumulated, context)
            change(result, context.rank)
            return result

    return Broken


def other_bits(result, rank):
    result.mean[0] += rank


def array_is_written_to(result, rank):
    result.sent[0] = result.mean[0] = 1


@pytest.mark.parametrize(
    ("change", "law", "message"),
    [
        (other_bits, "nothing_is_lost", "means differ"),
        (
            lambda result, rank: setattr(result, "sent", result.sent / 2),
            "nothing_is_lost", "the sum of the sent parts is off the mean times ranks by",
        ),
        (array_is_written_to, "nothing_is_lost", "arrays sum to something else than before|gain is 1.0, not"),
        (lambda result, rank: setattr(result, "gain", 0.5), "nothing_is_lost", "gain is 0.5, not 1"),
        (
            lambda result, rank: setattr(result, "energy", result.energy + rank),
            "nothing_is_lost", "ranks get different results",
        ),
        (
            lambda result, rank: setattr(result, "nonfinite", False),
            "flags_reach_all", "nan on rank 0 is not seen by all",
        ),
        (
            lambda result, rank: setattr(result, "stale", False),
            "flags_reach_all", "rank 0 is stale, and not all know it",
        ),
        (
            lambda result, rank: setattr(result, "nonfinite", result.nonfinite or result.stale),
            "flags_reach_all", "taken for not finite",
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("registry")
def test_wrong_collectives_are_found(change, law, message):
    check_is_found(changes(change), law, message)


@pytest.mark.parametrize(
    ("members", "law", "message"),
    [
        (
            {"rounds": lambda self, numel, dtype, group, step=0: [Round("allreduce", (numel,), dtype)]},
            "bytes_are_those_of_rounds", "sent .* rounds announce",
        ),
        (
            {"rounds": lambda self, *shape: 2 * Allreduce.rounds(self, *shape)},
            "bytes_are_those_of_rounds", "rounds were",
        ),
        ({"messages": "letters"}, "registered", "no built-in compressor has 'letters' messages"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("registry")
def test_collective_that_announces_something_else_is_found(members, law, message):
    check_is_found(mpicomp.register(type("Own", (Allreduce,), {"id": "test-own", **members})), law, message)


@dataclass(eq=False)
class Turns(Static):
    """Dense, and in some steps top-k."""

    wrong: str = ""

    def configure(self, settings):
        self._steps = 0
        objects.append(self)
        self._number = len(objects)
        super().configure(settings)

    def start(self, shapes, transport):
        self._dense = mpicomp.collectives.bind(mpicomp.Dense(), "allreduce")
        self._topk = mpicomp.collectives.bind(mpicomp.TopK(ratio=0.1), "allgather")
        yield from super().start(shapes, transport)

    def refresh(self, transport):
        if self.wrong == "waits":
            yield Round("allreduce", (1,), np.dtype("f4"), send=np.ones(1, "f4"), recv=np.ones(1, "f4"))

    def plan(self, bucket):
        reason = f"object {self._number}" if self.wrong == "reasons" else "turns"
        return mpicomp.policies.Plan(self._dense if self._steps % 3 else self._topk, reason)

    def on_step_end(self, step, outcomes):
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        if self.wrong == "keeps an array":
            return {"steps": np.ones(3)}
        return {} if self.wrong == "forgets" else {"steps": self._steps}

    def load_state_dict(self, state, cost):
        self._steps = state.get("steps", 0)


objects: list[Turns] = []


@pytest.fixture
def turns(registry):
    """A policy that may be wrong."""

    @mpicomp.register
    @dataclass(eq=False)
    class Registered(Turns):
        id: ClassVar[str] = "test-turns"

    return Registered


@pytest.mark.parametrize(
    ("wrong", "law", "message"),
    [
        ("reasons", "ranks_have_the_same_plans", "plans differ at step 0"),
        ("forgets", "it_goes_on_after_a_checkpoint", "takes the place of"),
        ("keeps an array", "it_goes_on_after_a_checkpoint", "state_dict must hold JSON's types"),
        ("waits", "a_step_does_not_wait", "in 20 of 20 steps ranks waited"),
    ],
)
def test_wrong_policies_are_found(turns, wrong, law, message):
    for check in checks(turns()):
        check()
    check_is_found(turns(wrong=wrong), law, message)
