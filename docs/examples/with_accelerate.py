"""Accelerate on as many processes as `mpiexec` starts: each is a single one to it, and the optimizer averages."""

import torch
from accelerate import Accelerator
from mpi4py import MPI

import mpicomp.torch


def main(folder, epochs=4):
    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    # Not with cpu=True: under a launcher of MPI that starts torch.distributed. Without GPUs the CPU is taken anyway.
    accelerator = Accelerator(log_with="tensorboard" if rank == 0 else None, project_dir=folder)
    settings = {"lr": 0.05, "width": 32, "ranks": ranks}
    if rank == 0:
        accelerator.init_trackers("accelerate", config=settings)

    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 8, generator=random)
    dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    share = torch.utils.data.Subset(dataset, range(rank, len(dataset), ranks))  # of this rank
    loader = torch.utils.data.DataLoader(share, batch_size=16, shuffle=True)

    width = settings["width"]
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    model, loader = accelerator.prepare(model, loader)
    mpicomp.torch.broadcast_parameters(model)
    plain = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9)
    exchanging = mpicomp.torch.DistributedOptimizer(plain, model.named_parameters())
    optimizer = accelerator.prepare(exchanging)

    step = 0
    for _ in range(epochs):
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            exchanging.synchronize()  # what is clipped is the mean
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            step += 1
            if rank == 0:
                accelerator.log({"loss": loss.item()} | exchanging.reducer.last_step.scalars(), step)
    accelerator.end_training()
    return loss.item(), model


if __name__ == "__main__":
    print("loss:", main("runs")[0])
