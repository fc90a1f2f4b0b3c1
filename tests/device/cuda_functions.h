// Functions of CUDA's language, by the emulation of emulator.h.

namespace emulator {
UNSEEN inline void look_aligned(void* p, unsigned size, bool writes) {
  if (!watched) return;
  if ((uintptr_t)p % size) fail("an access that is not aligned");
  look(p, size, writes, false);
}
}  // namespace emulator

#define LOOKS(SIZE)                                                                                               \
  extern "C" UNSEEN void __tsan_read##SIZE(void* p) { emulator::look_aligned(p, SIZE, false); }                   \
  extern "C" UNSEEN void __tsan_write##SIZE(void* p) { emulator::look_aligned(p, SIZE, true); }                   \
  extern "C" UNSEEN void __tsan_unaligned_read##SIZE(void* p) { __tsan_read##SIZE(p); }                           \
  extern "C" UNSEEN void __tsan_unaligned_write##SIZE(void* p) { __tsan_write##SIZE(p); }
LOOKS(1) LOOKS(2) LOOKS(4) LOOKS(8) LOOKS(16)
extern "C" UNSEEN void __tsan_read_range(void* p, long size) {
  if (emulator::watched) emulator::look(p, size, false, false);
}
extern "C" UNSEEN void __tsan_write_range(void* p, long size) {
  if (emulator::watched) emulator::look(p, size, true, false);
}
extern "C" void __tsan_init() {}

UNSEEN inline void __syncthreads() { emulator::meet(emulator::block, emulator::BARRIER, blockDim.x); }
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulator::exchange(mask, value, lane & 31, emulator::SHUFFLE);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return emulator::exchange(mask, value, (threadIdx.x ^ lanes) & 31, emulator::SHUFFLE_XOR, lanes);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  const unsigned lane = threadIdx.x & 31;
  return emulator::exchange(mask, value, lane < distance ? lane : lane - distance, emulator::SHUFFLE_UP, distance);
}

UNSEEN inline unsigned __ballot_sync(unsigned mask, int predicate) {
  unsigned votes = 0;
  const uint64_t own = predicate != 0;
  if (mask != 0xffffffffu) emulator::fail("a part of a warp is not emulated");
  emulator::Group& warp = emulator::warps[threadIdx.x / 32];
  warp.values[warp.generation & 1][threadIdx.x % 32] = own;
  const unsigned generation = emulator::meet(warp, emulator::BALLOT, 32);
  for (int lane = 0; lane < 32; ++lane) votes |= (unsigned)warp.values[generation & 1][lane] << lane;
  return votes;
}

template <typename T>
UNSEEN T atomicAdd(T* address, T value) {
  if (emulator::watched) emulator::look(address, sizeof value, true, true);
  const T before = *address;
  *address = before + value;
  return before;
}

template <typename T>
UNSEEN T atomicOr(T* address, T value) {
  if (emulator::watched) emulator::look(address, sizeof value, true, true);
  const T before = *address;
  *address = before | value;
  return before;
}

// Products that are rounded by themselves, where the compiler may join others with a sum, too.
inline float __fmul_rn(float first, float second) {
  volatile float product = first * second;
  return product;
}
inline double __dmul_rn(double first, double second) {
  volatile double product = first * second;
  return product;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <typename To, typename From>
To same_bits(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  memcpy(&to, &from, sizeof to);
  return to;
}

inline unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
inline float __uint_as_float(unsigned value) { return same_bits<float>(value); }
inline long long __double_as_longlong(double value) { return same_bits<long long>(value); }
inline double __longlong_as_double(long long value) { return same_bits<double>(value); }
