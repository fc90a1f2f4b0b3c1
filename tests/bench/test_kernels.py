"""The rows of ``mpicomp bench kernels``; no time is asserted, only how times relate."""

import numpy as np
import pytest
from mpicomp.bench import kernels

from mpicomp.compressors import get_compressor
from mpicomp.compressors.kinds import Quantiser

NUMEL = 20_000
RATIOS = (0.01, 0.1)
FIXED = {"memcpy", "spectrum", "spectrum.sampled"}
BY_RATIO = {"decode", "indices.encode", "indices.decode", "numpy.argpartition"}


def of(ratio):
    """Give every sparsifier and quantiser, at a ratio where it has one."""
    made = [get_compressor(name) for name in kernels.measurable()]
    return [
        get_compressor({**entry.get_config(), "ratio": ratio}) if hasattr(entry, "ratio") else entry for entry in made
    ]


@pytest.fixture(scope="module")
def rows():
    compressors = of(RATIOS[0]) + [entry for entry in of(RATIOS[1]) if hasattr(entry, "ratio")]
    return kernels.measure(kernels.Settings(NUMEL, RATIOS, compressors, repeats=4))


def test_everything_has_its_rows(rows):
    found = {(row["name"], row["ratio"]) for row in rows}
    assert len(found) == len(rows)
    expected = {(name, None) for name in FIXED} | {(name, ratio) for name in BY_RATIO for ratio in RATIOS}
    for entry in of(RATIOS[0]):
        ratios = RATIOS if hasattr(entry, "ratio") else (None,)
        expected |= {(f"{entry.id}.compress", ratio) for ratio in ratios}
        if isinstance(entry, Quantiser):
            expected |= {(f"{entry.id}.pack", None), (f"{entry.id}.unpack", None)}
    assert found - {("torch.topk", ratio) for ratio in RATIOS} == expected


def test_torch_is_compared_with_where_it_is(rows):
    pytest.importorskip("torch")
    assert {("torch.topk", ratio) for ratio in RATIOS} <= {(row["name"], row["ratio"]) for row in rows}


def test_copies_are_medians_over_the_copy_of_the_same_run(rows):
    assert rows[0]["name"] == "memcpy"
    assert rows[0]["copies"] == 1
    for row in rows:
        assert row["numel"] == NUMEL
        assert row["copies"] == pytest.approx(row["median_s"] / rows[0]["median_s"])
        assert 0 < row["p25_s"] <= row["median_s"] <= row["p75_s"]
        assert row["threads"] == 1


def test_every_call_follows_a_copy(rows):
    assert rows[0]["repeats"] == sum(row["repeats"] for row in rows[1:])
    assert {row["repeats"] for row in rows[1:]} <= {3, 4}


def test_what_was_reached(rows):
    for row in rows:
        assert (row["ratio_reached"] is None) == (not row["name"].endswith(".compress"))
        if row["name"] in ("topk.compress", "randomk.compress"):
            assert row["ratio_reached"] == pytest.approx(row["ratio"])
        if row["ratio_reached"] is not None:
            assert 0 <= row["ratio_reached"] <= 1
        if row["config"] is not None:
            identity, what = row["name"].split(".")
            assert get_compressor(row["config"]).id == identity
            assert what in ("compress", "pack", "unpack")
        assert (row["config"] is None) == (row["name"] in FIXED | BY_RATIO | {"torch.topk"})


def test_bits_of_an_index_are_near_the_entropy(rows):
    for row in rows:
        assert (row["bits_per_index"] is None) == (not row["name"].startswith("indices."))
        if row["bits_per_index"] is not None:
            p = row["ratio"]
            entropy = -(np.log2(p) + (1 - p) / p * np.log2(1 - p))
            assert entropy < row["bits_per_index"] < entropy + 1.2
