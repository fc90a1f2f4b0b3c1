"""A script with epochs, validation, a scheduler, clipping and checkpoints, on as many ranks as `mpiexec` starts."""

import os

import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpicomp.torch


def main(folder, epochs=4):
    comm = MPI.COMM_WORLD
    torch.manual_seed(comm.rank)  # dropout and augmentation differ between ranks; the models are made equal below
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))  # all ranks hold the same data
    data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    train, test = torch.utils.data.Subset(data, range(192)), torch.utils.data.Subset(data, range(192, 256))
    sampler = DistributedSampler(train, num_replicas=comm.size, rank=comm.rank)  # a share for each rank
    loader = DataLoader(train, batch_size=8, sampler=sampler)

    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mpicomp.torch.broadcast_parameters(model)
    optimizer = mpicomp.torch.DistributedOptimizer(optimizer, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)

    start, file = 0, f"{folder}/checkpoint-{comm.rank}.pt"  # each rank has its own: residuals differ
    if comm.allreduce(os.path.exists(file), MPI.LAND):  # all ranks load, or none does
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        start = saved["epoch"]

    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        for batch, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(batch), targets).backward()
            optimizer.synchronize()  # now gradients are means over all ranks
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        with torch.no_grad():
            share = [test[i] for i in range(comm.rank, len(test), comm.size)]
            error = sum((model(x) - y).square().item() for x, y in share)
        error = comm.allreduce(error) / len(test)  # the same number on all ranks, before anything is decided by it
        scheduler.step(error)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(states | {"epoch": epoch + 1}, file)
        if comm.rank == 0:
            print(f"epoch {epoch}: {error:.3f}", flush=True)
            torch.save(model.state_dict(), f"{folder}/model.pt")  # the parameters are the same on all ranks
    return model, error


if __name__ == "__main__":
    main(".")
