"""A message that one rank alone receives damaged: one error on all ranks, and nothing of the step remains."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
from marks import once
from schemes import Above
from worlds import Ranks

import mpicomp
from mpicomp.collectives import allgather, oktopk, variants
from mpicomp.errors import DisagreementError, MessageError
from mpicomp.mpi.rounds import observe
from mpicomp.mpi.thread import ProgressThread
from mpicomp.testing import pairs

SHAPES = {"first": (14, 15), "second": (9, 7)}  # a bucket each
CODE = {"ratio": 0.3, "encoder": (2,), "decoder": (2,), "passes": 1, "dense_steps": 0}
COMPRESSORS = [
    mpicomp.Dense(),
    mpicomp.Dense(wire="bf16"),
    mpicomp.TopK(ratio=0.05),
    mpicomp.TopK(ratio=0.4, wire="fp16", indices="elias-fano"),
    Above(limit=1.5),
    mpicomp.RandomK(ratio=0.3),
    mpicomp.OneBit(block=64),
    mpicomp.Uniform(),
    mpicomp.PowerSGD(rank=1),
    mpicomp.GlobalRandKMaxNorm(ratio=0.3),
    mpicomp.SignSGD(),
]
BARE = {"star-topk", "var-topk", "learned"}
"""Collectives that also send what has no header: indices, energies and codes."""
HEADERLESS = {"ring", "recursive-doubling", "low-rank"}
"""Collectives that send numbers alone."""
ONE_HOST = [0, 0, 0]


def version(message):
    message[0] ^= 0x40


def count(message):
    message[4] ^= 1


def flags(message):
    message[1] |= 0x40


def scales(message):
    """Make the first scale of values in four bits negative."""
    start = 24 + 8 * -(-4 * int(message[4:8].view(np.uint32)[0]) // 64)
    message[start : start + 4].view(np.float32)[:] = -1


def nonsense(message):
    message[:] = 0xFF


def gradients(ranks, step):
    rngs = [np.random.default_rng([step, rank]) for rank in range(ranks)]
    return [{name: rng.standard_t(3, shape).astype(np.float32) for name, shape in SHAPES.items()} for rng in rngs]


def outcome_of(rounds, after=None):
    try:
        return (yield from observe(rounds, after=after))
    except Exception as error:
        return error


def step_of(world, arrays, rank=None, position=None, damage=None):
    """Reduce; return what each rank returns or raises, and the rounds of one rank with what it received."""
    rounds = []

    def note(task):
        if len(rounds) == position:
            damage(task.recv.view(np.uint8))
        rounds.append(task)

    steps = [reducer.rounds(array) for reducer, array in zip(world.reducers, arrays, strict=True)]
    steps = [outcome_of(step, note if number == rank else None) for number, step in enumerate(steps)]
    return world.world.run(steps), rounds


def plain(value):
    """Return a nested value in a form that can be compared."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tobytes() if isinstance(value, np.ndarray) else value


def kept(world):
    """Return everything that lives from step to step, rank by rank."""
    return [plain(reducer.state_dict() | {"policy": None, "cost": None}) for reducer in world.reducers]


def new_world(layout, compressor, collective, **settings):
    feedback = None if compressor.feedback else False
    return Ranks(len(layout), compressor, collective, hosts=layout, feedback=feedback, bucket_bytes=300, **settings)


def begun(layout, compressor, collective):
    world = new_world(layout, compressor, collective)
    for step in range(2):
        world.reduce(gradients(len(layout), step))
    return world


def check(layout, compressor, collective, rank, of_interest, damages):
    """Damage each message of interest to one rank in turn."""
    ranks = len(layout)
    arrays = gradients(ranks, 2)
    world, expected = begun(layout, compressor, collective), begun(layout, compressor, collective)
    _, rounds = step_of(begun(layout, compressor, collective), arrays, rank)
    positions = [position for position, task in enumerate(rounds) if of_interest(task)]
    last = max(position for position, task in enumerate(rounds) if task.group != "host")
    for position, damage in zip(positions, itertools.cycle(damages)):
        before = kept(world)
        outcomes, _ = step_of(world, arrays, rank, position, damage)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert {type(error) for error in errors} == {MessageError}, (position, damage, outcomes)
        if len(errors) == ranks:
            assert len({str(error) for error in errors}) == 1
            assert f"(on rank {rank})" in str(errors[0]) or "hierarchical" in collective
            assert kept(world) == before
        else:  # the step's last message, after which this rank can tell no other
            assert position == last
            affected = [number for number in range(ranks) if isinstance(outcomes[number], Exception)]
            assert rank in affected
            assert len({layout[number] for number in affected}) == 1
            after = kept(world)
            for number in affected:
                assert after[number] == before[number] | {"step": before[number]["step"] + 1}
            outcomes, _ = step_of(world, gradients(ranks, 3))
            assert {type(outcome) for outcome in outcomes} == {DisagreementError}
            world = begun(layout, compressor, collective)
    assert positions
    assert plain(world.reduce(arrays)) == plain(expected.reduce(arrays))


