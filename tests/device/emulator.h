// Runs CUDA kernels on the host, slowly and in a random order: what a source needs of CUDA in order to be compiled by
// g++ behind this text. Every CUDA thread is a fiber; the blocks of a grid run one after another. Collective functions
// want all threads of their warp or block, and the same function on all of them, or else the launch fails with a
// message. So it does where a launch is watched and an access to memory is not ordered with another thread's, reads
// shared memory that the block has not written, or is outside the arrays: g++ calls `__tsan_read4` and the like before
// every access where it is told to look for races, and they are defined here. What this cannot show is listed in
// emulator.py.

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
#define __shared__ static  // in .bss, where nothing else is
#define UNSEEN __attribute__((no_sanitize("thread")))  // accesses in it are the emulation's own
#define EMULATOR_OWN __attribute__((section("emulator_state"))) static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct Index {
  unsigned x;
};
EMULATOR_OWN Index threadIdx, blockIdx, blockDim, gridDim;

extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];

namespace emulator {

constexpr unsigned MOST = 1024;  // threads of a block
constexpr size_t STACK = 64 << 10;

enum What { NOTHING, BARRIER, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, BALLOT };

struct Group {  // of threads that wait for each other
  unsigned what = NOTHING;
  unsigned arrived = 0, generation = 0;
  unsigned waiting[MOST];
  uint64_t values[2][32];
};

EMULATOR_OWN void* contexts[MOST];
EMULATOR_OWN void* scheduler;
EMULATOR_OWN char* stacks;
EMULATOR_OWN Group warps[MOST / 32], block;
EMULATOR_OWN unsigned ready[MOST], ready_count, running, ended;
EMULATOR_OWN uint64_t random_state;
EMULATOR_OWN char message[200];
EMULATOR_OWN void (*body)(void*);
EMULATOR_OWN void* body_argument;

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

UNSEEN inline unsigned chance(unsigned below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state % below;
}

UNSEEN inline void leave() { emulator_switch(&contexts[running], scheduler); }

UNSEEN inline void fail(const char* text) {
  if (!message[0]) snprintf(message, sizeof message, "block %u, thread %u: %s", blockIdx.x, threadIdx.x, text);
  leave();
}

inline void settle();

UNSEEN inline void enter() {
  body(body_argument);
  settle();
  ++ended;
  running = MOST;  // never to come back
  void* nowhere;
  emulator_switch(&nowhere, scheduler);
}

// Waits until `members` threads of the group have come to the same place; gives the number of the meeting.
UNSEEN inline unsigned meet(Group& group, unsigned what, unsigned members) {
  settle();
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

// What is known of accesses to memory, where a launch is watched. Two are in order where a barrier lies between them,
// or a function of the warp that both threads are in. Other blocks are looked at where they write alone: what a block
// reads of them too early may be of no use to it, and where it is, the random order of blocks shows in the results.

struct Range {
  uintptr_t start, stop;
};

// An access of one thread, or reads of several. `when` counts the blocks that have run, in all launches.
struct Access {
  uint64_t when = 0;
  unsigned barrier, meeting, thread;
  uint8_t bytes, atomic;
};

struct Cell {  // four bytes of memory
  uintptr_t place = 0;
  Access read, write;
};

constexpr unsigned CELLS = 1 << 14;  // those of other places push them out
constexpr unsigned MANY = MOST;  // threads of several warps
constexpr unsigned ARRAYS = 64;
constexpr size_t SHARED = 128 << 10;

EMULATOR_OWN bool watched;
EMULATOR_OWN bool ordered;  // whether this block has changed global memory atomically, and so may know of other blocks
EMULATOR_OWN Range arrays[ARRAYS], memories[ARRAYS];
EMULATOR_OWN unsigned array_count;
EMULATOR_OWN uint64_t now, launched;  // number of this block, and of the first one of the launch
EMULATOR_OWN Cell* cells;
EMULATOR_OWN uint64_t* shared_written;  // when each byte was
EMULATOR_OWN const void* doubtful;  // where a write is under way that is out of order, unless it changes nothing
EMULATOR_OWN unsigned doubtful_size;
EMULATOR_OWN char as_it_was[16];
EMULATOR_OWN bool may_be_unordered;

UNSEEN inline bool past(const Access& access, unsigned warp) {
  if (access.barrier != block.generation) return true;
  return access.thread < MOST && access.thread / 32 == warp && access.meeting != warps[warp].generation;
}

// Looks at what the last write has changed.
UNSEEN inline void settle() {
  if (!doubtful) return;
  const bool changed = memcmp(doubtful, as_it_was, doubtful_size);
  doubtful = nullptr;
  if (changed && !may_be_unordered) fail("a write that is not ordered with another thread's access");
}

// Whether an access to a cell is in order with an earlier one, or may stand beside it.
UNSEEN inline bool fits(const Access& access, uint8_t bytes, bool writes, bool atomic, bool shared) {
  if (access.when < (shared ? now : launched) || !(access.bytes & bytes) || (access.atomic && atomic)) return true;
  if (access.when != now) return ordered || !writes;
  return access.thread == threadIdx.x || past(access, threadIdx.x / 32);
}

UNSEEN inline bool look_cell(uintptr_t place, uint8_t bytes, bool writes, bool atomic, bool shared) {
  Cell& cell = cells[(place ^ place >> 14) % CELLS];
  if (cell.place != place) {
    cell = Cell();
    cell.place = place;
  }
  bool well = fits(cell.write, bytes, writes, atomic, shared);
  if (writes && cell.read.when == now) well &= fits(cell.read, bytes, writes, atomic, shared);
  Access& access = writes ? cell.write : cell.read;
  const unsigned meeting = warps[threadIdx.x / 32].generation;
  unsigned thread = threadIdx.x;
  if (!writes && access.when == now && access.barrier == block.generation) {
    if (access.thread == MANY || access.thread / 32 != thread / 32) thread = MANY;
    bytes |= access.bytes;
  }
  access.when = now;
  access.barrier = block.generation;
  access.meeting = meeting;
  access.thread = thread;
  access.bytes = bytes;
  access.atomic = atomic;
  return well;
}

UNSEEN __attribute__((noinline)) void look(const void* address, unsigned size, bool writes, bool atomic) {
  const uintptr_t start = (uintptr_t)address;
  settle();
  if (start - (uintptr_t)stacks < MOST * STACK) return;
  uint64_t* written = shared_written + (start - (uintptr_t)__bss_start);
  const bool shared = start - (uintptr_t)__bss_start < (uintptr_t)(_end - __bss_start);
  if (shared) {
    for (unsigned i = 0; i < size; ++i) {
      if (writes && !atomic)
        written[i] = now;
      else if (written[i] != now)
        fail("shared memory is read before it is written");
    }
  } else {
    unsigned own = 0;
    while (own < array_count && start - memories[own].start >= memories[own].stop - memories[own].start) ++own;
    if (own == array_count) return;
    bool inside = false;
    for (unsigned i = own; i < array_count && !inside; ++i)
      inside = arrays[i].start <= start && start + size <= arrays[i].stop;
    if (!inside) fail(writes ? "a write outside the arrays" : "a read outside the arrays");
    ordered |= atomic;
  }
  bool well = true;
  for (unsigned i = 0; i < size;) {
    const unsigned first = (start + i) % 4, some = size - i < 4 - first ? size - i : 4 - first;
    well &= look_cell((start + i) / 4, ((1u << some) - 1) << first, writes, atomic, shared);
    i += some;
  }
  if (well) return;
  if (!writes || atomic) {
    if (!may_be_unordered) fail("a read or an atomic change that is not ordered with another thread's access");
    return;
  }
  doubtful = address;
  doubtful_size = size < sizeof as_it_was ? size : sizeof as_it_was;
  memcpy(as_it_was, address, doubtful_size);
}

template <typename T>
UNSEEN T exchange(unsigned mask, T value, unsigned source, What what, unsigned detail = 0) {
  static_assert(sizeof(T) <= 8, "larger than a register pair");
  if (mask != 0xffffffffu) fail("a part of a warp is not emulated");
  Group& warp = warps[threadIdx.x / 32];
  memcpy(&warp.values[warp.generation & 1][threadIdx.x % 32], &value, sizeof value);
  const unsigned generation = meet(warp, what | detail << 4 | (unsigned)sizeof value << 16, 32);
  // A lane that is a meeting ahead writes to the other half; two ahead it cannot be.
  memcpy(&value, &warp.values[generation & 1][source], sizeof value);
  return value;
}

// Some blocks have warps, or one thread, that run only when nothing else can: what others do too early then shows.
EMULATOR_OWN unsigned slow_warps, slow_thread;

UNSEEN inline bool slow(unsigned thread) { return thread == slow_thread || slow_warps >> (thread / 32) & 1; }

UNSEEN inline unsigned choose() {
  const unsigned place = chance(ready_count);
  for (unsigned i = 0; i < ready_count; ++i) {
    const unsigned other = (place + i) % ready_count;
    if (!slow(ready[other])) return other;
  }
  return place;
}

UNSEEN inline bool run_block(unsigned threads) {
  for (Group& warp : warps) warp.arrived = 0;
  block.arrived = 0;
  ready_count = ended = 0;
  ordered = false;
  doubtful = nullptr;
  ++now;
  memset(__bss_start, chance(256), _end - __bss_start);
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
UNSEEN T argument(uint64_t word) {
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
  UNSEEN void apply(std::index_sequence<I...>) {
    kernel(argument<A>(words[I])...);
  }
};

// Gives what went wrong, or null. `spans` are the start and the end of each array and of the memory around it; a launch
// is watched where there are any.
template <typename... A>
UNSEEN const char* run(
    void (*kernel)(A...), const uint64_t* words, unsigned blocks, unsigned threads, uint64_t seed, int flushing,
    const uint64_t* spans, unsigned span_count, int unordered) {
  if (!stacks) {
    stacks = static_cast<char*>(aligned_alloc(64, MOST * STACK));
    cells = new Cell[CELLS];
    shared_written = static_cast<uint64_t*>(calloc(SHARED, sizeof(uint64_t)));
  }
  if ((size_t)(_end - __bss_start) > SHARED || span_count > ARRAYS) return "more memory than can be watched";
  array_count = span_count;
  for (unsigned i = 0; i < span_count; ++i) {
    arrays[i] = {spans[4 * i], spans[4 * i + 1]};
    memories[i] = {spans[4 * i + 2], spans[4 * i + 3]};
  }
  watched = span_count > 0;
  may_be_unordered = unordered;
  launched = now + 1;
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
  watched = false;
  return message[0] ? message : nullptr;
}

}  // namespace emulator
