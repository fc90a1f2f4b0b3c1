"""Genuine messages and files of every form, found from the registries, what reads each, and what damages them.

A decoder makes cases. A case is a genuine message and what reads it; that takes the message or whatever a mutation has
made of it, and either raises an error of mpicomp or returns after a look at what was decoded.
"""

import contextlib
import copy
import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lockstep import drive

import mpicomp
from mpicomp import kernels
from mpicomp.arrays import ArraySpec
from mpicomp.collectives import Context, bind, fitting, variants
from mpicomp.collectives.allgather import mean_of_messages
from mpicomp.compressors import COMPRESSORS, Quantiser, Selection, compressor_class
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.compressors.wire import (
    HEADER_BYTES,
    INDICES,
    VALUES,
    Wire,
    add_dense,
    dense_bytes,
    read_dense,
    read_dense_header,
    read_sparse,
    read_sparse_header,
    sparse_bytes,
    write_dense,
    write_dense_header,
    write_sparse,
)
from mpicomp.cost.kernel_costs import KernelCost
from mpicomp.cost.model import CostModel
from mpicomp.cost.network_model import Network
from mpicomp.errors import DisagreementError, MpicompError
from mpicomp.gpu.device import activated
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Returned, Round, advance, observe
from mpicomp.policies import POLICIES
from mpicomp.policies.surveys import Spectra, SpectrumSurvey
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.systems.lgc.leader_message import Frame, LeaderMessage, leader_of, share_selection
from mpicomp.testing import mean_of
from mpicomp.testing.examples import example, representatives
from mpicomp.workspace import Workspace

