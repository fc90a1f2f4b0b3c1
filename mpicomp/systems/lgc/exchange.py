"""The exchange of learned codes: dense at first, then sparse while one rank learns, then in the code."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives.allgather import Allgather
from mpicomp.collectives.ar_topk import exchange_at
from mpicomp.collectives.scheme import Exchange, Result, Scheme
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.topk import TopK
from mpicomp.compressors.wire import Selection
from mpicomp.errors import MpicompError
from mpicomp.gpu import current_device
from mpicomp.mpi.rounds import Group, Round, Rounds
from mpicomp.registry import register
from mpicomp.systems.lgc.autoencoder import Autoencoder
from mpicomp.systems.lgc.compressor import LGC, Selected
from mpicomp.systems.lgc.leader_message import Frame, LeaderMessage, leader_of, relative, share_selection
from mpicomp.systems.lgc.ring import CodeRing
from mpicomp.systems.lgc.server import CodeServer
from mpicomp.workspace import Workspace

_MEMORY = "lgc"  # key in the bucket's memory
_TRAINER = 0
_WEIGHT = np.dtype(np.float32)


@dataclass
class _BucketMemory:
    """Memory of a bucket: the same on all ranks, except for the trainer's code while it learns, and for the error."""

    key: str  # parts of the bucket and channels of the code
    steps: int = 0  # successful exchanges so far
    learned: dict[str, Any] | None = None  # on the trainer in the second phase: the state of the code
    weights: NDArray[np.float32] | None = None  # of the code, once all ranks have them
    # Squared error of the values decoded in the last step, over the energy of the exact ones, as this rank knows it:
    # 1 is that of zeros. None before, and on ranks that do not learn
    error: float | None = None


