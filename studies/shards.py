"""Sharded models with PyTorch's and with mpicomp's exchanges between hosts, in turn in one job.

mpicomp lab run --hosts 2 --ppn 2 --bandwidth 200mbit --latency 50us -- python studies/shards.py
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpicomp.bench.measure import results
from mpicomp.bench.measure.timings import gather
from mpicomp.bench.replica import shard, threads_of_rank
from mpicomp.bench.tasks import get_task
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import mpicomp.torch
from mpicomp.cli import run_program
from mpicomp.cli.options import read_list
from mpicomp.errors import ConfigurationError
from mpicomp.setting_checks import check_least
from mpicomp.transport.connect import connect

_STUDY = "shards"
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")  # of a host, also of what gloo sends
_BLOCKS = 4
_OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
_COLUMNS = {
    "exchange": "", "ms": ".0f", "of native-bf16": ".2f", "kb": ".0f", "loss": ".4f", "steps": "d",
}  # fmt: skip


def none(model: Any, task: Any, mesh: DeviceMesh) -> Any:
    """Shard, and exchange nothing between replicas."""
    shard(model, mesh["shard"])
    return task.optimizer(model)


def native(model: Any, task: Any, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> Any:
    """Shard and replicate by PyTorch, which sums gradients in a dtype."""
    shard(model, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    return task.optimizer(model)


def distributed(model: Any, task: Any, mesh: DeviceMesh, **settings: Any) -> Any:
    shard(model, mesh["shard"])
    made = mpicomp.torch.DistributedOptimizer
    return made(task.optimizer(model), model, comm=mpicomp.torch.replicas(model), **settings)


def local_muon(model: Any, task: Any, mesh: DeviceMesh) -> Any:
    shard(model, mesh["shard"])
    return mpicomp.torch.LocalMuon(model, comm=mpicomp.torch.replicas(model))


def diloco(model: Any, task: Any, mesh: DeviceMesh) -> Any:
    shard(model, mesh["shard"])
    made, replicas = mpicomp.torch.UpdateOptimizer, mpicomp.torch.replicas(model)
    return made(task.optimizer(model), model, 16, compressor="dense", outer=_OUTER, comm=replicas)


EXCHANGES: dict[str, Callable[..., Any]] = {
    "none": none,
    "native": native,
    "native-bf16": lambda model, task, mesh: native(model, task, mesh, torch.bfloat16),
    "dense": lambda *given: distributed(*given, compressor="dense"),
    "auto": distributed,
    "muon": local_muon,
    "diloco": diloco,
}


class Run:
    """A model with its exchange, trained block by block."""

    def __init__(self, name: str, task: Any, mesh: DeviceMesh, rows: int) -> None:
        self.name, self._task, self._rows = name, task, rows
        self.model = task.model()
        self.optimizer = EXCHANGES[name](self.model, task, mesh)
        self.steps = 0
        self.seconds: list[float] = []
        self.sent: list[float] = []
        self.losses: list[float] = []

    def train(self, steps: int, transport: Any) -> None:
        group = transport.group
        for _ in range(steps):
            gather(np.zeros(1), transport)
            sent, begin = int(_SENT.read_text()), time.perf_counter()
            batch = self._task.batch(self.steps, group.rank, group.size)[: self._rows]
            self.optimizer.zero_grad()
            loss = self._task.loss(self.model, batch)
            loss.backward()
            self.optimizer.step()
            seconds = gather(np.array([time.perf_counter() - begin, float(loss.detach())]), transport)
            self.seconds.append(float(seconds[:, 0].max()))
            self.losses.append(float(seconds[:, 1].mean()))
            self.sent.append(int(_SENT.read_text()) - sent)
            self.steps += 1

    def row(self, steps: int) -> dict[str, Any]:
        """Summarise the last steps, by means, since some exchange only now and then."""
        return {
            "exchange": self.name, "ms": 1e3 * statistics.fmean(self.seconds[-steps:]),
            "kb": statistics.fmean(self.sent[-steps:]) / 1e3, "loss": statistics.fmean(self.losses[-16:]),
            "steps": self.steps,
        }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"studies/{_STUDY}.py", description=__doc__)
    parser.add_argument("--task", default="text-gpt", help="as of mpicomp train (%(default)s)")
    parser.add_argument("--exchange", default=",".join(EXCHANGES), metavar="X[,..]", help="(%(default)s)")
    parser.add_argument(
        "--rows",
        type=int,
        default=8,
        metavar="N",
        help="sequences of a rank and step, at most the task's (%(default)s)",
    )
    parser.add_argument("--steps", type=int, default=80, metavar="S", help="that count (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=48, metavar="W", help="steps before (%(default)s)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_least(_STUDY, "--rows", arguments.rows)
    check_least(_STUDY, "--steps", arguments.steps, _BLOCKS)
    names = read_list(arguments.exchange)
    transport = connect()
    group = transport.group
    if not _SENT.exists() or group.hosts < 2:
        raise ConfigurationError(f"{_STUDY}: needs two hosts with eth0; run it by mpicomp lab run --hosts 2")
    torch.set_num_threads(threads_of_rank(transport.cores))
    mpicomp.torch.shard_mesh()  # which makes torch's process group
    ranks = np.arange(group.size).reshape(group.hosts, -1).tolist()
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    runs = [Run(name, get_task(arguments.task, 0), mesh, arguments.rows) for name in names]
    for one in runs:
        one.train(arguments.warm_up, transport)
    for _ in range(_BLOCKS):
        for one in runs:
            one.train(arguments.steps // _BLOCKS, transport)
    if group.rank == 0:
        rows = [one.row(arguments.steps) for one in runs]
        base = next((row["ms"] for row in rows if row["exchange"] == "native-bf16"), None)
        results.show([row | {"of native-bf16": base and row["ms"] / base} for row in rows], _COLUMNS)
    for one in runs:
        if hasattr(one.optimizer, "reducer"):
            one.optimizer.close()
    transport.close()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
