// Two kernels of branches that share a prefix. `branch_attention_qkv`: branches of one token after their sequence, from
// projected rows to attention's output. `branch_attention`: groups of branches, each after its slice.
//
// A unit is a key head with a tile of its query rows. Blocks share the chunks of keys that it sees, in an order that
// depends only on its length; the last block to arrive merges the results of all, in the order of the parts.
#include <algorithm>
#include <climits>
#include <cmath>
#include <type_traits>

#include "counters.cuh"

namespace fb::branch_attention {

// The shape of a block: kWarps warps, each of which scores 16 keys of a chunk with 16 kTiles query rows, and sums some
// of the columns of all values.
template <int kHead_, int kWarps_, int kTiles_>
struct Shape {
  static constexpr int kHead = kHead_, kWarps = kWarps_, kTiles = kTiles_;
  static constexpr int kThreads = kWarps * kWarp, kChunk = 16 * kWarps, kQueries = 16 * kTiles;
};

constexpr float kLog2E = 1.44269504088896341f;

template <typename T, int N>
struct alignas(N * sizeof(T)) Vector {
  T x[N];
};

struct Span {
  int begin, end;  // keys that are seen
};

// What blocks write for the merge.
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
  uint32_t p[Shape::kQueries][Shape::kChunk / 2 + 4];
  Vector<float, Shape::kWarps> top[Shape::kQueries], sum[Shape::kQueries];
  bool is_last;
};

// A block: `count` query rows over every n-th chunk of the span, from one chunk's first key on. `prepare` puts the rows
// into shared.q while keys and values are loaded; `keys` knows their addresses, `place` that of a row's part.
//
// Both products have a free order of their inner index and of their columns. With g = lane / 4 and t = lane % 4, a
// thread's 16 bytes at e + 8t of q and of key g are the inner indices {2t, 2t + 1, 2t + 8, 2t + 9} of two products;
// its n columns from n g on, of values 2t, 2t + 1, 2t + 8 and 2t + 9, are column g of n products.
template <typename T, typename Shape, typename Keys, typename Prepare, typename Place>
__device__ inline void take_chunks(Keys& keys, const Span& span, int begin, int stride, int count, float scale,
                                   const Parts& parts, Shared<Shape>& shared, const Prepare& prepare,
                                   const Place& place) {
  constexpr int E = Shape::kHead, kWarps = Shape::kWarps, kTiles = Shape::kTiles;
  constexpr int kSteps = E / 32, kColumns = E / kWarps / 8, kWords = kColumns / 2;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const auto seen = [&](int key) { return key >= span.begin && key < span.end; };
  uint4 k[2][kSteps];  // another key in place of one that is not seen
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
    float scores[kTiles][2][4] = {}, more[kTiles][2][4] = {};
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
        score = seen(key) ? (score + more[tile][i / 4][i % 4]) * scale : -INFINITY;
        largest[i % 4 / 2] = fmaxf(largest[i % 4 / 2], score);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
        if (t == 0) shared.top[tile * 16 + g + half * 8].x[warp] = largest[half];
      }
    }
    __syncthreads();
    keys.advance(turn);
#pragma unroll
    for (int row = 0; row < 2 * kTiles; ++row) {
      const int tile = row / 2, half = row % 2, query = tile * 16 + g + half * 8;
      const auto tops = shared.top[query];
      float now = top[tile][half];
#pragma unroll
      for (int i = 0; i < kWarps; ++i) now = fmaxf(now, tops.x[i]);
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
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kWarps; ++step) {
      const auto& of = values[step];
      uint32_t v[kColumns][2];
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

// A query row's softmax over what was added, of which a lane has so many columns.
template <int kWidth>
struct State {
  float top = -INFINITY, mass = 0.0f, sum[kWidth] = {};

  // To a larger score, by which earlier ones are divided from now on; what those to come are divided by.
  __device__ float raise(float score) {
    const float now = fmaxf(top, score), shift = now == -INFINITY ? 0.0f : now, kept = exp2_of(top - shift);
    top = now;
    mass *= kept;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] *= kept;
    return shift;
  }

  template <typename T>
  __device__ void add(float score, const Vector<T, kWidth>& value) {  // a key's
    const float p = exp2_of(score - raise(score));
    mass += p;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] += p * to_float(value.x[j]);
  }

  // Adds so many parts of the row, with several loads in flight.
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

  __device__ void spoil() {
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
  __device__ void store(T* head) const {  // zeros if there was no key, or the NaN of values with weight 0
    const float divisor = mass == 0.0f ? 1.0f : mass;
    Vector<T, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result.x[j] = from_float<T>(sum[j] / divisor);
    reinterpret_cast<Vector<T, kWidth>*>(head)[threadIdx.x % kWarp] = result;
  }
};

// One of a key head's packed query rows, counted from some row's first: its row, its head, and its place in what
// [rows, heads] are laid out by.
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

constexpr int inverse_of(int repeat) { return (1 << 16) / repeat + 1; }  // exact up to 2^16 / repeat

// --- branch_attention_qkv: its first parts norm and rotate the rows' own keys, write and score them ------------------

