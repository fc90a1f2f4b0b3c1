"""Finite gradients whose sums are beyond the largest number: what is delivered or kept is finite, or nothing is."""

import numpy as np
import pytest
from marks import once, slow
from schemes import REPRESENTATIVES, UNBIASED_REPRESENTATIVES, Above
from worlds import Ranks

import mpicomp
from mpicomp.collectives import variants
from mpicomp.errors import NonFiniteError
from mpicomp.testing import pairs

HUGE = 3e38
LARGEST = float(np.finfo(np.float32).max)
SHAPE = (14, 15)
FEW = 12  # elements that are huge where not all are

COMPRESSORS = [
    *REPRESENTATIVES,
    *UNBIASED_REPRESENTATIVES,
    Above(limit=1.5),
    mpicomp.TopK(ratio=1.0, wire="bf16"),
    mpicomp.DGC(ratio=0.05, momentum=0.9, masking=False),
    mpicomp.RandomK(ratio=0.3),
    mpicomp.OneBit(block=None),
    mpicomp.QSGD(norm="l2", rounding="nearest", bucket=64),
    mpicomp.Uniform(),
    mpicomp.PowerSGD(rank=2, wire="bf16"),
    mpicomp.TernGrad(),
]
ESTIMATORS = [
    mpicomp.SIDCo(ratio=0.05),
    mpicomp.SIDCo(ratio=0.05, distribution="gamma", stages=3),
    mpicomp.SIDCo(ratio=0.01, distribution="pareto"),
    mpicomp.GaussianK(ratio=0.05),
    mpicomp.MSTopK(ratio=0.05),
    mpicomp.RedSync(ratio=0.05),
    mpicomp.RedSync(ratio=0.05, search="trimmed"),
    mpicomp.DGC(ratio=0.05),
    mpicomp.Threshold(limit=1.5),
]


def some(size, value, rng, low=1.0):
    """Ordinary numbers with a few others among them, at places that are the same for all who draw alike."""
    array = low * rng.standard_t(3, size)
    array[rng.permutation(size)[:FEW]] = value
    return array


def scenarios(ranks, size, seed=0):
    """Give name, residuals before (or None) and gradients of each case, in float64; all of them finite float32."""

    def rng():
        return np.random.default_rng(seed)

    everywhere = [np.full(size, HUGE) for _ in range(ranks)]
    yield "one is huge", None, [some(size, HUGE if rank == 0 else 1, rng()) for rank in range(ranks)]
    yield "all are huge", None, everywhere
    yield "two neighbours are huge", None, [some(size, HUGE if rank < 2 else 1, rng()) for rank in range(ranks)]
    yield "large", None, [some(size, 1e20, rng(), 1e20) for _ in range(ranks)]
    yield "halves cancel", None, [some(size, HUGE if 2 * rank < ranks else -HUGE, rng()) for rank in range(ranks)]
    yield "turns cancel", None, [some(size, -HUGE if rank % 2 else HUGE, rng()) for rank in range(ranks)]
    yield "one against all", None, [some(size, HUGE if rank else -HUGE, rng()) for rank in range(ranks)]
    yield "the last against all", None, [some(size, -HUGE if rank == 1 else HUGE, rng()) for rank in range(ranks)]
    yield "added to what is kept", everywhere, [np.full(size, 1e30) for _ in range(ranks)]
    yield "too much for what is kept", everywhere, [some(size, HUGE, rng()) for _ in range(ranks)]
    yield "against what is kept", [-array for array in everywhere], [some(size, HUGE, rng()) for _ in range(ranks)]
    yield "as large as can be", None, [some(size, LARGEST, rng()) for _ in range(ranks)]
    yield "a third each", None, [some(size, LARGEST if rank < 3 else 0, rng()) for rank in range(ranks)]
    mixed = np.array([HUGE, -HUGE, 1.7e38, -1.7e38, 1e38, 1e20, -1e20, 1.0, 0.0, 1e-30])
    for turn in range(2):
        draw = np.random.default_rng([seed, turn])
        kept = [draw.choice(mixed, size) * draw.choice([0, 0.3], size) for _ in range(ranks)] if turn % 2 else None
        yield f"mixed {turn}", kept, [draw.choice(mixed, size) for _ in range(ranks)]


def new_world(layout, compressor, collective, nonfinite):
    feedback = None if compressor.feedback else False
    return Ranks(len(layout), compressor, collective, hosts=layout, feedback=feedback, nonfinite=nonfinite)


def reduce(world, arrays, shape=SHAPE):
    means = world.reduce([{"w": np.float32(array).reshape(shape)} for array in arrays])
    return [mean["w"].copy() for mean in means]


def set_residuals(world, residuals, shape):
    for reducer, residual in zip(world.reducers, residuals, strict=True):
        state = reducer.state_dict() | {"residuals": {"w": np.float32(residual).reshape(shape)}, "velocities": {}}
        reducer.load_state_dict(state)


