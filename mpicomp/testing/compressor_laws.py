"""Laws that every compressor has to obey."""

import copy
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import bind, fitting
from mpicomp.compressors import (
    Compressor,
    Context,
    Quantiser,
    Selection,
    SharedSparsifier,
    Sparsifier,
    compressor_class,
    get_compressor,
)
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.compressors.wire import read_sparse, sparse_bytes, write_sparse
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Group
from mpicomp.reducer import Reducer
from mpicomp.testing.examples import (
    DTYPES,
    PRECISION,
    Array,
    accumulated,
    awkward,
    make_reducers,
    mean_of,
    norm2,
    reduce_one,
)
from mpicomp.workspace import Workspace

_SIZES = (1, 2, 7, 1000, 20_011)
_DRAWS = 2000  # exchanges over which random choices are averaged
_BLOCK = 64  # elements over which they are averaged


def laws_of(compressor: Compressor) -> list[Callable[[Any], None]]:
    """Return the laws of a compressor's kind."""
    laws: list[Callable[[Any], None]] = [check_configuration]
    if isinstance(compressor, Sparsifier):
        laws += [check_selection, check_awkward_arrays, check_input_is_left_alone, check_message, check_memory]
    if isinstance(compressor, SharedSparsifier):
        laws += [check_positions]
    if isinstance(compressor, Quantiser):
        laws += [check_packing]
    if compressor.unbiased:
        laws += [check_unbiased]
    return [*laws, check_nothing_is_lost, check_feedback_contracts, check_bad_gradients_are_undone]


def check_configuration(compressor: Compressor) -> None:
    """Check that it is registered, that parameters have defaults, and that JSON keeps its configuration."""
    cls = type(compressor)
    assert compressor_class(compressor.id) is cls, f"'{compressor.id}' is registered for another class"
    assert cls().get_config()["id"] == compressor.id, "every parameter needs a default"
    config = json.loads(json.dumps(compressor.get_config()))
    assert get_compressor(config) == compressor, f"{config} does not give an equal compressor"
    assert compressor.paper, "paper is empty; name the source"
    assert fitting(compressor), f"no collective carries {compressor.message!r} messages"
    assert compressor.wire_bytes_per_element(4) > 0, "bytes on the wire must be positive"
    assert isinstance(compressor.feedback, bool), "feedback must be True or False"
    assert not compressor.feedback or compressor.contractive, (
        "a compressor that does not contract cannot declare feedback"
    )


def check_selection(compressor: Sparsifier) -> None:
    """Check that indices ascend and are in range, values are the array's, and the number is the promised one."""
    for array in _arrays():
        _check_selection(compressor, array, compressor.select(accumulated(array), Context()))
    # Parameters in pieces, with a residual, in 16 bits and with strides: the sum counts.
    rng = np.random.default_rng(1)
    whole, half, strided = rng.normal(size=500).astype("f4"), rng.normal(size=50).astype("f2"), rng.normal(size=(9, 20))
    pieces = [Piece(0, whole), Piece(500, half), Piece(550, strided.astype("f4")[:, ::2])]
    residual = rng.normal(size=640).astype("f4")
    state = Accumulated(np.empty(640 + TRAILER, "f4"), residual, pieces)
    selection = compressor.select(state, Context())
    expected = np.concatenate([whole, half.astype("f4"), strided.astype("f4")[:, ::2].ravel()]) + residual
    _check_selection(compressor, expected, selection)


def check_awkward_arrays(compressor: Sparsifier) -> None:
    """Check that zeros, equal elements, the smallest and largest numbers, NaN and infinity give legal selections."""
    for name, array in awkward().items():
        for dtype in DTYPES:
            context = Context()
            for step in range(4):
                context.step = step
                narrowed = array.astype(dtype)
                _check_selection(compressor, narrowed, compressor.select(accumulated(narrowed), context), name)
                _json(context.memory)