constexpr int kWarps = 4;
template <int E>
using QkvShape = Shape<E, kWarps, 1>;
constexpr int kChunk = QkvShape<64>::kChunk, kThreads = QkvShape<64>::kThreads, kQueries = QkvShape<64>::kQueries;
constexpr int kOwnParts = kQueries / kWarps;
constexpr int kMostSplits = 64;  // parts over the cache
constexpr int kBlocks = 2;       // of a multiprocessor, for 16 query rows
constexpr int kMaxRows = 32;
constexpr int kMaxRepeat = 16;

struct QkvCall {
  const void *qkv, *q_weight, *k_weight;
  const float *cos, *sin;
  const int *positions, *held, *slots;
  void *k_cache, *v_cache, *out;
  Parts parts;
  float* own;         // [rows, heads]: score of the row's own key; NaN where the row's arguments are bad
  Counters counters;  // one per unit
  const int* block_table;  // [sequences, n]
  int64_t qkv_stride, table_rows, page_stride, cache_stride, out_stride, block_table_row;
  int rows, heads, kv_heads, repeat, inverse, units, window;  // rows after each sequence
  int tiles;               // of a sequence's rows
  int capacity;            // keys that a sequence may have
  int pages, page_size;    // if they are in pages, of whole chunks
  int slots_in_cache;
  float eps, scale;  // the scale also brings scores to base 2
};

__device__ inline Span seen_keys(const QkvCall& call, int held) {  // none if `held` is invalid
  if (held < 0 || held > call.capacity) return {0, 0};
  return {call.window > 0 ? max(0, held - call.window + 1) : 0, held};
}

// So many of a sequence's packed query rows, with a key head.
struct Unit {
  int sequence, row, kv_head, first, count;  // row of the sequence's first, number of the first of the packed

  __device__ Query query(const QkvCall& call, int index) const { return Query(call, kv_head, first + index, row); }
};

template <bool kPaged>
__device__ inline Unit find_unit(const QkvCall& call, int unit) {
  const int tile = unit / call.kv_heads, sequence = kPaged ? tile / call.tiles : 0;
  const int first = (tile - sequence * call.tiles) * kQueries;
  return {sequence, sequence * call.rows, unit - tile * call.kv_heads, first,
          min(kQueries, call.rows * call.repeat - first)};
}

// Keys of a key head in a flat cache.
struct Cache {
  static constexpr bool kZeros = false;
  const void *k, *v;
  int64_t stride;

  __device__ Cache(const QkvCall& call, const void* k, const void* v, int, const Span&, int)
      : k(k), v(v), stride(call.cache_stride) {}

  __device__ int64_t row(int key, int, int) const { return key * stride; }

  template <typename T>
  struct Pairs {
    const T* at;
    int64_t stride;

    __device__ Vector<const T*, 2> next() {
      const T *first = at, *second = first + stride;
      at = second + 7 * stride;
      return {{first, second}};
    }
  };
  template <typename T>
  __device__ Pairs<T> pairs(const T* columns, int chunk, int first, int) const {
    return {columns + (chunk + first) * stride, stride};
  }
  __device__ void advance(int) {}
};

// The same in pages; a chunk is in one page, whose number is loaded one turn before its keys.
struct PagedCache {
  static constexpr bool kZeros = false;
  const QkvCall& call;
  const void *k, *v;
  const int* table;  // of the sequence
  const int end, columns, places;  // from a chunk to the block's next: pages, and slots of a page
  int chunk, column, place;  // of the next load
  int page_of_keys, place_of_keys, page_of_values, place_of_values;

  __device__ PagedCache(const QkvCall& call, const void* k, const void* v, int sequence, const Span& span, int begin)
      : call(call), k(k), v(v), table(call.block_table + sequence * call.block_table_row), end(span.end),
        columns(call.parts.each * kChunk / call.page_size),
        places(call.parts.each * kChunk - columns * call.page_size), chunk(begin), column(begin / call.page_size),
        place(begin - column * call.page_size) {
    ask();
    page_of_values = page_of_keys, place_of_values = place_of_keys;
    ask();
  }

  __device__ void ask() {
    page_of_keys = chunk < end ? table[column] : 0;
    place_of_keys = place;
    chunk += call.parts.each * kChunk, column += columns, place += places;
    if (place >= call.page_size) place -= call.page_size, ++column;
  }

  __device__ int64_t at(int page, int place) const {  // any valid page if there is no such
    return (page >= 0 && page < call.pages ? page : 0) * call.page_stride + place * call.cache_stride;
  }

  __device__ int64_t row(int key, int chunk, int turn) const {
    const int within = key - chunk;
    return turn == 0 ? at(page_of_values, place_of_values + within) : at(page_of_keys, place_of_keys + within);
  }

  template <typename T>
  __device__ Cache::Pairs<T> pairs(const T* columns, int, int first, int) const {
    return {columns + at(page_of_values, place_of_values + first), call.cache_stride};
  }

  __device__ void advance(int) {  // called when the keys of the next turn are loaded, and its values not yet
    page_of_values = page_of_keys, place_of_values = place_of_keys;
    ask();
  }
};

