"""Exchanges of others among the ranks of an MPI job: a process group of gloo, a manager of torchft, a plain top-k."""

import contextlib
import datetime
import fcntl
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from mpicomp.bench.measure.timings import gather
from mpicomp.bench.training_rows import TORCHFT_DILOCO
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not said to be exported

from mpicomp.errors import ConfigurationError
from mpicomp.reducer.agreement import run_collectively
from mpicomp.rounds import Round
from mpicomp.transport import Transport

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface of gloo; in a lab the shaped one."""

_LIMIT = datetime.timedelta(minutes=5)
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@contextlib.contextmanager
def process_group(transport: Transport) -> Iterator[None]:
    """Make the transport's ranks torch.distributed's default group. Collective; in the end nothing is left of it."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise ConfigurationError("gloo: this PyTorch was built without it; leave out what sums by it")
    group = transport.group
    one_host = transport.hosts() == 1
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
    """Set gloo's interface if none was chosen; None leaves it to gloo."""
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
        use_async_quorum=exchange != TORCHFT_DILOCO,  # which asks for it
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


Gather = Callable[[Tensor], list[Tensor]]  # hands every rank everyone's arrays of one length, in the order of ranks


class PlainTopK:
    """Averages gradients by the largest magnitudes of each rank, with error feedback, a parameter at a time."""

    def __init__(self, ratio: float, gather: Gather) -> None:
        self._ratio = ratio
        self._gather = gather
        self._residuals: dict[int, Tensor] = {}
        self.sent_bytes = 0
        self.phases_s = np.zeros(3)

    def average(self, parameters: Iterable[Tensor]) -> None:
        """Write the mean into each ``grad``; set ``phases_s`` and ``sent_bytes``, a rank's payload. Collective."""
        self.sent_bytes = 0
        self.phases_s = np.zeros(3)
        for place, parameter in enumerate(parameters):
            if parameter.grad is None:
                continue
            start = time.perf_counter()
            accumulated = parameter.grad.reshape(-1)
            if place in self._residuals:
                accumulated = accumulated + self._residuals[place]
            count = max(1, int(accumulated.numel() * self._ratio))
            _, indices = torch.topk(accumulated.abs(), count, sorted=False)
            values = accumulated[indices]
            residual = accumulated.clone()
            residual[indices] = 0
            self._residuals[place] = residual
            compressed = time.perf_counter()
            everyones_values, everyones_indices = self._gather(values), self._gather(indices)
            gathered = time.perf_counter()
            mean = torch.zeros_like(accumulated)
            for their_values, their_indices in zip(everyones_values, everyones_indices, strict=True):
                mean.index_add_(0, their_indices, their_values)
            mean /= len(everyones_values)
            parameter.grad.copy_(mean.view_as(parameter.grad))
            self.sent_bytes += values.nbytes + indices.nbytes
            self.phases_s += [compressed - start, gathered - compressed, time.perf_counter() - gathered]


def over_gloo(array: Tensor) -> list[Tensor]:
    """Gather by torch.distributed's default group."""
    everyones = [torch.empty_like(array) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyones, array)
    return everyones


def add_over_gloo(array: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Sum by torch.distributed's default group."""
    np.copyto(out, array)  # it sums in place
    distributed.all_reduce(torch.from_numpy(out))


def over_mpi(transport: Transport) -> Gather:
    """Return an allgather of MPI among a transport's ranks."""
    ranks = transport.group.size

    def gather(array: Tensor) -> list[Tensor]:
        send = array.numpy()
        recv = np.empty(ranks * send.size, send.dtype)
        task = Round("allgatherv", [send.size] * ranks, send.dtype, send=send, recv=recv)
        return list(torch.from_numpy(transport.perform(task)).view(ranks, -1))

    return gather
