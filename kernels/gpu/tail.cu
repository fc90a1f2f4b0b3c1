// What lies above a threshold. Columns of sums: how many, by how much, squares of that.

extern "C" __global__ void __launch_bounds__(THREADS) tail(
    const Word* array, i64 size, i64 remaining, i64 stride, const double* threshold, double threshold_value,
    const u64* done, double* sums) {
  if (done && *done) return;
  const Real limit = (Real)given(threshold, threshold_value);
  u64 count = 0;
  double sum[3] = {};
  const bool even = aligned(array);
  for (i64 tile = blockIdx.x; tile * TILE < remaining; tile += gridDim.x) {
    const i64 start = strided(tile * TILE + warp_of_thread() * WARP_TILE, stride);
    const i64 first = start + lane_of_thread() * VEC;
    const bool packed = even && start + WARP_TILE <= size;
    Items items;
    load(items, array, first, size, packed);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const Real magnitude = as_real(items.item[r][j] & MASK);
        // NaN is above everything. Zeros that stand for what is behind the end are above nothing.
        if (!(magnitude <= limit) && (packed || first + r * STRIP + j < size)) {
          const double over = (double)magnitude - (double)limit;
          ++count;
          sum[1] += over;
          sum[2] += over * over;
        }
      }
    }
  }
  sum[0] = (double)count;
  leave_sums(sum, sums);
}
