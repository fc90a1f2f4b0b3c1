// Exact selection of the largest magnitudes, and ordered compaction of the elements that reach a threshold, from an
// array or a list of candidates. The device decides which of the two.

enum Source { ARRAY = 0, LIST_IF_USABLE = 1, LIST_IF_COMPLETE = 2 };
enum Rule { ABOVE = 0, FILL = 1 };                          // elements equal to the threshold: none, as many as fit
enum Condition { ALWAYS = 0, UNLESS_EXACT = 1, IF_EXACT = 2 };  // on `exact`, for a launch to do anything

DEVICE bool idle(i64 condition, const State* state) {
  return condition != ALWAYS && (state->exact != 0) != (condition == IF_EXACT);
}

// One digit of a radix selection. `first` marks the most significant one, where the source is decided.
KERNEL histogram(
    const Word* array, i64 size, const Word* bits, i64 room, const u64* bound, const i64* rank, i64 rank_value,
    i64 shift, i64 digit, i64 first, i64 condition, u64* counters, State* state) {
  __shared__ u32 bins[DIGIT_BINS];
  if (idle(condition, state)) return;
  const i64 k = scalar_arg(rank, rank_value);
  const u64 candidates = state->candidates;
  const bool usable =
      first ? bits && *bound != 0 && candidates >= (u64)k && candidates <= (u64)room : state->usable != 0;
  const u64 prefix = first ? 0 : state->known >> (shift + digit);
  const u64 remaining = first ? (u64)k : state->remaining;
  const u64 known = first ? 0 : state->known;
  const Word* source = usable ? bits : array;
  const i64 count = usable ? (i64)candidates : size;
  const u32 last = (1u << digit) - 1;
  // The grid is made for the array. A list is short, and blocks without a part of it are not waited for.
  const i64 working = larger((i64)1, smaller((i64)gridDim.x, (count + TILE - 1) / TILE));
  if (blockIdx.x >= working) return;
  for (int b = threadIdx.x; b < DIGIT_BINS; b += THREADS) bins[b] = 0;
  __syncthreads();
  for (const Tile tile : each_tile(count, aligned(source), working)) {
    const Items items = load(source, tile);
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      const u64 magnitude = items.item[n] & MASK;
      // The language defines shifts by up to 63 bits, which float64 needs.
      if (magnitude >> (shift + digit) == prefix && tile.contains(n))
        atomicAdd(&bins[(u32)(magnitude >> shift) & last], 1u);
    }
  }
  __syncthreads();
  for (int b = threadIdx.x; b < DIGIT_BINS; b += THREADS)
    if (bins[b]) atomicAdd(&counters[b], (u64)bins[b]);
  if (!ends_last(state, working)) return;

  u64 bin, above;
  if (find_bin(counters, remaining, bin, above)) {
    state->known = state->threshold = known | bin << shift;
    state->remaining = remaining - above;
  }
  if (threadIdx.x == 0) state->usable = usable;
}

// Counts each tile's elements above the threshold (high half) and equal to it (low half); the block that ends last
// turns the sums of blocks into the numbers before each block. A warp has a tile. `most` is the room. With an estimate,
// that is UNLESS_EXACT, the selection becomes exact where no element is above the threshold, or more than `most`.
KERNEL count_tiles(
    const Word* array, i64 size, const Word* bits, i64 listable, const u64* starts, const u32* counts, i64 source,
    const u64* bound, i64 bound_value, const u64* threshold, i64 threshold_value, i64 rule, const i64* most,
    i64 most_value, const i64* offset, i64 offset_value, i64 condition, i64 tiles, u64* of_tiles, u64* before,
    State* state) {
  if (idle(condition, state)) return;
  const u64 room = (u64)scalar_arg(most, most_value);
  const u64 wanted = scalar_arg(threshold, threshold_value);
  bool usable = source == LIST_IF_USABLE && state->usable != 0;
  if (source == LIST_IF_COMPLETE) {
    const u64 least = scalar_arg(bound, bound_value);
    usable = least != 0 && wanted >= least && state->candidates <= (u64)listable;
  }
  const Word limit = (Word)wanted;
  const i64 number = (i64)blockIdx.x * WARPS + warp_of_thread();
  u32 above = 0, equal = 0;
  if (number < tiles) {
    if (usable) {
      const Word* listed = bits + starts[number];
      for (u32 j = lane_of_thread(); j < counts[number]; j += 32) {
        const Word magnitude = listed[j];
        above += magnitude > limit;
        equal += magnitude == limit;
      }
    } else {
      Tile tile = tile_of(number, 0, size, aligned(array));
      for (int w = 0; w < WARPS; ++w, tile.first += WARP_TILE) {
        const Items items = load(array, tile);
#pragma unroll
        for (int n = 0; n < ITEMS; ++n) {
          const Word magnitude = items.item[n] & MASK;
          above += magnitude > limit;
          equal += magnitude == limit && tile.contains(n);
        }
      }
    }
  }
  u64 total;
  if (!count_before(warp_sum((u64)above << 32 | equal), number, tiles, of_tiles, before, state, total)) return;
  if (threadIdx.x == 0) {
    const u64 above = total >> 32, equal = total & 0xffffffffu;
    u64 ties = 0;
    if (rule == FILL && above < room) ties = smaller(equal, room - above);
    if (condition == UNLESS_EXACT) state->exact = state->k != 0 && (above == 0 || above > room);
    state->usable = usable;
    state->threshold = wanted;
    state->ties = ties;
    state->offset = (u64)scalar_arg(offset, offset_value);
    state->end = state->offset + above + ties;
  }
}

