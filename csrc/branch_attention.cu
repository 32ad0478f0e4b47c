// branch_attention_qkv: branches of one token over one shared sequence, from projected rows to attention's output.
// A unit is a key head with up to 16 of its query rows. Its parts are blocks: some with a warp for each query row,
// which norms, rotates and keeps the row's key and scores it, others that share the cache's chunks of 64 keys. The last
// of them to arrive merges what all have left behind, in the order of the parts.
#include <algorithm>
#include <climits>
#include <cmath>

#include "counters.cuh"

namespace fb::branch_attention {

constexpr int kChunk = 64;             // keys
constexpr int kWarps = kChunk / 16;    // each scores 16 keys and sums a quarter of the columns of all values
constexpr int kThreads = kWarps * kWarp;
constexpr int kQueries = 16;           // query rows of a unit
constexpr int kOwnParts = kQueries / kWarps;
constexpr int kMostSplits = 64;        // parts over the cache
constexpr int kBlocks = 2;             // of a multiprocessor, for 16 query rows
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
  float* sums;    // [rows, heads, splits, E]
  float* states;  // [rows, heads, splits, 2]: largest score, sum of exponentials
  float* own;     // [rows, heads]: score of the row's own key; NaN where the row's arguments are bad
  Counters counters;  // one a unit
  int64_t qkv_stride, table_rows, cache_stride, out_stride;
  int rows, heads, kv_heads, repeat, inverse, slots_in_cache, splits, units, window;
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

// A query row of a key head: which row of qkv it is, which head, and its place in what [rows, heads] are laid out by.
struct Query {
  int row, head;
  int64_t place;

  __device__ Query(const Call& call, int kv_head, int index) {
    row = index * call.inverse >> 16;  // index / repeat
    head = kv_head * call.repeat + index - row * call.repeat;
    place = static_cast<int64_t>(row) * call.heads + head;
  }
};

// A query row and its row of the tables, on their way.
template <int E>
struct Request {
  Part<E> q, cos, sin;

  template <typename T>
  __device__ void begin(const Call& call, const Query& query, int position) {
    const int64_t inside = position >= 0 && position < call.table_rows ? position : 0;
    q.load(head_of<T, E>(call, query.row, query.head));
    cos.load(call.cos + inside * E);
    sin.load(call.sin + inside * E);
  }

