// Words of an Elias-Fano code, of which a thread computes one; it follows sums.cuh where a source writes codes.

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

// The word of the low parts that begins at bit `start`.
DEVICE u64 word_of_low_parts(const u32* indices, i64 count, i64 bits, i64 start) {
  const u64 mask = ((u64)1 << bits) - 1;
  u64 word = 0;
  for (i64 j = start / bits; j < count && j * bits < start + 64; ++j) {
    const u64 part = indices[j] & mask;
    const i64 place = j * bits - start;
    word |= place < 0 ? part >> -place : part << place;
  }
  return word;
}

// The word of the bitmap that begins at bit `start`; meaningless where indices do not ascend.
DEVICE u64 word_of_bitmap(const u32* indices, i64 count, i64 bits, i64 start) {
  i64 least = 0, most = count;  // the first index whose bit is not before this word
  while (least < most) {
    const i64 middle = (least + most) / 2;
    if (((i64)indices[middle] >> bits) + middle < start)
      least = middle + 1;
    else
      most = middle;
  }
  u64 word = 0;
  for (i64 j = least; j < smaller(count, least + 64); ++j) {
    const i64 place = ((i64)indices[j] >> bits) + j - start;
    if (place < 0 || place >= 64) break;
    word |= (u64)1 << place;
  }
  return word;
}

DEVICE u64 word_of_code(const u32* indices, i64 count, const CodeShape& shape, i64 w) {
  return w < shape.low ? word_of_low_parts(indices, count, shape.bits, 64 * w)
                       : word_of_bitmap(indices, count, shape.bits, 64 * (w - shape.low));
}
