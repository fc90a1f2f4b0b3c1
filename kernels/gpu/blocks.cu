// Blocks of neighbours times a small matrix, and back. A thread computes an element of the result, and adds in the
// CPU's order.

KERNEL encode_blocks(const Real* values, i64 size, const float* matrix, i64 kept, i64 block, Real* out, i64 count) {
  for (const i64 j : grid_stride(count)) {
    const i64 start = j / kept * block, stop = smaller(start + block, size);
    const float* row = matrix + j % kept * block;
    Real sum = 0;
    for (i64 i = start; i < stop; ++i) sum += product((Real)row[i - start], values[i]);
    out[j] = sum;
  }
}

KERNEL decode_blocks(const Real* code, const float* matrix, i64 kept, i64 block, Real* out, i64 size) {
  for (const i64 i : grid_stride(size)) {
    const Real* numbers = code + i / block * kept;
    Real sum = 0;
    for (i64 row = 0; row < kept; ++row) sum += product(numbers[row], (Real)matrix[row * block + i % block]);
    out[i] = sum;
  }
}
