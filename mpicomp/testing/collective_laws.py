"""Laws of collectives, checked with a compressor of each kind of message that a collective carries."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpicomp.collectives import Context, Result, Scheme, bind, collective_class, fitting
from mpicomp.compressors import Compressor, Selection, Sparsifier
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.mpi import LocalWorld, Transport
from mpicomp.mpi.rounds import observe
from mpicomp.testing.examples import DTYPES, Array, accumulated, mean_of, norm2, representatives

_RANKS = (1, 2, 3, 4, 5)  # 3 and 5 catch code that works for powers of two only
_LENGTHS = (1, 2, 7, 1001)
_HOSTS = (0, 0, 1, 1, 1)  # the host of each rank, for groups of ranks
_NUM_STEPS = 2  # a collective may differ in its first step


class Outcome(NamedTuple):
    """One exchange: results and transports of all ranks, their arrays before it, and the inputs of the exchange."""

    results: list[Result]
    transports: Sequence[Transport]
    scheme: Scheme[Any]
    before: list[Array]
    inputs: list[Accumulated]

    @property
    def after(self) -> list[Array]:
        """The ranks' arrays as the exchange leaves them, of which `Result.sent` is a share."""
        return [one.array() for one in self.inputs]


def exchange(
    scheme: Scheme[Any],
    arrays: Sequence[Array],
    world: LocalWorld,
    inputs: list[Accumulated] | None = None,
    memories: Sequence[dict[str, Any]] | None = None,
    step: int = 0,
    before: Callable[[Any], None] | None = None,
) -> Outcome:
    """Exchange one array a rank, or its ``inputs`` instead; ``before`` sees every round before it runs."""
    inputs = inputs or [accumulated(array) for array in arrays]
    memories = memories or [{} for _ in arrays]
    copies = [array.copy() for array in arrays]
    contexts = [
        Context(group=end.group, step=step, memory=memory)
        for end, memory in zip(world.transports, memories, strict=True)
    ]
    exchanges = [scheme.exchange(one, context) for one, context in zip(inputs, contexts, strict=True)]
    results = world.run([observe(rounds, before=before) for rounds in exchanges])
    return Outcome(results, world.transports, scheme, copies, inputs)


def check_registered(cls: type[Scheme[Any]]) -> None:
    """Check that it is registered, names its messages and its paper, and that a compressor fits it."""
    assert collective_class(cls.id) is cls, f"'{cls.id}' is registered for another class"
    assert ":" not in cls.id, f"a colon separates a collective from its inner one, got '{cls.id}'"
    assert cls.paper, "paper is empty; name the source"
    assert _carried(cls), f"no built-in compressor has {cls.messages!r} messages that it carries"


def check_nothing_is_lost(cls: type[Scheme[Any]]) -> None:
    """Check that all ranks get the same bits, ranks times mean is the sum of the sent parts, and a gain is right."""
    for where, outcome in _exchanges(cls):
        check_sums(where, outcome)


def check_sums(where: str, outcome: Outcome) -> None:
    """Check `check_nothing_is_lost` for one exchange."""
    first, ranks = outcome.results[0], len(outcome.results)
    means = [mean_of(result, outcome.before[0]) for result in outcome.results]
    numel, dtype = outcome.before[0].size, outcome.before[0].dtype
    for result, mean in zip(outcome.results, means, strict=True):
        assert mean.tobytes() == means[0].tobytes(), f"means differ: {where}"
        same = (result.kept, result.energy, result.nonfinite, result.stale)
        assert same == (first.kept, first.energy, False, False), f"ranks get different results: {where}"
        assert math.isnan(first.gain) or result.gain == first.gain, f"ranks get different gains: {where}"
    sent = [_dense(result.sent, numel) for result in outcome.results]
    room = 4 * ranks * float(np.finfo(dtype).eps) * float(np.abs(outcome.before).sum(axis=0).max())
    lost = np.abs(np.sum(sent, axis=0) - ranks * means[0].astype(np.float64)).max()
    assert lost <= room, f"the sum of the sent parts is off the mean times ranks by {lost:.3g}: {where}"
    moved = np.abs(np.sum(outcome.after, axis=0, dtype=np.float64) - np.sum(outcome.before, axis=0)).max()
    assert moved <= room, f"the ranks' arrays sum to something else than before, by {moved:.3g}: {where}"
    energy = sum(map(norm2, outcome.after))
    assert math.isclose(first.energy, energy, rel_tol=1e-5), f"energy is {first.energy}, not {energy}: {where}"
    if not math.isnan(first.gain):
        left = sum(norm2(array - share) for array, share in zip(outcome.after, sent, strict=True))
        gain = 1 - left / energy
        assert abs(first.gain - gain) <= 1e-5 * (1 + abs(gain)), f"gain is {first.gain}, not {gain}: {where}"


