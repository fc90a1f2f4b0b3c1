import json
import math

import numpy as np
import pytest
import torch
from mpicomp.bench import train as measured_training
from mpicomp.bench.measure.metrics import MetricsWriter
from mpicomp.bench.measure.progress import Progress
from mpicomp.bench.tasks.gpt import GPT
from mpicomp.bench.trainer import update as update_model
from tiny_gpt import Tiny

import mpicomp
from mpicomp.mpi import LocalWorld
from mpicomp.policies import get_policy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def tiny(numbers):
    return Tiny(seed=1, data=numbers)


def train(task, model, optimizer, updater, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(step, 0, 1))
        loss.backward()
        updater()
        losses.append(loss.item())
    return losses


def test_initial_weights(tiny):
    model = GPT(1000, 64, 128, 8)
    deviations = {name: parameter.std().item() for name, parameter in model.named_parameters() if parameter.ndim > 1}
    for name, deviation in deviations.items():
        added = name.endswith(("attended.weight", "contract.weight"))
        assert deviation == pytest.approx(0.02 / 4 if added else 0.02, rel=0.03), name  # 4 is sqrt(2 * 8)
    assert sum(name.endswith(("attended.weight", "contract.weight")) for name in deviations) == 16
    assert all((parameter == 1).all() for parameter in model.parameters() if parameter.ndim == 1)
    # Nothing is known of the next token: the loss is that of any of them, equally likely.
    assert tiny.loss(tiny.model(), tiny.batch(0, 0, 1)).item() == pytest.approx(math.log(tiny.tokens), abs=0.3)


def test_logits_are_those_of_plain_arithmetic():
    torch.manual_seed(0)
    model = GPT(tokens=30, length=10, width=128, layers=2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(0, 30, (2, 7))
    weights = {name: parameter.detach().double().numpy() for name, parameter in model.named_parameters()}

    def norm(values, scale):
        centred = values - values.mean(axis=-1, keepdims=True)
        return scale * centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)

    erf = np.vectorize(math.erf)
    expected = np.empty((2, 7, 30))
    for sample, token in enumerate(tokens.numpy()):
        hidden = weights["embedding.weight"][token] + weights["positions.weight"][:7]
        for layer in range(2):
            block = {
                name.removeprefix(f"blocks.{layer}."): value
                for name, value in weights.items()
                if name.startswith(f"blocks.{layer}.")
            }
            packed = norm(hidden, block["attention_norm.weight"]) @ block["queries_keys_values.weight"].T
            attended = np.empty((7, 128))
            for head in range(2):
                queries, keys, values = (packed[:, 128 * kind + 64 * head :][:, :64] for kind in range(3))
                for place in range(7):
                    scores = np.exp(keys[: place + 1] @ queries[place] / 8)  # 8 is the root of 64
                    attended[place, 64 * head :][:64] = scores @ values[: place + 1] / scores.sum()
            hidden = hidden + attended @ block["attended.weight"].T
            wide = norm(hidden, block["perceptron_norm.weight"]) @ block["expand.weight"].T
            hidden = hidden + (wide * (1 + erf(wide / 2**0.5)) / 2) @ block["contract.weight"].T
        expected[sample] = norm(hidden, weights["norm.weight"]) @ weights["embedding.weight"].T
    np.testing.assert_allclose(model(tokens).detach().numpy(), expected, rtol=1e-3, atol=1e-3)


def test_matrices_decay_and_scales_do_not(tiny):
    model = tiny.model()
    matrices, scales = tiny.optimizer(model).param_groups
    assert (matrices["weight_decay"], scales["weight_decay"]) == (0.1, 0)
    assert all(matrix.ndim == 2 for matrix in matrices["params"])
    assert all(scale.ndim == 1 for scale in scales["params"])
    assert len(matrices["params"]) + len(scales["params"]) == len(list(model.parameters()))


def test_training_clips_and_follows_the_schedule(tiny):
    model = tiny.model()
    optimizer = tiny.optimizer(model)
    schedule = tiny.schedule(optimizer, 20)
    rates, norms = [], []

    def update():
        rates.append({group["lr"] for group in optimizer.param_groups})
        for parameter in model.parameters():
            parameter.grad *= 100
        update_model(tiny, optimizer, schedule)
        norms.append(math.hypot(*(parameter.grad.norm().item() for parameter in model.parameters())))

    train(tiny, model, optimizer, update, range(20))
    shares = [0.5, 1, *(0.55 + 0.45 * math.cos(math.pi * step / 18) for step in range(1, 19))]
    assert [rate for [rate] in rates] == pytest.approx([tiny.rate * share for share in shares])
    assert norms == pytest.approx([1] * 20, rel=1e-3)


@pytest.fixture
def threads():
    """Restore the number of threads, which a training sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_rate_of_the_command_follows_its_steps(tiny, tmp_path):
    settings = measured_training.Settings(mpicomp.Dense(), "auto", get_policy("static"), 5, 0, probes=False)
    with MetricsWriter(str(tmp_path / "m.jsonl")) as metrics:
        measured_training.train_measured(tiny, settings, LocalWorld(1).transports[0], Progress(False), metrics)
    rates = [json.loads(line)["lr"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    expected = [tiny.rate * (0.55 + 0.45 * math.cos(math.pi * step / 4)) for step in range(5)]
    assert rates == pytest.approx(expected)
