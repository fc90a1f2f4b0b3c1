"""gradient + residual before == ranks x mean + residual after, for every scheme and every kind of array."""

import numpy as np
import pytest
from marks import slow
from schemes import OTHERS, OWN, REPRESENTATIVES, everywhere, in_turn
from worlds import Ranks

import mpicomp
from mpicomp.testing import pairs

SETTINGS = [(3, 200)]  # ranks, and bytes of a bucket
MORE = [(2, 1), (4, 1 << 20)]
# Every collective carries every compressor in collectives/test_laws.py; here compressors take collectives in turn.
ONE_EACH = {name: (compressor, name) for compressor, name in pairs(REPRESENTATIVES) + in_turn(REPRESENTATIVES)}
REPRESENTED = [*in_turn(REPRESENTATIVES), *(pair for pair in ONE_EACH.values() if pair not in in_turn(REPRESENTATIVES))]
CASES = everywhere([(3, 200)], SETTINGS, REPRESENTED, in_turn(OTHERS))
CASES += [slow(*pair, *setting) for pair in REPRESENTED for setting in MORE]
torch = pytest.importorskip("torch")


def arrays(rng):
    """One rank's gradients: all dtypes, shapes from none to odd, contiguous and not."""
    return {
        "fp32": rng.normal(size=(7, 11)).astype(np.float32),
        "fp64": rng.normal(size=(5, 3, 2)),
        "fp16": rng.normal(size=33).astype(np.float16),
        "bf16": torch.from_numpy(rng.normal(size=(4, 9))).to(torch.bfloat16),
        "one": rng.normal(size=1).astype(np.float32),
        "scalar": np.array(rng.normal(), np.float32),
        "none": np.empty((0, 3), np.float32),
        "none16": np.empty(0, np.float16),
        "backwards": rng.normal(size=(6, 8)).astype(np.float32)[::-1, ::-3],
        "transposed": rng.normal(size=(3, 5)).T,
        "every other half": rng.normal(size=20).astype(np.float16)[::2],
        "swapped": rng.normal(size=13).astype(">f4"),
        "transposed tensor": torch.from_numpy(rng.normal(size=(6, 2))).to(torch.bfloat16).T,
        "fortran": np.asfortranarray(rng.normal(size=(4, 4)).astype(np.float32)),
    }


def wide(array):
    return array.to(torch.float64).numpy() if isinstance(array, torch.Tensor) else array.astype(np.float64)


def bits(array):
    return (
        array.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(array, torch.Tensor) else array.tobytes()
    )


# Rounding of the delivered mean, relative to its size: half a unit in the last place, plus the sums'.
EPS = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 1e-6, "float64": 1e-6}


