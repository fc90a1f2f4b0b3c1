// What lies above a threshold. Columns of sums: how many, by how much, squares of that.

extern "C" __global__ void __launch_bounds__(THREADS) tail(
    const Word* array, i64 size, i64 remaining, i64 stride, const double* threshold, double threshold_value,
    Partials* partials) {
  double sum[3] = {};
  sum_tail(array, size, remaining, stride, (Real)given(threshold, threshold_value), sum);
  finish_sums<3, true>(sum, partials);
}

// How many magnitudes exceed each of eight thresholds: a column for each.
extern "C" __global__ void __launch_bounds__(THREADS) counts_above(
    const Word* array, i64 size, double t0, double t1, double t2, double t3, double t4, double t5, double t6, double t7,
    Partials* partials) {
  const Real limits[8] = {(Real)t0, (Real)t1, (Real)t2, (Real)t3, (Real)t4, (Real)t5, (Real)t6, (Real)t7};
  u32 counts[8] = {};  // a thread sees fewer than 2^32 elements
  const bool even = aligned(array);
  for (i64 tile = blockIdx.x; tile * TILE < size; tile += gridDim.x) {
    const i64 first = tile * TILE + warp_of_thread() * WARP_TILE + lane_of_thread() * VEC;
    const bool packed = even && (tile + 1) * TILE <= size;
    Items items;
    load(items, array, first, size, packed);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const Real magnitude = as_real(items.item[r][j] & MASK);
        const bool inside = packed || first + r * STRIP + j < size;
#pragma unroll
        for (int t = 0; t < 8; ++t) counts[t] += inside && !(magnitude <= limits[t]);  // NaN is above everything
      }
    }
  }
  double sum[8];
  for (int t = 0; t < 8; ++t) sum[t] = (double)counts[t];
  finish_sums(sum, partials);
}
