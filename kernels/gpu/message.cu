// Messages: the header before a payload, the numbers after an array, and the sum of several selections.

constexpr u64 NONFINITE = 1ull << 8;

// `left` is the energy that was not selected, which rounding may have made negative. NaN stays.
DEVICE void set_header(u64* words, i64 lead, i64 finite, double energy, double left, double rounding) {
  words[0] = (u64)lead | (finite ? 0 : NONFINITE);
  words[1] = as_word(energy);
  words[2] = as_word((left < 0 ? 0.0 : left) + rounding);
}

// With `partials`, `kept` is the squared norm of `values`, and the block that ends last writes.
KERNEL write_header(
    u64* words, i64 lead, const u8* finite, i64 finite_value, const double* energy, double energy_value, i64 partly,
    const double* kept, double kept_value, const Word* values, i64 size, Partials* partials, const double* rounding,
    double rounding_value) {
  double selected[1] = {0};
  if (partials) {
    selected[0] = sum_squares(values, size);
    if (!finish_sums(selected, partials)) return;
  } else if (partly) {
    selected[0] = scalar_arg(kept, kept_value);
  }
  if (threadIdx.x != 0) return;
  const double all = scalar_arg(energy, energy_value);
  set_header(
      words, lead, scalar_arg(finite, finite_value), all, partly ? all - selected[0] : 0,
      scalar_arg(rounding, rounding_value));
}

// A message of plain values, and of indices or their code: at least `least` indices are coded, if that takes at most
// `most` bytes each. The block that ends last has the squared norm of the values, for the header, and clears the code
// where indices do not ascend below `numel`.
KERNEL write_pairs(
    u64* words, i64 lead, const u8* finite, i64 finite_value, const double* energy, double energy_value,
    const Word* values, const u32* indices, const i64* number, i64 number_value, i64 numel, i64 least, i64 most,
    Partials* partials) {
  const i64 count = scalar_arg(number, number_value);
  const CodeShape shape = code_shape(count, numel);
  const i64 code_words = shape.low + shape.upper;
  const bool coded = count >= least && 8 * code_words <= most * count;
  Word* out_values = reinterpret_cast<Word*>(words + 3);
  u64* code = words + 3 + (count * (i64)sizeof(Word) + 7) / 8;
  u32* out_indices = reinterpret_cast<u32*>(code);
  for (const i64 i : grid_stride(count)) {
    out_values[i] = values[i];
    if (!coded) out_indices[i] = indices[i];
  }
  bool wrong = false;
  if (coded) {
    for (const i64 w : grid_stride(code_words)) code[w] = word_of_code(indices, count, shape, w);
    wrong = out_of_order(indices, count, numel);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && count % 2) {
    if (sizeof(Word) == 4) out_values[count] = 0;
    if (!coded) out_indices[count] = 0;
  }
  double sums[2] = {sum_squares(values, count), (double)wrong};
  if (!finish_sums(sums, partials)) return;
  for (i64 w = threadIdx.x; sums[1] && w < code_words; w += THREADS) code[w] = 0;
  if (threadIdx.x != 0) return;
  const double all = scalar_arg(energy, energy_value);
  set_header(
      words, lead + ((i64)coded << 24) + (i64)((u64)count << 32), scalar_arg(finite, finite_value), all, all - sums[0], 0);
}

KERNEL write_tail(
    Real* out, const u8* finite, i64 finite_value, const u8* stale, i64 stale_value, const double* energy,
    double energy_value, const double* lost, double lost_value) {
  if (threadIdx.x != 0) return;
  out[0] = scalar_arg(finite, finite_value) ? (Real)0 : (Real)1;
  out[1] = scalar_arg(stale, stale_value) ? (Real)1 : (Real)0;
  out[2] = (Real)scalar_arg(energy, energy_value);
  out[3] = (Real)scalar_arg(lost, lost_value);
}

// Places of the selections: equally long and at even distances, or from a table of three numbers for each.
struct Selections {
  const u8* messages;
  const u8* indices;
  i64 values_at, values_step, indices_at, indices_step, count;
  const i64* table;

  DEVICE const u8* values_of(i64 r) const { return messages + (table ? table[3 * r] : values_at + r * values_step); }
  DEVICE const u32* indices_of(i64 r) const {
    return reinterpret_cast<const u32*>(indices + (table ? table[3 * r + 1] : indices_at + r * indices_step));
  }
  DEVICE i64 count_of(i64 r) const { return table ? table[3 * r + 2] : count; }

  // Place of the first index of the r-th selection that is not below a limit. Where indices do not ascend, it is some
  // place.
  DEVICE i64 first_from(i64 r, i64 limit) const {
    const u32* list = indices_of(r);
    i64 low = 0, high = count_of(r);
    while (low < high) {
      const i64 middle = (low + high) / 2;
      if ((i64)list[middle] < limit)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};

template <Stored STORED>
DEVICE Real value_of(const u8* values, i64 j) {
  if (STORED == AS_OUT) return reinterpret_cast<const Real*>(values)[j];
  return (Real)float_of<STORED>(reinterpret_cast<const u16*>(values)[j]);
}

// A block has a part of the output, to which it adds one selection after the other. An index is wrong where it is out
// of range, or not above the one before.
template <Stored STORED>
DEVICE void add(const Selections& lists, i64 number, Real by, Real* out, i64 size, Verdict* verdict) {
  constexpr i64 AT_ONCE = THREADS / 2;  // selections whose bounds are found at once
  __shared__ i64 bounds[THREADS];
  const i64 each = (size + gridDim.x - 1) / gridDim.x, from = blockIdx.x * each, to = smaller(from + each, size);
  bool wrong = false;
  for (i64 first = 0; first < number; first += AT_ONCE) {
    const i64 mine = first + threadIdx.x / 2, last = smaller(first + AT_ONCE, number);
    __syncthreads();
    if (mine < last) bounds[threadIdx.x] = lists.first_from(mine, threadIdx.x % 2 ? to : from);
    __syncthreads();
    for (i64 r = first; r < last; ++r) {
      const u32* indices = lists.indices_of(r);
      wrong |= out_of_order(indices, lists.count_of(r), size);
      const i64 stop = bounds[2 * (r - first) + 1];
      for (i64 j = bounds[2 * (r - first)] + threadIdx.x; j < stop; j += THREADS) {
        const i64 index = indices[j];
        if (index >= from && index < to) out[index] += product(by, value_of<STORED>(lists.values_of(r), j));
      }
      __syncthreads();
    }
  }
  gather_faults(wrong, verdict);
}

#define SPARSE_ADD(NAME, STORED)                                                                                       \
  KERNEL NAME(                                                                                                         \
      const u8* messages, const u8* indices, i64 number, i64 values_at, i64 values_step, i64 indices_at,               \
      i64 indices_step, i64 count, const i64* table, const double* factor, double factor_value, Real* out, i64 size,   \
      Verdict* verdict) {                                                                                              \
    const Selections lists{messages, indices, values_at, values_step, indices_at, indices_step, count, table};         \
    add<STORED>(lists, number, (Real)scalar_arg(factor, factor_value), out, size, verdict);                            \
  }

SPARSE_ADD(sparse_add, AS_OUT)
SPARSE_ADD(sparse_add_fp16, FP16)
SPARSE_ADD(sparse_add_bf16, BF16)
