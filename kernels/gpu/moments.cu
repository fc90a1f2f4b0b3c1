// Columns of sums: nonzero elements, sum of their magnitudes, sum of the logarithms of these.

KERNEL logarithms(const Word* array, i64 size, i64 remaining, i64 stride, Partials* partials) {
  u64 nonzero = 0;
  double sum[3] = {};
  for (i64 number = blockIdx.x; number * TILE < remaining; number += gridDim.x) {
    const Items items = load(array, sampled_tile(number, stride, size, aligned(array)));
    Logarithms logarithms;
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      const Word magnitude = items.item[n] & MASK;
      nonzero += magnitude != 0;
      sum[1] += (double)as_real(magnitude);
      logarithms.add((double)as_real(magnitude));
    }
    sum[2] += logarithms.sum();
  }
  sum[0] = (double)nonzero;
  finish_sums<3, true>(sum, partials);
}
