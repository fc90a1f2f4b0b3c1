"""A manager of torchft for the ranks of an MPI job, each of which is a replica group by itself."""

import contextlib
import datetime
import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpicomp.bench import gloo
from mpicomp.bench.measure.timings import gather
from mpicomp.bench.training_rows import TORCHFT_DILOCO
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not said to be exported

from mpicomp.errors import ConfigurationError
from mpicomp.reducer.agreement import run_collectively
from mpicomp.transport import Transport

_LIMIT = datetime.timedelta(minutes=5)


@contextlib.contextmanager
def replica_group(transport: Transport, exchange: str) -> Iterator[Any]:
    """Return a context with this rank's `torchft.Manager`. Collective.

    It is used inside of `mpicomp.bench.gloo.process_group`, which chooses the network interface. All ranks take part
    in every exchange. ``exchange`` is the first word of errors.
    """
    os.environ.setdefault("RUST_LOG", "error")  # or each exchange writes ten lines
    run_collectively(lambda: _check(exchange), transport, exchange)
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(name).setLevel(logging.ERROR)

    group, address = transport.group, gloo.address()
    assert address is not None  # or there was no process group
    lighthouse = None
    if group.rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=group.size, join_timeout_ms=60_000)
    lighthouse_port = 0 if lighthouse is None else int(lighthouse.address().rsplit(":", 1)[1])
    server, port = gloo.address_of_rank_0(address, lighthouse_port, transport)
    store = TCPStore(address, 0, 1, True, _LIMIT, wait_for_workers=False)
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
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{server}:{port}",
        replica_id=f"rank{group.rank}",
        hostname=address,
        init_sync=False,  # models are equal
    )
    yield manager
    manager.shutdown(wait=False)
    gather(np.zeros(1), transport)  # the lighthouse is the first rank's, and has to outlive the others' use of it
    if lighthouse is not None:
        lighthouse.shutdown()


def _check(exchange: str) -> None:
    try:
        import torchft  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"{exchange}: {error}; install it with pip install torchft") from error
