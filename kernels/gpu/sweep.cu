// Whole-array sweeps that belong to no family.

extern "C" __global__ void __launch_bounds__(THREADS) energy(const Word* array, i64 size, Partials* partials) {
  double sum[1] = {sum_squares(array, size)};
  finish_sums(sum, partials);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scale(Word* array, i64 size, const double* factor, double factor_value, Partials* partials) {
  const Real number = (Real)given(factor, factor_value);
  Word top = 0;
  const bool even = aligned(array);
  for (i64 tile = blockIdx.x; tile * TILE < size; tile += gridDim.x) {
    const i64 first = tile * TILE + warp_of_thread() * WARP_TILE + lane_of_thread() * VEC;
    const bool packed = even && (tile + 1) * TILE <= size;
    Items items;
    load(items, array, first, size, packed);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        items.item[r][j] = as_word(as_real(items.item[r][j]) * number);
        // Behind the end zeros were read, which an infinite factor makes NaN.
        if (packed || first + r * STRIP + j < size) top = larger(top, items.item[r][j] & MASK);
      }
    }
    store(items, array, first, size, packed);
  }
  finish_top(top, partials);
}

extern "C" __global__ void __launch_bounds__(THREADS) momentum(
    const Word* gradient, double factor, const Word* velocity, double decay, i64 nesterov, Word* after, Word* out,
    i64 size) {
  const Real by = (Real)factor, kept = (Real)decay;
  const bool even = aligned(gradient) && aligned(velocity) && aligned(after) && aligned(out);
  for (i64 tile = blockIdx.x; tile * TILE < size; tile += gridDim.x) {
    const i64 first = tile * TILE + warp_of_thread() * WARP_TILE + lane_of_thread() * VEC;
    const bool packed = even && (tile + 1) * TILE <= size;
    Items items, moving;
    load(items, gradient, first, size, packed);
    load(moving, velocity, first, size, packed);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        // Rounded as the host does it, so that a run goes on with the same bits on either.
        const Real entering = product(by, as_real(items.item[r][j])), before = as_real(moving.item[r][j]);
        const Real now = nesterov ? product(kept, before + entering) : product(kept, before) + entering;
        moving.item[r][j] = as_word(now);
        items.item[r][j] = as_word(nesterov ? now + entering : now);
      }
    }
    store(moving, after, first, size, packed);
    store(items, out, first, size, packed);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) share_rounding(
    const Word* exact, const Word* rounded, double ranks, const Word* array, Word* sent, i64 size,
    Partials* partials) {
  const Real receivers = (Real)ranks;
  double sum[1] = {};
  const bool even = aligned(exact) && aligned(rounded) && aligned(array) && aligned(sent);
  for (i64 tile = blockIdx.x; tile * TILE < size; tile += gridDim.x) {
    const i64 first = tile * TILE + warp_of_thread() * WARP_TILE + lane_of_thread() * VEC;
    const bool packed = even && (tile + 1) * TILE <= size;
    Items means, wires, own, given_away;
    load(means, exact, first, size, packed);
    load(wires, rounded, first, size, packed);
    load(own, array, first, size, packed);
    load(given_away, sent, first, size, packed);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const Real value = as_real(own.item[r][j]), old_sent = as_real(given_away.item[r][j]);
        const Real new_sent = old_sent - receivers * (as_real(means.item[r][j]) - as_real(wires.item[r][j]));
        const double before = (double)(value - old_sent), after = (double)(value - new_sent);
        given_away.item[r][j] = as_word(new_sent);
        sum[0] += after * after - before * before;
      }
    }
    store(given_away, sent, first, size, packed);
  }
  finish_sums(sum, partials);
}