// Whether the sequence's pages that are seen are in range, and `slot`, which may be negative, has none of its keys.
__device__ inline bool pages_fit(const QkvCall& call, int sequence, const Span& span, int slot) {
  const int* table = call.block_table + sequence * call.block_table_row;
  const int wanted = slot < 0 ? -1 : slot / call.page_size, place = slot - wanted * call.page_size;
  bool wrong = false;
  for (int column = span.begin / call.page_size + threadIdx.x % kWarp; column * call.page_size < span.end;
       column += kWarp) {
    const int page = table[column], key = column * call.page_size + place;
    wrong |= page < 0 || page >= call.pages || (page == wanted && key >= span.begin && key < span.end);
  }
  return __ballot_sync(0xffffffffu, wrong) == 0;
}

// What a lane holds of a head: E / 64 adjacent elements of its first half and as many of its second. Sums of products
// are spelt out, so that a query has the same bits wherever it is prepared.
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

  __device__ void norm(const Part& weight, bool normed, float eps) {  // the sum is not inside a branch
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
__device__ inline const T* head_of(const QkvCall& call, int row, int head) {
  return static_cast<const T*>(call.qkv) + row * call.qkv_stride + static_cast<int64_t>(head) * E;
}

// A query row and its row of the tables, being loaded.
template <int E>
struct Request {
  Part<E> q, cos, sin;

  template <typename T>
  __device__ void begin(const QkvCall& call, const Query& query, int position) {
    const int64_t inside = position >= 0 && position < call.table_rows ? position : 0;
    q.load(head_of<T, E>(call, query.row, query.head));
    cos.load(call.cos + inside * E);
    sin.load(call.sin + inside * E);
  }

  template <typename T>
  __device__ void finish(const QkvCall& call, const Part<E>& weight) {
    q.norm(weight, call.q_weight != nullptr, call.eps);
    q.template rotate<T>(cos, sin);
  }
};

// A warp: the score of a query row with its own row's key, which is kept by the first of the row's.
template <typename T, int E, bool kPaged>
__device__ inline void take_own(const QkvCall& call, const Unit& unit, const Query& query, int held, const Span& span,
                                const Part<E>& q_weight) {
  const int kv_head = unit.kv_head;
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
  bool bad = held < 0 || held > call.capacity || position < 0 || position >= call.table_rows ||
             slot >= call.slots_in_cache;
  if constexpr (kPaged) bad |= !pages_fit(call, unit.sequence, span, slot);
  else bad |= slot >= 0 && slot < held;
  if (bad) {
    if (lane == 0) call.own[query.place] = NAN;
    return;
  }
  key.norm(weight, call.k_weight != nullptr, call.eps);
  key.template rotate<T>(request.cos, request.sin);
  if (slot >= 0 && query.head == kv_head * call.repeat) {
    const int page = kPaged ? slot / call.page_size : 0;
    const int64_t place = page * call.page_stride + (slot - page * call.page_size) * call.cache_stride +
                          static_cast<int64_t>(kv_head) * E;
    key.store(static_cast<T*>(call.k_cache) + place);
    value.store(static_cast<T*>(call.v_cache) + place);
  }
  request.template finish<T>(call, q_weight);
  const float score = request.q.dot(key) * call.scale;
  if (lane == 0) call.own[query.place] = score;
}

template <int E>
constexpr int kAhead = E <= 128 ? kQueries / kWarps : 2;  // loads of a warp that are in flight with its first keys

// A block's part of a unit's chunks.
template <typename T, int E, bool kPaged>
__device__ inline void take_cache(const QkvCall& call, const Unit& unit, int split, const Span& span,
                                  const Part<E>& q_weight, Request<E> (&requests)[kAhead<E>],
                                  Shared<QkvShape<E>>& shared) {
  const int warp = threadIdx.x / kWarp, begin = (span.begin / kChunk + split) * kChunk;
  const int64_t columns = static_cast<int64_t>(unit.kv_head) * E;
  std::conditional_t<kPaged, PagedCache, Cache> keys(call, static_cast<const T*>(call.k_cache) + columns,
                                                     static_cast<const T*>(call.v_cache) + columns, unit.sequence,
                                                     span, begin);
  const auto prepare = [&] {
#pragma unroll
    for (int i = 0; i < kQueries / kWarps; ++i) {
      const int query = warp + i * kWarps;
      if (query >= unit.count) break;
      Request<E>& request = requests[i % kAhead<E>];
      if (i >= kAhead<E>) {
        const Query late = unit.query(call, query);
        request.template begin<T>(call, late, call.positions[late.row]);
      }
      request.template finish<T>(call, q_weight);
      request.q.store(reinterpret_cast<T*>(shared.q[query]));
    }
  };
  const auto place = [&](int query) { return unit.query(call, query).place * call.parts.each + split; };
  take_chunks<T>(keys, span, begin, call.parts.each * kChunk, unit.count, call.scale, call.parts, shared, prepare, place);
}

// A warp: the output of a query row, of its own key and so many parts.
template <typename T, int E>
__device__ inline void merge(const QkvCall& call, int kv_head, const Query& query, int parts) {
  State<E / kWarp> state;
  const T* own = head_of<T, E>(call, query.row, call.heads + call.kv_heads + kv_head);
  state.add(call.own[query.place], reinterpret_cast<const Vector<T, E / kWarp>*>(own)[threadIdx.x % kWarp]);
  state.template merge<E <= 128 ? 16 : 8>(call.parts, query.place, parts);
  state.store(static_cast<T*>(call.out) + query.row * call.out_stride + static_cast<int64_t>(query.head) * E);
}

template <typename T, int E, bool kPaged>
__global__ void __launch_bounds__(kThreads, E <= 128 ? 3 : 2) branch_attention_qkv_kernel(QkvCall call) {
  __shared__ Shared<QkvShape<E>> shared;
  const int warp = threadIdx.x / kWarp, part = blockIdx.x / call.units, index = blockIdx.x - part * call.units;
  const Unit unit = find_unit<kPaged>(call, index);
  const int own_parts = divide_up(unit.count, kWarps), split = part - kOwnParts, own = part * kWarps + warp;
  Part<E> q_weight;
  Request<E> requests[kAhead<E>];
  q_weight.fill(1.0f);
  let_next_begin();
  wait_for_previous();
  const int held = call.held[unit.sequence];
  if (call.q_weight != nullptr) q_weight.load(static_cast<const T*>(call.q_weight));
  int position[kAhead<E>];
  if (split >= 0) {
#pragma unroll
    for (int i = 0; i < kAhead<E>; ++i)
      position[i] = call.positions[unit.query(call, min(warp + i * kWarps, unit.count - 1)).row];
  }
  const Span span = seen_keys(call, held);
  const int chunks = span.begin < span.end ? (span.end - 1) / kChunk - span.begin / kChunk + 1 : 0;
  const int splits = min(chunks, call.parts.each);
  if (split >= 0 ? split >= splits : part >= own_parts) return;  // most blocks of a short sequence
  if (split >= 0) {
#pragma unroll
    for (int i = 0; i < kAhead<E>; ++i) {  // they need only positions, so they are prepared before keys and values
      const int query = warp + i * kWarps;
      if (query < unit.count) requests[i].template begin<T>(call, unit.query(call, query), position[i]);
    }
    take_cache<T, E, kPaged>(call, unit, split, span, q_weight, requests, shared);
  } else if (own < unit.count) {
    take_own<T, E, kPaged>(call, unit, unit.query(call, own), held, span, q_weight);
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = arrives_last(counter_at(call.counters, index), own_parts + splits);
  __syncthreads();
  if (!shared.is_last) return;
#pragma unroll 1
  for (int i = warp; i < unit.count; i += kWarps) merge<T, E>(call, unit.kv_head, unit.query(call, i), splits);
}

template <typename T, int E>
int run(const QkvCall& call, Stream stream) {
  const bool paged = call.block_table != nullptr;
  const auto kernel = paged ? branch_attention_qkv_kernel<T, E, true> : branch_attention_qkv_kernel<T, E, false>;
  return launch(kernel, call.units * (kOwnParts + call.parts.each), kThreads, 0, stream, call);
}

// --- branch_attention: any groups of branches, made for branches of one row ------------------------------------------

template <int E>
using BranchShape = Shape<E, E == 64 ? 4 : 8, E == 256 ? 1 : 2>;
constexpr int64_t kMostFloats = 1 << 28;  // of partial results
constexpr int kMostRepeat = 128;            // as many rows and a tile's are within what inverse_of is exact for
constexpr int kMostParts = 16;              // over a slice: the last block reads so many at once
constexpr int kSpread = 128;  // blocks over the chunks of a group's key heads, about one a multiprocessor on any chip

struct BranchCall {
  const void *q, *k, *v, *prefix_k, *prefix_v;  // k and v are null, or not
  const void *cu_branch, *cu_group, *prefix_start, *prefix_len, *block_table;  // the last is null for one page
  void* out;   // [rows, heads, E]
  float* lse;  // [heads, rows]
  Parts parts;
  int splits;  // parts over the slice, of which a row has one more for its own branch
  int* sound;  // [units]: whether the offsets are
  Counters counters;
  int64_t q_row, q_head, own_row, own_head, page, slot, prefix_head;  // strides
  int64_t table_row;
  int rows, heads, kv_heads, repeat, inverse, branches, groups, units, pages, page_size, table_width;
  bool wide;  // indices have 64 bits
  float scale;

  __device__ int64_t index(const void* indices, int64_t place) const {
    return wide ? static_cast<const int64_t*>(indices)[place] : static_cast<const int*>(indices)[place];
  }

  // First row of a group, or the end of the last one; some row if offsets are not valid.
  __device__ int first_row(int group) const {
    const int64_t branch = index(cu_group, group), inside = min(max(branch, int64_t{0}), int64_t{branches});
    const int64_t row = index(cu_branch, inside);
    return static_cast<int>(min(max(row, int64_t{0}), int64_t{rows}));
  }

  // First row of the branch that has this row.
  __device__ int first_of_branch(int row) const {
    if (row <= branches && index(cu_branch, row) == row) return row;
    int low = 0, high = branches;  // it lies in branch low or between the two
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (index(cu_branch, middle) <= row ? low : high) = middle;
    }
    return static_cast<int>(index(cu_branch, low));
  }
};

// Whether offsets rise from 0 to `last`; the first ones that a thread checks are loaded early.
template <int kThreads>
struct Rising {
  const BranchCall& call;
  const void* offsets;
  const int count, last;
  int64_t one, next;

  __device__ Rising(const BranchCall& call, const void* offsets, int count, int last)
      : call(call), offsets(offsets), count(count), last(last) {
    ask(threadIdx.x);
  }

  __device__ void ask(int i) {
    one = call.index(offsets, min(i, count));
    next = call.index(offsets, min(i + 1, count));
  }

  __device__ bool wrong() {  // as far as this thread sees
    bool found = count < 1;
    for (int i = threadIdx.x; i <= count; i += kThreads) {
      if (i >= kThreads) ask(i);
      found |= one > next || (i == 0 && one != 0) || (i == count && one != last);
    }
    return found;
  }
};

// Packed query rows of a group: so many, of which the first is number `first` from the first of a row.
struct Tile {
  int group, row, first, count;
};

__device__ inline Tile tile_at(const BranchCall& call, int group, int row, int packed, int count) {
  const int rows = packed / call.repeat;
  return {group, row + rows, packed - rows * call.repeat, count};
}

// Each group has as many tiles as its rows may need when the rows before it are packed without a gap: group g's begin
// at tile (its first packed row) / kQueries + g, and tiles after its last rows may be empty.
template <int kQueries>
__device__ inline Tile find_tile(const BranchCall& call, int tile) {
  if (call.groups <= 1) {
    const int first = tile * kQueries, count = min(kQueries, call.rows * call.repeat - first);
    return tile_at(call, 0, 0, first, call.groups == 1 ? count : 0);
  }
  const int lane = threadIdx.x % kWarp;
  const auto begin = [&](int group) { return call.first_row(group) * call.repeat / kQueries + group; };
  int low = 0, high = call.groups;  // the tile's group lies from low on below high
  while (high - low > 1) {
    const int step = divide_up(high - low, kWarp), group = low + lane * step;
    const bool reached = group < high && begin(group) <= tile;
    low += max(__popc(__ballot_sync(0xffffffffu, reached)) - 1, 0) * step;
    high = min(high, low + step);
  }
  const int row = call.first_row(low), packed = (call.first_row(low + 1) - row) * call.repeat;
  const int first = (tile - begin(low)) * kQueries;
  return tile_at(call, low, row, first, first < 0 ? 0 : min(kQueries, packed - first));
}

struct Slice {
  int start, length;
  bool fits;  // if not, it counts as empty, and its rows are NaN
};

__device__ inline Slice find_slice(const BranchCall& call, int group) {
  const int64_t start = call.index(call.prefix_start, group), length = call.index(call.prefix_len, group);
  const int64_t capacity = call.pages > 0 ? static_cast<int64_t>(call.page_size) * call.table_width : 0;
  const bool fits = start >= 0 && length >= 0 && (length == 0 || (start <= capacity && length <= capacity - start));
  if (!fits || length == 0) return {0, 0, fits};
  return {static_cast<int>(start), static_cast<int>(length), true};
}

static __device__ const uint4 zeros[32] = {};  // a head

// Keys of a key head in a slice. The addresses of a chunk's keys are looked up two turns ahead, one key per thread:
// half of the threads do the chunks of even turns. Values after the last are read from `zeros`.
template <typename Shape>
struct SliceKeys {
  static constexpr bool kZeros = true;
  static constexpr int kChunk = Shape::kChunk;
  static_assert(Shape::kThreads == 2 * kChunk);
  const BranchCall& call;
  const void *k, *v;
  int64_t (&slots)[2][kChunk];
  const int group, start, end, stride;
  const int64_t after;
  int key, page, slot;  // that this thread looks up next
  bool wrong = false;

  template <typename T>
  __device__ SliceKeys(const BranchCall& call, const T* k, const T* v, int64_t (&slots)[2][kChunk], int group,
                       const Slice& slice, int begin, int stride)
      : call(call), k(k), v(v), slots(slots), group(group), start(slice.start), end(slice.length), stride(stride),
        after((reinterpret_cast<intptr_t>(zeros) - reinterpret_cast<intptr_t>(v)) / static_cast<int>(sizeof(T))) {
    key = begin + static_cast<int>(threadIdx.x) / kChunk * stride + threadIdx.x % kChunk;
    ask();
    answer();
    __syncthreads();
  }

  __device__ void ask() {
    page = 0, slot = start + key;
    if (key >= end || call.block_table == nullptr) return;
    const int column = static_cast<unsigned>(slot) / call.page_size;
    const int64_t found = call.index(call.block_table, group * call.table_row + column);
    page = found >= 0 && found < call.pages ? static_cast<int>(found) : -1;
    slot -= column * call.page_size;
  }

  __device__ void answer() {
    wrong |= page < 0;
    const int64_t at = key < end ? max(page, 0) * call.page + slot * call.slot : after;
    slots[threadIdx.x / kChunk][threadIdx.x % kChunk] = at;
    key += 2 * stride;
    ask();
  }

  __device__ void advance(int turn) {  // this turn's addresses are no longer needed
    if (static_cast<int>(threadIdx.x) / kChunk == turn % 2) answer();
  }

  __device__ int64_t row(int key, int chunk, int turn) const { return slots[turn % 2][key - chunk]; }

  template <typename T>
  struct Pairs {
    const T* columns;
    const int64_t* slots;

    __device__ Vector<const T*, 2> next() {
      const auto two = *reinterpret_cast<const Vector<int64_t, 2>*>(slots);
      slots += 8;
      return {{columns + two.x[0], columns + two.x[1]}};
    }
  };
  template <typename T>
  __device__ Pairs<T> pairs(const T* columns, int, int first, int turn) const {
    return {columns, &slots[turn % 2][first]};
  }
};

// A warp: a query row's attention to its own branch, up to its own key. What a branch of one row needs is loaded early.
template <typename T, int E>
struct OwnKeys {
  using Columns = Vector<T, E / kWarp>;
  const BranchCall& call;
  const int64_t columns;  // of the key head
  int row;
  int64_t begin;
  Columns query, key, value;

  __device__ void ask(const Query& of) {
    row = of.row;
    begin = call.index(call.cu_branch, min(row, call.branches));
    const T* at = static_cast<const T*>(call.q) + row * call.q_row + of.head * call.q_head;
    query = reinterpret_cast<const Columns*>(at)[threadIdx.x % kWarp];
    ask_key(row);
  }

  __device__ void ask_key(int at) {
    const int lane = threadIdx.x % kWarp;
    key = reinterpret_cast<const Columns*>(static_cast<const T*>(call.k) + at * call.own_row + columns)[lane];
    value = reinterpret_cast<const Columns*>(static_cast<const T*>(call.v) + at * call.own_row + columns)[lane];
  }

  __device__ void add_key(State<E / kWarp>& state) const {
    float score = 0.0f;
#pragma unroll
    for (int j = 0; j < E / kWarp; ++j) score = fmaf(to_float(query.x[j]), to_float(key.x[j]), score);
    state.add(sum_over_warp(score) * call.scale, value);
  }

  __device__ void leave(int64_t part) {
    State<E / kWarp> state;
    add_key(state);
    if (begin != row) {
#pragma unroll 1
      for (int at = call.first_of_branch(row); at < row; ++at) {
        ask_key(at);
        add_key(state);
      }
    }
    state.leave(call.parts, part);
  }
};

template <typename T, int E>
__global__ void __launch_bounds__(BranchShape<E>::kThreads, 1) branch_attention_kernel(BranchCall call) {
  using Shape = BranchShape<E>;
  constexpr int kQueries = Shape::kQueries, kRow = E / 8, kPieces = kQueries * kRow / Shape::kThreads;
  __shared__ Shared<Shape> shared;
  alignas(16) __shared__ int64_t slots[2][Shape::kChunk];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int split = blockIdx.x / call.units, unit = blockIdx.x - split * call.units;
  const int tile = unit / call.kv_heads, kv_head = unit - tile * call.kv_heads;
  let_next_begin();
  wait_for_previous();
  const Tile mine = find_tile<kQueries>(call, tile);
  const auto query_of = [&](int index) { return Query(call, kv_head, mine.first + index, mine.row); };

  // Everything else is loaded before keys and values. A row's own branch is one more part; the warps of all blocks take
  // turns with these.
  const bool filled = mine.count > 0;
  const Slice slice = filled ? find_slice(call, mine.group) : Slice{0, 0, true};
  OwnKeys<T, E> own{call, kv_head * call.own_head};
  int turn = split * Shape::kWarps + warp;
  const auto ask_own = [&] {
    if (call.k != nullptr && turn < mine.count) own.ask(query_of(turn));
  };
  ask_own();
  Rising<Shape::kThreads> branches(call, call.cu_branch, call.branches, call.rows);
  Rising<Shape::kThreads> groups(call, call.cu_group, call.groups, call.branches);
  uint4 pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    pieces[i] = {};
    const int piece = i * Shape::kThreads + threadIdx.x;
    const Query query = query_of(min(piece / kRow, mine.count - 1));
    const T* at = static_cast<const T*>(call.q) + query.row * call.q_row + query.head * call.q_head;
    if (filled) pieces[i] = reinterpret_cast<const uint4*>(at)[piece % kRow];
  }
  const int parts = min(max((slice.length + Shape::kChunk - 1) / Shape::kChunk, 1), call.splits);
  if (split >= parts) return;

  const int64_t columns = kv_head * call.prefix_head;
  const int begin = split * Shape::kChunk, stride = parts * Shape::kChunk;
  SliceKeys<Shape> keys(call, static_cast<const T*>(call.prefix_k) + columns,
                        static_cast<const T*>(call.prefix_v) + columns, slots, mine.group, slice, begin, stride);
  bool unsound = false;
  const auto prepare = [&] {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = i * Shape::kThreads + threadIdx.x;
      shared.q[piece / kRow][piece % kRow] = pieces[i];
    }
    for (; call.k != nullptr && turn < mine.count; turn += parts * Shape::kWarps, ask_own())
      own.leave(query_of(turn).place * call.parts.each + parts);
    if (split == 0) unsound = branches.wrong() | groups.wrong();
  };
  const auto part = [&](int index) { return query_of(index).place * call.parts.each + split; };
  take_chunks<T>(keys, Span{0, slice.length}, begin, stride, mine.count, call.scale, call.parts, shared, prepare, part);
  if (__syncthreads_count(keys.wrong) > 0 && static_cast<int>(threadIdx.x) < mine.count)
    call.parts.states[part(threadIdx.x) * 2 + 1] = NAN;
  if (split == 0) {
    const bool sound = __syncthreads_count(unsound) == 0;
    if (threadIdx.x == 0) call.sound[unit] = sound;
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = arrives_last(counter_at(call.counters, unit), parts);
  __syncthreads();
  if (!shared.is_last) return;

  const bool sound = call.sound[unit];
  const int flat = tile * kQueries;  // if offsets are not valid, tiles cover all rows
  const Tile rows = sound ? mine : tile_at(call, 0, 0, flat, min(kQueries, call.rows * call.repeat - flat));
#pragma unroll 1
  for (int i = warp; i < rows.count; i += Shape::kWarps) {
    const Query query(call, kv_head, rows.first + i, rows.row);
    State<E / kWarp> state;
    if (sound)
      state.template merge<E <= 128 ? kMostParts + 1 : 9>(call.parts, query.place, parts + (call.k != nullptr));
    if (!sound || !slice.fits) state.spoil();
    state.store(static_cast<T*>(call.out) + query.place * E);
    const float lse = state.mass == 0.0f ? -INFINITY : (state.top + log2f(state.mass)) / kLog2E;
    if (lane == 0) call.lse[static_cast<int64_t>(query.head) * call.rows + query.row] = lse;
  }
}

