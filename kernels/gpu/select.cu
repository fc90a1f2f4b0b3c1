// Exact selection of the largest magnitudes and ordered compaction of what reaches a threshold, from an array or from
// a list of candidates. Which of the two is decided on the device.

constexpr int DIGIT = 11;
constexpr int BINS = 1 << DIGIT;

enum Source { ARRAY = 0, AS_STATE_SAYS = 1, LIST_IF_COMPLETE = 2, LIST = 3 };
enum Rule { ABOVE = 0, REACH = 1, FILL = 2 };  // of those equal to the threshold: none, all, as many as there is room
enum Turn { ALWAYS = 0, UNLESS_EXACT = 1, IF_EXACT = 2 };  // when a launch has anything to do

__device__ __forceinline__ bool idle(i64 turn, const State* state) {
  return turn != ALWAYS && (state->exact != 0) != (turn == IF_EXACT);
}

// One digit of a radix selection. `first` marks the most significant one, where the source is decided.
extern "C" __global__ void __launch_bounds__(THREADS) histogram(
    const Word* array, i64 size, const Word* bits, i64 room, const u64* bound, const i64* rank, i64 rank_value,
    i64 shift, i64 digit, i64 first, i64 turn, u64* counters, State* state) {
  __shared__ u32 bins[BINS];
  if (idle(turn, state)) return;
  const i64 k = given(rank, rank_value);
  const u64 candidates = state->candidates;
  const bool usable =
      first ? bits && *bound != 0 && candidates >= (u64)k && candidates <= (u64)room : state->usable != 0;
  const u64 prefix = first ? 0 : state->known >> (shift + digit);
  const u64 remaining = first ? (u64)k : state->remaining;
  const u64 known = first ? 0 : state->known;
  const Word* source = usable ? bits : array;
  const i64 count = usable ? (i64)candidates : size;
  const u32 last = (1u << digit) - 1;
  // The grid is made for the array. A list is short, and the blocks that have no part of it are not waited for.
  const i64 working = larger((i64)1, smaller((i64)gridDim.x, (count + TILE - 1) / TILE));
  if (blockIdx.x >= working) return;
  for (int b = threadIdx.x; b < BINS; b += THREADS) bins[b] = 0;
  __syncthreads();
  const bool even = aligned(source);
  for (i64 tile = blockIdx.x; tile * TILE < count; tile += working) {
    const i64 start = tile * TILE + warp_of_thread() * WARP_TILE + lane_of_thread() * VEC;
    const bool whole = (tile + 1) * TILE <= count;
    Items items;
    load(items, source, start, count, even && whole);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const u64 magnitude = items.item[r][j] & MASK;
        // A shift by all 63 bits of float64, the most there is, is one that the language defines.
        if (magnitude >> (shift + digit) == prefix && (whole || start + r * STRIP + j < count))
          atomicAdd(&bins[(u32)(magnitude >> shift) & last], 1u);
      }
    }
  }
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS)
    if (bins[b]) atomicAdd(&counters[b], (u64)bins[b]);
  if (!ends_last(state, working)) return;

  // Bins from the highest down, a thread's own side by side.
  constexpr int OWN = BINS / THREADS;
  const int highest = BINS - 1 - (int)threadIdx.x * OWN;
  u64 own[OWN], sum = 0;
#pragma unroll
  for (int b = 0; b < OWN; ++b) {
    own[b] = counters[highest - b];
    counters[highest - b] = 0;
    sum += own[b];
  }
  u64 total;
  u64 above = block_scan(sum, total);
#pragma unroll
  for (int b = 0; b < OWN; ++b) {
    if (above < remaining && remaining <= above + own[b]) {
      state->known = known | (u64)(highest - b) << shift;
      state->threshold = known | (u64)(highest - b) << shift;
      state->remaining = remaining - above;
    }
    above += own[b];
  }
  if (threadIdx.x == 0) state->usable = usable;
}

struct Segment {
  i64 start, count;
};

