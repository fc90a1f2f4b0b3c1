// Messages: the header before a payload, the numbers after an array, and the sum of several selections.

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
  KERNEL_OF(6) NAME(                                                                                                   \
      const u8* messages, const u8* indices, i64 number, i64 values_at, i64 values_step, i64 indices_at,               \
      i64 indices_step, i64 count, const i64* table, const double* factor, double factor_value, Real* out, i64 size,   \
      Verdict* verdict, const u32* sent, const Real* sent_values, i64 sent_count, Real* left) {                        \
    for (const i64 j : grid_stride(sent_count)) left[sent[j]] -= sent_values[j];                                       \
    const Selections lists{messages, indices, values_at, values_step, indices_at, indices_step, count, table};         \
    add<STORED>(lists, number, (Real)scalar_arg(factor, factor_value), out, size, verdict);                            \
  }

SPARSE_ADD(sparse_add, AS_OUT)
SPARSE_ADD(sparse_add_fp16, FP16)
SPARSE_ADD(sparse_add_bf16, BF16)
