// What lies above a threshold. Columns of sums: how many, by how much, squares of that.

extern "C" __global__ void __launch_bounds__(THREADS) tail(
    const Word* array, i64 size, i64 remaining, i64 stride, const double* threshold, double threshold_value,
    Partials* partials) {
  double sum[3] = {};
  sum_tail(array, size, remaining, stride, (Real)given(threshold, threshold_value), sum);
  finish_sums<3, true>(sum, partials);
}
