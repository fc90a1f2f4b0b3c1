import torch
from mpi4py import MPI
from task import Data, make_model
from torch.utils.data import DataLoader, DistributedSampler

import mpicomp.torch


def main(epochs=4):
    comm = MPI.COMM_WORLD
    torch.manual_seed(comm.rank)
    data = Data()
    sampler = DistributedSampler(data, num_replicas=comm.size, rank=comm.rank)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mpicomp.torch.broadcast_parameters(model)
    mpicomp.torch.broadcast_optimizer_state(optimizer)
    optimizer = mpicomp.torch.DistributedOptimizer(optimizer, model.named_parameters())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, 16, sampler=sampler):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
        mean = comm.allreduce(loss.item()) / comm.size
        if comm.rank == 0:
            print(f"epoch {epoch}: {mean:.4f}")
    return model, mean


if __name__ == "__main__":
    main()
