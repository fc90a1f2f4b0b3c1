"""Replicas that others exchange: PyTorch's DistributedDataParallel and torchft's DiLoCo, over gloo."""

import contextlib
import datetime
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from mpicomp.bench.measure.timings import gather
from mpicomp.bench.tasks import Task
from mpicomp.bench.trainer import CPU, Replica
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared as exported
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from mpicomp.errors import ConfigurationError
from mpicomp.mpi import Transport
from mpicomp.mpi.rounds import dense_ring_bytes
from mpicomp.reducer.agreement import run_collectively
from mpicomp.torch import broadcast_parameters

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface of gloo; in a lab the shaped one."""

_LIMIT = datetime.timedelta(minutes=5)
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@contextlib.contextmanager
def process_group(transport: Transport) -> Iterator[None]:
    """Make the transport's ranks torch.distributed's default group. Collective; in the end nothing is left of it."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise ConfigurationError("gloo: this PyTorch was built without it; leave out the exchanges that use it")
    group = transport.group
    one_host = transport.group.hosts == 1
    with _interface("lo" if one_host else None):
        host = address()
        is_unknown = host is None or (host.startswith("127.") and not one_host)
        if gather(np.array([float(is_unknown)]), transport).any():
            raise ConfigurationError(
                f"gloo: some rank does not know its address on the network; set {INTERFACE} to the interface that "
                "joins the hosts, for example eth0"
            )
        assert host is not None
        store = None
        if group.rank == 0:
            # Port 0: a free port that is found first and bound later may be taken by then.
            store = TCPStore(host, 0, group.size, True, _LIMIT, wait_for_workers=False)
        server, port = address_of_rank_0(host, 0 if store is None else store.port, transport)
        if store is None:
            store = TCPStore(server, port, group.size, False, _LIMIT)
        distributed.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size, timeout=_LIMIT)
        yield
        # Not after an error: it waits for exchanges that other ranks have yet to take part in.
        distributed.destroy_process_group()
    gather(np.zeros(1), transport)  # the store is the first rank's, and has to outlive the others' use of it


def address_of_rank_0(host: str, port: int, transport: Transport) -> tuple[str, int]:
    """Return the host's IPv4 address and the port that rank 0 passes. Collective."""
    *octets, server_port = (
        gather(np.array([*socket.inet_aton(host), port], np.float64), transport)[0].astype(int).tolist()
    )
    return ".".join(map(str, octets)), server_port


@contextlib.contextmanager
def _interface(name: str | None) -> Iterator[None]:
    if name is None or INTERFACE in os.environ:
        yield
        return
    os.environ[INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[INTERFACE]


def address() -> str | None:
    """Return this rank's IPv4 address where gloo will listen; None where there is none."""
    try:
        if INTERFACE not in os.environ:
            return socket.gethostbyname(socket.gethostname())
        name = os.environ[INTERFACE].split(",")[0].encode()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, struct.pack("16s24x", name[:15]))
        return socket.inet_ntoa(answer[20:24])
    except OSError:
        return None


@contextlib.contextmanager
def replica_group(transport: Transport, exchange: str) -> Iterator[Any]:
    """Return a context with this rank's `torchft.Manager`, inside of `process_group`. Collective."""
    os.environ.setdefault("RUST_LOG", "error")  # or each exchange writes ten lines
    run_collectively(lambda: _check_torchft(exchange), transport, exchange)
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(name).setLevel(logging.ERROR)

    group, host = transport.group, address()
    assert host is not None  # or there was no process group
    lighthouse = None
    if group.rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=group.size, join_timeout_ms=60_000)
    lighthouse_port = 0 if lighthouse is None else int(lighthouse.address().rsplit(":", 1)[1])
    server, port = address_of_rank_0(host, lighthouse_port, transport)
    store = TCPStore(host, 0, 1, True, _LIMIT, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=group.size,
        use_async_quorum=False,  # DiLoCo asks for it
        timeout=_LIMIT,
        quorum_timeout=_LIMIT,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{server}:{port}",
        replica_id=f"rank{group.rank}",
        hostname=host,
        init_sync=False,  # models are equal
    )
    yield manager
    manager.shutdown(wait=False)
    gather(np.zeros(1), transport)  # the lighthouse is the first rank's, and has to outlive the others' use of it
    if lighthouse is not None:
        lighthouse.shutdown()


def _check_torchft(exchange: str) -> None:
    try:
        import torchft  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"{exchange}: {error}; install it with pip install torchft") from error


class DDPReplica(Replica):
    """A replica that PyTorch's DistributedDataParallel averages, with the communication hook of an exchange's name."""

    overlaps = True

    def __init__(self, exchange: str, task: Task, transport: Transport, steps: int, device: torch.device = CPU) -> None:
        super().__init__(task, transport.group, steps, device)
        self._powersgd: PowerSGDState | None = None
        self._wire_fraction = 0.5 if exchange == "ddp-fp16" else 1.0  # of a dense ring
        # PowerSGD's hook begins sums in callbacks, which ranks with several buckets may run in different orders: gloo
        # then ends the job. So it has one bucket.
        megabytes = self.numel // 250_000 + 1 if exchange == "ddp-powersgd" else None
        self.network = DistributedDataParallel(self.model, bucket_cap_mb=megabytes)
        if exchange == "ddp-fp16":
            self.network.register_comm_hook(None, fp16_compress_hook)
        elif exchange == "ddp-powersgd":
            # It cannot begin earlier.
            self._powersgd = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            self.network.register_comm_hook(self._powersgd, powerSGD_hook)

    def step(self, loss: torch.Tensor) -> tuple[float, float, float]:
        ends = super().step(loss)
        state, fraction = self._powersgd, self._wire_fraction
        if state is not None and state.total_numel_before_compression:
            fraction = state.total_numel_after_compression / state.total_numel_before_compression
        self.wire_bytes = fraction * dense_ring_bytes(
            self.numel, self.group.size
        )  # gloo's way, which it does not count
        return ends


class DiLoCoReplica(Replica):
    """A replica that torchft's DiLoCo exchanges every few steps, with the outer optimizer of DiLoCo's paper."""

    def __init__(
        self,
        manager: Any,
        task: Task,
        transport: Transport,
        steps: int,
        every: int,
        device: torch.device = CPU,
    ) -> None:
        from torchft.local_sgd import DiLoCo

        super().__init__(task, transport.group, steps, device)
        broadcast_parameters(self.model, comm=transport)
        outer = torch.optim.SGD(self.parameters, lr=0.7, momentum=0.9, nesterov=True)
        self._every = every
        self._steps = 0
        self._hooks = DiLoCo(manager, [self.model], self.optimizer, outer, sync_every=every)
        self._hooks.__enter__()

    def step(self, loss: torch.Tensor) -> tuple[float, float, float]:
        self._steps += 1
        exchanges = self._steps % self._every == 0
        self.wire_bytes = float(dense_ring_bytes(self.numel, self.group.size)) if exchanges else 0.0
        return super().step(loss)

    def close(self) -> None:
        self._hooks.__exit__(None, None, None)
