// branch_attention_qkv: branches of one token over one shared sequence, from projected rows to attention's output.
// The first kernel has a warp for each (row, key head), which norms, rotates and keeps the row's key and scores it, and
// a block for each (key head, 64 keys of the cache), which takes all query rows of the head. The second merges them.
#include <climits>
#include <cmath>

#include "device.cuh"

namespace fb::branch_attention {

constexpr int kChunk = 64;             // keys
constexpr int kWarps = kChunk / 16;    // each scores 16 keys and sums a quarter of the columns of all values
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = 64;              // query rows in shared memory at once
constexpr int kMergeThreads = 256;
constexpr int kMaxRows = 32;
constexpr int kMaxRepeat = 16;

template <typename T, int N>
struct alignas(N * sizeof(T)) Vector {
  T x[N];
};

struct Call {
  const void *qkv, *q_weight, *k_weight;
  const float *cos, *sin;
  const int *positions, *held, *slots;
  void *k_cache, *v_cache, *out;
  float* sums;    // [rows, heads, chunks, E]
  float* states;  // [rows, heads, chunks, 2]: largest score, sum of exponentials
  float* own;     // [rows, heads]: score of the row's own key; NaN where the row's arguments are bad
  int64_t qkv_stride, table_rows, cache_stride, out_stride;
  int rows, heads, kv_heads, repeat, inverse, slots_in_cache, chunks, own_blocks, window;
  float eps, scale;  // the scale also brings scores to base 2
};

struct Span {
  int begin, end;  // keys that are seen; none where `held` is bad
};

__device__ inline Span seen_keys(const Call& call, int held) {
  if (held < 0 || held > call.slots_in_cache) return {0, 0};
  return {call.window > 0 ? max(0, held - call.window + 1) : 0, held};
}

__device__ inline uint32_t even(uint32_t a, uint32_t b) { return permute_bytes<0x5410>(a, b); }
__device__ inline uint32_t odd(uint32_t a, uint32_t b) { return permute_bytes<0x7632>(a, b); }

__device__ inline float sum_over_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

// What a lane holds of a head: E / 64 neighbours of its first half and as many of its second. Sums of products are
// spelt out, so that a query has the same bits wherever it is prepared.
template <int E>
struct Part {
  static constexpr int kCount = E / 64;
  float x[2][kCount];

  template <typename T>
  __device__ void load(const T* head) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto part = *reinterpret_cast<const Vector<T, kCount>*>(head + half * (E / 2) + lane * kCount);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[half][i] = to_float(part.x[i]);
    }
  }

  template <typename T>
  __device__ void store(T* head) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vector<T, kCount> part;
#pragma unroll
      for (int i = 0; i < kCount; ++i) part.x[i] = from_float<T>(x[half][i]);
      *reinterpret_cast<Vector<T, kCount>*>(head + half * (E / 2) + lane * kCount) = part;
    }
  }

  __device__ void fill(float value) {
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) x[i / kCount][i % kCount] = value;
  }

  __device__ float dot(const Part& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) sum = fmaf(x[i / kCount][i % kCount], other.x[i / kCount][i % kCount], sum);
    return sum_over_warp(sum);
  }

  __device__ void norm(const Part& weight, bool normed, float eps) {  // without a branch around the sum
    const float over = rsqrtf(dot(*this) / E + eps), factor = normed ? over : 1.0f;
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) x[i / kCount][i % kCount] *= factor * weight.x[i / kCount][i % kCount];
  }

  template <typename T>
  __device__ void rotate(const Part& cos, const Part& sin) {  // and round
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float first = x[0][i], second = x[1][i];
      x[0][i] = to_float(from_float<T>(fmaf(-second, sin.x[0][i], first * cos.x[0][i])));
      x[1][i] = to_float(from_float<T>(fmaf(first, sin.x[1][i], second * cos.x[1][i])));
    }
  }
};

template <typename T, int E>
__device__ inline const T* head_of(const Call& call, int row, int head) {
  return static_cast<const T*>(call.qkv) + row * call.qkv_stride + static_cast<int64_t>(head) * E;
}

