import numpy as np
import pytest
from mpicomp.kernels.cpu.planes import read_planes, write_planes


@pytest.mark.parametrize("planes", range(1, 9))
@pytest.mark.parametrize("groups", [0, 1, 2, 16])
def test_planes_are_what_the_definition_says_and_are_read_back(planes, groups):
    codes = np.random.default_rng(planes).integers(0, 1 << planes, 64 * groups).astype(np.uint8)
    words = np.full(planes * groups, 0xDEADBEEFDEADBEEF, np.uint64)
    write_planes(codes, planes, words)
    expected = [
        sum((int(code) >> plane & 1) << place for place, code in enumerate(codes[64 * group : 64 * group + 64]))
        for group in range(groups)
        for plane in range(planes)
    ]
    assert words.tolist() == expected
    back = np.full(64 * groups + 5, 99, np.uint8)
    read_planes(words, planes, back)
    assert back[: 64 * groups].tolist() == codes.tolist()
    assert (back[64 * groups :] == 99).all()


def test_of_longer_arrays_only_what_there_are_words_for():
    codes = np.arange(256).astype(np.uint8) % 4
    words = np.empty(2, np.uint64)
    write_planes(codes[3:], 2, words)
    assert words.tolist() == [
        sum((code >> plane & 1) << j for j, code in enumerate(codes[3:67].tolist())) for plane in range(2)
    ]
