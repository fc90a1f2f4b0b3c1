// Shared by all sources. Each source is compiled twice, with REAL defined as float and as double, after this text;
// nothing is included, since NVRTC comes without headers.
//
// An array is cut into tiles of 16 KiB. Every warp has a part of a tile, and in each of its rounds lane l holds the
// l-th 16 bytes: ascending by warp, round, lane and item is ascending by index.

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
// The compiler spills registers to fit more blocks than these on a multiprocessor, where their number is not given.
#define KERNEL_OF(BLOCKS) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
#define DEVICE __device__ __forceinline__

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
constexpr int ITEMS = ROUNDS * VEC;
constexpr int STRIP = 32 * VEC;
constexpr int WARP_TILE = ROUNDS * STRIP;
[[maybe_unused]] constexpr int TILE = WARPS * WARP_TILE;
constexpr int GROUP = 1024;
constexpr u32 ALL = 0xffffffffu;

// Limits of the types.
[[maybe_unused]] constexpr Word MASK = ~(Word)0 >> 1;  // all bits but the sign
[[maybe_unused]] constexpr u32 INFINITE_FLOAT = 0x7f800000u;
[[maybe_unused]] constexpr u64 INFINITE_DOUBLE = 0x7ff0000000000000ull;
[[maybe_unused]] constexpr Word INFINITE = sizeof(Real) == 4 ? (Word)INFINITE_FLOAT : (Word)INFINITE_DOUBLE;
[[maybe_unused]] constexpr u32 NAN_FLOAT = 0x7fc00000u;
[[maybe_unused]] constexpr u64 NAN_DOUBLE = 0x7ff8000000000000ull;
[[maybe_unused]] constexpr int FRACTION = 23;          // bits of a float32 after its exponent
[[maybe_unused]] constexpr int SPARE = 32 - FRACTION;  // bits of a random word that such a fraction does not use
[[maybe_unused]] constexpr float LARGEST_FLOAT = 3.402823466385288598e38f;
// Levels of a code are computed from a step that was rounded, and must stay inside float32.
[[maybe_unused]] constexpr double LARGEST_LEVEL = (double)LARGEST_FLOAT * (1 - 2.384185791015625e-7);
[[maybe_unused]] constexpr double SMALLEST_NORMAL_FLOAT = 1.1754943508222875e-38;
[[maybe_unused]] constexpr u32 BIASES = 112u << 23;  // between the exponents of half and float32

// Digits of a radix selection.
[[maybe_unused]] constexpr int DIGIT = 11;
[[maybe_unused]] constexpr int DIGIT_BINS = 1 << DIGIT;

// Format of stored values: the dtype of the output, IEEE half precision or bfloat16. The host has the same numbers.
enum Stored { AS_OUT = 0, FP16 = 1, BF16 = 2 };

struct alignas(16) Pack {
  Word item[VEC];
};

// The elements of a tile that one thread has.
struct Items {
  Word item[ITEMS];
};

// State of a selection between launches. The host names the fields by their place.
struct State {
  u64 candidates;  // reserved so far by the sweep that lists them
  u64 ticket;      // blocks of the running launch that have ended
  u64 usable;      // whether the list holds everything that is asked for
  u64 known;       // digits of the k-th magnitude found so far, at their place
  u64 remaining;   // its rank among those that share these digits
  u64 threshold;   // magnitude bits
  u64 ties;        // number of elements equal to the threshold that are taken
  u64 offset;      // where the selection starts in its output
  u64 end;         // where it would end if there were room
  u64 listed;      // earlier value of `candidates`, kept for the caller
  u64 gap;         // bits of a double: fraction of the threshold by which the next bound stays below it, once known
  u64 exact;       // whether the estimate is discarded and exactly the k largest are taken
  u64 k;           // number of these
};

DEVICE float as_real(u32 word) { return __uint_as_float(word); }
DEVICE double as_real(u64 word) { return __longlong_as_double((i64)word); }
DEVICE u32 as_word(float value) { return __float_as_uint(value); }
DEVICE u64 as_word(double value) { return (u64)__double_as_longlong(value); }
DEVICE int lane_of_thread() { return threadIdx.x & 31; }
DEVICE int warp_of_thread() { return threadIdx.x >> 5; }

template <typename... Pointers>
DEVICE bool aligned(Pointers... pointers) {
  return (... && (((u64)pointers & 15) == 0));
}

DEVICE bool is_number(float value) { return (as_word(value) & ~(1u << 31)) < INFINITE_FLOAT; }
DEVICE bool is_number(double value) { return (as_word(value) & ~(1ull << 63)) < INFINITE_DOUBLE; }

// The nearest float32; finite values stay finite.
DEVICE float single_of(float value) { return value; }
DEVICE float single_of(double value) {
  const float single = (float)value;
  const bool overflow = (as_word(single) & ~(1u << 31)) == INFINITE_FLOAT && is_number(value);
  return overflow ? copysignf(LARGEST_FLOAT, single) : single;
}

// A product that is rounded before anything is added to it. Values that every rank computes for itself need it: the
// compiler fuses multiplication and addition where it can, and another processor may not.
DEVICE float product(float first, float second) { return __fmul_rn(first, second); }
DEVICE double product(double first, double second) { return __dmul_rn(first, second); }

