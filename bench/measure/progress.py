"""Progress display of a running job: a bar on a terminal, plain lines elsewhere; rank 0 alone prints."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpicomp.bench.measure.chosen_plans import in_short
from numba.core import event

from mpicomp.reducer import StepRecord

_LINES = 10  # plain lines in a run
_QUIET_S = 30.0  # a slow run prints at least this often
_COMPILING_S = 1.0  # of compilation that go by without a word
_COMPILING = "compiling kernels, once on each host ..."
_COMPILER_LOCK = "numba:compiler_lock"  # held while code is compiled, loaded, or awaited from another process


class Progress:
    """Progress of a training run."""

    def __init__(self, visible: bool) -> None:
        self._visible = visible
        self._bar: Any = None
        self._task: Any = None  # of the bar
        self._steps = 0
        self._last = 0.0

    @contextlib.contextmanager
    def over(self, steps: int) -> Iterator[None]:
        self._steps = steps
        self._last = time.monotonic()
        if not self._visible:
            yield
            return
        from rich.console import Console  # an extra
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        with contextlib.ExitStack() as stack:
            stack.enter_context(event.install_listener(_COMPILER_LOCK, _Compilation(self._compiling)))
            if Console().is_terminal:
                columns = "training", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}")
                # Unless stderr is a terminal, rich would print warnings on stdout, cut to the terminal's width.
                bar = Bar(*columns, TimeRemainingColumn(), redirect_stderr=sys.stderr.isatty())
                self._bar = stack.enter_context(bar)
                self._task = bar.add_task("training", total=steps, text="")
            yield

    def step(self, step: int, loss: float, seconds: float, record: StepRecord, quality: float | None = None) -> None:
        """Show a finished step with its plans, and the quality on held-out data where it was measured."""
        if not self._visible:
            return
        text = self._text(loss, seconds, record)
        if quality is not None:
            text += f"  held-out {quality:.3f}"
        if record.lost_ranks:
            text += f"  rank {', '.join(map(str, record.lost_ranks))} has died, the others go on"
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, text=text)
            return
        done = step + 1
        due = bool(record.lost_ranks) or done in (1, self._steps) or done % max(1, self._steps // _LINES) == 0
        if due or time.monotonic() - self._last > _QUIET_S:
            self._last = time.monotonic()
            print(f"step {done:>{len(str(self._steps))}}/{self._steps}  {text}", flush=True)

    def _text(self, loss: float, seconds: float, record: StepRecord) -> str:
        on_the_wire = f"{record.wire_bytes / 1e6:.3g} MB on the wire"
        return f"loss {loss:.3f}  {seconds:.3f} s a step  {on_the_wire}  {in_short(record)}"

    def _compiling(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, text=_COMPILING)
        else:
            print(_COMPILING, flush=True)

    def resumed(self, step: int) -> None:
        """Show that a checkpoint of step ``step`` was loaded."""
        if self._visible:
            print(f"resumed at step {step}", flush=True)

    def evaluating(self) -> None:
        if self._visible:
            print("measuring on held-out data ...", flush=True)


class _Compilation(event.Listener):  # type: ignore[misc]
    """Calls a function once, when Numba has worked for `_COMPILING_S` in all."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell
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
        if self._tell is not None and self._spent_s + time.monotonic() - self._began > _COMPILING_S:
            tell, self._tell = self._tell, None
            tell()
