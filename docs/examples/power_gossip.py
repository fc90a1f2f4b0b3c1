"""PowerGossip on mpi4py and NumPy: ranks average models with their neighbors in a ring, by low-rank messages.

Vogels, Karimireddy and Jaggi 2020, arXiv 2008.01425. Each rank steps on its own gradient. Two neighbors then exchange
products of their matrices with vectors that both know, so both know how their models differ along these vectors, and
each moves by a share of that difference. No sum over all ranks is formed. Start it with `mpiexec -n 3 python ...`.
"""

import numpy as np
from mpi4py import MPI


class PowerGossip:
    """Averages a dict of float64 arrays with those of both neighbors; all ranks call `average` together.

    A matrix X travels as X' P or X Q with `rank` columns, in turn; other arrays travel whole. The difference that two
    neighbors find, made orthonormal, is the P of their next exchange: a power iteration on the difference of models.
    """

    def __init__(self, comm, rank=1, seed=0):
        self.comm, self.rank, self.seed = comm, rank, seed
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        self.neighbors = sorted({left, right} - {comm.rank})
        self.weight = 1 / (1 + len(self.neighbors))  # so that averages converge to the mean over all ranks
        self.turn = 0
        self.vectors = {}  # by neighbor and name
        self.sent = 0  # numbers, to all neighbors

    def average(self, model):
        """Move the arrays towards the neighbors' in place; the sum over ranks stays the same."""
        rows = self.turn % 2 == 0  # whether the vectors are those of the rows
        messages = {other: self._project(model, other, rows) for other in self.neighbors}
        received = {other: np.empty_like(message) for other, message in messages.items()}
        requests = [self.comm.Irecv(array, other) for other, array in received.items()]
        requests += [self.comm.Isend(array, other) for other, array in messages.items()]
        MPI.Request.Waitall(requests)
        self.sent += sum(message.size for message in messages.values())
        for other, message in messages.items():
            # The lower rank's minus the higher one's on both of them, so that they have the same vectors to the bit.
            sign = 1 if self.comm.rank < other else -1
            difference = message - received[other] if sign > 0 else received[other] - message
            self._move(model, other, difference, sign * self.weight, rows)
        self.turn += 1

    def _project(self, model, other, rows):
        parts = []
        for name, array in model.items():
            if self._is_low_rank(array):
                if (other, name) not in self.vectors:
                    self.vectors[other, name] = self._draw(other, len(array))
                array = (array.T if rows else array) @ self.vectors[other, name]
            parts.append(array.ravel())
        return np.concatenate(parts)

    def _move(self, model, other, difference, share, rows):
        start = 0
        for name, array in model.items():
            if not self._is_low_rank(array):
                array -= share * difference[start : start + array.size].reshape(array.shape)
                start += array.size
                continue
            side = array.shape[1] if rows else array.shape[0]
            answer = difference[start : start + side * self.rank].reshape(side, self.rank)
            start += answer.size
            vectors = self.vectors[other, name]
            array -= share * (vectors @ answer.T if rows else answer @ vectors.T)
            # Where two models do not differ, an iteration would stay at zero.
            answer = answer if answer.any() else self._draw(other, side)
            self.vectors[other, name] = np.linalg.qr(answer)[0]

    def _is_low_rank(self, array):
        return array.ndim == 2 and self.rank * sum(array.shape) < array.size and self.rank <= min(array.shape)

    def _draw(self, other, side):
        """Return random orthonormal vectors, the same on both ranks of an edge."""
        edge = sorted((self.comm.rank, other))
        random = np.random.default_rng([self.seed, self.turn, *edge])
        return np.linalg.qr(random.standard_normal((side, self.rank)))[0]


def main(comm, steps=300, gossips=True):
    """Train a network of whose inputs each rank sees a share; return the model, losses, and how much was sent."""
    random = np.random.default_rng(0)  # the same on all ranks
    truth = random.normal(size=(12, 8))
    model = {"w1": random.normal(size=(12, 40)) / 4, "b1": np.zeros(40), "w2": random.normal(size=(40, 8)) / 8}
    owners = np.arange(600)[:, None] % comm.size  # the rank whose data a test is like
    tests = random.normal(size=(600, 12)) * (np.arange(12) % comm.size == owners)
    gossip = PowerGossip(comm)
    losses = []
    for step in range(steps):
        inputs = np.random.default_rng([comm.rank, step]).normal(size=(16, 12))
        inputs *= np.arange(12) % comm.size == comm.rank  # other inputs are zero in this rank's data
        hidden = np.tanh(inputs @ model["w1"] + model["b1"])
        error = 2 * (hidden @ model["w2"] - np.tanh(inputs @ truth)) / len(inputs)
        backward = error @ model["w2"].T * (1 - hidden**2)
        gradients = {"w1": inputs.T @ backward, "b1": backward.sum(axis=0), "w2": hidden.T @ error}
        for name, gradient in gradients.items():
            model[name] -= 0.05 * gradient
        if gossips:
            gossip.average(model)
        predicted = np.tanh(tests @ model["w1"] + model["b1"]) @ model["w2"]
        losses.append(((predicted - np.tanh(tests @ truth)) ** 2).mean())
    return model, losses, gossip.sent


if __name__ == "__main__":
    trained, errors, numbers = main(MPI.COMM_WORLD)
    whole = len(errors) * sum(array.size for array in trained.values())
    print(f"rank {MPI.COMM_WORLD.rank}: loss {errors[0]:.3f} to {errors[-1]:.3f}; {numbers / whole:.2f} models a step")
