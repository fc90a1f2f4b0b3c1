"""Selections whose arrays are on a device: what they read of it, and the kernels that do everything at once."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from device import emulator
from device.kinds import largest
from marks import slow
from mpicomp.kernels import gpu

import mpicomp
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece, Velocity
from mpicomp.compressors.context import Context
from mpicomp.gpu.cuda import CudaDevice
from mpicomp.gpu.device import Device, activated
from mpicomp.workspace import Workspace

STEPS = 5


def fused_workspaces(context):
    return [made for made in context.workspace._objects.values() if isinstance(made, gpu.Workspace)]


def alike(first, second):
    """Whether two arrays have the same bits."""
    word = np.uint32 if first.dtype == np.float32 else np.uint64
    np.testing.assert_array_equal(first.view(word), second.view(word))


# The kernels of the host, by way of arrays that are opaque: the general way.


@pytest.fixture
def opaque(eager):
    gpu = CudaDevice(0)
    with gpu.active():
        yield SimpleNamespace(cupy=eager, device=gpu)


LISTED = [  # with the most reads that a step may take, after the first ones
    (mpicomp.TopK(ratio=0.02), 2),
    (mpicomp.TopK(ratio=0.02, layers={"b": 0.1}), 3),
    (mpicomp.Threshold(limit=4.0), 2),
    (mpicomp.Threshold(limit=0.0), 1),
    (mpicomp.SIDCo(ratio=0.02), 5),
    (mpicomp.SIDCo(ratio=0.02, distribution="gamma", stages=2), 6),
    (mpicomp.GaussianK(ratio=0.02), 6),
    (mpicomp.RedSync(ratio=0.02), 6),
    (mpicomp.RedSync(ratio=0.02, search="trimmed"), 8),
    (mpicomp.MSTopK(ratio=0.02), 32),
    (mpicomp.DGC(ratio=0.02, sample=0.2), 5),
    (mpicomp.DGC(ratio=0.3), 5),
]


def select_on_both(opaque, compressor, here, there, gradient, residual=None, cuts=()):
    """Select on the host and on the device, compare, and return the host's sum and selection."""
    size, dtype = gradient.size, gradient.dtype
    host = Accumulated(np.empty(size + TRAILER, dtype), residual, [Piece(0, gradient)])
    with activated(Device()):
        expected = compressor.select(host, here)
    pieces = [Piece(a, opaque.cupy.asarray(gradient[a:b])) for a, b in pairwise((0, *cuts, size))]
    memory = None if residual is None else opaque.cupy.asarray(residual)
    before = opaque.cupy.reads
    found = compressor.select(Accumulated(opaque.cupy.empty(size + TRAILER, dtype), memory, pieces), there)
    assert opaque.cupy.reads == before, "numbers are read one by one"
    np.testing.assert_array_equal(found.indices.get(), expected.indices)
    alike(found.values.get(), expected.values)
    return host, expected


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize(("compressor", "reads"), LISTED, ids=str)
def test_steps_select_what_the_host_does(opaque, compressor, reads, dtype):
    size, cut = 6000, 5000
    if isinstance(compressor, mpicomp.TopK):
        compressor = compressor.bind(["a", "b"], [cut, size - cut])
    rng, taken, residual = np.random.default_rng(0), [], np.zeros(size, dtype)
    here, there = Context(), Context(workspace=Workspace(opaque.device))
    for step in range(STEPS):
        here.step = there.step = step
        before, gradient = opaque.device.reads, rng.laplace(size=size).astype(dtype)
        host, expected = select_on_both(opaque, compressor, here, there, gradient, residual, [cut])
        taken.append(opaque.device.reads - before)
        assert all(isinstance(value, float | int | list) for value in there.memory.values())
        residual = host.array().copy()
        residual[expected.indices] = 0
    assert max(taken[1:]) <= reads, taken


