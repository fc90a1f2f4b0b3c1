"""Records of a step: plans and their reasons, bytes and seconds, to explain every decision."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Result
from mpicomp.errors import NonFiniteError
from mpicomp.mpi.rounds import Group, dense_ring_bytes
from mpicomp.mpi.transport import RoundLog
from mpicomp.policies import Plan
from mpicomp.reducer.bucket import Bucket

SCHEMA = 1  # version of `StepRecord.to_json`, which changes when a field changes its meaning or is removed
_NOTHING = np.empty(0, np.float32)


class Phases(NamedTuple):
    """Seconds of an exchange on this rank: up to the last round without waits, in rounds, and after them."""

    compress: float
    exchange: float
    decode: float


@dataclass(frozen=True)
class BucketRecord:
    """Record of one bucket's exchange: its plan, its gain, its bytes and its seconds.

    Attributes
    ----------
    bucket : int
        Its number, in the order of exchange.
    parameters : int
        Number of its arrays.
    numel : int
        Number of its elements.
    compressor : dict
        The compressor's configuration, for `mpicomp.get_compressor`.
    collective : str
        The collective's name.
    reason : str
        Reason for the plan.
    ratio : float or None
        Requested kept fraction, if the compressor has one.
    ratio_reached : float
        Kept fraction, averaged over ranks.
    gain : float or None
        Sent share of the energy of gradient plus residual, over all ranks, 0 to 1; None after an overflow.
    phases_s : dict
        Seconds on this rank: ``compress`` (up to the last round, with the sum of gradient and
        residual), ``exchange`` (in rounds), ``decode`` (after them).
    predicted_s : float or None
        Seconds from the last rank's start on, as a cost model predicted them before the step.
    predicted_phases_s : dict or None
        Their parts: ``kernels`` (compress and decode on the slowest rank) and ``exchange``.
    sent_bytes : int
        Payload that this rank passed to the transport.
    wire_bytes : float
        Bytes that left this rank.
    dense_wire_bytes : float
        Bytes that would have left this rank in a ring of 32-bit numbers.
    memory_bytes : int
        Bytes that the plan needs besides the gradient and the residual of the bucket, at most on any rank: scratch,
        which all buckets share, and arrays that are held until the step ends.
    rounds : list of str
        MPI operations, in order.
    energy : float or None
        Squared norm of gradient plus residual, over all ranks; None after an overflow, and where no sweep has read
        them, as in the sum of a large array on one host.
    """

    bucket: int
    parameters: int
    numel: int
    compressor: dict[str, Any]
    collective: str
    reason: str
    ratio: float | None
    ratio_reached: float
    gain: float | None
    phases_s: dict[str, float]
    predicted_s: float | None
    predicted_phases_s: dict[str, float] | None
    sent_bytes: int
    wire_bytes: float
    dense_wire_bytes: float
    memory_bytes: int
    rounds: list[str]
    energy: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able object."""
        return dict(vars(self))


class BucketExchange:
    """One bucket's exchange in a step, in times of the transport's timer; its record is made when it is read.

    ``ready`` is when gradients were passed, ``frozen`` whether the plan is that of the step before.
    """

    result: Result
    log: Sequence[RoundLog] = ()
    end = 0.0
    commit_s = 0.0  # seconds of the residual and the mean, as if they followed the exchange at once
    survey: NDArray[np.float32] | None = None

    def __init__(self, bucket: Bucket, plan: Plan, ready: float, start: float, frozen: bool, group: Group) -> None:
        self.bucket, self.plan, self.ready, self.start = bucket, plan, ready, start
        self.frozen, self.group = frozen, group

    @property
    def waited_s(self) -> float:
        """Seconds in rounds."""
        seconds = 0.0
        for entry in self.log:
            seconds += entry.end - entry.begin
        return seconds

    @property
    def phases(self) -> Phases:
        """Seconds by phase."""
        if not self.log:
            return Phases(0.0, 0.0, self.end - self.start)
        waited_s, last = self.waited_s, self.log[-1].end
        return Phases(last - self.start - waited_s, waited_s, self.end - last)

    def times(self, offset: float) -> tuple[float, float, float, float]:
        """Return start, end, seconds outside rounds and ``ready``, by the clock that ranks share."""
        end = self.end + self.commit_s
        return offset + self.start, offset + end, end - self.start - self.waited_s, offset + self.ready

    def release_buffers(self) -> None:
        """Drop the arrays of its rounds, whose shapes and times stay."""
        for entry in self.log:
            entry.task = entry.task.shape()

    @functools.cached_property
    def record(self) -> BucketRecord:
        bucket, plan, result = self.bucket, self.plan, self.result
        compressor, prediction = plan.scheme.compressor, plan.prediction
        frozen = "as before, since some rank has no gradients of its own" if self.frozen else ""
        sent = [entry for entry in self.log if entry.sends]
        recurring = [entry for entry in sent if not entry.task.once]
        return BucketRecord(
            bucket=bucket.index,
            parameters=len(bucket.members),
            numel=bucket.numel,
            compressor=compressor.get_config(),
            collective=plan.scheme.id,
            reason="; ".join(filter(None, (plan.reason, frozen, result.note))),
            ratio=getattr(compressor, "ratio", None),
            ratio_reached=result.kept / bucket.numel,
            gain=result.gain if np.isfinite(result.gain) else None,
            phases_s=self.phases._asdict(),
            predicted_s=prediction.seconds if prediction else None,
            predicted_phases_s=prediction.phases() if prediction else None,
            sent_bytes=sent_bytes(recurring),
            wire_bytes=wire_bytes(recurring),
            dense_wire_bytes=dense_ring_bytes(bucket.numel, self.group.size),
            memory_bytes=sum(plan.scheme.memory(bucket.numel, bucket.dtype, self.group)),
            rounds=[entry.operation for entry in sent],
            energy=result.energy if np.isfinite(result.energy) else None,
        )


