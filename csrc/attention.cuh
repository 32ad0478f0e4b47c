// Attention of query rows to a prefix that they share, in parts: a block's chunks of keys, and the merge of all parts.
//
// A unit is one key head and a tile of its query rows. The chunks of keys that a unit sees are dealt to its blocks, in
// an order that depends only on their number. Each block writes a part: sums of p v, largest score, sum of p. The last
// block to arrive merges all parts in their order by out = sum_i 2^(m_i - m) s_i / sum_i 2^(m_i - m) l_i with m = max_i
// m_i (the online softmax, Milakov & Gimelshein 2018), so no result depends on which block is last.
#pragma once

#include <cmath>

#include "counters.cuh"

namespace fb::branch_attention {

// The shape of a block. Each of kWarps warps scores 16 keys of a chunk against all 16 kTiles query rows, and sums
// E / kWarps columns of all values of the chunk.
template <int kHead_, int kWarps_, int kTiles_>
struct Shape {
  static constexpr int kHead = kHead_, kWarps = kWarps_, kTiles = kTiles_;
  static constexpr int kThreads = kWarps * kWarp, kChunk = 16 * kWarps, kQueries = 16 * kTiles;
};

constexpr float kLog2E = 1.44269504088896341f;
constexpr int64_t kMostFloats = 1 << 28;  // of partial results

template <typename T, int N>
struct alignas(N * sizeof(T)) Vector {
  T x[N];
};

struct Span {
  int begin, end;  // keys that are seen
};

// Where blocks write their parts for the merge.
struct Parts {
  float* sums;    // [rows, heads, each, E]
  float* states;  // [rows, heads, each, 2]: largest score, sum of exponentials
  int each;       // parts of a row
};

__device__ inline uint32_t even(uint32_t a, uint32_t b) { return permute_bytes<0x5410>(a, b); }
__device__ inline uint32_t odd(uint32_t a, uint32_t b) { return permute_bytes<0x7632>(a, b); }

__device__ inline float sum_over_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

template <typename Shape>
struct Shared {
  static constexpr int kStride = Shape::kHead / 8 + 4;  // rows 64 bytes apart modulo 128: two of them fill all banks
  uint4 q[Shape::kQueries][kStride];
  uint32_t p[Shape::kQueries][Shape::kChunk / 2 + 4];  // exp of scores, two to a word; 4 words of padding
  Vector<float, Shape::kWarps> top[Shape::kQueries], sum[Shape::kQueries];  // of each warp's 16 keys
  bool is_last;
};

// A block's part: `count` query rows against the chunks begin, begin + stride, ... of the span. `prepare` writes the
// rows to shared.q while keys and values are loaded; `keys` gives their addresses, `place` the index of a row's part.
// Loop: scores of a chunk and their maxima over warps; exp and the factor of earlier sums; p v. Keys of the next chunk
//   are loaded after the scores, its values after p v.
// Memory: shared: q, p, maxima and sums of the warps. Registers of a warp: its 16 keys, its columns of all values of
//   the chunk, scores [16 kTiles, 16] and out [16 kTiles, E / kWarps] in float32.
// Layout: k, v [.., E], adjacent columns; parts.sums [.., E], parts.states [.., 2].
//
// A product may take its inner index in any order if both operands do, and its columns too. With g = lane / 4 and t =
// lane % 4: the 16 bytes at e + 8t of q and of key g hold the inner indices {2t, 2t + 1, 2t + 8, 2t + 9} of two
// products, so a thread loads whole words. Its n columns from n g on, of values 2t, 2t + 1, 2t + 8 and 2t + 9, are
// column g of n products.
template <typename T, typename Shape, typename Keys, typename Prepare, typename Place>
__device__ inline void take_chunks(Keys& keys, const Span& span, int begin, int stride, int count, float scale,
                                   const Parts& parts, Shared<Shape>& shared, const Prepare& prepare,
                                   const Place& place) {
  constexpr int E = Shape::kHead, kWarps = Shape::kWarps, kTiles = Shape::kTiles;
  // kSteps: 32 columns of q and k each; kColumns: products over this warp's columns; kWords: words of 2 columns
  constexpr int kSteps = E / 32, kColumns = E / kWarps / 8, kWords = kColumns / 2;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const auto seen = [&](int key) { return key >= span.begin && key < span.end; };
  uint4 k[2][kSteps];  // keys g and g + 8 of the warp; outside the span the nearest key in it, masked later
  const auto load_keys = [&](int chunk, int turn) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = min(max(chunk + warp * 16 + i * 8 + g, span.begin), span.end - 1);
      const T* at = static_cast<const T*>(keys.k) + keys.row(key, chunk, turn);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) k[i][step] = reinterpret_cast<const uint4*>(at)[step * 4 + t];
    }
  };
  Vector<uint32_t, kWords> values[kWarps][4];  // zero for a key that is not seen: its value may be NaN
  const auto load_values = [&](int chunk, int turn) {
    auto pairs = keys.pairs(static_cast<const T*>(keys.v) + warp * (E / kWarps), chunk, 2 * t, turn);
#pragma unroll
    for (int step = 0; step < kWarps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto at = pairs.next();
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          values[step][2 * i + j] = {};
          if (Keys::kZeros || seen(chunk + 2 * t + step * 16 + i * 8 + j))
            values[step][2 * i + j] = reinterpret_cast<const Vector<uint32_t, kWords>*>(at.x[j])[g];
        }
      }
    }
  };
  if (begin < span.end) {
    load_keys(begin, 0);
    load_values(begin, 0);
  }
  prepare();
  __syncthreads();

  // Of rows g and g + 8 of each tile; rows from `count` on hold anything, and rows do not affect each other.
  float top[kTiles][2], sum[kTiles][2] = {}, out[kTiles][kColumns][4] = {};
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) top[i / 2][i % 2] = -INFINITY;
#pragma unroll 1
  for (int turn = 0; begin < span.end; begin += stride, ++turn) {
    float scores[kTiles][2][4] = {}, more[kTiles][2][4] = {};  // two sums, so that products do not wait for each other
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 low = shared.q[tile * 16 + g][step * 4 + t], high = shared.q[tile * 16 + g + 8][step * 4 + t];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 key = k[i][step];
          mma_16x8x16<T>(scores[tile][i], {low.x, high.x, low.y, high.y}, {key.x, key.y});
          mma_16x8x16<T>(more[tile][i], {low.z, high.z, low.w, high.w}, {key.z, key.w});
        }
      }
    }
    const int next = begin + stride;
    if (next < span.end) load_keys(next, turn + 1);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int key = begin + warp * 16 + i / 4 * 8 + 2 * t + i % 2;
        float& score = scores[tile][i / 4][i % 4];
        score = seen(key) ? (score + more[tile][i / 4][i % 4]) * scale : -INFINITY;  // in units of log 2
        largest[i % 4 / 2] = fmaxf(largest[i % 4 / 2], score);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // the four lanes of a row hold its 16 keys
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
        if (t == 0) shared.top[tile * 16 + g + half * 8].x[warp] = largest[half];
      }
    }
    __syncthreads();  // all warps' maxima are in shared memory
    keys.advance(turn);