def check_bytes_are_those_of_rounds(cls: type[Scheme[Any]]) -> None:
    """Check that `exchange` runs the operations and bytes of `rounds`, unless they depend on values."""
    for where, outcome in _exchanges(cls):
        if not outcome.scheme.by_value:
            check_bytes(where, outcome, _NUM_STEPS - 1)


def check_bytes(where: str, outcome: Outcome, step: int) -> None:
    """Check `check_bytes_are_those_of_rounds` for one exchange; with values that decide only its operations."""
    scheme, numel, dtype = outcome.scheme, outcome.before[0].size, outcome.before[0].dtype
    for end in outcome.transports:
        expected = scheme.rounds(numel, dtype, end.group, step)
        log = [entry for entry in end.log or () if entry.sends]
        ran = [entry.operation for entry in log]
        assert ran == [task.operation for task in expected], f"rounds were {ran}: {where}"
        if scheme.by_value or (isinstance(scheme.compressor, Sparsifier) and scheme.compressor.count(numel) is None):
            continue
        for entry, task in zip(log, expected, strict=True):
            group = end.group.part(task.group)
            assert group is not None
            promised = task.sent_bytes(group), task.wire_bytes(group)
            ran_bytes = entry.sent_bytes, entry.wire_bytes
            assert ran_bytes == promised, f"{task.operation} sent {ran_bytes}, rounds announce {promised}: {where}"


def check_flags_reach_all(cls: type[Scheme[Any]]) -> None:
    """Check that NaN or infinity on any rank, and a rank's request for a new agreement, are reported to all of them."""
    for compressor, ranks in itertools.product(_carried(cls), (1, 2, 3, 4)):
        where = f"{compressor!r}, {ranks} ranks"
        for culprit, bad in itertools.product(range(ranks), (np.nan, np.inf, -np.inf, None)):
            arrays = _gradients(ranks, 50, DTYPES[0])
            inputs = [accumulated(array) for array in arrays]
            if bad is None:
                inputs[culprit].stale = True
            else:
                arrays[culprit][33] = bad
            for result in exchange(bind(compressor, cls.id), arrays, LocalWorld(ranks), inputs).results:
                if bad is None:
                    assert result.stale, f"rank {culprit} is stale, and not all know it: {where}"
                    assert not result.nonfinite, f"rank {culprit} is stale, and taken for not finite: {where}"
                else:
                    assert result.nonfinite, f"{bad} on rank {culprit} is not seen by all: {where}"


LAWS: list[Callable[[Any], None]] = [
    check_registered,
    check_nothing_is_lost,
    check_bytes_are_those_of_rounds,
    check_flags_reach_all,
]


def _carried(cls: type[Scheme[Any]]) -> list[Compressor]:
    return [compressor for compressor in representatives() if cls.id in fitting(compressor)]


def _exchanges(cls: type[Scheme[Any]]) -> Iterator[tuple[str, Outcome]]:
    worlds: list[tuple[int, bool, int | tuple[int, ...]]] = [(ranks, True, 1) for ranks in _RANKS]
    worlds += [(3, False, 1), (len(_HOSTS), True, _HOSTS)]
    for compressor, (ranks, identical, hosts) in itertools.product(_carried(cls), worlds):
        for dtype, numel in itertools.product(DTYPES, _LENGTHS):
            memories: list[dict[str, Any]] = [{} for _ in range(ranks)]
            for step in range(_NUM_STEPS):
                arrays = _gradients(ranks, numel, dtype, step)
                world = LocalWorld(ranks, identical, hosts)
                outcome = exchange(bind(compressor, cls.id), arrays, world, memories=memories, step=step)
            yield f"{compressor!r}, {ranks} ranks, hosts {hosts}, {numel} {dtype.name}", outcome


def _gradients(ranks: int, numel: int, dtype: np.dtype[Any], step: int = 0) -> list[Array]:
    rng = np.random.default_rng([numel, step])
    return [
        ((1e-3 if rank % 3 == 1 else 1.0) * rng.standard_t(3, numel)).astype(dtype, copy=False) for rank in range(ranks)
    ]


def _dense(sent: Any, numel: int) -> Array:
    if isinstance(sent, Selection):
        out = np.zeros(numel)
        out[sent.indices] = sent.values
        return out
    return np.asarray(sent, np.float64)