def check_input_is_left_alone(compressor: Sparsifier) -> None:
    """Check that neither the gradient, the residual nor their sum is written to."""
    for array in _arrays():
        gradient, residual = array.copy(), array[::-1].copy()
        state = accumulated(gradient, residual)
        compressor.select(state, Context())
        assert np.array_equal(gradient, array), "select wrote to the gradient"
        assert np.array_equal(residual, array[::-1]), "select wrote to the residual"
        assert np.array_equal(state.array(), array + array[::-1]), "select wrote to the sum"


def check_message(compressor: Sparsifier) -> None:
    """Check that messages are parsed to the values written, and that lost energy is that of the elements left out."""
    for array in _arrays():
        selection = compressor.select(accumulated(array), Context())
        indices = selection.indices.copy()
        chosen = Selection(indices, selection.values.copy())
        wire = compressor.wire_for(indices.size, array.size)
        message = np.zeros(sparse_bytes(indices.size, array.size, array.dtype, wire), np.uint8)
        energy, kept = norm2(array), norm2(selection.values)
        write_sparse(message, chosen, array.size, wire, 0, energy, kept)
        received = read_sparse(message, array.size, array.dtype, Workspace())
        sent = np.zeros(array.size)
        sent[received.selection.indices] = received.selection.values
        assert np.array_equal(received.selection.indices, indices), "indices change on the way"
        assert np.array_equal(received.selection.values, chosen.values), "the sender keeps other values than it sends"
        lost = norm2(array - sent)
        assert abs(received.lost - lost) <= 1e-5 * energy, f"lost energy is {lost}, the message has {received.lost}"


def check_memory(compressor: Sparsifier) -> None:
    """Check that selections follow from array, context and memory alone, and that memory survives a checkpoint."""
    rng = np.random.default_rng(2)
    context = Context(group=Group(1, 2), seed=3)
    for step in range(8):
        array = rng.laplace(size=5000).astype(np.float32) * np.float32(2.0 ** (step % 3))
        context.step = step
        memory = json.loads(_json(context.memory))
        assert memory == context.memory, f"memory changes on its way through JSON: {context.memory}"
        again = Context(group=Group(1, 2), step=step, seed=3, memory=copy.deepcopy(memory))
        first, second = compressor.select(accumulated(array), context), compressor.select(accumulated(array), again)
        assert np.array_equal(first.indices, second.indices), f"step {step} resumed selects other elements"
        assert _json(context.memory) == _json(again.memory), f"step {step} resumed remembers something else"


def check_positions(compressor: SharedSparsifier) -> None:
    """Check that positions are the same on all ranks, ascend, are in range, and change from step to step."""
    for numel in (1, 2, 7, 1000, 20_011):
        count = compressor.count(numel)
        assert 1 <= count <= numel, f"count({numel}) is {count}"
        seen = []
        for step in range(3):
            ranks = []
            for rank in range(3):
                out = np.full(count, 2**32 - 1, np.uint32)
                compressor.positions(numel, Context(group=Group(rank, rank + 1), step=step, seed=5), out)
                ranks.append(out)
            _check_indices(ranks[0], numel)
            assert all(np.array_equal(ranks[0], other) for other in ranks), "positions differ between ranks"
            seen.append(ranks[0])
        if 10 <= count < numel:
            assert not np.array_equal(seen[0], seen[1]), "positions are the same at every step: most are never sent"