#pragma unroll
    for (int row = 0; row < 2 * kTiles; ++row) {
      const int tile = row / 2, half = row % 2, query = tile * 16 + g + half * 8;
      const auto tops = shared.top[query];
      float now = top[tile][half];
#pragma unroll
      for (int i = 0; i < kWarps; ++i) now = fmaxf(now, tops.x[i]);
      // -inf - -inf would be NaN: a row without a key so far shifts by 0
      const float shift = now == -INFINITY ? 0.0f : now, kept = exp2_of(top[tile][half] - shift);
      top[tile][half] = now;
      sum[tile][half] *= kept;
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) out[tile][i / 2][half * 2 + i % 2] *= kept;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* score = &scores[tile][i][half * 2];
        const float p[2] = {exp2_of(score[0] - shift), exp2_of(score[1] - shift)};
        sum[tile][half] += p[0] + p[1];
        shared.p[query][warp * 8 + i * 4 + t] = pack<T>(p[0], p[1]);
      }
    }
    __syncthreads();  // p of all warps' keys is in shared memory
#pragma unroll
    for (int step = 0; step < kWarps; ++step) {  // 16 keys each
      const auto& of = values[step];
      uint32_t v[kColumns][2];  // two keys of one column in a word, as the product takes them
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        v[2 * i][0] = even(of[0].x[i], of[1].x[i]), v[2 * i][1] = even(of[2].x[i], of[3].x[i]);
        v[2 * i + 1][0] = odd(of[0].x[i], of[1].x[i]), v[2 * i + 1][1] = odd(of[2].x[i], of[3].x[i]);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t p[4];
        load_16x16(p, shared.p[tile * 16 + lane % 16] + step * 8 + lane / 16 * 4);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) mma_16x8x16<T>(out[tile][i], p, v[i]);
      }
    }
    if (next < span.end) load_values(next, turn + 1);
  }

#pragma unroll
  for (int row = 0; row < 2 * kTiles; ++row) {
    float& mass = sum[row / 2][row % 2];
    mass += __shfl_xor_sync(0xffffffffu, mass, 1);
    mass += __shfl_xor_sync(0xffffffffu, mass, 2);
    if (t == 0) shared.sum[row / 2 * 16 + row % 2 * 8 + g].x[warp] = mass;
  }
  __syncthreads();
