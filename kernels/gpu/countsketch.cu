// Count sketches: every row of a table puts each element into one of its columns, with a sign.
//
// Every cell is summed by one thread, which takes its elements in their order: no atomic additions, whose order would
// differ from call to call.

constexpr int ROWS = 15;    // the most that an estimate can take the middle of
constexpr int PART = 2048;  // cells of a row that a block sums at a time
constexpr int OWN = 8;      // elements whose cells a thread finds in a turn
constexpr int TURN = OWN * THREADS;

struct Key {
  u32 low, high;
};

__device__ __forceinline__ Key key_of_row(i64 row, i64 low, i64 high) {
  const u32 place = 2 * (u32)row;
  return {draw(place, (u32)low, (u32)high), draw(place + 1, (u32)low, (u32)high)};
}

// The upper bits choose the column, and the lowest one is left for the sign.
__device__ __forceinline__ i64 column_of(u32 word, i64 columns) { return (i64)((u64)word * (u64)columns >> 32); }
__device__ __forceinline__ Real signed_by(u32 word, Real value) { return word & 1 ? -value : value; }

// A block owns a part of a row and goes through all elements for those that fall into it.
extern "C" __global__ void __launch_bounds__(THREADS)
    sketch_add(const Real* array, i64 size, i64 low, i64 high, Real* table, i64 rows, i64 columns) {
  __shared__ u32 where[TURN];
  __shared__ Real what[TURN];
  const i64 parts = (columns + PART - 1) / PART;
  for (i64 number = blockIdx.x; number < rows * parts; number += gridDim.x) {
    const i64 row = number / parts, from = number % parts * PART, count = smaller((i64)PART, columns - from);
    const Key key = key_of_row(row, low, high);
    Real* cells = table + row * columns + from;
    for (i64 start = 0; start < size; start += TURN) {
      // A thread's elements follow one another, so that what the threads find is in the order of the array.
      const i64 first = start + (i64)threadIdx.x * OWN;
      u32 words[OWN], found = 0;
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        words[j] = draw((u32)(first + j), key.low, key.high);
        const i64 cell = column_of(words[j], columns) - from;
        found |= (u32)(first + j < size && cell >= 0 && cell < count) << j;
      }
      u64 total;
      u64 place = block_scan(__popc(found), total);
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        if (!(found >> j & 1)) continue;
        where[place] = (u32)(column_of(words[j], columns) - from);
        what[place] = signed_by(words[j], array[first + j]);
        ++place;
      }
      __syncthreads();
      for (u64 p = 0; p < total; ++p)
        if (where[p] % THREADS == threadIdx.x) cells[where[p]] += what[p];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sketch_estimate(const Real* table, i64 rows, i64 columns, i64 low, i64 high, Real* out, i64 size) {
  __shared__ Key keys[ROWS];
  __shared__ Real told[ROWS][THREADS];
  if (threadIdx.x < rows) keys[threadIdx.x] = key_of_row(threadIdx.x, low, high);
  __syncthreads();
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < size; i += (i64)gridDim.x * THREADS) {
    for (int row = 0; row < rows; ++row) {
      const u32 word = draw((u32)i, keys[row].low, keys[row].high);
      told[row][threadIdx.x] = signed_by(word, table[row * columns + column_of(word, columns)]);
    }
    // Bubbles: once the upper half is in its place the middle is, too. NaN goes where it goes on the host.
    for (int last = (int)rows - 1; last >= rows / 2; --last) {
      for (int row = 0; row < last; ++row) {
        const Real one = told[row][threadIdx.x], other = told[row + 1][threadIdx.x];
        told[row][threadIdx.x] = other < one ? other : one;
        told[row + 1][threadIdx.x] = other < one ? one : other;
      }
    }
    out[i] = told[rows / 2][threadIdx.x];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sketch_clear(const u32* indices, i64 count, i64 low, i64 high, Real* table, i64 rows, i64 columns) {
  for (i64 row = 0; row < rows; ++row) {
    const Key key = key_of_row(row, low, high);
    for (i64 j = (i64)blockIdx.x * THREADS + threadIdx.x; j < count; j += (i64)gridDim.x * THREADS)
      table[row * columns + column_of(draw(indices[j], key.low, key.high), columns)] = 0;
  }
}