// A warp: the row's own key of one key head.
template <typename T, int E>
__device__ inline void take_own(const Call& call, int row, int kv_head, int held, const Part<E>& q_weight) {
  const int lane = threadIdx.x % kWarp;
  const int position = call.positions[row];
  const int slot = call.slots != nullptr ? call.slots[row] : -1;
  float* scores = call.own + static_cast<int64_t>(row) * call.heads + kv_head * call.repeat;
  if (held < 0 || held > call.slots_in_cache || position < 0 || position >= call.table_rows ||
      (slot >= 0 && (slot < held || slot >= call.slots_in_cache))) {
    if (lane < call.repeat) scores[lane] = NAN;
    return;
  }
  Part<E> key, weight, cos, sin;
  weight.fill(1.0f);
  if (call.k_weight != nullptr) weight.load(static_cast<const T*>(call.k_weight));
  key.load(head_of<T, E>(call, row, call.heads + kv_head));
  cos.load(call.cos + static_cast<int64_t>(position) * E);
  sin.load(call.sin + static_cast<int64_t>(position) * E);
  key.norm(weight, call.k_weight != nullptr, call.eps);
  key.template rotate<T>(cos, sin);
  if (slot >= 0) {
    const int64_t place = slot * call.cache_stride + static_cast<int64_t>(kv_head) * E;
    Part<E> value;
    value.load(head_of<T, E>(call, row, call.heads + call.kv_heads + kv_head));
    key.store(static_cast<T*>(call.k_cache) + place);
    value.store(static_cast<T*>(call.v_cache) + place);
  }
  for (int i = 0; i < call.repeat; ++i) {
    Part<E> query;
    query.load(head_of<T, E>(call, row, kv_head * call.repeat + i));
    query.norm(q_weight, call.q_weight != nullptr, call.eps);
    query.template rotate<T>(cos, sin);
    const float score = query.dot(key) * call.scale;
    if (lane == 0) scores[i] = score;
  }
}

template <int E>
struct alignas(16) Shared {
  static constexpr int kStride = E / 8 + 4;  // rows 64 bytes apart modulo 128: two of them fill all banks
  uint4 q[kRows][kStride];
  uint32_t p[16][kChunk / 2 + 4];
  float top[kWarps][16], sum[kWarps][16];
};

__device__ inline int row_of(const Call& call, int query) { return query * call.inverse >> 16; }  // query / repeat

// A block: query rows first to first + count of the key head, normed and rotated, to shared memory. Each warp has so
// many in flight; those whose position is bad take another one.
template <typename T, int E, int kBatch>
__device__ inline void prepare(const Call& call, int kv_head, int first, int count, const Part<E>& weight,
                               Shared<E>& shared) {
  for (int start = threadIdx.x / kWarp; start < count; start += kBatch * kWarps) {
    Part<E> q[kBatch], cos[kBatch], sin[kBatch];
    int position[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int query = first + min(start + i * kWarps, count - 1), row = row_of(call, query);
      position[i] = call.positions[row];
      q[i].load(head_of<T, E>(call, row, kv_head * call.repeat + query - row * call.repeat));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t inside = position[i] >= 0 && position[i] < call.table_rows ? position[i] : 0;
      cos[i].load(call.cos + inside * E);
      sin[i].load(call.sin + inside * E);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) q[i].norm(weight, call.q_weight != nullptr, call.eps);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      q[i].template rotate<T>(cos[i], sin[i]);
      if (start + i * kWarps < count) q[i].store(reinterpret_cast<T*>(shared.q[start + i * kWarps]));
    }
  }
}

