"""What holds for every training task: its words, its bits by seed, who sees what, and that it learns."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from marks import slow
from mpicomp.bench.tasks import Task, get_task
from tiny_gpt import Tiny

pytestmark = pytest.mark.timeout(100)


@dataclass
class Case:
    quality: str
    better: str
    parameters: tuple[float, float]  # least and most
    steps: int  # after which the quality is
    reached: float
    ranks: int = 1
    batch: tuple[int, ...] | None = None  # shape of its samples
    unseeded: set[str] = field(default_factory=set)  # parameters, by a part of their names, that no seed changes


CASES = {
    "digits": Case("held-out accuracy", "higher", (3e4, 5e4), 60, 0.9, ranks=4, batch=(32, 1, 8, 8)),
    "text-lstm": Case("held-out loss", "lower", (5e6, 1e7), 20, 5.5, batch=(8, 21), unseeded={"output.bias"}),
    "tiny": Case("held-out loss", "lower", (1e5, 2e5), 40, 4.0, batch=(12, 17), unseeded={"norm"}),
    "text-gpt": Case("held-out loss", "lower", (2.8e6, 3.3e6), 0, 9.0, batch=(12, 65), unseeded={"norm"}),
}
NAMES = ["digits", "text-lstm", "tiny", slow("text-gpt")]


@pytest.fixture(scope="module")
def make(numbers):
    """Return a function that makes a task with a seed, each once unless again."""
    made = {}

    def make(name, seed=1, again=False):
        if again or (name, seed) not in made:
            made[name, seed] = Tiny(seed, numbers) if name == "tiny" else get_task(name, seed)
        return made[name, seed]

    return make


def samples(task, *place):
    batch = task.batch(*place)
    return batch if isinstance(batch, torch.Tensor) else batch[0]


@pytest.mark.parametrize("name", NAMES)
def test_task_has_its_words_and_sizes(make, name):
    task, case = make(name), CASES[name]
    assert isinstance(task, Task)
    assert (task.name, task.quality_name, task.better) == (name, case.quality, case.better)
    state = torch.get_rng_state()
    numel = sum(parameter.numel() for parameter in task.model().parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert case.parameters[0] < numel < case.parameters[1]
    assert samples(task, 0, 0, 1).shape == case.batch


@pytest.mark.parametrize("name", NAMES)
def test_task_with_the_same_seed_has_the_same_bits(make, name):
    task, again, other = make(name), make(name, again=True), make(name, seed=2)
    model, same, different = (each.model().state_dict() for each in (task, again, other))
    assert all(torch.equal(model[key], same[key]) for key in model)
    kept = {key for key in model if torch.equal(model[key], different[key])}
    assert all(any(part in key for part in CASES[name].unseeded) for key in kept)
    assert torch.equal(samples(task, 5, 1, 4), samples(again, 5, 1, 4))
    assert not torch.equal(samples(task, 5, 1, 4), samples(other, 5, 1, 4))


@pytest.mark.parametrize("name", NAMES)
def test_task_gives_ranks_samples_of_their_own(make, name):
    seen = torch.cat([samples(make(name), 0, rank, 4) for rank in range(4)])
    assert len(np.unique(seen.flatten(1).numpy(), axis=0)) == len(seen) == 4 * make(name).batch_size


@pytest.mark.parametrize("name", ["digits", "text-lstm", "tiny"])
def test_task_learns_and_evaluates_without_a_trace(make, name):
    task, case = make(name), CASES[name]
    model = task.model()
    optimizer = task.optimizer(model)
    for step in range(case.steps):
        optimizer.zero_grad()
        sum(task.loss(model, task.batch(step, rank, case.ranks)) / case.ranks for rank in range(case.ranks)).backward()
        optimizer.step()
    optimizer.zero_grad()
    quality = task.evaluate(model, task.glance)
    assert quality > case.reached if case.better == "higher" else quality < case.reached
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert task.evaluate(model, task.glance) == quality
    model.eval()
    task.evaluate(model, task.glance)
    assert not model.training
