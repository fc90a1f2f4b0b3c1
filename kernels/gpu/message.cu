// Messages: the words that stand before the payload of one, the numbers behind an array, and what selections add up to.

constexpr u64 NONFINITE = 1ull << 8;

// `left` is what of the energy was not selected, which rounding may have made less than nothing. NaN stays what it is.
__device__ __forceinline__ void put_header(
    u64* words, i64 lead, i64 finite, double energy, double left, double rounding) {
  words[0] = (u64)lead | (finite ? 0 : NONFINITE);
  words[1] = as_word(energy);
  words[2] = as_word((left < 0 ? 0.0 : left) + rounding);
}

// With `partials` the values are there of which `kept` is the squared norm, and the block that ends last writes.
extern "C" __global__ void __launch_bounds__(THREADS) write_header(
    u64* words, i64 lead, const u8* finite, i64 finite_value, const double* energy, double energy_value, i64 partly,
    const double* kept, double kept_value, const Word* values, i64 size, Partials* partials, const double* rounding,
    double rounding_value) {
  double own[1] = {0};
  if (partials) {
    own[0] = sum_squares(values, size);
    if (!finish_sums(own, partials)) return;
  } else if (partly) {
    own[0] = given(kept, kept_value);
  }
  if (threadIdx.x != 0) return;
  const double all = given(energy, energy_value);
  put_header(words, lead, given(finite, finite_value), all, partly ? all - own[0] : 0, given(rounding, rounding_value));
}

// A whole message of plain values and indices: a copy of both, zeros where they are padded, and the header, for which
// the block that ends last has the squared norm of the values.
extern "C" __global__ void __launch_bounds__(THREADS) write_pairs(
    u64* words, i64 lead, const u8* finite, i64 finite_value, const double* energy, double energy_value,
    const Word* values, const u32* indices, i64 count, i64 middle, Partials* partials) {
  u8* message = reinterpret_cast<u8*>(words);
  Word* own_values = reinterpret_cast<Word*>(message + 24);
  u32* own_indices = reinterpret_cast<u32*>(message + middle);
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (i64)gridDim.x * THREADS) {
    own_values[i] = values[i];
    own_indices[i] = indices[i];
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && count % 2) {
    if (sizeof(Word) == 4) own_values[count] = 0;
    own_indices[count] = 0;
  }
  double kept[1] = {sum_squares(values, count)};
  if (!finish_sums(kept, partials) || threadIdx.x != 0) return;
  const double all = given(energy, energy_value);
  put_header(words, lead, given(finite, finite_value), all, all - kept[0], 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) write_tail(
    Real* out, const u8* finite, i64 finite_value, const u8* stale, i64 stale_value, const double* energy,
    double energy_value, const double* lost, double lost_value) {
  if (threadIdx.x != 0) return;
  out[0] = given(finite, finite_value) ? (Real)0 : (Real)1;
  out[1] = given(stale, stale_value) ? (Real)1 : (Real)0;
  out[2] = (Real)given(energy, energy_value);
  out[3] = (Real)given(lost, lost_value);
}

// Where the selections are: at even distances and equally long, or as a table says, with three numbers for each.
struct Selections {
  const u8* messages;
  const u8* indices;
  i64 values_at, values_step, indices_at, indices_step, count;
  const i64* table;

  __device__ __forceinline__ const u8* values_of(i64 r) const {
    return messages + (table ? table[3 * r] : values_at + r * values_step);
  }
  __device__ __forceinline__ const u32* indices_of(i64 r) const {
    return reinterpret_cast<const u32*>(indices + (table ? table[3 * r + 1] : indices_at + r * indices_step));
  }
  __device__ __forceinline__ i64 count_of(i64 r) const { return table ? table[3 * r + 2] : count; }

  // Where the r-th has an index, or -1. If its indices do not ascend, nothing outside of them is looked at either.
  __device__ __forceinline__ i64 find(i64 r, u32 index) const {
    const u32* own = indices_of(r);
    const i64 length = count_of(r);
    i64 low = 0, high = length;
    while (low < high) {
      const i64 middle = (low + high) / 2;
      if (own[middle] < index)
        low = middle + 1;
      else
        high = middle;
    }
    return low < length && own[low] == index ? low : -1;
  }
};

enum Stored { AS_OUT, FP16, BF16 };

template <Stored STORED>
__device__ __forceinline__ Real value_of(const u8* values, i64 j) {
  if (STORED == AS_OUT) return reinterpret_cast<const Real*>(values)[j];
  return (Real)float_of<STORED == BF16>(reinterpret_cast<const u16*>(values)[j]);
}

struct Added {
  u64 ticket;  // blocks that have ended
  u64 wrong;   // indices that are out of range, or not above the one before
  u64 good;    // none is, and the caller knows of nothing else that is wrong
};

// The thread of the first selection that has an index makes its sum, in their order.
template <Stored STORED>
__device__ __forceinline__ void add(
    const Selections& lists, i64 number, i64 total, Real by, Real* out, i64 size, const u8* right,
    i64 right_value, Added* added) {
  const i64 step = (i64)gridDim.x * THREADS;
  i64 r = 0, before = 0;  // elements of the selections before the r-th
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < total; i += step) {
    while (i - before >= lists.count_of(r)) before += lists.count_of(r++);
    const i64 j = i - before;
    const u32* own = lists.indices_of(r);
    const u32 index = own[j];
    if ((i64)index >= size || (j > 0 && own[j - 1] >= index)) {
      atomicAdd(&added->wrong, (u64)1);
      continue;
    }
    bool first = true;
    for (i64 s = 0; s < r && first; ++s) first = lists.find(s, index) < 0;
    if (!first) continue;
    Real sum = out[index] + product(by, value_of<STORED>(lists.values_of(r), j));
    for (i64 s = r + 1; s < number; ++s) {
      const i64 at = lists.find(s, index);
      if (at >= 0) sum += product(by, value_of<STORED>(lists.values_of(s), at));
    }
    out[index] = sum;
  }
  if (ends_last(&added->ticket, gridDim.x) && threadIdx.x == 0)
    added->good = given(right, right_value) && added->wrong == 0;
}

#define SPARSE_ADD(NAME, STORED)                                                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                                       \
      const u8* messages, const u8* indices, i64 number, i64 values_at, i64 values_step, i64 indices_at,            \
      i64 indices_step, i64 count, const i64* table, i64 total, const double* factor, double factor_value,          \
      Real* out, i64 size, const u8* right, i64 right_value, Added* added) {                                        \
    const Selections lists{messages, indices, values_at, values_step, indices_at, indices_step, count, table};      \
    add<STORED>(                                                                                                    \
        lists, number, total, (Real)given(factor, factor_value), out, size, right, right_value, added);             \
  }

SPARSE_ADD(sparse_add, AS_OUT)
SPARSE_ADD(sparse_add_fp16, FP16)
SPARSE_ADD(sparse_add_bf16, BF16)
