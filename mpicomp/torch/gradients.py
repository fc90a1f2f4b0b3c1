"""What backward leaves in ``.grad``, averaged over the ranks: while backward goes on, or after it."""

import hashlib
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.arrays import Described
from mpicomp.collectives import Round
from mpicomp.collectives.rows import mean_of_rows
from mpicomp.errors import ConfigurationError, DisagreementError, LaunchError
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.reducer.stream import Stream
from mpicomp.torch.broadcast import as_bytes
from mpicomp.transport.base import Asked
from mpicomp.transport.interleave import ProgressThread

_FLAG = np.dtype(np.uint8)
_DIGEST = 16  # bytes


class Gradients:
    """The gradients of some parameters, and how they are averaged.

    Collective over the reducer's ranks, as are `average` and `close`.

    Parameters
    ----------
    reducer : Reducer
        Averages them.
    parameters : mapping of str to torch.Tensor
        By name, in the model's order; backward fills them from the last to the first.
    overlap : bool or None
        Whether buckets are exchanged while backward goes on, see `overlap_thread`.
    loss_scale : callable, optional
        Gives what the loss, and with it every gradient, is multiplied by.

    Attributes
    ----------
    averaged : bool
        Whether ``.grad`` holds means.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: Mapping[str, torch.Tensor],
        overlap: bool | None = None,
        loss_scale: Callable[[], float] | None = None,
    ) -> None:
        self.averaged = False
        self._reducer = reducer
        self._parameters = dict(reversed(list(parameters.items())))
        self._loss_scale = loss_scale
        self._rows: set[str] = set()
        self._compared = False
        self._accumulating = False
        self._hooks: dict[str, Any] = {}
        self._thread = overlap_thread(reducer, overlap)
        self._stream: Stream | None = None
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}  # what was handed over, and in which state
        self._watch()

    @property
    def overlaps(self) -> bool:
        """Whether buckets are exchanged while backward goes on."""
        return self._thread is not None

    @property
    def under_way(self) -> bool:
        """Whether backward has begun to hand over gradients that were not averaged yet."""
        return bool(self._seen)

    def add(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take up more parameters, on all ranks."""
        self._parameters = dict(reversed(list(parameters.items()))) | self._parameters
        self._compared = False

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let backward add to gradients without exchanging them."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def average(self, lr: float | None) -> None:
        """Put means into ``.grad``. What no rank has a gradient for is left without one. Collective."""
        transport = self._reducer.transport
        dense: dict[str, torch.Tensor] = {}
        absent: set[str] = set()
        with torch.no_grad():
            own = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
            self._check_unchanged()
            if not self._compared:
                self._rows = transport.run(self._compare(own))
                self._compared = True
            rows = {name: transport.run(self._mean_of_rows(own[name])) for name in own if name in self._rows}
            finite = all(mean is None or bool(np.isfinite(mean[1]).all()) for mean in rows.values())
            for name, parameter in own.items():
                if name in self._rows:
                    continue
                if parameter.grad is None:
                    absent.add(name)
                    dense[name] = parameter.new_zeros(()).expand(parameter.shape)
                else:
                    dense[name] = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            means = self._exchange(dense, lr, absent, finite)
            record = self._reducer.last_step
            assert record is not None
            factor = 1.0 if self._loss_scale is None else self._loss_scale()
            spoilt = record.skipped and self._loss_scale is not None
            for name, mean in means.items():
                parameter = own[name]
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(mean)
                if spoilt:
                    parameter.grad.fill_(torch.inf)  # what a GradScaler looks for
                elif factor != 1:
                    parameter.grad.mul_(factor)
            for name, mean_rows in rows.items():
                if mean_rows is not None:
                    own[name].grad = _as_sparse(mean_rows, own[name], record.skipped)
        self._watch()
        self.averaged = True

    def close(self) -> None:
        """Give back what it holds of MPI. Collective."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._seen.clear()
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def _exchange(
        self, dense: dict[str, torch.Tensor], lr: float | None, absent: set[str], finite: bool
    ) -> dict[str, torch.Tensor]:
        """Exchange what is not under way already, and give the means."""
        stream = self._stream
        self._stream = None
        self._seen.clear()
        if stream is None and self._thread is not None:
            stream = self._reducer.stream(self._thread, self._scale())
        means: dict[str, torch.Tensor]
        if stream is None:
            means = self._reducer.reduce(dense, lr, absent=absent, scale=self._scale(), finite=finite)
        else:
            means = stream.finish(dense, lr, absent, finite)
        return means

    def _scale(self) -> float:
        return 1.0 if self._loss_scale is None else 1 / self._loss_scale()

    def _watch(self) -> None:
        """Have backward tell when a gradient is complete, for those that require one by now."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._hooks:
                handle = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
                self._hooks[name] = handle

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self.averaged = False
            if self._thread is not None and not self._accumulating:
                assert parameter.grad is not None
                self._fill(self._thread, name, parameter.grad)

        return hook

    def _fill(self, thread: ProgressThread, name: str, gradient: torch.Tensor) -> None:
        """Hand over a gradient that is complete; its bucket is exchanged as soon as all of it is there."""
        if name in self._seen:
            raise ConfigurationError(
                f"gradients: backward has come to '{name}' twice since the last step, and the exchange has begun at "
                "the first time; put every backward but the last one into `with optimizer.accumulate():`, or pass "
                "overlap=False"
            )
        if not self._seen:
            self._stream = self._reducer.stream(thread, self._scale())
        self._seen[name] = gradient, gradient._version
        if self._stream is not None and not gradient.is_sparse:
            self._stream.put(name, gradient.detach())

    def _check_unchanged(self) -> None:
        """Refuse gradients that were written to after they were handed over: the change would be lost."""
        for name, (gradient, version) in self._seen.items():
            if self._parameters[name].grad is not gradient or gradient._version != version:
                raise ConfigurationError(
                    f"gradients: the one of '{name}' was changed between backward() and step(), when its exchange had "
                    "begun already; call optimizer.synchronize() first, or pass overlap=False"
                )

    def _compare(self, own: Mapping[str, torch.Tensor]) -> Generator[Asked, Any, set[str]]:
        """Make sure that all ranks start with the same parameters, and give those with sparse gradients. As rounds."""
        group = self._reducer.transport.group
        members = [
            Described(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))
            for name, parameter in own.items()
        ]
        yield from agree(Signature({}, members), None, group)
        sparse = [parameter.grad is not None and parameter.grad.is_sparse for parameter in own.values()]
        mine = np.frombuffer(b"".join(map(_digest, own.values())) + bytes(sparse), _FLAG)
        everyones = yield Round(
            "allgatherv", [mine.size] * group.size, _FLAG, send=mine, recv=np.empty(mine.size * group.size, _FLAG)
        )
        told = everyones.reshape(group.size, -1)
        digests = told[:, : _DIGEST * len(own)].reshape(group.size, len(own), _DIGEST)
        differs = (digests != digests[0]).any(axis=2)
        for name, ranks in reversed(list(zip(own, differs.T, strict=True))):
            if ranks.any():
                raise DisagreementError(
                    f"DistributedOptimizer: parameter '{name}' has other values on rank {int(ranks.argmax())} than on "
                    "rank 0; call mpicomp.torch.broadcast_parameters(model) before training"
                )
        some = told[:, _DIGEST * len(own) :].any(axis=0)
        return {name for name, is_sparse in zip(own, some, strict=True) if is_sparse}

    def _mean_of_rows(
        self, parameter: torch.Tensor
    ) -> Generator[Asked, Any, tuple[NDArray[np.int64], NDArray[np.floating]] | None]:
        """Average a sparse gradient, as rounds."""
        work = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        width = parameter[0].numel() if len(parameter) else 1
        gradient = parameter.grad
        indices, rows = None, torch.empty((0, width), dtype=work)
        if gradient is not None:
            if not gradient.is_sparse:
                gradient = gradient.to_sparse(1)
            gradient = gradient.coalesce()
            indices = gradient.indices()[0].cpu().numpy()
            rows = gradient.values().to(device="cpu", dtype=work).reshape(-1, width)
        return (yield from mean_of_rows(indices, rows.numpy(), self._reducer.transport.group))