#pragma unroll
  for (int row = 0; row < 2 * kTiles; ++row) {
    const int tile = row / 2, half = row % 2, query = tile * 16 + g + half * 8;
    if (query >= count) continue;
    const int64_t at = place(query);
    auto* sums = reinterpret_cast<Vector<float, 4>*>(parts.sums + at * E + warp * (E / kWarps));
#pragma unroll
    for (int i = 0; i < 2 * kColumns; i += 4) {
      Vector<float, 4> four;
#pragma unroll
      for (int j = 0; j < 4; ++j) four.x[j] = out[tile][(i + j) % kColumns][half * 2 + (i + j) / kColumns];
      sums[(t * 2 * kColumns + i) / 4] = four;
    }
    if (warp == 0 && t == 0) {
      const auto sums_of = shared.sum[query];
      float mass = sums_of.x[0];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) mass += sums_of.x[i];
      reinterpret_cast<Vector<float, 2>*>(parts.states)[at] = {{top[tile][half], mass}};
    }
  }
}

// The softmax state of a query row: largest score, sum of p, sum of p v. A warp holds a row, a lane kWidth columns.
template <int kWidth>
struct State {
  float top = -INFINITY, mass = 0.0f, sum[kWidth] = {};

  // Raises the largest score to at least `score` and scales the sums to it; returns what to subtract from new scores.
  __device__ float raise(float score) {
    const float now = fmaxf(top, score), shift = now == -INFINITY ? 0.0f : now, kept = exp2_of(top - shift);
    top = now;
    mass *= kept;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] *= kept;
    return shift;
  }

  template <typename T>
  __device__ void add(float score, const Vector<T, kWidth>& value) {  // one key's
    const float p = exp2_of(score - raise(score));
    mass += p;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] += p * to_float(value.x[j]);
  }

  // Adds parts 0 to count - 1 of the row in this order, with the loads of kBatch parts in flight.
  template <int kBatch>
  __device__ void merge(const Parts& parts, int64_t place, int count) {
    using Columns = Vector<float, kWidth>;
    const auto* states = reinterpret_cast<const Vector<float, 2>*>(parts.states) + place * parts.each;
    const auto* sums = reinterpret_cast<const Columns*>(parts.sums) + place * parts.each * kWarp;
#pragma unroll 1
    for (int first = 0; first < count; first += kBatch) {
      Vector<float, 2> state[kBatch];
      Columns part[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        state[i] = {{-INFINITY, 0.0f}};
        part[i] = {};
        if (first + i >= count) continue;
        state[i] = states[first + i];
        part[i] = sums[(first + i) * kWarp + threadIdx.x % kWarp];
      }
      float largest = top;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) largest = fmaxf(largest, state[i].x[0]);
      const float shift = raise(largest);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float factor = exp2_of(state[i].x[0] - shift);
        mass += factor * state[i].x[1];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] += factor * part[i].x[j];
      }
    }
  }

  __device__ void spoil() {  // the row's result becomes NaN
    mass = NAN;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] = NAN;
  }

  __device__ void leave(const Parts& parts, int64_t part) const {
    Vector<float, kWidth> columns;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) columns.x[j] = sum[j];
    reinterpret_cast<Vector<float, kWidth>*>(parts.sums)[part * kWarp + threadIdx.x % kWarp] = columns;
    if (threadIdx.x % kWarp == 0) reinterpret_cast<Vector<float, 2>*>(parts.states)[part] = {{top, mass}};
  }

  template <typename T>
  __device__ void store(T* head) const {  // 0 if there was no key; NaN where a value with p = 0 is not finite
    const float divisor = mass == 0.0f ? 1.0f : mass;
    Vector<T, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result.x[j] = from_float<T>(sum[j] / divisor);
    reinterpret_cast<Vector<T, kWidth>*>(head)[threadIdx.x % kWarp] = result;
  }
};

// Packed query row `index` of a key head, counted from the first one of row `first_row`: its row, its query head, and
// its index in [rows, heads].
struct Query {
  int row, head;
  int64_t place;

  template <typename Call>
  __device__ Query(const Call& call, int kv_head, int index, int first_row = 0) {
    const int rows = index * call.inverse >> 16;  // index / repeat
    row = first_row + rows;
    head = kv_head * call.repeat + index - rows * call.repeat;
    place = static_cast<int64_t>(row) * call.heads + head;
  }
};

// (x * inverse_of(n)) >> 16 is x / n, for x up to 2^16 / n: a multiplication instead of a division.
constexpr int inverse_of(int repeat) { return (1 << 16) / repeat + 1; }

// Launch a call by the `run<T, head_dim>` of its type.
template <typename T, typename Call>
int run(const Call& call, int head_dim, Stream stream) {
  if (head_dim == 64) return run<T, 64>(call, stream);
  if (head_dim == 128) return run<T, 128>(call, stream);
  if (head_dim == 256) return run<T, 256>(call, stream);
  return kNotTaken;
}

template <typename Call>
int run(const Call& call, int head_dim, int dtype, Stream stream) {
  if (dtype == kFloat16) return run<half>(call, head_dim, stream);
  if (dtype == kBFloat16) return run<bfloat16>(call, head_dim, stream);
  return kNotTaken;
}

}  // namespace fb::branch_attention
