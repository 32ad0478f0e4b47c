// branch_attention_qkv: one decode step of attention, from projected rows to the output of the heads. Each row is a
// branch of one token after its sequence. A unit's first parts norm and rotate the rows' own keys, write them to the
// cache and score them; its other parts attend to the cache.
#include <algorithm>
#include <climits>
#include <type_traits>

#include "attention.cuh"

namespace fb::branch_attention {

constexpr int kWarps = 4;
template <int E>
using QkvShape = Shape<E, kWarps, 1>;
constexpr int kChunk = QkvShape<64>::kChunk, kThreads = QkvShape<64>::kThreads, kQueries = QkvShape<64>::kQueries;
constexpr int kOwnParts = kQueries / kWarps;  // parts for own keys: a warp takes one query row
constexpr int kMostSplits = 64;               // most parts over the cache
constexpr int kBlocks = 2;                    // blocks to a multiprocessor, for 16 query rows
constexpr int kMaxRows = 32;
constexpr int kMaxRepeat = 16;

struct QkvCall {
  // qkv [sequences * rows, (heads + 2 kv_heads) E]; weights [E] or null; cos, sin [table_rows, E]
  const void *qkv, *q_weight, *k_weight;
  const float *cos, *sin;
  const int *positions, *held, *slots;  // [sequences * rows], [sequences], [sequences * rows] or null
  void *k_cache, *v_cache, *out;        // caches [pages, page_size, kv_heads, E]; out [sequences * rows, heads, E]
  Parts parts;
  float* own;         // [rows, heads]: score of the row's own key; NaN where the row's arguments are bad
  Counters counters;  // one per unit
  const int* block_table;  // [sequences, n]
  int64_t qkv_stride, table_rows, page_stride, cache_stride, out_stride, block_table_row;
  int rows, heads, kv_heads, repeat, inverse, units, window;  // `rows` of each sequence
  int tiles;             // tiles of a sequence's packed query rows
  int capacity;          // most keys of a sequence
  int pages, page_size;  // a page holds whole chunks
  int slots_in_cache;
  float eps, scale;  // scale includes log2(e): p = 2^score
};

__device__ inline Span seen_keys(const QkvCall& call, int held) {  // none if `held` is invalid
  if (held < 0 || held > call.capacity) return {0, 0};
  return {call.window > 0 ? max(0, held - call.window + 1) : 0, held};
}

// A tile of `count` packed query rows of a sequence, and a key head.
struct Unit {
  int sequence, row, kv_head, first, count;  // row: the sequence's first; first: the tile's first packed row

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

// Keys of a key head in pages. A chunk lies in one page, whose number is loaded one turn before the chunk's keys.
struct PagedCache {
  static constexpr bool kZeros = false;
  const QkvCall& call;
  const void *k, *v;
  const int* table;  // of the sequence
  const int end, columns, places;  // columns, places: pages and slots from a chunk of the block to its next one
  int chunk, column, place;        // of the next load
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

