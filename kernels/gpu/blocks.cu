// Blocks of neighbours times a small matrix, and back. A thread has an element of the result, and adds up in the order
// in which the CPU does.

extern "C" __global__ void __launch_bounds__(THREADS) encode_blocks(
    const Real* values, i64 size, const float* matrix, i64 kept, i64 block, Real* out, i64 count) {
  for (i64 j = (i64)blockIdx.x * THREADS + threadIdx.x; j < count; j += (i64)gridDim.x * THREADS) {
    const i64 start = j / kept * block, stop = smaller(start + block, size);
    const float* row = matrix + j % kept * block;
    Real sum = 0;
    for (i64 i = start; i < stop; ++i) sum += product((Real)row[i - start], values[i]);
    out[j] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) decode_blocks(
    const Real* code, const float* matrix, i64 kept, i64 block, Real* out, i64 size) {
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < size; i += (i64)gridDim.x * THREADS) {
    const Real* own = code + i / block * kept;
    Real sum = 0;
    for (i64 row = 0; row < kept; ++row) sum += product(own[row], (Real)matrix[row * block + i % block]);
    out[i] = sum;
  }
}
