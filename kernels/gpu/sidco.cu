// SIDCo's thresholds (arXiv 2101.10761), in float64 on one thread, which costs little more than the launch. The rule is
// that of mpicomp.compressors.sidco, to the last comparison.

enum Distribution { EXPONENTIAL = 0, PARETO = 1 };

constexpr double FIRST = 0.25;  // fraction that the first of several stages keeps
constexpr double FEW = 10;      // number of survivors below which no stage is fitted
constexpr double NEAR = 0.1;    // accepted relative error of a count
constexpr i64 CORRECTIONS = 6;  // at most
constexpr double FLAT = 1e-6;   // variance over squared mean that counts as zero

// The host names the fields by their place.
struct Fit {
  double threshold;
  u64 bits;         // its magnitude bits in the array's type
  u64 done;         // whether the threshold is final
  double reached;   // fraction of the wanted elements that the stages alone have reached
  i64 left;         // stages left
  i64 corrections;  // corrections left after the stages
  i64 tried;        // thresholds so far
  u64 below;        // whether one was too low, and which was the highest of these
  double low, low_count;
  u64 above;  // whether one was too high, and which was the lowest of these
  double high, high_count;
};

// Distance from the location to the upper `share`-quantile.
DEVICE double exponential_threshold(double mean, double share) { return -mean * log(share); }

DEVICE double pareto_threshold(double mean, double variance, double share) {
  if (!(variance > FLAT * mean * mean)) return exponential_threshold(mean, share);
  const double relative = mean * mean / variance;
  const double shape = 0.5 * (1 - relative), scale = 0.5 * mean * (relative + 1), depth = -log(share);
  return fabs(shape * depth) < 1e-9 ? scale * depth : scale * expm1(smaller(shape * depth, 700.0)) / shape;
}

DEVICE void set_threshold(Fit* fit, State* state, double threshold) {
  fit->threshold = threshold;
  fit->bits = as_word((Real)threshold) & MASK;
  state->exact = !(threshold > 0 && threshold < as_real(INFINITE_DOUBLE));
}

DEVICE double count_of(const Partials* partials) { return (double)reinterpret_cast<const i64*>(partials->totals())[0]; }

// The first threshold, from the moments of all elements. `estimating` is 0 where the array is too small for it.
KERNEL begin(
    const Partials* moments, i64 k, i64 stages, i64 distribution, i64 estimating, Fit* fit, State* state) {
  if (threadIdx.x != 0) return;
  const double nonzero = count_of(moments), total = moments->totals()[1], energy = moments->totals()[2];
  *fit = Fit{};
  fit->reached = as_real(NAN_DOUBLE);  // NaN: nothing was estimated
  state->k = (u64)smaller(k, (i64)nonzero);
  if (!(estimating && energy > 0 && energy < as_real(INFINITE_DOUBLE) && (double)k < nonzero)) {
    fit->done = 1;
    state->exact = state->k != 0;  // of zeros none is selected, and none exceeds the threshold 0
    return;
  }
  const double share = (double)k / nonzero;
  const bool several = stages > 1 && share < FIRST;
  const double first = several ? FIRST : share;
  fit->left = several ? stages - 1 : 0;
  fit->corrections = CORRECTIONS;
  const double mean = total / nonzero;
  if (distribution == PARETO)
    set_threshold(fit, state, pareto_threshold(mean, energy / nonzero - mean * mean, first));
  else
    set_threshold(fit, state, exponential_threshold(mean, first));
}

// A threshold between the highest that too many elements exceed and the lowest that too few do, where counts are
// assumed to fall exponentially; every second time nearer to the middle.
DEVICE double interpolate(const Fit& fit, double wanted) {
  double part = log(fit.low_count / wanted) / log(fit.low_count / larger(fit.high_count, 0.5));
  if (fit.tried % 2) part = 0.5 * (part + 0.5);
  return fit.low + (fit.high - fit.low) * smaller(larger(part, 0.05), 0.95);
}

DEVICE void decide(
    Fit* fit, State* state, double count, double excess, double squares, double wanted, i64 distribution) {
  const double threshold = fit->threshold;
  fit->tried += 1;
  if (count >= wanted) {
    if (!fit->below || threshold > fit->low) {
      fit->below = 1;
      fit->low = threshold;
      fit->low_count = count;
    }
  } else if (!fit->above || threshold < fit->high) {
    fit->above = 1;
    fit->high = threshold;
    fit->high_count = count;
  }
  double share;
  if (fit->left > 0 && count >= FEW) {
    share = pow(wanted / count, 1.0 / (double)fit->left);
    fit->left -= 1;
  } else {
    if (fit->corrections == CORRECTIONS) fit->reached = count / wanted;
    fit->left = 0;
    const bool bracketed = fit->below && fit->above && fit->low < fit->high;
    if (fit->corrections == 0 || fabs(count / wanted - 1) <= NEAR || (!bracketed && !(count >= FEW))) {
      fit->done = 1;
      return;
    }
    fit->corrections -= 1;
    if (bracketed) {
      set_threshold(fit, state, interpolate(*fit, wanted));
      return;
    }
    share = wanted / count;
  }
  const double mean = excess / count, variance = squares / count - mean * mean;
  const double over =
      distribution == EXPONENTIAL ? exponential_threshold(mean, share) : pareto_threshold(mean, variance, share);
  set_threshold(fit, state, threshold + over > 0 ? threshold + over : 0);  // 0 for NaN, too
}

// Counts the elements above the threshold and their excess; the block that ends last sets the next one, by a stage, or
// by a correction once the stages are over.
KERNEL refine(
    const Word* array, i64 size, i64 remaining, i64 stride, double wanted, i64 distribution, Partials* partials,
    Fit* fit, State* state) {
  if (fit->done) return;
  double sum[3] = {};
  sum_tail(array, size, remaining, stride, (Real)fit->threshold, sum);
  if (finish_sums(sum, partials) && threadIdx.x == 0) decide(fit, state, sum[0], sum[1], sum[2], wanted, distribution);
}
