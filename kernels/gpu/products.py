"""Small matrices, convolutions and count sketches: sums of products, with the same bits as those of the CPU."""

from mpicomp.kernels import cpu
from mpicomp.kernels.cpu.bits import halves
from mpicomp.kernels.gpu.compile import THREADS, launch, strides, twin_of

ROWS = 15  # most rows of a sketch: estimates of them lie in the memory that threads of a block share
PART = 2048  # cells of a row that a block sums at a time, from all elements: larger parts leave devices idle


@twin_of(cpu.encode_blocks)
def encode_blocks(values, matrix, out):
    kept, block = matrix.shape
    blocks = strides(out.size)
    launch("products", "encode_blocks", out.dtype, blocks, values, values.size, matrix, kept, block, out, out.size)


@twin_of(cpu.decode_blocks)
def decode_blocks(code, matrix, out):
    kept, block = matrix.shape
    launch("products", "decode_blocks", out.dtype, strides(out.size), code, matrix, kept, block, out, out.size)


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


# The time is in proportion to elements times cells: one thread sums a cell, and every block scans all elements.
@twin_of(cpu.sketch_add)
def sketch_add(array, key, table):
    rows, columns = table.shape
    launch(
        "countsketch", "sketch_add", table.dtype, strides(THREADS * rows * -(-columns // PART)),
        array, array.size, *map(int, halves(key)), table, rows, columns,
    )  # fmt: skip


@twin_of(cpu.sketch_estimate)
def sketch_estimate(table, key, out):
    rows, columns = table.shape
    if rows > ROWS:
        raise ValueError(f"sketch_estimate: a table on a device has at most {ROWS} rows, got {rows}: take fewer rows")
    launch(
        "countsketch", "sketch_estimate", table.dtype, strides(out.size),
        table, rows, columns, *map(int, halves(key)), out, out.size,
    )  # fmt: skip


@twin_of(cpu.sketch_clear)
def sketch_clear(indices, key, table):
    rows, columns = table.shape
    launch(
        "countsketch", "sketch_clear", table.dtype, strides(indices.size),
        indices, indices.size, *map(int, halves(key)), table, rows, columns,
    )  # fmt: skip


def _convolve(name, values, weights, bias, slope, gate, out):
    launch(
        "products", name, out.dtype, strides(out.size), values, values.shape[0], weights, bias, float(slope),
        0 if gate is out else gate, out, *out.shape,
    )  # fmt: skip