def has_header(task):
    return task.dtype == np.uint8 and task.recv is not None and task.recv.size >= 24


def headed(compressor, collective):
    """Return whether every message of bytes has a header."""
    wide = collective == "allreduce" and getattr(compressor, "wire", None) is None
    return collective not in BARE | HEADERLESS and not wide


def between_hosts(task):
    return task.group == "across" and has_header(task)


def led(task):
    return task.operation == "bcast" and task.dtype in (np.uint8, np.uint32)


def coded(task):
    return task.operation == "allgatherv"


def innovation(message):
    [place, *_] = np.flatnonzero((message[:-3] == 2) & (message[1:-2] == 0) & (message[2:-1] == 1))
    message[place] = 99  # the version in the header that stands behind values


PAIRS = pairs(COMPRESSORS)
HEADED = [pair for pair in PAIRS if headed(*pair)]
SLICED = [(kind, name) for kind in COMPRESSORS for name in variants(kind) if name.startswith("hierarchical:")]
SLICED = [pair for pair in SLICED if BARE.isdisjoint(pair[1].split(":")) and headed(pair[0], pair[1].split(":")[1])]
SELECTIONS = [mpicomp.TopK(ratio=0.05), mpicomp.TopK(ratio=0.4, indices="elias-fano", wire="bf16"), Above(limit=1.5)]
LED = [(entry, name) for entry in SELECTIONS for name in ("star-topk", "var-topk", "star-topk:scatter-reduce")]
LED += [
    (mpicomp.LGC(**CODE, training_steps=steps, instance=instance), f"learned:{inner}")
    for steps in (1, 20)  # the steps that are damaged are in a code, or learn one
    for instance in ("ring", "server")
    for inner in ("allreduce", "ring")
]
FOUR_BITS = mpicomp.TopK(ratio=0.4, wire="q4", indices="plain")
SERVER = mpicomp.LGC(**CODE, training_steps=1, instance="server")


def cases(name, layout, pairs, ranks, of_interest, damages):
    """Return cases of which a part may be slow, as the pairs may be."""
    made = [pair if hasattr(pair, "marks") else pytest.param(*pair) for pair in pairs]
    return [
        pytest.param(layout, *pair.values, rank, of_interest, damages, marks=pair.marks, id=f"{name}-{pair.values[1]}")
        for pair in made
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("layout", "compressor", "collective", "rank", "of_interest", "damages"),
    [
        *cases("version", ONE_HOST, once(HEADED), [2], has_header, [version]),
        *cases("count", ONE_HOST, once(HEADED), [2], has_header, [count]),
        *cases("flags", ONE_HOST, once(HEADED), [0], has_header, [flags]),
        *cases("scales", ONE_HOST, [(FOUR_BITS, "allgather")], [2], has_header, [scales]),
        *cases("each", [0] * 5, [(SELECTIONS[0], "oktopk")], range(5), has_header, [version, count, nonsense]),
        *cases(
            "rounded",
            [0] * 5,
            [(Above(limit=1.5, wire="bf16"), "oktopk")],
            range(5),
            has_header,
            [version, count, nonsense],
        ),
        *cases("hosts", [0, 0, 1, 1], once(SLICED), [0, 2], between_hosts, [version, count]),
        *cases("uneven hosts", [0, 1, 1], once(SLICED), [0, 1], between_hosts, [version, count]),
        *cases("indices", ONE_HOST, LED, [1], led, [nonsense]),
        *cases("innovation", ONE_HOST, [(SERVER, "learned")], [1], coded, [innovation]),
    ],
)
def test_damaged_message_is_one_error_on_all_ranks(layout, compressor, collective, rank, of_interest, damages):
    check(layout, compressor, collective, rank, of_interest, damages)


def test_damaged_pieces_that_are_shared_out_are_an_error():
    """One owner has nearly everything, so that it gives parts of it away: another round with messages of its own."""
    rngs = [np.random.default_rng(rank) for rank in range(3)]
    even = [{"w": rng.standard_t(3, 90_000).astype(np.float32)} for rng in rngs]
    uneven = [{"w": array["w"] * np.repeat(np.float32([1e3, 1, 1]), 30_000)} for array in even]

    def begun():
        world = new_world(ONE_HOST, mpicomp.TopK(ratio=0.3), "oktopk")
        world.reduce(even)
        return world

    _, rounds = step_of(begun(), uneven, 1)
    positions = [position for position, task in enumerate(rounds) if has_header(task)]
    assert [rounds[position].operation for position in positions] == ["alltoallv", "alltoallv", "allgatherv"]
    for position in positions[:2]:
        world = begun()
        before = kept(world)
        outcomes, _ = step_of(world, uneven, 1, position, version)
        assert {str(outcome) for outcome in outcomes} == {
            "oktopk: from rank 0: message: version must be 2, got 66; run one mpicomp on all ranks (on rank 1)"
        }
        assert kept(world) == before


