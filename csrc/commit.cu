// commit_: the end of a decode step; one thread per row.
#include "device.cuh"

namespace fb {

enum Halt : int { kNone = 0, kNaN = 1, kEvent = 2, kEos = 3, kLength = 4 };

// A running row takes its token or halts: the reasons in commit_'s docstring, of which the last test below wins.
// Grid: ceil(rows / kThreads) blocks of kThreads threads.
// A thread owns one row of the state.
// Loop: over eos_ids only.
// Memory: no shared memory; the row's values are in registers, each read once.
// Layout: tokens [rows, slots], row stride tokens_stride; length, halt, budget, token, entropy [rows], dense;
//   threshold, max_length [rows] by their strides (0: one value for all rows); eos_ids [eos_count];
//   outcome [rows, 3] with row stride outcome_stride, or null.
template <typename Token>
__global__ void commit_kernel(int64_t* tokens, int64_t tokens_stride, int64_t slots, int* length, int* halt,
                              const int* budget, const Token* token, const float* entropy, const double* threshold,
                              int threshold_stride, const int64_t* eos_ids, int eos_count, const int* max_length,
                              int max_length_stride, float* outcome, int64_t outcome_stride, int rows) {
  wait_for_previous();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;  // the last block may have more threads than rows
  const double limit = threshold[static_cast<int64_t>(row) * threshold_stride];
  const float uncertain = entropy[row];
  const int64_t next = token[row];
  const int held = length[row];
  int reason = halt[row];
  if (reason == kNone) {  // a halted row stays as it is
    const int most = max_length[static_cast<int64_t>(row) * max_length_stride];
    if (held < 0 || held >= slots || held >= most) reason = kLength;
    for (int i = 0; i < eos_count; ++i)
      if (next == eos_ids[i]) reason = kEos;
    if (static_cast<double>(uncertain) > limit && budget[row] > 0) reason = kEvent;
    // NaN last: it wins over every other reason
    if (uncertain != uncertain || limit != limit) reason = kNaN;
    halt[row] = reason;
    if (reason == kNone) {
      tokens[row * tokens_stride + held] = next;
      length[row] = held + 1;
    }
  }
  if (outcome != nullptr) {  // on the device or in pinned host memory, complete when the kernel has ended
    outcome += row * outcome_stride;
    outcome[0] = static_cast<float>(reason);
    outcome[1] = static_cast<float>(next);  // exact below 2^24
    outcome[2] = uncertain;
  }
}

}  // namespace fb

FB_FUNCTION(fb_commit,
            int64_t* tokens; int64_t tokens_stride, slots; int *length, *halt; const int* budget;
            const int64_t* token; const float* entropy; const double* threshold; int threshold_stride;
            const int64_t* eos_ids; int eos_count; const int* max_length; int max_length_stride;
            float* outcome; int64_t outcome_stride; int rows; void* stream;) {
  constexpr int kThreads = 64;
  return fb::launch(fb::commit_kernel<int64_t>, fb::divide_up(given.rows, kThreads), kThreads, 0,
                    static_cast<fb::Stream>(given.stream), given.tokens, given.tokens_stride, given.slots, given.length,
                    given.halt, given.budget, given.token, given.entropy, given.threshold, given.threshold_stride,
                    given.eos_ids, given.eos_count, given.max_length, given.max_length_stride, given.outcome,
                    given.outcome_stride, given.rows);
}
