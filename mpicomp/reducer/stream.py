"""A step whose buckets are exchanged by a thread, one by one, while the others are still computed."""

import time
from collections.abc import Collection, Mapping
from typing import Any

from mpicomp.errors import RankFailedError
from mpicomp.reducer.beside import Beside
from mpicomp.reducer.core import Core
from mpicomp.reducer.step import Step
from mpicomp.transport.scheduler import Job, ProgressThread


class Stream:
    """One step of a reducer whose arrays are known; see `mpicomp.Reducer.stream`.

    Parameters
    ----------
    core : Core
        Of the reducer.
    thread : ProgressThread
        Runs the rounds, with one channel.
    scale : float
        Factor that gradients are multiplied by first.
    beside : Beside, optional
        Exchanges that belong to the step but to no bucket.
    """

    def __init__(self, core: Core, thread: ProgressThread, scale: float, beside: Beside | None = None) -> None:
        self._core = core
        self._thread = thread
        self._step = Step(core, scale, beside)
        self._jobs: list[Job[None]] = [thread.submit(self._step.refresh())]
        self._left = list(core.layout.buckets)
        self._missing = {member.name for member in self._left[0].members}
        self._arrays: dict[str, Any] = {}

    def put(self, name: str, gradient: Any) -> None:
        """Hand over an array, which must not change until `finish` has come back; not collective.

        Buckets are exchanged in their order, each as soon as it and those before it are complete. The last one waits
        for `finish`: with it goes what only then is known, such as arrays that are new. Other names are passed over.
        """
        self._core.expect({name: gradient})
        self._arrays[name] = gradient
        self._missing.discard(name)
        while len(self._left) > 1 and not self._missing:
            bucket = self._left.pop(0)
            self._submit([self._arrays[member.name] for member in bucket.members])
            self._missing = {member.name for member in self._left[0].members} - self._arrays.keys()

    def finish(
        self,
        gradients: Mapping[str, Any],
        lr: float | None = None,
        absent: Collection[str] = (),
        finite: bool = True,
    ) -> dict[str, Any]:
        """Exchange the remaining buckets, wait for all, return the means; see `mpicomp.Reducer.reduce`. Collective."""
        begin, waited_s = time.perf_counter(), 0.0
        step = self._step
        try:
            step.examine(gradients, absent, lr)
            while self._left:
                self._submit(step.of(self._left.pop(0)))
            handed_over = time.perf_counter()
            self._thread.wait(self._jobs)
            waited_s = time.perf_counter() - handed_over
            means: dict[str, Any] = self._core.transport.run(step.conclude(finite))
            return means
        except RankFailedError as error:
            step.forget()
            self._core.failed = error  # `Reducer.reduce` goes on from here
            if self._core.survives:
                # The thread has to have come to rest before ranks agree: whatever else it waits for is broken off.
                self._core.transport.revoke()
                for job in self._jobs:
                    job.exception()
            raise
        finally:
            step.note_seconds(begin, waited_s)

    def _submit(self, gradients: list[Any] | None) -> None:
        bucket = self._core.layout.buckets[len(self._jobs) - 1]
        self._jobs.append(self._thread.submit(self._step.exchange(bucket, gradients, self._core.transport.clock())))
