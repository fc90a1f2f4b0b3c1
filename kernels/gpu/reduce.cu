// The last step of every sum: one block adds up what the blocks of a sweep left.

// Bit c of `integers` says that column c is stored as an integer.
extern "C" __global__ void __launch_bounds__(THREADS) finish(
    const double* sums, i64 columns, i64 integers, const u64* tops, i64 blocks, double* results, u64* top, u8* finite) {
  for (i64 c = 0; c < columns; ++c) {
    const double total = collect_sum(sums, c, blocks);
    if (threadIdx.x == 0) {
      if (integers >> c & 1)
        reinterpret_cast<i64*>(results)[c] = (i64)total;
      else
        results[c] = total;
    }
  }
  if (tops) {
    const u64 largest = collect_top(tops, blocks);
    if (threadIdx.x == 0) {
      *top = largest;
      if (finite) *finite = largest < (u64)INFINITE;
    }
  }
}
