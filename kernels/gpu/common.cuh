// What the sources share. Each is compiled twice, with REAL defined as float and as double, behind this text; nothing
// is included, since NVRTC comes without headers.
//
// An array is cut into tiles of 16 KiB. In a tile every warp has a part of its own, and in each of its rounds lane l
// holds the l-th 16 bytes: ascending by warp, round, lane and item is ascending by index.

typedef REAL Real;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

template <typename T>
struct Bits;
template <>
struct Bits<float> {
  using Word = u32;
};
template <>
struct Bits<double> {
  using Word = u64;
};
using Word = Bits<Real>::Word;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int VEC = 16 / (int)sizeof(Real);
constexpr int ROUNDS = 4;
constexpr int STRIP = 32 * VEC;
constexpr int WARP_TILE = ROUNDS * STRIP;
[[maybe_unused]] constexpr int TILE = WARPS * WARP_TILE;
constexpr int GROUP = 1024;
constexpr u32 ALL = 0xffffffffu;
[[maybe_unused]] constexpr Word MASK = ~(Word)0 >> 1;
[[maybe_unused]] constexpr Word INFINITE = sizeof(Real) == 4 ? (Word)0x7f800000u : (Word)0x7ff0000000000000ull;

struct alignas(16) Pack {
  Word item[VEC];
};

struct Items {
  Word item[ROUNDS][VEC];
};

// What a selection carries from one launch to the next. The host names the fields by their place.
struct State {
  u64 candidates;  // reserved so far by the sweep that lists them
  u64 ticket;      // blocks of the running launch that have ended
  u64 usable;      // whether the list holds everything that is asked for
  u64 known;       // digits of the k-th magnitude found so far, at their place
  u64 remaining;   // its rank among those that share these digits
  u64 threshold;   // magnitude bits
  u64 ties;        // how many of those equal to the threshold are taken
  u64 offset;      // where the selection starts in its output
  u64 end;         // where it would end if there were room
  u64 listed;      // what candidates was, kept for the caller
  u64 gap;         // bits of a double: by which part of the threshold the next bound stays below it, once that is known
  u64 exact;       // whether an estimate is not to be used, and exactly the k largest are taken
  u64 k;           // how many that are
};

__device__ __forceinline__ float as_real(u32 word) { return __uint_as_float(word); }
__device__ __forceinline__ double as_real(u64 word) { return __longlong_as_double((i64)word); }
__device__ __forceinline__ u32 as_word(float value) { return __float_as_uint(value); }
__device__ __forceinline__ u64 as_word(double value) { return (u64)__double_as_longlong(value); }
__device__ __forceinline__ int lane_of_thread() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_of_thread() { return threadIdx.x >> 5; }
__device__ __forceinline__ bool aligned(const void* pointer) { return ((u64)pointer & 15) == 0; }

// The nearest float32, but of what is finite at most the largest one.
[[maybe_unused]] constexpr float LARGEST_FLOAT = 3.402823466385288598e38f;
__device__ __forceinline__ float single_of(float value) { return value; }
__device__ __forceinline__ float single_of(double value) {
  const float single = (float)value;
  const bool beyond = (__float_as_uint(single) & 0x7fffffffu) == 0x7f800000u &&
                      (as_word(value) & ~(1ull << 63)) < 0x7ff0000000000000ull;
  return beyond ? copysignf(LARGEST_FLOAT, single) : single;
}

// A product that is rounded before anything is added to it. What ranks work out for themselves needs it: the compiler
// does both in one go where it can, and another processor may not.
__device__ __forceinline__ float product(float first, float second) { return __fmul_rn(first, second); }
__device__ __forceinline__ double product(double first, double second) { return __dmul_rn(first, second); }

// What 16 bits stand for: a number of IEEE half precision, or a bfloat16.
[[maybe_unused]] constexpr u32 BIASES = 112u << 23;  // between the exponents of half and float32
template <bool BF16>
__device__ __forceinline__ float float_of(u16 half) {
  if (BF16) return __uint_as_float((u32)half << 16);
  const u32 magnitude = half & 0x7fffu;
  u32 bits = magnitude << 13;
  if (magnitude >= 0x7c00) {
    bits |= 0x7f800000u;
  } else if (magnitude >= 0x400) {
    bits += BIASES;
  } else {
    // Subnormal. Taken as a float32 the shifted bits would be so, too, and CuPy has those treated as zero.
    bits = __float_as_uint(product((float)magnitude, 5.9604644775390625e-8f));
  }
  return __uint_as_float(bits | (half & 0x8000u) << 16);
}

struct alignas(2 * VEC) Halves {
  u16 item[VEC];
};

__device__ __forceinline__ bool aligned_halves(const void* pointer) { return (u64)pointer % sizeof(Halves) == 0; }

// 32 random bits of an element, of which the upper ones are the best; the host makes `low` and `high` of a key. The
// CPU's random.py has the same hash.
__device__ __forceinline__ u32 draw(u32 index, u32 low, u32 high) {
  u32 word = index ^ low;
  word = (word ^ word >> 16) * 0x7feb352du;
  word = (word ^ word >> 15 ^ high) * 0x846ca68bu;
  return word ^ word >> 16;
}

