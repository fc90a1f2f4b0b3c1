"""A communication hook that exchanges the buckets of DistributedDataParallel over MPI."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from mpicomp.compressors import Compressor
from mpicomp.errors import ConfigurationError
from mpicomp.mpi.connect import connected
from mpicomp.mpi.rounds import Group, Rounds
from mpicomp.policies import Policy
from mpicomp.policies.schedule import with_warmup
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import Checks, GradientInput, run_collectively
from mpicomp.reducer.settings import check_arguments
from mpicomp.reducer.stream import Stream
from mpicomp.torch.checks import BROADCAST_ADVICE, COMPARE_EVERY, Fingerprint, check_same
from mpicomp.torch.overlap import start_overlap_thread
from mpicomp.torch.parameters import as_real, check_forward, check_kind
from mpicomp.torch.states import name_of, to_arrays, to_tensors

_WHO = "ddp_comm_hook"


class DDPState:
    """State of `ddp_comm_hook`: the reducer, and the gradients of the model's buckets.

    Collective over ``comm``.

    Parameters
    ----------
    model : torch.nn.parallel.DistributedDataParallel
        The model that the hook is registered with; its process group has the ranks of ``comm``.
    compressor, collective, policy, comm, overlap, warmup, same_batches, **settings
        See `mpicomp.torch.DistributedOptimizer`. Without ``overlap`` all buckets are exchanged with the last one.
    allow_nccl : bool
        Whether the process group may be on NCCL. Its kernels and an MPI call that waits for the same device can wait
        for each other forever; pass True only where the two never run at the same time.

    Attributes
    ----------
    reducer : Reducer
        Residuals have the names of parameters, so that they survive when DistributedDataParallel builds new buckets.

    Raises
    ------
    DisagreementError
        In backward, after steps 1, 2, 4, 8 and so on, then after every 500th, where parameters differ between ranks.
    ConfigurationError
        For a model that is not wrapped, one with sparse gradients, a process group of other ranks, or one on NCCL.

    Notes
    -----
    Complex gradients are exchanged as pairs of reals: their residuals have a last dimension of 2.
    """

    @check_arguments(_WHO, Reducer)
    def __init__(
        self,
        model: torch.nn.parallel.DistributedDataParallel,
        compressor: Compressor | str | Mapping[str, Any] | None = None,
        collective: str = "auto",
        policy: Policy | str | Mapping[str, Any] | None = None,
        *,
        comm: Any = None,
        overlap: bool | None = None,
        allow_nccl: bool = False,
        same_batches: bool = False,
        warmup: int | str | None = None,
        **settings: Any,
    ) -> None:
        with connected(comm) as transport:
            ranks = transport.group.size
            run_collectively(lambda: _check(model, allow_nccl, ranks), transport, _WHO)
            self.reducer = Reducer(compressor, collective, with_warmup(policy, warmup), comm=transport, **settings)
        self._transport = None if transport is comm else transport
        named = [(name_of(name), parameter) for name, parameter in model.module.named_parameters()]
        self._names = {id(parameter): name for name, parameter in named}
        self._thread, _ = start_overlap_thread(self.reducer, overlap)
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._checks = _Comparison(trained, transport.group, same_batches)
        self._stream: Stream | None = None
        self._gradients: dict[str, torch.Tensor] = {}
        self._waiting: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []

    def put(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Add a bucket; the last one has all of them averaged. Collective with the last one."""
        buffer = bucket.buffer()
        gradients = self._gradients_in(bucket, buffer)
        if not self._gradients and self._thread is not None:
            self._stream = self.reducer.stream(self._thread, checks=self._checks)
        # A future whose value is on a device has to know which one, so that torch's streams wait for it.
        future = torch.futures.Future[torch.Tensor](devices=[buffer.device] if buffer.is_cuda else None)
        self._waiting.append((future, buffer))
        for name, gradient in gradients.items():
            self._gradients[name] = gradient
            if self._stream is not None:
                self._stream.put(name, gradient)
        if bucket.is_last():
            self._finish()
        return future

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state of the reducer, for ``torch.save``."""
        state: dict[str, Any] = to_tensors(self.reducer.state_dict())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict` on this rank, or ``reducer.state_dict()``. Not collective."""
        self.reducer.load_state_dict(to_arrays(state_dict))

    def close(self) -> None:
        """Release MPI resources without waiting for other ranks; a second call does nothing."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        self.reducer.close()
        if self._transport is not None:
            self._transport.close()

    def _gradients_in(self, bucket: GradBucket, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        # bucket.gradients() has complex ones at other places.
        flat = as_real(buffer).reshape(-1)
        gradients, start = {}, 0
        for parameter in bucket.parameters():
            shape = as_real(parameter.detach()).shape
            gradients[self._names[id(parameter)]] = flat[start : start + shape.numel()].view(shape)
            start += shape.numel()
        assert start == flat.numel(), "torch pads buckets now"
        return gradients

    def _finish(self) -> None:
        gradients, stream, waiting = self._gradients, self._stream, self._waiting
        self._gradients, self._stream, self._waiting = {}, None, []
        self._checks.gradients = gradients
        means = self.reducer.reduce(gradients, checks=self._checks) if stream is None else stream.finish(gradients)
        for name, gradient in gradients.items():
            gradient.copy_(means[name])
        for future, buffer in waiting:
            future.set_result(buffer)


class _Comparison(Checks):
    """Comparison of the ranks' parameters and batches, in the steps of a hook."""

    stale = True

    def __init__(self, parameters: Mapping[str, torch.Tensor], group: Group, same_batches: bool) -> None:
        self.gradients: Mapping[str, torch.Tensor] = {}
        self._parameters, self._group = parameters, group
        self._fingerprint = Fingerprint(COMPARE_EVERY, _WHO, same_batches)

    def agree(self, given: GradientInput) -> Rounds[GradientInput]:
        yield from check_same(self._parameters, self._group, _WHO, BROADCAST_ADVICE)
        self.stale = False
        return given

    def finish(self, finite: bool) -> Rounds[bool]:
        yield from self._fingerprint.compare(self._parameters, self._group, self.gradients.values())
        return finite