__device__ __forceinline__ Segment segment_of(i64 tile, i64 size, const u64* starts, const u32* counts) {
  if (starts) return {(i64)starts[tile], (i64)counts[tile]};
  return {tile * TILE, smaller((i64)TILE, size - tile * TILE)};
}

// How many of each tile's elements lie above the threshold (high half) and are equal to it (low half); the block that
// ends last turns the sums of blocks into the numbers before each block. A warp has a tile. `most` is the room. With
// an estimate, whose turn it is unless the selection is exact already, it becomes exact where nothing is above the
// threshold, or more than `most`.
extern "C" __global__ void __launch_bounds__(THREADS) count_tiles(
    const Word* array, i64 size, const Word* bits, i64 listable, const u64* starts, const u32* counts, i64 source,
    const u64* bound, i64 bound_value, const u64* threshold, i64 threshold_value, i64 rule, const i64* most,
    i64 most_value, const i64* offset, i64 offset_value, i64 turn, i64 tiles, u64* of_tiles, u64* before,
    State* state) {
  if (idle(turn, state)) return;
  const u64 room = (u64)given(most, most_value);
  const u64 wanted = given(threshold, threshold_value);
  bool usable = source == LIST || (source == AS_STATE_SAYS && state->usable != 0);
  if (source == LIST_IF_COMPLETE) {
    const u64 least = given(bound, bound_value);
    usable = least != 0 && wanted >= least && state->candidates <= (u64)listable;
  }
  const Word limit = (Word)wanted;
  const bool even = aligned(array);
  const i64 tile = (i64)blockIdx.x * WARPS + warp_of_thread();
  u32 above = 0, equal = 0;
  if (tile < tiles) {
    if (usable) {
      const Segment segment = segment_of(tile, size, starts, counts);
      for (i64 j = lane_of_thread(); j < segment.count; j += 32) {
        const Word magnitude = bits[segment.start + j];
        above += magnitude > limit;
        equal += magnitude == limit;
      }
    } else {
      const bool whole = (tile + 1) * TILE <= size;
      for (int w = 0; w < WARPS; ++w) {
        const i64 first = tile * TILE + w * WARP_TILE + lane_of_thread() * VEC;
        Items items;
        load(items, array, first, size, even && whole);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
          for (int j = 0; j < VEC; ++j) {
            const Word magnitude = items.item[r][j] & MASK;
            above += magnitude > limit;
            equal += magnitude == limit && (whole || first + r * STRIP + j < size);
          }
        }
      }
    }
  }
  const u64 of_tile = warp_sum((u64)above << 32 | equal);
  if (lane_of_thread() == 0 && tile < tiles) of_tiles[tile] = of_tile;
  const u64 of_block = block_sum(lane_of_thread() == 0 ? of_tile : 0);
  if (threadIdx.x == 0) before[blockIdx.x] = of_block;
  if (!ends_last(state, gridDim.x)) return;

  const u64 total = scan_blocks(before);
  if (threadIdx.x == 0) {
    const u64 above = total >> 32, equal = total & 0xffffffffu;
    u64 ties = rule == REACH ? equal : 0;
    if (rule == FILL && above < room) ties = smaller(equal, room - above);
    if (turn == UNLESS_EXACT) state->exact = state->k != 0 && (above == 0 || above > room);
    state->usable = usable;
    state->threshold = wanted;
    state->ties = ties;
    state->offset = (u64)given(offset, offset_value);
    state->end = state->offset + above + ties;
  }
}

struct Output {
  Word* array;
  u32 base;
  u64 room;
  u32* indices;
  Word* values;
  Word* magnitudes;
  bool clear;

  __device__ __forceinline__ void put(u64 place, i64 i) const {
    if (place >= room) return;
    const Word word = array[i];
    indices[place] = base + (u32)i;
    if (values) values[place] = word;
    if (magnitudes) magnitudes[place] = word & MASK;
    if (clear) array[i] = 0;
  }
};

