// Concatenation of scattered pieces of an array, and of scattered numbers.

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
        out[i] = scaled(word_in(pieces, p, i), by);
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
