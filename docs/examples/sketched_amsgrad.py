"""SketchedAMSGrad on mpi4py and NumPy: ranks sum sketches of momenta, which find the k elements that move most.

arXiv 2210.07454, with the two rounds of SketchedSGD (Ivkin et al. 2019, arXiv 1903.04488). A rank sends about k log d
numbers a step of d, whatever the number of ranks. Start it with `mpiexec -n 3 python sketched_amsgrad.py`.
"""

import numpy as np
from mpi4py import MPI

NUMEL = 100 * 20


class SketchedAMSGrad:
    """AMSGrad on a flat array of parameters that are the same on all ranks; all ranks call `step` together.

    The paper's memory holds momenta; here it holds lr * momenta, so that no step divides by a rate that may be 0.
    """

    def __init__(self, comm, numel, k, lr=0.01, betas=(0.9, 0.999), eps=1e-8, seed=0):
        self.comm, self.k, self.lr, self.betas, self.seed = comm, k, lr, betas, seed
        self.rows = 3
        self.columns = int(k * np.log(numel) / self.rows)
        self.momentum, self.memory, self.v = (np.zeros(numel) for _ in range(3))  # the first two differ between ranks
        self.vhat = np.full(numel, eps)
        self.steps = 0
        self.sent = 0  # numbers, of this rank

    def step(self, parameters, gradient):
        """Move the parameters in place, by the gradient of this rank's batch."""
        beta1, beta2 = self.betas
        # 1. Add this rank's momentum to what it has not sent.
        self.momentum += (1 - beta1) * (gradient - self.momentum)
        self.memory += self.lr * self.momentum

        # 2. Sum sketches: each element is added to one cell in every row, with a random sign. Values are divided by
        #    sqrt(vhat) first, so that the error of an estimate is about the same for all elements.
        random = np.random.default_rng([self.seed, self.steps])  # the same on all ranks, other hashes in every step
        cells = random.integers(self.columns, size=(self.rows, gradient.size))
        signs = random.choice([-1.0, 1.0], size=cells.shape)
        values = self.memory / np.sqrt(self.vhat)
        rows = [np.bincount(cell, sign * values, self.columns) for cell, sign in zip(cells, signs, strict=True)]
        table = self._sum(np.stack(rows))

        # 3. Estimate every element of the sum, and take the k largest: the same on all ranks.
        estimates = np.median(signs * np.take_along_axis(table, cells, axis=1), axis=0)
        chosen = np.argpartition(-abs(estimates), self.k)[: self.k]

        # 4. Sum the exact values there; all others stay in the memory.
        delivered = self._sum(self.memory[chosen]) / self.comm.size
        self.memory[chosen] = 0

        # 5. AMSGrad with what was delivered, whose variance is that of delivered momenta.
        self.steps += 1
        self.v *= beta2
        self.v[chosen] += (1 - beta2) * (delivered / self.lr) ** 2
        np.maximum(self.vhat, self.v / (1 - beta2**self.steps), out=self.vhat)
        parameters[chosen] -= delivered / np.sqrt(self.vhat[chosen])

    def _sum(self, array):
        """Return the sum over ranks, the same bits on all of them, which an Allreduce does not promise."""
        total = np.empty_like(array)
        self.comm.Reduce(array, total)
        self.comm.Bcast(total)
        self.sent += array.size
        return total


class AMSGrad:
    """The same without sketches: all gradients are averaged."""

    def __init__(self, comm, numel, lr=0.01, betas=(0.9, 0.999), eps=1e-8):
        self.comm, self.lr, self.betas = comm, lr, betas
        self.momentum, self.v, self.vhat = np.zeros(numel), np.zeros(numel), np.full(numel, eps)
        self.steps = self.sent = 0

    def step(self, parameters, gradient):
        mean = np.empty_like(gradient)
        self.comm.Reduce(gradient, mean)
        self.comm.Bcast(mean)
        mean /= self.comm.size
        self.sent += mean.size
        beta1, beta2 = self.betas
        self.momentum += (1 - beta1) * (mean - self.momentum)
        self.v += (1 - beta2) * (mean**2 - self.v)
        self.steps += 1
        np.maximum(self.vhat, self.v / (1 - beta2**self.steps), out=self.vhat)
        parameters -= self.lr * self.momentum / np.sqrt(self.vhat)


def main(comm, optimizer, steps=400):
    """Train a linear regression whose inputs have very different scales; return the weights and the squared errors."""
    random = np.random.default_rng(0)  # the same on all ranks
    scales = 1 / np.sqrt(np.arange(1, 101))
    truth = random.normal(size=(100, 20))
    tests = random.normal(size=(500, 100)) * scales
    weights = np.zeros((100, 20))
    errors = []
    for step in range(steps):
        random = np.random.default_rng([comm.rank, step])
        inputs = random.normal(size=(32, 100)) * scales
        wrong = inputs @ (weights - truth) + random.normal(size=(32, 20))
        optimizer.step(weights.reshape(-1), (inputs.T @ wrong / 32).reshape(-1))
        errors.append(((tests @ (weights - truth)) ** 2).mean())
    return weights, errors


if __name__ == "__main__":
    world = MPI.COMM_WORLD
    for trainer in SketchedAMSGrad(world, NUMEL, k=40, lr=0.1), AMSGrad(world, NUMEL, lr=0.1):
        parameters, found = main(world, trainer)
        if world.rank == 0:
            print(f"{type(trainer).__name__}: error {found[0]:.3f} to {found[-1]:.3f}, {trainer.sent // 400} numbers")
