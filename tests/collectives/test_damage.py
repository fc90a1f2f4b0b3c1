"""A message that one rank alone receives damaged: one error on all ranks, and nothing of the step remains."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
from marks import once, slow
from schemes import Above

import mpicomp
from mpicomp.collectives import allgather, fitting, gtopk, oktopk, variants
from mpicomp.errors import DisagreementError, MessageError, NonFiniteError
from mpicomp.rounds import observe
from mpicomp.transport import LocalWorld
from mpicomp.transport.scheduler import ProgressThread

SHAPES = {"first": (14, 15), "second": (9, 7)}  # a bucket each
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
    mpicomp.CountSketch(ratio=0.05),
    mpicomp.FetchSGD(ratio=0.05),
    mpicomp.MaxNorm(bits=[4, 8]),
    mpicomp.GlobalRandKMaxNorm(ratio=0.3),
    mpicomp.SignSGD(),
]
BARE = {"star-topk", "var-topk", "learned"}
"""Collectives that also send what has no header: indices, energies and codes."""
HEADERLESS = {"ring", "recursive-doubling", "low-rank", "sketched-memory"}
"""Collectives that send numbers alone."""
LAYOUTS = [[0, 0, 1, 1], [0, 1, 1]]


def version(message):
    message[0] ^= 0x40


def count(message):
    message[4] ^= 1


def flags(message):
    message[1] |= 0x40


def nonsense(message):
    message[:] = 0xFF


class Damaged:
    """Reducers whose rounds can be listened to, and whose messages can be damaged on the way to one rank."""

    def __init__(self, layout, compressor, collective):
        self.world = LocalWorld(len(layout), hosts=layout)
        feedback = None if compressor.feedback else False
        self.reducers = [
            mpicomp.Reducer(compressor, collective, feedback=feedback, bucket_bytes=300, comm=end)
            for end in self.world.transports
        ]

    def step(self, gradients, rank=None, place=None, damage=None):
        """Reduce; return what each rank returns or raises, and the rounds of one rank with what it received."""
        heard = []

        def hear(task):
            if len(heard) == place:
                damage(task.recv.view(np.uint8))
            heard.append(task)

        def outcome(rounds, own):
            try:
                return (yield from observe(rounds, after=hear if own == rank else None))
            except Exception as error:
                return error

        runs = [
            outcome(reducer.rounds(own), number)
            for number, (reducer, own) in enumerate(zip(self.reducers, gradients, strict=True))
        ]
        return self.world.run(runs), heard

    def kept(self):
        """Return everything that lives from step to step, rank by rank, in a form that can be compared."""
        return [_plain(reducer.state_dict() | {"policy": None, "cost": None}) for reducer in self.reducers]


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    return value.tobytes() if isinstance(value, np.ndarray) else value


def gradients(ranks, step):
    rngs = [np.random.default_rng([step, rank]) for rank in range(ranks)]
    return [{name: rng.standard_t(3, shape).astype(np.float32) for name, shape in SHAPES.items()} for rng in rngs]


def begun(layout, compressor, collective):
    """Give reducers that have two steps behind them."""
    together = Damaged(layout, compressor, collective)
    for step in range(2):
        together.step(gradients(len(layout), step))
    return together


def check(layout, compressor, collective, rank, of_interest, damages):
    """Damage each message of interest to one rank in turn."""
    ranks = len(layout)
    together, expected = begun(layout, compressor, collective), begun(layout, compressor, collective)
    _, heard = begun(layout, compressor, collective).step(gradients(ranks, 2), rank)
    places = [place for place, task in enumerate(heard) if of_interest(task)]
    told = [place for place, task in enumerate(heard) if task.group != "host"]
    for turn, place in enumerate(places):
        before = together.kept()
        damage = damages[turn % len(damages)]
        outcomes, _ = together.step(gradients(ranks, 2), rank, place, damage)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert {type(error) for error in errors} == {MessageError}, (place, damage, outcomes)
        if len(errors) == ranks:
            assert len({str(error) for error in errors}) == 1
            assert f"(on rank {rank})" in str(errors[0]) or "hierarchical" in collective
            assert together.kept() == before
        else:  # the step's last message, behind which no other could tell of it
            assert place == told[-1]
            affected = [own for own in range(ranks) if isinstance(outcomes[own], Exception)]
            assert rank in affected
            assert len({layout[own] for own in affected}) == 1
            after = together.kept()
            for own in affected:
                assert after[own] == before[own] | {"step": before[own]["step"] + 1}
            outcomes, _ = together.step(gradients(ranks, 3))
            assert {type(outcome) for outcome in outcomes} == {DisagreementError}
            together = begun(layout, compressor, collective)
    assert places
    outcomes, _ = together.step(gradients(ranks, 2))
    assert [_plain(outcome) for outcome in outcomes] == [_plain(own) for own in expected.step(gradients(ranks, 2))[0]]


def has_header(task):
    return task.dtype == np.uint8 and task.recv is not None and task.recv.size >= 24


def headed(compressor, collective):
    """Whether every message of bytes has a header: said by name, since whoever asks has not begun to test."""
    wide = collective == "allreduce" and getattr(compressor, "wire", None) is None
    return collective not in BARE | HEADERLESS and not wide


PAIRS = [(compressor, name) for compressor in COMPRESSORS for name in fitting(compressor)]


@pytest.mark.parametrize(("compressor", "collective"), once(pair for pair in PAIRS if not headed(*pair)), ids=str)
def test_what_has_no_header_is_named(compressor, collective):
    _, heard = begun([0, 0, 0], compressor, collective).step(gradients(3, 2), 0)
    assert collective in BARE or not any(map(has_header, heard))


@pytest.mark.parametrize("rank", [slow(0), 2])
@pytest.mark.parametrize(("compressor", "collective"), once(pair for pair in PAIRS if headed(*pair)), ids=str)
def test_a_header_that_one_rank_receives_damaged(compressor, collective, rank):
    for damage in (version, count, flags):
        check([0, 0, 0], compressor, collective, rank, has_header, [damage])


@pytest.mark.parametrize("collective", ["gtopk", "oktopk"])
@pytest.mark.parametrize("compressor", [mpicomp.TopK(ratio=0.05), Above(limit=1.5, wire="bf16")], ids=str)
def test_every_message_to_every_rank(compressor, collective):
    for rank in range(5):
        check([0] * 5, compressor, collective, rank, has_header, [version, count, nonsense])


def test_pieces_that_are_shared_out():
    """One owner has nearly everything, so that it gives parts of it away: another round with messages of its own."""
    rngs = [np.random.default_rng(rank) for rank in range(3)]
    even = [{"w": rng.standard_t(3, 90_000).astype(np.float32)} for rng in rngs]
    uneven = [{"w": own["w"] * np.repeat(np.float32([1e3, 1, 1]), 30_000)} for own in even]

    def begun():
        together = Damaged([0, 0, 0], mpicomp.TopK(ratio=0.3), "oktopk")
        together.step(even)
        return together

    _, heard = begun().step(uneven, 1)
    places = [place for place, task in enumerate(heard) if has_header(task)]
    assert [heard[place].operation for place in places] == ["alltoallv", "alltoallv", "allgatherv"]
    for place in places[:2]:
        together = begun()
        before = together.kept()
        outcomes, _ = together.step(uneven, 1, place, version)
        assert {str(outcome) for outcome in outcomes} == {
            "oktopk: from rank 0: message: version must be 2, got 66; run one mpicomp on all ranks (on rank 1)"
        }
        assert together.kept() == before


def between_hosts(task):
    return task.group == "across" and has_header(task)


HIERARCHIES = [
    (compressor, name)
    for compressor in COMPRESSORS
    for name in variants(compressor)
    if name.startswith("hierarchical:") and BARE.isdisjoint(name.split(":"))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("compressor", "collective"), once(HIERARCHIES), ids=str)
def test_messages_between_hosts(compressor, collective, layout):
    if any(map(between_hosts, begun(layout, compressor, collective).step(gradients(len(layout), 2), 0)[1])):
        for rank in (0, 2) if layout == [0, 0, 1, 1] else (0, 1):
            check(layout, compressor, collective, rank, between_hosts, [version, count])


def led(task):
    return task.operation == "bcast" and task.dtype in (np.uint8, np.uint32)


@pytest.mark.parametrize(
    "compressor",
    [mpicomp.TopK(ratio=0.05), mpicomp.TopK(ratio=0.4, indices="elias-fano", wire="bf16"), Above(limit=1.5)],
    ids=str,
)
@pytest.mark.parametrize("collective", ["star-topk", "var-topk", "star-topk:scatter-reduce"])
def test_indices_that_one_rank_leads_with(compressor, collective):
    check([0, 0, 0], compressor, collective, 1, led, [nonsense])


@pytest.mark.parametrize("training_steps", [1, 20])  # the steps that are looked at are in a code, or learn one
@pytest.mark.parametrize("instance", ["ring", "server"])
def test_what_a_learned_code_is_led_with(instance, training_steps):
    compressor = mpicomp.LGC(ratio=0.3, code="linear", dense_steps=0, training_steps=training_steps, instance=instance)
    for inner in ("allreduce", "ring"):
        check([0, 0, 0], compressor, f"learned:{inner}", 1, led, [nonsense])


def test_what_a_learned_code_leaves_out():
    compressor = mpicomp.LGC(ratio=0.3, code="linear", dense_steps=0, training_steps=1, instance="server")

    def innovation(message):
        [place, *_] = np.flatnonzero((message[:-3] == 2) & (message[1:-2] == 0) & (message[2:-1] == 1))
        message[place] = 99  # the version in the header that stands behind values

    check([0, 0, 0], compressor, "learned", 1, lambda task: task.operation == "allgatherv", [innovation])


@pytest.mark.parametrize("collective", ["allgather", "gtopk", "oktopk", "parameter-server"])
def test_a_message_that_all_receive_damaged(collective):
    """Then all raise at once, and go on from where they were."""
    compressor = mpicomp.TopK(ratio=0.05)
    together, expected = (begun([0, 0, 0], compressor, collective) for _ in range(2))
    before = together.kept()

    def spoilt(rounds):
        messages = itertools.count(1)

        def spoil(task):
            carries = has_header(task) and task.operation in ("allgatherv", "bcast")
            if carries and next(messages) == 2:  # the second bucket's
                task.recv[0] = 99

        try:
            return (yield from observe(rounds, after=spoil))
        except MessageError as error:
            return error

    outcomes = together.world.run(
        [spoilt(r.rounds(own)) for r, own in zip(together.reducers, gradients(3, 2), strict=True)]
    )
    assert {type(outcome) for outcome in outcomes} == {MessageError}
    after = together.kept()
    assert [own["residuals"] for own in after] == [own["residuals"] for own in before]
    assert [own["memories"] for own in after] == [own["memories"] for own in before]
    for _ in range(2):
        means, _ = together.step(gradients(3, 3))
        others, _ = expected.step(gradients(3, 3))
        assert [_plain(mean) for mean in means] == [_plain(mean) for mean in others]


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize(
    "compressor",
    [
        mpicomp.TopK(ratio=0.05),
        mpicomp.SIDCo(),
        mpicomp.PowerSGD(rank=1),
        mpicomp.FetchSGD(ratio=0.05, momentum=0.9),
        mpicomp.LGC(ratio=0.3, code="linear", dense_steps=0, training_steps=4),
    ],
    ids=str,
)
def test_step_undone_for_one_bucket_is_undone_for_all(compressor, nonfinite):
    world = LocalWorld(2)
    feedback = None if compressor.feedback else False
    reducers = [
        mpicomp.Reducer(
            compressor, policy={"warmup": 0}, feedback=feedback, bucket_bytes=300, nonfinite=nonfinite, comm=end
        )
        for end in world.transports
    ]

    def reduce(given):
        world.run([r.rounds(own) for r, own in zip(reducers, given, strict=True)])

    reduce(gradients(2, 0))
    before = [_plain(reducer.state_dict()["memories"]) for reducer in reducers]
    poisoned = gradients(2, 1)
    poisoned[1]["second"][3] = np.nan
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError):
            reduce(poisoned)
    else:
        reduce(poisoned)
    assert [_plain(reducer.state_dict()["memories"]) for reducer in reducers] == before
    reduce(gradients(2, 1))


def reduce_with(reducer, thread, given):
    """Reduce; with a thread the buckets are exchanged as they are handed over."""
    if thread is None:
        return reducer.reduce(given)
    stream = reducer.stream(thread)
    if stream is None:  # the first step
        return reducer.reduce(given)
    for name, gradient in given.items():
        stream.put(name, gradient)
    return stream.finish(given)


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bucket", [0, 1])
@pytest.mark.parametrize("collective", ["gtopk", "oktopk"])
def test_over_mpi(comm, monkeypatch, collective, bucket, overlap):
    """What rank 0 is sent by another cannot be read, in either bucket; all of them raise, and go on."""
    if comm.size == 1:
        return  # nobody is sent anything
    module, reader, reads = {
        "gtopk": (gtopk, "parse_padded_message", (comm.size - 1).bit_length() + 1),
        "oktopk": (oktopk, "parse_message", 2 * comm.size),
    }[collective]
    twin = Damaged([0] * comm.size, mpicomp.TopK(ratio=0.05), collective)
    reducer = mpicomp.Reducer(mpicomp.TopK(ratio=0.05), collective, bucket_bytes=300, comm=comm)
    with ProgressThread(reducer.transport, channels=1) if overlap else nullcontext() as thread:
        for step in range(2):
            twin.step(gradients(comm.size, step))
            reduce_with(reducer, thread, gradients(comm.size, step)[comm.rank])
        residuals = [reducer.residual(name).tobytes() for name in SHAPES]
        genuine, read = getattr(module, reader), []

        def torn(*arguments):
            read.append(arguments)
            if comm.rank == 0 and len(read) == 1 + bucket * reads:
                raise MessageError("torn")
            return genuine(*arguments)

        monkeypatch.setattr(module, reader, torn)
        with pytest.raises(MessageError, match=rf"^{collective}: from rank \d: torn \(on rank 0\)$"):
            reduce_with(reducer, thread, gradients(comm.size, 2)[comm.rank])
        assert [reducer.residual(name).tobytes() for name in SHAPES] == residuals
        for step in (2, 3):
            means = reduce_with(reducer, thread, gradients(comm.size, step)[comm.rank])
            expected, _ = twin.step(gradients(comm.size, step))
            assert _plain(means) == _plain(expected[comm.rank])
    reducer.close()


@pytest.mark.mpi
def test_the_last_message_over_mpi(comm, monkeypatch):
    """Nothing follows that could tell the others: they hear of it in the next step."""
    reducer = mpicomp.Reducer(mpicomp.TopK(ratio=0.05), "allgather", comm=comm)
    given = gradients(comm.size, 0)[comm.rank]
    reducer.reduce(given)
    genuine = allgather.parse_header

    def torn(*arguments):
        raise MessageError("torn")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(allgather, "parse_header", torn)
        with pytest.raises(
            MessageError, match=r"allgather: from rank 0: torn .on rank .*nothing was applied on this rank"
        ):
            reducer.reduce(given)
        monkeypatch.setattr(allgather, "parse_header", genuine)
    else:
        reducer.reduce(given)
    if comm.size > 1:
        with pytest.raises(DisagreementError, match="whether the last step was applied must be the same on all ranks"):
            reducer.reduce(given)
    reducer.close()
