// Pieces of an array that lie here and there, put one behind the other.

enum Kind { AS_OUT = 0, FP16 = 1, BF16 = 2 };

// The host fills them in, by their place.
struct Piece {
  u64 address;
  i64 start;  // its place in the output; the piece ends where the next one starts
  i64 kind;
};

// The piece that has an element: the last one that does not start behind it, since empty ones start where the next does.
__device__ __forceinline__ i64 piece_of(const Piece* pieces, i64 number, i64 i) {
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

__device__ __forceinline__ Word widened(i64 kind, u16 half) {
  return as_word((Real)(kind == FP16 ? float_of<false>(half) : float_of<true>(half)));
}

__device__ __forceinline__ Word scaled(Word word, Real by) {
  return by == 1 ? word : as_word(product(by, as_real(word)));
}

// A warp writes its part of a tile 16 bytes a lane where that lies in one piece and addresses allow it, otherwise an
// element a lane.
extern "C" __global__ void __launch_bounds__(THREADS)
    concatenate(const Piece* pieces, i64 number, const double* scale, double scale_value, Word* out, i64 size) {
  const Real by = (Real)given(scale, scale_value);
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
    const i64 first = lane_of_thread() * VEC;
    Items items;
    if (piece.kind == AS_OUT) {
      load(items, words, first, WARP_TILE, true);
    } else {
#pragma unroll
      for (int r = 0; r < ROUNDS; ++r) {
        const Halves pack = *reinterpret_cast<const Halves*>(halves + first + r * STRIP);
#pragma unroll
        for (int j = 0; j < VEC; ++j) items.item[r][j] = widened(piece.kind, pack.item[j]);
      }
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) items.item[r][j] = scaled(items.item[r][j], by);
    }
    store(items, out + start, first, WARP_TILE, true);
  }
}
