// One bit an element: its sign, with one magnitude for each block of elements, or as a vote.

constexpr int SIGN_PLACE = 8 * (int)sizeof(Word) - 1;

// A block of threads goes through a block of elements twice: for sums with the residual and their mean, and for signs.
// The sums lie in `left` in between, where a thread reads its writes only. Columns of sums: nonzero elements,
// sum of magnitudes, energy, and the energy that the message lacks.
KERNEL_OF(3) pack_signs(
    const Word* array, const Piece* pieces, i64 number, double factor, const Word* residual, i64 size, i64 block,
    float* scales, i64 blocks, u32* halves, Word* sent, Word* left, Partials* partials) {
  const Real by = (Real)factor;
  const Word* sums = left ? left : array;
  double sum[4] = {};
  u64 nonzero = 0;
  Word top = 0;
  for (i64 b = blockIdx.x; b < blocks; b += gridDim.x) {
    const i64 start = b * block, stop = smaller(start + block, size), length = stop - start;
    const double share = 1 / (double)length;
    double total = 0, energy = 0;
    i64 p = pieces ? piece_of(pieces, number, start) : 0;
    for (i64 i = start + threadIdx.x; i < stop; i += THREADS) {
      Word word = scaled(pieces ? word_in(pieces, p, i) : array[i], by);
      if (residual) word = as_word(as_real(word) + as_real(residual[i]));
      if (left) left[i] = word;
      const double magnitude = (double)as_real(word & MASK);
      total += magnitude;
      energy += magnitude * magnitude;
      nonzero += (word & MASK) != 0;
      top = larger(top, word & MASK);
    }
    sum[1] += total;
    sum[2] += energy;
    total = block_sum(total);
    energy = block_sum(energy);
    double mean = total * share;
    if (!is_number(mean)) {  // the sum may overflow a double, which the mean cannot
      mean = 0;
      for (i64 i = start + threadIdx.x; i < stop; i += THREADS) mean += (double)as_real(sums[i] & MASK) * share;
      mean = block_sum(mean);
    }
    const float single = single_of(mean);
    if (threadIdx.x == 0) {
      const double wide = (double)single, missed = energy - wide * (2 * total - (double)length * wide);
      scales[b] = single;
      if (!(missed < 0)) sum[3] += missed;  // both were rounded; NaN stays
    }
    // Words are written by halves, of which the lower one comes first.
    const i64 groups = 2 * ((length + 63) / 64);
    for (i64 g = warp_of_thread(); g < groups; g += WARPS) {
      const i64 i = start + 32 * g + lane_of_thread();
      const Word word = i < stop ? sums[i] : 0;
      const bool negative = word >> SIGN_PLACE;
      const u32 votes = __ballot_sync(ALL, negative);
      if (lane_of_thread() == 0) halves[start / 32 + g] = votes;
      const Real value = (Real)(negative ? -single : single);
      if (sent && i < stop) sent[i] = as_word(value);
      if (left && i < stop) left[i] = as_word(as_real(word) - value);
    }
  }
  sum[0] = (double)nonzero;
  finish_sums_and_top<4, true>(sum, top, partials);
}

DEVICE Real signed_value(const u64* words, i64 i, Real value) { return words[i / 64] >> (i % 64) & 1 ? -value : value; }

KERNEL unpack_signs(const float* scales, const u64* words, i64 block, Word* out, i64 size) {
  for (const i64 i : grid_stride(size)) out[i] = as_word(signed_value(words, i, (Real)scales[i / block]));
}

// A row begins `scale_stride` floats and `word_stride` words after the one before. They are added to zeros if `afresh`.
KERNEL unpack_signs_add(
    const float* scales, i64 scale_stride, const u64* words, i64 word_stride, i64 rows, i64 block, double factor,
    i64 afresh, Word* out, i64 size) {
  for (const i64 i : grid_stride(size)) {
    Real sum = afresh ? (Real)0 : as_real(out[i]);
    for (i64 row = 0; row < rows; ++row) {
      const Real value = (Real)product(factor, (double)scales[row * scale_stride + i / block]);
      sum += signed_value(words + row * word_stride, i, value);
    }
    out[i] = as_word(sum);
  }
}

// Signs alone.

KERNEL pack_votes(const Word* array, i64 size, u32* halves, i64 groups) {
  // Words are written by halves, of which the lower one comes first.
  for (const i64 g : warp_stride(groups)) {
    const i64 i = 32 * g + lane_of_thread();
    const u32 votes = __ballot_sync(ALL, i < size && (array[i] & ~MASK));
    if (lane_of_thread() == 0) halves[g] = votes;
  }
}

KERNEL unpack_votes(const u64* words, double value, Word* out, i64 size) {
  const Real magnitude = (Real)value;
  for (const i64 i : grid_stride(size)) {
    out[i] = as_word(words[i / 64] >> (i % 64) & 1 ? -magnitude : magnitude);
  }
}
