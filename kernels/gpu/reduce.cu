// The last step of every sum: what the blocks of a sweep left is added up.

// A block for every column, and one for the largest magnitudes. Bit c of `integers` says that column c is stored as an
// integer.
extern "C" __global__ void __launch_bounds__(THREADS) finish(
    const double* sums, i64 columns, i64 integers, const u64* tops, i64 blocks, double* results, u64* top, u8* finite) {
  const i64 c = blockIdx.x;
  if (c < columns) {
    const double total = collect_sum(sums, c, blocks);
    if (threadIdx.x != 0) return;
    if (integers >> c & 1)
      reinterpret_cast<i64*>(results)[c] = (i64)total;
    else
      results[c] = total;
  } else if (tops) {
    const u64 largest = collect_top(tops, blocks);
    if (threadIdx.x != 0) return;
    if (top) *top = largest;
    *finite = largest < (u64)INFINITE;
  }
}
