"""A training script for the templates: digits, on a GPU for each rank or on CPUs; it resumes from its checkpoints."""

import argparse
import sys
from pathlib import Path

import mpicomp


def choose_device():
    """Give the device of this rank, and why it is no GPU."""
    try:
        return f"cuda:{mpicomp.local_device()}", None
    except mpicomp.MpicompError as error:
        return "cpu", str(error)


def main():
    """Train, from the newest checkpoint where there is one, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--compressor", default="topk")
    parser.add_argument("--collective", default="auto")
    parser.add_argument(
        "--checkpoints", type=Path, help="folder; SIGTERM and SIGUSR1 then end training early, with status 75"
    )
    parser.add_argument("--every", type=int, default=100, metavar="N", help="steps from one checkpoint to the next")
    arguments = parser.parse_args()
    if arguments.checkpoints is not None:
        mpicomp.stop_on_signals()  # before what takes time: until then they end the process
    device, reason = choose_device()  # before MPI starts, since it calls another program

    # MPI before torch, or srun --mpi=pmi2 fails with the wheel of MPICH: see README.md.
    from mpi4py import MPI

    # isort: split
    import torch
    from mpicomp.bench.tasks import get_task

    from mpicomp.torch import DistributedOptimizer, broadcast_parameters

    comm = MPI.COMM_WORLD
    devices, reasons = comm.gather(device), comm.gather(reason)
    if comm.rank == 0:
        print(f"{comm.size} ranks on {', '.join(devices)}", *filter(None, reasons[:1]), sep="\nno GPU: ", flush=True)
    if device != "cpu":
        torch.cuda.set_device(device)
    torch.manual_seed(comm.rank)  # a job that resumes draws what it would have drawn, see below
    task = get_task("digits")
    model = task.model().to(device)
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(
        task.optimizer(model), model.named_parameters(), arguments.compressor, arguments.collective
    )

    step = 0
    saved = mpicomp.load_checkpoint(arguments.checkpoints) if arguments.checkpoints else None
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        step = saved["step"]
        if comm.rank == 0:
            print(f"resumed at step {step}", flush=True)

    stop = False
    while step < arguments.steps and not stop:
        optimizer.zero_grad()
        task.loss(model, task.batch(step, comm.rank, comm.size)).backward()
        optimizer.step()
        step += 1
        if arguments.checkpoints is None:
            continue
        stop = optimizer.reducer.last_step.stop  # the same on all ranks, whichever has got the signal
        if stop or step % arguments.every == 0 or step == arguments.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            mpicomp.save_checkpoint(arguments.checkpoints, state | {"random": torch.get_rng_state(), "step": step})

    over = step >= arguments.steps
    if comm.rank == 0:
        if over:
            print(f"{step} steps on {comm.size} ranks: {task.quality_name} {task.evaluate(model):.3f}")
        else:
            print(f"stopped after step {step} of {arguments.steps}; a checkpoint was written")
    optimizer.close()
    return 0 if over else mpicomp.STOPPED


if __name__ == "__main__":
    sys.exit(main())