// How a call is launched: by head size, the most parts of a tile, and tiles times key heads.
struct Grid {
  int64_t splits, units;

  template <int E>
  static Grid of(int rows, int heads, int kv_heads, int groups, int64_t most_keys) {
    using Shape = BranchShape<E>;
    const int64_t chunks = (most_keys + Shape::kChunk - 1) / Shape::kChunk, packed = int64_t{rows} * (heads / kv_heads);
    const int64_t most = std::max(1, std::min(kSpread / kv_heads, kMostParts));
    return {std::clamp<int64_t>(chunks, 1, most),
            ((packed - 1) / Shape::kQueries + std::max(groups, 1)) * kv_heads};
  }

  static Grid of(int head_dim, int rows, int heads, int kv_heads, int groups, int64_t most_keys) {
    if (head_dim == 64) return of<64>(rows, heads, kv_heads, groups, most_keys);
    if (head_dim == 128) return of<128>(rows, heads, kv_heads, groups, most_keys);
    return of<256>(rows, heads, kv_heads, groups, most_keys);
  }
};

template <typename T, int E>
int run(const BranchCall& call, Stream stream) {
  return launch(branch_attention_kernel<T, E>, call.units * call.splits, BranchShape<E>::kThreads, 0, stream, call);
}

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

bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

}  // namespace fb::branch_attention

