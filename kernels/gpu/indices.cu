// Elias-Fano code of ascending indices: see the CPU's indices.py.

DEVICE i64 ones(u64 word) { return __popc((u32)word) + __popc((u32)(word >> 32)); }
DEVICE i64 first_one(u64 word) { return ones(~word & (word - 1)); }

KERNEL ascending(const u32* indices, i64 count, i64 numel, Verdict* verdict) {
  bool wrong = out_of_order(indices, count, numel);
  gather_faults(wrong, verdict);
}

// The words of the code are zero before. Indices are not known to be right: where they are not, the block that ends last
// clears the code.
KERNEL encode(
    const u32* indices, i64 count, i64 numel, i64 bits, i64 low, i64 upper, u64* code, Verdict* verdict) {
  for (const i64 j : grid_stride(count)) {
    if ((i64)indices[j] < numel) add_to_code(code, {bits, low, upper}, (u64)j, indices[j]);
  }
  bool wrong = out_of_order(indices, count, numel);
  if (!gather_faults(wrong, verdict)) return;
  for (i64 w = threadIdx.x; wrong && w < low + upper; w += THREADS) code[w] = 0;
}

// One of several codes. The host names the fields by their place.
struct Code {
  i64 start;  // its first word
  i64 count;  // how many indices it has
  i64 bits;   // low bits of an index
  i64 low;    // words of low parts
  i64 upper;  // words of the bitmap
  i64 first;  // where the indices go
};

// The low part of the j-th index. Its second word may be the bitmap's first one: it never lies past the code, and
// without low parts both places are 0.
DEVICE u64 low_part(const u64* words, i64 bits, i64 j) {
  const i64 at = j * bits, place = at >> 6, shift = at & 63;
  const u64 both = words[place] >> shift | words[place + (bits > 0)] << 1 << (63 - shift);
  return both & (((u64)1 << bits) - 1);
}

// A block has a code. Without a table all codes have the same shape and are `step` words apart.
KERNEL decode(
    const u64* messages, i64 codes, const Code* table, i64 start, i64 step, i64 count, i64 bits, i64 low, i64 upper,
    i64 numel, u32* out, Verdict* verdict) {
  bool wrong = false;
  if (blockIdx.x < codes) {
    const i64 c = blockIdx.x;
    const Code code = table ? table[c] : Code{start + c * step, count, bits, low, upper, c * count};
    const u64* words = messages + code.start;
    const u64* bitmap = words + code.low;
    i64 before = 0;
    for (i64 base = 0; base < code.upper; base += THREADS) {
      const i64 w = base + threadIdx.x;
      u64 word = w < code.upper ? bitmap[w] : 0, total;
      i64 j = before + (i64)block_scan((u64)ones(word), total);
      before += (i64)total;
      if (before > code.count) break;  // on all threads
      // Bits after a set bit: the high part is that of the index before, whose low part has to be smaller.
      const u64 follows = word << 1 | (word && w > 0 ? bitmap[w - 1] >> 63 : 0);
      for (; word; word &= word - 1, ++j) {
        const i64 bit = first_one(word);
        const u64 part = low_part(words, code.bits, j);
        const u64 index = (u64)(64 * w + bit - j) << code.bits | part;
        wrong |= index >= (u64)numel || ((follows >> bit & 1) && low_part(words, code.bits, j - 1) >= part);
        out[code.first + j] = (u32)index;
      }
    }
    wrong |= before != code.count;
  }
  gather_faults(wrong, verdict);
}
