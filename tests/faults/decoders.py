"""All that reads what others have sent or written, found from the registries: nobody keeps a list.

A decoder makes cases. A case is a genuine message and what reads it; that takes the message or whatever a mutation has
made of it, and either raises an error of mpicomp or returns after a look at what was decoded.
"""

import contextlib
import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from lab_jobs import read_json, read_lines
from mpicomp.bench.replay import Replay

import mpicomp
from mpicomp import kernels
from mpicomp.algorithms.matrix_batches import Matrix
from mpicomp.arrays import ArraySpec
from mpicomp.checkpoint.file import Header, RankFile, encode, write_file
from mpicomp.collectives import Context, bind, dense_message, fitting, variants
from mpicomp.collectives.allgather import SparseMean
from mpicomp.compressors import COMPRESSORS, Quantiser, Selection, compressor_class
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual, Piece
from mpicomp.compressors.wire_format import (
    DAMAGED,
    INDICES,
    VALUES,
    Wire,
    message_bytes,
    parse_header,
    parse_message,
    parse_padded_message,
    write_message,
)
from mpicomp.cost.kernel_costs import KernelCost
from mpicomp.cost.model import CostModel
from mpicomp.cost.network_model import Network
from mpicomp.device.device import activated
from mpicomp.errors import DisagreementError, MpicompError
from mpicomp.policies import POLICIES
from mpicomp.policies.surveys import Spectra, SpectrumSurvey
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.rounds import Round, observe
from mpicomp.rounds.drive import Returned, advance, drive
from mpicomp.systems.lgc.leader_message import LeaderMessage, leader_of, share_selection
from mpicomp.systems.lgreco.layer_surveys import RankSurvey
from mpicomp.testing.examples import example, representatives
from mpicomp.transport import LocalWorld
from mpicomp.workspace import Workspace

SIZES = 8, 300
"""Elements of an array."""
NETWORK = 8, 16, 16, 8
"""Channels of the layers of a learned code, there and back."""
DTYPES = np.dtype(np.float32), np.dtype(np.float64)


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
    arrived: list[np.ndarray] = field(default_factory=list)
    """Where `decode` has put the parts of the last message, if it does not read it in place."""


Decoder = Callable[[np.random.Generator, object], Case]
"""Makes a case from random numbers, with arrays of a place."""


def decoders() -> dict[str, Decoder]:
    """Return every decoder of messages and files by name."""
    found: dict[str, Decoder] = {}
    for values in VALUES:
        for indices in INDICES:
            found[f"sparse/{values or 'full'}-{indices}"] = _sparse(Wire(values, indices))
    for wire in (None, "fp16", "bf16"):
        found[f"dense/{wire or 'full'}"] = _dense(wire)
    for compressor in _compressors():
        if isinstance(compressor, Quantiser):
            found[f"packed/{_name(compressor)}"] = _packed(compressor)
    found["indices/elias-fano"] = _code
    found["indices/elias-fano-several"] = _codes
    for instance in ("ring", "server"):
        found[f"lead/lgc-{instance}"] = _lead(instance)
    for code in ("linear", "autoencoder"):
        found[f"code/{code}"] = _learned(code)
    found["survey/spectrum"] = _spectrum
    found["survey/ranks"] = _ranks
    for policy in POLICIES.names():
        found[f"telemetry/{policy}"] = _telemetry(policy)
    found["header/agreement"] = _agreement
    found["file/checkpoint"] = _checkpoint
    found["file/cost"] = _file(_written_cost, CostModel.load)
    found["file/metrics"] = _file(_written_metrics, _read_metrics)
    return found


def exchanges() -> dict[str, Decoder]:
    """Return whole exchanges as one rank sees them, by name: every compressor with every collective that fits.

    What a collective is built on is varied for the first compressor of each kind of message and form of numbers.
    """
    found: dict[str, Decoder] = {}
    seen = set()
    learned = [mpicomp.LGC(**_LEARNED, instance=instance) for instance in ("ring", "server")]
    plain = [example(compressor_class(name)) for name in COMPRESSORS.names()]
    for compressor in dict.fromkeys([*plain, *representatives(), *learned]):
        known = getattr(compressor, "count", lambda numel: 0)(1000) is not None
        kind = compressor.message, getattr(compressor, "wire", None), known, getattr(compressor, "instance", None)
        names = fitting(compressor) if kind in seen else [*fitting(compressor), *variants(compressor)]
        seen.add(kind)
        for name in dict.fromkeys(names):
            found[f"exchange/{_name(compressor)}/{name}"] = _exchange(compressor, name)
    return found


