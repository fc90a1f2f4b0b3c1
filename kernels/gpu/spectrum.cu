// Counts and energy of magnitudes in logarithmic bins. Sums are of integers, so that their order does not matter.
//
// A magnitude is a significand of 24 bits times a power of two that its bin determines. The square of the significand
// is summed to its upper 16 bits, rounded: that is 3e-5 at worst for one element. A block adds up to 2^16 of them in 32
// bits, which is why the largest is 2^16 - 1. Subnormal numbers have
// shorter significands; the error there is below 1e-80.

constexpr int BINS = 2048;
constexpr int GROUPS = 64;  // of a block
constexpr int SEEN = 256;   // neighbouring elements of a sample
constexpr int SHIFT = 20;
constexpr u32 HIDDEN = 1u << 23;

KERNEL spectrum(const Real* array, i64 size, i64 stride, u64* counters, u64* squares) {
  __shared__ u32 counts[BINS];
  __shared__ u32 sums[BINS];
  for (int b = threadIdx.x; b < BINS; b += THREADS) counts[b] = sums[b] = 0;
  __syncthreads();
  for (int g = 0; g < GROUPS; ++g) {
    const i64 start = ((i64)blockIdx.x * GROUPS + g) * GROUP;  // among the sampled elements
    if (start * stride >= size) break;
#pragma unroll
    for (int r = 0; r < GROUP / THREADS; ++r) {
      const i64 place = start + r * THREADS + threadIdx.x;
      const i64 i = place / SEEN * SEEN * stride + place % SEEN;
      if (i >= size) continue;
      const u32 magnitude = __float_as_uint((float)array[i]) & 0x7fffffffu;
      const u32 bin = magnitude >> SHIFT;
      atomicAdd(&counts[bin], 1u);
      if (bin >= 2040) {
        if (magnitude != INFINITE_FLOAT) atomicAdd(&sums[bin], 1u);  // NaN
      } else if (magnitude) {
        const u64 significand = magnitude >= HIDDEN ? (magnitude & (HIDDEN - 1)) | HIDDEN : magnitude;
        const u32 square = (u32)((significand * significand + (1ull << 31)) >> 32);
        atomicAdd(&sums[bin], square < 0xffffu ? square : 0xffffu);
      }
    }
  }
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS) {
    if (counts[b]) atomicAdd(&counters[b], (u64)counts[b]);
    if (sums[b]) atomicAdd(&squares[b], (u64)sums[b]);
  }
}

KERNEL finish_spectrum(const u64* counters, const u64* squares, i64* counts, double* energies) {
  for (int b = blockIdx.x * THREADS + threadIdx.x; b < BINS; b += gridDim.x * THREADS) {
    counts[b] = (i64)counters[b];
    if (b >= 2040) {
      energies[b] = squares[b] ? as_real(NAN_DOUBLE) : counters[b] ? as_real(INFINITE_DOUBLE) : 0.0;
    } else {
      const int exponent = larger(b >> 3, 1) - 150;  // of the significand's last bit
      energies[b] = ldexp((double)squares[b], 2 * exponent + 32);
    }
  }
}
