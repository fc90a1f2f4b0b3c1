"""Finite gradients whose sums are beyond the largest number: what is delivered or kept is finite, or nothing is."""

import numpy as np
import pytest
from marks import once, slow
from mpicomp.kernels import cpu
from schemes import Above

import mpicomp
from mpicomp.collectives import fitting, variants
from mpicomp.errors import NonFiniteError
from mpicomp.transport import LocalWorld

HUGE = 3e38
LARGEST = float(np.finfo(np.float32).max)
SHAPE = (14, 15)
FEW = 12  # elements that are huge where not all are

REPRESENTATIVES = [
    mpicomp.Dense(),
    mpicomp.Dense(wire="fp16"),
    mpicomp.Dense(wire="bf16"),
    mpicomp.TopK(ratio=0.05),
    mpicomp.TopK(ratio=1.0, wire="bf16"),
    mpicomp.DGC(ratio=0.05, momentum=0.9, masking=False),
    mpicomp.RandomK(ratio=0.3),
    mpicomp.RandomK(ratio=0.3, scaled=True),
    mpicomp.BlockRandomK(ratio=0.3, wire="fp16"),
    mpicomp.OneBit(block=64),
    mpicomp.EFSign(),
    mpicomp.QSGD(norm="l2", rounding="nearest", bucket=64),
    mpicomp.Uniform(),
    mpicomp.Natural(),
    mpicomp.PowerSGD(rank=1),
    mpicomp.PowerSGD(rank=2, iterations=2, wire="bf16"),
    mpicomp.CountSketch(ratio=0.05),
    mpicomp.FetchSGD(ratio=0.05, momentum=0.9),
    mpicomp.LGC(ratio=0.3, code="linear", dense_steps=0, training_steps=1, wire="bf16"),
    mpicomp.LGC(ratio=0.3, code="linear", dense_steps=0, training_steps=1, instance="server"),
    mpicomp.MaxNorm(bits=[4, 8], rounding="nearest"),
    mpicomp.TernGrad(),
    mpicomp.GlobalRandKMaxNorm(ratio=0.3),
    mpicomp.SignSGD(),
    Above(limit=1.5),
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
    yield "against what is kept", [-own for own in everywhere], [some(size, HUGE, rng()) for _ in range(ranks)]
    yield "as large as can be", None, [some(size, LARGEST, rng()) for _ in range(ranks)]
    yield "a third each", None, [some(size, LARGEST if rank < 3 else 0, rng()) for rank in range(ranks)]
    mixed = np.array([HUGE, -HUGE, 1.7e38, -1.7e38, 1e38, 1e20, -1e20, 1.0, 0.0, 1e-30])
    for turn in range(2):
        draw = np.random.default_rng([seed, turn])
        kept = [draw.choice(mixed, size) * draw.choice([0, 0.3], size) for _ in range(ranks)] if turn % 2 else None
        yield f"mixed {turn}", kept, [draw.choice(mixed, size) for _ in range(ranks)]


class Together:
    """Reducers of ranks on hosts, with residuals that can be set."""

    def __init__(self, layout, compressor, collective, nonfinite, shape):
        self.world = LocalWorld(len(layout), hosts=layout)
        self.shape = shape
        feedback = None if compressor.feedback else False
        self.reducers = [
            mpicomp.Reducer(compressor, collective, feedback=feedback, nonfinite=nonfinite, comm=end)
            for end in self.world.transports
        ]
        self.feedback = compressor.feedback
        self.reduce([np.zeros(shape)] * len(layout))

    def keep(self, residuals):
        for reducer, residual in zip(self.reducers, residuals, strict=True):
            state = reducer.state_dict()
            state["residuals"] = {"w": np.float32(residual).reshape(self.shape)}
            state["velocities"] = {}
            reducer.load_state_dict(state)

    def reduce(self, arrays):
        gradients = [{"w": np.float32(array).reshape(self.shape)} for array in arrays]
        means = self.world.run([r.rounds(own) for r, own in zip(self.reducers, gradients, strict=True)])
        return [own["w"].copy() for own in means]

    def residuals(self):
        return [reducer.residual("w") for reducer in self.reducers]

    def memories(self):
        return [reducer.state_dict()["memories"] for reducer in self.reducers]


def ordinary(ranks, size, seed=7):
    return [np.random.default_rng([seed, rank]).standard_t(3, size) for rank in range(ranks)]


def same(arrays):
    return len({array.tobytes() for array in arrays}) == 1


def finite(value):
    """Tell whether all numbers in a nested memory are finite; infinities that stand for no bound are none of it."""
    if isinstance(value, dict):
        return all(finite(own) for own in value.values())
    if isinstance(value, list | tuple):
        return all(finite(own) for own in value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    return not isinstance(value, float) or bool(np.isfinite(value))


def check(compressor, collective, layout, shape, nonfinite):
    ranks, size = len(layout), shape[0] * shape[1]
    together = Together(layout, compressor, collective, nonfinite, shape)
    together.reduce(ordinary(ranks, size))  # what is learnt from that must not make it worse
    for name, kept, arrays in scenarios(ranks, size):
        together.keep([np.zeros(size)] * ranks if kept is None else kept)
        check_step(together, name, arrays, nonfinite)
        together.keep([np.zeros(size)] * ranks)
        try:
            means = together.reduce(ordinary(ranks, size))
        except NonFiniteError:
            pytest.fail(f"{name}: an ordinary step is not finite afterwards")
        assert same(means), name
        assert np.isfinite(means[0]).all(), name
        assert not any(reducer.last_step.skipped for reducer in together.reducers), name


def check_step(together, name, arrays, nonfinite):
    """Reduce extreme gradients: all of it is kept by the law, or nothing is, on all ranks alike."""
    ranks = len(arrays)
    before = together.residuals()
    raised, undone = None, True
    try:
        means = together.reduce(arrays)
    except NonFiniteError as error:
        raised = error
    if raised is None:
        assert same(means), name
        [undone] = {reducer.last_step.skipped for reducer in together.reducers}
    else:
        assert (nonfinite, raised.__notes__) == ("raise", [f"{ranks} of {ranks} ranks raised"]), name
    after = together.residuals()
    assert all(np.isfinite(own).all() for own in after), name
    assert finite(together.memories()), name
    if undone:
        assert [own.tobytes() for own in after] == [own.tobytes() for own in before], name
    elif nonfinite != "pass":
        assert np.isfinite(means[0]).all(), name
        if together.feedback:
            put_in = np.sum([np.float64(np.float32(own)) for own in arrays], axis=0).reshape(means[0].shape)
            put_in += np.sum(np.float64(before), axis=0)
            out = ranks * np.float64(means[0]) + np.sum(np.float64(after), axis=0)
            atol = 16 * ranks * np.finfo(np.float32).eps * max(np.abs(arrays).max(), np.abs(before).max())
            np.testing.assert_allclose(out, put_in, rtol=0, atol=atol, err_msg=name)


PAIRS = [(compressor, name) for compressor in REPRESENTATIVES for name in fitting(compressor)]
ON_HOSTS = [
    (compressor, name)
    for compressor in REPRESENTATIVES
    for name in variants(compressor)
    if "hierarchical" in name and name.count(":") < 3
]
# Of the collectives that sum what others have selected, one each.
ON_HOSTS = [pair for pair in ON_HOSTS if pair[0].message != "sparse" or not pair[1].endswith(("ring", "-doubling"))]
MANY = 10  # a tenth of the largest number, rounded, makes more than it ten times


@pytest.mark.parametrize(("ranks", "nonfinite"), [(3, "raise"), slow(4, "skip"), slow(4, "pass")])
@pytest.mark.parametrize(("compressor", "collective"), once(PAIRS), ids=str)
def test_on_one_host(compressor, collective, ranks, nonfinite):
    check(compressor, collective, [0] * ranks, SHAPE, nonfinite)


@pytest.mark.parametrize(("compressor", "collective"), once(ON_HOSTS, lambda case: case[1].partition(":")[0]), ids=str)
def test_on_two_hosts(compressor, collective):
    check(compressor, collective, [0, 0, 0, 1, 1], SHAPE, "skip")


@pytest.mark.parametrize(
    ("compressor", "collective"), once(pair for pair in ON_HOSTS if pair[1].startswith("hierarchical")), ids=str
)
def test_passed_on_between_hosts(compressor, collective):
    check(compressor, collective, [0, 0, 1, 1], SHAPE, "pass")


@pytest.mark.parametrize("nonfinite", ["skip", "pass"])
@pytest.mark.parametrize("compressor", ESTIMATORS, ids=str)
def test_estimates(compressor, nonfinite):
    check(compressor, "allgather", [0, 0, 0], (60, 70), nonfinite)


@pytest.mark.parametrize(
    ("compressor", "collective"),
    [(compressor, name) for compressor in (mpicomp.TopK(ratio=1.0), mpicomp.OneBit()) for name in fitting(compressor)],
    ids=str,
)
def test_a_mean_of_the_largest_number(compressor, collective):
    together = Together([0] * MANY, compressor, collective, "skip", (70,))
    check_step(together, "as large as can be", [np.full(70, LARGEST) for _ in range(MANY)], "skip")


def test_sum_of_messages_may_overflow_where_no_element_does():
    """The first rank has what is -3e38 and is given 5.7e38 to add; what comes to that is small, and is dropped."""
    arrays = [[-1.0, 0.5, 0.0], [1.0, 0.48, 0.0], [0.9, 0.0, 1.0]]
    for nonfinite in ("skip", "pass"):
        together = Together([0, 0, 0], mpicomp.TopK(ratio=0.67), "gtopk", nonfinite, (3,))
        check_step(together, "dropped", HUGE * np.array(arrays), nonfinite)


def test_remembered_table_stays_finite_unless_estimates_overflow():
    """Two elements of two steps share a cell in one row of five, so that the medians are right and the cell is not."""
    compressor = mpicomp.FetchSGD(ratio=0.01, rows=5, columns=0.5)
    together = Together([0], compressor, "sketched-memory", "skip", (100,))
    tables = np.zeros((100, *compressor.table(100)), np.float32)
    for element, table in enumerate(tables):
        cpu.sketch_add(np.eye(100, dtype=np.float32)[element], together.memories()[0]["w"]["key"], table)
    other = next(other for other in range(2, 100) if sorted((tables[1] * tables[other]).ravel())[-2:] == [0, 1])
    for element in (1, other):
        gradient = np.zeros(100)
        gradient[element] = 0.6 * LARGEST
        gradient[0] = 0.7 * LARGEST
        check_step(together, f"element {element}", [gradient], "skip")


def test_norms_of_doubles_whose_squares_overflow():
    arrays = [np.array([3e200, 4e200]), np.zeros(2)]
    world = LocalWorld(2)
    reducers = [
        mpicomp.Reducer(mpicomp.MaxNorm(bits=16, norm="l2"), comm=end, policy={"warmup": 0}) for end in world.transports
    ]
    [mean, _] = world.run([r.rounds({"w": own}) for r, own in zip(reducers, arrays, strict=True)])
    np.testing.assert_allclose(mean["w"], [1.5e200, 2e200], rtol=1e-3)
