// candidate_head: RMSNorm and a scalar head per row, softmax and argmax per group. A warp takes a row. If there are few
// rows, one block takes them all; otherwise each block takes a group, and a few more blocks the rows of no group.
#include "device.cuh"

namespace fb {

constexpr int kHeadWarps = 16;
constexpr int kMostHeadRows = 1024;
constexpr int kMostHeadGroups = 1024;
constexpr int kAlone = 32;  // rows that one block takes

template <typename T, typename W>
struct CandidateHead {
  const T* hidden;
  int64_t stride;
  const T* norm_weight;
  const W* head_weight;
  const void* head_bias;  // one element, or null
  bool wide_bias;         // whether head_bias is float32, else T
  const void* offsets;
  bool wide_offsets;  // whether offsets are int64, else int32
  int rows, groups, width;
  float eps;
  float* score;
  float* prob;
  int64_t* best;

  __device__ int64_t offset(int group) const {
    return wide_offsets ? static_cast<const int64_t*>(offsets)[group] : static_cast<const int*>(offsets)[group];
  }
};

// 16 bytes of a row, zero after its end; kWide: they are aligned, and the end cuts none.
template <bool kWide, bool kOnce, typename T>
__device__ inline Chunk<T> head_chunk(const T* row, int first, int width) {
  if constexpr (!kWide) return load_chunk(row, first, width, false);
  Chunk<T> chunk;
  chunk.bits = {0, 0, 0, 0};
  if (first < width) chunk.bits = kOnce ? load_once(row + first) : *reinterpret_cast<const uint4*>(row + first);
  return chunk;
}

// The score of a row, in every lane; a lane takes the same columns in the same order in every row.
template <bool kWide, typename T, typename W>
__device__ inline float score_of(const CandidateHead<T, W>& of, int64_t row) {
  // kParts: chunks of the head for one chunk of x, 2 for a float32 head of 16-bit rows. kBatch: chunks loaded at once.
  constexpr int kElements = Chunk<T>::kElements, kParts = sizeof(W) / sizeof(T), kBatch = kWide ? 4 : 1;
  const T* x_row = of.hidden + row * of.stride;
  float products = 0.0f, squares = 0.0f;
#pragma unroll 1
  for (int start = threadIdx.x % kWarp * kElements; start < of.width; start += kBatch * kWarp * kElements) {
    Chunk<T> x[kBatch], norm[kBatch];
    Chunk<W> head[kBatch][kParts];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int first = start + u * kWarp * kElements;
      x[u] = head_chunk<kWide, true>(x_row, first, of.width);
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        head[u][i] = head_chunk<kWide, false>(of.head_weight, first + i * Chunk<W>::kElements, of.width);
      if (of.norm_weight != nullptr) norm[u] = head_chunk<kWide, false>(of.norm_weight, first, of.width);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const float value = to_float(x[u].elements[j]);
        float weight = to_float(head[u][j / Chunk<W>::kElements].elements[j % Chunk<W>::kElements]);
        if (of.norm_weight != nullptr) {
          weight *= to_float(norm[u].elements[j]);
          squares += value * value;
        }
        products += value * weight;
      }
    }
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {  // every lane ends with the same two sums
    products += __shfl_xor_sync(0xffffffffu, products, mask);
    squares += __shfl_xor_sync(0xffffffffu, squares, mask);
  }
  if (of.norm_weight != nullptr) products *= rsqrtf(squares / of.width + of.eps);
  if (of.head_bias != nullptr)
    products += of.wide_bias ? *static_cast<const float*>(of.head_bias)
                             : to_float(*static_cast<const T*>(of.head_bias));
  return products;
}

// Softmax and argmax of `count` scores, by a warp. NaN is never the best, and makes all probabilities NaN.
__device__ inline void choose(const float* scores, int count, float* prob, int64_t* best) {
  const int lane = threadIdx.x % kWarp;
  float highest = -INFINITY;
  int at = -1;
#pragma unroll 1
  for (int i = lane; i < count; i += kWarp) {
    if (scores[i] > highest || (scores[i] == highest && at < 0)) {
      highest = scores[i];
      at = i;  // a lane's indices rise, so it keeps the first of equal scores
    }
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, highest, mask);
    const int other_at = __shfl_xor_sync(0xffffffffu, at, mask);
    // between lanes, ties go to the lower index
    if (other_at >= 0 && (at < 0 || other > highest || (other == highest && other_at < at))) {
      highest = other;
      at = other_at;
    }
  }
  float total = 0.0f;
#pragma unroll 1
  for (int i = lane; i < count; i += kWarp) total += expf(scores[i] - highest);
  for (int mask = kWarp / 2; mask > 0; mask /= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
#pragma unroll 1
  for (int i = lane; i < count; i += kWarp) prob[i] = expf(scores[i] - highest) / total;
  if (lane == 0) *best = at;
}

