"""Layers of a small convolutional network, with the same bits as those of the CPU."""

from typing import Any

from mpicomp.kernels.gpu.compile import launch, strides


def conv_room(inputs: int) -> int:
    """Return the elements of scratch that a layer works in: none, whatever its channels."""
    return 0


def conv_halve(values: Any, weights: Any, bias: Any, slope: float, gate: Any, scratch: Any, out: Any) -> None:
    """Convolve with three taps at every second place; see `mpicomp.kernels.cpu.conv_halve`."""
    _convolve("conv_halve", values, weights, bias, slope, gate, out)


def conv_double(values: Any, weights: Any, bias: Any, slope: float, gate: Any, scratch: Any, out: Any) -> None:
    """Convolve with three taps to twice as many places; see `mpicomp.kernels.cpu.conv_double`."""
    _convolve("conv_double", values, weights, bias, slope, gate, out)


def conv_mix(values: Any, weights: Any, bias: Any, out: Any) -> None:
    """Add up channels with weights, place by place; see `mpicomp.kernels.cpu.conv_mix`."""
    launch(
        "convolution", "conv_mix", out.dtype, strides(out.size), values, values.shape[0], weights, bias, out, *out.shape
    )


def _convolve(name: str, values: Any, weights: Any, bias: Any, slope: float, gate: Any, out: Any) -> None:
    decides = 0 if gate is out else gate
    launch(
        "convolution", name, out.dtype, strides(out.size), values, values.shape[0], weights, bias, float(slope),
        decides, out, *out.shape,
    )  # fmt: skip