@register
class Learned(Scheme[LGC]):
    """Phases of an exchange in a learned code.

    1. **Dense**: the inner collective averages everything.
    2. **Learning**: one rank, drawn at random, broadcasts the indices of its largest values; the inner collective
       averages all ranks' values there. Values to be coded are also gathered on rank 0, which learns from them if all
       are finite, while the others continue. As published every rank sends its largest values with their indices to
       all, and rank 0 learns from these.
    3. **Coded**: rank 0 broadcasts the learned weights, once. One rank, drawn at random, broadcasts its indices and the
       divisors of values; for the rest see `mpicomp.systems.lgc.ring.CodeRing` and
       `mpicomp.systems.lgc.server.CodeServer`.

    The number of exchanges is in the bucket's memory; a step that was undone does not count. A bucket with other parts
    than the memory's, or with decoders for another number of ranks, starts with the first phase. A bucket with too few
    values for the code stays in the second phase, without gathering them; one that holds only the first layer stays in
    the first phase.
    """

    id: ClassVar[str] = "learned"
    paper: ClassVar[str] = (
        "the phases of LGC, Abrahamyan et al. 2021, arXiv 2103.08870; no server: all ranks decode for themselves"
    )
    messages: ClassVar[str] = "own"
    owner: ClassVar[type[Compressor]] = LGC

    may_drop_selected = True

    def __init__(self, compressor: LGC, inner: Scheme[Dense]) -> None:
        super().__init__(compressor)
        compressor.check_installed()
        self._sum = inner

    @classmethod
    def inner_compressor(cls, compressor: Compressor) -> Compressor:
        return Dense()

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        # For a bucket whose memory starts with step 0
        selected = self.compressor.selected(numel)
        if step < self.compressor.dense_steps or not selected.indices:
            return self._sum.rounds(numel, dtype, group, step)
        code = self.compressor.make_code(Workspace())
        able = selected.coded_count >= code.least
        first_coded = self.compressor.dense_steps + self.compressor.training_steps
        if able and step >= first_coded:
            broadcast = [self._weights_round(code, group)] if step == first_coded else []
            return [*broadcast, *self._instance(code).rounds(numel, dtype, group, step)]
        if self.compressor.published:
            tasks = Allgather(_local_largest(selected)).rounds(numel, dtype, group, step)
        else:
            leader = leader_of(Context(group=group, step=step))
            sums = self._sum.rounds(selected.count, dtype, group, step)
            tasks = [LeaderMessage(selected, numel).round(leader), *sums]
        return [*tasks, _gathering(selected, dtype, group)] if able else tasks

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        compressor = self.compressor
        selected = compressor.selected(accumulated.numel)
        kind: tuple[Any, ...] = (compressor.instance, compressor.encoder, compressor.decoder)
        if compressor.instance == "server":
            kind += (context.group.size,)
        parts = [(part.start, part.stop, part.kept, part.travels) for part in selected.parts]
        key, entry = f"{kind} {parts}", context.memory.get(_MEMORY, {})
        memory = _BucketMemory(**entry) if entry.get("key") == key else _BucketMemory(key)
        seed = Context(seed=context.seed, bucket=context.bucket).key(shared=True)
        make_code = partial(compressor.make_code, context.workspace, seed)
        code = context.workspace.made(("learned", memory.key, seed), make_code)
        # Phase 1: dense.
        if memory.steps < compressor.dense_steps or not selected.indices:
            result = yield from self._sum.exchange(accumulated, context)
            result.note = "lgc: dense"
        # A bucket with too few values for a code: one rank's indices, and the values there.
        elif selected.coded_count < code.least:
            result, _ = yield from self._exchange_values(selected, accumulated, context)
            if selected.coded_count:
                result.note = f"lgc: no code, which takes {code.least} values, and {selected.coded_count} are selected"
            else:
                result.note = "lgc: no code, since no layer but the last and the first is in the bucket"
        # Phase 2: the same, and rank 0 learns from the values of all ranks.
        elif memory.steps < compressor.dense_steps + compressor.training_steps:
            result, values = yield from self._exchange_values(selected, accumulated, context)
            everyones = yield from _collected(values, selected, context)
            result.note = "lgc: learning"
            is_sound = not (result.nonfinite or result.stale)
            if everyones is not None and is_sound and np.isfinite(everyones).all():  # a message may be damaged
                memory.error = self._learn(code, memory, everyones, selected, context)
        # Phase 3: rank 0 broadcasts the weights, once; values travel in the code.
        else:
            yield from self._share(code, memory, context)
            result, memory.error = yield from self._instance(code).exchange(accumulated, context)
            result.note = f"lgc: coded, {compressor.instance}"
        if not (result.nonfinite or result.stale):
            memory.steps += 1
            context.memory[_MEMORY] = vars(memory)
        return result

    def _instance(self, code: Autoencoder) -> CodeRing | CodeServer:
        if self.compressor.instance == "server":
            return CodeServer(self.compressor, code)
        return CodeRing(self.compressor, code, self._sum)

    def _exchange_values(
        self, selected: Selected, accumulated: Accumulated, context: Context
    ) -> Rounds[tuple[Result, NDArray[np.floating]]]:
        if self.compressor.published:
            result = yield from Allgather(_local_largest(selected)).exchange(accumulated, context)
            if isinstance(result.sent, Selection):
                return result, result.sent.values
            return result, np.zeros(selected.count, accumulated.dtype)  # the message could not be parsed
        received = yield from share_selection(LeaderMessage(selected, accumulated.numel), accumulated, context)
        result = yield from exchange_at(received.indices, accumulated, context, self._sum, received.problem)
        return result, received.values

    def _learn(
        self,
        code: Autoencoder,
        memory: _BucketMemory,
        everyones: NDArray[np.floating],
        selected: Selected,
        context: Context,
    ) -> float:
        """Learn from all ranks' values, shape (ranks, count); return the error before that. On the trainer only."""
        leader = leader_of(context)
        divisors = np.empty_like(everyones[0])
        Frame(selected, self.compressor.signs).divisors(everyones[leader], divisors)
        values = np.empty_like(everyones)
        for rank_values, out in zip(everyones, values, strict=True):
            relative(rank_values, divisors, out)
        code.load(memory.learned)
        error = code.learn(values, leader if self.compressor.instance == "server" else None)
        memory.learned = code.state()
        return error

    def _share(self, code: Autoencoder, memory: _BucketMemory, context: Context) -> Rounds[None]:
        if memory.weights is None:
            task = self._weights_round(code, context.group)
            if context.group.rank == _TRAINER:
                if memory.learned is None:
                    raise MpicompError(
                        f"learned: rank {_TRAINER} has lost its code; each rank has to load the state that it saved"
                    )
                code.load(memory.learned)
                task.send = code.weights()
            task.recv = np.empty(task.counts[0], _WEIGHT)
            memory.weights = yield task
            memory.learned = None
        code.use(memory.weights)

    def _weights_round(self, code: Autoencoder, group: Group) -> Round:
        size = code.size(group.size if self.compressor.instance == "server" else 1)
        return Round("bcast", (size,), _WEIGHT, root=_TRAINER, once=True)


def _local_largest(selected: Selected) -> TopK:
    return replace(TopK(), parts=tuple((part.stop - part.start, part.kept) for part in selected.parts))


def _gathering(selected: Selected, dtype: np.dtype[Any], group: Group) -> Round:
    return Round("gatherv", [selected.coded_count] * group.size, dtype, root=_TRAINER)


def _collected(
    values: NDArray[np.floating], selected: Selected, context: Context
) -> Rounds[NDArray[np.floating] | None]:
    """Gather coded values on the trainer, in host memory, shape (ranks, count); None on other ranks."""
    group = context.group
    task = _gathering(selected, values.dtype, group)
    task.send = current_device().to_host(values[selected.coded])
    if group.rank == _TRAINER:
        task.recv = context.workspace.host_array("everyones", sum(task.counts), values.dtype)
    received = yield task
    return received.reshape(group.size, -1) if group.rank == _TRAINER else None
