"""Progress of a running job, as lines that rank 0 prints."""

import contextlib
import time
from collections.abc import Iterator

from mpicomp.bench.measure.chosen_plans import in_short
from numba.core import event

from mpicomp.reducer import StepRecord

_LINES = 10  # in a run
_QUIET_S = 30.0  # a slow run prints at least this often
_COMPILING_S = 1.0  # of compilation that go by without a word
_COMPILER_LOCK = "numba:compiler_lock"  # held while code is compiled, loaded, or awaited from another process


class Progress:
    """Progress of a training run."""

    def __init__(self, visible: bool) -> None:
        self._visible = visible
        self._steps = 0
        self._last = 0.0

    @contextlib.contextmanager
    def over(self, steps: int) -> Iterator[None]:
        self._steps = steps
        self._last = time.monotonic()
        if not self._visible:
            yield
            return
        with event.install_listener(_COMPILER_LOCK, _Compilation()):
            yield

    def step(self, step: int, loss: float, seconds: float, record: StepRecord, quality: float | None = None) -> None:
        """Show a finished step with its plans, and the quality on held-out data where it was measured."""
        if not self._visible:
            return
        on_the_wire = f"{record.wire_bytes / 1e6:.3g} MB on the wire"
        text = f"loss {loss:.3f}  {seconds:.3f} s a step  {on_the_wire}  {in_short(record)}"
        if quality is not None:
            text += f"  held-out {quality:.3f}"
        if record.lost_ranks:
            text += f"  rank {', '.join(map(str, record.lost_ranks))} has died, the others go on"
        done = step + 1
        due = bool(record.lost_ranks) or done in (1, self._steps) or done % max(1, self._steps // _LINES) == 0
        if due or time.monotonic() - self._last > _QUIET_S:
            self._last = time.monotonic()
            print(f"step {done:>{len(str(self._steps))}}/{self._steps}  {text}", flush=True)

    def resumed(self, step: int) -> None:
        """Show that a checkpoint of step ``step`` was loaded."""
        if self._visible:
            print(f"resumed at step {step}", flush=True)

    def evaluating(self) -> None:
        if self._visible:
            print("measuring on held-out data ...", flush=True)


class _Compilation(event.Listener):  # type: ignore[misc]
    """Says once that Numba works, when it has for `_COMPILING_S` in all."""

    def __init__(self) -> None:
        self._has_told = False
        self._depth = 0
        self._began = 0.0
        self._spent_s = 0.0

    def on_start(self, _: event.Event) -> None:
        if self._depth == 0:
            self._began = time.monotonic()
        self._depth += 1
        self._look()

    def on_end(self, _: event.Event) -> None:
        if self._depth == 0:  # began before this one listened
            return
        self._look()
        self._depth -= 1
        if self._depth == 0:
            self._spent_s += time.monotonic() - self._began

    def _look(self) -> None:
        if not self._has_told and self._spent_s + time.monotonic() - self._began > _COMPILING_S:
            self._has_told = True
            print("compiling kernels, once on each host ...", flush=True)
