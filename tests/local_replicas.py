"""Models with an optimizer each that step in one process, and updates of theirs made by hand."""

import copy

import numpy as np
import torch

import mpicomp
from mpicomp.mpi import LocalWorld

TRUTH = np.random.default_rng(11).normal(size=(9, 7))


def network(dtype=torch.float64):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(9, 12), torch.nn.Tanh(), torch.nn.Linear(12, 7)).to(dtype)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pair(model):
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.02)]


def loss_of(model, rank, step):
    inputs = np.random.default_rng([rank, step]).normal(size=(6, 9))
    dtype = next(model.parameters()).dtype
    return (model(torch.from_numpy(inputs).to(dtype)) - torch.from_numpy(inputs @ TRUTH).to(dtype)).square().mean()


def values(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).double().numpy()


def bits(model):
    return b"".join(parameter.detach().view(torch.uint8).numpy().tobytes() for parameter in model.parameters())


class Replicas:
    """N models with an optimizer each, made by ``wrap`` of a model and its transport, whose steps exchange."""

    def __init__(self, wrap, make, size, loss=loss_of, world=None):
        self.loss, self.world = loss, world or LocalWorld(size)
        self.models = [make() for _ in range(size)]
        self.optimizers = [wrap(*pair) for pair in zip(self.models, self.world.transports, strict=True)]

    @property
    def pairs(self):
        return list(zip(self.models, self.optimizers, strict=True))

    def backward(self, step):
        total = 0.0
        for rank, (model, optimizer) in enumerate(self.pairs):
            optimizer.zero_grad()
            loss_of_rank = self.loss(model, rank, step)
            loss_of_rank.backward()
            total += loss_of_rank.item()
        return total / len(self.models)

    def exchange(self):
        with torch.no_grad():
            return self.world.run([optimizer.rounds() for optimizer in self.optimizers])

    def step(self, step):
        mean = self.backward(step)
        self.exchange()
        return mean

    def scaled_step(self, scalers, step, clips=False):
        """Step as a script with a GradScaler on each rank does; the loss of rank 1 overflows in step 1."""
        exchanges = []
        for rank, ((model, optimizer), scaler) in enumerate(zip(self.pairs, scalers, strict=True)):
            optimizer.zero_grad()
            scaler.scale(self.loss(model, rank, step) * (torch.inf if (step, rank) == (1, 1) else 1)).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer._mpicomp.runs = False
            scaler.step(optimizer)
            optimizer._mpicomp.runs = True
            scaler.update()
            exchanges.append(optimizer._mpicomp.rounds(optimizer))
        self.world.run(exchanges)

    def run(self, steps):
        return [self.step(step) for step in steps]

    def values(self):
        return [values(model) for model in self.models]

    def bits(self):
        return [bits(model) for model in self.models]

    def same(self):
        return len(set(self.bits())) == 1

    def residuals(self):
        return [
            np.concatenate([optimizer.reducer.residual(name).reshape(-1) for name in optimizer.shared()]).astype(float)
            for optimizer in self.optimizers
        ]

    def states(self):
        return [
            {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
            for model, optimizer in self.pairs
        ]

    def load(self, states):
        for (model, optimizer), state in zip(self.pairs, states, strict=True):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])


class Updates(Replicas):
    """Replicas that exchange what their optimizers have changed."""

    def __init__(self, size, base=adam, make=network, loss=loss_of, world=None, **settings):
        def wrap(model, end):
            named = model.named_parameters()
            return mpicomp.torch.UpdateOptimizer(base(model), named, comm=end, **({"warmup": 0} | settings))

        super().__init__(wrap, make, size, loss, world)


class ByHand:
    """The same with plain optimizers: each rank's model begins at the shared parameters and makes some steps."""

    def __init__(self, size, base=adam, make=network):
        self.models = [make() for _ in range(size)]
        self.optimizers = [base(model) for model in self.models]
        self.shared = values(self.models[0])

    def step(self, step, left_out=()):
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if rank not in left_out:
                optimizer.step()

    def values(self):
        return [values(model) for model in self.models]

    def changes(self):
        return [values(model) - self.shared for model in self.models]

    def set(self, rank, flat):
        place = 0
        with torch.no_grad():
            for parameter in self.models[rank].parameters():
                part = torch.from_numpy(flat[place : place + parameter.numel()])
                parameter.copy_(part.view(parameter.shape))
                place += parameter.numel()

    def set_all(self, flat):
        self.shared = flat
        for rank in range(len(self.models)):
            self.set(rank, flat)

    def move_by_mean(self):
        self.set_all(self.shared + np.mean(self.changes(), axis=0))


def exchanges_of(make, model, link, compute_s, steps, size=4):
    """Train copies of a model on simulated links; return the steps before each exchange, and its record.

    Its optimizers choose the former by themselves. A step outside of exchanges takes a rank ``compute_s`` seconds.
    """
    world = LocalWorld(size, True, size, link)
    models = [copy.deepcopy(model) for _ in range(size)]
    optimizers = [make(*pair) for pair in zip(models, world.transports, strict=True)]
    found, since = [], 0
    for step in range(steps):
        for rank, (replica, optimizer, end) in enumerate(zip(models, optimizers, world.transports, strict=True)):
            optimizer.zero_grad()
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
            (replica(inputs) - inputs[:, :8].sum(dim=1, keepdim=True)).square().mean().backward()
            end.seconds += compute_s
        [every] = {optimizer.sync_every for optimizer in optimizers}
        world.run([optimizer.rounds() for optimizer in optimizers])
        since += 1
        if since == every:
            assert len({bits(replica) for replica in models}) == 1
            found.append((since, optimizers[0].reducer.last_step.buckets[0]))
            since = 0
    return found