SPARE = 64
"""Bytes by which a message may grow."""
SIZES = 8, 300  # elements of an array
DTYPES = np.dtype(np.float32), np.dtype(np.float64)
LEARNED = {"encoder": (2,), "decoder": (2,), "passes": 1, "dense_steps": 0, "training_steps": 1, "ratio": 0.3}
_NETWORK = 8, 16, 16, 8  # channels of the layers of a learned code
_STEPS = 24  # after which a policy that exchanges surveys now and then has done so
_SHARED_MEMORY = "/dev/shm"
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
        Takes an array of uint8 that begins or ends at a page which nobody may touch.
    resizes : bool
        Whether a message of another length may reach it; where the receiver gives out the room, none does.
    """

    message: bytes
    decode: Callable[[np.ndarray], None]
    resizes: bool = True


Decoder = Callable[[np.random.Generator, object], Case]
"""Makes a case from random numbers, with arrays of a place."""


def decoders() -> dict[str, Decoder]:
    """Return every decoder of messages and files by name."""
    found: dict[str, Decoder] = {}
    for values in VALUES:
        for indices in INDICES:
            found[f"sparse/{values or 'full'}-{indices}"] = sparse(Wire(values, indices))
    for wire in (None, "fp16", "bf16"):
        found[f"dense/{wire or 'full'}"] = dense(wire)
    for compressor in _compressors():
        if isinstance(compressor, Quantiser):
            found[f"packed/{_name(compressor)}"] = packed(compressor)
    found["indices/elias-fano"] = codes_of_indices
    for instance in ("ring", "server"):
        found[f"lead/lgc-{instance}"] = _leader_message(instance)
    found["code/autoencoder"] = _learned_code
    found["survey/spectrum"] = _spectrum
    for policy in POLICIES.names():
        found[f"telemetry/{policy}"] = _telemetry(policy)
    found["header/agreement"] = agreement
    found["file/checkpoint"] = _checkpoint
    found["file/cost"] = _file(_written_cost, CostModel.load)
    return found


def exchanges() -> dict[str, Decoder]:
    """Return whole exchanges as one rank sees them, by name: every compressor with every collective that fits.

    What a collective is built on is varied for the first compressor of each kind of message and form of numbers.
    """
    found: dict[str, Decoder] = {}
    seen = set()
    learned = [mpicomp.LGC(**LEARNED, instance=instance) for instance in ("ring", "server")]
    plain = [example(compressor_class(name)) for name in COMPRESSORS.names()]
    for compressor in dict.fromkeys([*plain, *representatives(), *learned]):
        known = getattr(compressor, "count", lambda numel: 0)(1000) is not None
        kind = (
            compressor.message,
            *fitting(compressor),
            getattr(compressor, "wire", None),
            known,
            getattr(compressor, "instance", None),
        )
        names = fitting(compressor) if kind in seen else [*fitting(compressor), *variants(compressor)]
        seen.add(kind)
        for name in dict.fromkeys(names):
            found[f"exchange/{_name(compressor)}/{name}"] = whole_exchange(compressor, name)
    return found


def _compressors():
    """Return what is registered, as `mpicomp.testing` tries it, and in every form that its parameters name."""
    found = []
    for name in COMPRESSORS.names():
        plain = example(compressor_class(name))
        for change in ({}, *_CHANGES):
            try:
                changed = mpicomp.get_compressor(plain.get_config() | change)
            except MpicompError:
                continue  # it has no such parameter
            if changed not in found:
                found.append(changed)
    return found


_CHANGES = [
    {"wire": None},
    {"wire": "fp16"},
    {"wire": "q4"},
    {"ratio": 0.4, "indices": "elias-fano"},
    {"bits": 2},
    {"bits": 8},
    {"bits": [3, 5, 12]},
    {"block": 64},
    {"bucket": 64},
    {"rounding": "nearest"},
    LEARNED,
    {**LEARNED, "instance": "server"},
]


def _name(compressor):
    config = compressor.get_config()
    defaults = example(type(compressor)).get_config()
    changed = [f"{key}={json.dumps(item)}" for key, item in config.items() if item != defaults[key]]
    return "-".join([compressor.id, *changed]).replace('"', "").replace(" ", "")


def random_numel(rng):
    low, high = SIZES
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def random_array(rng, numel, dtype):
    return rng.standard_t(3, numel).astype(dtype)


def random_indices(rng, numel, count):
    return np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)


def check_ascending(indices, numel):
    wide = indices.astype(np.int64)
    assert (np.diff(wide) > 0).all(), "indices were taken that do not ascend"
    assert (wide[-1:] < numel).all(), "indices were taken that are out of range"


def sparse(wire):
    def make(rng, fence):
        numel, dtype = random_numel(rng), rng.choice(DTYPES)
        count = int(rng.integers(numel + 1))
        selection = Selection(random_indices(rng, numel, count), random_array(rng, count, dtype))
        message = np.zeros(sparse_bytes(count, numel, dtype, wire), np.uint8)
        write_sparse(message, selection, numel, wire, 0, 5.0 * numel, 3.0)
        workspace, expected = Workspace(fence), None if rng.integers(2) else count

        def decode(message):
            with activated(fence):
                header = read_sparse_header(message, numel, dtype, expected)
                read = read_sparse(message, numel, dtype, workspace, expected)
                chosen = read.selection
                assert chosen.indices.size == chosen.values.size <= numel
                assert chosen.values.dtype == dtype
                check_ascending(chosen.indices, numel)
                write, answers = mean_of_messages(message, [header], 0.5, numel, dtype, workspace)
                assert all(answers), "one way to read it finds an error and one does not"
                write(fence.zeros(numel, dtype))

        return Case(message.tobytes(), decode)

    return make


def dense(wire):
    def make(rng, fence):
        numel, dtype = random_numel(rng), rng.choice(DTYPES)
        message = np.zeros(dense_bytes(numel, dtype, wire), np.uint8)
        array, out = random_array(rng, numel, dtype), fence.zeros(numel, dtype)
        write_dense(array, wire, message, array.copy())
        write_dense_header(message, numel, 0, 1.0, 0.0)

        def decode(message):
            read_dense_header(message, numel)
            read_dense(message, wire, out)
            add_dense(message, wire, out)

        return Case(message.tobytes(), decode, resizes=False)

    return make


def packed(compressor):
    def make(rng, fence):
        numel, dtype = random_numel(rng), rng.choice(DTYPES)
        message = np.zeros(HEADER_BYTES + compressor.packed_bytes(numel), np.uint8)
        out = fence.zeros(numel, dtype)
        compressor.pack(random_array(rng, numel, dtype), message[HEADER_BYTES:], out, 3)
        write_dense_header(message, numel, 0, 1.0, 0.0)

        def decode(message):
            read_dense_header(message, numel)
            compressor.unpack(message[HEADER_BYTES:], out)
            compressor.unpack_add(message[HEADER_BYTES:], 0.5, out)

        return Case(message.tobytes(), decode)

    return make


def codes_of_indices(rng, fence):
    numel, several = random_numel(rng), int(rng.integers(1, 4))
    counts = [int(rng.integers(numel + 1)) for _ in range(several)]
    starts = np.cumsum([8, *(kernels.index_bytes(count, numel) + 8 for count in counts)]).tolist()[:several]
    codes = np.zeros(starts[-1] + kernels.index_bytes(counts[-1], numel), np.uint8)
    for start, count in zip(starts, counts, strict=True):
        code = codes[start : start + kernels.index_bytes(count, numel)]
        kernels.encode_indices(random_indices(rng, numel, count), numel, code)
    out, first = fence.zeros(sum(counts), np.uint32), fence.zeros(counts[0], np.uint32)

    def decode(message):
        if kernels.decode_indices_of(message, starts, counts, numel, out):
            for stop, count in zip(np.cumsum(counts), counts, strict=True):
                check_ascending(out[stop - count : stop], numel)
        if kernels.decode_indices(message[8 : message.size // 8 * 8], counts[0], numel, first):
            check_ascending(first, numel)

    return Case(codes.tobytes(), decode)


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
            mean = mean_of(result, np.empty(numel, dtype))
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


def _leader_message(instance):
    """What the leading rank of LGC sends: indices, and the scales and signs of coded values."""

    def make(rng, fence):
        numel, dtype = random_numel(rng) + 64, rng.choice(DTYPES)
        compressor = mpicomp.LGC(**LEARNED, instance=instance).bind(*_layers(numel))
        selected = compressor.selected(numel)
        frame = Frame(selected, signs=bool(rng.integers(2))) if rng.integers(2) else None
        lead = LeaderMessage(selected, numel, frame)
        ends, step = LocalWorld(2).transports, int(rng.integers(99))
        contexts = [Context(end.group, step, workspace=Workspace(fence)) for end in ends]
        leader = leader_of(contexts[0])
        other = 1 - leader
        inputs = [_accumulated(fence, random_array(rng, numel, dtype)) for _ in ends]
        with activated(fence):
            message = advance(share_selection(lead, inputs[leader](), contexts[leader])).send.tobytes()

        def check(received):
            assert received.values.size == received.indices.size == selected.count
            check_ascending(received.indices, numel)
            if received.problem is not None:
                raise received.problem

        return _replayed(fence, [message], lambda: share_selection(lead, inputs[other](), contexts[other]), check)

    return make


def _learned_code(rng, fence):
    """Weights of LGC's autoencoder, and values in its code."""
    dtype, ranks = rng.choice(DTYPES), int(rng.integers(1, 4))
    compressor = mpicomp.LGC(**LEARNED | {"encoder": _NETWORK, "decoder": _NETWORK})
    with activated(fence):
        code = compressor.make_code(Workspace(fence), 7)
    count = code.least + int(rng.integers(SIZES[1]))
    weights = rng.standard_normal(code.size(ranks)).astype(np.float32)
    values = random_array(rng, code.length(count), dtype)
    outs = [fence.zeros(count, dtype) for _ in range(2)]
    rooms = [fence.zeros(array.nbytes, np.uint8) for array in (weights, values)]

    def decode(message):
        rooms[0][:], rooms[1][:] = np.split(message, [weights.nbytes])
        with activated(fence), np.errstate(all="ignore"):
            code.use(rooms[0].view(np.float32))
            code.begin_step(int(rooms[0][0]))
            coded = rooms[1].view(dtype)
            for worker in range(ranks):
                code.decode(coded, outs[0], worker)
            code.decode_near(coded, coded, *outs)

    return Case(weights.tobytes() + values.tobytes(), decode, resizes=False)


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


