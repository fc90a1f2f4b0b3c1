// Runs CUDA kernels on the host, slowly and in a random order: what a source needs of CUDA in order to be compiled by
// g++ behind this text. Every CUDA thread is a fiber; the blocks of a grid run one after another. Collective functions
// want all threads of their warp or block, and the same function on all of them, or else the launch fails with a
// message. What this cannot show: races between blocks that run at the same time, memory ordering, and speed.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xmmintrin.h>

#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr unsigned MOST = 1024;  // threads of a block
constexpr size_t STACK = 64 << 10;

enum What { NOTHING, BARRIER, SHUFFLE, BALLOT };

struct Group {  // of threads that wait for each other
  What what = NOTHING;
  unsigned arrived = 0, generation = 0;
  unsigned waiting[MOST];
  uint64_t values[2][32];
};

static void* contexts[MOST];
static void* scheduler;
static char* stacks;
static Group warps[MOST / 32], block;
static unsigned ready[MOST], ready_count, running, ended;
static uint64_t random_state;
static char message[200];
static void (*body)(void*);
static void* body_argument;

extern "C" void emulator_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, . - emulator_switch
)");
#else
#error "switching between fibers is written for x86-64"
#endif

inline unsigned chance(unsigned below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state % below;
}

inline void leave() { emulator_switch(&contexts[running], scheduler); }

inline void fail(const char* text) {
  if (!message[0]) snprintf(message, sizeof message, "block %u, thread %u: %s", blockIdx.x, threadIdx.x, text);
  leave();
}

inline void enter() {
  body(body_argument);
  ++ended;
  running = MOST;  // never to come back
  void* nowhere;
  emulator_switch(&nowhere, scheduler);
}

// Waits until `members` threads of the group have come to the same place; gives the number of the meeting.
inline unsigned meet(Group& group, What what, unsigned members) {
  if (group.arrived == 0) group.what = what;
  if (group.what != what) fail("threads meet in different functions");
  const unsigned generation = group.generation;
  group.waiting[group.arrived++] = threadIdx.x;
  if (group.arrived == members) {
    for (unsigned i = 0; i < members; ++i) ready[ready_count++] = group.waiting[i];
    group.arrived = 0;
    ++group.generation;
  }
  leave();
  return generation;
}

template <typename T>
T exchange(unsigned mask, T value, unsigned source, What what) {
  static_assert(sizeof(T) <= 8, "larger than a register pair");
  if (mask != 0xffffffffu) fail("a part of a warp is not emulated");
  Group& warp = warps[threadIdx.x / 32];
  memcpy(&warp.values[warp.generation & 1][threadIdx.x % 32], &value, sizeof value);
  const unsigned generation = meet(warp, what, 32);
  // A lane that is a meeting ahead writes to the other half; two ahead it cannot be.
  memcpy(&value, &warp.values[generation & 1][source], sizeof value);
  return value;
}

// Some blocks have warps, or one thread, that run only when nothing else can: what others do too early then shows.
static unsigned slow_warps, slow_thread;

inline bool slow(unsigned thread) { return thread == slow_thread || slow_warps >> (thread / 32) & 1; }

inline unsigned choose() {
  const unsigned place = chance(ready_count);
  for (unsigned i = 0; i < ready_count; ++i) {
    const unsigned other = (place + i) % ready_count;
    if (!slow(ready[other])) return other;
  }
  return place;
}

inline bool run_block(unsigned threads) {
  for (Group& warp : warps) warp.arrived = 0;
  block.arrived = 0;
  ready_count = ended = 0;
  slow_warps = 0;
  slow_thread = MOST;
  switch (chance(4)) {
    case 0: slow_warps = chance(~0u); break;
    case 1: slow_warps = 1u << chance(threads / 32); break;
    case 2: slow_thread = chance(2) ? 0 : chance(threads); break;
  }
  for (unsigned t = 0; t < threads; ++t) {
    void** top = reinterpret_cast<void**>(stacks + (t + 1) * STACK) - 2;
    top[0] = reinterpret_cast<void*>(&enter);  // so that after the return the stack is as behind a call
    top[1] = nullptr;
    contexts[t] = top - 6;
    memset(contexts[t], 0, 6 * sizeof(void*));
    ready[ready_count++] = t;
  }
  while (ready_count) {
    const unsigned place = choose();
    running = ready[place];
    ready[place] = ready[--ready_count];
    threadIdx.x = running;
    emulator_switch(&scheduler, contexts[running]);
    if (message[0]) return false;
  }
  if (ended == threads) return true;
  const unsigned left = threads - ended;
  snprintf(message, sizeof message, "block %u: %u threads wait for others that do not come", blockIdx.x, left);
  return false;
}

template <typename T>
constexpr char letter() {
  if (std::is_pointer_v<T>) return 'p';
  if (std::is_same_v<T, double>) return 'd';
  if (std::is_same_v<T, long long>) return 'i';
  return '?';
}

template <typename... A>
const char* signature(void (*)(A...)) {
  static const char letters[] = {letter<A>()..., 0};
  return letters;
}

template <typename T>
T argument(uint64_t word) {
  T value;
  static_assert(sizeof value == 8);
  memcpy(&value, &word, 8);
  return value;
}

template <typename... A>
struct Call {
  void (*kernel)(A...);
  const uint64_t* words;

  template <size_t... I>
  void apply(std::index_sequence<I...>) {
    kernel(argument<A>(words[I])...);
  }
};

// Gives what went wrong, or null.
template <typename... A>
const char* run(
    void (*kernel)(A...), const uint64_t* words, unsigned blocks, unsigned threads, uint64_t seed, int flushing) {
  if (!stacks) stacks = static_cast<char*>(aligned_alloc(64, MOST * STACK));
  Call<A...> call{kernel, words};
  body_argument = &call;
  body = [](void* pointer) { static_cast<Call<A...>*>(pointer)->apply(std::index_sequence_for<A...>()); };
  random_state = seed | 1;
  message[0] = 0;
  blockDim.x = threads;
  gridDim.x = blocks;
  unsigned* order = static_cast<unsigned*>(malloc(blocks * sizeof(unsigned)));
  for (unsigned b = 0; b < blocks; ++b) {
    const unsigned place = chance(b + 1);
    order[b] = order[place];
    order[place] = b;
  }
  const unsigned mode = _mm_getcsr();
  if (flushing) _mm_setcsr(mode | 0x8040);  // what is subnormal is read and written as zero
  for (unsigned b = 0; b < blocks; ++b) {
    blockIdx.x = order[b];
    if (!run_block(threads)) break;
  }
  _mm_setcsr(mode);
  free(order);
  return message[0] ? message : nullptr;
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::block, emulator::BARRIER, blockDim.x); }
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulator::exchange(mask, value, lane & 31, emulator::SHUFFLE);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return emulator::exchange(mask, value, (threadIdx.x ^ lanes) & 31, emulator::SHUFFLE);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  const unsigned lane = threadIdx.x & 31;
  return emulator::exchange(mask, value, lane < distance ? lane : lane - distance, emulator::SHUFFLE);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
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
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
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
