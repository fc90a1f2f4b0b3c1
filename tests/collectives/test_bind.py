import pytest

import mpicomp
from mpicomp.collectives import bind, fitting
from mpicomp.errors import IncompatiblePairError, UnknownNameError


def test_pairs_that_do_not_fit_are_refused_naming_those_that_do():
    with pytest.raises(
        IncompatiblePairError, match=r"topk: does not fit collective 'allreduce'.*use allgather or star-topk"
    ):
        bind(mpicomp.TopK(), "allreduce")
    with pytest.raises(IncompatiblePairError, match=r"dense: does not fit.*use allreduce or scatter-reduce"):
        bind(mpicomp.Dense(), "star-topk")


def test_an_unknown_collective_gives_the_nearest():
    with pytest.raises(UnknownNameError, match="'allgater'; did you mean 'allgather'"):
        bind(mpicomp.TopK(), "allgater")


@pytest.mark.parametrize("name", mpicomp.list_compressors())
def test_every_compressor_has_a_collective(name):
    compressor = mpicomp.get_compressor(name)
    for collective in fitting(compressor):
        scheme = bind(compressor, collective)
        assert (scheme.id, scheme.compressor) == (collective, compressor)
