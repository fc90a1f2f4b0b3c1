"""Tables of what is asked of every compressor; what one of them alone does is in a file of its name."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
from worlds import Ranks

import mpicomp
from mpicomp import get_compressor
from mpicomp.compressors import COMPRESSORS, compressor_class
from mpicomp.errors import ConfigurationError, IncompatiblePairError, UnknownNameError
from mpicomp.testing import checks

# Settings whose arithmetic differs; those of the defaults are in tests/test_testing.py.
FORMS = [
    mpicomp.DGC(ratio=0.05, momentum=0.9, clip=1.0),
    mpicomp.MaxNorm(bits=6),
    mpicomp.OneBit(block=64),
    mpicomp.PowerSGD(rank=2, wire="bf16"),
    mpicomp.QSGD(bits=2, norm="l2", bucket=64),
    mpicomp.QSGD(bits=3, rounding="nearest", bucket=2048),
    mpicomp.SignSGD(scale=0.01),
    mpicomp.TernGrad(clip=None),
    mpicomp.Uniform(bits=1, rounding="stochastic"),
]


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=f"{form}-{check.__name__}") for form in FORMS for check in checks(form)],
)
def test_compressor_keeps_the_laws_of_its_kind(check):
    check()


RATIO = r"ratio is the kept fraction and must be in \(0, 1\], got "
REFUSED = [
    ("blockrandomk", "ratio", [0], RATIO),
    ("blockrandomk", "wire", ["int8"], "wire must be "),
    ("dense", "wire", ["int8"], "wire must be None, 'fp16' or 'bf16', got 'int8'"),
    ("dgc", "clip", [0], "clip must be above 0, or None"),
    ("dgc", "clip", [-1, "1"], "clip must be a number from 0 to inf, got "),
    ("dgc", "masking", [None], "masking must be True or False, got None"),
    ("dgc", "momentum", [-0.1], "momentum must be a number from 0 to 1, got -0.1"),
    ("dgc", "nesterov", ["yes"], "nesterov must be True or False, got 'yes'"),
    ("dgc", "sample", [1.5], "sample must be a number from 0 to 1, got 1.5"),
    ("mstopk", "samplings", [0, -1, 2.5, True, None], "samplings must be an integer of at least 1, got "),
    ("onebit", "bits", [0, 5, 1.0, "1", None, True], "bits must be a whole number from 1 to 4, got "),
    ("onebit", "block", [0, -64, 1, 100, 64.0, True, "64"], "block must be a multiple of 64, got "),
    ("powersgd", "layers", [["a"]], r"layers must map names to ranks, got \['a'\]"),
    ("powersgd", "layers", [{"a": 1.5}], r"layers\['a'\] must be an integer of at least 1, got 1.5"),
    ("powersgd", "rank", [0, True, 2.0], "rank must be an integer of at least 1, got "),
    ("powersgd", "rows", [0], "rows must be an integer of at least 1, got 0"),
    ("powersgd", "wire", ["fp8"], "wire must be None, 'fp16' or 'bf16'"),
    ("qsgd", "bits", [1, 9, 0, -2, 4.0, "4", None, True], "bits must be a whole number from 2 to 8, got "),
    ("qsgd", "bucket", [0, -64, 1, 100, 64.0, True], "bucket must be a multiple of 64, got "),
    ("qsgd", "layers", [{"a": 9}], r"layers\['a'\] must be a whole number from 2 to 8, got 9"),
    ("qsgd", "layers", [[3]], r"layers must map names to bits, got \[3\]"),
    ("qsgd", "norm", ["l1"], "norm must be 'max' or 'l2', got 'l1'"),
    ("qsgd", "rounding", ["up"], "rounding must be 'stochastic' or 'nearest', got 'up'"),
    ("redsync", "search", ["linear"], "search must be 'binary' or 'trimmed', got 'linear'"),
    ("sidco", "distribution", ["normal"], "distribution must be 'exponential', 'gamma' or 'pareto', got 'normal'"),
    ("sidco", "stages", [0, 2.5], "stages must be None or a number from 1 to 64, got "),
    ("signsgd", "scale", [0, -1.0, True, None, "1", math.nan, math.inf], "scale must be a positive number, got "),
    ("terngrad", "clip", [0, -1, True, "2.5", math.nan, math.inf], "clip must be None or a positive number, got "),
    ("topk", "ratio", [0, 0.0, -0.1, 1.0001, 2, math.nan, math.inf, None, "0.1", True], RATIO),
    ("threshold", "limit", [-1, math.nan, None, "1", True], "limit must be a number from 0 to inf, got"),
    ("uniform", "bits", [0, 9, 8.0, "8", None, True], "bits must be a whole number from 1 to 8, got "),
    ("uniform", "bucket", [0, 1, 100, 64.0], "bucket must be a multiple of 64, got "),
]


@pytest.mark.parametrize(
    ("name", "setting", "value", "text"),
    [(name, setting, value, text) for name, setting, values, text in REFUSED for value in values],
)
def test_compressor_with_a_bad_setting_is_refused(name, setting, value, text):
    with pytest.raises(ConfigurationError, match=f"^{name}: {text}"):
        get_compressor({"id": name, setting: value})


@pytest.mark.parametrize(
    ("compressor", "advice"),
    [
        (mpicomp.MaxNorm(bits=6), r"MaxNorm\(.*rounding='nearest'\)"),
        (mpicomp.MaxNorm(norm="l2"), r"MaxNorm\(.*rounding='nearest'\)"),
        (mpicomp.QSGD(bits=4, bucket=512, norm="l2"), r"or use QSGD\(bucket=512, rounding='nearest'\)$"),
        (mpicomp.SignSGD(), "leave feedback out"),
        (mpicomp.TernGrad(), ""),
        (mpicomp.Uniform(bits=2), r"or use Uniform\(bits=3, bucket=64\)"),
    ],
    ids=str,
)
def test_compressor_without_feedback_is_refused_with_it(compressor, advice):
    assert not compressor.feedback
    assert not Ranks(1, compressor).reducers[0].feedback
    with pytest.raises(ConfigurationError, match=f"^{compressor.id}: .*{advice}"):
        Ranks(1, compressor, feedback=True)


def test_momentum_without_feedback_is_refused():
    with pytest.raises(ConfigurationError, match="momentum correction"):
        Ranks(1, {"id": "dgc", "momentum": 0.9}, feedback=False)


@pytest.mark.parametrize(
    ("compressor", "sizes"),
    [  # words of 64 signs, then a magnitude, padded to 8
        (mpicomp.OneBit(block=None), {0: 0, 1: 16, 64: 16, 65: 24, 1024: 136}),
        # words of 64 signs, then magnitudes of 4 bytes in pairs
        (mpicomp.OneBit(block=64), {0: 0, 1: 16, 64: 16, 65: 24, 128: 24}),
        (mpicomp.OneBit(block=1024), {1024: 136, 2049: 280}),
        (mpicomp.OneBit(block=64, bits=3), {0: 0, 1: 48, 65: 72, 128: 72}),
        # as many words for 64 elements as an element has bits, then steps of 4 bytes in pairs
        (mpicomp.QSGD(bits=4, bucket=128), {0: 0, 1: 40, 128: 72, 129: 104}),
        (mpicomp.QSGD(bits=2, bucket=64), {256: 80}),
        (mpicomp.QSGD(bits=8, bucket=256), {1024: 1040}),
    ],
    ids=str,
)
def test_quantiser_packs_into_the_bytes_of_its_format(compressor, sizes):
    assert {numel: compressor.packed_bytes(numel) for numel in sizes} == sizes


@pytest.mark.parametrize(
    ("compressor", "itemsize", "expected"),
    [
        (mpicomp.GlobalRandKMaxNorm(ratio=0.05), 4, 0.05),
        (mpicomp.OneBit(), 4, 1 / 8 + 4 / 1024),
        (mpicomp.OneBit(block=4096), 8, 1 / 8 + 4 / 4096),
        *((mpicomp.QSGD(bits=b, bucket=n), 8, b / 8 + 4 / n) for b in range(2, 9) for n in (64, 128, 1024)),
        (mpicomp.PowerSGD(rank=2), 4, 2 * 2 / 1024 * 4),
        (mpicomp.PowerSGD(rank=2, rows=64), 4, 16 * (64 + 1024) * 2 / 1024**2 * 4),
        (mpicomp.SignSGD(), 4, 1 / 8),
        (mpicomp.TernGrad(), 4, 2 / 8),
        (mpicomp.Threshold(wire="fp16", indices="plain"), 4, 0.06),
        *((mpicomp.Uniform(bits=b, bucket=n), 8, b / 8 + 8 / n) for b in range(1, 9) for n in (64, 256, 1024)),
    ],
    ids=str,
)
def test_compressor_predicts_its_bytes_an_element(compressor, itemsize, expected):
    assert compressor.wire_bytes_per_element(itemsize) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "collectives", "advice"),
    [
        ("onebit", ["allreduce"], "use two-phase, packed-allgather or "),
        ("powersgd", ["allgather"], "use low-rank"),
        ("signsgd", ["allreduce", "two-phase", "hierarchical"], "use packed-allgather"),
    ],
)
def test_compressor_with_another_collective_is_refused(name, collectives, advice):
    for collective in collectives:
        with pytest.raises(IncompatiblePairError, match=f"{name}: does not fit collective '{collective}'.*{advice}"):
            Ranks(1, name, collective)


@pytest.mark.quick
@pytest.mark.parametrize("name", mpicomp.list_compressors())
def test_registry_configuration_round_trip(name):
    compressor = mpicomp.get_compressor(name)
    again = mpicomp.get_compressor(compressor.get_config())
    assert again == compressor
    assert hash(again) == hash(compressor)
    assert eval(repr(compressor), {cls.__name__: cls for cls in [compressor_class(name)]}) == compressor
    assert mpicomp.get_compressor(compressor) is compressor


@pytest.mark.quick
def test_registry_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="'topkk'; did you mean 'topk'") as caught:
        mpicomp.get_compressor("topkk")
    assert caught.value.name == "topkk"
    with pytest.raises(ValueError, match="'ration'; did you mean 'ratio'"):
        mpicomp.get_compressor({"id": "topk", "ration": 0.1})
    with pytest.raises(ConfigurationError, match="under 'id'"):
        mpicomp.get_compressor({"ratio": 0.1})


@pytest.mark.quick
def test_registry_id_of_another_class_is_refused():
    with pytest.raises(ConfigurationError, match="'topk' is already"):

        @mpicomp.register
        @dataclass(frozen=True)
        class Other(mpicomp.TopK):
            id: ClassVar[str] = "topk"


@pytest.mark.quick
def test_mpicomp_has_the_class_of_every_compressor(monkeypatch):
    built_in = [name for name in mpicomp.list_compressors() if COMPRESSORS.plugin(name) is None]
    for cls in map(compressor_class, built_in):
        monkeypatch.delitem(vars(mpicomp), cls.__name__, raising=False)
        assert getattr(mpicomp, cls.__name__) is cls
    with pytest.raises(AttributeError, match="module 'mpicomp' has no attribute 'TopKK'"):
        mpicomp.TopKK  # noqa: B018
