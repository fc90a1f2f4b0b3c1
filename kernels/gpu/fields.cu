// Integers in fields of 64-bit words, wide enough that sums over ranks stay in their fields: see the CPU's fields.py.
// A thread has a word, so that neighbouring threads read neighbouring elements, field by field.

constexpr i64 SPAN = 256;  // words of a block, the last one is shorter

// Places of a word's elements: the first one, and the distance to the next.
struct Places {
  i64 first, distance;
};

DEVICE Places places_of(i64 word, i64 words, i64 fields) {
  const i64 start = word / SPAN * SPAN;
  return {start * fields + word - start, smaller(SPAN, words - start)};
}

// Calls `visit` with the place of each element of a word and the lowest bit of its field.
template <typename F>
DEVICE void for_each_field(i64 word, i64 words, i64 fields, i64 width, i64 size, F visit) {
  const Places places = places_of(word, words, fields);
  for (i64 field = 0; field < fields; ++field) {
    const i64 i = places.first + field * places.distance;
    if (i >= size) break;
    visit(i, field * width);
  }
}

// From 0 to below 1.
DEVICE float share_of(u32 index, u32 low, u32 high) {
  return (float)(draw(index, low, high) >> 8) * 5.9604644775390625e-8f;
}

KERNEL pack_fields(
    const Word* array, i64 size, const u8* levels, const Word* inverses, const Word* steps, i64 limit, i64 fields,
    i64 width, i64 random, i64 low, i64 high, u64* words, i64 count, Word* sent, Partials* partials) {
  const Real end = (Real)limit;
  double sum[1] = {};
  for (const i64 w : grid_stride(count)) {
    const Places places = places_of(w, count, fields);
    u64 word = 0;
    i64 i = places.first;
    for (i64 shift = 0; shift < fields * width && i < size; shift += width, i += places.distance) {
      const int level = levels ? levels[i] : 0;
      const Real step = as_real(steps[level]), exact = as_real(array[i]) * as_real(inverses[level]);
      Real inside = exact > -end ? exact : -end;  // NaN too
      inside = inside < end ? inside : end;
      Real whole = rint(inside);
      if (random) {
        whole = floor(inside);
        if (inside - whole > (Real)share_of((u32)i, (u32)low, (u32)high)) whole += 1;
      }
      word |= (u64)((i64)whole + limit) << shift;
      const double error = ((double)exact - (double)whole) * (double)step;
      sum[0] += error * error;
      sent[i] = as_word(whole * step);
    }
    words[w] = word;
  }
  finish_sums(sum, partials);
}

KERNEL unpack_fields(
    const u64* words, i64 count, const u8* levels, const Word* factors, i64 offset, i64 fields, i64 width, Word* out,
    i64 size) {
  const u64 mask = ((u64)1 << width) - 1;
  for (const i64 w : grid_stride(count)) {
    const u64 word = words[w];
    for_each_field(w, count, fields, width, size, [&](i64 i, i64 shift) {
      const i64 total = (i64)(word >> shift & mask) - offset;
      out[i] = as_word((Real)total * as_real(factors[levels ? levels[i] : 0]));
    });
  }
}

KERNEL pack_out_of_range(
    const Word* array, i64 size, double inverse, i64 limit, i64 fields, i64 width, u64* words, i64 count) {
  const Real factor = (Real)inverse, end = (Real)limit;
  for (const i64 w : grid_stride(count)) {
    const Places places = places_of(w, count, fields);
    u64 word = 0;
    for (i64 field = 0; field < fields; ++field) {
      const i64 i = places.first + field * places.distance;
      if (i >= size) break;
      const Real exact = as_real(array[i]) * factor;
      word |= (u64) !(exact >= -end && exact <= end) << (field * width);
    }
    words[w] = word;
  }
}

KERNEL resolve_levels(const u64* words, i64 count, i64 fields, i64 width, i64 level, u8* levels, i64 size) {
  const u64 mask = ((u64)1 << width) - 1;
  for (const i64 w : grid_stride(count)) {
    const u64 word = words[w];
    for_each_field(w, count, fields, width, size, [&](i64 i, i64 shift) {
      if ((word >> shift & mask) == 0) levels[i] = (u8)level;
    });
  }
}