  template <typename T>
  __device__ void finish(const Call& call, const Part<E>& weight) {
    q.norm(weight, call.q_weight != nullptr, call.eps);
    q.template rotate<T>(cos, sin);
  }
};

// A warp: the score of a query row with its own row's key, which is kept by the first of the row's.
template <typename T, int E>
__device__ inline void take_own(const Call& call, int kv_head, const Query& query, int held, const Part<E>& q_weight) {
  const int lane = threadIdx.x % kWarp;
  Part<E> key, value, weight;
  Request<E> request;
  weight.fill(1.0f);
  const int position = call.positions[query.row];
  request.template begin<T>(call, query, position);
  key.load(head_of<T, E>(call, query.row, call.heads + kv_head));
  value.load(head_of<T, E>(call, query.row, call.heads + call.kv_heads + kv_head));
  if (call.k_weight != nullptr) weight.load(static_cast<const T*>(call.k_weight));
  const int slot = call.slots != nullptr ? call.slots[query.row] : -1;
  if (held < 0 || held > call.slots_in_cache || position < 0 || position >= call.table_rows ||
      (slot >= 0 && (slot < held || slot >= call.slots_in_cache))) {
    if (lane == 0) call.own[query.place] = NAN;
    return;
  }
  key.norm(weight, call.k_weight != nullptr, call.eps);
  key.template rotate<T>(request.cos, request.sin);
  if (slot >= 0 && query.head == kv_head * call.repeat) {
    const int64_t place = slot * call.cache_stride + static_cast<int64_t>(kv_head) * E;
    key.store(static_cast<T*>(call.k_cache) + place);
    value.store(static_cast<T*>(call.v_cache) + place);
  }
  request.template finish<T>(call, q_weight);
  const float score = request.q.dot(key) * call.scale;
  if (lane == 0) call.own[query.place] = score;
}

template <int E>
constexpr int kAhead = E <= 128 ? kQueries / kWarps : 2;  // requests of a warp that are under way with its first keys

template <int E>
struct alignas(16) Shared {
  static constexpr int kStride = E / 8 + 4;  // rows 64 bytes apart modulo 128: two of them fill all banks
  uint4 q[kQueries][kStride];
  uint32_t p[kQueries][kChunk / 2 + 4];
  float top[kWarps][kQueries], sum[kWarps][kQueries];
  bool is_last;
};

// A block: query rows first to first + count of the key head over every so manieth chunk, from this part's on.
//
// Both products have a free order of their inner index and of their columns. With g = lane / 4 and t = lane % 4, a
// thread's 16 bytes at e + 8t of q and of key g are the inner indices {2t, 2t + 1, 2t + 8, 2t + 9} of two products;
// its n = E / 32 columns from n g on, of values 2t, 2t + 1, 2t + 8 and 2t + 9, are column g of n products.
template <typename T, int E>
__device__ inline void take_chunks(const Call& call, int kv_head, int first, int count, int split, const Span& span,
                                   const Part<E>& q_weight, Request<E> (&requests)[kAhead<E>], Shared<E>& shared) {
  constexpr int kSteps = E / 32, kColumns = E / 32, kWords = kColumns / 2;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int64_t columns = static_cast<int64_t>(kv_head) * E;
  const auto seen = [&](int key) { return key >= span.begin && key < span.end; };
  uint4 keys[2][kSteps];  // for one that is not seen another one
  const auto load_keys = [&](int begin) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = min(max(begin + warp * 16 + i * 8 + g, span.begin), span.end - 1);
      const T* at = static_cast<const T*>(call.k_cache) + key * call.cache_stride + columns;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) keys[i][step] = reinterpret_cast<const uint4*>(at)[step * 4 + t];
    }
  };
  Vector<uint32_t, kWords> values[kWarps][4];  // zero for one that is not seen: it may hold NaN
  const auto load_values = [&](int begin) {
    const T* at = static_cast<const T*>(call.v_cache) + columns + warp * (E / kWarps);
    at += (begin + 2 * t) * call.cache_stride;
#pragma unroll
    for (int step = 0; step < kWarps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[step][i] = {};
        if (seen(begin + 2 * t + step * 16 + i / 2 * 8 + i % 2))
          values[step][i] = reinterpret_cast<const Vector<uint32_t, kWords>*>(at)[g];
        at += i % 2 == 0 ? call.cache_stride : 7 * call.cache_stride;
      }
    }
  };
  int begin = (span.begin / kChunk + split) * kChunk;
  load_keys(begin);
  load_values(begin);

#pragma unroll
  for (int i = 0; i < kQueries / kWarps; ++i) {
    const int query = warp + i * kWarps;
    if (query >= count) break;
    Request<E>& request = requests[i % kAhead<E>];
    if (i >= kAhead<E>) {
      const Query late(call, kv_head, first + query);
      request.template begin<T>(call, late, call.positions[late.row]);
    }
    request.template finish<T>(call, q_weight);
    request.q.store(reinterpret_cast<T*>(shared.q[query]));
  }
  __syncthreads();

  // Of rows g and g + 8; those at and beyond count hold anything, and none touches another.
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, out[kColumns][4] = {};
#pragma unroll 1
  for (; begin < span.end; begin += call.splits * kChunk) {
    float scores[2][4] = {}, more[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4 low = shared.q[g][step * 4 + t], high = shared.q[g + 8][step * 4 + t];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 key = keys[i][step];
        mma_16x8x16<T>(scores[i], {low.x, high.x, low.y, high.y}, {key.x, key.y});
        mma_16x8x16<T>(more[i], {low.z, high.z, low.w, high.w}, {key.z, key.w});
      }
    }
    const int next = begin + call.splits * kChunk;
    if (next < span.end) load_keys(next);
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = begin + warp * 16 + i / 4 * 8 + 2 * t + i % 2;
      float& score = scores[i / 4][i % 4];
      score = seen(key) ? (score + more[i / 4][i % 4]) * call.scale : -INFINITY;
      largest[i % 4 / 2] = fmaxf(largest[i % 4 / 2], score);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
      if (t == 0) shared.top[warp][g + half * 8] = largest[half];
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float now = top[half];
#pragma unroll
      for (int i = 0; i < kWarps; ++i) now = fmaxf(now, shared.top[i][g + half * 8]);
      const float shift = now == -INFINITY ? 0.0f : now, kept = exp2f(top[half] - shift);
      top[half] = now;
      sum[half] *= kept;
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) out[i / 2][half * 2 + i % 2] *= kept;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float p[2] = {exp2f(scores[i][half * 2] - shift), exp2f(scores[i][half * 2 + 1] - shift)};
        sum[half] += p[0] + p[1];
        shared.p[g + half * 8][warp * 8 + i * 4 + t] = pack<T>(p[0], p[1]);
      }
    }
    __syncthreads();
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
    if (next < span.end) load_values(next);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    if (t == 0) shared.sum[warp][g + half * 8] = sum[half];
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = g + half * 8;
    if (query >= count) continue;
    const int64_t place = Query(call, kv_head, first + query).place * call.splits + split;
    auto* sums = reinterpret_cast<Vector<float, 4>*>(call.sums + place * E + warp * (E / kWarps));
