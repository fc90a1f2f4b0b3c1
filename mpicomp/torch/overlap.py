"""Exchange of gradients during backward, and detection of scripts that do not allow it."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError, LaunchError, MpicompError, warn_user
from mpicomp.mpi.rounds import Group, gather_rows
from mpicomp.mpi.thread import ProgressThread
from mpicomp.reducer import Reducer
from mpicomp.reducer.stream import Stream
from mpicomp.torch.checks import WORDS, sample_of, sum_of_bits
from mpicomp.torch.parameters import as_real
from mpicomp.torch.shards import LocalShard, whole_of

_TRIAL_STEPS = 2  # steps that are exchanged after backward, to see whether the script allows an exchange during it
_OBSTACLES = {  # reasons for which gradients cannot be exchanged during backward, and remedies
    1: (
        "backward filled a gradient twice before step(), as with several losses or an accumulation",
        "put every backward but the last one into `with optimizer.accumulate():`",
    ),
    2: (
        "a gradient was changed between backward() and step(), as by clipping",
        "call optimizer.synchronize() first: then means are changed, the same on all ranks",
    ),
    3: (
        "zero_grad() came between backward() and step()",
        "clear gradients after the step, or run a backward that is not stepped inside optimizer.accumulate()",
    ),
}
_TWICE, _CHANGED, _CLEARED = _OBSTACLES


class BackwardOverlap:
    """Exchanges gradients during backward, where ranks, MPI and the script allow it; making one is collective.

    ``wanted`` is True, which refuses a script that does not allow it; False; or None: the first steps are exchanged
    after backward while the script is watched, and all later ones after any rank has found an obstacle.
    """

    def __init__(self, reducer: Reducer, subsystem: str, wanted: bool | None) -> None:
        self._reducer = reducer
        self._subsystem = subsystem
        self._wanted = wanted
        self._thread: ProgressThread | None
        self._finalizer: Any
        is_open = self._start_thread()
        self._wanted = None if is_open else wanted
        self._trial_steps = _TRIAL_STEPS if is_open else 0
        self.obstacle = 0
        self._stream: Stream | None = None
        self._taken: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}  # gradients, and their marks when taken
        self._samples: dict[str, torch.Tensor] = {}  # of shards' gradients, of which torch counts no `_foreach_mul_`
        self._exchanges = 0

    @property
    def overlaps(self) -> bool:
        """Whether buckets are exchanged during backward."""
        return self._thread is not None and not self._trial_steps

    @property
    def has_begun(self) -> bool:
        """Whether the exchange has begun in this backward."""
        return bool(self._taken) and self.overlaps

    def take(self, name: str, parameter: torch.Tensor, new_stream: Callable[[ProgressThread], Stream | None]) -> None:
        """Register a complete gradient; its bucket is exchanged once all of its gradients are complete."""
        if self._thread is None:
            return
        if name in self._taken:
            if self._wanted:
                raise ConfigurationError(
                    f"gradients: backward has filled '{name}' twice since the last step, and the exchange has begun "
                    "at the first time; put every backward but the last one into `with optimizer.accumulate():`, or "
                    "pass overlap=False"
                )
            self.obstacle = self.obstacle or _TWICE
            return
        if not self._taken and self.overlaps:
            self._stream = new_stream(self._thread)
        gradient = parameter.grad
        assert gradient is not None
        self._taken[name] = gradient, self._mark(parameter)
        if isinstance(parameter, LocalShard):
            self._samples[name] = _bits_of_sample(gradient)
        if self._stream is not None:
            self._stream.put(name, as_real(gradient.detach()))

    def clear(self) -> None:
        """Note that gradients are cleared; not collective."""
        if not self._taken:
            return
        if self._wanted:
            raise ConfigurationError(
                f"{self._subsystem}: zero_grad() came between backward() and step(), when the exchange had begun "
                "already; call synchronize() first, or pass overlap=False"
            )
        self.obstacle = self.obstacle or _CLEARED
        if self._trial_steps:
            self._taken.clear()

    def find_change(self, parameters: Mapping[str, torch.Tensor]) -> MpicompError | None:
        """Return the error of a gradient that was written to during its exchange: the change would be lost."""
        sampled = self._sampled_change()
        for name, (gradient, mark) in self._taken.items():
            if parameters[name].grad is not gradient or self._mark(parameters[name]) != mark or name == sampled:
                if not self._wanted:
                    self.obstacle = self.obstacle or _CHANGED
                    return None
                return ConfigurationError(
                    f"gradients: the one of '{name}' was changed between backward() and step(), when its exchange had "
                    "begun already; call optimizer.synchronize() first, or pass overlap=False"
                )
        return None

    def end_backward(self, new_stream: Callable[[ProgressThread], Stream | None]) -> Stream | None:
        """Return the stream of this step's buckets; None where all are exchanged after backward."""
        stream, self._stream = self._stream, None
        self._taken.clear()
        if stream is None and self.overlaps:
            assert self._thread is not None
            stream = new_stream(self._thread)
        return stream

    def end_exchange(self) -> None:
        """Prepare the next step. Collective after ranks were lost."""
        if self._reducer.transport.generation != self._generation:
            self._finalizer()
            self._start_thread()
        self._trial_steps = max(self._trial_steps - 1, 0)
        self._exchanges += 1
        if self._wanted is False and self._thread is not None:
            self._thread.stop()
            self._thread = None

    def handle_obstacles(self, obstacles: NDArray[np.uint8], group: Group) -> None:
        """Exchange after backward from now on where the script of some rank does not allow it earlier."""
        if not obstacles.any():
            return
        self.obstacle, self._wanted, self._trial_steps = 0, False, 0
        rank = int(obstacles.argmax())  # of the largest reason: those of several ranks may differ
        seen, advice = _OBSTACLES[int(obstacles[rank])]
        if group.rank == 0:
            warn_user(
                f"{self._subsystem}: gradients are exchanged in step() from now on, not during backward: {seen} "
                f"(seen on rank {rank}). To allow it, {advice}. Pass overlap=False if that is intended; "
                "overlap=True refuses it",
            )

    def close(self) -> None:
        self._taken.clear()
        self._stream = None
        self._thread = None
        self._finalizer()

    def _sampled_change(self) -> str | None:
        # A device is read once.
        taken, self._samples = self._samples, {}
        present = {name: _bits_of_sample(self._taken[name][0]) for name in taken if name in self._taken}
        if not present or torch.equal(torch.cat([*present.values()]), torch.cat([taken[name] for name in present])):
            return None
        return next(name for name, bits in present.items() if not torch.equal(bits, taken[name]))

    def _mark(self, parameter: torch.Tensor) -> tuple[int, int]:
        # Writes to ``.data`` count no versions, so that now and then bits are added.
        inside = self._reducer.layout.holds_gradients  # where the exchange itself changes them
        sums_bits = self._exchanges & (self._exchanges - 1) == 0 and not inside
        gradient, whole = parameter.grad, whole_of(parameter).grad
        assert gradient is not None
        assert whole is not None
        return whole._version, int(sum_of_bits([gradient])) if sums_bits else 0

    def _start_thread(self) -> bool:
        self._generation = self._reducer.transport.generation
        self._thread, is_open = start_overlap_thread(self._reducer, self._wanted)
        stop: Callable[[], object] = bool if self._thread is None else self._thread.stop
        self._finalizer = weakref.finalize(self, stop)
        self._finalizer.atexit = False
        return is_open


