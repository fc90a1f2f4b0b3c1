"""A step whose buckets are exchanged by a thread, one by one, while the others are still computed."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from mpicomp.errors import RankFailedError
from mpicomp.mpi.thread import Job, ProgressThread
from mpicomp.mpi.transport import RoundLog
from mpicomp.reducer.agreement import Checks
from mpicomp.reducer.bucket import Bucket

if TYPE_CHECKING:
    from mpicomp.reducer.reducer import Reducer


class Stream:
    """One step of a reducer whose buckets are laid out; see `mpicomp.Reducer.stream`."""

    def __init__(self, reducer: "Reducer", thread: ProgressThread, scale: float, checks: Checks) -> None:
        self._reducer, self._thread = reducer, thread
        self._step = reducer.begin_step(scale, checks)
        log: list[RoundLog] = []
        choosing = reducer.choose(self._step, log)
        self._jobs: list[Job[None]] = [thread.submit(choosing, log)] if choosing else []
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
            self._exchange(bucket, self._arrays)
            self._missing = {member.name for member in self._left[0].members} - self._arrays.keys()

    def finish(
        self, gradients: Mapping[str, Any], lr: float | None = None, absent: Collection[str] = ()
    ) -> dict[str, Any]:
        """Exchange the remaining buckets, wait for all, return the means; see `mpicomp.Reducer.reduce`. Collective."""
        step, reducer = self._step, self._reducer
        timer = reducer.transport.timer
        begin, waited_s = timer(), 0.0
        try:
            given = reducer.pass_gradients(step, gradients, absent, lr)
            while self._left:
                self._exchange(self._left.pop(0), given)
            submitted = timer()
            self._thread.wait(self._jobs)
            waited_s = timer() - submitted
            means: dict[str, Any] = reducer.transport.run(reducer.commit(step))
            return means
        except RankFailedError as error:
            step.undo()
            reducer.deaths.found = error  # `Reducer.reduce` continues from here
            if reducer.deaths.survives:
                # The thread must be idle before ranks agree: other rounds that it waits for are revoked.
                reducer.transport.revoke()
                for job in self._jobs:
                    job.exception()
            raise
        finally:
            reducer.end_step(step, begin, waited_s)

    def _exchange(self, bucket: Bucket, given: Mapping[str, Any] | None) -> None:
        log: list[RoundLog] = []
        rounds = self._step.exchange(bucket, given, self._reducer.transport.timer(), log)
        self._jobs.append(self._thread.submit(rounds, log))
