// topk_entropy: the k largest elements of a row in order, and the entropy of their softmax, for a few rows.
//
// A key is (order of the value, ~column), so no two keys are equal. First pass: blocks write the largest key of each
// group of columns. The row's last block takes the k-th largest of the maxima of pairs of groups as a bound: at least k
// keys are at or above it. The groups whose maximum reaches the bound are few. Second pass: the block reads them again,
// collects the keys at or above the bound and ranks them. If more keys reach the bound than fit, the bound is raised by
// counting keys bit by bit: slower, but as exact.
#include "counters.cuh"

namespace fb {

constexpr int kTopkThreads = 1024;
constexpr int kSpan = 128;                     // columns of a group; fewer in short rows, more in very long ones
constexpr int kFewestGroups = 512;             // if there are as many chunks
constexpr int kMostGroups = 2 * kTopkThreads;  // also GROUPS of fb_kernels/topk_entropy/cuda.py
constexpr int kMostK = 64;
constexpr int kMostTopkRows = 32;
constexpr int kSurvivors = 512;
constexpr int kMostListed = 2 * (kMostK + kMostK / 4);

struct Groups {
  int lanes, steps, span, number;  // threads to a group (a power of 2), chunks to a thread, columns, groups of a row
};

template <typename T>
constexpr int kZeroBits = __is_same(T, float) ? 0 : __is_same(T, half) ? 13 : 16;  // low bits of an order, 0 in T

// A number that rises with x and is never 0. -0 and 0 have one order, all NaN have one, above that of +inf.
template <typename T>
__device__ inline uint32_t order_of(float x) {
  const int bits = __float_as_int(x);
  const auto sign = static_cast<uint32_t>(bits >> 31);  // all bits or none
  const uint32_t order = ((bits & 0x7fffffffu) ^ sign) - sign + 0x80000000u;
  return x != x ? ~0u << kZeroBits<T> : order;
}

__device__ inline uint64_t key_of(uint32_t order, uint32_t column) {
  return static_cast<uint64_t>(order) << 32 | ~column;
}

__device__ inline uint32_t column_of(uint64_t key) { return ~static_cast<uint32_t>(key); }

// Calls see(order, column) for every column of a chunk, with order 0 after the row's end.
template <typename T, typename See>
__device__ inline void visit(const Chunk<T>& chunk, uint32_t first, uint32_t width, See see) {
  const int real = first < width ? min(width - first, 16u) : 0;
#pragma unroll
  for (int j = 0; j < Chunk<T>::kElements; ++j)
    see(j < real ? order_of<T>(to_float(chunk.elements[j])) : 0u, first + j);
}

// The largest bound that at least k keys reach, or a smaller one as soon as no more than `enough` reach it; `count`
// tells all threads how many do.
template <typename T, typename Count>
__device__ inline uint64_t raise_bound(int k, int enough, int column_bits, Count count) {
  uint64_t bound = 0;
#pragma unroll 1
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t one = uint64_t{1} << bit;
    if (bit < 32 && bit >= column_bits) bound |= one;  // these bits of ~column are 1 in every key
    if (bit < 32 + kZeroBits<T> && bit >= column_bits) continue;
    const int reached = count(bound | one);
    if (reached < k) continue;
    bound |= one;
    if (reached <= enough) break;
  }
  return max(bound, uint64_t{1} << 32);  // no order is 0
}