template <typename T>
__device__ __forceinline__ T larger(T first, T second) {
  return first > second ? first : second;
}

template <typename T>
__device__ __forceinline__ T smaller(T first, T second) {
  return first < second ? first : second;
}

// What is given either as a number or, where it is known on the device only, by its address.
template <typename T, typename V>
__device__ __forceinline__ T given(const T* where, V value) {
  return where ? *where : (T)value;
}

// `packed` says that the addresses are multiples of 16 and that the whole tile lies below `size`.
__device__ __forceinline__ void load(Items& items, const Word* array, i64 first, i64 size, bool packed) {
  if (packed) {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      const Pack pack = *reinterpret_cast<const Pack*>(array + first + r * STRIP);
#pragma unroll
      for (int j = 0; j < VEC; ++j) items.item[r][j] = pack.item[j];
    }
  } else {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const i64 i = first + r * STRIP + j;
        items.item[r][j] = i < size ? array[i] : (Word)0;
      }
    }
  }
}

__device__ __forceinline__ void store(const Items& items, Word* array, i64 first, i64 size, bool packed) {
  if (packed) {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < VEC; ++j) pack.item[j] = items.item[r][j];
      *reinterpret_cast<Pack*>(array + first + r * STRIP) = pack;
    }
  } else {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const i64 i = first + r * STRIP + j;
        if (i < size) array[i] = items.item[r][j];
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) value += __shfl_xor_sync(ALL, value, distance);
  return value;
}

template <typename T>
__device__ __forceinline__ T warp_max(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) value = larger(value, __shfl_xor_sync(ALL, value, distance));
  return value;
}

// The sum over this lane and those below it.
template <typename T>
__device__ __forceinline__ T warp_scan(T value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance <<= 1) {
    const T below = __shfl_up_sync(ALL, value, distance);
    if (lane_of_thread() >= distance) value += below;
  }
  return value;
}

// The sum over the block, on every thread. The order of the additions is the same at every call.
template <typename T>
__device__ __forceinline__ T block_sum(T value) {
  __shared__ T parts[WARPS];
  __syncthreads();
  value = warp_sum(value);
  if (lane_of_thread() == 0) parts[warp_of_thread()] = value;
  __syncthreads();
  T total = 0;
  for (int w = 0; w < WARPS; ++w) total += parts[w];
  return total;
}

template <typename T>
__device__ __forceinline__ T block_max(T value) {
  __shared__ T parts[WARPS];
  __syncthreads();
  value = warp_max(value);
  if (lane_of_thread() == 0) parts[warp_of_thread()] = value;
  __syncthreads();
  T largest = parts[0];
  for (int w = 1; w < WARPS; ++w) largest = larger(largest, parts[w]);
  return largest;
}

// The sum over the threads below this one; `total` is the sum over all.
__device__ __forceinline__ u64 block_scan(u64 value, u64& total) {
  __shared__ u64 parts[WARPS];
  __syncthreads();
  const u64 inclusive = warp_scan(value);
  if (lane_of_thread() == 31) parts[warp_of_thread()] = inclusive;
  __syncthreads();
  u64 before = 0;
  total = 0;
  for (int w = 0; w < WARPS; ++w) {
    if (w < warp_of_thread()) before += parts[w];
    total += parts[w];
  }
  return before + inclusive - value;
}

// Makes of every block's number the sum of those before it, and returns the sum of all: by the block that ends last.
__device__ __forceinline__ u64 scan_blocks(u64* before) {
  const i64 blocks = gridDim.x, own = (blocks + THREADS - 1) / THREADS;
  const i64 from = smaller((i64)threadIdx.x * own, blocks), to = smaller(from + own, blocks);
  u64 sum = 0, total;
  for (i64 b = from; b < to; ++b) sum += before[b];
  u64 next = block_scan(sum, total);
  for (i64 b = from; b < to; ++b) {
    const u64 of_that = before[b];
    before[b] = next;
    next += of_that;
  }
  return total;
}

// Sums of a block go to sums[column * gridDim.x + blockIdx.x]: they are added up later in an order that does not
// depend on which block ends first.
template <int COLUMNS>
__device__ __forceinline__ void leave_sums(const double (&values)[COLUMNS], double* sums) {
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const double total = block_sum(values[c]);
    if (threadIdx.x == 0) sums[(i64)c * gridDim.x + blockIdx.x] = total;
  }
}

__device__ __forceinline__ void leave_top(Word top, u64* tops) {
  const Word largest = block_max(top);
  if (threadIdx.x == 0) tops[blockIdx.x] = largest;
}

__device__ __forceinline__ double collect_sum(const double* sums, i64 column, i64 blocks) {
  double total = 0;
  for (i64 b = threadIdx.x; b < blocks; b += THREADS) total += sums[column * blocks + b];
  return block_sum(total);
}

__device__ __forceinline__ u64 collect_top(const u64* tops, i64 blocks) {
  u64 top = 0;
  for (i64 b = threadIdx.x; b < blocks; b += THREADS) top = larger(top, tops[b]);
  return block_max(top);
}

