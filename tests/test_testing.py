"""The compressor kit passes every compressor there is, and catches each way to be wrong."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from schemes import OWN, UNBIASED, USERS

import mpicomp
from mpicomp.compressors import SharedSparsifier
from mpicomp.registry import COMPRESSORS
from mpicomp.testing import check_compressor, checks

ALL = [
    pytest.param(check, id=f"{compressor}-{check.__name__}")
    for compressor in OWN + UNBIASED + USERS
    for check in checks(compressor)
]


@pytest.mark.parametrize("check", ALL)
def test_every_compressor(check):
    check()


def test_every_registered_compressor_is_tested():
    tested = {compressor.id for compressor in OWN + UNBIASED}
    assert {name for name in mpicomp.list_compressors() if not name.startswith("test-")} - {"magnitude-limit"} == tested


@pytest.fixture
def registry(monkeypatch):
    """Names that are registered in a test are gone after it."""
    monkeypatch.setattr(COMPRESSORS, "_classes", dict(COMPRESSORS._classes))


def broken(change):
    """A top-k with one thing wrong with it."""

    @mpicomp.register
    @dataclass(frozen=True)
    class Broken(mpicomp.TopK):
        id: ClassVar[str] = "test-broken"

        def select(self, accumulated, scope):
            return change(super().select(accumulated, scope), accumulated, scope)

    return Broken(ratio=0.05)


def reversed_indices(selection, accumulated, scope):
    return mpicomp.Selection(selection.indices[::-1].copy(), selection.values[::-1].copy())


def other_values(selection, accumulated, scope):
    return mpicomp.Selection(selection.indices, 2 * selection.values)


def one_less(selection, accumulated, scope):
    return mpicomp.Selection(selection.indices[1:], selection.values[1:])


def signed_indices(selection, accumulated, scope):
    return mpicomp.Selection(selection.indices.astype(np.int64), selection.values)


def writes_to_the_sum(selection, accumulated, scope):
    accumulated.array()[selection.indices] = 0
    return selection


def keeps_an_array(selection, accumulated, scope):
    scope.memory["last"] = selection.indices
    return selection


def depends_on_the_call(selection, accumulated, scope):
    calls.append(1)
    if len(calls) % 2:
        return selection
    indices = np.flatnonzero(np.arange(accumulated.numel) < selection.indices.size).astype(np.uint32)
    return mpicomp.Selection(indices, accumulated.array()[indices])


def fails_on_nan(selection, accumulated, scope):
    assert accumulated.finite, "this one wants finite gradients"
    return selection


calls: list[int] = []


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
def test_what_is_wrong_is_found(change, law, message):
    calls.clear()
    [check] = [check for check in checks(broken(change)) if check.__name__ == law]
    with pytest.raises((AssertionError, TypeError, mpicomp.MpicompError), match=message):
        check()


@pytest.mark.usefixtures("registry")
def test_positions_that_differ_between_ranks():
    @mpicomp.register
    @dataclass(frozen=True)
    class Own(SharedSparsifier):
        id: ClassVar[str] = "test-own"
        paper: ClassVar[str] = "none"

        def count(self, numel):
            return max(1, numel // 10)

        def positions(self, numel, scope, out):
            out[:] = np.sort(scope.random(shared=False).choice(numel, out.size, replace=False))

    with pytest.raises(AssertionError, match="positions differ between ranks"):
        check_compressor(Own())


@pytest.mark.usefixtures("registry")
def test_feedback_that_does_not_contract():
    @mpicomp.register
    @dataclass(frozen=True)
    class Scaled(SharedSparsifier):
        id: ClassVar[str] = "test-scaled"
        paper: ClassVar[str] = "none"

        def count(self, numel):
            return max(1, numel // 10)

        def positions(self, numel, scope, out):
            out[:] = np.sort(scope.random(shared=True).choice(numel, out.size, replace=False))

        def weights(self, numel):
            return 10.0

    with pytest.raises(AssertionError, match="more is kept back than there was"):
        check_compressor(Scaled())


@pytest.mark.usefixtures("registry")
def test_what_is_not_right_on_the_average():
    @mpicomp.register
    @dataclass(frozen=True)
    class Nearest(mpicomp.QSGD):
        """Says that it rounds at random, and does not."""

        id: ClassVar[str] = "test-nearest"

        def pack(self, array, message, sent, key):
            return mpicomp.QSGD(rounding="nearest").pack(array, message, sent, key)

    @mpicomp.register
    @dataclass(frozen=True)
    class Shrinking(mpicomp.Natural):
        """Right but for a hundredth, towards zero."""

        id: ClassVar[str] = "test-shrinking"

        def pack(self, array, message, sent, key):
            return super().pack(array * array.dtype.type(0.99), message, sent, key)

    for compressor in (Nearest(), Shrinking()):
        [check] = [check for check in checks(compressor) if check.__name__ == "unbiased"]
        with pytest.raises(AssertionError, match=r"off by [\d.]+ standard errors"):
            check()


@pytest.mark.usefixtures("registry")
def test_random_rounding_that_does_not_contract_on_the_average():
    @mpicomp.register
    @dataclass(frozen=True)
    class Coarse(mpicomp.QSGD):
        id: ClassVar[str] = "test-coarse"
        contractive: ClassVar[bool] = True
        bits: int = 3
        bucket: int = 128
        norm: str = "l2"

    [check] = [check for check in checks(Coarse()) if check.__name__ == "feedback_contracts"]
    with pytest.raises(AssertionError, match="more is kept back than there was"):
        check()


@pytest.mark.usefixtures("registry")
def test_a_parameter_without_a_default():
    @mpicomp.register
    @dataclass(frozen=True)
    class Bare(mpicomp.TopK):
        id: ClassVar[str] = "test-bare"

        def get_config(self):
            return {"id": self.id}

    with pytest.raises(AssertionError, match="does not give an equal compressor"):
        check_compressor(Bare(ratio=0.3))