#pragma unroll
    for (int i = 0; i < 2 * kColumns; i += 4) {
      Vector<float, 4> four;
#pragma unroll
      for (int j = 0; j < 4; ++j) four.x[j] = out[(i + j) % kColumns][half * 2 + (i + j) / kColumns];
      sums[(t * 2 * kColumns + i) / 4] = four;
    }
    if (warp == 0 && t == 0) {
      float mass = shared.sum[0][query];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) mass += shared.sum[i][query];
      reinterpret_cast<Vector<float, 2>*>(call.states)[place] = {{top[half], mass}};
    }
  }
}

// A warp: the output of a query row, of its own key and so many parts.
template <typename T, int E>
__device__ inline void merge(const Call& call, int kv_head, const Query& query, int parts) {
  constexpr int kWidth = E / kWarp, kBatch = E <= 128 ? 16 : 8;  // columns of a lane, parts in flight
  using Columns = Vector<float, kWidth>;
  const int lane = threadIdx.x % kWarp;
  const float own = call.own[query.place];
  const T* own_head = head_of<T, E>(call, query.row, call.heads + call.kv_heads + kv_head);
  const auto value = reinterpret_cast<const Vector<T, kWidth>*>(own_head)[lane];
  const auto* states = reinterpret_cast<const Vector<float, 2>*>(call.states) + query.place * call.splits;
  const auto* sums = reinterpret_cast<const Columns*>(call.sums) + query.place * call.splits * kWarp + lane;
  float top = own, mass = exp2f(own - (own == -INFINITY ? 0.0f : own)), sum[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sum[j] = mass * to_float(value.x[j]);
#pragma unroll 1
  for (int first = 0; first < parts; first += kBatch) {
    Vector<float, 2> state[kBatch];
    Columns part[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      state[i] = {{-INFINITY, 0.0f}};
      part[i] = {};
      if (first + i >= parts) continue;
      state[i] = states[first + i];
      part[i] = sums[(first + i) * kWarp];
    }
    float largest = top;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) largest = fmaxf(largest, state[i].x[0]);
    const float shift = largest == -INFINITY ? 0.0f : largest, kept = exp2f(top - shift);
    mass *= kept;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] *= kept;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float factor = exp2f(state[i].x[0] - shift);
      mass += factor * state[i].x[1];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] += factor * part[i].x[j];
    }
    top = largest;
  }
  Vector<T, kWidth> result;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) result.x[j] = from_float<T>(sum[j] / mass);
  T* out = static_cast<T*>(call.out) + query.row * call.out_stride + static_cast<int64_t>(query.head) * E;
  reinterpret_cast<Vector<T, kWidth>*>(out)[lane] = result;
}