def _compressors():
    """Return what is registered, as `mpicomp.testing` tries it, and in every form that its parameters name."""
    found = []
    for name in COMPRESSORS.names():
        plain = example(compressor_class(name))
        for change in ({}, *_CHANGES):
            try:
                own = mpicomp.get_compressor(plain.get_config() | change)
            except MpicompError:
                continue  # it has no such parameter
            if own not in found:
                found.append(own)
    return found


_LEARNED = {"code": "linear", "dense_steps": 0, "training_steps": 1, "ratio": 0.3}
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
    _LEARNED,
    {**_LEARNED, "instance": "server"},
]


def _name(compressor):
    config = compressor.get_config()
    defaults = example(type(compressor)).get_config()
    changed = [f"{key}={json.dumps(own)}" for key, own in config.items() if own != defaults[key]]
    return "-".join([compressor.id, *changed]).replace('"', "").replace(" ", "")


def _numel(rng):
    low, high = SIZES
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def _array(rng, numel, dtype):
    return rng.standard_t(3, numel).astype(dtype)


def _indices(rng, numel, count):
    return np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)


def _ascend(indices, numel):
    wide = indices.astype(np.int64)
    assert (np.diff(wide) > 0).all(), "indices were taken that do not ascend"
    assert (wide[-1:] < numel).all(), "indices were taken that are out of range"


# Messages.


def _sparse(wire):
    def make(rng, fence):
        numel, dtype = _numel(rng), rng.choice(DTYPES)
        count = int(rng.integers(numel + 1))
        selection = Selection(_indices(rng, numel, count), _array(rng, count, dtype))
        message = np.zeros(message_bytes(count, numel, dtype, wire), np.uint8)
        write_message(message, selection, numel, wire, 0, 5.0 * numel, 3.0)
        workspace, expected = Workspace(fence), None if rng.integers(2) else count

        def decode(message):
            with activated(fence):
                told = parse_header(message, numel, dtype, expected)
                read = parse_message(message, numel, dtype, workspace, expected)
                chosen = read.selection
                assert chosen.indices.size == chosen.values.size <= numel
                assert chosen.values.dtype == dtype
                _ascend(chosen.indices, numel)
                mean = SparseMean.cleared(workspace, numel, dtype)
                if not told.flags & DAMAGED:
                    assert mean.add_messages(message, [told], 0.5), "one way to read it finds an error and one does not"
                parse_padded_message(message, numel, dtype, workspace)

        return Case(message.tobytes(), decode)

    return make


def _dense(wire):
    def make(rng, fence):
        numel, dtype = _numel(rng), rng.choice(DTYPES)
        message = np.zeros(dense_message.dense_bytes(numel, dtype, wire), np.uint8)
        array, out = _array(rng, numel, dtype), fence.zeros(numel, dtype)
        dense_message.pack(array, wire, message, array.copy())
        dense_message.write_header(message, numel, 0, 1.0, 0.0)

        def decode(message):
            dense_message.read_header(message, numel)
            dense_message.unpack(message, wire, out)
            dense_message.add(message, wire, out)

        return Case(message.tobytes(), decode, resizes=False)

    return make


def _packed(compressor):
    def make(rng, fence):
        numel, dtype = _numel(rng), rng.choice(DTYPES)
        message = np.zeros(dense_message.HEADER_BYTES + compressor.packed_bytes(numel), np.uint8)
        out = fence.zeros(numel, dtype)
        compressor.pack(_array(rng, numel, dtype), message[dense_message.HEADER_BYTES :], out, 3)
        dense_message.write_header(message, numel, 0, 1.0, 0.0)

        def decode(message):
            dense_message.read_header(message, numel)
            compressor.unpack(message[dense_message.HEADER_BYTES :], out)
            compressor.unpack_add(message[dense_message.HEADER_BYTES :], 0.5, out)

        return Case(message.tobytes(), decode)

    return make


