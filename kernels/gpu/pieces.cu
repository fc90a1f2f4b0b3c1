// Concatenation of scattered pieces of an array, and of scattered numbers.

// The host fills the fields in, by their place.
struct Piece {
  u64 address;
  i64 start;  // its place in the output; the piece ends where the next one starts
  i64 kind;   // Stored
};

// The piece that has an element: the last one that does not start after it, since empty pieces start where the next
// does.
DEVICE i64 piece_of(const Piece* pieces, i64 number, i64 i) {
  i64 low = 0, high = number - 1;
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    if (pieces[middle].start <= i)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

DEVICE Word widened(i64 kind, u16 half) {
  return as_word((Real)(kind == FP16 ? float_of<FP16>(half) : float_of<BF16>(half)));
}

DEVICE Word scaled(Word word, Real by) { return by == 1 ? word : as_word(product(by, as_real(word))); }

// A warp writes its part of a tile by 16 bytes a lane where it lies in one aligned piece, otherwise by an element a
// lane.
KERNEL concatenate(const Piece* pieces, i64 number, const double* scale, double scale_value, Word* out, i64 size) {
  const Real by = (Real)scalar_arg(scale, scale_value);
  const i64 step = (i64)gridDim.x * TILE;
  for (i64 start = (i64)blockIdx.x * TILE + warp_of_thread() * WARP_TILE; start < size; start += step) {
    i64 p = piece_of(pieces, number, start);
    const Piece piece = pieces[p];
    const Word* words = reinterpret_cast<const Word*>(piece.address) + (start - piece.start);
    const u16* halves = reinterpret_cast<const u16*>(piece.address) + (start - piece.start);
    const bool whole = start + WARP_TILE <= pieces[p + 1].start && aligned(out);
    if (!whole || !(piece.kind == AS_OUT ? aligned(words) : aligned_halves(halves))) {
      for (i64 i = start + lane_of_thread(); i < smaller(start + WARP_TILE, size); i += 32) {
        while (i >= pieces[p + 1].start) ++p;
        const u64 address = pieces[p].address;
        const i64 kind = pieces[p].kind, j = i - pieces[p].start;
        out[i] = scaled(
            kind == AS_OUT ? reinterpret_cast<const Word*>(address)[j]
                           : widened(kind, reinterpret_cast<const u16*>(address)[j]),
            by);
      }
      continue;
    }
    const Tile tile{0, lane_of_thread() * VEC, WARP_TILE, true};
    Items items;
    if (piece.kind == AS_OUT) {
      items = load(words, tile);
    } else {
#pragma unroll
      for (int r = 0; r < ROUNDS; ++r) {
        const Halves pack = *reinterpret_cast<const Halves*>(halves + tile.index(r * VEC));
#pragma unroll
        for (int j = 0; j < VEC; ++j) items.item[r * VEC + j] = widened(piece.kind, pack.item[j]);
      }
    }
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) items.item[n] = scaled(items.item[n], by);
    store(items, out + start, tile);
  }
}

// Gathers scattered numbers into one array, a number in each thread. Byte n of `widths` is the width of the n-th in
// bytes: 1, 4 or 8.
KERNEL collect(
    const void* a, const void* b, const void* c, const void* d, const void* e, const void* f, const void* g,
    const void* h, i64 widths, i64 number, u64* out) {
  const int n = threadIdx.x;
  if (n >= number) return;
  // Comparisons, since an array indexed by a variable would lie in memory.
  const void* source = n == 0 ? a : n == 1 ? b : n == 2 ? c : n == 3 ? d : n == 4 ? e : n == 5 ? f : n == 6 ? g : h;
  const int width = (int)(widths >> (8 * n) & 255);
  if (width == 1)
    out[n] = *static_cast<const u8*>(source);
  else if (width == 4)
    out[n] = *static_cast<const u32*>(source);
  else
    out[n] = *static_cast<const u64*>(source);
}