@pytest.mark.parametrize("kind", ["zeros", "few", "infinite", "equal"])
@pytest.mark.parametrize("compressor", [compressor for compressor, _ in LISTED[1:]], ids=str)
def test_what_is_not_smooth_is_selected_as_on_the_host(opaque, compressor, kind):
    rng = np.random.default_rng(0)
    array = {
        "zeros": lambda: np.zeros(3000),
        "few": lambda: np.where(rng.random(3000) < 0.001, 5.0, 0.0),
        "infinite": lambda: np.where(np.arange(3000) == 7, np.inf, rng.laplace(size=3000)),
        "equal": lambda: rng.choice([-4.5, 4.5], 3000),
    }[kind]().astype(np.float32)
    here, there = Context(), Context(workspace=Workspace(opaque.device))
    for _ in range(2):
        select_on_both(opaque, compressor, here, there, array)


SHARED = [mpicomp.RandomK(ratio=0.3), mpicomp.BlockRandomK(ratio=0.7), mpicomp.GlobalRandKMaxNorm(ratio=0.3)]


@pytest.mark.parametrize("compressor", SHARED, ids=str)
def test_positions_are_those_of_the_host(opaque, compressor):
    count = compressor.count(1000)
    for step in range(3):
        expected = np.empty(count, np.uint32)
        with activated(Device()):
            compressor.positions(1000, Context(step=step), expected)
        found = compressor.drawn(1000, Context(step=step, workspace=Workspace(opaque.device)))
        np.testing.assert_array_equal(found.get(), expected)


# The kernels of a device.


@pytest.fixture
def there(place):
    made = CudaDevice(0)
    made.place = place
    with made.active():
        yield made


def put(there, gradient, residual=None, pieces=1, **settings):
    """Give the sum of a gradient in some pieces and a residual, not made yet."""
    dtype = np.float32 if gradient.dtype.itemsize < 4 else gradient.dtype
    bounds = np.linspace(0, gradient.size, pieces + 1).astype(int)
    parts = [Piece(int(a), there.place.put(gradient[a:b])) for a, b in pairwise(bounds)]
    memory = None if residual is None else there.place.put(residual)
    return Accumulated(there.empty(gradient.size + TRAILER, dtype), memory, parts, **settings)


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize("pieces", [1, 3])
def test_the_largest_of_several_steps_without_a_word_to_the_host(there, dtype, pieces):
    size = 9001
    compressor, context = mpicomp.TopK(ratio=0.01), Context(workspace=Workspace(there))
    rng, residual = np.random.default_rng(0), np.zeros(size, dtype)
    for step in range(STEPS):
        gradient = rng.laplace(size=size).astype(dtype)
        accumulated = put(there, gradient, residual, pieces)
        emulator.launches.clear()
        with there.place.quiet():
            selection = compressor.select(accumulated, context)
            accumulated.array()
        if there.place.emulated:
            assert emulator.launches.count("concatenate") == (pieces > 1)
            assert emulator.launches.count("accumulate") == emulator.launches.count("write_tiles") == 1
        total = gradient + residual
        expected = largest(total, 90)
        np.testing.assert_array_equal(selection.indices.get(), expected)
        alike(selection.values.get(), total[expected])
        alike(accumulated.array().get(), total)
        assert there.reads == step
        np.testing.assert_allclose(accumulated.energy, np.square(total, dtype=np.float64).sum(), rtol=1e-6)
        assert accumulated.finite
        residual = total.copy()
        residual[expected] = 0
    scratch = fused_workspaces(context)
    assert len(scratch) == 1
    assert scratch[0].numbers[gpu.select.Field.USABLE].item() == 1, "the bound of the step before serves"


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_threshold_that_is_no_number_spoils_nothing(there, bad):
    size, rng = 5000, np.random.default_rng(0)
    compressor, context = mpicomp.TopK(ratio=0.01), Context(workspace=Workspace(there))
    for step in range(6):
        gradient = rng.laplace(size=size).astype(np.float32)
        if step == 2:
            gradient[::50] = bad
        memory = dict(context.memory)
        accumulated = put(there, gradient)
        selection = compressor.select(accumulated, context)
        expected = np.arange(0, size, 50)[:50] if step == 2 else largest(gradient, 50)
        np.testing.assert_array_equal(selection.indices.get(), expected)
        assert accumulated.finite == (step != 2)
        if step == 2:
            context.memory = memory  # as a step that is undone
        if step in (1, 3):
            [scratch] = fused_workspaces(context)
            assert scratch.numbers[gpu.select.Field.USABLE].item() == 1