// Floats in `partials`, or kNotTaken, for so many rows after each of so many sequences, with at most so many keys.
extern "C" int64_t fb_branch_attention_qkv_workspace(int sequences, int rows, int heads, int head_dim,
                                                     int64_t capacity) {
  using namespace fb::branch_attention;
  if (rows > kMaxRows) return fb::kNotTaken;
  const int64_t splits = std::min<int64_t>((capacity + kChunk - 1) / kChunk, kMostSplits);
  const int64_t floats = int64_t{sequences} * rows * heads * (splits * (head_dim + 2) + 2);
  return floats > kMostFloats ? fb::kNotTaken : floats;
}

// Caches are paged if there is a block table, else flat with page_size slots.
extern "C" int fb_branch_attention_qkv(const void* qkv, int64_t qkv_stride, const void* q_weight, const void* k_weight,
                                       const float* cos, const float* sin, int64_t table_rows, const int* positions,
                                       void* k_cache, void* v_cache, int64_t page_stride, int64_t cache_stride,
                                       int64_t pages, int64_t page_size, const int* held, const int* block_table,
                                       int64_t block_table_row, int64_t table_width, const int* slots, void* out,
                                       int64_t out_stride, float* partials, int sequences, int rows, int heads,
                                       int kv_heads, int head_dim, int window, float eps, float scale, int dtype,
                                       void* stream) {
  using namespace fb::branch_attention;
  const int64_t slots_in_cache = pages * page_size;
  const int64_t capacity = block_table == nullptr ? page_size : pages > 0 ? table_width * page_size : 0;
  if (sequences < 1 || rows < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0 ||
      heads / kv_heads > kMaxRepeat || window < 0 || table_rows < 1 || slots_in_cache > INT_MAX - kChunk ||
      capacity > INT_MAX / 2 || (block_table != nullptr && (page_size < 1 || page_size % kChunk != 0)) ||
      qkv_stride % 8 != 0 || page_stride % 8 != 0 || cache_stride % 8 != 0 || out_stride % 8 != 0 ||
      fb_branch_attention_qkv_workspace(sequences, rows, heads, head_dim, capacity) < 0)
    return fb::kNotTaken;
  for (const void* address : {qkv, q_weight, k_weight, static_cast<const void*>(cos), static_cast<const void*>(sin),
                              static_cast<const void*>(k_cache), static_cast<const void*>(v_cache),
                              static_cast<const void*>(out), static_cast<const void*>(partials)})
    if (!aligned(address)) return fb::kNotTaken;
  QkvCall call{};
  call.qkv = qkv, call.q_weight = q_weight, call.k_weight = k_weight, call.cos = cos, call.sin = sin;
  call.positions = positions, call.held = held, call.slots = slots, call.block_table = block_table;
  call.k_cache = k_cache, call.v_cache = v_cache, call.out = out;
  call.qkv_stride = qkv_stride, call.table_rows = table_rows, call.block_table_row = block_table_row;
  call.page_stride = page_stride, call.cache_stride = cache_stride, call.out_stride = out_stride;
  call.rows = rows, call.heads = heads, call.kv_heads = kv_heads, call.repeat = heads / kv_heads;
  call.inverse = inverse_of(call.repeat);
  call.pages = static_cast<int>(pages), call.page_size = static_cast<int>(page_size);
  call.capacity = static_cast<int>(capacity), call.slots_in_cache = static_cast<int>(slots_in_cache);
  call.tiles = fb::divide_up(rows * call.repeat, kQueries);
  call.units = sequences * call.tiles * kv_heads;
  call.window = window, call.eps = eps, call.scale = scale * kLog2E;
  fb::Chip chip;
  if (const int error = fb::current_chip(&chip)) return error;
  const int chunks = fb::divide_up(capacity, kChunk), most = std::min(chunks, kMostSplits);
  // the same whatever the rows and the other sequences
  call.parts.each = std::min(most, std::max(1, kBlocks * chip.multiprocessors / kv_heads));
  const int64_t places = int64_t{sequences} * rows * heads * call.parts.each;
  call.parts.sums = partials, call.parts.states = partials + places * head_dim;
  call.own = call.parts.states + places * 2;
  const auto on = static_cast<fb::Stream>(stream);
  auto* counters = reinterpret_cast<unsigned*>(call.own + int64_t{sequences} * rows * heads);
  if (const int error = fb::counters_for(call.units, counters, on, &call.counters)) return error;
  return run(call, head_dim, dtype, on);
}

