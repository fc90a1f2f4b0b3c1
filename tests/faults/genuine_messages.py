"""Genuine messages of every form, each with what reads it.

A decoder makes cases. A case is a genuine message and what reads it; that takes the message or whatever a mutation has
made of it, and either raises an error of mpicomp or returns after a look at what was decoded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import mpicomp
from mpicomp import kernels
from mpicomp.collectives import dense_message
from mpicomp.collectives.allgather import mean_of_messages
from mpicomp.compressors import Selection
from mpicomp.compressors.wire_format import (
    message_bytes,
    parse_header,
    parse_message,
    write_message,
)
from mpicomp.gpu.device import activated
from mpicomp.workspace import Workspace

SIZES = 8, 300  # elements of an array
NETWORK = 8, 16, 16, 8  # channels of the layers of a learned code, there and back
DTYPES = np.dtype(np.float32), np.dtype(np.float64)
LEARNED = {"encoder": (2,), "decoder": (2,), "passes": 1, "dense_steps": 0, "training_steps": 1, "ratio": 0.3}


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
        message = np.zeros(message_bytes(count, numel, dtype, wire), np.uint8)
        write_message(message, selection, numel, wire, 0, 5.0 * numel, 3.0)
        workspace, expected = Workspace(fence), None if rng.integers(2) else count

        def decode(message):
            with activated(fence):
                header = parse_header(message, numel, dtype, expected)
                read = parse_message(message, numel, dtype, workspace, expected)
                chosen = read.selection
                assert chosen.indices.size == chosen.values.size <= numel
                assert chosen.values.dtype == dtype
                check_ascending(chosen.indices, numel)
                mean, answers = mean_of_messages(message, [header], 0.5, numel, dtype, workspace)
                assert all(answers), "one way to read it finds an error and one does not"
                mean.write(fence.zeros(numel, dtype))

        return Case(message.tobytes(), decode)

    return make


def dense(wire):
    def make(rng, fence):
        numel, dtype = random_numel(rng), rng.choice(DTYPES)
        message = np.zeros(dense_message.dense_bytes(numel, dtype, wire), np.uint8)
        array, out = random_array(rng, numel, dtype), fence.zeros(numel, dtype)
        dense_message.pack(array, wire, message, array.copy())
        dense_message.write_header(message, numel, 0, 1.0, 0.0)

        def decode(message):
            dense_message.read_header(message, numel)
            dense_message.unpack(message, wire, out)
            dense_message.add(message, wire, out)

        return Case(message.tobytes(), decode, resizes=False)

    return make


def packed(compressor):
    def make(rng, fence):
        numel, dtype = random_numel(rng), rng.choice(DTYPES)
        message = np.zeros(dense_message.HEADER_BYTES + compressor.packed_bytes(numel), np.uint8)
        out = fence.zeros(numel, dtype)
        compressor.pack(random_array(rng, numel, dtype), message[dense_message.HEADER_BYTES :], out, 3)
        dense_message.write_header(message, numel, 0, 1.0, 0.0)

        def decode(message):
            dense_message.read_header(message, numel)
            compressor.unpack(message[dense_message.HEADER_BYTES :], out)
            compressor.unpack_add(message[dense_message.HEADER_BYTES :], 0.5, out)

        return Case(message.tobytes(), decode)

    return make


def code_of_indices(rng, fence):
    numel = random_numel(rng)
    count = int(rng.integers(numel + 1))
    code = np.zeros(kernels.index_bytes(count, numel), np.uint8)
    kernels.encode_indices(random_indices(rng, numel, count), numel, code)
    out = fence.zeros(count, np.uint32)

    def decode(message):
        if kernels.decode_indices(message[: message.size // 8 * 8], count, numel, out):
            check_ascending(out, numel)

    return Case(code.tobytes(), decode)


def several_codes(rng, fence):
    numel, several = random_numel(rng), int(rng.integers(1, 4))
    counts = [int(rng.integers(numel + 1)) for _ in range(several)]
    starts = np.cumsum([8, *(kernels.index_bytes(count, numel) + 8 for count in counts)]).tolist()[:several]
    codes = np.zeros(starts[-1] + kernels.index_bytes(counts[-1], numel), np.uint8)
    for start, count in zip(starts, counts, strict=True):
        code = codes[start : start + kernels.index_bytes(count, numel)]
        kernels.encode_indices(random_indices(rng, numel, count), numel, code)
    out = fence.zeros(sum(counts), np.uint32)

    def decode(message):
        if kernels.decode_indices_of(message, starts, counts, numel, out):
            for stop, count in zip(np.cumsum(counts), counts, strict=True):
                check_ascending(out[stop - count : stop], numel)

    return Case(codes.tobytes(), decode)


def learned_code(rng, fence):
    dtype = rng.choice(DTYPES)
    compressor = mpicomp.LGC(**LEARNED | {"encoder": NETWORK, "decoder": NETWORK})
    workspace = Workspace(fence)
    with activated(fence):
        code = compressor.make_code(workspace, 7)
        ranks = int(rng.integers(1, 4))
        count = code.least + int(rng.integers(SIZES[1]))
        length = code.length(count)
        weights = rng.standard_normal(code.size(ranks)).astype(np.float32)
        values = random_array(rng, length, dtype)
    outs = [fence.zeros(count, dtype) for _ in range(2)]
    rooms = [fence.zeros(item.nbytes, np.uint8) for item in (weights, values)]

    def decode(message):
        rooms[0][:], rooms[1][:] = np.split(message, [weights.nbytes])
        with activated(fence), np.errstate(all="ignore"):
            code.use(rooms[0].view(np.float32))
            code.turn(int(rooms[0][0]))
            code_values = rooms[1].view(dtype)
            for worker in range(ranks):
                code.decode(code_values, outs[0], worker)
            code.decode_near(code_values, code_values, *outs)

    return Case(weights.tobytes() + values.tobytes(), decode, resizes=False)
