import torch
from mpi4py import MPI
from task import Data, make_model
from torch.utils.data import DataLoader, DistributedSampler

import mpicomp.torch


def main(epochs=4):
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    data = Data()
    sampler = DistributedSampler(data, num_replicas=size, rank=rank)
    model = make_model()
    mpicomp.torch.broadcast_parameters(model)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    inner = mpicomp.torch.UpdateOptimizer(inner, model, sync_every=8, compressor="dense", outer=outer, warmup=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, 16, sampler=sampler):
            inner.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            inner.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss:.4f}")
    inner.synchronize()
    return model, float(loss)


if __name__ == "__main__":
    main()
