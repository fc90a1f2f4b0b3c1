"""The generator of damaged messages and files: genuine ones of every form, what reads each, and mutations of them.

A maker returns a case: what one rank receives in an exchange, or a file, and what reads it. That takes the genuine
bytes or whatever a mutation has made of them, and either raises an error of mpicomp or returns after a look at the
result.
"""

import contextlib
import copy
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from lockstep import drive
from schemes import OWN, REPRESENTED, UNBIASED

import mpicomp
from mpicomp.arrays import ArraySpec
from mpicomp.collectives import Context, bind, fitting, variants
from mpicomp.compressors import COMPRESSORS, Selection, compressor_class
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.compressors.wire import INDICES, VALUES
from mpicomp.cost.kernel_costs import KernelCost
from mpicomp.cost.model import CostModel
from mpicomp.cost.network_model import Network
from mpicomp.errors import ConfigurationError, DisagreementError, MpicompError
from mpicomp.gpu.device import activated
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Returned, Round, advance, observe
from mpicomp.policies import POLICIES
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.testing import mean_of
from mpicomp.testing.examples import example
from mpicomp.workspace import Workspace

SPARE = 64
"""Bytes by which a message may grow."""
SIZES = 40, 330  # elements of an array
DTYPES = np.dtype(np.float32), np.dtype(np.float64)
_LAYOUTS = [0, 0, 0], [0, 0, 1, 1], [0, 1], [0, 1, 1]  # hosts of ranks
_STEPS = 24  # after which a policy that exchanges surveys now and then has done so
_SHARED_MEMORY = Path("/dev/shm")
_EXTREMES = [0, 1, 2, -1, -2, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 255, 65535, 65536]
_NUMBERS = [float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 3.4e38, 1e-45]


def mutate(rng, pristine, resizes):
    """Return a mutated message; one in sixteen is left as it is, so that what follows is seen to work again."""
    message = bytearray(pristine)
    if rng.randrange(16):
        for _ in range(rng.randint(1, 3)):
            if resizes and (not message or rng.randrange(5) == 0):
                del message[rng.randrange(len(message) + 1) :]
                message += _stretch(rng, rng.randint(0, SPARE) * rng.randrange(2))
            elif message:
                _change(rng, message)
    return message[: len(pristine) + SPARE]


def _change(rng, message):
    """Overwrite a field, of the first 32 bytes, where headers are, as often as of all others."""
    width = rng.choice([1, 2, 4, 8])
    fields = [max(1, (32 if rng.randrange(2) else len(message)) // width) for _ in range(2)]
    place, other = (min(width * rng.randrange(count), len(message) - 1) for count in fields)
    number = int.from_bytes(message[place : place + width], "little")
    data = rng.choice(
        [
            lambda: (number ^ 1 << rng.randrange(8 * width)).to_bytes(width, "little"),
            lambda: (rng.choice(_EXTREMES) % (1 << 8 * width)).to_bytes(width, "little"),
            lambda: ((number + rng.randint(-4, 4)) % (1 << 8 * width)).to_bytes(width, "little"),  # as of counts
            lambda: struct.pack(rng.choice("fd"), rng.choice(_NUMBERS)),
            lambda: bytes(message[other : other + rng.choice([width, 64])]),  # as indices that repeat or descend
            lambda: _stretch(rng, rng.randint(1, 64)),
        ]
    )()[: len(message) - place]
    message[place : place + len(data)] = data


def _stretch(rng, length):
    return rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length)])


@dataclass
class Case:
    """One genuine message.

    Attributes
    ----------
    message : bytes
        As it was sent.
    decode : callable
        Takes an array of uint8 that begins or ends at a page without any right.
    resizes : bool
        Whether a message of another length may reach it; where the receiver gives out the room, none does.
    """

    message: bytes
    decode: Callable[[np.ndarray], None]
    resizes: bool = True


Decoder = Callable[[np.random.Generator, object], Case]
"""Makes a case from random numbers, with arrays of a place."""


def decoders() -> dict[str, Decoder]:
    """Return by name an exchange of each kind of message, form of numbers and shape of rounds, reports and files."""
    wires = []
    for values in VALUES:
        for indices in INDICES:
            with contextlib.suppress(ConfigurationError):
                wires.append((mpicomp.TopK(ratio=0.3, wire=values, indices=indices), "allgather"))
    found = {f"message/{pair[0]}/{pair[1]}": whole_exchange(*pair) for pair in [*wires, *REPRESENTED]}
    for policy in POLICIES.names():
        found[f"telemetry/{policy}"] = partial(_telemetry, policy)
    found["header/agreement"] = _agreement
    found["file/checkpoint"] = _checkpoint
    found["file/cost"] = partial(_file, _write_cost, CostModel.load, "file")
    return found


def exchanges() -> dict[str, Decoder]:
    """Return all others by name: every compressor, plugins too, with every collective that fits, on all they use."""
    known = [example(compressor_class(name)) for name in COMPRESSORS.names()]
    return {
        f"exchange/{compressor}/{name}": whole_exchange(compressor, name)
        for compressor in dict.fromkeys([*known, *OWN, *UNBIASED])
        for name in dict.fromkeys([*fitting(compressor), *(variants(compressor) if compressor in known else ())])
    }


def random_array(rng, numel, dtype):
    return rng.standard_t(3, numel).astype(dtype)