def overlap_thread(reducer: Reducer, wanted: bool | None) -> ProgressThread | None:
    """Give a thread that exchanges while backward goes on, or None. Collective.

    Parameters
    ----------
    reducer : Reducer
        Whose exchanges.
    wanted : bool or None
        True wants it wherever there are others and MPI allows it. None does not where all ranks are on one host, so
        that nothing is waited for, and torch's threads take all of its cores. One rank that does not is enough.
    """
    transport = reducer.transport
    ranks = transport.group.size
    if ranks == 1:
        return None
    problem = None
    try:
        transport.check_threads(alone=False)
    except LaunchError as error:
        problem = error
    crowded = transport.group.hosts == 1 and transport.cores < torch.get_num_threads() + 1
    mine = np.array([problem is None, not crowded if wanted is None else wanted], _FLAG)
    task = Round("allgatherv", [2] * ranks, _FLAG, send=mine, recv=np.empty(2 * ranks, _FLAG))
    everyones = transport.perform(task).reshape(ranks, 2)
    able, useful = (bool(flags.all()) for flags in everyones.T)
    if able and useful:
        return ProgressThread(transport, lanes=1).start()
    if not able and useful and transport.group.rank == 0:
        warnings.warn(f"gradients are exchanged after backward, not during it: {problem}", stacklevel=4)
    return None


def _digest(parameter: torch.Tensor) -> bytes:
    values = as_bytes(parameter.detach().cpu().contiguous())
    return hashlib.blake2b(values.data, digest_size=_DIGEST).digest()


def _as_sparse(
    mean: tuple[NDArray[np.int64], NDArray[np.floating]], parameter: torch.Tensor, skipped: bool
) -> torch.Tensor:
    """Give rows as a sparse gradient; zeros in a step that is skipped, in which they may not be finite."""
    indices, rows = mean
    values = torch.from_numpy(np.zeros_like(rows) if skipped else rows).reshape(-1, *parameter.shape[1:])
    return torch.sparse_coo_tensor(
        torch.from_numpy(indices)[None],
        values.to(parameter.dtype),
        parameter.shape,
        device=parameter.device,
        is_coalesced=True,
        check_invariants=True,
    )
