import pytest

import mpicomp
from mpicomp.collectives import bind, fitting, variants
from mpicomp.errors import ConfigurationError, IncompatiblePairError, UnknownNameError


def test_pair_that_does_not_fit_is_refused_naming_others():
    with pytest.raises(
        IncompatiblePairError, match=r"topk: does not fit collective 'allreduce'.*use allgather, star-topk, .* or hier"
    ):
        bind(mpicomp.TopK(), "allreduce")
    with pytest.raises(
        IncompatiblePairError, match=r"dense: does not fit.*use allreduce, scatter-reduce, ring, .* or hier"
    ):
        bind(mpicomp.Dense(), "star-topk")


@pytest.mark.parametrize("collective", ["ring", "recursive-doubling"])
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_sixteen_bits_on_many_hops_are_refused(collective, wire):
    for compressor in (mpicomp.Dense(wire=wire), mpicomp.RandomK(wire=wire)):
        assert collective not in fitting(compressor)
        with pytest.raises(IncompatiblePairError, match=rf"wire='{wire}'\).*'{collective}'.*use allreduce"):
            bind(compressor, collective)
    with pytest.raises(IncompatiblePairError, match=f"wire='{wire}'"):
        bind(mpicomp.TopK(wire=wire), f"star-topk:{collective}")
    assert collective in fitting(mpicomp.Dense)


def test_hierarchical_refuses_compressors_tied_to_positions():
    for compressor in (mpicomp.TopK(layers={"bias": 1.0}), mpicomp.DGC(momentum=0.9)):
        assert "hierarchical" not in fitting(compressor)
        with pytest.raises(IncompatiblePairError, match=r"(TopK|DGC)\(.*does not fit collective 'hierarchical'"):
            bind(compressor, "hierarchical")
    assert "hierarchical" in fitting(mpicomp.DGC(momentum=0.9, masking=False))


def test_collective_on_itself_is_refused():
    for name in ("hierarchical:hierarchical", "hierarchical:star-topk:hierarchical:ring"):
        with pytest.raises(ConfigurationError, match="hierarchical: is not built on itself"):
            bind(mpicomp.TopK(), name)
    for compressor in (mpicomp.TopK(), mpicomp.Dense(), mpicomp.RandomK()):
        names = variants(compressor)
        assert all(bind(compressor, name).id == name for name in names)
        assert not any(len(set(name.split(":"))) < len(name.split(":")) for name in names)


def test_unknown_collective_error_names_the_nearest():
    with pytest.raises(UnknownNameError, match="'allgater'; did you mean 'allgather'"):
        bind(mpicomp.TopK(), "allgater")
