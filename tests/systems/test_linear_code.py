import numpy as np
import pytest
from marks import slow

from mpicomp.systems.lgc.linear_code import LinearCode
from mpicomp.workspace import Workspace

BLOCK, KEPT = 16, 4
TURNS = BLOCK - KEPT + 1


def made():
    return LinearCode(Workspace(), block=BLOCK, kept=KEPT)


def rows(size, rng, rank=3, ranks=4, noise=0.0):
    """Values of every rank whose blocks lie in a subspace, shape (ranks, size); and the subspace, shape (rank, 16)."""
    directions = np.linalg.qr(np.random.default_rng(99).standard_normal((BLOCK, rank)))[0].T
    scales = np.arange(rank, 0, -1.0)
    blocks = rng.standard_normal((ranks, -(-size // BLOCK), rank)) * scales @ directions
    values = blocks.reshape(ranks, -1)[:, :size]
    return values + noise * rng.standard_normal(values.shape), directions


def taught(count=320, steps=20, leader=None, ranks=4, **kinds):
    code, rng = made(), np.random.default_rng(0)
    errors = [code.learn(rows(count, rng, ranks=ranks, **kinds)[0], leader) for _ in range(steps)]
    return code, errors


def there_and_back(code, values, worker=0):
    short, out = np.empty(code.length(values.size), values.dtype), np.empty_like(values)
    code.encode(values, short)
    code.decode(short, out, worker)
    return out


def reference(history, values, step):
    """Principal components by the book: SVD of all blocks of the means, one projection after the other."""
    blocks = np.concatenate([np.mean(step_values, axis=0).reshape(-1, BLOCK) for step_values in history])
    directions = np.linalg.svd(blocks)[2]
    used = [*range(KEPT - 1), KEPT - 1 + step % TURNS]
    out = np.zeros(-(-values.size // BLOCK) * BLOCK)
    padded = np.zeros_like(out)
    padded[: values.size] = values
    for start in range(0, out.size, BLOCK):
        for row in used:
            coordinate = sum(directions[row, i] * padded[start + i] for i in range(BLOCK))
            for i in range(BLOCK):
                out[start + i] += coordinate * directions[row, i]
    return out[: values.size]


@pytest.mark.parametrize("size", [1, 5, 16, 17, 40, 320])
@pytest.mark.parametrize("step", [0, 3, TURNS - 1, TURNS + 2])
def test_it_is_a_projection_on_principal_components(size, step):
    rng = np.random.default_rng(2)
    history = [rng.standard_normal((3, 640)) * np.tile(1.5 ** -np.arange(16.0), 40) for _ in range(10)]
    code = made()
    for values in history:
        code.learn(values)
    code.turn(step)
    values = rng.standard_normal(size)
    found = there_and_back(code, values)
    np.testing.assert_allclose(found, reference(history, values, step), rtol=0, atol=2e-6 * np.abs(values).max() * 4)


def test_a_code_has_a_quarter_of_the_numbers():
    code = LinearCode(Workspace())
    assert [code.length(count) for count in (16, 160, 161, 1_600_000)] == [4, 40, 44, 400_000]
    assert code.least == 16


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
def test_values_of_few_dimensions_come_back(dtype):
    code, errors = taught()
    values = rows(320, np.random.default_rng(5))[0][0].astype(dtype)
    for step in range(TURNS):
        code.turn(step)
        found = there_and_back(code, values)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, values, atol=1e-5 * np.abs(values).max())
    assert errors[0] == 1.0
    assert max(errors[1:]) < 1e-10


def test_linear_code_of_noise_keeps_a_quarter_of_its_energy():
    code, rng = made(), np.random.default_rng(3)
    errors = [code.learn(rng.standard_normal((2, 16_000))) for _ in range(6)]
    # 1,000 blocks of 4 of 16 coordinates: the share has a deviation of sqrt(2 * 0.25 * 0.75 / 16,000) = 0.005.
    assert all(0.75 - 0.025 < error < 0.75 + 0.025 for error in errors[1:])


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_the_mean_of_codes_is_decoded_to_the_mean(dtype, ranks):
    code, _ = taught(noise=1.0)
    code.turn(7)
    values = np.random.default_rng(6).standard_normal((ranks, 333)).astype(dtype)
    codes = np.empty((ranks, code.length(333)), dtype)
    decoded, near = np.empty((2, ranks, 333), dtype)
    for value, short, long in zip(values, codes, decoded, strict=True):
        code.encode(value, short)
        code.decode(short, long)
    centre, found = codes.mean(axis=0), np.empty(333, dtype)
    code.decode(centre, found)
    tolerance = 32 * np.finfo(dtype).eps * np.abs(values).max()
    np.testing.assert_allclose(found, decoded.astype(np.float64).mean(axis=0), rtol=0, atol=tolerance)
    for short, long in zip(codes, near, strict=True):
        middle = np.full_like(found, np.nan)
        code.decode_near(short, centre, long, middle)
        np.testing.assert_array_equal(middle, found)
    np.testing.assert_array_equal(near, decoded)


def test_every_direction_travels_before_long():
    """What is left out at one step must come to its turn, or residuals would pile it up."""
    code, _ = taught(noise=1.0)
    values = np.random.default_rng(7).standard_normal(160)
    left = values.copy()
    for step in range(1000, 1000 + TURNS):
        code.turn(step)
        left -= there_and_back(code, left)
    assert np.abs(left).max() < 1e-5 * np.abs(values).max()


def test_a_leaders_code_gives_each_rank_what_it_has_of_it():
    """Rank 1 has half of the leader's values and noise, rank 2 their negative, rank 3 nothing of them."""
    rng, code = np.random.default_rng(8), made()

    def everyones():
        source = rows(3200, rng, rank=2, ranks=1)[0][0]
        noise = rng.standard_normal((4, source.size))
        return np.stack([source, 0.5 * source + noise[1], -source, noise[3]])

    errors = [code.learn(everyones(), leader=0) for _ in range(20)]
    assert code.weights().size == code.size(ranks=4)
    code.turn(0)
    values = everyones()[0]
    decoded = [there_and_back(code, values, worker) for worker in range(4)]
    scale = np.linalg.norm(values)
    for factor, found in zip([1.0, 0.5, -1.0, 0.0], decoded, strict=True):
        # A coordinate's slope is learned from 4,000 blocks against noise of 1 and coordinates of 1 and 2: 0.016 of 1.
        assert np.linalg.norm(found - factor * values) < 0.06 * scale
    first, later = errors[0], errors[-1]
    assert first == 1.0
    # Of 5 + 1.25 + 16 + 5 + 16 parts of energy a block the noise of two ranks, 16 each, is lost.
    energies = [5, 0.25 * 5 + 16, 5, 16]
    assert later == pytest.approx(32 / sum(energies), abs=0.03)


def test_the_decoder_of_a_rank_has_the_least_squares():
    rng, code = np.random.default_rng(9), made()
    history = []
    for _ in range(5):
        source = rng.standard_normal((40, BLOCK)) @ rng.standard_normal((BLOCK, BLOCK))
        history.append(np.stack([source.ravel(), (source @ rng.standard_normal((BLOCK, BLOCK))).ravel()]))
        code.learn(history[-1], leader=0)
    sources = np.concatenate([values[0].reshape(-1, BLOCK) for values in history])
    targets = np.concatenate([values[1].reshape(-1, BLOCK) for values in history])
    directions = np.linalg.svd(sources)[2]
    for step in (0, 5):
        code.turn(step)
        used = directions[[*range(KEPT - 1), KEPT - 1 + step]]
        slopes = np.linalg.lstsq(sources @ used.T, targets, rcond=None)[0]
        values = rng.standard_normal(BLOCK)
        found = there_and_back(code, values, worker=1)
        np.testing.assert_allclose(found, values @ used.T @ slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("leader", [None, 1])
def test_weights_and_state_go_on_elsewhere(leader):
    code, _ = taught(leader=leader, noise=1.0)
    values = np.random.default_rng(10).standard_normal((4, 320))
    other, resumed = made(), made()
    other.use(code.weights())
    resumed.load(code.state())
    for each in (code, other, resumed):
        each.turn(4)
    expected = there_and_back(code, values[0])
    np.testing.assert_array_equal(there_and_back(other, values[0]), expected)
    np.testing.assert_array_equal(there_and_back(resumed, values[0]), expected)
    assert resumed.learn(values, leader) == code.learn(values, leader)
    np.testing.assert_array_equal(resumed.weights(), code.weights())


def test_linear_code_state_is_a_copy():
    code, _ = taught()
    state, before = code.state(), code.weights()
    code.learn(np.random.default_rng(11).standard_normal((4, 320)))
    other = made()
    other.load(state)
    np.testing.assert_array_equal(other.weights(), before)
    state["moments"][:] = np.nan
    assert np.isfinite(other.learn(np.ones((1, 32))))
    assert np.isfinite(other.weights()).all()


@pytest.mark.parametrize("leader", [None, 2])
def test_zeros_teach_nothing_and_are_decoded_to_zeros(leader):
    code = made()
    assert code.learn(np.zeros((3, 48)), leader) == 0.0
    assert np.isfinite(code.weights()).all()
    assert (there_and_back(code, np.zeros(48)) == 0).all()
    code, _ = taught(leader=leader)
    before = code.weights()
    code.learn(np.zeros((4, 48)), leader)
    np.testing.assert_array_equal(code.weights(), before)


def test_linear_code_nan_stays_in_its_block():
    code, _ = taught()
    values = rows(320, np.random.default_rng(12))[0][0]
    expected = there_and_back(code, values)
    values[100] = np.nan
    found = there_and_back(code, values)
    assert np.isnan(found[96:112]).all()
    np.testing.assert_array_equal(np.delete(found, slice(96, 112)), np.delete(expected, slice(96, 112)))


def largest_residual(turns, steps=1200, size=1024, count=64):
    """Run error feedback on gradients whose neighbors correlate, with the code's direction taking turns or not."""
    rng, code = np.random.default_rng(13), made()

    def neighbours():
        rows = rng.standard_normal((size // 32, 32))
        for place in range(1, 32):
            rows[:, place] = 0.6 * rows[:, place - 1] + 0.8 * rows[:, place]
        return rows.ravel()

    signal, residual = neighbours(), np.zeros(size)
    for step in range(steps):
        residual += 0.5 * signal + 0.5 * neighbours()
        indices = np.sort(np.argpartition(-np.abs(residual), count)[:count])
        values = residual[indices]
        if step < 100:
            code.learn(values[np.newaxis])
            residual[indices] = 0
        else:
            code.turn(step if turns else 0)
            residual[indices] -= there_and_back(code, values)
    return np.abs(residual).max()


def test_linear_code_that_rotates_leaves_no_growing_residual():
    assert largest_residual(turns=True) < 0.3 * largest_residual(turns=False)
    assert largest_residual(turns=True, steps=2400) < 1.5 * largest_residual(turns=True)
