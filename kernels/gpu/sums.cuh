// Results of a launch over all of its blocks, and sums over an array; it follows common.cuh.

// Sums of a block go to sums[column * gridDim.x + blockIdx.x]: they are added up later in an order that does not
// depend on which block ends first.
template <int COLUMNS>
DEVICE void write_partials(const double (&values)[COLUMNS], double* sums) {
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const double total = block_sum(values[c]);
    if (threadIdx.x == 0) sums[(i64)c * gridDim.x + blockIdx.x] = total;
  }
}

DEVICE void write_top(Word top, u64* tops) {
  const Word largest = block_max(top);
  if (threadIdx.x == 0) tops[blockIdx.x] = largest;
}

DEVICE double collect_sum(const double* sums, i64 column, i64 blocks) {
  double total = 0;
  for (i64 b = threadIdx.x; b < blocks; b += THREADS) total += sums[column * blocks + b];
  return block_sum(total);
}

DEVICE u64 collect_top(const u64* tops, i64 blocks) {
  u64 top = 0;
  for (i64 b = threadIdx.x; b < blocks; b += THREADS) top = larger(top, tops[b]);
  return block_max(top);
}

// Result of a launch that checks its input, of which the host reads the last word.
struct Verdict {
  u64 ticket;  // blocks that have ended: zero before and after a launch
  u64 wrong;   // faults found: the same
  u64 good;    // whether there are none
};

// True on all threads of the block that ends last, which then know whether any block has found a fault.
DEVICE bool gather_faults(bool& wrong, Verdict* verdict) {
  __shared__ bool any;
  if (wrong) atomicAdd(&verdict->wrong, (u64)1);
  if (!ends_last(&verdict->ticket, gridDim.x)) return false;
  if (threadIdx.x == 0) {
    any = verdict->wrong != 0;
    verdict->good = !any;
    verdict->wrong = 0;
  }
  __syncthreads();
  wrong = any;
  return true;
}

// Partial sums of the blocks of a sweep, and the totals that the one that ends last computes. These words are followed
// by the totals of all columns, the sums of the blocks column by column, and the largest magnitudes of the blocks. The
// host's Partials has the same layout.
struct Partials {
  u64 ticket;  // blocks of the running launch that have ended: zero before and after it
  u64 top;     // the bits of the largest magnitude
  u64 finite;  // whether they are those of a number

  DEVICE double* totals() { return reinterpret_cast<double*>(this + 1); }
  DEVICE const double* totals() const { return reinterpret_cast<const double*>(this + 1); }
};

// With COUNTED the first column is stored as an integer.
template <int COLUMNS, bool COUNTED>
DEVICE void add_up_sums(double (&sum)[COLUMNS], Partials* partials) {
  double* totals = partials->totals();
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    sum[c] = collect_sum(totals + COLUMNS, c, gridDim.x);
    if (threadIdx.x != 0) continue;
    if (COUNTED && c == 0)
      reinterpret_cast<i64*>(totals)[c] = (i64)sum[c];
    else
      totals[c] = sum[c];
  }
}

DEVICE void add_up_top(const u64* tops, Partials* partials) {
  const u64 largest = collect_top(tops, gridDim.x);
  if (threadIdx.x != 0) return;
  partials->top = largest;
  partials->finite = largest < (u64)INFINITE;
}

// Ends every sweep that computes sums: `sum` has those of a thread. True on all threads of the block that ends last,
// where `sum` then has the totals.
template <int COLUMNS, bool COUNTED = false>
DEVICE bool finish_sums(double (&sum)[COLUMNS], Partials* partials) {
  write_partials(sum, partials->totals() + COLUMNS);
  if (!ends_last(&partials->ticket, gridDim.x)) return false;
  add_up_sums<COLUMNS, COUNTED>(sum, partials);
  return true;
}

// The same for the largest magnitude.
DEVICE void finish_top(Word top, Partials* partials) {
  u64* tops = reinterpret_cast<u64*>(partials->totals());
  write_top(top, tops);
  if (ends_last(&partials->ticket, gridDim.x)) add_up_top(tops, partials);
}

// And for both.
template <int COLUMNS, bool COUNTED = false>
DEVICE void finish_sums_and_top(double (&sum)[COLUMNS], Word top, Partials* partials) {
  double* sums = partials->totals() + COLUMNS;
  u64* tops = reinterpret_cast<u64*>(sums + (i64)COLUMNS * gridDim.x);
  write_partials(sum, sums);
  write_top(top, tops);
  if (!ends_last(&partials->ticket, gridDim.x)) return;
  add_up_sums<COLUMNS, COUNTED>(sum, partials);
  add_up_top(tops, partials);
}

// A thread's part of an array's squared L2 norm.
DEVICE double sum_squares(const Word* array, i64 size) {
  double sum = 0;
  for (const Tile tile : each_tile(size, aligned(array))) {
    const Items items = load(array, tile);
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      const double value = (double)as_real(items.item[n]);
      sum += value * value;
    }
  }
  return sum;
}

// Count, excess and squared excess of the sampled elements above a limit.
DEVICE void sum_tail(const Word* array, i64 size, i64 remaining, i64 stride, Real limit, double (&sum)[3]) {
  u64 count = 0;
  for (i64 number = blockIdx.x; number * TILE < remaining; number += gridDim.x) {
    const Tile tile = sampled_tile(number, stride, size, aligned(array));
    const Items items = load(array, tile);
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      const Real magnitude = as_real(items.item[n] & MASK);
      // NaN is above everything. Zeros read past the end are above nothing.
      if (!(magnitude <= limit) && tile.contains(n)) {
        const double over = (double)magnitude - (double)limit;
        ++count;
        sum[1] += over;
        sum[2] += over * over;
      }
    }
  }
  sum[0] = (double)count;
}

// Natural logarithms of a thread's magnitudes cost one logarithm in all: exponents are added up as integers and
// significands multiplied, 16 of which stay below 2^16.
struct Logarithms {
  double significand = 1.0;
  i64 exponent = 0;
  double rest = 0.0;  // sum of infinite and NaN magnitudes

  DEVICE void add(double magnitude) {
    u64 word = as_word(magnitude);
    i64 shift = 0;
    if (word == 0) return;
    if (word >> 52 == 0) {
      word = as_word(magnitude * 18014398509481984.0);  // 2^54 makes it normal
      shift = 54;
    }
    if (word >> 52 == 0x7ff) {
      rest += magnitude;
    } else {
      exponent += (i64)(word >> 52) - 1023 - shift;
      significand *= as_real((word & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
    }
  }

  DEVICE double sum() const { return rest + (double)exponent * 0.69314718055994530942 + log(significand); }
};