// values, indices = the k largest keys in falling order; entropy = log S - sum_i e_i d_i / S with d_i = x_i - x_0,
// e_i = exp(d_i), S = sum_i e_i.
// Grid: rows * blocks blocks of kTopkThreads threads.
// A block owns kTopkThreads * groups.steps chunks of 16 bytes of a row; groups.lanes neighbouring threads own a group.
// Loop: over the chunks of a thread; in the row's last block over the chunks of the listed groups.
// Memory: shared: keys at or above the bound, numbers of the listed groups, the k values. Registers: a thread's largest
//   key, the chunk in work and the next one.
// Layout: logits [rows, width], row stride `stride`, adjacent columns; maxima [rows, groups.number]; counters [rows];
//   entropy [rows]; values, indices [rows, k], dense.
template <typename T>
__global__ void __launch_bounds__(kTopkThreads)
    topk_entropy_kernel(const T* logits, int64_t stride, uint32_t width, int k, Groups groups, int blocks,
                        int column_bits, uint64_t* maxima, Counters counters, float* entropy, float* values,
                        int64_t* indices) {
  constexpr uint32_t kElements = Chunk<T>::kElements;
  __shared__ uint64_t keys[kSurvivors];
  __shared__ int listed[kMostListed];
  __shared__ float top[kMostK];
  __shared__ int listed_count, found, total;
  __shared__ bool is_last;
  let_next_begin();
  wait_for_previous();
  const int thread = threadIdx.x;
  const int64_t row = blockIdx.x / blocks;  // the blocks of a row are neighbours
  logits += row * stride;
  maxima += row * groups.number;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;

  const int group = (blockIdx.x % blocks * kTopkThreads + thread) / groups.lanes;
  const int lane = thread & (groups.lanes - 1);
  uint64_t largest = 0;
#pragma unroll 1
  for (int step = 0; step < groups.steps; ++step) {
    const uint32_t first = static_cast<uint32_t>(group) * groups.span + (step * groups.lanes + lane) * kElements;
    uint32_t most = 0, at = 0;
    visit<T>(load_chunk(logits, first, width, aligned), first, width, [&](uint32_t order, uint32_t column) {
      const bool more = order > most;
      most = more ? order : most;
      at = more ? column : at;
    });
    if (most != 0) largest = max(largest, key_of(most, at));  // 0: the chunk lies after the row's end
  }
  for (int mask = groups.lanes / 2; mask > 0; mask /= 2)
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
  if (lane == 0 && group < groups.number) maxima[group] = largest;
  // the barrier orders all threads' maxima before the arrival of thread 0
  __syncthreads();
  if (thread == 0) {
    is_last = arrives_last(counter_at(counters, row), blocks);
    listed_count = 0;
    found = 0;
  }
  __syncthreads();
  if (!is_last) return;

  uint64_t own[2];  // maxima of two groups, kTopkThreads apart
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int i = thread + u * kTopkThreads;
    own[u] = i < groups.number ? __ldcg(maxima + i) : 0;  // past L1, since other blocks wrote them
  }
  const uint64_t more = max(own[0], own[1]);
  uint64_t bound =
      raise_bound<T>(k, k + k / 4, column_bits, [&](uint64_t next) { return __syncthreads_count(more >= next); });
#pragma unroll
  for (int u = 0; u < 2; ++u)
    if (own[u] >= bound) listed[atomicAdd(&listed_count, 1)] = thread + u * kTopkThreads;
  __syncthreads();

  const int chunks = groups.lanes * groups.steps;
  const auto visit_listed = [&](auto see) {
    const int count = listed_count * chunks;
    const auto first_of = [&](int item) {
      if (item >= count) return width;
      return listed[item / chunks] * static_cast<uint32_t>(groups.span) + item % chunks * kElements;
    };
    uint32_t first = first_of(thread);
    Chunk<T> chunk = load_chunk(logits, first, width, aligned);
#pragma unroll 1
    for (int i = thread; i < count; i += kTopkThreads) {  // a chunk is in work while the next one is loaded
      const uint32_t next_first = first_of(i + kTopkThreads);
      const Chunk<T> next = load_chunk(logits, next_first, width, aligned);
      visit<T>(chunk, first, width, see);
      first = next_first;
      chunk = next;
    }
  };
  while (true) {
    visit_listed([&](uint32_t order, uint32_t column) {
      const uint64_t key = key_of(order, column);
      if (key < bound) return;
      const int place = atomicAdd(&found, 1);
      if (place < kSurvivors) keys[place] = key;
    });
    __syncthreads();
    if (found <= kSurvivors) break;
    __syncthreads();  // every thread has read `found` before it is set to zero
    bound = raise_bound<T>(k, kSurvivors, column_bits, [&](uint64_t next) {
      if (thread == 0) total = found = 0;
      __syncthreads();
      int reached = 0;
      visit_listed([&](uint32_t order, uint32_t column) { reached += key_of(order, column) >= next; });
      atomicAdd(&total, reached);
      __syncthreads();
      const int result = total;
      __syncthreads();
      return result;
    });
  }

  // A key's rank is the number of larger keys; several threads count for one key.
  const int count = found;
  int each = kWarp;  // threads that count for one key
  while (each * count > kTopkThreads) each /= 2;
  const int place = thread / each;
  const uint64_t key = place < count ? keys[place] : 0;
  int rank = 0;
  for (int i = thread % each; i < count; i += each) rank += keys[i] > key;
  for (int mask = each / 2; mask > 0; mask /= 2) rank += __shfl_xor_sync(0xffffffffu, rank, mask);
  if (place < count && thread % each == 0 && rank < k) {
    const auto order = static_cast<uint32_t>(key >> 32);
    const uint32_t column = column_of(key);
    float x = __int_as_float(static_cast<int>(order > 0x80000000u ? order - 0x80000000u : 0u - order));
    if (order == 0x80000000u || order > 0xff800000u) x = to_float(logits[column]);  // which zero, which NaN
    top[rank] = x;
    values[row * k + rank] = x;
    indices[row * k + rank] = column;
  }
  __syncthreads();
  if (thread >= kWarp) return;  // k is at most 64: one warp adds, in a fixed order
  float sum = 0.0f, weighted = 0.0f;
  for (int i = thread; i < k; i += kWarp) {
    const float shifted = top[i] - top[0];
    const float exponential = expf(shifted);
    sum += exponential;
    if (top[i] != -INFINITY) weighted += exponential * shifted;  // 0 * -inf counts as 0
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    weighted += __shfl_xor_sync(0xffffffffu, weighted, mask);
  }
  if (thread == 0) entropy[row] = logf(sum) - weighted / sum;
}

