// branch_attention: any groups of branches, each after its slice of a prefix; made for branches of one row.
#include <algorithm>
#include <climits>

#include "attention.cuh"

namespace fb::branch_attention {

template <int E>
using BranchShape = Shape<E, E == 64 ? 4 : 8, E == 256 ? 1 : 2>;
constexpr int kMostRepeat = 128;  // inverse_of is exact for the rows of a tile up to here
constexpr int kMostParts = 16;    // of a slice: the last block loads them all at once
constexpr int kSpread = 128;      // blocks for a group's slice over all key heads: about one a multiprocessor

struct BranchCall {
  // q [rows, heads, E]; k, v [rows, kv_heads, E], both null or neither; prefix [pages, page_size, kv_heads, E]
  const void *q, *k, *v, *prefix_k, *prefix_v;
  // [branches + 1], [groups + 1], [groups], [groups], [groups, table_width]; no block_table: one page holds all keys
  const void *cu_branch, *cu_group, *prefix_start, *prefix_len, *block_table;
  void* out;   // [rows, heads, E]
  float* lse;  // [heads, rows]
  Parts parts;
  int splits;  // most parts of a slice; a row has one part more, for its own branch
  int* sound;  // [units]: whether the offsets are valid
  Counters counters;
  int64_t q_row, q_head, own_row, own_head, page, slot, prefix_head;  // strides
  int64_t table_row;
  int rows, heads, kv_heads, repeat, inverse, branches, groups, units, pages, page_size, table_width;
  bool wide;  // indices are int64, else int32
  float scale;

  __device__ int64_t index(const void* indices, int64_t place) const {
    return wide ? static_cast<const int64_t*>(indices)[place] : static_cast<const int*>(indices)[place];
  }

  // First row of a group, or the end of the last one; clamped, so that invalid offsets stay in range.
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

  __device__ bool wrong() {  // among the offsets of this thread
    bool found = count < 1;
    for (int i = threadIdx.x; i <= count; i += kThreads) {
      if (i >= kThreads) ask(i);
      found |= one > next || (i == 0 && one != 0) || (i == count && one != last);
    }
    return found;
  }
};

// `count` packed query rows of a group. The first one is packed row `first`, counted from that of row `row`.
struct Tile {
  int group, row, first, count;
};

__device__ inline Tile tile_at(const BranchCall& call, int group, int row, int packed, int count) {
  const int rows = packed / call.repeat;
  return {group, row + rows, packed - rows * call.repeat, count};
}

// The tiles of group g begin at tile (g's first packed row) / kQueries + g. So every group has room for its rows, the
// number of tiles needs no sum over groups, and a group's last tile may be empty.
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

// Keys of a key head in a slice. The addresses of a chunk's keys are looked up two turns ahead, one key to a thread:
// one half of the threads looks up the chunks of even turns, the other those of odd turns. Keys after the slice's end
// have the address of `zeros`.
template <typename Shape>
struct SliceKeys {
  static constexpr bool kZeros = true;
  static constexpr int kChunk = Shape::kChunk;
  static_assert(Shape::kThreads == 2 * kChunk);
  const BranchCall& call;
  const void *k, *v;
  int64_t (&slots)[2][kChunk];  // shared memory: offsets of the keys of two turns, in elements
  const int group, start, end, stride;
  const int64_t after;  // offset of `zeros` from v
  int key, page, slot;  // the key that this thread looks up next, and where it is
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

