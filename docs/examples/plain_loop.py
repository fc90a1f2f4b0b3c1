"""Logistic regression in NumPy, its gradient averaged over ranks: any framework that gives arrays goes the same way."""

import numpy as np

import mpicomp


def main(rank, ranks, steps=200, comm=None):
    random = np.random.default_rng(0)
    inputs = random.normal(size=(1200, 50)).astype(np.float32)
    labels = inputs @ random.normal(size=50) > 0
    mine, targets = inputs[rank::ranks], labels[rank::ranks]

    weights = {"w": np.zeros(50, np.float32), "b": np.zeros(1, np.float32)}
    reducer = mpicomp.Reducer(mpicomp.TopK(ratio=0.1), comm=comm)
    for _ in range(steps):
        error = 1 / (1 + np.exp(-(mine @ weights["w"] + weights["b"]))) - targets
        gradients = {"w": mine.T @ error / len(targets), "b": error.mean(keepdims=True)}
        gradients = {name: gradient.astype(np.float32) for name, gradient in gradients.items()}
        means = reducer.reduce(gradients)  # called by all ranks; read-only, valid until the next call
        for name, mean in means.items():
            weights[name] -= 1.0 * mean
    reducer.close()
    return ((inputs @ weights["w"] + weights["b"] > 0) == labels).mean()


if __name__ == "__main__":
    from mpi4py import MPI

    accuracy = main(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    if MPI.COMM_WORLD.rank == 0:
        print(f"accuracy: {accuracy:.3f}")
