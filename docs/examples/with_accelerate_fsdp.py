"""Accelerate's FSDP2 plugin shards a model inside each host, which is all that it sees; mpicomp connects hosts."""

import os
import tempfile

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from mpi4py import MPI

import mpicomp.torch


def main(shards=None, steps=20):
    world = MPI.COMM_WORLD
    host = world.Split_type(MPI.COMM_TYPE_SHARED) if shards is None else world.Split(world.rank // shards)
    os.environ["LOCAL_RANK"] = str(host.rank % max(1, torch.cuda.device_count()))
    folder = host.bcast(tempfile.mkdtemp() if host.rank == 0 else None)
    torch.distributed.init_process_group(init_method=f"file://{folder}/store", rank=host.rank, world_size=host.size)

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100)
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    replicas = mpicomp.torch.replicas(model)
    mpicomp.torch.DistributedOptimizer(optimizer.optimizer, model, comm=replicas)  # which Accelerate's one steps

    torch.manual_seed(world.rank)  # all ranks of all hosts draw batches of their own
    for _ in range(steps):
        inputs = torch.randn(32, 8, device=accelerator.device)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :2].sin()).square().mean()
        accelerator.backward(loss)
        mpicomp.torch.clip_grad_norm_(optimizer.optimizer, 1.0)
        optimizer.step()
    return model, loss.item()


if __name__ == "__main__":
    main()