// Both products have a free order of their inner index and of their columns. With g = lane / 4 and t = lane % 4, a
// thread's 16 bytes at e + 8t of q and of key g are the inner indices {2t, 2t + 1, 2t + 8, 2t + 9} of two products;
// its n = E / 32 columns from n g on, of values 2t, 2t + 1, 2t + 8 and 2t + 9, are column g of n products.
template <typename T, int E>
__global__ void __launch_bounds__(kThreads, E <= 128 ? 3 : 2) chunk_kernel(Call call) {
  constexpr int kSteps = E / 32, kColumns = E / 32, kWords = kColumns / 2, kBatch = E <= 128 ? 4 : 2;
  __shared__ Shared<E> shared;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  Part<E> q_weight;
  q_weight.fill(1.0f);
  const int block = static_cast<int>(blockIdx.x) - call.own_blocks;
  const int chunk = block / call.kv_heads, kv_head = block - chunk * call.kv_heads, first = chunk * kChunk;
  let_next_begin();
  wait_for_previous();
  if (call.q_weight != nullptr) q_weight.load(static_cast<const T*>(call.q_weight));
  const int held = *call.held;
  if (block < 0) {
    const int row = static_cast<int>(blockIdx.x) / call.kv_heads * kWarps + warp;
    if (row < call.rows) take_own<T, E>(call, row, blockIdx.x % call.kv_heads, held, q_weight);
    return;
  }
  const Span span = seen_keys(call, held);
  if (first >= span.end || first + kChunk <= span.begin) return;

  const int64_t columns = static_cast<int64_t>(kv_head) * E;
  uint4 keys[2][kSteps];  // for one that is not seen another one
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = min(max(first + warp * 16 + i * 8 + g, span.begin), span.end - 1);
    const T* at = static_cast<const T*>(call.k_cache) + key * call.cache_stride + columns;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) keys[i][step] = reinterpret_cast<const uint4*>(at)[step * 4 + t];
  }
  Vector<uint32_t, kWords> values[kWarps][4];  // zero for one that is not seen: it may hold NaN
  const T* at = static_cast<const T*>(call.v_cache) + columns + warp * (E / kWarps);
  at += (first + 2 * t) * call.cache_stride;
#pragma unroll
  for (int step = 0; step < kWarps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + 2 * t + step * 16 + i / 2 * 8 + i % 2;
      values[step][i] = {};
      if (key >= span.begin && key < span.end)
        values[step][i] = reinterpret_cast<const Vector<uint32_t, kWords>*>(at)[g];
      at += i % 2 == 0 ? call.cache_stride : 7 * call.cache_stride;
    }
  }

  const int total = call.rows * call.repeat;
  for (int pass = 0; pass < total; pass += kRows) {
    const int count = min(kRows, total - pass);
    if (count <= kWarps)
      prepare<T, E, 1>(call, kv_head, pass, count, q_weight, shared);
    else
      prepare<T, E, kBatch>(call, kv_head, pass, count, q_weight, shared);
    __syncthreads();
#pragma unroll 1
    for (int tile = 0; tile < count; tile += 16) {  // rows at and beyond count hold anything; none touches another
      float scores[2][4] = {}, more[2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 low = shared.q[tile + g][step * 4 + t], high = shared.q[tile + g + 8][step * 4 + t];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 key = keys[i][step];
          mma_16x8x16<T>(scores[i], {low.x, high.x, low.y, high.y}, {key.x, key.y});
          mma_16x8x16<T>(more[i], {low.z, high.z, low.w, high.w}, {key.z, key.w});
        }
      }
      float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // of rows g and g + 8
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int key = first + warp * 16 + i / 4 * 8 + 2 * t + i % 2;
        float& score = scores[i / 4][i % 4];
        score = key >= span.begin && key < span.end ? (score + more[i / 4][i % 4]) * call.scale : -INFINITY;
        top[i % 4 / 2] = fmaxf(top[i % 4 / 2], score);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
        top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
        if (t == 0) shared.top[warp][g + half * 8] = top[half];
      }
      __syncthreads();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = shared.top[0][g + half * 8];
#pragma unroll
        for (int i = 1; i < kWarps; ++i) largest = fmaxf(largest, shared.top[i][g + half * 8]);
        const float shift = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float p[2] = {exp2f(scores[i][half * 2] - shift), exp2f(scores[i][half * 2 + 1] - shift)};
          sum[half] += p[0] + p[1];
          shared.p[g + half * 8][warp * 8 + i * 4 + t] = pack<T>(p[0], p[1]);
        }
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
        if (t == 0) shared.sum[warp][g + half * 8] = sum[half];
        top[half] = largest;
      }
      __syncthreads();
      float out[kColumns][4] = {};
