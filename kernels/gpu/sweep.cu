// Sweeps over whole arrays: norms, logarithms, tails, scaling, momentum, and the rounding of a mean.

KERNEL energy(const Word* array, i64 size, Partials* partials) {
  double sum[1] = {sum_squares(array, size)};
  finish_sums(sum, partials);
}

KERNEL scale(Word* array, i64 size, const double* factor, double factor_value, Partials* partials) {
  const Real number = (Real)scalar_arg(factor, factor_value);
  Word top = 0;
  for (const Tile tile : each_tile(size, aligned(array))) {
    Items items = load(array, tile);
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      items.item[n] = as_word(as_real(items.item[n]) * number);
      // Zeros read past the end become NaN by an infinite factor.
      if (tile.contains(n)) top = larger(top, items.item[n] & MASK);
    }
    store(items, array, tile);
  }
  finish_top(top, partials);
}

KERNEL momentum(
    const Word* gradient, double factor, const Word* velocity, double decay, i64 nesterov, Word* after, Word* out,
    i64 size) {
  const Real by = (Real)factor, kept = (Real)decay;
  for (const Tile tile : each_tile(size, aligned(gradient, velocity, after, out))) {
    Items items = load(gradient, tile), moving = load(velocity, tile);
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      // Rounded as on the host, so that a run continues with the same bits on either.
      const Real entering = product(by, as_real(items.item[n])), before = as_real(moving.item[n]);
      const Real now = nesterov ? product(kept, before + entering) : product(kept, before) + entering;
      moving.item[n] = as_word(now);
      items.item[n] = as_word(nesterov ? now + entering : now);
    }
    store(moving, after, tile);
    store(items, out, tile);
  }
}

KERNEL share_rounding(
    const Word* exact, const Word* rounded, double ranks, const Word* array, Word* sent, i64 size, Partials* partials) {
  const Real receivers = (Real)ranks;
  double sum[1] = {};
  for (const Tile tile : each_tile(size, aligned(exact, rounded, array, sent))) {
    const Items means = load(exact, tile), wires = load(rounded, tile), values = load(array, tile);
    Items shares = load(sent, tile);
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      const Real value = as_real(values.item[n]), old_sent = as_real(shares.item[n]);
      const Real new_sent = old_sent - product(receivers, as_real(means.item[n]) - as_real(wires.item[n]));
      const double before = (double)(value - old_sent), after = (double)(value - new_sent);
      shares.item[n] = as_word(new_sent);
      sum[0] += after * after - before * before;
    }
    store(shares, sent, tile);
  }
  finish_sums(sum, partials);
}

// Columns of sums: nonzero elements, sum of their magnitudes, sum of the logarithms of these.
KERNEL logarithms(const Word* array, i64 size, i64 remaining, i64 stride, Partials* partials) {
  u64 nonzero = 0;
  double sum[3] = {};
  for (i64 number = blockIdx.x; number * TILE < remaining; number += gridDim.x) {
    const Items items = load(array, sampled_tile(number, stride, size, aligned(array)));
    Logarithms logarithms;
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      const Word magnitude = items.item[n] & MASK;
      nonzero += magnitude != 0;
      sum[1] += (double)as_real(magnitude);
      logarithms.add((double)as_real(magnitude));
    }
    sum[2] += logarithms.sum();
  }
  sum[0] = (double)nonzero;
  finish_sums<3, true>(sum, partials);
}

// Elements above a threshold. Columns of sums: count, excess, squared excess.
KERNEL tail_statistics(
    const Word* array, i64 size, i64 remaining, i64 stride, const double* threshold, double threshold_value,
    Partials* partials) {
  double sum[3] = {};
  sum_tail(array, size, remaining, stride, (Real)scalar_arg(threshold, threshold_value), sum);
  finish_sums<3, true>(sum, partials);
}
