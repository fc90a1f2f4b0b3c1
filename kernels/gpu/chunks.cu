// The largest magnitudes of each chunk of an array, in one launch: a block has a chunk.

constexpr int DIGIT = 11;
constexpr int BINS = 1 << DIGIT;

extern "C" __global__ void __launch_bounds__(THREADS) select_in_chunks(
    const Word* array, i64 size, i64 chunk, i64 k, i64 rest, u32* indices, Word* values) {
  __shared__ u32 bins[BINS];
  __shared__ u64 digits, rank;
  const i64 start = (i64)blockIdx.x * chunk, stop = smaller(start + chunk, size);
  u64 known = 0, remaining = (u64)(stop - start < chunk ? rest : k);

  // A radix selection: `known` has the digits of the k-th magnitude from bit `top` on.
  for (int top = 8 * (int)sizeof(Word) - 1; top > 0;) {
    const int digit = smaller(DIGIT, top), shift = top - digit;
    const u32 last = (1u << digit) - 1;
    for (int b = threadIdx.x; b < BINS; b += THREADS) bins[b] = 0;
    __syncthreads();
    for (i64 i = start + threadIdx.x; i < stop; i += THREADS) {
      const u64 magnitude = array[i] & MASK;
      if (magnitude >> top == known >> top) atomicAdd(&bins[(u32)(magnitude >> shift) & last], 1u);
    }
    __syncthreads();
    // Bins from the highest down, a thread's own side by side.
    constexpr int OWN = BINS / THREADS;
    const int highest = BINS - 1 - (int)threadIdx.x * OWN;
    u64 sum = 0, total;
    for (int b = 0; b < OWN; ++b) sum += bins[highest - b];
    u64 above = block_scan(sum, total);
    for (int b = 0; b < OWN; ++b) {
      const u64 here = bins[highest - b];
      if (above < remaining && remaining <= above + here) {
        digits = known | (u64)(highest - b) << shift;
        rank = remaining - above;
      }
      above += here;
    }
    __syncthreads();
    known = digits;
    remaining = rank;
    __syncthreads();
    top = shift;
  }

  // All above it, and the first of those that are equal to it, as many as are left.
  const u64 ties = remaining;
  u64 before = (u64)blockIdx.x * (u64)k << 32;  // elements above in the high half, equal ones in the low one
  for (i64 strip = start; strip < stop; strip += THREADS) {
    const i64 i = strip + threadIdx.x;
    const bool there = i < stop;
    const Word word = there ? array[i] : (Word)0;
    const u64 magnitude = word & MASK;
    const bool larger_one = there && magnitude > known, equal = there && magnitude == known;
    u64 total;
    const u64 both = before + block_scan(larger_one ? 1ull << 32 : equal ? 1 : 0, total);
    const u64 ties_before = both & 0xffffffffu;
    if (larger_one || (equal && ties_before < ties)) {
      const u64 place = (both >> 32) + smaller(ties_before, ties);
      indices[place] = (u32)i;
      values[place] = word;
    }
    before += total;
  }
}