// The number of IEEE half precision, or bfloat16, that 16 bits encode.
template <Stored WIRE>
DEVICE float float_of(u16 half) {
  if (WIRE == BF16) return __uint_as_float((u32)half << 16);
  const u32 magnitude = half & 0x7fffu;
  u32 bits = magnitude << 13;
  if (magnitude >= 0x7c00) {
    bits |= INFINITE_FLOAT;
  } else if (magnitude >= 0x400) {
    bits += BIASES;
  } else {
    // The shifted bits of a subnormal half are a subnormal float32, which CuPy has treated as zero.
    bits = __float_as_uint(product((float)magnitude, 5.9604644775390625e-8f));
  }
  return __uint_as_float(bits | (half & 0x8000u) << 16);
}

struct alignas(2 * VEC) Halves {
  u16 item[VEC];
};

DEVICE bool aligned_halves(const void* pointer) { return (u64)pointer % sizeof(Halves) == 0; }

// 32 random bits of an element, the upper ones best; the host derives `low` and `high` from a key. The CPU's bits.py
// has the same hash.
DEVICE u32 draw(u32 index, u32 low, u32 high) {
  u32 word = index ^ low;
  word = (word ^ word >> 16) * 0x7feb352du;
  word = (word ^ word >> 15 ^ high) * 0x846ca68bu;
  return word ^ word >> 16;
}

template <typename T>
DEVICE T larger(T first, T second) {
  return first > second ? first : second;
}

template <typename T>
DEVICE T smaller(T first, T second) {
  return first < second ? first : second;
}

// An argument that is a number or, where it is known on the device only, an address.
template <typename T, typename V>
DEVICE T scalar_arg(const T* address, V value) {
  return address ? *address : (T)value;
}

// Grid-stride loop: `for (const i64 i : grid_stride(size))`.
struct Stop {};
struct Stride {
  i64 index, size, step;

  DEVICE Stride begin() const { return *this; }
  DEVICE Stop end() const { return {}; }
  DEVICE bool operator!=(Stop) const { return index < size; }
  DEVICE void operator++() { index += step; }
  DEVICE i64 operator*() const { return index; }
};

// Every thread of the grid has an index.
DEVICE Stride grid_stride(i64 size) {
  return {(i64)blockIdx.x * THREADS + threadIdx.x, size, (i64)gridDim.x * THREADS};
}

// Every warp has one.
DEVICE Stride warp_stride(i64 size) {
  return {(i64)blockIdx.x * WARPS + warp_of_thread(), size, (i64)gridDim.x * WARPS};
}

// A thread's part of a tile of an array.
struct Tile {
  i64 number;
  i64 first;    // index of the thread's first element
  i64 size;     // of the array
  bool packed;  // whether the tile ends below `size` and its addresses are multiples of 16

  DEVICE i64 index(int n) const { return first + n / VEC * STRIP + n % VEC; }
  DEVICE bool contains(int n) const { return packed || index(n) < size; }
};

DEVICE Tile tile_of(i64 number, int warp, i64 size, bool even) {
  const i64 first = number * TILE + warp * WARP_TILE + lane_of_thread() * VEC;
  return {number, first, size, even && (number + 1) * TILE <= size};
}

// Position of a sampled element in the array, when every `stride`-th group of 1024 elements is sampled.
DEVICE i64 strided(i64 place, i64 stride) { return place / GROUP * stride * GROUP + place % GROUP; }

// A tile of the sampled elements.
DEVICE Tile sampled_tile(i64 number, i64 stride, i64 size, bool even) {
  const i64 start = strided(number * TILE + warp_of_thread() * WARP_TILE, stride);
  return {number, start + lane_of_thread() * VEC, size, even && start + WARP_TILE <= size};
}

// Loop over tiles, a block to a tile: `for (const Tile tile : each_tile(size, even))`.
struct Tiles {
  i64 number, blocks, size;
  bool even;  // whether the arrays are aligned

  DEVICE Tiles begin() const { return *this; }
  DEVICE Stop end() const { return {}; }
  DEVICE bool operator!=(Stop) const { return number * TILE < size; }
  DEVICE void operator++() { number += blocks; }
  DEVICE Tile operator*() const { return tile_of(number, warp_of_thread(), size, even); }
};

DEVICE Tiles each_tile(i64 size, bool even, i64 blocks) { return {blockIdx.x, blocks, size, even}; }
DEVICE Tiles each_tile(i64 size, bool even) { return each_tile(size, even, gridDim.x); }

// Elements past the end read as zero.
DEVICE Items load(const Word* array, const Tile& tile) {
  Items items;
  if (tile.packed) {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      const Pack pack = *reinterpret_cast<const Pack*>(array + tile.first + r * STRIP);
#pragma unroll
      for (int j = 0; j < VEC; ++j) items.item[r * VEC + j] = pack.item[j];
    }
  } else {
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) items.item[n] = tile.index(n) < tile.size ? array[tile.index(n)] : (Word)0;
  }
  return items;
}