  __device__ int64_t at(int page, int place) const {  // page 0 for a bad number: take_own then makes the row NaN
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

// A lane's share of a head: E / 64 adjacent elements of the first half and as many of the second, the partners of the
// rotation. Products and sums are written as fmaf, so that a query has the same bits in every block that prepares it.
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

// A query row and its row of the rotary tables: `begin` loads them, `finish` norms and rotates the query.
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

// A warp: the score of a query row with its own row's key. The row's first query head also writes key and value to the
// cache. Bad arguments make the score NaN, and with it the row's output.
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
constexpr int kAhead = E <= 128 ? kQueries / kWarps : 2;  // query rows that a warp loads along with its first keys

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

// A warp: the output of a query row, from its own key and parts 0 to parts - 1 of the cache.
template <typename T, int E>
__device__ inline void merge(const QkvCall& call, int kv_head, const Query& query, int parts) {
  State<E / kWarp> state;
  const T* own = head_of<T, E>(call, query.row, call.heads + call.kv_heads + kv_head);
  state.add(call.own[query.place], reinterpret_cast<const Vector<T, E / kWarp>*>(own)[threadIdx.x % kWarp]);
  state.template merge<E <= 128 ? 16 : 8>(call.parts, query.place, parts);
  state.store(static_cast<T*>(call.out) + query.row * call.out_stride + static_cast<int64_t>(query.head) * E);
}

// q, k = rope(norm(.)) of qkv's heads; out = softmax(scale q . [cached keys, own key]) [cached values, own value].
// Grid: units * (kOwnParts + parts.each) blocks of kThreads threads; block / units is the part. A unit is a sequence, a
//   tile of its packed query rows and a key head.
// A block owns kWarps query rows' own keys (the first kOwnParts parts), or every n-th chunk of the cache for the unit's
//   query rows (the other parts). A unit's last block merges its parts and writes out.
// Loop: over chunks of kChunk keys, in take_chunks.
// Memory: as take_chunks. Registers also: q_weight, and the kAhead query rows that are being prepared.
// Layout: as in QkvCall; qkv, caches, block_table and out by the strides there, adjacent columns and heads.
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
  if (split >= 0 ? split >= splits : part >= own_parts) return;  // the grid is sized for the longest sequence
  if (split >= 0) {
#pragma unroll
    for (int i = 0; i < kAhead<E>; ++i) {  // queries need only positions, so their loads begin before those of keys
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

// Floats that `partials` must hold for `rows` rows of each sequence and `capacity` keys; or kNotTaken.
static int64_t floats_for(int sequences, int rows, int heads, int head_dim, int64_t capacity) {
  if (rows > kMaxRows) return kNotTaken;
  const int64_t splits = std::min<int64_t>((capacity + kChunk - 1) / kChunk, kMostSplits);
  const int64_t floats = int64_t{sequences} * rows * heads * (splits * (head_dim + 2) + 2);
  return floats > kMostFloats ? kNotTaken : floats;
}

}  // namespace fb::branch_attention

FB_FUNCTION(fb_branch_attention_qkv_workspace, int sequences, rows, heads, head_dim; int64_t capacity;) {
  return fb::branch_attention::floats_for(given.sequences, given.rows, given.heads, given.head_dim, given.capacity);
}

// Caches are paged if there is a block table, else flat with page_size slots.
FB_FUNCTION(fb_branch_attention_qkv,
            const void* qkv; int64_t qkv_stride; const void *q_weight, *k_weight;
            const float *cos, *sin; int64_t table_rows; const int* positions;
            void *k_cache, *v_cache; int64_t page_stride, cache_stride, pages, page_size;
            const int *held, *block_table; int64_t block_table_row, table_width; const int* slots;
            void* out; int64_t out_stride; float* partials;
            int sequences, rows, heads, kv_heads, head_dim, window; double eps, scale; int dtype; void* stream;) {
  using namespace fb::branch_attention;
  const int rows = given.rows, heads = given.heads, kv_heads = given.kv_heads, head_dim = given.head_dim;
  const bool paged = given.block_table != nullptr;
  const int64_t page_size = given.page_size, slots_in_cache = given.pages * page_size;
  const int64_t capacity = !paged ? page_size : given.pages > 0 ? given.table_width * page_size : 0;
  if (given.sequences < 1 || rows < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0 ||
      heads / kv_heads > kMaxRepeat || given.window < 0 || given.table_rows < 1 || slots_in_cache > INT_MAX - kChunk ||
      capacity > INT_MAX / 2 || (paged && (page_size < 1 || page_size % kChunk != 0)) || given.qkv_stride % 8 != 0 ||
      given.page_stride % 8 != 0 || given.cache_stride % 8 != 0 || given.out_stride % 8 != 0 ||
      floats_for(given.sequences, rows, heads, head_dim, capacity) < 0)
    return fb::kNotTaken;
  for (const void* address :
       {given.qkv, given.q_weight, given.k_weight, static_cast<const void*>(given.cos),
        static_cast<const void*>(given.sin), static_cast<const void*>(given.k_cache),
        static_cast<const void*>(given.v_cache), static_cast<const void*>(given.out),
        static_cast<const void*>(given.partials)})
    if (!fb::is_aligned(address)) return fb::kNotTaken;
  QkvCall call{};
  call.qkv = given.qkv, call.q_weight = given.q_weight, call.k_weight = given.k_weight;
  call.cos = given.cos, call.sin = given.sin, call.positions = given.positions, call.held = given.held;
  call.slots = given.slots, call.block_table = given.block_table;
  call.k_cache = given.k_cache, call.v_cache = given.v_cache, call.out = given.out;
  call.qkv_stride = given.qkv_stride, call.table_rows = given.table_rows;
  call.block_table_row = given.block_table_row, call.page_stride = given.page_stride;
  call.cache_stride = given.cache_stride, call.out_stride = given.out_stride;
  call.rows = rows, call.heads = heads, call.kv_heads = kv_heads, call.repeat = heads / kv_heads;
  call.inverse = inverse_of(call.repeat);
  call.pages = static_cast<int>(given.pages), call.page_size = static_cast<int>(page_size);
  call.capacity = static_cast<int>(capacity), call.slots_in_cache = static_cast<int>(slots_in_cache);
  call.tiles = fb::divide_up(rows * call.repeat, kQueries);
  call.units = given.sequences * call.tiles * kv_heads;
  call.window = given.window, call.eps = static_cast<float>(given.eps);
  call.scale = static_cast<float>(given.scale) * kLog2E;
  fb::Chip chip;
  if (const int error = fb::current_chip(&chip)) return error;
  const int chunks = fb::divide_up(capacity, kChunk), most = std::min(chunks, kMostSplits);
  // independent of rows and sequences, so that a row's bits are too
  call.parts.each = std::min(most, std::max(1, kBlocks * chip.multiprocessors / kv_heads));
  const int64_t all = int64_t{given.sequences} * rows * heads, places = all * call.parts.each;
  call.parts.sums = given.partials, call.parts.states = given.partials + places * head_dim;
  call.own = call.parts.states + places * 2;
  const auto on = static_cast<fb::Stream>(given.stream);
  auto* counters = reinterpret_cast<unsigned*>(call.own + all);
  if (const int error = fb::counters_for(call.units, counters, on, &call.counters)) return error;
  return run(call, head_dim, given.dtype, on);
}