def check_packing(compressor: Quantiser) -> None:
    """Check that receivers decode the values that the sender counts as sent; lost energy is the rest, at most all."""
    awkward_arrays = [array.astype(dtype) for array in awkward().values() for dtype in DTYPES]
    for array in _arrays() + awkward_arrays:
        where = f"for an array of {array.size} {array.dtype.name}"
        size = compressor.packed_bytes(array.size)
        assert size % 8 == 0, f"packed_bytes gives {size}, no multiple of 8, {where}"
        first, second = np.zeros(size, np.uint8), np.full(size, 255, np.uint8)
        before, sent, received = array.copy(), np.empty_like(array), np.empty_like(array)
        lost = compressor.pack(array, first, sent, 5)
        compressor.pack(array, second, sent, 5)
        assert array.tobytes() == before.tobytes(), f"pack wrote to the array {where}"
        assert np.array_equal(first, second), f"pack does not write all of the message {where}"
        compressor.unpack(first, received)
        assert np.array_equal(received, sent, equal_nan=True), f"receivers see other values than the sender {where}"
        total = np.ones_like(array)
        compressor.unpack_add(first, 0.5, total)
        added = received.astype(np.float64) / 2
        room = PRECISION[array.dtype] * (1 + np.abs(added))
        with np.errstate(invalid="ignore"):
            same = (np.abs(total - (1 + added)) <= room) | ~np.isfinite(added) & ~np.isfinite(total)
        assert same.all(), f"unpack_add adds something else {where}"
        if np.isfinite(array).all():
            energy, missed = norm2(array), norm2(array - sent)
            close = abs(lost - missed) <= 1e-5 * max(energy, missed)
            assert close, f"lost energy is {missed}, pack returns {lost} {where}"
            if compressor.contractive and not compressor.unbiased:  # random choices may be unlucky
                assert missed <= energy * (1 + 1e-5), f"more is lost than there was {where}"
        else:
            assert not np.isfinite(sent).all(), f"NaN or infinity is lost {where}"


def check_nothing_is_lost(compressor: Compressor) -> None:
    """Check that gradients and residuals before equal the mean times ranks and the residuals after, over all ranks."""
    if compressor.entry.momentum or compressor.entry.clip is not None:
        return
    for collective in fitting(compressor):
        for ranks in (1, 2, 3, 4):
            for dtype in DTYPES:
                reducers, world = make_reducers(compressor, collective, ranks)
                rng = np.random.default_rng([ranks, dtype.itemsize])
                before = np.zeros(1501)
                for step in range(4):
                    gradients = [
                        (10.0 ** (rank - step) * rng.standard_t(3, 1501)).astype(dtype) for rank in range(ranks)
                    ]
                    means = reduce_one(world, reducers, gradients)
                    where = f"{collective}, {ranks} ranks, {dtype.name}, step {step}"
                    assert all(np.array_equal(means[0], mean) for mean in means), f"means differ: {where}"
                    after = sum(reducer.residual("w").ravel().astype(np.float64) for reducer in reducers)
                    entered = before + sum(gradient.astype(np.float64) for gradient in gradients)
                    left = ranks * means[0].astype(np.float64) + after
                    if reducers[0].feedback:
                        scale = max(1e-300, float(np.abs(entered).max()), float(np.abs(before).max()))
                        worst = float(np.abs(entered - left).max()) / scale
                        assert worst < 20 * PRECISION[dtype], f"lost {worst:.3g} of the largest element: {where}"
                    before = np.asarray(after)