// True on all threads of the one of `blocks` that ends last: what the others wrote is then there to be read. The ticket
// is zero before and behind.
__device__ __forceinline__ bool ends_last(u64* ticket, u64 blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(ticket, (u64)1) == blocks - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

__device__ __forceinline__ bool ends_last(State* state, u64 blocks) { return ends_last(&state->ticket, blocks); }

// What the blocks of a sweep leave, and what the one that ends last makes of it. Behind these words are the totals of
// all columns, the sums of the blocks column by column, and the largest magnitudes of the blocks. The host's Partials
// has the same layout.
struct Partials {
  u64 ticket;  // blocks of the running launch that have ended: zero before and behind
  u64 top;     // the bits of the largest magnitude
  u64 finite;  // whether they are those of a number

  __device__ __forceinline__ double* totals() { return reinterpret_cast<double*>(this + 1); }
  __device__ __forceinline__ const double* totals() const { return reinterpret_cast<const double*>(this + 1); }
};

// With COUNTED the first column is stored as an integer.
template <int COLUMNS, bool COUNTED>
__device__ __forceinline__ void add_up_sums(double (&sum)[COLUMNS], Partials* partials) {
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

__device__ __forceinline__ void add_up_top(const u64* tops, Partials* partials) {
  const u64 largest = collect_top(tops, gridDim.x);
  if (threadIdx.x != 0) return;
  partials->top = largest;
  partials->finite = largest < (u64)INFINITE;
}

// The end of every sweep that makes sums: `sum` has those of a thread. True on all threads of the block that ends last;
// there it has the totals then.
template <int COLUMNS, bool COUNTED = false>
__device__ __forceinline__ bool finish_sums(double (&sum)[COLUMNS], Partials* partials) {
  leave_sums(sum, partials->totals() + COLUMNS);
  if (!ends_last(&partials->ticket, gridDim.x)) return false;
  add_up_sums<COLUMNS, COUNTED>(sum, partials);
  return true;
}

// The same for the largest magnitude.
__device__ __forceinline__ void finish_top(Word top, Partials* partials) {
  u64* tops = reinterpret_cast<u64*>(partials->totals());
  leave_top(top, tops);
  if (ends_last(&partials->ticket, gridDim.x)) add_up_top(tops, partials);
}

// And for both.
template <int COLUMNS, bool COUNTED = false>
__device__ __forceinline__ void finish_sums_and_top(double (&sum)[COLUMNS], Word top, Partials* partials) {
  double* sums = partials->totals() + COLUMNS;
  u64* tops = reinterpret_cast<u64*>(sums + (i64)COLUMNS * gridDim.x);
  leave_sums(sum, sums);
  leave_top(top, tops);
  if (!ends_last(&partials->ticket, gridDim.x)) return;
  add_up_sums<COLUMNS, COUNTED>(sum, partials);
  add_up_top(tops, partials);
}

// What a thread has of an array's squared L2 norm.
__device__ __forceinline__ double sum_squares(const Word* array, i64 size) {
  double sum = 0;
  const bool even = aligned(array);
  for (i64 tile = blockIdx.x; tile * TILE < size; tile += gridDim.x) {
    const i64 first = tile * TILE + warp_of_thread() * WARP_TILE + lane_of_thread() * VEC;
    Items items;
    load(items, array, first, size, even && (tile + 1) * TILE <= size);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const double value = (double)as_real(items.item[r][j]);
        sum += value * value;
      }
    }
  }
  return sum;
}

// Where a place in what remains of an array lies in it, when of all groups of 1024 elements every `stride`-th remains.
__device__ __forceinline__ i64 strided(i64 place, i64 stride) {
  return place / GROUP * stride * GROUP + place % GROUP;
}

// What of every `stride`-th group lies above a limit: how much, by how much, squares of that.
__device__ __forceinline__ void sum_tail(
    const Word* array, i64 size, i64 remaining, i64 stride, Real limit, double (&sum)[3]) {
  u64 count = 0;
  const bool even = aligned(array);
  for (i64 tile = blockIdx.x; tile * TILE < remaining; tile += gridDim.x) {
    const i64 start = strided(tile * TILE + warp_of_thread() * WARP_TILE, stride);
    const i64 first = start + lane_of_thread() * VEC;
    const bool packed = even && start + WARP_TILE <= size;
    Items items;
    load(items, array, first, size, packed);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const Real magnitude = as_real(items.item[r][j] & MASK);
        // NaN is above everything. Zeros that stand for what is behind the end are above nothing.
        if (!(magnitude <= limit) && (packed || first + r * STRIP + j < size)) {
          const double over = (double)magnitude - (double)limit;
          ++count;
          sum[1] += over;
          sum[2] += over * over;
        }
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
  double rest = 0.0;  // what is infinite or NaN

  __device__ __forceinline__ void take(double magnitude) {
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

  __device__ __forceinline__ double sum() const {
    return rest + (double)exponent * 0.69314718055994530942 + log(significand);
  }
};