inline Groups grouped(int64_t width, int elements) {
  Groups groups{kSpan / elements, 1, kSpan, 0};
  while (groups.lanes > 1 && divide_up(width, groups.span) < kFewestGroups) {
    groups.lanes /= 2;
    groups.span /= 2;
  }
  groups.steps = divide_up(width, static_cast<int64_t>(kMostGroups) * groups.span);
  groups.span *= groups.steps;
  groups.number = divide_up(width, groups.span);
  return groups;
}

template <typename T>
int topk_entropy(const void* logits, int64_t stride, int rows, int64_t width, int k, int64_t* workspace, float* entropy,
                 float* values, int64_t* indices, Stream stream) {
  const Groups groups = grouped(width, Chunk<T>::kElements);
  const int blocks = divide_up(static_cast<int64_t>(groups.number) * groups.lanes, kTopkThreads);
  int column_bits = 0;
  while ((width - 1) >> column_bits != 0) ++column_bits;
  auto* maxima = reinterpret_cast<uint64_t*>(workspace);
  Counters counters;
  auto* given = reinterpret_cast<unsigned*>(workspace + int64_t{rows} * groups.number);
  if (const int error = counters_for(rows, given, stream, &counters)) return error;
  return launch(topk_entropy_kernel<T>, rows * blocks, kTopkThreads, 0, stream, static_cast<const T*>(logits), stride,
                width, k, groups, blocks, column_bits, maxima, counters, entropy, values, indices);
}

}  // namespace fb

// logits[rows, width]; workspace of rows * (min(width, kMostGroups) + 1) words.
FB_FUNCTION(fb_topk_entropy,
            const void* logits; int64_t stride; int rows; int64_t width; int k, dtype;
            int64_t* workspace; float *entropy, *values; int64_t* indices; void* stream;) {
  if (given.rows > fb::kMostTopkRows || given.k > fb::kMostK || given.width > INT32_MAX) return fb::kNotTaken;
  const auto run = [&](auto* op) {
    return op(given.logits, given.stride, given.rows, given.width, given.k, given.workspace, given.entropy,
              given.values, given.indices, static_cast<fb::Stream>(given.stream));
  };
  switch (given.dtype) {
    case fb::kFloat32: return run(fb::topk_entropy<float>);
    case fb::kFloat16: return run(fb::topk_entropy<fb::half>);
    case fb::kBFloat16: return run(fb::topk_entropy<fb::bfloat16>);
    default: return fb::kNotTaken;
  }
}