def test_bounds_survive_a_checkpoint_and_counts_share_memory(there):
    size, rng = 5000, np.random.default_rng(0)
    context = Context(workspace=Workspace(there))
    for step, ratio in enumerate([0.01, 0.011, 0.012, 0.03]):
        gradient = rng.laplace(size=size).astype(np.float32)
        compressor = mpicomp.TopK(ratio=ratio)
        selection = compressor.select(put(there, gradient), context)
        np.testing.assert_array_equal(selection.indices.get(), largest(gradient, compressor.count(size)))
        context.memory = {name: value.get() for name, value in context.memory.items()}
        assert all(type(value) is np.ndarray for value in context.memory.values()), step
    assert len(fused_workspaces(context)) == 2


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("factor", [None, 0.9])
def test_pieces_of_all_kinds_are_gathered_first(there, dtype, scale, factor):
    size, rng = 4000, np.random.default_rng(0)
    gradient = rng.laplace(size=size).astype(np.float32)
    narrow = gradient.astype(np.float16) if dtype == np.float16 else (gradient.view(np.uint32) >> 16).astype(np.uint16)
    wide = narrow.astype(np.float32) if dtype == np.float16 else (narrow.astype(np.uint32) << 16).view(np.float32)
    residual, before = rng.laplace(size=(2, size)).astype(np.float32)

    def velocity(bring):
        return None if factor is None else Velocity(bring(before), bring(np.zeros(size, np.float32)), factor, False)

    host = Accumulated(
        np.empty(size + TRAILER, np.float32), residual, [Piece(0, wide)], scale=scale, velocity=velocity(np.copy)
    )
    with activated(Device()):
        expected = mpicomp.TopK(ratio=0.01).select(host, Context())
    for compressor in (mpicomp.TopK(ratio=0.01), mpicomp.Threshold(limit=1e30)):  # fused, and by a sweep
        tables = {}
        for _ in range(2):
            made = put(there, narrow, residual, 3, scale=scale, velocity=velocity(there.place.put), tables=tables)
            emulator.launches.clear()
            found = compressor.select(made, Context(workspace=Workspace(there)))
            if there.place.emulated:
                assert emulator.launches.count("concatenate") == 1
                assert emulator.launches.count("accumulate") == 1
            alike(made.array().get(), host.array())
        assert list(tables) == ["pieces"]
        if compressor.id == "topk":
            np.testing.assert_array_equal(found.indices.get(), expected.indices)
            alike(found.values.get(), expected.values)


def test_a_rank_that_has_nothing_to_give_selects_zeros(there):
    context = Context(workspace=Workspace(there))
    for compressor in (mpicomp.TopK(ratio=0.01), mpicomp.SIDCo(ratio=0.01)):
        accumulated = Accumulated(there.empty(3000 + TRAILER, np.float32), None, [], stale=True)
        selection = compressor.select(accumulated, context)
        assert not selection.values.get().any()
        assert not accumulated.array().get().any()
        assert accumulated.energy == 0


@pytest.mark.parametrize("distribution", ["exponential", slow("gamma"), slow("pareto")])
@pytest.mark.parametrize("size", [1000, 9001])
def test_an_estimate_takes_one_read(there, distribution, size):
    compressor = mpicomp.SIDCo(ratio=0.02, distribution=distribution)
    here, context = Context(), Context(workspace=Workspace(there))
    rng, residual = np.random.default_rng(0), np.zeros(size, np.float32)
    for step in range(7):
        gradient = rng.laplace(size=size).astype(np.float32)
        host = Accumulated(np.empty(size + TRAILER, np.float32), residual, [Piece(0, gradient)])
        with activated(Device()):
            expected = compressor.select(host, here)
        accumulated = put(there, gradient, residual, 2)
        reads = there.reads
        selection = compressor.select(accumulated, context)
        assert accumulated.finite
        assert there.reads == reads + 1
        assert context.memory.get("sidco.stages") == here.memory.get("sidco.stages", context.memory["sidco.stages"])
        np.testing.assert_allclose(accumulated.energy, host.energy, rtol=1e-6)
        np.testing.assert_array_equal(selection.indices.get(), expected.indices)
        alike(selection.values.get(), expected.values)
        residual = host.array().copy()
        residual[expected.indices] = 0
        assert step < 1 or "sidco.candidates" in context.memory
