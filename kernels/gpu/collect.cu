// Gathers scattered numbers into one array.

// A thread has a number. Byte n of `widths` is the width of the n-th in bytes: 1, 4 or 8.
KERNEL collect(
    const void* a, const void* b, const void* c, const void* d, const void* e, const void* f, const void* g,
    const void* h, i64 widths, i64 number, u64* out) {
  const int n = threadIdx.x;
  if (n >= number) return;
  // Comparisons, since an array indexed by a variable would lie in memory.
  const void* source = n == 0 ? a : n == 1 ? b : n == 2 ? c : n == 3 ? d : n == 4 ? e : n == 5 ? f : n == 6 ? g : h;
  const int width = (int)(widths >> (8 * n) & 255);
  if (width == 1)
    out[n] = *static_cast<const u8*>(source);
  else if (width == 4)
    out[n] = *static_cast<const u32*>(source);
  else
    out[n] = *static_cast<const u64*>(source);
}