template <typename T, int E>
__global__ void __launch_bounds__(kThreads, E <= 128 ? 3 : 2) branch_attention_qkv_kernel(Call call) {
  __shared__ Shared<E> shared;
  const int warp = threadIdx.x / kWarp, part = blockIdx.x / call.units, unit = blockIdx.x - part * call.units;
  const int tile = unit / call.kv_heads, kv_head = unit - tile * call.kv_heads, first = tile * kQueries;
  const int count = min(kQueries, call.rows * call.repeat - first), own_parts = divide_up(count, kWarps);
  const int split = part - kOwnParts, own = part * kWarps + warp;
  Part<E> q_weight;
  Request<E> requests[kAhead<E>];
  q_weight.fill(1.0f);
  let_next_begin();
  wait_for_previous();
  const int held = *call.held;
  if (call.q_weight != nullptr) q_weight.load(static_cast<const T*>(call.q_weight));
  if (split >= 0) {  // they need no more than positions: ahead of keys and values
    int position[kAhead<E>];
#pragma unroll
    for (int i = 0; i < kAhead<E>; ++i)
      position[i] = call.positions[Query(call, kv_head, first + min(warp + i * kWarps, count - 1)).row];
#pragma unroll
    for (int i = 0; i < kAhead<E>; ++i) {
      const int query = warp + i * kWarps;
      if (query < count) requests[i].template begin<T>(call, Query(call, kv_head, first + query), position[i]);
    }
  }
  const Span span = seen_keys(call, held);
  const int chunks = span.begin < span.end ? (span.end - 1) / kChunk - span.begin / kChunk + 1 : 0;
  const int splits = min(chunks, call.splits);
  if (split >= 0 ? split >= splits : part >= own_parts) return;
  if (split >= 0)
    take_chunks<T, E>(call, kv_head, first, count, split, span, q_weight, requests, shared);
  else if (own < count)
    take_own<T, E>(call, kv_head, Query(call, kv_head, first + own), held, q_weight);
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = arrives_last(counter_at(call.counters, unit), own_parts + splits);
  __syncthreads();
  if (!shared.is_last) return;
#pragma unroll 1
  for (int i = warp; i < count; i += kWarps) merge<T, E>(call, kv_head, Query(call, kv_head, first + i), splits);
}

template <typename T, int E>
int run(const Call& call, Stream stream) {
  const int blocks = call.units * (kOwnParts + call.splits);
  return launch(branch_attention_qkv_kernel<T, E>, blocks, kThreads, 0, stream, call);
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
  using namespace fb::branch_attention;
  if (rows > kMaxRows) return fb::kNotTaken;
  const int64_t splits = std::min<int64_t>((slots_in_cache + kChunk - 1) / kChunk, kMostSplits);
  return static_cast<int64_t>(rows) * heads * (splits * (head_dim + 2) + 2);
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
      qkv_stride % 8 != 0 || cache_stride % 8 != 0 || out_stride % 8 != 0)
    return fb::kNotTaken;
  for (const void* address : {qkv, q_weight, k_weight, static_cast<const void*>(cos), static_cast<const void*>(sin),
                              static_cast<const void*>(k_cache), static_cast<const void*>(v_cache),
                              static_cast<const void*>(out), static_cast<const void*>(partials)})
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
  call.units = fb::divide_up(rows * call.repeat, kQueries) * kv_heads;
  call.window = window, call.eps = eps, call.scale = scale * 1.44269504088896341f;
  fb::Chip chip;
  if (const int error = fb::current_chip(&chip)) return error;
  const int chunks = fb::divide_up(slots_in_cache, kChunk), most = std::min(chunks, kMostSplits);
  call.splits = std::min(most, std::max(1, kBlocks * chip.multiprocessors / kv_heads));  // the same for any rows
  const int64_t places = static_cast<int64_t>(rows) * heads * call.splits;
  call.sums = partials, call.states = partials + places * head_dim, call.own = call.states + places * 2;
  const auto on = static_cast<fb::Stream>(stream);
  auto* counters = reinterpret_cast<unsigned*>(call.own + static_cast<int64_t>(rows) * heads);
  if (const int error = fb::counters_for(call.units, counters, on, &call.counters)) return error;
  if (dtype == fb::kFloat16) return run<fb::half>(call, head_dim, on);
  if (dtype == fb::kBFloat16) return run<fb::bfloat16>(call, head_dim, on);
  return fb::kNotTaken;
}
