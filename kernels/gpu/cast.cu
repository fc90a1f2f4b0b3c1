// 16-bit wires: rounding to nearest even, saturating, with what was lost at hand.

constexpr u32 SIGN = 0x80000000u;
constexpr u32 INFINITE_FLOAT = 0x7f800000u;
constexpr u32 NORMAL_HALF = 113u << 23;  // float32 bits of 2^-14, the smallest normal half
constexpr u32 ONE_HALF = 126u << 23;     // adding 0.5 rounds to a multiple of 2^-24, the step of subnormal halves

template <bool BF16>
__device__ __forceinline__ u16 half_of(u32 bits) {
  const u32 magnitude = bits & ~SIGN;
  if (BF16) {
    if (magnitude > INFINITE_FLOAT) return (u16)(bits >> 16 | 0x40);  // a NaN keeps a bit that says so
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

template <bool BF16>
__device__ __forceinline__ void narrow(const Word* array, i64 size, u16* out, Word* sent, Partials* partials) {
  double sum[1] = {};
  const bool even = aligned(array) && aligned(sent) && aligned_halves(out);
  for (i64 tile = blockIdx.x; tile * TILE < size; tile += gridDim.x) {
    const i64 first = tile * TILE + warp_of_thread() * WARP_TILE + lane_of_thread() * VEC;
    const bool packed = even && (tile + 1) * TILE <= size;
    Items items;
    load(items, array, first, size, packed);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      Halves halves;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const Real value = as_real(items.item[r][j]);
        halves.item[j] = half_of<BF16>(__float_as_uint(single_of(value)));
        const float seen = float_of<BF16>(halves.item[j]);
        const double error = (double)value - (double)seen;
        sum[0] += error * error;
        items.item[r][j] = as_word((Real)seen);
        if (!packed && first + r * STRIP + j < size) out[first + r * STRIP + j] = halves.item[j];
      }
      if (packed) *reinterpret_cast<Halves*>(out + first + r * STRIP) = halves;
    }
    if (sent) store(items, sent, first, size, packed);
  }
  finish_sums(sum, partials);
}

template <bool BF16, bool ADD>
__device__ __forceinline__ void widen(const u16* source, i64 size, Word* out) {
  const bool even = aligned(out) && aligned_halves(source);
  for (i64 tile = blockIdx.x; tile * TILE < size; tile += gridDim.x) {
    const i64 first = tile * TILE + warp_of_thread() * WARP_TILE + lane_of_thread() * VEC;
    const bool packed = even && (tile + 1) * TILE <= size;
    Items items;
    if (ADD) load(items, out, first, size, packed);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      Halves halves;
      if (packed) halves = *reinterpret_cast<const Halves*>(source + first + r * STRIP);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const i64 i = first + r * STRIP + j;
        if (!packed) halves.item[j] = i < size ? source[i] : (u16)0;
        const Real value = (Real)float_of<BF16>(halves.item[j]);
        items.item[r][j] = as_word(ADD ? as_real(items.item[r][j]) + value : value);
      }
    }
    store(items, out, first, size, packed);
  }
}

#define NARROW(NAME, BF16)                                                                        \
  extern "C" __global__ void __launch_bounds__(THREADS)                                           \
      NAME(const Word* array, i64 size, u16* out, Word* sent, Partials* partials) {               \
    narrow<BF16>(array, size, out, sent, partials);                                               \
  }
#define WIDEN(NAME, BF16, ADD)                                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME(const u16* source, i64 size, Word* out) { \
    widen<BF16, ADD>(source, size, out);                                                          \
  }

NARROW(narrow_fp16, false)
NARROW(narrow_bf16, true)
WIDEN(widen_fp16, false, false)
WIDEN(widen_bf16, true, false)
WIDEN(widen_add_fp16, false, true)
WIDEN(widen_add_bf16, true, true)
