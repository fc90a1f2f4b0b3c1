"""A step whose buckets are exchanged by a thread, one by one, while the others are still computed."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from mpicomp.errors import RankFailedError
from mpicomp.reducer.agreement import ExtraExchange
from mpicomp.reducer.step import Step
from mpicomp.transport.scheduler import Job, ProgressThread

if TYPE_CHECKING:
    from mpicomp.reducer.reducer import Reducer


class Stream:
    """One step of a reducer whose buckets are laid out; see `mpicomp.Reducer.stream`."""

    def __init__(self, reducer: "Reducer", thread: ProgressThread, scale: float, extra: ExtraExchange) -> None:
        self._reducer = reducer
        self._thread = thread
        self._step = Step(reducer, scale, extra)
        self._jobs: list[Job[None]] = [thread.submit(self._step.begin())]
        self._left = list(reducer.layout.buckets)
        self._missing = {member.name for member in self._left[0].members}
        self._arrays: dict[str, Any] = {}

    def put(self, name: str, gradient: Any) -> None:
        """Pass an array, which must not change until `finish` returns; not collective.

        Buckets are exchanged in their order, each as soon as it and those before it are complete; the last one waits
        for `finish`, when new arrays are known. Names of no bucket are ignored.
        """
        self._reducer.layout.prefetch({name: gradient})
        self._arrays[name] = gradient
        self._missing.discard(name)
        while len(self._left) > 1 and not self._missing:
            bucket = self._left.pop(0)
            self._submit([self._arrays[member.name] for member in bucket.members])
            self._missing = {member.name for member in self._left[0].members} - self._arrays.keys()

    def finish(
        self, gradients: Mapping[str, Any], lr: float | None = None, absent: Collection[str] = (), finite: bool = True
    ) -> dict[str, Any]:
        """Exchange the remaining buckets, wait for all, return the means; see `mpicomp.Reducer.reduce`. Collective."""
        step, timer = self._step, self._reducer.transport.timer
        begin, waited_s = timer(), 0.0
        try:
            step.check_gradients(gradients, absent, lr)
            while self._left:
                self._submit(step.gradients_of(self._left.pop(0)))
            submitted = timer()
            self._thread.wait(self._jobs)
            waited_s = timer() - submitted
            means: dict[str, Any] = self._reducer.transport.run(step.commit(finite))
            return means
        except RankFailedError as error:
            step.undo()
            self._reducer.failed = error  # `Reducer.reduce` goes on from here
            if self._reducer.survives:
                # The thread must be idle before ranks agree: other rounds that it waits for are revoked.
                self._reducer.transport.revoke()
                for job in self._jobs:
                    job.exception()
            raise
        finally:
            step.finish(begin, waited_s)

    def _submit(self, gradients: list[Any] | None) -> None:
        bucket = self._reducer.layout.buckets[len(self._jobs) - 1]
        self._jobs.append(self._thread.submit(self._step.exchange(bucket, gradients, self._reducer.transport.timer())))
