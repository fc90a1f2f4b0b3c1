// Sorted selections: their sum, difference and common part, and the largest of them.
//
// The elements of two lists are taken in the order of their indices, of equal ones the first list's first. A warp has
// PART places of that order, and goes through them 32 at a time: each lane finds by bisection how many of the elements
// before its own are the first list's. Where lists do not ascend, what is found means nothing, but is inside the lists.

constexpr int PART = 256;

enum Operation { ADD = 0, SUBTRACT = 1, COMMON = 2 };

struct Lists {
  const u32* indices_a;
  const Word* values_a;
  i64 size_a;
  const u32* indices_b;
  const Word* values_b;
  i64 size_b;

  // How many of the first `taken` elements behind the first `a` and `b` ones are the first list's.
  __device__ __forceinline__ i64 of_first(i64 a, i64 b, i64 taken) const {
    i64 least = larger((i64)0, taken - (size_b - b)), most = smaller(taken, size_a - a);
    while (least < most) {
      const i64 middle = (least + most) / 2;
      if (indices_a[a + middle] <= indices_b[b + taken - 1 - middle])
        least = middle + 1;
      else
        most = middle;
    }
    return least;
  }
};

struct Element {
  u32 index;
  Word value;
  bool kept;
};

// A place in the order: `a` and `b` elements are before it.
struct Place {
  i64 a, b;
  bool first;  // whether the next element is the first list's

  // Adding nothing, as the CPU does while both lists last, makes a negative zero positive.
  static __device__ __forceinline__ Word plus_nothing(Word word) { return word & MASK ? word : 0; }

  __device__ __forceinline__ Element element(const Lists& lists, i64 operation) const {
    if (first) {
      const Element alone{lists.indices_a[a], lists.values_a[a], operation != COMMON};
      if (b >= lists.size_b) return alone;
      if (lists.indices_b[b] != alone.index) {
        if (operation != ADD) return alone;
        return {alone.index, plus_nothing(alone.value), true};
      }
      if (operation == COMMON) return {alone.index, alone.value, true};
      const Real own = as_real(alone.value), other = as_real(lists.values_b[b]);
      if (operation == ADD) return {alone.index, as_word(own + other), true};
      const Real difference = own - other;
      return {alone.index, as_word(difference), difference != 0};
    }
    const u32 index = lists.indices_b[b];
    // The first list's element of this index, which was taken just before, has the value of both.
    if (operation == COMMON || (a > 0 && lists.indices_a[a - 1] == index)) return {index, 0, false};
    const Word value = lists.values_b[b];
    if (operation == SUBTRACT) return {index, value ^ (Word)~MASK, (value & MASK) != 0};
    return {index, a < lists.size_a ? plus_nothing(value) : value, true};
  }
};

// The places of a warp's part, 32 at a time.
struct Walk {
  i64 a, b, end;

  __device__ __forceinline__ Walk(const Lists& lists, i64 part) {
    const i64 start = part * PART;
    end = smaller(start + PART, lists.size_a + lists.size_b);
    a = lists.of_first(0, 0, start);
    b = start - a;
  }

  __device__ __forceinline__ bool more() const { return a + b < end; }

  // Gives whether this lane has a place, and goes on to the next 32.
  __device__ __forceinline__ bool next(const Lists& lists, Place& place) {
    const i64 ahead = smaller((i64)lane_of_thread(), end - a - b);
    const bool there = a + b + lane_of_thread() < end;
    place.a = a + lists.of_first(a, b, ahead);
    place.b = b + a + ahead - place.a;
    place.first = there && place.a < lists.size_a &&
                  (place.b >= lists.size_b || lists.indices_a[place.a] <= lists.indices_b[place.b]);
    const i64 taken_a = place.a + place.first, taken_b = place.b + (there && !place.first);
    a = __shfl_sync(ALL, taken_a, 31);
    b = __shfl_sync(ALL, taken_b, 31);
    return there;
  }
};

// How many elements of each part the result has; the block that ends last turns the sums of blocks into the numbers
// before each block.
extern "C" __global__ void __launch_bounds__(THREADS) count_parts(
    i64 operation, const u32* indices_a, const Word* values_a, i64 size_a, const u32* indices_b, const Word* values_b,
    i64 size_b, i64 parts, i64 room, u64* of_parts, u64* before, State* state) {
  const Lists lists{indices_a, values_a, size_a, indices_b, values_b, size_b};
  const i64 part = (i64)blockIdx.x * WARPS + warp_of_thread();
  u64 found = 0;
  if (part < parts) {
    for (Walk walk(lists, part); walk.more();) {
      Place place;
      if (walk.next(lists, place)) found += place.element(lists, operation).kept;
    }
  }
  const u64 of_part = warp_sum(found);
  if (lane_of_thread() == 0 && part < parts) of_parts[part] = of_part;
  const u64 of_block = block_sum(lane_of_thread() == 0 ? of_part : (u64)0);
  if (threadIdx.x == 0) before[blockIdx.x] = of_block;
  if (!ends_last(state, gridDim.x)) return;

  const u64 total = scan_blocks(before);
  if (threadIdx.x == 0) state->end = smaller(total, (u64)room);
}

