// Elements above a threshold. Columns of sums: count, excess, squared excess.

KERNEL tail(
    const Word* array, i64 size, i64 remaining, i64 stride, const double* threshold, double threshold_value,
    Partials* partials) {
  double sum[3] = {};
  sum_tail(array, size, remaining, stride, (Real)scalar_arg(threshold, threshold_value), sum);
  finish_sums<3, true>(sum, partials);
}

// Count of the magnitudes above each of eight thresholds, a column for each.
KERNEL counts_above(
    const Word* array, i64 size, double t0, double t1, double t2, double t3, double t4, double t5, double t6, double t7,
    Partials* partials) {
  const Real limits[8] = {(Real)t0, (Real)t1, (Real)t2, (Real)t3, (Real)t4, (Real)t5, (Real)t6, (Real)t7};
  u32 counts[8] = {};  // a thread sees fewer than 2^32 elements
  for (const Tile tile : each_tile(size, aligned(array))) {
    const Items items = load(array, tile);
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      const Real magnitude = as_real(items.item[n] & MASK);
      const bool inside = tile.contains(n);
#pragma unroll
      for (int t = 0; t < 8; ++t) counts[t] += inside && !(magnitude <= limits[t]);  // NaN is above everything
    }
  }
  double sum[8];
  for (int t = 0; t < 8; ++t) sum[t] = (double)counts[t];
  finish_sums(sum, partials);
}
