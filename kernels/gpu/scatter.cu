// From arrays to selections and back. One thread writes an element of an output and adds repeated ones in their order:
// the order of atomic additions would differ from rank to rank.

struct Check {
  u64 outside;    // an index is out of range
  u64 unordered;  // an index is below the one before
};

KERNEL check(const u32* indices, i64 count, i64 size, Check* flags) {
  for (const i64 j : grid_stride(count)) {
    const u32 index = indices[j];
    if ((i64)index >= size) flags->outside = 1;
    if (j > 0 && indices[j - 1] > index) flags->unordered = 1;
  }
}

KERNEL gather(const Real* array, const u32* indices, i64 count, Real* out, const Check* flags, u8* good) {
  const bool outside = flags->outside != 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *good = !outside;
  if (outside) return;
  for (const i64 j : grid_stride(count)) out[j] = array[indices[j]];
}

KERNEL scatter_add(
    const u32* indices, const Real* values, i64 count, const double* factor, double factor_value, Real* out,
    const Check* flags, u8* good) {
  const bool refused = flags->outside || flags->unordered;
  const Real by = (Real)scalar_arg(factor, factor_value);
  if (blockIdx.x == 0 && threadIdx.x == 0) *good = !refused;
  if (refused) return;
  for (const i64 j : grid_stride(count)) {
    const u32 index = indices[j];
    if (j > 0 && indices[j - 1] == index) continue;
    Real sum = out[index];
    for (i64 next = j; next < count && indices[next] == index; ++next) sum += product(by, values[next]);
    out[index] = sum;
  }
}

KERNEL subtract_at(const u32* indices, const Real* values, i64 count, Real* out) {
  for (const i64 j : grid_stride(count)) out[indices[j]] -= values[j];
}

KERNEL clear_at(const u32* indices, i64 count, Real* out) {
  for (const i64 j : grid_stride(count)) out[indices[j]] = 0;
}
