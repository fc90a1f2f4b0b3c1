// Nine bits an element: its sign, and the power of two to which its magnitude is rounded at random.

constexpr u32 LARGEST_EXPONENT = 254, NO_EXPONENT = 255;

DEVICE float power_of(bool negative, u32 exponent) {
  return __uint_as_float((u32)negative << 31 | exponent << FRACTION);
}

KERNEL pack_exponents(
    const Word* array, i64 size, i64 low, i64 high, u32* halves, i64 groups, u8* exponents, Word* sent,
    Partials* partials) {
  double sum[1] = {};
  // Words are written by halves, of which the lower one comes first.
  for (const i64 g : warp_stride(groups)) {
    const i64 i = 32 * g + lane_of_thread();
    const Word word = i < size ? array[i] : (Word)0;
    const bool negative = word & ~MASK;
    const u32 votes = __ballot_sync(ALL, negative);
    if (lane_of_thread() == 0) halves[g] = votes;
    if (i >= size) continue;
    const u32 magnitude = __float_as_uint(single_of(as_real(word & MASK)));
    u32 exponent = NO_EXPONENT;
    if (magnitude < INFINITE_FLOAT) {
      const u32 added = draw((u32)i, (u32)low, (u32)high) >> SPARE;  // carries into the exponent
      exponent = smaller((magnitude + added) >> FRACTION, LARGEST_EXPONENT);
    }
    const float rounded = power_of(negative, exponent);
    const double error = (double)as_real(word) - (double)rounded;
    exponents[i] = (u8)exponent;
    sent[i] = as_word((Real)rounded);
    sum[0] += error * error;
  }
  finish_sums(sum, partials);
}

template <bool ADD>
DEVICE void unpack(const u64* words, const u8* exponents, Real share, Word* out, i64 size) {
  for (const i64 i : grid_stride(size)) {
    const Real value = (Real)power_of(words[i / 64] >> (i % 64) & 1, exponents[i]);
    out[i] = as_word(ADD ? as_real(out[i]) + product(share, value) : value);
  }
}

KERNEL unpack_exponents(const u64* words, const u8* exponents, Word* out, i64 size) {
  unpack<false>(words, exponents, (Real)1, out, size);
}

KERNEL unpack_exponents_add(const u64* words, const u8* exponents, double factor, Word* out, i64 size) {
  unpack<true>(words, exponents, (Real)factor, out, size);
}
