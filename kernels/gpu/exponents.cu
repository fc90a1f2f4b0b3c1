// Nine bits an element: its sign, and the power of two to which its magnitude is rounded at random.

constexpr int FRACTION = 23;  // bits of a float32 behind its exponent
constexpr int SPARE = 9;      // bits of a random number that are too many
constexpr u32 INFINITE_FLOAT = 0x7f800000u;
constexpr u32 LARGEST_EXPONENT = 254, NO_EXPONENT = 255;

__device__ __forceinline__ float power_of(bool negative, u32 exponent) {
  return __uint_as_float((u32)negative << 31 | exponent << FRACTION);
}

extern "C" __global__ void __launch_bounds__(THREADS) pack_exponents(
    const Word* array, i64 size, i64 low, i64 high, u32* halves, i64 groups, u8* exponents, Word* sent,
    Partials* partials) {
  double sum[1] = {};
  // Words are written by halves, of which the lower one comes first.
  for (i64 g = (i64)blockIdx.x * WARPS + warp_of_thread(); g < groups; g += (i64)gridDim.x * WARPS) {
    const i64 i = 32 * g + lane_of_thread();
    const Word own = i < size ? array[i] : (Word)0;
    const bool negative = own & ~MASK;
    const u32 votes = __ballot_sync(ALL, negative);
    if (lane_of_thread() == 0) halves[g] = votes;
    if (i >= size) continue;
    const u32 magnitude = __float_as_uint(single_of(as_real(own & MASK)));
    u32 exponent = NO_EXPONENT;
    if (magnitude < INFINITE_FLOAT) {
      const u32 added = draw((u32)i, (u32)low, (u32)high) >> SPARE;  // carries into the exponent
      exponent = smaller((magnitude + added) >> FRACTION, LARGEST_EXPONENT);
    }
    const float seen = power_of(negative, exponent);
    const double missed = (double)as_real(own) - (double)seen;
    exponents[i] = (u8)exponent;
    sent[i] = as_word((Real)seen);
    sum[0] += missed * missed;
  }
  finish_sums(sum, partials);
}

template <bool ADD>
__device__ __forceinline__ void unpack(const u64* words, const u8* exponents, Real share, Word* out, i64 size) {
  const i64 step = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < size; i += step) {
    const Real value = (Real)power_of(words[i / 64] >> (i % 64) & 1, exponents[i]);
    out[i] = as_word(ADD ? as_real(out[i]) + product(share, value) : value);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    unpack_exponents(const u64* words, const u8* exponents, Word* out, i64 size) {
  unpack<false>(words, exponents, (Real)1, out, size);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    unpack_exponents_add(const u64* words, const u8* exponents, double factor, Word* out, i64 size) {
  unpack<true>(words, exponents, (Real)factor, out, size);
}