// score = (x rsqrt(mean(x^2) + eps) norm_weight) . head_weight + head_bias; prob, best = softmax, argmax of a group.
// Grid: one block if `alone`, else groups + ceil(rows / kHeadWarps) blocks, of up to kHeadWarps warps.
// A block owns all rows (`alone`), the rows of a group, or kHeadWarps rows of no group; a warp owns a row, then a
//   group.
// Loop: over the block's rows, inside over columns, 16 bytes a lane; then over the block's groups.
// Memory: shared: the scores of the block's rows. Registers: kBatch chunks of x and of each weight, two float32 sums.
// Layout: hidden [rows, width] with row stride `stride`, adjacent columns; norm_weight [width] or null; head_weight
//   [width]; offsets [groups + 1]; score, prob [rows]; best [groups], dense.
template <bool kWide, typename T, typename W>
__global__ void __launch_bounds__(kHeadWarps* kWarp, 1) candidate_head_kernel(CandidateHead<T, W> of, bool alone) {
  __shared__ float scores[kMostHeadRows];
  let_next_begin();
  wait_for_previous();
  const int thread = threadIdx.x, threads = blockDim.x, block = blockIdx.x;
  const int warp = thread / kWarp, warps = threads / kWarp;
  const int checker = threads - 1 - thread;  // the last warp checks first: it may have no row to load
  bool bad = checker == 0 && (of.offset(0) != 0 || of.offset(of.groups) > of.rows);
#pragma unroll 1
  for (int i = checker; i < of.groups; i += threads) bad |= of.offset(i) > of.offset(i + 1);

  // The rows that the block scores, its groups, and those of its rows that are in no group.
  int begin = 0, end = of.rows, group = 0, group_end = of.groups;
  if (!alone) {
    const bool sound = __syncthreads_count(bad) == 0;  // if not, all rows are of no group
    group = min(block, of.groups);
    group_end = min(block + 1, of.groups);
    if (group < group_end) {
      begin = sound ? static_cast<int>(of.offset(group)) : 0;
      end = sound ? static_cast<int>(of.offset(group_end)) : 0;
    } else {
      begin = (sound ? static_cast<int>(of.offset(of.groups)) : 0) + (block - of.groups) * kHeadWarps;
      end = min(begin + kHeadWarps, of.rows);
    }
  }
#pragma unroll 1
  for (int row = begin + warp; row < end; row += warps) {
    const float s = score_of<kWide>(of, row);
    if (thread % kWarp == 0) scores[row - begin] = of.score[row] = s;
  }
  const bool sound = __syncthreads_count(bad) == 0;  // the barrier also makes the scores visible
  int rest = begin;
  if (group < group_end && sound) rest = static_cast<int>(of.offset(group_end));
#pragma unroll 1
  for (int i = group + warp; i < group_end; i += warps) {
    if (sound) {
      const auto first = static_cast<int>(of.offset(i));
      choose(scores + (first - begin), static_cast<int>(of.offset(i + 1)) - first, of.prob + first, of.best + i);
    } else if (thread % kWarp == 0) {
      of.best[i] = -1;
    }
  }
#pragma unroll 1
  for (int row = rest + thread; row < end; row += threads) of.prob[row] = sound ? 0.0f : NAN;
}

template <typename T, typename W>
int candidate_head(const CandidateHead<T, W>& of, Stream stream) {
  const bool alone = of.rows <= kAlone;
  const bool wide = is_aligned(of.hidden) && is_aligned(of.norm_weight) && is_aligned(of.head_weight) &&
                    of.width % Chunk<T>::kElements == 0 && of.stride % Chunk<T>::kElements == 0;
  const int warps = alone ? min(of.rows + 1, kHeadWarps) : kHeadWarps;
  const int grid = alone ? 1 : of.groups + divide_up(of.rows, kHeadWarps);
  return launch(wide ? candidate_head_kernel<true, T, W> : candidate_head_kernel<false, T, W>, grid, warps * kWarp, 0,
                stream, of, alone);
}

}  // namespace fb

// hidden[rows, width], head_weight and head_bias of hidden's dtype unless they are wide, offsets[groups + 1].
FB_FUNCTION(fb_candidate_head,
            const void* hidden; int64_t stride; const void *norm_weight, *head_weight; int wide_head;
            const void* head_bias; int wide_bias; const void* offsets; int wide_offsets;
            int64_t rows, groups, width; int dtype; double eps; float *score, *prob; int64_t* best; void* stream;) {
  if (given.rows > fb::kMostHeadRows || given.groups > fb::kMostHeadGroups || given.width > 1 << 24)
    return fb::kNotTaken;
  const auto run = [&](auto element, auto weight) {
    using T = decltype(element);
    using W = decltype(weight);
    const fb::CandidateHead<T, W> of{static_cast<const T*>(given.hidden),
                                     given.stride,
                                     static_cast<const T*>(given.norm_weight),
                                     static_cast<const W*>(given.head_weight),
                                     given.head_bias,
                                     given.wide_bias != 0,
                                     given.offsets,
                                     given.wide_offsets != 0,
                                     static_cast<int>(given.rows),
                                     static_cast<int>(given.groups),
                                     static_cast<int>(given.width),
                                     static_cast<float>(given.eps),
                                     given.score,
                                     given.prob,
                                     given.best};
    return fb::candidate_head(of, static_cast<fb::Stream>(given.stream));
  };
  switch (given.dtype) {
    case fb::kFloat32: return run(float{}, float{});
    case fb::kFloat16: return given.wide_head ? run(fb::half{}, float{}) : run(fb::half{}, fb::half{});
    case fb::kBFloat16: return given.wide_head ? run(fb::bfloat16{}, float{}) : run(fb::bfloat16{}, fb::bfloat16{});
    default: return fb::kNotTaken;
  }
}
