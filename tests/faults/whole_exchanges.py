"""Whole exchanges as one rank sees them: what it received is recorded, and replayed to the same exchange."""

import contextlib
import copy

import numpy as np
from faults.genuine_messages import DTYPES, LEARNED, Case, check_ascending, random_array, random_numel

import mpicomp
from mpicomp.arrays import ArraySpec
from mpicomp.collectives import Context, bind
from mpicomp.compressors import Selection
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.errors import DisagreementError
from mpicomp.gpu.device import activated
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.rounds import Round, observe
from mpicomp.rounds.drive import Returned, advance
from mpicomp.systems.lgc.leader_message import LeaderMessage, leader_of, share_selection
from mpicomp.transport import LocalWorld
from mpicomp.workspace import Workspace


def _layers(numel):
    """Cut a bucket in four parameters, two of them matrices; the first and the last are small."""
    side = 4
    first, last = 3, 2
    rows = (numel - first - last) // (2 * side)
    matrices = [side * rows] * 2
    rest = numel - first - last - sum(matrices)
    sizes = [first, *matrices, last + rest]
    return ["first", "m.0", "m.1", "last"], sizes, [(first,), (side, rows), (rows, side), (last + rest,)]


def _accumulated(fence, array):
    """Return a maker of the same input: a new one for each exchange."""

    def make():
        return Accumulated(fence.empty(array.size + TRAILER, array.dtype), None, [Piece(0, array)])

    return make


def fill(task, message):
    """Put the bytes of a message where a round receives; what is missing is zero."""
    if task.recv is None:
        return 0
    room = task.recv.reshape(-1).view(np.uint8)
    size = min(room.size, message.size)
    room[:size] = message[:size]
    room[size:] = 0
    return size


def _replayed(fence, received, begin, check):
    """Return the case of a rank that goes through rounds in which it receives these messages, one after the other."""
    lengths = [len(part) for part in received]

    def decode(message):
        with activated(fence), np.errstate(all="ignore"):
            exchange, reply, place, start = begin(), None, 0, 0
            while not isinstance(asked := advance(exchange, reply), Returned):
                assert place < len(lengths) + 8, "an exchange without an end"
                if not isinstance(asked, Round) or asked.background:
                    raise AssertionError("a round in the background, of which nothing is known here")
                stop = start + (lengths[place] if place < len(lengths) else 64)
                fill(asked, message[start:stop])
                if asked.recv is not None and asked.arrived is not None and asked.recv.size:
                    asked.arrived(0, asked.recv.size)
                reply = np.empty(0, asked.dtype) if asked.recv is None else asked.recv
                start, place = stop, place + 1
            check(asked.value)

    return Case(b"".join(received), decode)


def whole_exchange(compressor, collective):
    def make(rng, fence):
        numel, dtype = random_numel(rng) + 32, rng.choice(DTYPES)
        layout = [[0, 0, 0], [0, 0, 1, 1], [0, 1], [0, 1, 1]][int(rng.integers(4))]
        scheme = bind(compressor.bind(*_layers(numel)), collective)
        ranks, rank = len(layout), int(rng.integers(len(layout)))
        world = LocalWorld(ranks, hosts=layout)
        memories = [{} for _ in range(ranks)]
        workspaces = [Workspace(fence) for _ in range(ranks)]
        last = int(rng.integers(3))

        def context(place, step):
            group = world.transports[place].group
            return Context(group, step, memory=memories[place], workspace=workspaces[place])

        with activated(fence), np.errstate(all="ignore"):
            for step in range(last + 1):
                inputs = [_accumulated(fence, random_array(rng, numel, dtype)) for _ in range(ranks)]
                before, received = copy.deepcopy(memories[rank]), []

                def record(task, received=received):
                    received.append(b"" if task.recv is None else task.recv.tobytes())

                world.run(
                    [
                        observe(
                            scheme.exchange(inputs[place](), context(place, step)),
                            after=record if place == rank else None,
                        )
                        for place in range(ranks)
                    ]
                )

        def begin():
            again = context(rank, last)
            again.memory = copy.deepcopy(before)
            return scheme.exchange(inputs[rank](), again)

        def check(result):
            mean = result.mean_in(Workspace())
            assert mean.shape == (numel,)
            assert mean.dtype == dtype
            if isinstance(result.sent, Selection):
                assert result.sent.indices.shape == result.sent.values.shape
                check_ascending(result.sent.indices, numel)
            else:
                assert result.sent.shape == (numel,)
            if result.problem is not None:
                raise result.problem

        return _replayed(fence, received, begin, check)

    return make


def leader_message(instance):
    def make(rng, fence):
        numel, dtype = random_numel(rng) + 64, rng.choice(DTYPES)
        compressor = mpicomp.LGC(**LEARNED, instance=instance)
        names, sizes, shapes = _layers(numel)
        compressor = compressor.bind(names, sizes, shapes)
        selected = compressor.selected(numel)
        frame, signs = bool(rng.integers(2)), bool(rng.integers(2))
        lead = LeaderMessage(selected, numel, frame=frame, signs=frame and signs)
        ends = LocalWorld(2).transports
        contexts = [Context(end.group, step=int(rng.integers(99)), workspace=Workspace(fence)) for end in ends]
        contexts[1].step = contexts[0].step
        first = leader_of(contexts[0])
        arrays = [_accumulated(fence, random_array(rng, numel, dtype)) for _ in ends]
        with activated(fence):
            task = advance(share_selection(lead, arrays[first](), contexts[first]))
        message = task.send.tobytes()

        def decode(message):
            with activated(fence):
                exchange = share_selection(lead, arrays[1 - first](), contexts[1 - first])
                asked = advance(exchange)
                fill(asked, message)
                led = advance(exchange, asked.recv).value
            assert led.values.size == led.indices.size == selected.count
            check_ascending(led.indices, numel)
            if led.problem is not None:
                raise led.problem

        return Case(message, decode)

    return make


def agreement(rng, fence):
    """What ranks tell each other of their arrays, where they differ: three rounds."""
    signatures = [
        Signature({"seed": 1, "policy": "static"}, [ArraySpec(name, "float32", (3, 4)) for name in names])
        for names in (("a", "b"), ("a", "c"))
    ]
    rank, received = int(rng.integers(2)), []
    world = LocalWorld(2)
    groups = [end.group for end in world.transports]

    def record(task):
        received.append(task.recv.tobytes())

    with contextlib.suppress(DisagreementError):
        world.run(
            [
                observe(agree(mine, None, group), after=record if place == rank else None)
                for place, (mine, group) in enumerate(zip(signatures, groups, strict=True))
            ]
        )
    return _replayed(fence, received, lambda: agree(signatures[rank], None, groups[rank]), lambda value: None)
