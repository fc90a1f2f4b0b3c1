// Sorted selections: sum, difference, intersection, and their largest elements.
//
// The elements of two lists are merged in the order of their indices, with those of the first list first where indices
// are equal. A warp has PART places of that order and works on 32 at a time: each lane finds by bisection how many of
// the elements before its place are the first list's. Where lists do not ascend the result means nothing, but all
// accesses stay inside the lists.

constexpr int PART = 256;

enum Operation { ADD = 0, SUBTRACT = 1, COMMON = 2 };

struct Lists {
  const u32* indices_a;
  const Word* values_a;
  i64 size_a;
  const u32* indices_b;
  const Word* values_b;
  i64 size_b;

  // Number of the first list's elements among the first `taken` ones after `a` and `b`.
  DEVICE i64 of_first(i64 a, i64 b, i64 taken) const {
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

  // Adding zero, as the CPU does until one list ends, makes a negative zero positive.
  static DEVICE Word plus_zero(Word word) { return word & MASK ? word : 0; }

  DEVICE Element element(const Lists& lists, i64 operation) const {
    if (first) {
      const Element only_a{lists.indices_a[a], lists.values_a[a], operation != COMMON};
      if (b >= lists.size_b) return only_a;
      if (lists.indices_b[b] != only_a.index) {
        if (operation != ADD) return only_a;
        return {only_a.index, plus_zero(only_a.value), true};
      }
      if (operation == COMMON) return {only_a.index, only_a.value, true};
      const Real value = as_real(only_a.value), other = as_real(lists.values_b[b]);
      if (operation == ADD) return {only_a.index, as_word(value + other), true};
      const Real difference = value - other;
      return {only_a.index, as_word(difference), difference != 0};
    }
    const u32 index = lists.indices_b[b];
    // The first list's element of this index, which was taken just before, has the value of both.
    if (operation == COMMON || (a > 0 && lists.indices_a[a - 1] == index)) return {index, 0, false};
    const Word value = lists.values_b[b];
    if (operation == SUBTRACT) return {index, value ^ (Word)~MASK, (value & MASK) != 0};
    return {index, a < lists.size_a ? plus_zero(value) : value, true};
  }
};

// The places of a warp's part, 32 at a time.
struct Walk {
  i64 a, b, end;

  DEVICE Walk(const Lists& lists, i64 part) {
    const i64 start = part * PART;
    end = smaller(start + PART, lists.size_a + lists.size_b);
    a = lists.of_first(0, 0, start);
    b = start - a;
  }

  DEVICE bool more() const { return a + b < end; }

  // Advances to the next 32 places; returns whether this lane has one.
  DEVICE bool next(const Lists& lists, Place& place) {
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

// Counts the elements of each part of the result; the block that ends last turns the sums of blocks into the numbers
// before each block.
KERNEL count_parts(
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
  u64 total;
  if (count_before(warp_sum(found), part, parts, of_parts, before, state, total) && threadIdx.x == 0)
    state->end = smaller(total, (u64)room);
}

// Writes the elements that count_parts counted, each to its place.
KERNEL write_parts(
    i64 operation, const u32* indices_a, const Word* values_a, i64 size_a, const u32* indices_b, const Word* values_b,
    i64 size_b, i64 parts, i64 room, const u64* of_parts, const u64* before, u32* out_indices, Word* out_values) {
  const Lists lists{indices_a, values_a, size_a, indices_b, values_b, size_b};
  const i64 part = (i64)blockIdx.x * WARPS + warp_of_thread();
  if (part >= parts) return;
  u64 start = elements_before(part, of_parts, before);
  for (Walk walk(lists, part); walk.more();) {
    Place place;
    Element element{0, 0, false};
    if (walk.next(lists, place)) element = place.element(lists, operation);
    const u32 kept = __ballot_sync(ALL, element.kept);
    const u64 at = start + __popc(kept & ((1u << lane_of_thread()) - 1));
    if (element.kept && at < (u64)room) {
      out_indices[at] = element.index;
      out_values[at] = element.value;
    }
    start += __popc(kept);
  }
}

// Splits a selection by the counts of its values from count_tiles. A warp has a tile, and loads several strips before
// it writes, to wait for memory once for all of them.
KERNEL split_tiles(
    const u32* indices, const Word* values, i64 size, i64 tiles, const u64* of_tiles, const u64* before,
    const State* state, u32* kept_indices, Word* kept_values, i64 kept_room, u32* left_indices, Word* left_values,
    i64 left_room) {
  constexpr int STRIPS = 8;
  const int lane = lane_of_thread();
  const i64 tile = (i64)blockIdx.x * WARPS + warp_of_thread();
  if (tile >= tiles) return;
  Selection selection(state, elements_before(tile, of_tiles, before));
  const i64 end = smaller((tile + 1) * TILE, size);
  for (i64 first = tile * TILE + lane; first - lane < end; first += 32 * STRIPS) {
    Word words[STRIPS];
    u32 places[STRIPS];
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
      const i64 i = first + 32 * s;
      words[s] = i < end ? values[i] : (Word)0;
      places[s] = i < end ? indices[i] : 0;
    }
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
      const i64 i = first + 32 * s;
      u64 kept;
      const bool selected = selection.next(words[s] & MASK, i < end, kept);
      const u64 left = (u64)i - kept;
      if (selected) {
        if (kept < (u64)kept_room) {
          kept_indices[kept] = places[s];
          kept_values[kept] = words[s];
        }
      } else if (i < end && left < (u64)left_room) {
        left_indices[left] = places[s];
        left_values[left] = words[s];
      }
    }
  }
}

// Products are rounded before they are subtracted, so that an unchanged element contributes exactly zero.
KERNEL norm_change(const Real* array, i64 size, const u32* indices, i64 count, const Real* sent, Partials* partials) {
  double sum[1] = {};
  for (const i64 j : grid_stride(count)) {
    const i64 index = indices[j];
    if (index >= size) continue;
    const double before = (double)array[index], after = before - (double)sent[j];
    sum[0] += product(after, after) - product(before, before);
  }
  finish_sums(sum, partials);
}