@pytest.mark.parametrize(("compressor", "collective", "ranks", "bucket_bytes"), CASES, ids=str)
def test_step_with_feedback_loses_nothing(compressor, collective, ranks, bucket_bytes):
    all_ranks = Ranks(ranks, compressor, collective, feedback=True, bucket_bytes=bucket_bytes)
    rng = np.random.default_rng(ranks)
    before = None
    for _ in range(4):
        gradients = [arrays(rng) for _ in range(ranks)]
        copies = [{name: bits(array) for name, array in one.items()} for one in gradients]
        means = all_ranks.reduce(gradients)
        for one, copy in zip(gradients, copies, strict=True):
            assert {name: bits(array) for name, array in one.items()} == copy, "input was modified"
        for name, example in gradients[0].items():
            mean = means[0][name]
            assert type(mean) is type(example)
            assert tuple(mean.shape) == tuple(example.shape)
            assert mean.dtype == (
                example.dtype if isinstance(example, torch.Tensor) else example.dtype.newbyteorder("=")
            )
            for other in means[1:]:
                assert bits(other[name]) == bits(mean)
            put_in = sum(wide(one[name]) for one in gradients)
            if before is not None:
                put_in = put_in + before[name]
            delivered = ranks * wide(mean)
            scale = max([1.0, *np.abs(delivered).ravel()])
            eps = EPS[str(example.dtype).removeprefix("torch.").replace(">f4", "float32")]
            np.testing.assert_allclose(
                delivered + all_ranks.residual_sum(name), put_in, rtol=0, atol=4 * eps * scale, err_msg=name
            )
        before = {name: all_ranks.residual_sum(name) for name in gradients[0]}
        for name in gradients[0]:
            assert all_ranks.reducers[0].residual(name).dtype == (
                np.float64 if name in ("fp64", "transposed") else np.float32
            )


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("compressor", OWN, ids=str)
def test_step_without_feedback_keeps_nothing(compressor, feedback):
    all_ranks = Ranks(2, compressor, feedback=feedback)
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=1000).astype(np.float32)
    all_ranks.reduce([{"w": gradient}, {"w": -gradient / 3}])
    kept = any(residual.any() for residual in all_ranks.residuals("w"))
    # PowerSGD sends what has one dimension as it is.
    everything = compressor in (mpicomp.Dense(), mpicomp.TopK(ratio=1.0, indices="plain"), mpicomp.PowerSGD(rank=1))
    assert kept == (feedback and not everything)


@pytest.mark.parametrize(
    ("compressor", "collective"),
    [
        ("topk", "star-topk"),
        ("sidco", "oktopk"),
        ("onebit", "two-phase"),
        ({"id": "powersgd", "rank": 1}, "auto"),
        ("dense", "scatter-reduce"),
    ],
)
@pytest.mark.parametrize("decay", [0.95, 0.5])
def test_residuals_with_decay_follow_the_decayed_law(compressor, collective, decay):
    """Residual after == decay x (gradient + residual before - ranks x mean); a step that is undone decays nothing."""
    chosen = {"id": "dense", "wire": "bf16"} if compressor == "dense" else compressor
    all_ranks = Ranks(3, chosen, collective, feedback=True, feedback_decay=decay, nonfinite="skip")
    rng = np.random.default_rng(1)
    before = 0.0
    for step in range(5):
        gradients = [{"w": rng.normal(size=(20, 30)).astype(np.float32)} for _ in range(3)]
        if step == 3:
            gradients[1]["w"][0, 0] = np.nan
            all_ranks.reduce(gradients)
            np.testing.assert_array_equal(all_ranks.residual_sum("w"), before)
            continue
        means = all_ranks.reduce(gradients)
        after = all_ranks.residual_sum("w")
        left = sum(wide(gradient["w"]) for gradient in gradients) + before - 3 * wide(means[0]["w"])
        np.testing.assert_allclose(after, decay * left, atol=2e-5)
        assert np.abs(after).max() > 0
        before = after


def test_sixteen_bit_gradients_too_small_for_a_mean_are_not_lost():
    """A mean below the smallest half is delivered as zero; that is the only loss, and residuals stay float32."""
    all_ranks = Ranks(4, mpicomp.TopK(ratio=0.5))
    tiny = np.full(4, 6e-8, np.float16)
    all_ranks.reduce([{"w": tiny}] * 4)
    for residual in all_ranks.residuals("w"):
        assert residual.dtype == np.float32
        np.testing.assert_array_equal(residual, [0, 0, *tiny[2:].astype(np.float32)])


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_values_beyond_a_sixteen_bit_wire_arrive_in_parts(wire):
    all_ranks = Ranks(2, mpicomp.Dense(wire=wire))
    gradient = np.array([1e5, -3e5, 1.0], np.float32)
    total = np.zeros(3)
    for step in range(12):
        means = all_ranks.reduce([{"w": gradient if step == 0 else np.zeros(3, np.float32)}] * 2)
        assert np.isfinite(means[0]["w"]).all()
        total += means[0]["w"]
    np.testing.assert_allclose(total, gradient, rtol=1e-6)