def _spectrum(rng, fence):
    sizes = [random_numel(rng) for _ in range(3)]
    ranks = int(rng.integers(1, 4))
    survey = SpectrumSurvey()
    sent = np.concatenate(
        [survey.measure(random_array(rng, sum(sizes), np.float32), None, sizes, 0) for _ in range(ranks)]
    )

    def decode(message):
        with np.errstate(all="ignore"):
            spectra = Spectra(sizes, message.view(np.float32).reshape(ranks, -1))
            assert spectra.energies.shape == (3,)
            assert spectra.lost(np.array([0.01, 0.5])).shape == (3, 2)
            assert spectra.lost_together(np.array([0.01, 0.5])).shape == (2,)

    return Case(sent.tobytes(), decode, resizes=False)


def _telemetry(name):
    """What ranks tell each other of the seconds of a step, and of surveys; then the policy chooses the next plans."""

    def make(rng, fence):
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
            if not under_way:  # it listens to nobody
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

    return make


def _checkpoint(rng, fence):
    state = {
        "epoch": int(rng.integers(99)),
        "model": {
            "w": random_array(rng, 17, np.float32),
            "b": random_array(rng, 3, np.float64),
            5: (None, True, [1.5, "text"]),
        },
        "step": np.int64(7),
    }
    alone = LocalWorld(1).transports[0]

    def write(rng, path):
        mpicomp.save_checkpoint(path.parent.parent, state, alone)

    def read(path):
        mpicomp.load_checkpoint(path.parent.parent, alone)

    return _file(write, read, "checkpoint-00000001/rank-00000.safetensors")(rng, fence)


def _written_cost(rng, path):
    model = CostModel(Network(2))
    for name in ("topk", "dense"):
        model.kernels[name] = KernelCost(*rng.random(3))
    model.save(path)


def _file(write, read, name="file"):
    def make(rng, fence):
        folder = tempfile.TemporaryDirectory(
            prefix="mpicomp-fuzz-", dir=_SHARED_MEMORY if Path(_SHARED_MEMORY).is_dir() else None
        )
        path = Path(folder.name) / name
        write(rng, path)
        message = path.read_bytes()

        def decode(message, folder=folder):
            path.write_bytes(message.tobytes())
            read(path)

        return Case(message, decode)

    return make
