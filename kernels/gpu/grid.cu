// A few bits an element: its place on a grid of equal steps that each bucket of elements has for itself.
//
// Codes travel in bit planes: for every 64 of them one word a bit, that of the lowest bit first. A warp has 32 of them,
// which is half a word in every plane, the lower one first.

constexpr int FRACTION = 23;  // bits of a place that are behind its point; a sign and 8 before it fill an int
constexpr int ONE = 1 << FRACTION;
constexpr int SPARE = 32 - FRACTION;
// The ends of a grid are computed as multiples of its step, which was rounded: they must not leave float32.
constexpr double MOST = (double)LARGEST_FLOAT * (1 - 2.384185791015625e-7);

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }
__device__ __forceinline__ bool is_number(Real value) { return (as_word(value) & MASK) < INFINITE; }

// 0 stands for one that is too large: it takes every element to the offset.
__device__ __forceinline__ Real inverse_of(float step) {
  const Real inverse = step > 0 ? (Real)1 / (Real)step : (Real)0;
  return is_number(inverse) ? inverse : (Real)0;
}

// Integers that order like the numbers, with NaN at both ends.
__device__ __forceinline__ Word rank_of(Word word) { return word & ~MASK ? ~word : word | ~MASK; }
__device__ __forceinline__ Word word_of(Word rank) { return rank & ~MASK ? rank & MASK : ~rank; }

// A warp has a bucket.
extern "C" __global__ void __launch_bounds__(THREADS) measure_norms(
    const Word* array, i64 size, i64 bucket, i64 euclidean, i64 points, float* steps, i64 buckets) {
  for (i64 b = (i64)blockIdx.x * WARPS + warp_of_thread(); b < buckets; b += (i64)gridDim.x * WARPS) {
    const i64 stop = smaller((b + 1) * bucket, size);
    Word top = 0;
    double energy = 0;
    for (i64 i = b * bucket + lane_of_thread(); i < stop; i += 32) {
      const Word magnitude = array[i] & MASK;
      const double value = (double)as_real(magnitude);
      top = larger(top, magnitude);
      energy += value * value;
    }
    // What is not finite shows in the largest magnitude; in float64 a sum of squares may leave the range without it.
    top = warp_max(top);
    energy = warp_sum(energy);
    const double norm = euclidean ? sqrt(energy) : (double)as_real(top);
    if (lane_of_thread() == 0)
      steps[b] = top < INFINITE ? (float)(smaller(norm, MOST) / (double)points) : not_a_number();
  }
}

// A warp has a bucket.
extern "C" __global__ void __launch_bounds__(THREADS) measure_ranges(
    const Word* array, i64 size, i64 bucket, i64 points, float* bases, float* steps, i64 buckets) {
  for (i64 b = (i64)blockIdx.x * WARPS + warp_of_thread(); b < buckets; b += (i64)gridDim.x * WARPS) {
    const i64 stop = smaller((b + 1) * bucket, size);
    Word highest = 0, inverted = 0;  // the second is what inverting makes of the lowest
    for (i64 i = b * bucket + lane_of_thread(); i < stop; i += 32) {
      const Word rank = rank_of(array[i]);
      highest = larger(highest, rank);
      inverted = larger(inverted, ~rank);
    }
    const Real least = as_real(word_of(~warp_max(inverted))), largest = as_real(word_of(warp_max(highest)));
    float base = not_a_number(), step = not_a_number();
    if (is_number(least) && is_number(largest)) {
      base = single_of(least);
      step = (float)(smaller((double)largest - (double)base, MOST) / (double)points);
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

extern "C" __global__ void __launch_bounds__(THREADS) pack_codes(
    const Word* array, i64 size, i64 bucket, i64 bits, i64 points, i64 offset, const float* bases, const float* steps,
    i64 random, i64 low, i64 high, u32* halves, i64 groups, Word* sent, Partials* partials) {
  const Real lowest = (Real)-offset, highest = (Real)(points - offset);
  double sum[1] = {};
  for (i64 g = (i64)blockIdx.x * WARPS + warp_of_thread(); g < groups; g += (i64)gridDim.x * WARPS) {
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
      const Real seen = base + product((Real)(code - (int)offset), step);
      const double missed = (double)value - (double)seen;
      sent[i] = as_word(seen);
      sum[0] += missed * missed;
    }
    u32 own = 0;
    for (int plane = 0; plane < bits; ++plane) {
      const u32 votes = __ballot_sync(ALL, code >> plane & 1);
      if (lane_of_thread() == plane) own = votes;
    }
    if (lane_of_thread() < bits) halves[2 * (g / 2 * bits + lane_of_thread()) + g % 2] = own;
  }
  finish_sums(sum, partials);
}

template <bool ADD>
__device__ __forceinline__ void unpack(
    const float* bases, const float* steps, const u64* words, i64 bucket, i64 bits, double factor, Word* out,
    i64 size) {
  const int offset = bases ? 0 : (1 << (bits - 1)) - 1;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < size; i += (i64)gridDim.x * THREADS) {
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

extern "C" __global__ void __launch_bounds__(THREADS) unpack_grid(
    const float* bases, const float* steps, const u64* words, i64 bucket, i64 bits, double factor, Word* out,
    i64 size) {
  unpack<false>(bases, steps, words, bucket, bits, factor, out, size);
}

extern "C" __global__ void __launch_bounds__(THREADS) unpack_grid_add(
    const float* bases, const float* steps, const u64* words, i64 bucket, i64 bits, double factor, Word* out,
    i64 size) {
  unpack<true>(bases, steps, words, bucket, bits, factor, out, size);
}