DEVICE void store(const Items& items, Word* array, const Tile& tile) {
  if (tile.packed) {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < VEC; ++j) pack.item[j] = items.item[r * VEC + j];
      *reinterpret_cast<Pack*>(array + tile.first + r * STRIP) = pack;
    }
  } else {
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      if (tile.index(n) < tile.size) array[tile.index(n)] = items.item[n];
    }
  }
}

template <typename T>
DEVICE T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) value += __shfl_xor_sync(ALL, value, distance);
  return value;
}

template <typename T>
DEVICE T warp_max(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) value = larger(value, __shfl_xor_sync(ALL, value, distance));
  return value;
}

// The sum over this lane and those below it.
template <typename T>
DEVICE T warp_scan(T value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance <<= 1) {
    const T below = __shfl_up_sync(ALL, value, distance);
    if (lane_of_thread() >= distance) value += below;
  }
  return value;
}

// The sum over the block, on every thread. The order of the additions is the same at every call.
template <typename T>
DEVICE T block_sum(T value) {
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
DEVICE T block_max(T value) {
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
DEVICE u64 block_scan(u64 value, u64& total) {
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

// Finds the bin of a radix selection that holds the `rank`-th element, from the highest bin down, and clears all bins.
// True on the one thread that has that bin; `above` is the number of elements in higher ones.
template <typename Count>
DEVICE bool find_bin(Count* bins, u64 rank, u64& bin, u64& above) {
  constexpr int EACH = DIGIT_BINS / THREADS;
  const int highest = DIGIT_BINS - 1 - (int)threadIdx.x * EACH;
  u64 counts[EACH], sum = 0, total;
#pragma unroll
  for (int b = 0; b < EACH; ++b) {
    counts[b] = bins[highest - b];
    bins[highest - b] = 0;
    sum += counts[b];
  }
  u64 before = block_scan(sum, total);
  bool found = false;
#pragma unroll
  for (int b = 0; b < EACH; ++b) {
    if (before < rank && rank <= before + counts[b]) {
      bin = (u64)(highest - b);
      above = before;
      found = true;
    }
    before += counts[b];
  }
  return found;
}

// Replaces every block's number by the sum of those before it, and returns the sum of all: by the block that ends last.
DEVICE u64 scan_blocks(u64* before) {
  const i64 blocks = gridDim.x, each = (blocks + THREADS - 1) / THREADS;
  const i64 from = smaller((i64)threadIdx.x * each, blocks), to = smaller(from + each, blocks);
  u64 sum = 0, total;
  for (i64 b = from; b < to; ++b) sum += before[b];
  u64 next = block_scan(sum, total);
  for (i64 b = from; b < to; ++b) {
    const u64 number = before[b];
    before[b] = next;
    next += number;
  }
  return total;
}

// True on all threads of the one of `blocks` that ends last, which can read the writes of all others. The ticket is
// zero before and after the launch.
DEVICE bool ends_last(u64* ticket, u64 blocks) {
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

DEVICE bool ends_last(State* state, u64 blocks) { return ends_last(&state->ticket, blocks); }

// Writes the count of each warp's tile, and of all tiles before each block's, of which a warp has one. True on all
// threads of the block that ends last; `total` is the sum over all tiles there.
DEVICE bool count_before(u64 of_warp, i64 tile, i64 tiles, u64* of_tiles, u64* before, State* state, u64& total) {
  if (lane_of_thread() == 0 && tile < tiles) of_tiles[tile] = of_warp;
  const u64 of_block = block_sum(lane_of_thread() == 0 ? of_warp : (u64)0);
  if (threadIdx.x == 0) before[blockIdx.x] = of_block;
  if (!ends_last(state, gridDim.x)) return false;
  total = scan_blocks(before);
  return true;
}

// The elements before this warp's tile, from the counts that `count_before` has written.
DEVICE u64 elements_before(i64 tile, const u64* of_tiles, const u64* before) {
  const int lane = lane_of_thread(), warp = warp_of_thread();
  return before[blockIdx.x] + warp_sum(lane < warp ? of_tiles[tile - warp + lane] : (u64)0);
}

// Running count of selected elements, over strips of 32: those above `limit`, and the first `ties` equal to it.
struct Selection {
  Word limit;
  u64 ties, above, equal;

  DEVICE Selection(const State* state, u64 before)
      : limit((Word)state->threshold), ties(state->ties), above(before >> 32), equal(before & 0xffffffffu) {}

  // Whether this lane's element is selected; `place` is the number of selected elements before it.
  DEVICE bool next(Word magnitude, bool inside, u64& place) {
    const u32 below = (1u << lane_of_thread()) - 1;
    const u32 larger_ones = __ballot_sync(ALL, inside && magnitude > limit);
    const u32 equal_ones = __ballot_sync(ALL, inside && magnitude == limit);
    const u64 ties_before = equal + __popc(equal_ones & below);
    place = above + __popc(larger_ones & below) + smaller(ties_before, ties);
    above += __popc(larger_ones);
    equal += __popc(equal_ones);
    return inside && (magnitude > limit || (magnitude == limit && ties_before < ties));
  }
};

