// The largest magnitudes of each chunk of an array, in one launch: a block has a chunk.

KERNEL select_in_chunks(const Word* array, i64 size, i64 chunk, i64 k, i64 rest, u32* indices, Word* values) {
  __shared__ u32 bins[DIGIT_BINS];
  __shared__ u64 digits, rank;
  const i64 start = (i64)blockIdx.x * chunk, stop = smaller(start + chunk, size);
  u64 known = 0, remaining = (u64)(stop - start < chunk ? rest : k);

  for (int b = threadIdx.x; b < DIGIT_BINS; b += THREADS) bins[b] = 0;
  // A radix selection: `known` has the digits of the k-th magnitude from bit `top` on.
  for (int top = 8 * (int)sizeof(Word) - 1; top > 0;) {
    const int digit = smaller(DIGIT, top), shift = top - digit;
    const u32 last = (1u << digit) - 1;
    __syncthreads();
    for (i64 i = start + threadIdx.x; i < stop; i += THREADS) {
      const u64 magnitude = array[i] & MASK;
      if (magnitude >> top == known >> top) atomicAdd(&bins[(u32)(magnitude >> shift) & last], 1u);
    }
    __syncthreads();
    u64 bin, above;
    if (find_bin(bins, remaining, bin, above)) {
      digits = known | bin << shift;
      rank = remaining - above;
    }
    __syncthreads();
    known = digits;
    remaining = rank;
    top = shift;
  }

  // All elements above it, and the first of those equal to it, as many as remain.
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
