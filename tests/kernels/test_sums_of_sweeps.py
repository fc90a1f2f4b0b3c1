"""Sums have the same bits at every call, and their memory serves again."""

import numpy as np
import pytest
from device import emulator
from marks import slow
from mpicomp.kernels import gpu

SWEEPS = {
    "accumulate": ["accumulate"],
    "logarithms": ["logarithms"],
    "tail_statistics": ["tail_statistics"],
    "energy": ["energy"],
    "scale": ["scale"],
    "share_rounding": ["share_rounding"],
    "narrow": ["narrow_fp16"],
    "pack_signs": ["pack_signs"],
    "pack_grid": ["measure_norms", "pack_codes"],
}


def arguments_of(place, name, array):
    size, kind = array.size, array.dtype
    there, other, out = place.put(array), place.put(array[::-1]), place.empty(size, kind)
    words = place.empty(-(-size // 64), np.uint64)
    return {
        "accumulate": lambda: (there, other, out),
        "logarithms": lambda: (there, 2),
        "tail_statistics": lambda: (there, 0.5),
        "energy": lambda: (there,),
        "scale": lambda: (there, 1.0),
        "share_rounding": lambda: (there, place.put(array), 3, other, place.put(array)),
        "narrow": lambda: (there, "fp16", place.empty(size, np.uint16), out),
        "pack_signs": lambda: (there, 640, place.empty(-(-size // 640), np.float32), words),
        "pack_grid": lambda: (
            *(there, 512, 4, "max", place.empty(-(-size // 512), np.float32)),
            *(place.empty(4 * words.size, np.uint64), out, 3),
        ),
    }[name]()


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize("name", SWEEPS)
def test_sums_have_the_same_bits_at_every_call(place, dtype, name):
    """The emulation runs blocks and threads in another order every time; the last block makes the sums."""
    array = np.random.default_rng(0).laplace(size=50_000).astype(dtype)
    arguments, runs = arguments_of(place, name, array), set()
    for _ in range(4):
        emulator.launches.clear()
        with place.quiet():
            result = getattr(gpu, name)(*arguments)
        assert not place.emulated or emulator.launches == SWEEPS[name]
        runs.add(tuple(number.item() for number in (result if isinstance(result, tuple | list) else (result,))))
    assert len(runs) == 1
    assert all(np.isfinite(runs.pop()))


@pytest.mark.parametrize("size", [0, 1, 4097, 30_011])
def test_memory_of_sums_serves_again(place, size):
    """A launch leaves the ticket as it found it, and takes over nothing of what the one before left."""
    workspace, bound = gpu.Workspace(max(size, 1), 0, np.float32), place.zeros(1, np.uint64)
    rng = np.random.default_rng(size)
    for _ in range(3):
        array = rng.laplace(size=max(size, 1)).astype(np.float32)
        out, chosen = place.empty(array.size, np.float32), (place.empty(1, np.uint32), place.empty(1, np.float32))
        stats = gpu.topk(place.put(array), None, out, bound, gpu.Output(*chosen), workspace, bound)
        moments = gpu.accumulate(place.put(array), None, out)
        assert [x.item() for x in stats[:4]] == [x.item() for x in moments]
        assert workspace.moments.memory.view(np.uint64).get()[0] == 0
