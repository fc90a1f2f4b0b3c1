"""Hooks that `Compressor.bind` has replaced."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from worlds import Ranks

import mpicomp


def test_they_answer_as_bind_does():
    names, sizes, shapes = ["w", "b"], [64 * 32, 64], [(64, 32), (64,)]
    with pytest.warns(DeprecationWarning, match="within is now a part of Compressor.bind"):
        found = mpicomp.PowerSGD(rank=2).within(names, sizes, shapes)
    assert found == mpicomp.PowerSGD(rank=2).bind(names, sizes, shapes)
    with pytest.warns(DeprecationWarning, match="settled"):
        assert mpicomp.PowerSGD(start_step=9).settled.start_step == 0
    with pytest.warns(DeprecationWarning, match="of_length"):
        assert mpicomp.TopK(ratio=0.1).of_length(100).count(100) == 10
    model = {"out": 500, "c": 9000, "b": 9000, "a": 9000, "in": 20}
    with pytest.warns(DeprecationWarning, match="within"):
        placed = mpicomp.LGC(ratio=0.1).within_model(list(model), list(model.values())).within(["out"], [500])
    assert placed == mpicomp.LGC(ratio=0.1).bind(["out"], [500], model=model)


def test_a_class_that_has_them_is_still_bound_by_them():
    with pytest.warns(DeprecationWarning, match="OddOnes.settled is now a part of"):

        @dataclass(frozen=True, repr=False)
        class OddOnes(mpicomp.Sparsifier):
            id: ClassVar[str] = "test-odd-ones"
            paper: ClassVar[str] = "none: a user's own"
            odd: int = 0
            first: bool = True

            @property
            def settled(self):
                return replace(self, first=False)

            def within(self, names, sizes, shapes=()):
                return replace(self, odd=1 if list(names) == ["weights"] else 0)

            def count(self, numel):
                return len(range(self.odd, numel, 2))

            def select(self, accumulated, context):
                array = accumulated.array()
                indices = np.arange(self.odd, array.size, 2, dtype=np.uint32)
                return mpicomp.Selection(indices, array[indices])

    assert OddOnes().bind(["bias"], [4], warm_up=False) == OddOnes(odd=0, first=False)
    ranks = Ranks(2, OddOnes(), "allgather")
    (mean, _) = ranks.reduce([{"weights": np.arange(4, dtype=np.float32)} for _ in range(2)])
    assert mean["weights"].tolist() == [0, 1, 0, 3]
