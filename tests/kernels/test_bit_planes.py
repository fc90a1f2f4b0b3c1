import numpy as np
import pytest
from mpicomp.kernels.cpu.bit_planes import read_planes, write_planes


@pytest.mark.parametrize("planes", range(1, 9))
@pytest.mark.parametrize("groups", [0, 1, 2, 16])
def test_planes_are_what_the_definition_says_and_are_read_back(planes, groups):
    codes = np.random.default_rng(planes).integers(0, 1 << planes, 64 * groups).astype(np.uint8)
    words = np.full(planes * groups, 0xDEADBEEFDEADBEEF, np.uint64)
    write_planes(codes, groups, planes, words, 0)
    expected = [
        sum((int(code) >> plane & 1) << place for place, code in enumerate(codes[64 * group : 64 * group + 64]))
        for group in range(groups)
        for plane in range(planes)
    ]
    assert words.tolist() == expected
    back = np.full(64 * groups + 5, 99, np.uint8)
    read_planes(words, 0, groups, planes, back)
    assert back[: 64 * groups].tolist() == codes.tolist()
    assert (back[64 * groups :] == 99).all()


def test_from_some_word_on_and_as_many_groups_as_are_asked_for():
    codes = np.arange(256).astype(np.uint8) % 4
    words = np.full(7, 99, np.uint64)
    write_planes(codes[3:], 1, 2, words, 3)
    planes = [sum((code >> plane & 1) << j for j, code in enumerate(codes[3:67].tolist())) for plane in range(2)]
    assert words.tolist() == [99, 99, 99, *planes, 99, 99]
    back = np.full(100, 99, np.uint8)
    read_planes(words, 3, 1, 2, back)
    assert back.tolist() == [*codes[3:67].tolist(), *[99] * 36]