@pytest.mark.parametrize("collective", ["allgather", "oktopk"])
def test_message_damaged_for_all_is_undone_on_all(collective):
    compressor = mpicomp.TopK(ratio=0.05)
    world, expected = (begun(ONE_HOST, compressor, collective) for _ in range(2))
    before = kept(world)

    def damaged(rounds):
        messages = itertools.count(1)

        def damage(task):
            carries = has_header(task) and task.operation in ("allgatherv", "bcast")
            if carries and next(messages) == 2:  # the second bucket's
                task.recv[0] = 99

        return outcome_of(rounds, damage)

    steps = zip(world.reducers, gradients(3, 2), strict=True)
    outcomes = world.world.run([damaged(reducer.rounds(array)) for reducer, array in steps])
    assert {type(outcome) for outcome in outcomes} == {MessageError}
    for name in ("residuals", "memories"):
        assert [state[name] for state in kept(world)] == [state[name] for state in before]
    for _ in range(2):
        assert plain(world.reduce(gradients(3, 3))) == plain(expected.reduce(gradients(3, 3)))


def reduce_with(reducer, thread, arrays):
    """Reduce; with a thread the buckets are exchanged as they are handed over."""
    stream = None if thread is None else reducer.stream(thread)
    if stream is None:  # no thread, or the first step
        return reducer.reduce(arrays)
    for name, gradient in arrays.items():
        stream.put(name, gradient)
    return stream.finish(arrays)


def torn(*arguments):
    raise MessageError("torn")


@pytest.mark.mpi
@pytest.mark.parametrize(("bucket", "overlap"), [(0, False), (1, True)])
def test_damage_over_mpi_is_one_error_on_all_ranks(comm, monkeypatch, bucket, overlap):
    """What rank 0 is sent by another cannot be read, in either bucket; all of them raise, and go on."""
    if comm.size == 1:
        return  # nobody is sent anything
    twin = new_world([0] * comm.size, mpicomp.TopK(ratio=0.05), "oktopk")
    reducer = mpicomp.Reducer(mpicomp.TopK(ratio=0.05), "oktopk", bucket_bytes=300, comm=comm)
    with ProgressThread(reducer.transport) if overlap else nullcontext() as thread:
        for step in range(2):
            twin.reduce(gradients(comm.size, step))
            reduce_with(reducer, thread, gradients(comm.size, step)[comm.rank])
        residuals = [reducer.residual(name).tobytes() for name in SHAPES]
        genuine, calls = oktopk.read_sparse, itertools.count()

        def torn_once(*arguments):
            damaged = comm.rank == 0 and next(calls) == bucket * 2 * comm.size
            return torn() if damaged else genuine(*arguments)

        monkeypatch.setattr(oktopk, "read_sparse", torn_once)
        with pytest.raises(MessageError, match=r"^oktopk: from rank \d: torn \(on rank 0\)$"):
            reduce_with(reducer, thread, gradients(comm.size, 2)[comm.rank])
        assert [reducer.residual(name).tobytes() for name in SHAPES] == residuals
        for step in (2, 3):
            means = reduce_with(reducer, thread, gradients(comm.size, step)[comm.rank])
            assert plain(means) == plain(twin.reduce(gradients(comm.size, step))[comm.rank])
    reducer.close()


@pytest.mark.mpi
def test_damaged_last_message_is_reported_in_the_next_step(comm, monkeypatch):
    """Nothing follows that could tell the others."""
    reducer = mpicomp.Reducer(mpicomp.TopK(ratio=0.05, wire="fp16"), "allgather", comm=comm)
    arrays = gradients(comm.size, 0)[comm.rank]
    reducer.reduce(arrays)
    if comm.rank == comm.size - 1:
        text = r"allgather: from rank 0: torn .on rank .*nothing was applied on this rank"
        with monkeypatch.context() as patch:
            patch.setattr(allgather, "read_sparse_header", torn)
            with pytest.raises(MessageError, match=text):
                reducer.reduce(arrays)
    else:
        reducer.reduce(arrays)
    if comm.size > 1:
        with pytest.raises(DisagreementError, match="whether the last step was applied must be the same on all ranks"):
            reducer.reduce(arrays)
    reducer.close()