def check_ascending(indices, numel):
    wide = indices.astype(np.int64)
    assert (np.diff(wide) > 0).all(), "indices were taken that do not ascend"
    assert (wide[-1:] < numel).all(), "indices were taken that are out of range"


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


def _recorded(world, runs, rank):
    """Run the exchanges of all ranks; return what one of them receives, round by round."""
    received = []

    def record(task):
        received.append(b"" if task.recv is None else task.recv.tobytes())

    world.run([observe(run, after=record if place == rank else None) for place, run in enumerate(runs)])
    return received


def whole_exchange(compressor, collective):
    def make(rng, fence):
        numel, dtype = int(rng.integers(*SIZES)), rng.choice(DTYPES)
        layout = _LAYOUTS[int(rng.integers(4))]
        scheme = bind(compressor.bind(*_layers(numel)), collective)
        ranks, rank = len(layout), int(rng.integers(len(layout)))
        world = LocalWorld(ranks, hosts=layout)
        memories = [{} for _ in range(ranks)]
        workspaces = [Workspace(fence) for _ in range(ranks)]
        last = int(rng.integers(5))  # by then LGC sends codes, in some cases

        def context(place, step):
            group = world.transports[place].group
            return Context(group, step, memory=memories[place], workspace=workspaces[place])

        with activated(fence), np.errstate(all="ignore"):
            for step in range(last + 1):
                inputs = [_accumulated(fence, random_array(rng, numel, dtype)) for _ in range(ranks)]
                before = copy.deepcopy(memories[rank])
                runs = [scheme.exchange(inputs[place](), context(place, step)) for place in range(ranks)]
                received = _recorded(world, runs, rank)

        def begin():
            again = context(rank, last)
            again.memory = copy.deepcopy(before)
            return scheme.exchange(inputs[rank](), again)

        def check(result):
            mean = mean_of(result, np.empty(numel, dtype))
            assert (mean.shape, mean.dtype) == ((numel,), dtype)
            if isinstance(result.sent, Selection):
                assert result.sent.indices.shape == result.sent.values.shape
                check_ascending(result.sent.indices, numel)
            else:
                assert result.sent.shape == (numel,)
            if result.problem is not None:
                raise result.problem

        return _replayed(fence, received, begin, check)

    return make


def _agreement(rng, fence):
    """What ranks tell each other of their arrays, where they differ: three rounds."""
    arrays = [[ArraySpec(name, "float32", (3, 4)) for name in names] for names in ("ab", "ac")]
    signatures = [Signature({"seed": 1, "policy": "static"}, specs) for specs in arrays]
    rank, world, received = int(rng.integers(2)), LocalWorld(2), []
    groups = [end.group for end in world.transports]

    def begin(place):
        return agree(signatures[place], None, groups[place])

    def ended(place):
        with contextlib.suppress(DisagreementError):
            yield from begin(place)

    received = _recorded(world, [ended(0), ended(1)], rank)
    return _replayed(fence, received, lambda: begin(rank), lambda value: None)


def _telemetry(name, rng, fence):
    """What ranks tell each other of the seconds of a step, and of surveys; then the policy chooses the next plans."""
    world, first = LocalWorld(2), None
    for compressor in (None, "topk", {"id": "powersgd", "rank": 1}):  # what a policy can choose for
        with contextlib.suppress(MpicompError):
            reducers = [mpicomp.Reducer(compressor, policy=name, comm=end) for end in world.transports]
            first = reducers[0]
            for step in range(_STEPS):
                gradients = [random_array(rng, 144, np.float32).reshape(12, 12) for _ in reducers]
                world.run([reducer.rounds({"w": grad}) for reducer, grad in zip(reducers, gradients, strict=True)])
                if step > 2 and first.telemetry.under_way:
                    break
            break
    under_way = list(first.telemetry.under_way)
    message = under_way[0][1].task.recv.tobytes() if under_way else b""

    def decode(message):
        if not under_way:  # it listens to no other rank
            return
        step, pending, _ = under_way[0]
        fill(pending.task, message)
        first.telemetry.under_way.clear()
        first.telemetry.under_way.append(under_way[0])
        with np.errstate(all="ignore"):
            drive(first.telemetry.receive(first.planner, step), lambda asked: asked.task.recv)
            plan = first.planner.plan(0)
        assert plan.scheme.rounds(144, np.dtype(np.float32), world.transports[0].group)

    return Case(message, decode, resizes=False)


def _file(write, read, name, rng, fence):
    shared_memory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    folder = tempfile.TemporaryDirectory(prefix="mpicomp-fuzz-", dir=shared_memory)
    path = Path(folder.name) / name
    write(rng, path)

    def decode(message, folder=folder):  # which lives as long as the case
        path.write_bytes(message.tobytes())
        read(path)

    return Case(path.read_bytes(), decode)


def _checkpoint(rng, fence):
    alone = LocalWorld(1).transports[0]
    model = {"w": random_array(rng, 17, np.float32), "b": random_array(rng, 3, np.float64), 5: (None, [1.5, "text"])}

    def write(rng, path):
        mpicomp.save_checkpoint(path.parent.parent, {"model": model, "step": np.int64(7)}, alone)

    def read(path):
        mpicomp.load_checkpoint(path.parent.parent, alone)

    return _file(write, read, "checkpoint-00000001/rank-00000.safetensors", rng, fence)


def _write_cost(rng, path):
    model = CostModel(Network(2))
    for name in ("topk", "dense"):
        model.kernels[name] = KernelCost(*rng.random(3))
    model.save(path)
