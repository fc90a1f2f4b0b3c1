// Count sketches: every row of a table adds each element to one of its columns, with a sign.
//
// One thread sums a cell, in the order of its elements: the order of atomic additions would differ from call to call.

constexpr int ROWS = 15;    // most rows that an estimate can take the median of
constexpr int PART = 2048;  // cells of a row that a block sums at a time
constexpr int EACH = 8;     // elements whose cells a thread computes in a turn
constexpr int TURN = EACH * THREADS;

struct Key {
  u32 low, high;
};

DEVICE Key key_of_row(i64 row, i64 low, i64 high) {
  const u32 place = 2 * (u32)row;
  return {draw(place, (u32)low, (u32)high), draw(place + 1, (u32)low, (u32)high)};
}

// The upper bits choose the column, and the lowest one is left for the sign.
DEVICE i64 column_of(u32 word, i64 columns) { return (i64)((u64)word * (u64)columns >> 32); }
DEVICE Real signed_by(u32 word, Real value) { return word & 1 ? -value : value; }

// A block has a part of a row and scans all elements for those that fall into it.
KERNEL sketch_add(const Real* array, i64 size, i64 low, i64 high, Real* table, i64 rows, i64 columns) {
  __shared__ u32 where[TURN];
  __shared__ Real what[TURN];
  const i64 parts = (columns + PART - 1) / PART;
  for (i64 number = blockIdx.x; number < rows * parts; number += gridDim.x) {
    const i64 row = number / parts, from = number % parts * PART, count = smaller((i64)PART, columns - from);
    const Key key = key_of_row(row, low, high);
    Real* cells = table + row * columns + from;
    for (i64 start = 0; start < size; start += TURN) {
      // A thread's elements are neighbours, so that the elements found are in the order of the array.
      const i64 first = start + (i64)threadIdx.x * EACH;
      u32 words[EACH], found = 0;
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        words[j] = draw((u32)(first + j), key.low, key.high);
        const i64 cell = column_of(words[j], columns) - from;
        found |= (u32)(first + j < size && cell >= 0 && cell < count) << j;
      }
      u64 total;
      u64 place = block_scan(__popc(found), total);
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
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

KERNEL sketch_estimate(const Real* table, i64 rows, i64 columns, i64 low, i64 high, Real* out, i64 size) {
  __shared__ Key keys[ROWS];
  __shared__ Real estimates[ROWS][THREADS];
  if (threadIdx.x < rows) keys[threadIdx.x] = key_of_row(threadIdx.x, low, high);
  __syncthreads();
  for (const i64 i : grid_stride(size)) {
    for (int row = 0; row < rows; ++row) {
      const u32 word = draw((u32)i, keys[row].low, keys[row].high);
      estimates[row][threadIdx.x] = signed_by(word, table[row * columns + column_of(word, columns)]);
    }
    // Bubble sort, until the upper half and so the median are in place. NaN moves as on the host.
    for (int last = (int)rows - 1; last >= rows / 2; --last) {
      for (int row = 0; row < last; ++row) {
        const Real one = estimates[row][threadIdx.x], other = estimates[row + 1][threadIdx.x];
        estimates[row][threadIdx.x] = other < one ? other : one;
        estimates[row + 1][threadIdx.x] = other < one ? one : other;
      }
    }
    out[i] = estimates[rows / 2][threadIdx.x];
  }
}

KERNEL sketch_clear(const u32* indices, i64 count, i64 low, i64 high, Real* table, i64 rows, i64 columns) {
  for (i64 row = 0; row < rows; ++row) {
    const Key key = key_of_row(row, low, high);
    for (const i64 j : grid_stride(count))
      table[row * columns + column_of(draw(indices[j], key.low, key.high), columns)] = 0;
  }
}
