// Concatenation of scattered pieces of an array.

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
