"""What is compared in place of being described: any difference in it is found at the step that brings it."""

import numpy as np
import pytest

from mpicomp.arrays import describe
from mpicomp.errors import ArrayTypeError
from mpicomp.reducer.layout import SpecCache

torch = pytest.importorskip("torch")


def arrays():
    return {"w": torch.zeros(2, 3), "b": torch.zeros(3), "n": np.zeros(4, np.float32)}


def describer():
    known = SpecCache()
    known.describe(arrays())
    return known


def test_spec_cache_describes_equal_arrays_once():
    known = describer()
    assert known.describe(arrays()) is known.describe(arrays())
    assert known.describe(arrays()) == describe(arrays())


OTHERS = {
    "shape": {"b": torch.zeros(4)},
    "shape of as many elements": {"w": torch.zeros(3, 2)},
    "dtype": {"b": torch.zeros(3, dtype=torch.float64)},
    "library": {"b": np.zeros(3, np.float64)},
    "subclass": {"b": torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))},
    "name": {"c": torch.zeros(3)},
}


@pytest.mark.parametrize("what", OTHERS)
def test_spec_cache_describes_changed_arrays_again(what):
    known, given = describer(), arrays() | OTHERS[what]
    assert known.describe(given) == describe(given) != describe(arrays())
    assert known.describe(arrays()) == describe(arrays())


def test_spec_cache_sees_another_order():
    known, given = describer(), dict(reversed(arrays().items()))
    assert [member.name for member in known.describe(given)] == ["n", "b", "w"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(torch.zeros(3).to_sparse(), "dense"), (type("Fake", (), {"dtype": np.dtype("f4"), "shape": (4,)})(), "Fake")],
)
def test_spec_cache_refuses_wrong_arrays_at_any_step(wrong, message):
    known = describer()
    for _ in range(2):
        with pytest.raises(ArrayTypeError, match=message):
            known.describe(arrays() | {"n": wrong})


def test_spec_cache_sees_another_byte_order():
    known = SpecCache()
    known.describe({"n": np.zeros(4, "<f4")})
    with pytest.raises(ArrayTypeError, match="int32"):
        known.describe({"n": np.zeros(4, ">i4")})
    assert known.describe({"n": np.zeros(4, ">f4")}) == describe({"n": np.zeros(4, "<f4")})