  __device__ void advance(int turn) {  // this turn's addresses are used up: write those of two turns later
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

// A warp: a query row's attention to the keys of its own branch, up to its own. The row's own key is loaded first,
// since a branch of one row needs no other.
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

// out = sum_j p_j v_j / sum_j p_j, lse = log sum_j exp(s_j), p_j = exp(s_j - max s), s_j = scale q . k_j, over the keys
// of the group's slice and then those of the row's own branch up to the row.
// Grid: units * splits blocks; block / units is the part, and a unit is tile * kv_heads + key head.
// A block owns kQueries packed query rows (a row's query heads of one key head are neighbours) and every n-th chunk of
//   the slice; its warps also take turns with the rows' own branches. A unit's last block merges and writes out, lse.
// Loop: over chunks of kChunk keys, in take_chunks.
// Memory: as take_chunks; shared also has the offsets of the keys of two chunks. Registers: the pieces of q in flight.
// Layout: as in BranchCall; q, k, v, prefix by the strides there, adjacent columns; out [rows, heads, E] and
//   lse [heads, rows], dense; parts [rows, heads, splits + 1].
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

  // Layout, q and own keys are loaded before keys and values of the slice, so that all loads are in flight together.
  // The own branches are one more part of each row; the warps of all blocks take turns with them.
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
  uint4 pieces[kPieces];  // this thread's share of q [kQueries, E], 16 bytes each
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    pieces[i] = {};
    const int piece = i * Shape::kThreads + threadIdx.x;
    const Query query = query_of(min(piece / kRow, mine.count - 1));
    const T* at = static_cast<const T*>(call.q) + query.row * call.q_row + query.head * call.q_head;
    if (filled) pieces[i] = reinterpret_cast<const uint4*>(at)[piece % kRow];
  }
  const int parts = min(max((slice.length + Shape::kChunk - 1) / Shape::kChunk, 1), call.splits);
  if (split >= parts) return;  // a short slice has fewer chunks than the grid has parts

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
  if (!shared.is_last) return;  // all parts of the unit are written

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

// The grid of a call: most parts of a tile (splits), and tiles times key heads (units).
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

// Floats in `workspace`, or kNotTaken.
static int64_t floats_for(int rows, int heads, int kv_heads, int head_dim, int groups, int64_t most_keys) {
  if (rows < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0 || heads / kv_heads > kMostRepeat)
    return kNotTaken;
  const Grid grid = Grid::of(head_dim, rows, heads, kv_heads, groups, most_keys);
  const int64_t floats = int64_t{rows} * heads * (grid.splits + 1) * (head_dim + 2) + 2 * grid.units;
  return floats > kMostFloats || grid.units * grid.splits > INT_MAX ? kNotTaken : floats;
}

}  // namespace fb::branch_attention

// Slices longer than most_keys are right, but take longer.
FB_FUNCTION(fb_branch_attention_workspace, int rows, heads, kv_heads, head_dim, groups; int64_t most_keys;) {
  return fb::branch_attention::floats_for(given.rows, given.heads, given.kv_heads, given.head_dim, given.groups,
                                          given.most_keys);
}

FB_FUNCTION(fb_branch_attention,
            const void* q; int64_t q_row, q_head;
            const void *k, *v; int64_t own_row, own_head;
            const void *prefix_k, *prefix_v; int64_t page_stride, slot_stride, prefix_head; int pages, page_size;
            const void *cu_branch, *cu_group, *prefix_start, *prefix_len, *block_table;
            int64_t table_row; int table_width, branches, groups, wide;
            void* out; float *lse, *workspace; int64_t most_keys;
            int rows, heads, kv_heads, head_dim; double scale; int dtype; void* stream;) {
  using namespace fb::branch_attention;
  if (floats_for(given.rows, given.heads, given.kv_heads, given.head_dim, given.groups, given.most_keys) < 0)
    return fb::kNotTaken;
  for (const int64_t stride : {given.q_row, given.q_head, given.own_row, given.own_head, given.page_stride,
                               given.slot_stride, given.prefix_head})
    if (stride % 8 != 0) return fb::kNotTaken;
  for (const void* address : {given.q, given.k, given.v, given.prefix_k, given.prefix_v,
                              static_cast<const void*>(given.out), static_cast<const void*>(given.workspace)})
    if (!fb::is_aligned(address)) return fb::kNotTaken;
  BranchCall call{};
  call.q = given.q, call.k = given.k, call.v = given.v, call.prefix_k = given.prefix_k, call.prefix_v = given.prefix_v;
  call.out = given.out, call.lse = given.lse, call.cu_branch = given.cu_branch, call.cu_group = given.cu_group;
  call.prefix_start = given.prefix_start, call.prefix_len = given.prefix_len, call.block_table = given.block_table;
  call.q_row = given.q_row, call.q_head = given.q_head, call.own_row = given.own_row, call.own_head = given.own_head;
  call.page = given.page_stride, call.slot = given.slot_stride, call.prefix_head = given.prefix_head;
  call.rows = given.rows, call.heads = given.heads, call.kv_heads = given.kv_heads;
  call.repeat = given.heads / given.kv_heads, call.inverse = inverse_of(call.repeat);
  call.branches = given.branches, call.groups = given.groups, call.wide = given.wide != 0;
  call.scale = static_cast<float>(given.scale) * kLog2E;
  call.pages = given.page_size > 0 ? given.pages : 0, call.page_size = std::max(given.page_size, 1);
  call.table_row = given.table_row, call.table_width = given.table_width;
  const Grid grid = Grid::of(given.head_dim, call.rows, call.heads, call.kv_heads, call.groups, given.most_keys);
  const int64_t parts = int64_t{call.rows} * call.heads * (grid.splits + 1);
  call.splits = static_cast<int>(grid.splits);
  call.parts = {given.workspace, given.workspace + parts * given.head_dim, call.splits + 1};
  call.units = static_cast<int>(grid.units);
  call.sound = reinterpret_cast<int*>(call.parts.states + parts * 2);
  auto* counters = reinterpret_cast<unsigned*>(call.sound + grid.units);
  const auto on = static_cast<fb::Stream>(given.stream);
  if (const int error = fb::counters_for(call.units, counters, on, &call.counters)) return error;
  return run(call, given.head_dim, given.dtype, on);
}