#pragma unroll
      for (int step = 0; step < kWarps; ++step) {
        const uint32_t *low = shared.p[g] + step * 8, *high = shared.p[g + 8] + step * 8;
        const uint32_t p[4] = {low[t], high[t], low[t + 4], high[t + 4]};
        const auto& of = values[step];
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          mma_16x8x16<T>(out[2 * i], p, {even(of[0].x[i], of[1].x[i]), even(of[2].x[i], of[3].x[i])});
          mma_16x8x16<T>(out[2 * i + 1], p, {odd(of[0].x[i], of[1].x[i]), odd(of[2].x[i], of[3].x[i])});
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = pass + tile + g + half * 8, row = row_of(call, query);
        if (query >= total) continue;
        const int head = kv_head * call.repeat + query - row * call.repeat;
        const int64_t place = (static_cast<int64_t>(row) * call.heads + head) * call.chunks + chunk;
        Vector<float, 4>* sums = reinterpret_cast<Vector<float, 4>*>(call.sums + place * E + warp * (E / kWarps));
#pragma unroll
        for (int i = 0; i < 2 * kColumns; i += 4) {
          Vector<float, 4> four;
#pragma unroll
          for (int j = 0; j < 4; ++j) four.x[j] = out[(i + j) % kColumns][half * 2 + (i + j) / kColumns];
          sums[(t * 2 * kColumns + i) / 4] = four;
        }
        if (warp == 0 && t == 0) {
          float mass = shared.sum[0][g + half * 8];
#pragma unroll
          for (int i = 1; i < kWarps; ++i) mass += shared.sum[i][g + half * 8];
          reinterpret_cast<Vector<float, 2>*>(call.states)[place] = {{top[half], mass}};
        }
      }
    }
  }
}

// A block: one row and head. Its groups of E / 4 threads each take every so manieth chunk.
template <typename T, int E>
__global__ void __launch_bounds__(kMergeThreads, 2) merge_kernel(Call call) {
  constexpr int kWidth = E / 4, kGroups = kMergeThreads / kWidth, kBatch = 8;  // chunks in flight
  __shared__ float tops[kGroups], masses[kGroups], sums[kGroups][E];
  const int place = blockIdx.x, row = place / call.heads, head = place % call.heads;
  const int group = threadIdx.x / kWidth, column = threadIdx.x % kWidth, element = threadIdx.x;
  let_next_begin();
  wait_for_previous();
  T* out = static_cast<T*>(call.out) + row * call.out_stride + static_cast<int64_t>(head) * E;
  const float own = call.own[place];
  const T* own_value = head_of<T, E>(call, row, call.heads + call.kv_heads + head / call.repeat);
  const float value = to_float(own_value[min(element, E - 1)]);
  const Span span = seen_keys(call, *call.held);
  if (own != own) {
    if (element < E) out[element] = from_float<T>(NAN);
    return;
  }
  const int begin = span.begin / kChunk, end = span.begin < span.end ? (span.end - 1) / kChunk + 1 : begin;
  const int64_t nearest = static_cast<int64_t>(place) * call.chunks + begin + group;
  const auto* states = reinterpret_cast<const Vector<float, 2>*>(call.states) + nearest;
  const auto* parts = reinterpret_cast<const Vector<float, 4>*>(call.sums) + nearest * kWidth + column;
  float top = -INFINITY, mass = 0.0f, sum[4] = {};
  for (int left = end - begin - group; left > 0; left -= kGroups * kBatch) {
    Vector<float, 2> state[kBatch];
    Vector<float, 4> part[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      state[i] = {{-INFINITY, 0.0f}};
      if (i * kGroups < left) state[i] = states[i * kGroups];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      part[i] = {};
      if (i * kGroups < left) part[i] = parts[i * kGroups * kWidth];
    }
    states += kGroups * kBatch, parts += kGroups * kBatch * kWidth;
    float largest = top;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) largest = fmaxf(largest, state[i].x[0]);
    const float shift = largest == -INFINITY ? 0.0f : largest, kept = exp2f(top - shift);
    mass *= kept;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] *= kept;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float factor = exp2f(state[i].x[0] - shift);
      mass += factor * state[i].x[1];
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] += factor * part[i].x[j];
    }
    top = largest;
  }
  if (column == 0) tops[group] = top, masses[group] = mass;
#pragma unroll
  for (int j = 0; j < 4; ++j) sums[group][column * 4 + j] = sum[j];
  __syncthreads();
  if (element >= E) return;
  float largest = own;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) largest = fmaxf(largest, tops[i]);
  const float shift = largest == -INFINITY ? 0.0f : largest, own_factor = exp2f(own - shift);
  float result = own_factor * value, all = own_factor;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const float factor = exp2f(tops[i] - shift);
    all += factor * masses[i];
    result += factor * sums[i][element];
  }
  out[element] = from_float<T>(result / all);
}