def check_unbiased(compressor: Compressor) -> None:
    """Check that the mean of many draws is the input, within four standard errors, in every block of elements."""
    rng = np.random.default_rng(8)
    # Elements that are drawn a few times have no measurable standard error.
    sizes = np.repeat(10.0 ** rng.integers(-1, 2, 1024 // _BLOCK), _BLOCK)
    array = (sizes * rng.standard_t(4, sizes.size)).astype(np.float32)
    exact = array.astype(np.float64)
    weights = np.stack([np.ones_like(exact), np.sign(exact)])
    scheme, world = bind(compressor, fitting(compressor)[0]), LocalWorld(1)
    context = Context(group=world.transports[0].group)
    total, squares = np.zeros((2, 2, exact.size // _BLOCK))
    for context.step in range(_DRAWS):
        [result] = world.run([scheme.exchange(accumulated(array), context)])
        sums = (weights * (mean_of(result, array) - exact)).reshape(2, -1, _BLOCK).sum(axis=2)
        total += sums
        squares += sums**2
    bias = np.abs(total / _DRAWS)
    deviation = np.sqrt(np.maximum(0, squares / _DRAWS - bias**2) / _DRAWS)
    rounding = 1e-6 * np.abs(exact).reshape(-1, _BLOCK).sum(axis=1)
    worst = float(((bias - rounding) / np.maximum(deviation, 1e-30)).max())
    assert worst <= 4, f"the mean of {_DRAWS} draws is off by {worst:.1f} standard errors in a block of {_BLOCK}"


def check_feedback_contracts(compressor: Compressor) -> None:
    """Check that the residual stays bounded: no step, or ten random ones, loses more energy than there was."""
    if not compressor.contractive:
        return
    reducers, world = make_reducers(compressor, fitting(compressor)[0], 2, feedback=True)
    rng = np.random.default_rng(3)
    gains: list[float] = []
    window = 10 if compressor.unbiased else 1
    for step in range(60):
        reduce_one(world, reducers, [rng.normal(size=3000).astype(np.float32) for _ in range(2)])
        record = reducers[0].last_step
        assert record is not None
        gain = record.buckets[0].gain
        assert gain is not None, f"gain is unknown at step {step}"
        gains.append(gain)
        seen = float(np.mean(gains[-window:]))
        if len(gains) >= window:
            assert -1e-6 <= seen <= 1 + 1e-6, f"gain is {seen} at step {step}: more is kept back than there was"


def check_bad_gradients_are_undone(compressor: Compressor) -> None:
    """Check that a step with NaN on one rank delivers zeros and changes no bit of a state."""
    for collective in fitting(compressor):
        reducers, world = make_reducers(compressor, collective, 3, nonfinite="skip")
        rng = np.random.default_rng(4)
        good = [rng.laplace(size=2500).astype(np.float32) for _ in range(3)]
        reduce_one(world, reducers, good)
        states = [_kept(reducer) for reducer in reducers]
        for bad in (np.nan, np.inf):
            spoilt = [array.copy() for array in good]
            spoilt[1][777] = bad
            means = reduce_one(world, reducers, spoilt)
            assert not any(mean.any() for mean in means), f"{collective}: a skipped step must deliver zeros"
            for rank, (before, reducer) in enumerate(zip(states, reducers, strict=True)):
                where = f"{collective}: the state of rank {rank} changed in a step that was skipped"
                np.testing.assert_equal(_kept(reducer), before, err_msg=where)
        assert np.isfinite(reduce_one(world, reducers, good)[0]).all(), f"{collective}: the step after a bad one is bad"


def _kept(reducer: Reducer) -> dict[str, Any]:
    state = reducer.state_dict()
    return copy.deepcopy({name: state[name] for name in ("residuals", "velocities", "memories")})


def _arrays() -> list[Array]:
    rng = np.random.default_rng(6)
    drawn = [rng.laplace(size=size) for size in _SIZES] + [rng.standard_t(2, 3000), rng.normal(size=3000)]
    return [array.astype(dtype) for array in drawn for dtype in DTYPES]


def _check_selection(compressor: Sparsifier, array: Array, selection: Selection, name: str = "random") -> None:
    where = f"for {name} array of {array.size} {array.dtype.name}"
    indices, values = selection.indices, selection.values
    assert indices.dtype == np.uint32, f"indices are {indices.dtype}, not uint32, {where}"
    assert values.dtype == array.dtype, f"values are {values.dtype} {where}"
    assert indices.shape == values.shape, f"{indices.size} indices and {values.size} values {where}"
    _check_indices(indices, array.size)
    assert np.array_equal(values, array[indices], equal_nan=True), f"values are not the array's {where}"
    count = compressor.count(array.size)
    assert count in (None, indices.size), f"count promises {count} elements, {indices.size} are selected {where}"


def _check_indices(indices: NDArray[np.uint32], numel: int) -> None:
    places: Sequence[int] = indices.tolist()
    assert all(0 <= place < numel for place in places), f"an index is not below {numel}"
    assert all(a < b for a, b in itertools.pairwise(places)), "indices must ascend without repetition"


def _json(memory: dict[str, Any]) -> str:
    try:
        return json.dumps(memory, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"memory must hold finite numbers, strings, lists and dicts: {error}") from error
