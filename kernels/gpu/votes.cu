// Signs as votes: the majority of ranks for each element.

KERNEL pack_votes(const Word* array, i64 size, u32* halves, i64 groups) {
  // Words are written by halves, of which the lower one comes first.
  for (const i64 g : warp_stride(groups)) {
    const i64 i = 32 * g + lane_of_thread();
    const u32 votes = __ballot_sync(ALL, i < size && (array[i] & ~MASK));
    if (lane_of_thread() == 0) halves[g] = votes;
  }
}

KERNEL majority(const u64* votes, i64 ranks, u64* out, i64 count) {
  for (const i64 w : grid_stride(count)) {
    u64 won = 0;
    for (int first = 0; first < 64; first += 8) {
      // Eight elements at a time, each counted in a register.
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

KERNEL unpack_votes(const u64* words, double value, Word* out, i64 size) {
  const Real magnitude = (Real)value;
  for (const i64 i : grid_stride(size)) {
    out[i] = as_word(words[i / 64] >> (i % 64) & 1 ? -magnitude : magnitude);
  }
}