def sent_bytes(log: Iterable[RoundLog]) -> int:
    """Return the payload of rounds that this rank passed to the transport."""
    return sum(entry.sent_bytes for entry in log)


def wire_bytes(log: Iterable[RoundLog]) -> float:
    """Return the bytes of rounds that left this rank."""
    return sum((entry.wire_bytes for entry in log), 0.0)


def nonfinite_error(step: int, nonfinite: Sequence[BucketExchange], overflowed: bool) -> NonFiniteError:
    """Return the error of a step whose exchanges, or whose other gradients, are not finite."""
    names = " or ".join(f"'{done.bucket.names[0]}'" for done in nonfinite)
    where = f", in the bucket that starts with {names}" if nonfinite else ""
    if overflowed:
        plans = " or ".join(sorted({done.plan.scheme.compressor.id for done in nonfinite}))
        return NonFiniteError(
            f"reduce: gradients are finite, and {plans} overflowed at step {step}{where}: they, or their sum with the "
            "residual or over ranks, are too large for its dtype; nothing was applied and the residuals are "
            "unchanged. Clip or scale gradients, or use a wider wire"
        )
    return NonFiniteError(
        f"reduce: gradients must be finite, got NaN or infinity on some rank at step {step}{where}; nothing was "
        "applied and the residuals are unchanged. nonfinite='skip' leaves such steps out"
    )


_FIELDS = (
    "step", "seconds", "lr", "skipped", "agreed", "lost_ranks", "stop", "slowest_rank", "slowest_costs_s", "choosing_s",
    "once_wire_bytes", "overhead_bytes", "overhead_wire_bytes",
)  # fmt: skip


class _Sums(NamedTuple):
    """Sums over the buckets of a step; see the properties of `StepRecord`."""

    sent_bytes: int
    wire_bytes: float
    dense_wire_bytes: float
    phases_s: dict[str, float]


