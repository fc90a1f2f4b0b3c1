// A few bits an element: its place on a grid of equal steps, one grid for each bucket of elements.
//
// Codes travel in bit planes: for every 64 codes one word a bit, that of the lowest bit first. A warp has 32 codes,
// half a word in every plane, the lower half first.

// A place has FRACTION bits after its point; its sign and 8 bits before the point fill an int.
constexpr int ONE = 1 << FRACTION;

// 0 where the inverse is too large: every element then has the code of the offset.
DEVICE Real inverse_of(float step) {
  const Real inverse = step > 0 ? (Real)1 / (Real)step : (Real)0;
  return is_number(inverse) ? inverse : (Real)0;
}

// Integers that order like the numbers, with NaN at both ends.
DEVICE Word rank_of(Word word) { return word & ~MASK ? ~word : word | ~MASK; }
DEVICE Word word_of(Word rank) { return rank & ~MASK ? rank & MASK : ~rank; }

// A warp has a bucket.
KERNEL measure_norms(const Word* array, i64 size, i64 bucket, i64 euclidean, i64 points, float* steps, i64 buckets) {
  for (const i64 b : warp_stride(buckets)) {
    const i64 stop = smaller((b + 1) * bucket, size);
    Word top = 0;
    double energy = 0;
    for (i64 i = b * bucket + lane_of_thread(); i < stop; i += 32) {
      const Word magnitude = array[i] & MASK;
      const double value = (double)as_real(magnitude);
      top = larger(top, magnitude);
      energy += value * value;
    }
    // The largest magnitude tells whether all are finite: in float64 a sum of squares of finite values may overflow.
    top = warp_max(top);
    energy = warp_sum(energy);
    const double norm = euclidean ? sqrt(energy) : (double)as_real(top);
    if (lane_of_thread() == 0)
      steps[b] = top < INFINITE ? (float)(smaller(norm, LARGEST_LEVEL) / (double)points) : as_real(NAN_FLOAT);
  }
}

// A warp has a bucket.
KERNEL measure_ranges(const Word* array, i64 size, i64 bucket, i64 points, float* bases, float* steps, i64 buckets) {
  for (const i64 b : warp_stride(buckets)) {
    const i64 stop = smaller((b + 1) * bucket, size);
    Word highest = 0, inverted = 0;  // the second is the inverted lowest
    for (i64 i = b * bucket + lane_of_thread(); i < stop; i += 32) {
      const Word rank = rank_of(array[i]);
      highest = larger(highest, rank);
      inverted = larger(inverted, ~rank);
    }
    const Real least = as_real(word_of(~warp_max(inverted))), largest = as_real(word_of(warp_max(highest)));
    float base = as_real(NAN_FLOAT), step = as_real(NAN_FLOAT);
    if (is_number(least) && is_number(largest)) {
      base = single_of(least);
      step = (float)(smaller((double)largest - (double)base, LARGEST_LEVEL) / (double)points);
      if (inverse_of(step) == 0) {  // to the number between them that is nearest to zero
        base = single_of(smaller(largest, larger((Real)0, least)));
        step = 0;
      }
    }
    if (lane_of_thread() == 0) {
      bases[b] = base;
      steps[b] = step;
    }
  }
}

KERNEL pack_codes(
    const Word* array, i64 size, i64 bucket, i64 bits, i64 points, i64 offset, const float* bases, const float* steps,
    i64 random, i64 low, i64 high, u32* halves, i64 groups, Word* sent, Partials* partials) {
  const Real lowest = (Real)-offset, highest = (Real)(points - offset);
  double sum[1] = {};
  for (const i64 g : warp_stride(groups)) {
    const i64 i = 32 * g + lane_of_thread();
    int code = 0;
    if (i < size) {
      const i64 b = i / bucket;
      const Real value = as_real(array[i]), base = bases ? (Real)bases[b] : (Real)0, step = (Real)steps[b];
      code = (int)offset;
      if (is_number(step)) {
        const Real place = smaller(larger((value - base) * inverse_of(steps[b]), lowest), highest);
        const int added = random ? (int)(draw((u32)i, (u32)low, (u32)high) >> SPARE) : ONE / 2;
        code += ((int)(place * (Real)ONE) + added) >> FRACTION;
      }
      const Real rounded = base + product((Real)(code - (int)offset), step);
      const double error = (double)value - (double)rounded;
      sent[i] = as_word(rounded);
      sum[0] += error * error;
    }
    u32 half = 0;  // of plane `lane`
    for (int plane = 0; plane < bits; ++plane) {
      const u32 votes = __ballot_sync(ALL, code >> plane & 1);
      if (lane_of_thread() == plane) half = votes;
    }
    if (lane_of_thread() < bits) halves[2 * (g / 2 * bits + lane_of_thread()) + g % 2] = half;
  }
  finish_sums(sum, partials);
}

template <bool ADD>
DEVICE void unpack(
    const float* bases, const float* steps, const u64* words, i64 bucket, i64 bits, double factor, Word* out,
    i64 size) {
  const int offset = bases ? 0 : (1 << (bits - 1)) - 1;
  for (const i64 i : grid_stride(size)) {
    const i64 b = i / bucket;
    const u64* planes = words + i / 64 * bits;
    int code = 0;
    for (int plane = 0; plane < bits; ++plane) code |= (int)(planes[plane] >> (i % 64) & 1) << plane;
    const Real base = bases ? (Real)product(factor, (double)bases[b]) : (Real)0;
    const Real step = (Real)product(factor, (double)steps[b]);
    const Real value = base + product((Real)(code - offset), step);
    out[i] = as_word(ADD ? as_real(out[i]) + value : value);
  }
}

KERNEL unpack_grid(
    const float* bases, const float* steps, const u64* words, i64 bucket, i64 bits, double factor, Word* out,
    i64 size) {
  unpack<false>(bases, steps, words, bucket, bits, factor, out, size);
}

KERNEL unpack_grid_add(
    const float* bases, const float* steps, const u64* words, i64 bucket, i64 bits, double factor, Word* out,
    i64 size) {
  unpack<true>(bases, steps, words, bucket, bits, factor, out, size);
}
