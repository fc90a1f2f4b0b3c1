import json
import math

import numpy as np
import pytest
import torch
from mpicomp.bench import train as measured_training
from mpicomp.bench.measure.metrics import MetricsWriter
from mpicomp.bench.measure.progress import Progress
from mpicomp.bench.tasks.gpt import GPT, TextGPT
from mpicomp.bench.tasks.updating import Updater, warm_up_and_cosine
from mpicomp.bench.training import Exchange, Settings, train_in_turn, trainers
from tiny_gpt import Tiny

import mpicomp
from mpicomp.policies import get_policy
from mpicomp.transport import LocalWorld

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


def test_size_of_the_model():
    task, width, layers = TextGPT, TextGPT.width, TextGPT.layers
    model = GPT(task.vocabulary, task.length, width, layers)
    numels = [parameter.numel() for parameter in model.parameters()]
    # Twelve matrices' worth of width x width and two norms a layer; the embeddings and the last norm.
    assert sum(numels) == layers * (12 * width**2 + 2 * width) + (task.vocabulary + task.length + 1) * width
    assert 2.8e6 < sum(numels) < 3.3e6
    assert task.vocabulary * width < 0.15 * sum(numels)


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


def test_later_token_changes_no_earlier_logits(tiny):
    model = tiny.model()
    tokens = tiny.batch(0, 0, 1)[:, :-1]
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % tiny.tokens
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


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
    updater = Updater(tiny, optimizer, 20)
    rates, norms = [], []

    def update():
        rates.append({group["lr"] for group in optimizer.param_groups})
        for parameter in model.parameters():
            parameter.grad *= 100
        updater.update()
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


@pytest.mark.usefixtures("threads")
def test_exchanges_have_the_same_rates(tiny):
    exchanges = [Exchange("none"), Exchange("dense", mpicomp.Dense())]
    settings, transport = Settings(steps=2, blocks=2, warm_up=2), LocalWorld(1).transports[0]
    with trainers(exchanges, tiny, settings, transport) as made:
        trained = train_in_turn(made, tiny, settings, transport, lambda _: None)
    model = tiny.model()
    optimizer = tiny.optimizer(model)
    train(tiny, model, optimizer, Updater(tiny, optimizer, 6).update, range(6))
    assert [training.quality for training in trained] == [tiny.evaluate(model)] * 2


def test_resumed_training_has_the_same_bits(tiny, tmp_path):
    """As a script does it, with mpicomp's optimizer and checkpoint."""
    transport = LocalWorld(1).transports[0]

    def start():
        model = tiny.model()
        optimizer = mpicomp.torch.DistributedOptimizer(
            tiny.optimizer(model), model.named_parameters(), "dense", comm=transport
        )
        return model, optimizer, tiny.schedule(optimizer, 12)

    def go_on(model, optimizer, schedule, steps):
        def update():
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), tiny.clip)
            optimizer.step()
            schedule.step()

        return train(tiny, model, optimizer, update, steps)

    straight = start()
    losses = go_on(*straight, range(12))
    stopped = start()
    assert go_on(*stopped, range(5)) == losses[:5]
    names = ("model", "optimizer", "schedule")
    state = {name: part.state_dict() for name, part in zip(names, stopped, strict=True)}
    mpicomp.save_checkpoint(tmp_path, state, transport)
    resumed = start()
    saved = mpicomp.load_checkpoint(tmp_path, transport)
    for name, part in zip(names, resumed, strict=True):
        part.load_state_dict(saved[name])
    assert go_on(*resumed, range(5, 12)) == losses[5:]
    assert all(map(torch.equal, resumed[0].parameters(), straight[0].parameters()))
    assert resumed[2].get_last_lr() == straight[2].get_last_lr()
    for _, optimizer, _ in (straight, stopped, resumed):
        optimizer.close()


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 60, 300])
def test_rates_are_those_of_the_formula(steps):
    rising = max(1, round(steps / 10))
    expected = [(step + 1) / rising for step in range(rising)]
    falling = steps - rising
    expected += [0.55 + 0.45 * math.cos(math.pi * step / falling) for step in range(1, falling + 1)]
    rates = [warm_up_and_cosine(step, steps) for step in range(steps)]
    assert rates == pytest.approx(expected, abs=1e-12)
    assert max(rates) == 1
    assert rates[-1] == pytest.approx(1 if steps == 1 else 0.1)


def test_rate_after_the_last_step_is_its_rate():
    assert warm_up_and_cosine(500, 300) == warm_up_and_cosine(299, 300)