class StepRecord:
    """Record of one call of `Reducer.reduce` on this rank.

    Attributes
    ----------
    step : int
        Number of the call, from 0.
    seconds : float
        Of the whole call.
    lr : float or None
        The learning rate that was passed; of an optimizer that of its first group.
    skipped : bool
        Whether zeros were delivered since a gradient was not finite.
    agreed : bool
        Whether the ranks compared names and shapes, in an additional round: normally only in the first step, and after
        a signal to stop.
    lost_ranks : list of int
        Ranks that have died since the last step, by their numbers in the whole job. The mean is that of the others; the
        residuals of the dead are lost.
    stop : bool
        Whether some rank was asked to stop, see `mpicomp.stop_on_signals`; the same on all ranks.
    slowest_rank : int or None
        The rank, by its number in the reducer, with most work in the last 16 reported steps: seconds from one exchange
        to the next without waits. None before the 20th step, and with one rank.
    slowest_costs_s : float or None
        Seconds a step of its work over that of the median rank (the faster of two), which the others wait.
    choosing_s : float
        This rank's seconds for choosing plans and learning from their times, without waits.
    """

    step: int
    seconds: float = 0.0
    lr: float | None = None
    skipped: bool
    agreed: bool = False
    lost_ranks: list[int]
    stop: bool = False
    slowest_rank: int | None = None
    slowest_costs_s: float | None = None
    choosing_s: float = 0.0
    exchanges: Sequence[BucketExchange] = ()
    once: Sequence[RoundLog] = ()
    """Rounds that measured the network or prepared new buckets."""
    overhead: Sequence[RoundLog] = ()
    """Rounds since the last step that are in no exchange."""

    def __init__(self, step: int, skipped: bool = False) -> None:
        self.step, self.skipped, self.lost_ranks = step, skipped, []

    @property
    def once_wire_bytes(self) -> float:
        """Bytes that left this rank in rounds that measure the network or run once, such as a code's; in no sum."""
        recurring = [entry for done in self.exchanges for entry in done.log if entry.task.once]
        return wire_bytes(self.once) + wire_bytes(recurring)

    @property
    def overhead_bytes(self) -> int:
        """Payload of other rounds since the last step: agreement, telemetry, comparisons of PyTorch's wrappers."""
        return sent_bytes(self.overhead)

    @property
    def overhead_wire_bytes(self) -> float:
        """Bytes that left this rank in them."""
        return wire_bytes(self.overhead)

    def release_buffers(self) -> None:
        """Drop all arrays: memory of its plans is released before others run."""
        for done in self.exchanges:
            done.release_buffers()
            done.result.mean = done.result.sent = _NOTHING

    @functools.cached_property
    def buckets(self) -> list[BucketRecord]:
        """The record of each bucket, in the order of exchange; made when it is read."""
        return [exchange.record for exchange in self.exchanges]

    @property
    def sent_bytes(self) -> int:
        """Payload that this rank passed to the transport, agreement included."""
        return self._sums().sent_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes that left this rank, agreement included."""
        return self._sums().wire_bytes

    @property
    def dense_wire_bytes(self) -> float:
        """Bytes that would have left this rank in a ring of 32-bit numbers."""
        return self._sums().dense_wire_bytes

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds by phase, summed over buckets; ``other`` is the rest of the step."""
        return self._sums().phases_s

    def _sums(self) -> "_Sums":
        """Sum over the buckets in one loop, since every step writes a line of metrics."""
        sent, wire, dense = 0, 0.0, 0.0
        compress = exchange = decode = 0.0
        for bucket in self.buckets:
            sent += bucket.sent_bytes
            wire += bucket.wire_bytes
            dense += bucket.dense_wire_bytes
            phases = bucket.phases_s
            compress += phases["compress"]
            exchange += phases["exchange"]
            decode += phases["decode"]
        other = max(0.0, self.seconds - (compress + exchange + decode))
        phases = {"compress": compress, "exchange": exchange, "decode": decode, "other": other}
        return _Sums(self.overhead_bytes + sent, self.overhead_wire_bytes + wire, dense, phases)

    def scalars(self) -> dict[str, float]:
        """Return the numbers of a step, for a logger of a framework.

        Returns
        -------
        dict of str to float
            ``mpicomp/seconds``, ``mpicomp/seconds/compress`` and the other phases, ``mpicomp/seconds/choosing``;
            ``mpicomp/bytes/sent``, ``mpicomp/bytes/wire`` and ``mpicomp/bytes/dense_ring``, of this step and rank;
            ``mpicomp/ratio``, the kept fraction of all elements; ``mpicomp/gain``, the retained share of the energy,
            and ``mpicomp/predicted_s``, the sum over buckets, if they are known for all; ``mpicomp/skipped``.
        """
        numbers = {"seconds": self.seconds}
        numbers |= {f"seconds/{name}": seconds for name, seconds in self.phases_s.items()}
        numbers |= {
            "seconds/choosing": self.choosing_s,
            "bytes/sent": self.sent_bytes,
            "bytes/wire": self.wire_bytes,
            "bytes/dense_ring": self.dense_wire_bytes,
            "skipped": float(self.skipped),
        }
        numel = sum(bucket.numel for bucket in self.buckets)
        if numel:
            numbers["ratio"] = sum(bucket.ratio_reached * bucket.numel for bucket in self.buckets) / numel
        pairs = [(bucket.gain, bucket.energy) for bucket in self.buckets]
        sent = [gain * energy for gain, energy in pairs if gain is not None and energy is not None]
        energy = sum(energy for _, energy in pairs if energy is not None)
        if energy and len(sent) == len(self.buckets):
            numbers["gain"] = sum(sent) / energy
        predicted = [bucket.predicted_s for bucket in self.buckets if bucket.predicted_s is not None]
        if predicted and len(predicted) == len(self.buckets):
            numbers["predicted_s"] = sum(predicted)
        return {f"mpicomp/{name}": float(number) for name, number in numbers.items()}

    def add_scalars(self, writer: Any, step: int | None = None) -> None:
        """Pass `scalars` to a writer with ``add_scalar(tag, value, step)``, as TensorBoard's SummaryWriter has it.

        Parameters
        ----------
        writer : object
            Usually on rank 0 only.
        step : int, optional
            The training's number of the step; None stands for this record's.
        """
        for tag, value in self.scalars().items():
            writer.add_scalar(tag, value, self.step if step is None else step)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able object; the schema is in docs/observability.md."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        buckets = [bucket.to_json() for bucket in self.buckets]
        return {"schema": SCHEMA, **fields, **self._sums()._asdict(), "buckets": buckets}