def ordinary(ranks, size, seed=7):
    return [np.random.default_rng([seed, rank]).standard_t(3, size) for rank in range(ranks)]


def same(arrays):
    return len({array.tobytes() for array in arrays}) == 1


def finite(value):
    """Tell whether all numbers in a nested memory are finite; infinities that stand for no bound are none of it."""
    if isinstance(value, dict):
        return all(finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(finite(item) for item in value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    return not isinstance(value, float) or bool(np.isfinite(value))


def check(compressor, collective, layout, shape, nonfinite):
    ranks, size = len(layout), shape[0] * shape[1]
    world = new_world(layout, compressor, collective, nonfinite)
    for arrays in ([np.zeros(size)] * ranks, ordinary(ranks, size)):  # what they teach must not make it worse
        reduce(world, arrays, shape)
    for name, kept, arrays in scenarios(ranks, size):
        set_residuals(world, [np.zeros(size)] * ranks if kept is None else kept, shape)
        check_step(world, name, arrays, nonfinite, shape)
        set_residuals(world, [np.zeros(size)] * ranks, shape)
        try:
            means = reduce(world, ordinary(ranks, size), shape)
        except NonFiniteError:
            pytest.fail(f"{name}: an ordinary step is not finite afterwards")
        assert same(means), name
        assert np.isfinite(means[0]).all(), name
        assert not any(reducer.last_step.skipped for reducer in world.reducers), name


def check_step(world, name, arrays, nonfinite, shape):
    """Reduce extreme gradients: all of it is kept by the law, or nothing is, on all ranks alike."""
    ranks = len(arrays)
    before = world.residuals("w")
    raised, undone = None, True
    try:
        means = reduce(world, arrays, shape)
    except NonFiniteError as error:
        raised = error
    if raised is None:
        assert same(means), name
        [undone] = {reducer.last_step.skipped for reducer in world.reducers}
    else:
        assert (nonfinite, raised.__notes__) == ("raise", [f"{ranks} of {ranks} ranks raised"]), name
    after = world.residuals("w")
    assert np.isfinite(after).all(), name
    assert finite([reducer.state_dict()["memories"] for reducer in world.reducers]), name
    if undone:
        assert [residual.tobytes() for residual in after] == [residual.tobytes() for residual in before], name
    elif nonfinite != "pass":
        assert np.isfinite(means[0]).all(), name
        if world.reducers[0].feedback:
            put_in = np.sum([np.float64(np.float32(array)) for array in arrays], axis=0).reshape(means[0].shape)
            put_in += np.sum(np.float64(before), axis=0)
            out = ranks * np.float64(means[0]) + np.sum(np.float64(after), axis=0)
            atol = 16 * ranks * np.finfo(np.float32).eps * max(np.abs(arrays).max(), np.abs(before).max())
            np.testing.assert_allclose(out, put_in, rtol=0, atol=atol, err_msg=name)


PAIRS = pairs(COMPRESSORS)
ON_HOSTS = [
    (compressor, name)
    for compressor in COMPRESSORS
    for name in variants(compressor)
    if "hierarchical" in name and name.count(":") < 3
]
# Of the collectives that sum what others have selected, one each.
ON_HOSTS = [
    pair
    for pair in ON_HOSTS
    if pair[0].message != "sparse" or pair[0].shares_positions or not pair[1].endswith(("ring", "-doubling"))
]


@pytest.mark.parametrize(("ranks", "nonfinite"), [(3, "raise"), slow(4, "skip"), slow(4, "pass")])
@pytest.mark.parametrize(("compressor", "collective"), once(PAIRS), ids=str)
def test_overflow_on_one_host_is_kept_or_undone(compressor, collective, ranks, nonfinite):
    check(compressor, collective, [0] * ranks, SHAPE, nonfinite)


@pytest.mark.parametrize(("compressor", "collective"), once(ON_HOSTS, lambda case: case[1].partition(":")[0]), ids=str)
def test_overflow_on_two_hosts_is_kept_or_undone(compressor, collective):
    check(compressor, collective, [0, 0, 0, 1, 1], SHAPE, "skip")


@pytest.mark.parametrize(
    ("compressor", "collective"), once(pair for pair in ON_HOSTS if pair[1].startswith("hierarchical")), ids=str
)
def test_overflow_passed_on_between_hosts_stays_finite(compressor, collective):
    check(compressor, collective, [0, 0, 1, 1], SHAPE, "pass")


@pytest.mark.parametrize("nonfinite", ["skip", "pass"])
@pytest.mark.parametrize("compressor", ESTIMATORS, ids=str)
def test_overflow_of_estimates_is_kept_or_undone(compressor, nonfinite):
    check(compressor, "allgather", [0, 0, 0], (60, 70), nonfinite)