def _check(model: Any, allow_nccl: bool, ranks: int) -> None:
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ConfigurationError(f"{_WHO}: a model in DistributedDataParallel is needed, got {type(model).__name__}")
    if ranks > 1:
        check_forward(model.module, _WHO)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            check_kind(name, parameter, _WHO)
    for name, module in model.module.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise ConfigurationError(
                f"{_WHO}: '{name or 'the model'}' has sparse gradients, which DistributedDataParallel's hooks cannot "
                "exchange; make it with sparse=False, or use DistributedOptimizer in place of the wrapper, which makes "
                "them dense"
            )
    if "nccl" in distributed.get_backend(model.process_group) and not allow_nccl:
        raise ConfigurationError(
            f"{_WHO}: the process group is on NCCL, which can wait for MPI, and MPI for it, forever; use "
            "backend='gloo', or pass allow_nccl=True where no NCCL operation is under way during backward"
        )
    group_ranks = distributed.get_world_size(model.process_group)
    if group_ranks != ranks:
        raise ConfigurationError(
            f"{_WHO}: the process group has {group_ranks} ranks and MPI has {ranks}; start both with the same ones"
        )


def ddp_comm_hook(state: DDPState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DistributedDataParallel over MPI, compressed, with error feedback.

    Register it by ``model.register_comm_hook(DDPState(model), ddp_comm_hook)``. The future that it returns has the
    bucket's buffer with the mean; it is set after the last bucket of the step.
    """
    if not isinstance(state, DDPState):
        raise ConfigurationError(
            f"{_WHO}: its state must be a DDPState, got {type(state).__name__}; call "
            "model.register_comm_hook(mpicomp.torch.DDPState(model), mpicomp.torch.ddp_comm_hook)"
        )
    return state.put(bucket)
