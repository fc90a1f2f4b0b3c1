// A few bits an element: its sign, and one of the levels of its block, which lie apart like the squares of integers.

constexpr int BLOCK = 256;  // elements that share a base and a step
static_assert(BLOCK == THREADS, "a thread has an element");

// The last level is computed from a step that was rounded: it must not leave float32. What is subnormal is zero.
constexpr double MOST = (double)LARGEST_FLOAT * (1 - 2.384185791015625e-7);
constexpr double LEAST = 1.1754943508222875e-38;

struct Scales {
  float base, step;

  __device__ __forceinline__ double level(int j) const { return (double)base + product((double)(j * j), (double)step); }
};

__device__ __forceinline__ float single(double value) { return value >= LEAST ? (float)value : 0.0f; }

// What all threads find of a block of elements, of which each has one.
__device__ __forceinline__ Scales measure(double value, Word magnitude, bool inside, int last) {
  const Word largest = block_max(inside ? magnitude : (Word)0), inverted = block_max(inside ? ~magnitude : (Word)0);
  if (largest >= INFINITE) return {__uint_as_float(0x7fc00000u), __uint_as_float(0x7fc00000u)};
  const double least = (double)as_real((Word)~inverted), reach = (double)as_real(largest) - least;
  const double squares = last * last, before = (last - 1) * (last - 1);
  const double low_edge = least + product(reach, 0.5 / squares);
  const double high_edge = least + product(reach, 0.5 * (squares + before) / squares);
  const bool low = inside && value <= low_edge, high = inside && value > high_edge;
  const double sum = block_sum(low ? value : 0.0), few = block_sum(low ? 1.0 : 0.0);
  const double more = block_sum(high ? value : 0.0), many = block_sum(high ? 1.0 : 0.0);
  const double first = sum / few, end = many > 0 ? more / many : first;
  const float base = single(smaller(first, MOST));
  return {base, single((smaller(end, MOST) - (double)base) / squares)};
}

extern "C" __global__ void __launch_bounds__(THREADS) pack_squares(
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
    const Scales own = measure(value, word & MASK, inside, last);
    if (threadIdx.x == 0) scales[b] = own;
    int level = 0;
    const bool negative = word & ~MASK, finite = own.base >= 0;
    if (finite && own.step > 0) {
      // Half-way between j and the next one is j^2 + j + 1/2, which is a quarter more than the square of j + 1/2.
      const double steps = larger(product(value - (double)own.base, 1 / (double)own.step) - 0.25, 0.0);
      level = (int)smaller(sqrt(steps) + 0.5, (double)last);
    }
    codes[threadIdx.x] = inside && finite ? (u8)(level | (int)negative << (bits - 1)) : (u8)0;
    if (inside) {
      const Real seen = (Real)own.level(level);
      const double missed = value - (double)seen;
      sent[i] = as_word(negative && finite ? -seen : seen);
      sum[0] += missed * missed;
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

struct Checked {
  u64 ticket;  // blocks that have ended
  u64 wrong;   // scales that are not what they have to be
  u64 good;    // none is not
};

// What was packed begins at even distances and is equally long, or a table says so, with two numbers for each.
extern "C" __global__ void __launch_bounds__(THREADS) unpack_squares(
    const u8* messages, i64 first, i64 apart, i64 count, const i64* table, i64 bits, Word* out, i64 size,
    Checked* checked) {
  const int last = (1 << (bits - 1)) - 1;
  const i64 step = (i64)gridDim.x * THREADS;
  i64 r = 0, before = 0;  // elements before those of the r-th
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < size; i += step) {
    i64 length = table ? table[2 * r + 1] : count;
    while (i - before >= length) {
      before += length;
      ++r;
      length = table ? table[2 * r + 1] : count;
    }
    const i64 j = i - before;
    const u8* packed = messages + (table ? table[2 * r] : first + r * apart);
    const Scales own = reinterpret_cast<const Scales*>(packed + (length * bits + 63) / 64 * 8)[j / BLOCK];
    const bool right = own.base >= 0 && own.step >= 0 && own.level(last) <= (double)LARGEST_FLOAT;
    if (!right && j % BLOCK == 0) atomicAdd(&checked->wrong, (u64)1);
    const int code = packed[j * bits / 8] >> (j * bits % 8) & (2 * last + 1);
    const Real magnitude = (Real)own.level(code & last);
    out[i] = as_word(code > last ? -magnitude : magnitude);
  }
  if (ends_last(&checked->ticket, gridDim.x) && threadIdx.x == 0) checked->good = checked->wrong == 0;
}
