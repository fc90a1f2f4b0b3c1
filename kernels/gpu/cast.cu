// 16-bit wires: rounding to nearest even, saturating, with the rounding error.

constexpr u32 SIGN = 0x80000000u;
constexpr u32 NORMAL_HALF = 113u << 23;  // float32 bits of 2^-14, the smallest normal half
constexpr u32 ONE_HALF = 126u << 23;     // adding 0.5 rounds to a multiple of 2^-24, the step of subnormal halves

template <Stored WIRE>
DEVICE u16 half_of(u32 bits) {
  const u32 magnitude = bits & ~SIGN;
  if (WIRE == BF16) {
    if (magnitude > INFINITE_FLOAT) return (u16)(bits >> 16 | 0x40);  // NaN keeps a bit of its fraction
    const u32 half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const bool overflow = magnitude < INFINITE_FLOAT && (half & 0x7fff) == 0x7f80;
    return (u16)(overflow ? half - 1 : half);
  }
  u32 half;
  if (magnitude >= INFINITE_FLOAT) {
    half = magnitude > INFINITE_FLOAT ? 0x7e00 : 0x7c00;
  } else if (magnitude < NORMAL_HALF) {
    half = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - ONE_HALF;
  } else {
    half = smaller((magnitude - BIASES + 0xfff + (magnitude >> 13 & 1)) >> 13, 0x7bffu);
  }
  return (u16)(half | (bits & SIGN) >> 16);
}

template <Stored WIRE>
DEVICE void narrow(const Word* array, i64 size, u16* out, Word* sent, Partials* partials) {
  double sum[1] = {};
  for (const Tile tile : each_tile(size, aligned(array, sent) && aligned_halves(out))) {
    Items items = load(array, tile);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      Halves halves;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const int n = r * VEC + j;
        const Real value = as_real(items.item[n]);
        halves.item[j] = half_of<WIRE>(__float_as_uint(single_of(value)));
        const float rounded = float_of<WIRE>(halves.item[j]);
        const double error = (double)value - (double)rounded;
        sum[0] += error * error;
        items.item[n] = as_word((Real)rounded);
        if (!tile.packed && tile.index(n) < size) out[tile.index(n)] = halves.item[j];
      }
      if (tile.packed) *reinterpret_cast<Halves*>(out + tile.index(r * VEC)) = halves;
    }
    if (sent) store(items, sent, tile);
  }
  finish_sums(sum, partials);
}

template <Stored WIRE, bool ADD>
DEVICE void widen(const u16* source, i64 size, Word* out) {
  for (const Tile tile : each_tile(size, aligned(out) && aligned_halves(source))) {
    Items items;
    if (ADD) items = load(out, tile);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      Halves halves;
      if (tile.packed) halves = *reinterpret_cast<const Halves*>(source + tile.index(r * VEC));
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const int n = r * VEC + j;
        if (!tile.packed) halves.item[j] = tile.index(n) < size ? source[tile.index(n)] : (u16)0;
        const Real value = (Real)float_of<WIRE>(halves.item[j]);
        items.item[n] = as_word(ADD ? as_real(items.item[n]) + value : value);
      }
    }
    store(items, out, tile);
  }
}

#define NARROW(NAME, WIRE)                                                             \
  KERNEL NAME(const Word* array, i64 size, u16* out, Word* sent, Partials* partials) { \
    narrow<WIRE>(array, size, out, sent, partials);                                    \
  }
#define WIDEN(NAME, WIRE, ADD) \
  KERNEL NAME(const u16* source, i64 size, Word* out) { widen<WIRE, ADD>(source, size, out); }

NARROW(narrow_fp16, FP16)
NARROW(narrow_bf16, BF16)
WIDEN(widen_fp16, FP16, false)
WIDEN(widen_bf16, BF16, false)
WIDEN(widen_add_fp16, FP16, true)
WIDEN(widen_add_bf16, BF16, true)
