// A few bits an element: its sign, and one of the levels of its block, spaced like the squares of integers.

constexpr int BLOCK = 256;  // elements that share a base and a step
static_assert(BLOCK == THREADS, "a thread has an element");

struct Scales {
  float base, step;

  DEVICE double level(int j) const { return (double)base + product((double)(j * j), (double)step); }
};

DEVICE float single(double value) { return value >= SMALLEST_NORMAL_FLOAT ? (float)value : 0.0f; }

// Scales of a block of elements, of which each thread has one.
DEVICE Scales measure(double value, Word magnitude, bool inside, int last) {
  const Word largest = block_max(inside ? magnitude : (Word)0), inverted = block_max(inside ? ~magnitude : (Word)0);
  if (largest >= INFINITE) return {as_real(NAN_FLOAT), as_real(NAN_FLOAT)};
  const double least = (double)as_real((Word)~inverted), reach = (double)as_real(largest) - least;
  const double squares = last * last, before = (last - 1) * (last - 1);
  const double low_edge = least + product(reach, 0.5 / squares);
  const double high_edge = least + product(reach, 0.5 * (squares + before) / squares);
  const bool low = inside && value <= low_edge, high = inside && value > high_edge;
  const double sum = block_sum(low ? value : 0.0), few = block_sum(low ? 1.0 : 0.0);
  const double more = block_sum(high ? value : 0.0), many = block_sum(high ? 1.0 : 0.0);
  const double first = sum / few, end = many > 0 ? more / many : first;
  const float base = single(smaller(first, LARGEST_LEVEL));
  return {base, single((smaller(end, LARGEST_LEVEL) - (double)base) / squares)};
}

KERNEL pack_quadratic(
    const Word* array, i64 size, i64 bits, u32* words, i64 length, Scales* scales, i64 blocks, Word* sent,
    Partials* partials) {
  __shared__ u8 codes[BLOCK];
  const int last = (1 << (bits - 1)) - 1, each = 32 / (int)bits;
  double sum[1] = {};
  for (i64 b = blockIdx.x; b < blocks; b += gridDim.x) {
    const i64 i = b * BLOCK + threadIdx.x;
    const bool inside = i < size;
    const Word word = inside ? array[i] : (Word)0;
    const double value = (double)as_real(word & MASK);
    const Scales block = measure(value, word & MASK, inside, last);
    if (threadIdx.x == 0) scales[b] = block;
    int level = 0;
    const bool negative = word & ~MASK, finite = block.base >= 0;
    if (finite && block.step > 0) {
      // Half-way between j and the next one is j^2 + j + 1/2, which is a quarter more than the square of j + 1/2.
      const double steps = larger(product(value - (double)block.base, 1 / (double)block.step) - 0.25, 0.0);
      level = (int)smaller(sqrt(steps) + 0.5, (double)last);
    }
    codes[threadIdx.x] = inside && finite ? (u8)(level | (int)negative << (bits - 1)) : (u8)0;
    if (inside) {
      const Real rounded = (Real)block.level(level);
      const double error = value - (double)rounded;
      sent[i] = as_word(negative && finite ? -rounded : rounded);
      sum[0] += error * error;
    }
    __syncthreads();
    const i64 place = b * (BLOCK / each) + threadIdx.x;
    if (threadIdx.x < BLOCK / each && place < length) {
      u32 packed = 0;
      for (int j = 0; j < each; ++j) packed |= (u32)codes[each * threadIdx.x + j] << (bits * j);
      words[place] = packed;
    }
  }
  finish_sums(sum, partials);
}

// The packed parts are equally long and at even distances, or a table has the start and length of each.
KERNEL unpack_quadratic(
    const u8* messages, i64 first, i64 distance, i64 count, const i64* table, i64 bits, Word* out, i64 size,
    Verdict* verdict) {
  const int last = (1 << (bits - 1)) - 1;
  bool wrong = false;
  i64 r = 0, before = 0;  // elements before the r-th part
  for (const i64 i : grid_stride(size)) {
    i64 length = table ? table[2 * r + 1] : count;
    while (i - before >= length) {
      before += length;
      ++r;
      length = table ? table[2 * r + 1] : count;
    }
    const i64 j = i - before;
    const u8* packed = messages + (table ? table[2 * r] : first + r * distance);
    const Scales block = reinterpret_cast<const Scales*>(packed + (length * bits + 63) / 64 * 8)[j / BLOCK];
    const bool right = block.base >= 0 && block.step >= 0 && block.level(last) <= (double)LARGEST_FLOAT;
    wrong |= !right;
    const int code = packed[j * bits / 8] >> (j * bits % 8) & (2 * last + 1);
    const Real magnitude = (Real)block.level(code & last);
    out[i] = as_word(code > last ? -magnitude : magnitude);
  }
  gather_faults(wrong, verdict);
}
