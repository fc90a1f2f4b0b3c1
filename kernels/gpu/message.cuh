// Parts of messages: headers, and the Elias-Fano code of ascending indices; it follows sums.cuh where a source needs it.

[[maybe_unused]] constexpr u64 NONFINITE = 1ull << 8;
[[maybe_unused]] constexpr i64 HEADER_WORDS = 3;

// `left` is the energy that was not selected, which rounding may have made negative. NaN stays.
DEVICE void set_header(u64* words, i64 lead, bool finite, double energy, double left, double rounding) {
  words[0] = (u64)lead | (finite ? 0 : NONFINITE);
  words[1] = as_word(energy);
  words[2] = as_word((left < 0 ? 0.0 : left) + rounding);
}

// Whether one of this thread's indices is not above the one before it, or not below `numel`.
DEVICE bool out_of_order(const u32* indices, i64 count, i64 numel) {
  bool wrong = false;
  for (const i64 j : grid_stride(count)) {
    const u32 index = indices[j];
    wrong |= (i64)index >= numel || (j > 0 && indices[j - 1] >= index);
  }
  return wrong;
}

// Low bits of an index, and words of low parts and of the bitmap; see `layout_of` in sizes.py.
struct CodeShape {
  i64 bits, low, upper;
};

DEVICE CodeShape code_shape(i64 count, i64 numel) {
  if (count == 0) return {0, 0, 0};
  i64 bits = 0;
  while (numel / count >> (bits + 1)) ++bits;
  return {bits, (count * bits + 63) / 64, (count + ((numel - 1) >> bits) + 64) / 64};
}

// Sets the bits of the j-th index, in words that were zero before the launch.
DEVICE void add_to_code(u64* words, const CodeShape& shape, u64 j, u64 index) {
  const u64 at = j * shape.bits, shift = at & 63, part = index & (((u64)1 << shape.bits) - 1);
  const u64 high = 64 * shape.low + (index >> shape.bits) + j;
  if (shape.bits > 0) atomicOr(&words[at >> 6], part << shift);
  if (shift + shape.bits > 64) atomicOr(&words[(at >> 6) + 1], part >> (64 - shift));
  atomicOr(&words[high >> 6], (u64)1 << (high & 63));
}