template <typename T, int E>
int run(const Call& call, Stream stream) {
  const int blocks = call.own_blocks + call.chunks * call.kv_heads;
  const int error = launch(chunk_kernel<T, E>, blocks, kThreads, 0, stream, call);
  return error != 0 ? error : launch(merge_kernel<T, E>, call.rows * call.heads, kMergeThreads, 0, stream, call);
}

template <typename T>
int run(const Call& call, int head_dim, Stream stream) {
  if (head_dim == 64) return run<T, 64>(call, stream);
  if (head_dim == 128) return run<T, 128>(call, stream);
  if (head_dim == 256) return run<T, 256>(call, stream);
  return kNotTaken;
}

bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

}  // namespace fb::branch_attention

// Floats in `partials`, or kNotTaken for so many rows.
extern "C" int64_t fb_branch_attention_qkv_workspace(int rows, int heads, int head_dim, int64_t slots_in_cache) {
  if (rows > fb::branch_attention::kMaxRows) return fb::kNotTaken;
  const int64_t chunks = (slots_in_cache + fb::branch_attention::kChunk - 1) / fb::branch_attention::kChunk;
  return static_cast<int64_t>(rows) * heads * (chunks * (head_dim + 2) + 1);
}

extern "C" int fb_branch_attention_qkv(const void* qkv, int64_t qkv_stride, const void* q_weight, const void* k_weight,
                                       const float* cos, const float* sin, int64_t table_rows, const int* positions,
                                       void* k_cache, void* v_cache, int64_t cache_stride, int64_t slots_in_cache,
                                       const int* held, const int* slots, void* out, int64_t out_stride,
                                       float* partials, int rows, int heads, int kv_heads, int head_dim, int window,
                                       float eps, float scale, int dtype, void* stream) {
  using namespace fb::branch_attention;
  if (rows < 1 || rows > kMaxRows || kv_heads < 1 || heads < 1 || heads % kv_heads != 0 ||
      heads / kv_heads > kMaxRepeat || window < 0 || table_rows < 1 || slots_in_cache > INT_MAX - kChunk ||
      qkv_stride % 8 != 0 || cache_stride % 8 != 0)
    return fb::kNotTaken;
  for (const void* address : {qkv, q_weight, k_weight, static_cast<const void*>(cos), static_cast<const void*>(sin),
                              static_cast<const void*>(k_cache), static_cast<const void*>(v_cache),
                              static_cast<const void*>(partials)})
    if (!aligned(address)) return fb::kNotTaken;
  Call call{};
  call.qkv = qkv, call.q_weight = q_weight, call.k_weight = k_weight, call.cos = cos, call.sin = sin;
  call.positions = positions, call.held = held, call.slots = slots;
  call.k_cache = k_cache, call.v_cache = v_cache, call.out = out;
  call.qkv_stride = qkv_stride, call.table_rows = table_rows;
  call.cache_stride = cache_stride, call.out_stride = out_stride;
  call.rows = rows, call.heads = heads, call.kv_heads = kv_heads, call.repeat = heads / kv_heads;
  call.inverse = (1 << 16) / call.repeat + 1;  // exact as there are at most kMaxRows * kMaxRepeat query rows
  call.slots_in_cache = static_cast<int>(slots_in_cache);
  call.chunks = fb::divide_up(slots_in_cache, kChunk);
  call.own_blocks = fb::divide_up(rows, kWarps) * kv_heads;
  call.window = window, call.eps = eps, call.scale = scale * 1.44269504088896341f;
  if (static_cast<int64_t>(call.chunks) * kv_heads + call.own_blocks > INT_MAX) return fb::kNotTaken;
  const int64_t places = static_cast<int64_t>(rows) * heads * call.chunks;
  call.sums = partials, call.states = partials + places * head_dim, call.own = call.states + places * 2;
  const auto on = static_cast<fb::Stream>(stream);
  if (dtype == fb::kFloat16) return run<fb::half>(call, head_dim, on);
  if (dtype == fb::kBFloat16) return run<fb::bfloat16>(call, head_dim, on);
  return fb::kNotTaken;
}
