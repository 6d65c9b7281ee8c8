// Several pieces of work in one launch: blocks of threads are dealt out to them, one piece after the other.
#pragma once

namespace chunkmem {

// An argument of a launch, so that nothing has to be copied to the device.
template <class Work, int kMost>
struct Batch {
  int count = 0;
  unsigned first_block[kMost + 1] = {};  // of each piece; behind the last one, the number of all
  Work work[kMost];

  unsigned num_blocks() const { return first_block[count]; }

  void add(const Work& piece, unsigned num_blocks) {
    work[count] = piece;
    first_block[count + 1] = first_block[count] + num_blocks;
    ++count;
  }
};

constexpr int kMostArgumentBytes = 4096;  // of all arguments of a launch; newer devices take more

}  // namespace chunkmem
