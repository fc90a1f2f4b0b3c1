// Scattered pieces of an array; it follows sums.cuh where a source reads them.

// A piece of an array that lies elsewhere. The host fills the fields in, by their place.
struct Piece {
  u64 address;
  i64 start;  // its place in the output; the piece ends where the next one starts
  i64 kind;   // Stored
};

// The piece that has an element: the last one that does not start after it, since empty pieces start where the next
// does.
DEVICE i64 piece_of(const Piece* pieces, i64 number, i64 i) {
  i64 low = 0, high = number - 1;
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    if (pieces[middle].start <= i)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

DEVICE Word widened(i64 kind, u16 half) {
  return as_word((Real)(kind == FP16 ? float_of<FP16>(half) : float_of<BF16>(half)));
}

// An element of the array that pieces make up; `p`, a piece that does not begin after it, becomes the piece that has it.
DEVICE Word word_in(const Piece* pieces, i64& p, i64 i) {
  while (i >= pieces[p + 1].start) ++p;
  const u64 address = pieces[p].address;
  const i64 kind = pieces[p].kind, j = i - pieces[p].start;
  return kind == AS_OUT ? reinterpret_cast<const Word*>(address)[j]
                        : widened(kind, reinterpret_cast<const u16*>(address)[j]);
}

DEVICE Word scaled(Word word, Real by) { return by == 1 ? word : as_word(product(by, as_real(word))); }

