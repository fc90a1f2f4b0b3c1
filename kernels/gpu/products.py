"""Convolutions: sums of products, with the same bits as those of the CPU."""

from mpicomp.kernels import cpu
from mpicomp.kernels.gpu.compile import launch, strides, twin_of


@twin_of(cpu.conv_room)
def conv_room(inputs):
    return 0  # scratch is for the CPU alone


@twin_of(cpu.conv_halve)
def conv_halve(values, weights, bias, slope, gate, scratch, out):
    _convolve("conv_halve", values, weights, bias, slope, gate, out)


@twin_of(cpu.conv_double)
def conv_double(values, weights, bias, slope, gate, scratch, out):
    _convolve("conv_double", values, weights, bias, slope, gate, out)


@twin_of(cpu.conv_mix)
def conv_mix(values, weights, bias, out):
    blocks, inputs = strides(out.size), values.shape[0]
    launch("products", "conv_mix", out.dtype, blocks, values, inputs, weights, bias, out, *out.shape)


def _convolve(name, values, weights, bias, slope, gate, out):
    launch(
        "products", name, out.dtype, strides(out.size), values, values.shape[0], weights, bias, float(slope),
        0 if gate is out else gate, out, *out.shape,
    )  # fmt: skip
