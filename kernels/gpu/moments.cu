// Columns of sums: how many elements are not zero, sum of magnitudes, sum of logarithms of what is not zero.

extern "C" __global__ void __launch_bounds__(THREADS)
    logarithms(const Word* array, i64 size, i64 remaining, i64 stride, Partials* partials) {
  u64 nonzero = 0;
  double sum[3] = {};
  const bool even = aligned(array);
  for (i64 tile = blockIdx.x; tile * TILE < remaining; tile += gridDim.x) {
    const i64 start = strided(tile * TILE + warp_of_thread() * WARP_TILE, stride);
    const i64 first = start + lane_of_thread() * VEC;
    Items items;
    load(items, array, first, size, even && start + WARP_TILE <= size);
    Logarithms logarithms;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const Word magnitude = items.item[r][j] & MASK;
        nonzero += magnitude != 0;
        sum[1] += (double)as_real(magnitude);
        logarithms.take((double)as_real(magnitude));
      }
    }
    sum[2] += logarithms.sum();
  }
  sum[0] = (double)nonzero;
  finish_sums<3, true>(sum, partials);
}
