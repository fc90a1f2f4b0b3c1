// SIDCo's thresholds (arXiv 2101.10761), in float64 on one thread: what they cost is the launch.

enum Distribution { EXPONENTIAL = 0, GAMMA = 1, PARETO = 2 };

constexpr double FIRST_RATIO = 0.25;  // of the first of several stages
constexpr double FEWEST = 10;         // survivors on which a stage is fitted
constexpr double FLAT = 1e-12;        // variance over squared mean that counts as none
constexpr u64 ENDLESS = 0x7ff0000000000000ull;  // the bits of infinity

// The host names the fields by their place.
struct Fit {
  double threshold;  // a number of the array's dtype
  u64 bits;          // its magnitude bits
  u64 done;          // whether later stages have nothing to do
  double step;       // ratio of every later stage
  i64 nonzero;
  double total, energy, logarithm;
  u64 top;
  i64 stages;  // that changed the threshold
};

// Upper regularised incomplete gamma function; `front` is x^a e^-x / Gamma(a).
__device__ __forceinline__ double gamma_above(double a, double x, double front) {
  if (x < a + 1) {
    double term = 1 / a, sum = term;
    for (int n = 1; n < 10000 && term > sum * 1e-17; ++n) {
      term *= x / (a + n);
      sum += term;
    }
    return 1 - front * sum;
  }
  // The continued fraction 1 / (x + 1 - a - 1 (1 - a) / (x + 3 - a - ...)), by the ratios of successive numerators
  // and denominators.
  double diagonal = x + 1 - a, denominator = 1 / diagonal, numerator = 1e300, value = denominator;
  for (int n = 1; n < 10000; ++n) {
    const double side = n * (a - n);
    diagonal += 2;
    denominator = 1 / (side * denominator + diagonal);
    numerator = side / numerator + diagonal;
    value *= numerator * denominator;
    if (fabs(numerator * denominator - 1) < 1e-16) break;
  }
  return front * value;
}

// Where the standard normal distribution has `above` above it.
__device__ __forceinline__ double normal_above(double above) {
  double low = -40, high = 40;
  for (int n = 0; n < 60; ++n) {
    const double middle = (low + high) / 2;
    if (erfc(middle * 0.70710678118654752440) > 2 * above)
      low = middle;
    else
      high = middle;
  }
  return (low + high) / 2;
}

// Where the gamma distribution of shape `a` and scale 1 has `above` above it, 0 < above < 1.
__device__ __forceinline__ double gamma_threshold(double a, double above) {
  if (a > 1e4) {  // nearly a power of a normal distribution (Wilson and Hilferty); series would be long
    const double part = 1 - 1 / (9 * a) + normal_above(above) / (3 * sqrt(a));
    return a * part * part * part;
  }
  // Newton's method on the logarithm of the smaller part, inside a bracket. The first x is below the solution:
  // the lower part is at most x^a / Gamma(a + 1).
  const double of_a = lgamma(a), below = 1 - above;
  double low = exp((log1p(-above) + of_a + log(a)) / a), high = as_real(ENDLESS);
  const bool by_lower = above > 0.1;
  double x = by_lower ? low : larger(low, a);
  for (int n = 0; n < 100; ++n) {
    if (!(x > 0)) return 0;
    const double front = exp(a * log(x) - x - of_a), rest = gamma_above(a, x, front);
    if (rest > above)
      low = larger(low, x);
    else
      high = smaller(high, x);
    double next;
    if (by_lower) {  // in the logarithm of x, where it is nearly straight
      const double lower = x < a + 1 && rest > 0.9 ? -expm1(log(rest)) : 1 - rest;
      next = x * exp(-log(lower / below) * lower / front);
    } else {
      next = x + log(rest / above) * rest / front * x;
    }
    if (!(next > low && next < high)) next = high < as_real(ENDLESS) ? (low + high) / 2 : 2 * x;
    const double change = fabs(next - x);
    x = next;
    if (change <= 1e-13 * x) break;
  }
  return x;
}

