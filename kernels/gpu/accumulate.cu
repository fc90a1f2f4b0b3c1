// Error feedback: gradient plus residual, in the sweep that also computes the numbers of a selection or an estimate.

// Appends a tile's candidates to the list: in their order, at a place that one addition of thread 0 reserves. The place
// and number of a tile's candidates are kept in starts and counts; a candidate without room is only counted. `turn`
// alternates from call to call, so that a slow warp may still read the numbers of the call before.
DEVICE void list_candidates(
    const Items& items, const Tile& tile, Word bound, u32* index, Word* bits, u64 room, u64* starts, u32* counts,
    State* state, int turn) {
  __shared__ u32 found[2][WARPS];
  __shared__ u64 place[2];
  u32 marks = 0, of_rounds = 0;
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    u32 of_round = 0;
#pragma unroll
    for (int n = r * VEC; n < (r + 1) * VEC; ++n) {
      const u32 mark = (items.item[n] & MASK) >= bound;
      marks |= mark << n;
      of_round += mark;
    }
    of_rounds |= of_round << (8 * r);  // at most 128 in a warp: one byte a round is enough
  }
  const u32 inclusive = warp_scan(of_rounds);
  const u32 of_warp = __shfl_sync(ALL, inclusive, 31);
  const u32 total_of_warp = (of_warp & 255) + (of_warp >> 8 & 255) + (of_warp >> 16 & 255) + (of_warp >> 24);
  if (lane_of_thread() == 0) found[turn][warp_of_thread()] = total_of_warp;
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 total = 0;
    for (int w = 0; w < WARPS; ++w) total += found[turn][w];
    const u64 start = total ? atomicAdd(&state->candidates, (u64)total) : 0;
    starts[tile.number] = start;
    counts[tile.number] = total;
    place[turn] = start + total <= room ? start : ~(u64)0;
  }
  __syncthreads();
  u64 at = place[turn];
  if (marks == 0 || at == ~(u64)0) return;
  for (int w = 0; w < warp_of_thread(); ++w) at += found[turn][w];
  const u32 before = inclusive - of_rounds;
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    u64 next = at + (before >> (8 * r) & 255);
#pragma unroll
    for (int n = r * VEC; n < (r + 1) * VEC; ++n) {
      if (marks >> n & 1) {
        index[next] = (u32)tile.index(n);
        bits[next] = items.item[n] & MASK;
        ++next;
      }
    }
    at += of_warp >> (8 * r) & 255;
  }
}

// Columns of sums: nonzero elements, sum of magnitudes, energy. A bound of 0 lists nothing: elements past the end of
// the array read as 0 and must not be candidates.
KERNEL accumulate(
    const Word* gradient, const Word* residual, double factor, Word* out, i64 size, const u64* least, i64 least_value,
    u32* index, Word* bits, i64 room, u64* starts, u32* counts, State* state, Partials* partials) {
  const Real by = (Real)factor;
  const Word bound = (Word)scalar_arg(least, least_value);
  double sum[3] = {};
  u64 nonzero = 0;
  Word top = 0;
  int turn = 0;
  for (const Tile tile : each_tile(size, aligned(gradient, out, residual))) {
    Items items = load(gradient, tile);
    if (residual) {
      const Items other = load(residual, tile);
#pragma unroll
      for (int n = 0; n < ITEMS; ++n) items.item[n] = as_word(as_real(items.item[n]) + as_real(other.item[n]));
    }
    Items scaled = items;
    if (by != 1) {
#pragma unroll
      for (int n = 0; n < ITEMS; ++n) scaled.item[n] = as_word(as_real(items.item[n]) * by);
    }
    store(scaled, out, tile);
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      const Word magnitude = items.item[n] & MASK;
      const double value = (double)as_real(magnitude);
      top = larger(top, magnitude);
      nonzero += magnitude != 0;
      sum[1] += value;
      sum[2] += value * value;
    }
    if (bound != 0) {
      list_candidates(items, tile, bound, index, bits, (u64)room, starts, counts, state, turn);
      turn ^= 1;
    }
  }
  sum[0] = (double)nonzero;
  finish_sums_and_top<3, true>(sum, top, partials);
}
