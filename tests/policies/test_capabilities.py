"""Policies ask compressors what they can, and name none: a user's own gets what a built-in one gets."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from networks import Link
from worlds import Ranks

import mpicomp
from mpicomp.compressors import COMPRESSORS
from mpicomp.policies import get_policy
from mpicomp.policies.ratio_levels import suggested_compressors

ROOT = Path(__file__).resolve().parents[2] / "mpicomp"
FILES = sorted((ROOT / "policies").glob("*.py"))
OURS = {cls.__name__: cls.id for cls in COMPRESSORS.classes() if COMPRESSORS.plugin(cls.id) is None}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_policy_names_no_compressor(path):
    """Dense is always a candidate, and one place says what is varied where nothing is named."""
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & OURS.keys()
    assert names <= ({"Dense", "TopK"} if path.name == "ratio_levels.py" else {"Dense"})
    compared = [node for compare in ast.walk(tree) if isinstance(compare, ast.Compare) for node in ast.walk(compare)]
    words = {node.value for node in compared if isinstance(node, ast.Constant)}
    assert words & set(OURS.values()) <= {"dense"}  # which is a kind of message, too


@pytest.fixture
def registry(monkeypatch):
    """Names that are registered in a test are gone after it."""
    COMPRESSORS.names()  # built-in ones are there to stay
    monkeypatch.setattr(COMPRESSORS, "_classes", dict(COMPRESSORS._classes))


@pytest.mark.usefixtures("registry")
def test_compressor_with_layer_ratios_fits_lgreco_and_accordion():
    @mpicomp.register
    @dataclass(frozen=True, repr=False)
    class Layered(mpicomp.Sparsifier):
        id: ClassVar[str] = "test-layered"
        paper: ClassVar[str] = "none"
        layer_setting: ClassVar[str | None] = "ratio"
        ratio: float = 0.05
        layers: dict | None = None

        def count(self, numel):
            return mpicomp.TopK(self.ratio).count(numel)

        def select(self, accumulated, context):
            return mpicomp.TopK(self.ratio).select(accumulated, context)

    for name in ("lgreco", "accordion"):
        ranks = Ranks(2, Layered(), policy=name)
        assert ranks.reducers[0].compressor == Layered()
    with pytest.raises(
        mpicomp.errors.ConfigurationError, match="needs a compressor with a ratio, a rank or bits for each"
    ):
        Ranks(2, mpicomp.SIDCo(), policy="lgreco")


@pytest.mark.usefixtures("registry")
def test_what_a_compressor_suggests_is_a_candidate():
    before = suggested_compressors(None)

    @mpicomp.register
    @dataclass(frozen=True, repr=False)
    class Half(mpicomp.OneBit):
        id: ClassVar[str] = "test-half"

        @classmethod
        def suggested(cls, normalises=True):
            return [cls(block=64)]

    wires, quantisers = suggested_compressors(None)
    assert wires == before[0]
    assert quantisers == [*before[1], Half(block=64)]
    ranks = Ranks(2, policy="auto", network=Link(1e-5, 1e9))
    assert get_policy("auto").id == ranks.reducers[0].policy.id