// The least magnitude of a candidate in the next step. It stays below the threshold by a part of it that widens where
// too few were listed and narrows where many were: under error feedback what was not sent crowds below the threshold,
// the more the lower the ratio is, so that no part fits all.
__device__ __forceinline__ void set_bound(
    const u64* bound, u64* following, State* state, u64 listable, double margin) {
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

// Writes what count_tiles counted, each element to its place.
extern "C" __global__ void __launch_bounds__(THREADS) write_tiles(
    Word* array, i64 size, const u32* index, const Word* bits, const u64* starts, const u32* counts, i64 tiles,
    const u64* of_tiles, const u64* before, State* state, i64 base, i64 room, u32* indices, Word* values,
    Word* magnitudes, i64 clear, const u64* bound, u64* following, i64 listable, double margin, i64* count) {
  const Word limit = (Word)state->threshold;
  const u64 ties = state->ties, offset = state->offset;
  const bool usable = state->usable != 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (bound) set_bound(bound, following, state, (u64)listable, margin);
    if (count) *count = (i64)smaller(state->end, (u64)room);
    state->listed = state->candidates;
    state->candidates = 0;
  }
  const i64 tile = (i64)blockIdx.x * WARPS + warp_of_thread();
  if (tile >= tiles || of_tiles[tile] == 0) return;
  const Output output{array, (u32)base, (u64)room, indices, values, magnitudes, clear != 0};
  const int lane = lane_of_thread();
  const u32 below = (1u << lane) - 1;
  const int warp = warp_of_thread();
  const u64 both = before[blockIdx.x] + warp_sum(lane < warp ? of_tiles[tile - warp + lane] : 0);
  u64 above = both >> 32, equal = both & 0xffffffffu;
  if (usable) {
    const Segment segment = segment_of(tile, size, starts, counts);
    for (i64 strip = 0; strip < segment.count; strip += 32) {
      const bool there = strip + lane < segment.count;
      const Word magnitude = there ? bits[segment.start + strip + lane] : (Word)0;
      const u32 larger_ones = __ballot_sync(ALL, there && magnitude > limit);
      const u32 equal_ones = __ballot_sync(ALL, there && magnitude == limit);
      const u64 ties_before = equal + __popc(equal_ones & below);
      const u64 place = offset + above + __popc(larger_ones & below) + smaller(ties_before, ties);
      if (there && (magnitude > limit || (magnitude == limit && ties_before < ties)))
        output.put(place, index[segment.start + strip + lane]);
      above += __popc(larger_ones);
      equal += __popc(equal_ones);
    }
    return;
  }
  const bool whole = (tile + 1) * TILE <= size, even = aligned(array);
  for (int w = 0; w < WARPS; ++w) {
    const i64 first = tile * TILE + w * WARP_TILE + lane * VEC;
    Items items;
    load(items, array, first, size, even && whole);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      u32 own = 0;  // above in the high half, equal in the low one
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const Word magnitude = items.item[r][j] & MASK;
        const bool there = whole || first + r * STRIP + j < size;
        own += there && magnitude > limit ? 0x10000u : there && magnitude == limit ? 1u : 0u;
      }
      if (__ballot_sync(ALL, own != 0) == 0) continue;
      const u32 inclusive = warp_scan(own);
      const u32 all = __shfl_sync(ALL, inclusive, 31);
      u64 above_here = above + (inclusive - own >> 16), equal_here = equal + (inclusive - own & 0xffff);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const i64 i = first + r * STRIP + j;
        const Word magnitude = items.item[r][j] & MASK;
        if (!whole && i >= size) continue;
        if (magnitude > limit) {
          output.put(offset + above_here + smaller(equal_here, ties), i);
          ++above_here;
        } else if (magnitude == limit) {
          if (equal_here < ties) output.put(offset + above_here + equal_here, i);
          ++equal_here;
        }
      }
      above += all >> 16;
      equal += all & 0xffff;
    }
  }
}
