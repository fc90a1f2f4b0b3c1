"""PyTorch's own exchange between the ranks of an MPI job: a process group of gloo, which talks TCP by itself."""

import contextlib
import datetime
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

import numpy as np
from mpicomp.bench.measure.timings import gather
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not said to be exported

from mpicomp.errors import ConfigurationError
from mpicomp.transport import Transport

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface of gloo; in a lab the shaped one."""

_LIMIT = datetime.timedelta(minutes=5)
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@contextlib.contextmanager
def process_group(transport: Transport) -> Iterator[None]:
    """Make the transport's ranks torch.distributed's default group. Collective; in the end nothing is left of it."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise ConfigurationError("ddp: this PyTorch was built without gloo; leave ddp out of --exchange")
    group = transport.group
    one_host = transport.hosts() == 1
    with _interface("lo" if one_host else None):
        host = address()
        is_unknown = host is None or (host.startswith("127.") and not one_host)
        if gather(np.array([float(is_unknown)]), transport).any():
            raise ConfigurationError(
                f"ddp: some rank does not know its address on the network; set {INTERFACE} to the interface that "
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