def _bits_of_sample(gradient: torch.Tensor) -> torch.Tensor:
    sample = sample_of(gradient)
    return sample.clone().view(WORDS[sample.element_size()]).long()


def start_overlap_thread(reducer: Reducer, wanted: bool | None) -> tuple[ProgressThread | None, bool]:
    """Return a thread that exchanges during backward, or None, and whether ``wanted`` is None on a rank. Collective.

    One rank that does not want it is enough for None. A rank with ``wanted=None`` does not where all ranks are on one
    host and torch's threads use all of its cores.
    """
    transport = reducer.transport
    group = transport.group
    if group.size == 1:
        return None, wanted is None
    problem = None
    try:
        transport.check_threads(alone=False)
    except LaunchError as error:
        problem = error
    is_crowded = group.hosts == 1 and transport.cores < torch.get_num_threads() + 1
    flags = [problem is None, not is_crowded if wanted is None else wanted, wanted is None]
    rows = transport.run(gather_rows(np.array(flags, np.uint8), group))
    is_able, is_useful = (bool(column.all()) for column in rows[:, :2].T)
    is_open = bool(rows[:, 2].any())
    if is_able and is_useful:
        return ProgressThread(transport).start(), is_open
    if is_useful and group.rank == 0:
        warn_user(f"gradients are exchanged after backward, not during it: {problem}")
    return None, is_open
