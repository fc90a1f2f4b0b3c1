// Numbers that lie here and there, put side by side.

// A thread for each number. Byte n of `widths` says how many bytes the n-th has: 1, 4 or 8.
extern "C" __global__ void __launch_bounds__(THREADS) collect(
    const void* a, const void* b, const void* c, const void* d, const void* e, const void* f, const void* g,
    const void* h, i64 widths, i64 number, u64* out) {
  const int n = threadIdx.x;
  if (n >= number) return;
  // Chosen by comparisons: an array that is indexed by a variable would lie in memory.
  const void* where = n == 0 ? a : n == 1 ? b : n == 2 ? c : n == 3 ? d : n == 4 ? e : n == 5 ? f : n == 6 ? g : h;
  const int width = (int)(widths >> (8 * n) & 255);
  if (width == 1)
    out[n] = *static_cast<const u8*>(where);
  else if (width == 4)
    out[n] = *static_cast<const u32*>(where);
  else
    out[n] = *static_cast<const u64*>(where);
}
