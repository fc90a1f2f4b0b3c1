import itertools
import subprocess
import sys

import numpy as np
import pytest
from marks import slow

from mpicomp.systems.lgc.autoencoder import Autoencoder
from mpicomp.workspace import Workspace

torch = pytest.importorskip("torch")
functional = torch.nn.functional

SMALL = {"encoder": (5, 3), "decoder": (2, 6)}
SLOPE = 0.2
COUNTS = [17, 64, slow(2055)]


def make(seed=0, ranks=1, **settings):
    """A code with weights of all sizes, biases among them."""
    code = Autoencoder(Workspace(), **(SMALL | settings))
    rng = np.random.default_rng(seed)
    code.use(rng.normal(0, 0.5, code.size(ranks)).astype(np.float32))
    return code


class Network:
    """The same network of torch's own layers, in float64, its weights read one after the other."""

    def __init__(self, code, ranks=1, encoder=(5, 3), decoder=(2, 6)):
        flat = torch.from_numpy(code.weights()).double()

        def take(module):
            nonlocal flat
            with torch.no_grad():
                for parameter in (module.weight, module.bias):
                    parameter.data = flat[: parameter.numel()].reshape(parameter.shape)
                    flat = flat[parameter.numel() :]
            return module

        def convolutions(channels, kind, **more):
            layers = []
            for inputs, outputs in itertools.pairwise(channels):
                layers += [take(kind(inputs, outputs, 3, stride=2, padding=1, **more)), torch.nn.LeakyReLU(SLOPE)]
            return layers

        self.encoder = torch.nn.Sequential(
            *convolutions([1, *encoder], torch.nn.Conv1d), take(torch.nn.Conv1d(encoder[-1], 4, 1))
        )
        self.decoders = [
            torch.nn.Sequential(
                *convolutions([4, *decoder], torch.nn.ConvTranspose1d, output_padding=1),
                take(torch.nn.Conv1d(decoder[-1], 1, 1)),
            )
            for _ in range(ranks)
        ]
        self.stride = 2 ** len(encoder)
        assert not flat.numel()

    @torch.no_grad()
    def encode(self, values, shift=0):
        padded = np.zeros(-(-values.size // self.stride) * self.stride)
        padded[: values.size] = values
        return self.encoder(torch.from_numpy(np.roll(padded, shift))[None, None]).numpy().reshape(-1)

    @torch.no_grad()
    def decode(self, code, count, shift=0, worker=0):
        values = self.decoders[worker](torch.from_numpy(np.float64(code)).reshape(1, 4, -1)).numpy().reshape(-1)
        return np.roll(values, -shift)[:count]


def encoded(code, values):
    out = np.full(code.length(values.size), np.nan, values.dtype)
    code.encode(values, out)
    return out


def decoded(code, numbers, count, worker=0):
    out = np.full(count, np.nan, numbers.dtype)
    code.decode(numbers, out, worker)
    return out


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 2e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("count", COUNTS)
def test_autoencoder_equals_the_network_of_torch(dtype, rtol, count):
    code = make(ranks=3)
    network = Network(code, ranks=3)
    values = np.random.default_rng(count).normal(size=count).astype(dtype)
    for step in range(6):
        code.begin_step(step)
        shift = step % 4
        numbers = encoded(code, values)
        np.testing.assert_allclose(numbers, network.encode(values, shift), rtol=0, atol=20 * rtol)
        for worker in range(3):
            expected = network.decode(numbers, count, shift, worker)
            atol = rtol * np.abs(expected).max() * 20
            np.testing.assert_allclose(decoded(code, numbers, count, worker), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_shares_of_ranks_make_up_what_the_mean_is_decoded_to(dtype, rtol, ranks):
    code = make()
    rng = np.random.default_rng(ranks)
    codes = [encoded(code, rng.normal(size=203).astype(dtype)) for _ in range(ranks)]
    mean = np.mean(codes, axis=0)
    shares, centres = [], []
    for item in codes:
        share, centre = np.full((2, 203), np.nan, dtype)
        code.decode_near(item, mean, share, centre)
        shares.append(share)
        centres.append(centre)
    expected = decoded(code, mean, 203)
    assert all(centre.tobytes() == expected.tobytes() for centre in centres)
    np.testing.assert_allclose(np.mean(shares, axis=0), expected, rtol=0, atol=20 * rtol * np.abs(expected).max())
    if ranks > 1:  # a decoder that is not linear gives something else for their codes alone
        assert not np.allclose(shares[0], decoded(code, codes[0], 203), rtol=1e-3)


def test_near_is_the_derivative():
    """In float64 and by small steps: away from the corners a rectifier has, what is near is what the slope says."""
    code = make(3)
    rng = np.random.default_rng(1)
    centre, direction = rng.normal(size=(2, code.length(40)))
    share, values = np.empty((2, 40))
    code.decode_near(centre + direction, centre, share, values)
    ahead = decoded(code, centre + 1e-9 * direction, 40)
    np.testing.assert_allclose((ahead - values) / 1e-9, share - values, rtol=0, atol=1e-5)


def common(rng, ranks, count, noise):
    """Values that ranks have in common, of one size and sign over stretches of 8, and something of their own."""
    shared = np.repeat(rng.normal(size=-(-count // 8)), 8)[:count]
    return (shared + noise * rng.normal(size=(ranks, count))).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("leader", [False, True])
def test_autoencoder_learns_values_of_few_dimensions(leader):
    """Two of sixteen numbers say it all, and the code has four: much less is lost than by zeros."""
    code = Autoencoder(Workspace(), seed=1, learning_rate=0.01, passes=4)
    rng = np.random.default_rng(0)
    errors = [code.learn(common(rng, 3, 800, 0.05), step % 3 if leader else None) for step in range(100)]
    assert np.mean(errors[:5]) > 0.6
    assert np.mean(errors[-10:]) < 0.25
    # Another code with its weights has the reported error on new values.
    other = Autoencoder(Workspace())
    other.use(code.weights())
    values = common(rng, 3, 800, 0.05)
    if leader:
        whole = [decoded(other, encoded(other, values[1]), 800, worker) - values[worker] for worker in range(3)]
        error = np.sum(np.square(whole)) / np.sum(np.square(values))
    else:
        mean = np.mean([encoded(other, value) for value in values], axis=0)
        error = np.sum(np.square(decoded(other, mean, 800) - values.mean(axis=0))) / np.sum(values.mean(axis=0) ** 2)
    assert error == pytest.approx(np.mean(errors[-10:]), abs=0.1)


@pytest.mark.parametrize("leader", [None, 1])
def test_autoencoder_resumes_from_its_state(leader):
    rng = np.random.default_rng(2)
    steps = [common(rng, 2, 100, 0.1) for _ in range(6)]
    whole, first, second = (Autoencoder(Workspace(), seed=3, **SMALL) for _ in range(3))
    for step in steps:
        whole.learn(step, leader)
    for step in steps[:3]:
        first.learn(step, leader)
    state = first.state()
    for step in steps[3:]:
        first.learn(step, leader)
    second.load(state)
    errors = [second.learn(step, leader) for step in steps[3:]]
    assert second.weights().tobytes() == first.weights().tobytes() == whole.weights().tobytes()
    second.load(state)  # which is still as it was
    assert [second.learn(step, leader) for step in steps[3:]] == errors


@pytest.mark.parametrize("leader", [None, 1])
def test_autoencoder_as_published_is_plain_descent(leader):
    """Against torch's own optimizer, with the paper's losses written out: as shares of energies."""
    rng, ranks = np.random.default_rng(4), 3 if leader else 1
    code = make(ranks=ranks, learning_rate=0.05, passes=1, published=True)
    network = Network(code, ranks=ranks)
    modules = torch.nn.ModuleList([network.encoder, *network.decoders])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.05)
    for step in range(4):
        batch = rng.normal(size=(3, 5000)).astype(np.float32)  # more than a step looks at otherwise
        code.begin_step(step)
        code.learn(batch, leader)
        values = torch.from_numpy(batch).double()[:, None]
        codes = [network.encoder(values[rank : rank + 1]) for rank in range(3)]
        if leader is None:
            target = sum(values) / 3
            loss = (network.decoders[0](sum(codes) / 3)[0] - target).square().sum() / target.square().sum()
        else:
            missed = [(network.decoders[rank](codes[leader])[0] - values[rank]).square().sum() for rank in range(3)]
            pairs = sum((codes[k] - codes[m]).square().sum() for k in range(3) for m in range(3))
            energy = sum(code.square().sum() for code in codes)
            loss = sum(missed) / values.square().sum() + 0.5 * pairs / (2 * 3 * energy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = torch.cat([parameter.detach().ravel() for parameter in modules.parameters()])
    np.testing.assert_allclose(code.weights(), expected.numpy(), rtol=0, atol=2e-5)
    values = rng.normal(size=50).astype(np.float32)
    code.begin_step(3)
    np.testing.assert_allclose(encoded(code, values), network.encode(values), rtol=0, atol=1e-3)


@pytest.mark.parametrize("value", [0.0, 1e-30, 100.0])
def test_autoencoder_constant_values_keep_it_finite(value):
    code = Autoencoder(Workspace(), **SMALL)
    errors = [code.learn(np.full((3, 50), value, np.float32), leader) for leader in (0, 1, 2)]
    assert np.isfinite(errors).all()
    assert np.isfinite(code.weights()).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_autoencoder_nonfinite_values_stay_visible_for_one_call(bad):
    code = make()
    values = np.random.default_rng(0).normal(size=50).astype(np.float32)
    before = encoded(code, values)
    spoilt = values.copy()
    spoilt[20] = bad
    with np.errstate(all="raise"):
        numbers = encoded(code, spoilt)
        assert not np.isfinite(numbers).all()
        assert not np.isfinite(decoded(code, numbers, 50)).all()
    assert encoded(code, values).tobytes() == before.tobytes()


def test_running_it_needs_no_torch():
    program = """
import sys
sys.modules["torch"] = None
import numpy as np
from mpicomp.systems.lgc.autoencoder import Autoencoder
from mpicomp.workspace import Workspace
code = Autoencoder(Workspace())
code.use(np.ones(code.size(1), np.float32))
numbers, out = np.empty(code.length(64), np.float32), np.empty(64, np.float32)
code.encode(np.ones(64, np.float32), numbers)
code.decode(numbers, out)
assert np.isfinite(out).all()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