// How far above the location a generalised Pareto distribution with these moments has a part `ratio`.
__device__ __forceinline__ double pareto_threshold(double mean, double variance, double ratio) {
  const double shape = 0.5 * (1 - mean * mean / variance);
  const double scale = 0.5 * mean * (mean * mean / variance + 1);
  const double length = -log(ratio);
  return fabs(shape * length) < 1e-8 ? scale * length : scale / shape * expm1(shape * length);
}

__device__ __forceinline__ void settle(Fit* fit, double threshold) {
  const Real number = (Real)threshold;
  if (!(number >= 0) || (as_word(number) & MASK) >= INFINITE) {
    fit->done = 1;
    return;
  }
  fit->threshold = (double)number;
  fit->bits = as_word(number) & MASK;
  fit->stages += 1;
}

extern "C" __global__ void __launch_bounds__(THREADS) first_threshold(
    const double* sums, const u64* tops, i64 blocks, double wanted, i64 distribution, i64 stages, Fit* fit) {
  const double nonzero = collect_sum(sums, 0, blocks), total = collect_sum(sums, 1, blocks);
  const double energy = collect_sum(sums, 2, blocks), logarithm = collect_sum(sums, 3, blocks);
  const u64 top = collect_top(tops, blocks);
  if (threadIdx.x != 0) return;
  *fit = Fit{0, 0, 0, 1, (i64)nonzero, total, energy, logarithm, top, 0};
  const double mean = total / nonzero, variance = energy / nonzero - mean * mean;
  // Written so that NaN ends here, too: with the threshold 0, and as many elements as there is room for.
  if (!(nonzero > 0 && variance > FLAT * mean * mean && variance < as_real(ENDLESS) && wanted < nonzero)) {
    fit->done = 1;
    return;
  }
  const double ratio = wanted / nonzero;
  const bool single = stages <= 1 || ratio >= FIRST_RATIO;
  const double first = single ? ratio : FIRST_RATIO;
  fit->done = single;
  fit->step = single ? 1 : pow(ratio / FIRST_RATIO, 1.0 / (double)(stages - 1));
  if (distribution == EXPONENTIAL) {
    settle(fit, -mean * log(first));
  } else if (distribution == PARETO) {
    settle(fit, pareto_threshold(mean, variance, first));
  } else {
    const double s = log(mean) - logarithm / nonzero;
    if (!(s > FLAT)) {
      fit->done = 1;
      return;
    }
    const double shape = (3 - s + sqrt((s - 3) * (s - 3) + 24 * s)) / (12 * s);
    settle(fit, mean / shape * gamma_threshold(shape, first));
  }
}

// `left`, where it is not 0, is how many stages are left, this one included: then they share the way from the elements
// that there really are to those that are wanted. Otherwise every stage keeps the part that it was to keep.
extern "C" __global__ void __launch_bounds__(THREADS)
    next_threshold(const double* sums, i64 blocks, double wanted, i64 left, i64 distribution, Fit* fit) {
  if (fit->done) return;
  const double count = collect_sum(sums, 0, blocks), excess = collect_sum(sums, 1, blocks);
  const double squares = collect_sum(sums, 2, blocks);
  if (threadIdx.x != 0) return;
  const double mean = excess / count, variance = squares / count - mean * mean;
  if (!(count >= FEWEST && variance > FLAT * mean * mean && variance < as_real(ENDLESS))) {
    fit->done = 1;
    return;
  }
  const double step = left ? pow(wanted / count, 1.0 / (double)left) : fit->step;
  const double over = distribution == EXPONENTIAL ? -mean * log(step) : pareto_threshold(mean, variance, step);
  settle(fit, larger(0.0, fit->threshold + over));
}

// One thread a solution, for tests of gamma_threshold.
extern "C" __global__ void __launch_bounds__(THREADS)
    gamma_thresholds(const double* shapes, const double* above, i64 count, double* out) {
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (i64)gridDim.x * THREADS)
    out[i] = gamma_threshold(shapes[i], above[i]);
}