def _code(rng, fence):
    numel = _numel(rng)
    count = int(rng.integers(numel + 1))
    code = np.zeros(kernels.index_bytes(count, numel), np.uint8)
    kernels.encode_indices(_indices(rng, numel, count), numel, code)
    out = fence.zeros(count, np.uint32)

    def decode(message):
        if kernels.decode_indices(message[: message.size // 8 * 8], count, numel, out):
            _ascend(out, numel)

    return Case(code.tobytes(), decode)


def _codes(rng, fence):
    numel, several = _numel(rng), int(rng.integers(1, 4))
    counts = [int(rng.integers(numel + 1)) for _ in range(several)]
    starts = np.cumsum([8, *(kernels.index_bytes(count, numel) + 8 for count in counts)]).tolist()[:several]
    codes = np.zeros(starts[-1] + kernels.index_bytes(counts[-1], numel), np.uint8)
    for start, count in zip(starts, counts, strict=True):
        own = codes[start : start + kernels.index_bytes(count, numel)]
        kernels.encode_indices(_indices(rng, numel, count), numel, own)
    out = fence.zeros(sum(counts), np.uint32)

    def decode(message):
        if kernels.decode_indices_of(message, starts, counts, numel, out):
            for stop, count in zip(np.cumsum(counts), counts, strict=True):
                _ascend(out[stop - count : stop], numel)

    return Case(codes.tobytes(), decode)


# Learned codes.


def _lead(instance):
    def make(rng, fence):
        numel, dtype = _numel(rng) + 64, rng.choice(DTYPES)
        compressor = mpicomp.LGC(**_LEARNED, instance=instance)
        names, sizes, shapes = _layers(numel)
        compressor = compressor.bind(names, sizes, shapes)
        selected = compressor.selected(numel)
        frame, signs = bool(rng.integers(2)), bool(rng.integers(2))
        lead = LeaderMessage(selected, numel, frame=frame, signs=frame and signs)
        ends = LocalWorld(2).transports
        contexts = [Context(end.group, step=int(rng.integers(99)), workspace=Workspace(fence)) for end in ends]
        contexts[1].step = contexts[0].step
        first = leader_of(contexts[0])
        arrays = [_accumulated(fence, _array(rng, numel, dtype)) for _ in ends]
        with activated(fence):
            task = advance(share_selection(lead, arrays[first](), contexts[first]))
        message, arrived = task.send.tobytes(), []

        def decode(message):
            with activated(fence):
                exchange = share_selection(lead, arrays[1 - first](), contexts[1 - first])
                asked = advance(exchange)
                arrived[:] = [asked.recv]
                _fill(asked, message)
                led = advance(exchange, asked.recv).value
            assert led.values.size == led.indices.size == selected.count
            _ascend(led.indices, numel)
            if led.problem is not None:
                raise led.problem

        return Case(message, decode, arrived=arrived)

    return make


def _learned(kind):
    def make(rng, fence):
        dtype = rng.choice(DTYPES)
        compressor = mpicomp.LGC(**_LEARNED | {"code": kind, "encoder": NETWORK, "decoder": NETWORK})
        workspace = Workspace(fence)
        with activated(fence):
            code = compressor.make_code(workspace, 7)
            ranks = int(rng.integers(1, 4))
            count = code.least + int(rng.integers(SIZES[1]))
            length = code.length(count)
            weights = rng.standard_normal(code.size(ranks)).astype(np.float32)
            values = _array(rng, length, dtype)
        outs = [fence.zeros(count, dtype) for _ in range(2)]
        rooms = [fence.zeros(own.nbytes, np.uint8) for own in (weights, values)]

        def decode(message):
            rooms[0][:], rooms[1][:] = np.split(message, [weights.nbytes])
            with activated(fence), np.errstate(all="ignore"):
                code.use(rooms[0].view(np.float32))
                code.turn(int(rooms[0][0]))
                own = rooms[1].view(dtype)
                for worker in range(ranks):
                    code.decode(own, outs[0], worker)
                code.decode_near(own, own, *outs)

        return Case(weights.tobytes() + values.tobytes(), decode, resizes=False, arrived=rooms)

    return make


# What policies and agreements are told.


def _spectrum(rng, fence):
    sizes = [_numel(rng) for _ in range(3)]
    ranks = int(rng.integers(1, 4))
    survey = SpectrumSurvey()
    told = np.concatenate([survey.measure(_array(rng, sum(sizes), np.float32), None, sizes, 0) for _ in range(ranks)])

    def decode(message):
        with np.errstate(all="ignore"):
            spectra = Spectra(sizes, message.view(np.float32).reshape(ranks, -1))
            assert spectra.energies.shape == (3,)
            assert spectra.lost(np.array([0.01, 0.5])).shape == (3, 2)
            assert spectra.lost_together(np.array([0.01, 0.5])).shape == (2,)

    return Case(told.tobytes(), decode, resizes=False)


def _ranks(rng, fence):
    rows, columns = (int(side) for side in rng.integers(4, 12, 2))
    matrices, sizes = [Matrix(0, rows, columns, 2)], [rows * columns, 7]
    survey = RankSurvey(matrices, [(1, 3)])
    told = survey.measure(_array(rng, sum(sizes), np.float32), None, sizes, 0)

    def decode(message):
        [lost] = survey.lost(message.view(np.float32).reshape(1, -1), sizes)
        assert lost.shape == (3,)

    return Case(told.tobytes(), decode, resizes=False)


def _telemetry(name):
    """What ranks tell each other of the seconds of a step, and of surveys; then the policy chooses the next plans."""

    def make(rng, fence):
        world, first = LocalWorld(2), None
        for compressor in (None, "topk", {"id": "powersgd", "rank": 1}):  # what a policy can choose for
            with contextlib.suppress(MpicompError):
                reducers = [mpicomp.Reducer(compressor, policy=name, comm=end) for end in world.transports]
                first = reducers[0]
                for step in range(_STEPS):
                    gradients = [_array(rng, 144, np.float32).reshape(12, 12) for _ in reducers]
                    world.run([own.rounds({"w": grad}) for own, grad in zip(reducers, gradients, strict=True)])
                    if step > 2 and first.telemetry.under_way is not None:
                        break
                break
        pending, report = first.telemetry.under_way, first.telemetry._report
        message = b"" if pending is None else pending.task.recv.tobytes()

        def decode(message):
            if pending is None:  # it listens to nobody
                return
            _fill(pending.task, message)
            first.telemetry.under_way, first.telemetry._report = pending, report
            with np.errstate(all="ignore"):
                drive(first.telemetry.receive(first.planner), lambda asked: asked.task.recv)
                plan = first.planner.plan(0)
            assert plan.scheme.rounds(144, np.dtype(np.float32), world.transports[0].group)

        return Case(message, decode, resizes=False)

    return make


_STEPS = 24  # after which a policy that exchanges surveys now and then has done so


def _agreement(rng, fence):
    """What ranks tell each other of their arrays, where they differ: three rounds."""
    own = [
        Signature({"seed": 1, "policy": "static"}, [ArraySpec(name, "float32", (3, 4)) for name in names])
        for names in (("a", "b"), ("a", "c"))
    ]
    rank, heard = int(rng.integers(2)), []
    world = LocalWorld(2)
    groups = [end.group for end in world.transports]

    def hear(task):
        heard.append(task.recv.tobytes())

    with contextlib.suppress(DisagreementError):
        world.run(
            [
                observe(agree(mine, None, group), after=hear if place == rank else None)
                for place, (mine, group) in enumerate(zip(own, groups, strict=True))
            ]
        )
    return _heard(fence, heard, lambda: agree(own[rank], None, groups[rank]), lambda value: None)


# Files.


def _checkpoint(rng, fence):
    state = {
        "epoch": int(rng.integers(99)),
        "model": {"w": _array(rng, 17, np.float32), "b": _array(rng, 3, np.float64), 5: (None, True, [1.5, "text"])},
        "step": np.int64(7),
    }
    tree, arrays = encode(state)

    def write(path):
        write_file(path, Header(1, 77, 1, 0), tree, arrays)

    def read(path):
        file = RankFile(path).check(Header(1, 77, 1, 0))
        assert file.tree(file.read)["epoch"] == state["epoch"], "something else was read than was written"

    return _file(lambda rng, path: write(path), read)(rng, fence)


def _written_cost(rng, path):
    model = CostModel(Network(2))
    for name in ("topk", "dense"):
        model.kernels[name] = KernelCost(*rng.random(3))
    model.save(path)


def _written_metrics(rng, path):
    world = LocalWorld(2)
    reducers = [mpicomp.Reducer(mpicomp.TopK(ratio=0.1), comm=end) for end in world.transports]
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(2):
            world.run([reducer.rounds({"w": _array(rng, 60, np.float32)}) for reducer in reducers])
            file.write(json.dumps(reducers[0].last_step.to_json()) + "\n")


def _read_metrics(path):
    lines, whole = read_lines(path), read_json(path)
    assert all(isinstance(line, dict) for line in lines)
    assert isinstance(whole, dict)
    Replay(path=str(path)).get_config()


def _file(write, read):
    def make(rng, fence):
        folder = tempfile.TemporaryDirectory(prefix="mpicomp-fuzz-", dir=_shared_memory())
        path = Path(folder.name) / "rank-00000.safetensors"
        write(rng, path)
        message = path.read_bytes()

        def decode(message, folder=folder):
            path.write_bytes(message.tobytes())
            read(path)

        return Case(message, decode)

    return make


def _shared_memory():
    place = Path("/dev/shm")
    return place if place.is_dir() else None


# Whole exchanges.


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
    """Return a maker of the same input: it is made anew for each exchange."""

    def make():
        return GradientWithResidual(fence.empty(array.size + TRAILER, array.dtype), None, [Piece(0, array)])

    return make


def _fill(task, message):
    """Put the bytes of a message where a round receives; what is missing is zero."""
    if task.recv is None:
        return 0
    room = task.recv.reshape(-1).view(np.uint8)
    size = min(room.size, message.size)
    room[:size] = message[:size]
    room[size:] = 0
    return size


def _heard(fence, heard, begin, check):
    """Return the case of a rank that goes through rounds in which it hears these messages, one after the other."""
    lengths, arrived = [len(own) for own in heard], []

    def decode(message):
        with activated(fence), np.errstate(all="ignore"):
            exchange, reply, place, start = begin(), None, 0, 0
            arrived.clear()
            while not isinstance(asked := advance(exchange, reply), Returned):
                assert place < len(lengths) + 8, "an exchange without an end"
                if not isinstance(asked, Round) or asked.background:
                    raise AssertionError("a round in the background, of which nothing is known here")
                stop = start + (lengths[place] if place < len(lengths) else 64)
                _fill(asked, message[start:stop])
                if asked.recv is not None:
                    arrived.append(asked.recv)
                    if asked.arrived is not None and asked.recv.size:
                        asked.arrived(0, asked.recv.size)
                reply = np.empty(0, asked.dtype) if asked.recv is None else asked.recv
                start, place = stop, place + 1
            check(asked.value)

    return Case(b"".join(heard), decode, arrived=arrived)


def _exchange(compressor, collective):
    def make(rng, fence):
        numel, dtype = _numel(rng) + 32, rng.choice(DTYPES)
        layout = [[0, 0, 0], [0, 0, 1, 1], [0, 1], [0, 1, 1]][int(rng.integers(4))]
        own = compressor.bind(*_layers(numel))
        scheme = bind(own, collective)
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
                inputs = [_accumulated(fence, _array(rng, numel, dtype)) for _ in range(ranks)]
                before, heard = copy.deepcopy(memories[rank]), []

                def hear(task, heard=heard):
                    heard.append(b"" if task.recv is None else task.recv.tobytes())

                world.run(
                    [
                        observe(
                            scheme.exchange(inputs[place](), context(place, step)),
                            after=hear if place == rank else None,
                        )
                        for place in range(ranks)
                    ]
                )

        def begin():
            again = context(rank, last)
            again.memory = copy.deepcopy(before)
            return scheme.exchange(inputs[rank](), again)

        def check(result):
            assert result.mean.shape == (numel,)
            assert result.mean.dtype == dtype
            if isinstance(result.sent, Selection):
                assert result.sent.indices.shape == result.sent.values.shape
                _ascend(result.sent.indices, numel)
            else:
                assert result.sent.shape == (numel,)
            if result.problem is not None:
                raise result.problem

        return _heard(fence, heard, begin, check)

    return make
