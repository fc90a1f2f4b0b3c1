"""Layers of a small convolutional network: the same bits on every processor.

The layers of torch do not promise the same bits. A layer has a bias and a leaky rectifier. Places are the last
dimension; beyond both ends there are zeros. A loop runs over places, each with its sum, so that it vectorises although
no sum changes its order.
"""

from mpicomp.kernels.cpu.compile import Floats, Singles, exact

_TILE = 512  # places at a time, whose values of all channels stay in the cache


def conv_room(inputs: int) -> int:
    """Return the elements of scratch for a layer with ``inputs`` channels."""
    return 2 * (inputs + 1) * (_TILE + 1)


def conv_halve(
    values: Floats, weights: Singles, bias: Singles, slope: float, gate: Floats, scratch: Floats, out: Floats
) -> None:
    """Convolve with three taps at every second place.

    Shapes are (inputs, 2 * places) for ``values``, (outputs, inputs, 3) for ``weights`` and (outputs, places) for
    ``out`` and ``gate``. Output ``t`` sees inputs ``2 t - 1``, ``2 t`` and ``2 t + 1``. Sums are multiplied by
    ``slope`` where ``gate`` is negative; if ``gate`` is ``out``, where the sum is. ``scratch`` has `conv_room`
    elements.
    """
    _halve(values, weights, bias, out.dtype.type(slope), gate, gate is not out, scratch, out)


def conv_double(
    values: Floats, weights: Singles, bias: Singles, slope: float, gate: Floats, scratch: Floats, out: Floats
) -> None:
    """Convolve with three taps to twice as many places: the transpose of `conv_halve`.

    Shapes are (inputs, places) for ``values``, (inputs, outputs, 3) for ``weights`` and (outputs, 2 * places) for
    ``out`` and ``gate``. Input ``t`` counts for outputs ``2 t - 1``, ``2 t`` and ``2 t + 1``.
    """
    _double(values, weights, bias, out.dtype.type(slope), gate, gate is not out, scratch, out)


@exact
def _halve(values, weights, bias, slope, gate, gated, scratch, out):  # type: ignore[no-untyped-def]
    number = out.dtype.type
    inputs, places = values.shape[0], out.shape[1]
    # Every second place separated from the others, so that the loop over them reads one after the other.
    width = _TILE + 1
    even = scratch[: inputs * width].reshape(inputs, width)
    odd = scratch[inputs * width : 2 * inputs * width].reshape(inputs, width)  # the first is the one before the tile
    for start in range(0, places, _TILE):
        size = min(_TILE, places - start)
        for c in range(inputs):
            odd[c, 0] = values[c, 2 * start - 1] if start > 0 else number(0)
            row = values[c, 2 * start :]
            for t in range(size):
                even[c, t] = row[2 * t]
                odd[c, t + 1] = row[2 * t + 1]
        for o in range(out.shape[0]):
            sums = out[o, start : start + size]
            sums[:] = number(bias[o])
            for c in range(inputs):
                first, second, third = number(weights[o, c, 0]), number(weights[o, c, 1]), number(weights[o, c, 2])
                before, here, after = odd[c], even[c], odd[c, 1:]
                for t in range(size):
                    sums[t] = sums[t] + first * before[t] + second * here[t] + third * after[t]
            _leak(sums, slope, gate[o, start : start + size], gated)


@exact
def _double(values, weights, bias, slope, gate, gated, scratch, out):  # type: ignore[no-untyped-def]
    number = out.dtype.type
    inputs, places = values.shape
    width = _TILE + 1
    window = scratch[: inputs * width].reshape(inputs, width)  # the last is the one after the tile
    even = scratch[inputs * width : (inputs + 1) * width]
    odd = scratch[(inputs + 1) * width : (inputs + 2) * width]
    for start in range(0, places, _TILE):
        size = min(_TILE, places - start)
        for c in range(inputs):
            window[c, :size] = values[c, start : start + size]
            window[c, size] = values[c, start + size] if start + size < places else number(0)
        for o in range(out.shape[0]):
            even[:] = number(bias[o])
            odd[:] = number(bias[o])
            for c in range(inputs):
                first, second, third = number(weights[c, o, 0]), number(weights[c, o, 1]), number(weights[c, o, 2])
                here, after = window[c], window[c, 1:]
                for t in range(size):
                    even[t] = even[t] + second * here[t]
                for t in range(size):
                    odd[t] = odd[t] + third * here[t] + first * after[t]
            sums = out[o, 2 * start : 2 * (start + size)]
            for t in range(size):
                sums[2 * t] = even[t]
                sums[2 * t + 1] = odd[t]
            _leak(sums, slope, gate[o, 2 * start : 2 * (start + size)], gated)


@exact
def conv_mix(values: Floats, weights: Singles, bias: Singles, out: Floats) -> None:
    """Add up channels with weights of shape (outputs, inputs), place by place, without a rectifier."""
    number = out.dtype.type
    places = out.shape[1]
    for start in range(0, places, _TILE):
        size = min(_TILE, places - start)
        for o in range(out.shape[0]):
            sums = out[o, start : start + size]
            sums[:] = number(bias[o])
            for c in range(values.shape[0]):
                factor = number(weights[o, c])
                row = values[c, start : start + size]
                for t in range(size):
                    sums[t] = sums[t] + factor * row[t]


@exact
def _leak(sums, slope, gate, gated):  # type: ignore[no-untyped-def]
    if gated:
        for t in range(sums.size):
            sums[t] = sums[t] * slope if gate[t] < 0 else sums[t]
    else:
        for t in range(sums.size):
            sums[t] = sums[t] * slope if sums[t] < 0 else sums[t]
