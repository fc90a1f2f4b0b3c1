from dataclasses import dataclass
from typing import ClassVar

import pytest

import mpicomp
from mpicomp.compressors import COMPRESSORS, compressor_class
from mpicomp.errors import ConfigurationError, UnknownNameError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", mpicomp.list_compressors())
def test_configuration_round_trip(name):
    compressor = mpicomp.get_compressor(name)
    again = mpicomp.get_compressor(compressor.get_config())
    assert again == compressor
    assert hash(again) == hash(compressor)
    assert eval(repr(compressor), {cls.__name__: cls for cls in [compressor_class(name)]}) == compressor
    assert mpicomp.get_compressor(compressor) is compressor
    assert isinstance(compressor.feedback, bool)


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(UnknownNameError, match="'topkk'; did you mean 'topk'") as caught:
        mpicomp.get_compressor("topkk")
    assert caught.value.name == "topkk"
    with pytest.raises(ValueError, match="'ration'; did you mean 'ratio'"):
        mpicomp.get_compressor({"id": "topk", "ration": 0.1})
    with pytest.raises(ConfigurationError, match="under 'id'"):
        mpicomp.get_compressor({"ratio": 0.1})


@pytest.mark.parametrize("ratio", [0, 0.0, -0.1, 1.0001, 2, float("nan"), float("inf"), None, "0.1", True])
def test_a_ratio_outside_its_range_is_refused(ratio):
    with pytest.raises(ConfigurationError, match=r"topk: ratio .* must be in \(0, 1\], got"):
        mpicomp.TopK(ratio=ratio)


def test_an_unknown_wire_is_refused():
    with pytest.raises(ConfigurationError, match="dense: wire must be None, 'fp16' or 'bf16', got 'int8'"):
        mpicomp.Dense(wire="int8")


def test_an_id_is_taken_once():
    with pytest.raises(ConfigurationError, match="'topk' is already"):

        @mpicomp.register
        @dataclass(frozen=True)
        class Other(mpicomp.TopK):
            id: ClassVar[str] = "topk"


def test_face_finds_the_class_of_every_compressor(monkeypatch):
    built_in = [name for name in mpicomp.list_compressors() if COMPRESSORS.plugin(name) is None]
    for cls in map(compressor_class, built_in):
        monkeypatch.delitem(vars(mpicomp), cls.__name__, raising=False)
        assert getattr(mpicomp, cls.__name__) is cls
    with pytest.raises(AttributeError, match="module 'mpicomp' has no attribute 'TopKK'"):
        mpicomp.TopKK  # noqa: B018
