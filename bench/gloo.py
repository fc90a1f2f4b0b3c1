"""PyTorch's own exchange between the ranks of an MPI job: a process group of gloo, which talks TCP by itself."""

import contextlib
import datetime
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

import numpy as np
from mpicomp.bench.measure.exchanges import share
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not said to be exported

from mpicomp.errors import ConfigurationError
from mpicomp.transport import Transport

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable by which gloo is told its network interface. In a lab it names the shaped one."""

_LIMIT = datetime.timedelta(minutes=5)
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@contextlib.contextmanager
def process_group(transport: Transport) -> Iterator[None]:
    """Make the transport's ranks torch.distributed's default group. Collective; in the end nothing is left of it.

    Raises
    ------
    ConfigurationError
        Where PyTorch has no gloo, or ranks on several hosts do not know by which interface they reach each other; on
        all ranks.
    """
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise ConfigurationError("ddp: this PyTorch was built without gloo; leave ddp out of --exchange")
    group = transport.group
    one_host = transport.hosts() == 1
    with _interface("lo" if one_host else None):
        own = address()
        alone = own is None or (own.startswith("127.") and not one_host)
        if share(np.array([float(alone)]), transport).any():
            raise ConfigurationError(
                f"ddp: some rank does not know its address on the network; set {INTERFACE} to the interface that "
                "joins the hosts, for example eth0"
            )
        assert own is not None
        store = None
        told = np.zeros(5)
        if group.rank == 0:
            # Port 0: whoever looks for a free one first and binds it later may come too late.
            store = TCPStore(own, 0, group.size, True, _LIMIT, wait_for_workers=False)
            told[:] = [*socket.inet_aton(own), store.port]
        *octets, port = share(told, transport)[0].astype(int).tolist()
        if store is None:
            store = TCPStore(".".join(map(str, octets)), port, group.size, False, _LIMIT)
        distributed.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size, timeout=_LIMIT)
        yield
        # Not where something was raised: it waits for exchanges that other ranks have yet to take part in.
        distributed.destroy_process_group()
    share(np.zeros(1), transport)  # the store is the first rank's, and has to outlive the others' use of it


@contextlib.contextmanager
def _interface(name: str | None) -> Iterator[None]:
    """Have gloo take an interface if no other was chosen; None leaves it to gloo."""
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