// Writes what count_parts counted, each element to its place.
extern "C" __global__ void __launch_bounds__(THREADS) write_parts(
    i64 operation, const u32* indices_a, const Word* values_a, i64 size_a, const u32* indices_b, const Word* values_b,
    i64 size_b, i64 parts, i64 room, const u64* of_parts, const u64* before, u32* out_indices, Word* out_values) {
  const Lists lists{indices_a, values_a, size_a, indices_b, values_b, size_b};
  const int lane = lane_of_thread(), warp = warp_of_thread();
  const i64 part = (i64)blockIdx.x * WARPS + warp;
  if (part >= parts) return;
  u64 start = before[blockIdx.x] + warp_sum(lane < warp ? of_parts[part - warp + lane] : (u64)0);
  for (Walk walk(lists, part); walk.more();) {
    Place place;
    Element element{0, 0, false};
    if (walk.next(lists, place)) element = place.element(lists, operation);
    const u32 kept = __ballot_sync(ALL, element.kept);
    const u64 own = start + __popc(kept & ((1u << lane) - 1));
    if (element.kept && own < (u64)room) {
      out_indices[own] = element.index;
      out_values[own] = element.value;
    }
    start += __popc(kept);
  }
}

// Parts a selection by what count_tiles found of its values. A warp has a tile, and loads a number of strips before it
// writes: so it waits for memory once for all of them.
extern "C" __global__ void __launch_bounds__(THREADS) split_tiles(
    const u32* indices, const Word* values, i64 size, i64 tiles, const u64* of_tiles, const u64* before,
    const State* state, u32* kept_indices, Word* kept_values, i64 kept_room, u32* left_indices, Word* left_values,
    i64 left_room) {
  constexpr int STRIPS = 8;
  const Word limit = (Word)state->threshold;
  const u64 ties = state->ties;
  const int lane = lane_of_thread(), warp = warp_of_thread();
  const i64 tile = (i64)blockIdx.x * WARPS + warp;
  if (tile >= tiles) return;
  const u32 below = (1u << lane) - 1;
  const u64 both = before[blockIdx.x] + warp_sum(lane < warp ? of_tiles[tile - warp + lane] : (u64)0);
  u64 above = both >> 32, equal = both & 0xffffffffu;
  const i64 end = smaller((tile + 1) * TILE, size);
  for (i64 first = tile * TILE + lane; first - lane < end; first += 32 * STRIPS) {
    Word words[STRIPS];
    u32 own[STRIPS];
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
      const i64 i = first + 32 * s;
      words[s] = i < end ? values[i] : (Word)0;
      own[s] = i < end ? indices[i] : 0;
    }
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
      const i64 i = first + 32 * s;
      const bool there = i < end;
      const Word magnitude = words[s] & MASK;
      const u32 larger_ones = __ballot_sync(ALL, there && magnitude > limit);
      const u32 equal_ones = __ballot_sync(ALL, there && magnitude == limit);
      const u64 ties_before = equal + __popc(equal_ones & below);
      const u64 kept = above + __popc(larger_ones & below) + smaller(ties_before, ties);
      const u64 left = (u64)i - kept;
      if (there && (magnitude > limit || (magnitude == limit && ties_before < ties))) {
        if (kept < (u64)kept_room) {
          kept_indices[kept] = own[s];
          kept_values[kept] = words[s];
        }
      } else if (there && left < (u64)left_room) {
        left_indices[left] = own[s];
        left_values[left] = words[s];
      }
      above += __popc(larger_ones);
      equal += __popc(equal_ones);
    }
  }
}

// Products are rounded before they are subtracted: else what changes nothing would not give zero.
extern "C" __global__ void __launch_bounds__(THREADS) norm_change(
    const Real* array, i64 size, const u32* indices, i64 count, const Real* sent, Partials* partials) {
  double sum[1] = {};
  for (i64 j = (i64)blockIdx.x * THREADS + threadIdx.x; j < count; j += (i64)gridDim.x * THREADS) {
    const i64 index = indices[j];
    if (index >= size) continue;
    const double before = (double)array[index], after = before - (double)sent[j];
    sum[0] += product(after, after) - product(before, before);
  }
  finish_sums(sum, partials);
}
