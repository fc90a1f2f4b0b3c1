"""The kit passes every compressor and collective there is, and catches each way to be wrong."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from schemes import OWN, UNBIASED, USERS

import mpicomp
from mpicomp.collectives import COLLECTIVES
from mpicomp.collectives.allreduce import Allreduce
from mpicomp.compressors import COMPRESSORS, SharedSparsifier
from mpicomp.errors import ConfigurationError
from mpicomp.policies import POLICIES, Static
from mpicomp.rounds import Round
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


def broken(change):
    """A top-k with one thing wrong with it."""

    @mpicomp.register
    @dataclass(frozen=True)
    class Broken(mpicomp.TopK):
        id: ClassVar[str] = "test-broken"

        def select(self, accumulated, context):
            return change(super().select(accumulated, context), accumulated, context)

    return Broken(ratio=0.05)


def reversed_indices(selection, accumulated, context):
    return mpicomp.Selection(selection.indices[::-1].copy(), selection.values[::-1].copy())


def other_values(selection, accumulated, context):
    return mpicomp.Selection(selection.indices, 2 * selection.values)


def one_less(selection, accumulated, context):
    return mpicomp.Selection(selection.indices[1:], selection.values[1:])


def signed_indices(selection, accumulated, context):
    return mpicomp.Selection(selection.indices.astype(np.int64), selection.values)


def writes_to_the_sum(selection, accumulated, context):
    accumulated.array()[selection.indices] = 0
    return selection


def keeps_an_array(selection, accumulated, context):
    context.memory["last"] = selection.indices
    return selection


def depends_on_the_call(selection, accumulated, context):
    calls.append(1)
    if len(calls) % 2:
        return selection
    indices = np.flatnonzero(np.arange(accumulated.numel) < selection.indices.size).astype(np.uint32)
    return mpicomp.Selection(indices, accumulated.array()[indices])


def fails_on_nan(selection, accumulated, context):
    assert accumulated.finite, "this one wants finite gradients"
    return selection


calls: list[int] = []


def check_is_found(broken, law, message):
    """Run one of the checks of an object, which has to find what is wrong with it."""
    [check] = [check for check in checks(broken) if check.__name__ == law]
    with pytest.raises((AssertionError, TypeError, mpicomp.MpicompError), match=message):
        check()


@pytest.mark.parametrize(
    ("change", "law", "message"),
    [
        (reversed_indices, "selection", "ascend"),
        (other_values, "selection", "values are not the array's"),
        (one_less, "selection", "count promises"),
        (signed_indices, "selection", "not uint32"),
        (writes_to_the_sum, "input_is_left_alone", "wrote to the sum"),
        (keeps_an_array, "memory", "memory must hold finite numbers"),
        (depends_on_the_call, "memory", "selects other elements"),
        (fails_on_nan, "awkward_arrays", "finite"),
        (writes_to_the_sum, "nothing_is_lost", "lost"),
        (other_values, "message", "lost energy"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_wrong_compressors_are_found(change, law, message):
    calls.clear()
    check_is_found(broken(change), law, message)


@pytest.mark.usefixtures("registry")
def test_positions_that_differ_between_ranks_are_found():
    @mpicomp.register
    @dataclass(frozen=True)
    class Own(SharedSparsifier):
        id: ClassVar[str] = "test-own"
        paper: ClassVar[str] = "none"

        def count(self, numel):
            return max(1, numel // 10)

        def positions(self, numel, context, out):
            out[:] = np.sort(context.random(shared=False).choice(numel, out.size, replace=False))

    check_is_found(Own(), "positions", "positions differ between ranks")


@pytest.mark.usefixtures("registry")
def test_feedback_that_does_not_contract_is_found():
    @mpicomp.register
    @dataclass(frozen=True)
    class Scaled(SharedSparsifier):
        id: ClassVar[str] = "test-scaled"
        paper: ClassVar[str] = "none"

        def count(self, numel):
            return max(1, numel // 10)

        def positions(self, numel, context, out):
            out[:] = np.sort(context.random(shared=True).choice(numel, out.size, replace=False))

        def weights(self, numel):
            return 10.0

    check_is_found(Scaled(), "feedback_contracts", "more is kept back than there was")


@pytest.mark.usefixtures("registry")
def test_biased_compressors_are_found():
    @mpicomp.register
    @dataclass(frozen=True)
    class Nearest(mpicomp.QSGD):
        """Says that it rounds at random, and does not."""

        id: ClassVar[str] = "test-nearest"

        def pack(self, array, message, sent, key):
            return mpicomp.QSGD(rounding="nearest").pack(array, message, sent, key)

    @mpicomp.register
    @dataclass(frozen=True)
    class Shrinking(mpicomp.QSGD):
        """Right but for a hundredth, towards zero."""

        id: ClassVar[str] = "test-shrinking"

        def pack(self, array, message, sent, key):
            return super().pack(array * array.dtype.type(0.99), message, sent, key)

    for compressor in (Nearest(), Shrinking()):
        check_is_found(compressor, "unbiased", r"off by [\d.]+ standard errors")


@pytest.mark.usefixtures("registry")
def test_rounding_that_does_not_contract_is_found():
    @mpicomp.register
    @dataclass(frozen=True)
    class Coarse(mpicomp.QSGD):
        id: ClassVar[str] = "test-coarse"
        contractive: ClassVar[bool] = True
        bits: int = 3
        bucket: int = 128
        norm: str = "l2"

    check_is_found(Coarse(), "feedback_contracts", "more is kept back than there was")


@pytest.mark.usefixtures("registry")
def test_configuration_that_loses_a_parameter_is_found():
    @mpicomp.register
    @dataclass(frozen=True)
    class Bare(mpicomp.TopK):
        id: ClassVar[str] = "test-bare"

        def get_config(self):
            return {"id": self.id}

    check_is_found(Bare(ratio=0.3), "configuration", "does not give an equal compressor")


def with_other_results(change):
    """An allreduce with one thing wrong with it."""

    @mpicomp.register
    class Broken(Allreduce):
        id: ClassVar[str] = "test-broken"

        def exchange(self, accumulated, context):
            result = yield from super().exchange(accumulated, context)
            change(result, context)
            return result

    return Broken


def other_bits(result, context):
    result.mean[0] += context.rank


def half_is_sent(result, context):
    result.sent = result.sent / 2


def half_arrives(result, context):
    result.mean *= 0.5


def array_is_written_to(result, context):
    result.sent[0] = 1
    result.mean[0] = 1


def another_gain(result, context):
    result.gain = 0.5


def own_energy(result, context):
    result.energy += context.rank


def bad_is_hidden(result, context):
    result.nonfinite = False


def stale_is_hidden(result, context):
    result.stale = False


def stale_is_taken_for_bad(result, context):
    result.nonfinite |= result.stale


@pytest.mark.parametrize(
    ("change", "law", "message"),
    [
        (other_bits, "nothing_is_lost", "means differ"),
        (half_is_sent, "nothing_is_lost", "what ranks sent is off the mean times ranks by"),
        (half_arrives, "nothing_is_lost", "what ranks sent is off the mean times ranks by"),
        (array_is_written_to, "nothing_is_lost", "arrays sum to something else than before|gain is 1.0, not"),
        (another_gain, "nothing_is_lost", "gain is 0.5, not 1"),
        (own_energy, "nothing_is_lost", "ranks get different results"),
        (bad_is_hidden, "one_bad_rank_is_seen_by_all", "nan on rank 0 is not seen by all"),
        (stale_is_hidden, "one_stale_rank_is_seen_by_all", "rank 0 is stale, and not all know it"),
        (stale_is_taken_for_bad, "one_stale_rank_is_seen_by_all", "taken for not finite"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_wrong_collectives_are_found(change, law, message):
    check_is_found(with_other_results(change), law, message)


@pytest.mark.usefixtures("registry")
def test_rounds_that_differ_from_the_exchange_are_found():
    @mpicomp.register
    class Shorter(Allreduce):
        id: ClassVar[str] = "test-broken"

        def rounds(self, numel, dtype, group, step=0):
            rounds = super().rounds(numel, dtype, group, step)
            return rounds if step == 0 else [Round("allreduce", (numel,), dtype) for _ in rounds]

    @mpicomp.register
    class Longer(Allreduce):
        id: ClassVar[str] = "test-longer"

        def rounds(self, numel, dtype, group, step=0):
            rounds = super().rounds(numel, dtype, group, step)
            return rounds if step == 0 else 2 * rounds

    for cls, message in ((Shorter, "sent .* rounds say"), (Longer, "rounds were")):
        check_is_found(cls, "bytes_are_those_of_rounds", message)


@pytest.mark.usefixtures("registry")
def test_collective_that_carries_nothing_is_found():
    @mpicomp.register
    class Idle(Allreduce):
        id: ClassVar[str] = "test-idle"
        messages: ClassVar[str] = "letters"

    check_is_found(Idle, "registered", "no built-in compressor has 'letters' messages")


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
        ("keeps an array", "it_goes_on_after_a_checkpoint", "state_dict must hold what JSON can"),
        ("waits", "a_step_does_not_wait", "in 20 of 20 steps ranks waited"),
    ],
)
def test_wrong_policies_are_found(turns, wrong, law, message):
    for check in checks(turns()):
        check()
    check_is_found(turns(wrong=wrong), law, message)


def test_policy_that_forgets_its_settings_is_found(turns, monkeypatch):
    monkeypatch.setattr(turns, "get_config", lambda self: {"id": self.id})
    monkeypatch.setattr(turns, "from_config", classmethod(lambda cls, settings: Static()))
    check_is_found(turns(), "configuration", "does not give an equal policy")
