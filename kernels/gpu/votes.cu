// Signs as votes: what most ranks say of each element.

extern "C" __global__ void __launch_bounds__(THREADS) pack_votes(const Word* array, i64 size, u32* halves, i64 groups) {
  // Words are written by halves, of which the lower one comes first.
  for (i64 g = (i64)blockIdx.x * WARPS + warp_of_thread(); g < groups; g += (i64)gridDim.x * WARPS) {
    const i64 i = 32 * g + lane_of_thread();
    const u32 votes = __ballot_sync(ALL, i < size && (array[i] & ~MASK));
    if (lane_of_thread() == 0) halves[g] = votes;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) majority(const u64* votes, i64 ranks, u64* out, i64 count) {
  for (i64 w = (i64)blockIdx.x * THREADS + threadIdx.x; w < count; w += (i64)gridDim.x * THREADS) {
    u64 won = 0;
    for (int first = 0; first < 64; first += 8) {
      // Eight elements at a time, each with a count of its own in a register.
      u32 minus[8] = {};
      for (i64 rank = 0; rank < ranks; ++rank) {
        const u32 eight = (u32)(votes[rank * count + w] >> first);
#pragma unroll
        for (int bit = 0; bit < 8; ++bit) minus[bit] += eight >> bit & 1;
      }
#pragma unroll
      for (int bit = 0; bit < 8; ++bit) won |= (u64)(2 * (i64)minus[bit] > ranks) << (first + bit);
    }
    out[w] = won;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) unpack_votes(const u64* words, double value, Word* out, i64 size) {
  const Real own = (Real)value;
  const i64 step = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < size; i += step) {
    out[i] = as_word(words[i / 64] >> (i % 64) & 1 ? -own : own);
  }
}