// Where selected elements go. In a message, whose words were zero, the values lie, and the indices or their code.
struct Output {
  const Word* array;
  u32 base;
  u64 room;
  u32* indices;
  Word* values;
  u64* code;  // null without a message
  bool coded;
  CodeShape shape;
  double kept;  // squared norm of the elements that this thread writes to a message

  DEVICE void write(u64 place, i64 i) {
    if (place >= room) return;
    const Word word = array[i];
    indices[place] = base + (u32)i;
    values[place] = word;
    if (!code) return;
    const double value = (double)as_real(word);
    kept += value * value;
    if (coded)
      add_to_code(code, shape, place, (u64)i);
    else
      reinterpret_cast<u32*>(code)[place] = (u32)i;
  }
};

// Sets the least magnitude of a candidate in the next step. It stays below the threshold by a fraction that grows where
// too few were listed and shrinks where many were: under error feedback, elements that were not sent crowd below the
// threshold, the more the lower the ratio is, so that no fraction fits all.
DEVICE void set_bound(const u64* bound, u64* following, State* state, u64 listable, double margin) {
  double gap = state->gap ? as_real(state->gap) : 1 - margin;
  const u64 listed = state->candidates, wanted = state->end - state->offset;
  if (*bound != 0) {
    if (listed < wanted)
      gap = smaller(0.5, 4 * gap);
    else if (listed > smaller(2 * wanted, listable))
      gap = larger(0.0001, gap / 2);
    else if ((double)listed < 1.2 * (double)wanted)
      gap = smaller(0.5, 1.5 * gap);
  }
  state->gap = as_word(gap);
  *following = as_word((Real)((1 - gap) * (double)as_real((Word)state->threshold))) & MASK;
}

// Writes the elements of this warp's tile that count_tiles counted, each to its place.
DEVICE void write_tile(
    const Word* array, i64 size, const u32* index, const Word* bits, const u64* starts, const u32* counts,
    const u64* of_tiles, const u64* before, const State* state, i64 number, Output& output) {
  const u64 offset = state->offset;
  Selection selection(state, elements_before(number, of_tiles, before));
  if (state->usable) {
    const u64 start = starts[number];
    for (u32 strip = 0; strip < counts[number]; strip += 32) {
      const u64 j = strip + lane_of_thread();
      const bool inside = j < counts[number];
      const Word magnitude = inside ? bits[start + j] : (Word)0;
      u64 place;
      if (selection.next(magnitude, inside, place)) output.write(offset + place, index[start + j]);
    }
    return;
  }
  const Word limit = selection.limit;
  const u64 ties = selection.ties;
  u64 above = selection.above, equal = selection.equal;
  Tile tile = tile_of(number, 0, size, aligned(array));
  for (int w = 0; w < WARPS; ++w, tile.first += WARP_TILE) {
    const Items items = load(array, tile);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      u32 found = 0;  // above in the high half, equal in the low one
#pragma unroll
      for (int n = r * VEC; n < (r + 1) * VEC; ++n) {
        const Word magnitude = items.item[n] & MASK;
        const bool inside = tile.contains(n);
        found += inside && magnitude > limit ? 0x10000u : inside && magnitude == limit ? 1u : 0u;
      }
      if (__ballot_sync(ALL, found != 0) == 0) continue;
      const u32 inclusive = warp_scan(found);
      const u32 all = __shfl_sync(ALL, inclusive, 31);
      u64 above_here = above + (inclusive - found >> 16), equal_here = equal + (inclusive - found & 0xffff);
#pragma unroll
      for (int n = r * VEC; n < (r + 1) * VEC; ++n) {
        const Word magnitude = items.item[n] & MASK;
        if (!tile.contains(n)) continue;
        if (magnitude > limit) {
          output.write(offset + above_here + smaller(equal_here, ties), tile.index(n));
          ++above_here;
        } else if (magnitude == limit) {
          if (equal_here < ties) output.write(offset + above_here + equal_here, tile.index(n));
          ++equal_here;
        }
      }
      above += all >> 16;
      equal += all & 0xffff;
    }
  }
}

// At least `least` indices are coded in a message, if that takes at most `most` bytes each. Its header is written by the
// block that ends last, with the moments of the array and the sum of `sums`.
KERNEL write_tiles(
    const Word* array, i64 size, const u32* index, const Word* bits, const u64* starts, const u32* counts, i64 tiles,
    const u64* of_tiles, const u64* before, State* state, i64 base, i64 room, u32* indices, Word* values, i64* count,
    const u64* bound, u64* following, i64 listable, double margin, u64* message, i64 lead, i64 least, i64 most,
    const Partials* moments, Partials* sums) {
  const i64 selected = (i64)smaller(state->end, (u64)room);
  Output output{array, (u32)base, (u64)room, indices, values};
  if (message) {
    output.code = message + HEADER_WORDS + (selected * (i64)sizeof(Word) + 7) / 8;
    output.shape = code_shape(selected, size);
    output.coded = selected >= least && 8 * (output.shape.low + output.shape.upper) <= most * selected;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (bound) set_bound(bound, following, state, (u64)listable, margin);
    if (count) *count = selected;
    state->listed = state->candidates;
    state->candidates = 0;
  }
  const i64 number = (i64)blockIdx.x * WARPS + warp_of_thread();
  if (number < tiles && of_tiles[number] != 0)
    write_tile(array, size, index, bits, starts, counts, of_tiles, before, state, number, output);
  if (!message) return;
  double sum[1] = {output.kept};
  if (!finish_sums(sum, sums) || threadIdx.x != 0) return;
  const double energy = moments->totals()[2];
  const u64 words = (u64)output.coded << 24 | (u64)selected << 32;
  set_header(message, lead + (i64)words, moments->finite, energy, energy - sum[0], 0);
}