// Floats in `workspace`, or kNotTaken, for so many rows; slices longer than most_keys are right, but take longer.
extern "C" int64_t fb_branch_attention_workspace(int rows, int heads, int kv_heads, int head_dim, int groups,
                                                 int64_t most_keys) {
  using namespace fb::branch_attention;
  if (rows < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0 ||
      heads / kv_heads > kMostRepeat)
    return fb::kNotTaken;
  const Grid grid = Grid::of(head_dim, rows, heads, kv_heads, groups, most_keys);
  const int64_t floats = int64_t{rows} * heads * (grid.splits + 1) * (head_dim + 2) + 2 * grid.units;
  return floats > kMostFloats || grid.units * grid.splits > INT_MAX ? fb::kNotTaken : floats;
}

extern "C" int fb_branch_attention(const void* q, int64_t q_row, int64_t q_head, const void* k, const void* v,
                                   int64_t own_row, int64_t own_head, const void* prefix_k, const void* prefix_v,
                                   int64_t page_stride, int64_t slot_stride, int64_t prefix_head, int pages,
                                   int page_size, const void* cu_branch, const void* cu_group, const void* prefix_start,
                                   const void* prefix_len, const void* block_table, int64_t table_row,
                                   int table_width, int branches, int groups, int wide, void* out, float* lse,
                                   float* workspace, int64_t most_keys, int rows, int heads, int kv_heads,
                                   int head_dim, float scale, int dtype, void* stream) {
  using namespace fb::branch_attention;
  if (fb_branch_attention_workspace(rows, heads, kv_heads, head_dim, groups, most_keys) < 0) return fb::kNotTaken;
  for (const int64_t stride : {q_row, q_head, own_row, own_head, page_stride, slot_stride, prefix_head})
    if (stride % 8 != 0) return fb::kNotTaken;
  for (const void* address : {q, k, v, prefix_k, prefix_v, static_cast<const void*>(out),
                              static_cast<const void*>(workspace)})
    if (!aligned(address)) return fb::kNotTaken;
  BranchCall call{};
  call.q = q, call.k = k, call.v = v, call.prefix_k = prefix_k, call.prefix_v = prefix_v, call.out = out, call.lse = lse;
  call.cu_branch = cu_branch, call.cu_group = cu_group;
  call.prefix_start = prefix_start, call.prefix_len = prefix_len, call.block_table = block_table;
  call.q_row = q_row, call.q_head = q_head, call.own_row = own_row, call.own_head = own_head;
  call.page = page_stride, call.slot = slot_stride, call.prefix_head = prefix_head;
  call.rows = rows, call.heads = heads, call.kv_heads = kv_heads, call.repeat = heads / kv_heads;
  call.inverse = inverse_of(call.repeat);
  call.branches = branches, call.groups = groups, call.wide = wide != 0, call.scale = scale * kLog2E;
  call.pages = page_size > 0 ? pages : 0, call.page_size = std::max(page_size, 1), call.table_width = table_width;
  call.table_row = table_row;
  const Grid grid = Grid::of(head_dim, rows, heads, kv_heads, groups, most_keys);
  const int64_t parts = int64_t{rows} * heads * (grid.splits + 1);
  call.splits = static_cast<int>(grid.splits);
  call.parts = {workspace, workspace + parts * head_dim, call.splits + 1};
  call.units = static_cast<int>(grid.units);
  call.sound = reinterpret_cast<int*>(call.parts.states + parts * 2);
  auto* counters = reinterpret_cast<unsigned*>(call.sound + grid.units);
  const auto on = static_cast<fb::Stream>(stream);
  if (const int error = fb::counters_for(call.units, counters, on, &call.counters)) return error;
  return run(call, head_dim, dtype, on);
}
