// The ops of a decode step, branch attention and small calls of other ops on the CPU, in float32; the ops of a decode
// step, attention and log-probs also in bfloat16, with sums in float32. Plain C functions for the ops' cpu.py, which
// check what they pass. Linear layers, log-probs and attention run on the threads of torch's OpenMP runtime, all else
// on one thread. The compiler reassociates nothing, so that NaN and inf behave as in PyTorch.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include "interface.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

namespace {

struct BFloat16 {
  uint16_t bits;
};

constexpr int OUT_OF_MEMORY = 1, OTHER_LAYOUT = 2, OUT_OF_RANGE = 3;

struct Memory {
  float* data = nullptr;
  int64_t size = 0;
  ~Memory() { resize(0); }

  void resize(int64_t floats) {
    std::free(data);
    data = floats ? static_cast<float*>(std::aligned_alloc(64, floats * sizeof(float))) : nullptr;
    size = data ? floats : 0;
  }
};

constexpr int64_t KEPT = 1 << 24;  // floats that a thread keeps for its next call at most
thread_local Memory kept;

// A buffer of so many floats for one call, one at a time in a thread; null if there is no memory.
struct Scratch {
  explicit Scratch(int64_t size) {
    if (size > kept.size || !kept.data) kept.resize((size + 1023) / 1024 * 1024 + 1024);
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    if (kept.size > KEPT) kept.resize(0);
  }
  float* data() const { return kept.data; }
};

struct Slots {  // no template, as what it instantiates is shared by all variants below
  std::vector<int64_t> values;
  void add(int64_t slot) { values.push_back(slot); }
  bool distinct() {
    std::sort(values.begin(), values.end());
    return std::adjacent_find(values.begin(), values.end()) == values.end();
  }
};

// Calls work(first, last) for pieces of [0, count) that begin at multiples of `unit`, on at most so many threads.
template <typename Work>
void share(int64_t count, int64_t unit, int threads, const Work& work) {
  if (threads <= 1) return work(0, count);
  const int64_t units = (count + unit - 1) / unit;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int piece = 0; piece < threads; ++piece)
    work(units * piece / threads * unit, std::min(count, units * (piece + 1) / threads * unit));
}

#ifdef _OPENMP
INLINE int64_t part() { return omp_get_thread_num(); }  // index of this thread among those that work
INLINE int64_t parts() { return omp_get_num_threads(); }
#else
INLINE int64_t part() { return 0; }
INLINE int64_t parts() { return 1; }
#endif

INLINE int64_t entry(const void* from, int wide, int64_t index) {
  return wide ? static_cast<const int64_t*>(from)[index] : static_cast<const int32_t*>(from)[index];
}

// The vectors of `repeat` heads of each row.
template <typename Element>
struct Block {
  Element* first;
  int64_t row, head, repeat;
  Element* operator[](int64_t r) const { return first + r / repeat * row + r % repeat * head; }
};

// The rows of one head, at one stride or in pages.
template <typename T>
struct Keys {
  const T* data;
  int64_t row;
  const int64_t* table;
  int64_t page, apart, first;
  const T* operator()(int64_t j) const {
    j += first;
    return table ? data + table[j / page] * apart + j % page * row : data + j * row;
  }
  Keys from(int64_t j) const { return {data, row, table, page, apart, first + j}; }
  // How far apart n of them from j on lie; 0 if not at one stride.
  int64_t step(int64_t j, int64_t n) const { return table && (first + j) % page + n > page ? 0 : row; }
};

template <typename T>
struct Heads {  // of every row
  const T* data;
  int64_t row, head, apart;  // pages
  const T* at(int64_t r, int64_t h) const { return data + r * row + h * head; }
  // The heads that share key head g, from row r on.
  Block<const T> queries(int64_t r, int64_t g, int64_t repeat) const { return {at(r, g * repeat), row, head, repeat}; }
  Keys<T> of(int64_t h) const { return {at(0, h), row, nullptr, 0, 0, 0}; }
};

// How products become scores; softcap 0: none. `whole`: a row's sums are the same wherever the prefix ends and whatever
// rows are beside it.
struct Scoring {
  float scale, softcap;
  int64_t window;
  bool whole;
};

struct Layout {
  const int64_t *branch, *group, *start, *length;  // [branches + 1], [groups + 1], [groups], [groups]
  int64_t branches, groups;
  const int64_t* table;            // [groups, columns], columns -1 and `pages` keys where a prefix is not paged
  int64_t columns, pages, page;

  int64_t first(int64_t g) const { return branch[group[g]]; }
  int64_t branch_of(int64_t row) const { return std::upper_bound(branch, branch + branches, row) - branch - 1; }

  template <typename T>
  Keys<T> keys(const Heads<T>& of, int64_t g, int64_t h) const {
    return {of.at(0, h), of.row, table ? table + g * columns : table, page, of.apart, start[g]};
  }

  bool fits(int64_t rows) const {
    const int64_t held = columns < 0 ? pages : columns * page;
    if (branch[0] != 0 || branch[branches] != rows || group[0] != 0 || group[groups] != branches) return false;
    for (int64_t b = 0; b < branches; ++b)
      if (branch[b] > branch[b + 1]) return false;
    for (int64_t g = 0; g < groups; ++g) {
      if (group[g] > group[g + 1] || start[g] < 0 || length[g] < 0) return false;
      if (!length[g]) continue;
      if (start[g] > held || length[g] > held - start[g]) return false;
      for (int64_t at = table ? start[g] / page : 0; table && at <= (start[g] + length[g] - 1) / page; ++at)
        if (table[g * columns + at] < 0 || table[g * columns + at] >= pages) return false;
    }
    return true;
  }
};

// Blocks of a group's rows that attend to one key head, the longest first, so that threads which take the next one end
// together.
struct Blocks {  // no template, as Slots
  struct Piece {
    int64_t h, g, first, stop, pairs;  // pairs: of a row and a key that it sees
  };
  std::vector<Piece> pieces;

  Blocks(const Layout& layout, int64_t kv_heads, int64_t most, int64_t window) {
    for (int64_t g = 0; g < layout.groups; ++g)
      for (int64_t row = layout.first(g), end = layout.first(g + 1), next; row < end; row = next) {
        next = std::min(end, row + most);
        int64_t pairs = 0, b = layout.branch_of(row);
        for (int64_t at = row; at < next; ++at) {
          while (layout.branch[b + 1] <= at) ++b;
          pairs += std::min(window, layout.length[g] + at - layout.branch[b] + 1);
        }
        for (int64_t h = 0; h < kv_heads; ++h) pieces.push_back({h, g, row, next, pairs});
      }
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.pairs > b.pairs; });
  }

  int64_t count() const { return pieces.size(); }

  int64_t products(int64_t width) const {  // of rows of so many columns with their keys, then values
    int64_t sum = 0;
    for (const Piece& piece : pieces) sum += 2 * piece.pairs * width;
    return sum;
  }
};

struct Indices {
  const void* data;  // or null
  int wide;
  int64_t operator[](int64_t i) const { return entry(data, wide, i); }
};

// Consecutive keys of a sequence in one page: so many, from a slot on.
struct Stretch {
  int64_t page, slot, count;
};

// Rotary tables, the paged keys and values of sequences, and their rows' places in them: `each` rows per sequence.
template <typename T>
struct Sequences {
  const float *cos, *sin;  // [length, width]
  int64_t length;
  Indices positions, slots;  // [rows]
  T* k;
  int64_t k_page, k_slot, k_head;
  T* v;
  int64_t v_page, v_slot, v_head, pages, page;
  Indices held;   // [count]
  Indices table;  // null if the cache is flat: one page with all slots
  int64_t table_row, table_width, count, each, window, heads, kv_heads, width;  // window 0: none
  float eps, scale;
  bool whole;  // as Scoring's

  int64_t first(int64_t s) const { return window ? std::max<int64_t>(0, held[s] - (window - 1)) : 0; }

  int64_t seen(int64_t s) const { return held[s] - first(s); }

  int64_t most_seen() const {
    int64_t most = 0;
    for (int64_t s = 0; s < count; ++s) most = std::max(most, seen(s));
    return most;
  }

  int64_t page_at(int64_t s, int64_t column) const { return table.data ? table[s * table_row + column] : 0; }

  // The keys from one on, to the end of its page, at most so many; for no keys nothing is read.
  Stretch stretch(int64_t s, int64_t key, int64_t most) const {
    if (key >= held[s]) return {0, 0, 0};
    return {page_at(s, key / page), key % page, std::min({page - key % page, held[s] - key, most})};
  }

  bool holds(int64_t s, int64_t slot) const {  // whether a slot's key is seen or, if flat, before those
    if (!table.data) return slot < held[s];
    const int64_t wanted = slot / page, place = slot % page, begin = first(s), end = held[s];
    for (int64_t column = begin / page; column * page < end; ++column)
      if (page_at(s, column) == wanted && column * page + place >= begin && column * page + place < end) return true;
    return false;
  }

  // Whether all indices are in range, and no two rows share a slot.
  bool fit() const {
    const int64_t capacity = table.data ? table_width * page : page, rows = count * each;
    for (int64_t s = 0; s < count; ++s) {
      if (held[s] < 0 || held[s] > capacity) return false;
      for (int64_t column = table.data ? first(s) / page : 0; table.data && column * page < held[s]; ++column)
        if (page_at(s, column) < 0 || page_at(s, column) >= pages) return false;
    }
    Slots written;
    for (int64_t row = 0; row < rows; ++row) {
      if (positions[row] < 0 || positions[row] >= length) return false;
      if (!slots.data || slots[row] < 0) continue;
      if (slots[row] >= pages * page || holds(row / each, slots[row])) return false;
      written.add(slots[row]);
    }
    return written.distinct();
  }
};

template <typename T>
struct LayerWeights {  // contiguous; biases and the norms of heads may be null
  const T *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *gate_up_bias, *down,
      *down_bias;
};

// How a row's products become logits; softcap 0: none.
struct Change {
  float scale, softcap, temperature;
};

// Where a row's gradient of log-sum-exp to x adds up: sums of e^(l - top) slope weight, each row in whole panels; or null.
struct Pulled {
  float *sums, *top;  // [rows, stride], [rows]
  int64_t stride;
};

// The gradient of a logit l, e^f (on_all - on_entropy f) with f = l - shift, and on_target more for the target.
struct Pull {
  const float *on_target, *on_all, *on_entropy, *shift;  // [rows]; on_entropy may be null

  bool none(int64_t row) const { return on_target[row] == 0 && on_all[row] == 0 && (!on_entropy || on_entropy[row] == 0); }
};

constexpr int64_t SHARE = 1 << 17;  // minimum products per thread
constexpr int64_t BLOCK = 64;  // query heads that share each read of a prefix

int64_t rows_at_once(int64_t repeat) { return repeat < BLOCK ? BLOCK / repeat : 1; }

// Not in the variants: instances of templates are shared by the whole library.
void drop_all_but(int64_t k, int64_t* found, int64_t count) {  // after this, the k-th largest is the last
  std::nth_element(found, found + k - 1, found + count, std::greater<int64_t>());
}

void sort_largest(int64_t k, int64_t* found, int64_t count) {
  std::partial_sort(found, found + k, found + count, std::greater<int64_t>());
}

#define VARIANT plain
#define LANES 4
#include "cpu_kernels.h"
#undef VARIANT
#undef LANES

#ifndef WIDEST  // maximum bits of a vector; tests build narrower libraries
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST 512
#else
#define WIDEST 128
#endif
#endif

#if WIDEST >= 256
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define VARIANT avx2
#define LANES 8
#include "cpu_kernels.h"
#undef VARIANT
#undef LANES
#pragma GCC pop_options
#endif

#if WIDEST >= 512
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx2,fma")
#define VARIANT avx512
#define LANES 16
#include "cpu_kernels.h"
#undef VARIANT
#undef LANES
#pragma GCC pop_options

#define DOT_BF16
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,avx512bf16,avx2,fma")
#define VARIANT avx512_bf16
#define LANES 16
#include "cpu_kernels.h"
#undef VARIANT
#undef LANES
#pragma GCC pop_options
#undef DOT_BF16
#endif

#if WIDEST >= 512 && ((__GNUC__ >= 12 && defined(__linux__)) || defined(EMULATED_TILES))
#define TILES
#pragma GCC push_options
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"  // those of float32 are the variants' above
#ifdef EMULATED_TILES
#pragma GCC target("avx2,fma")
#else
#define DOT_BF16
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,avx512bf16,avx2,fma")
#endif
#include "tiles.h"
#define VARIANT amx
#define LANES 16
#include "cpu_kernels.h"
#undef VARIANT
#undef LANES
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

// The kernels of a decode step, for one element type.
template <typename T>
struct Step {
  decltype(&plain::skinny_linear<T>) skinny_linear;
  decltype(&plain::branch_attention_qkv<T>) branch_attention_qkv;
  decltype(&plain::decoder_layer<T>) decoder_layer;
  decltype(&plain::topk_entropy<T>) topk_entropy;
  decltype(&plain::rms_norm<T>) rms_norm;
  decltype(&plain::swiglu<T>) swiglu;
  decltype(&plain::qk_norm_rope<T>) qk_norm_rope;
  decltype(&plain::branch_attention<T>) branch_attention;
  decltype(&plain::branch_attention_backward<T>) branch_attention_backward;
  decltype(&plain::linear_logprob<T>) linear_logprob;
  decltype(&plain::linear_logprob_backward<T>) linear_logprob_backward;
  decltype(&plain::target_logits<T>) target_logits;
};

struct Kernels {
  const char* variant;
  Step<float> single;
  Step<BFloat16> narrow;
  decltype(&plain::merge_attention_states) merge_attention_states;
  decltype(&plain::candidate_head) candidate_head;
};

#define STEP(variant, T) \
  {variant::skinny_linear<T>, variant::branch_attention_qkv<T>, variant::decoder_layer<T>, variant::topk_entropy<T>, \
   variant::rms_norm<T>, variant::swiglu<T>, variant::qk_norm_rope<T>, variant::branch_attention<T>, \
   variant::branch_attention_backward<T>, variant::linear_logprob<T>, variant::linear_logprob_backward<T>, \
   variant::target_logits<T>}

// Those of bfloat16 are of `narrow`.
#define KERNELS(variant, narrow)                                                                                   \
  {#narrow, STEP(variant, float), STEP(narrow, BFloat16), variant::merge_attention_states, variant::candidate_head}

Kernels fitting() {
#if WIDEST >= 256
  const bool fused = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#if WIDEST >= 512
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
  const bool dots = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512bf16");
#ifdef TILES
  const bool products = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && tiles::granted();
#ifdef EMULATED_TILES
  if (fused && products) return KERNELS(avx2, amx);
#else
  if (fused && wide && dots && products) return KERNELS(avx512_bf16, amx);
#endif
#endif
  if (fused && wide && dots) return KERNELS(avx512_bf16, avx512_bf16);
  if (fused && wide) return KERNELS(avx512, avx512);
#endif
#if WIDEST >= 256
  if (fused) return KERNELS(avx2, avx2);
#endif
  return KERNELS(plain, plain);
}

const Kernels kernels = fitting();

// run(kernels of the elements' type, one of them)
template <typename Run>
int typed(int narrow, const Run& run) {
  return narrow ? run(kernels.narrow, BFloat16{}) : run(kernels.single, 0.0f);
}

template <typename T>
const T* as(const void* from, T) { return static_cast<const T*>(from); }

template <typename T>
T* as(void* to, T) { return static_cast<T*>(to); }

float narrow(double x) { return static_cast<float>(x); }

template <typename Fields, typename T>
Sequences<T> sequences_of(const Fields& given, T one) {
  return {given.cos, given.sin, given.length, {given.positions, given.wide_positions}, {given.slots, given.wide_slots},
          as(given.k_cache, one), given.k_page, given.k_slot, given.k_head, as(given.v_cache, one), given.v_page,
          given.v_slot, given.v_head, given.pages, given.page, {given.held, given.wide_held},
          {given.table, given.wide_table}, given.table_row, given.table_width, given.sequences, given.each,
          given.window, given.heads, given.kv_heads, given.width, narrow(given.eps), narrow(given.scale),
          !!given.whole};
}

template <typename Fields>
Layout layout_of(const Fields& given) {
  return {given.branch, given.group, given.start, given.length, given.branches,
          given.groups, given.table, given.columns, given.pages, given.page};
}

}  // namespace

extern "C" int fbcpu_abi_version() { return 22; }

// Whose kernels those of bfloat16 are.
extern "C" const char* fbcpu_variant() { return kernels.variant; }

// `narrow`: elements are bfloat16, else float32. `wide_...`: indices have 64 bits, else 32.
FB_FUNCTION(fbcpu_skinny_linear,
            const void* x; int64_t x_stride; const void* weight; int64_t weight_stride;
            const void *bias, *norm_weight; double eps; const void* residual; int64_t residual_stride;
            void* out; int64_t out_stride, rows, width, outputs; int swiglu, threads, narrow;) {
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.skinny_linear(
        as(given.x, one), given.x_stride, as(given.weight, one), given.weight_stride, as(given.bias, one),
        as(given.norm_weight, one), narrow(given.eps), as(given.residual, one), given.residual_stride,
        as(given.out, one), given.out_stride, given.rows, given.width, given.outputs, given.swiglu, given.threads);
  });
}

// What both functions of a decode step take of sequences; the cache is flat without a table.
#define SEQUENCES                                                                                                 \
  const float *cos, *sin; int64_t length; const void* positions; int wide_positions;                              \
  void* k_cache; int64_t k_page, k_slot, k_head; void* v_cache; int64_t v_page, v_slot, v_head, pages, page;      \
  const void* held; int wide_held; const void* table; int wide_table; int64_t table_row, table_width;             \
  const void* slots; int wide_slots; int64_t sequences, each, window, heads, kv_heads, width; double eps, scale; int whole;

FB_FUNCTION(fbcpu_branch_attention_qkv,
            const void* qkv; int64_t qkv_stride; const void *q_weight, *k_weight; SEQUENCES
            void* out; int threads, narrow;) {
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.branch_attention_qkv(as(given.qkv, one), given.qkv_stride, as(given.q_weight, one),
                                     as(given.k_weight, one), sequences_of(given, one), as(given.out, one),
                                     given.threads);
  });
}

FB_FUNCTION(fbcpu_decoder_layer,
            const void* hidden; int64_t hidden_stride;
            const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up,
                *gate_up_bias, *down, *down_bias; SEQUENCES
            void* out; int64_t model, inner; int threads, narrow;) {
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.decoder_layer(
        as(given.hidden, one), given.hidden_stride,
        {as(given.input_norm, one), as(given.qkv, one), as(given.qkv_bias, one), as(given.q_norm, one),
         as(given.k_norm, one), as(given.o, one), as(given.o_bias, one), as(given.post_norm, one),
         as(given.gate_up, one), as(given.gate_up_bias, one), as(given.down, one), as(given.down_bias, one)},
        sequences_of(given, one), as(given.out, one), given.model, given.inner, given.threads);
  });
}

// What both directions of attention take; their strides are of rows, heads and pages.
#define ATTENTION                                                                                                 \
  const void* q; int64_t q_row, q_head; const void* k; int64_t k_row, k_head; const void* v; int64_t v_row, v_head; \
  const void* prefix_k; int64_t prefix_k_row, prefix_k_head, prefix_k_page;                                       \
  const void* prefix_v; int64_t prefix_v_row, prefix_v_head, prefix_v_page;                                       \
  const int64_t *branch, *group, *start, *length, *table; int64_t branches, groups, columns, pages, page;         \
  int64_t rows, heads, kv_heads, width; double scale, softcap; int64_t window; int threads, narrow;

FB_FUNCTION(fbcpu_branch_attention, ATTENTION int whole; void* out; float* lse; unsigned char* done;) {
  const Layout layout = layout_of(given);
  if (!layout.fits(given.rows)) return OTHER_LAYOUT;
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.branch_attention(
        {as(given.q, one), given.q_row, given.q_head, 0}, {as(given.k, one), given.k_row, given.k_head, 0},
        {as(given.v, one), given.v_row, given.v_head, 0},
        {as(given.prefix_k, one), given.prefix_k_row, given.prefix_k_head, given.prefix_k_page},
        {as(given.prefix_v, one), given.prefix_v_row, given.prefix_v_head, given.prefix_v_page}, layout,
        {narrow(given.scale), narrow(given.softcap), given.window, !!given.whole}, as(given.out, one), given.lse, given.done,
        given.rows, given.heads, given.kv_heads, given.width, given.threads);
  });
}

FB_FUNCTION(fbcpu_branch_attention_backward,
            const void* grad; int64_t grad_row, grad_head; const void* out; int64_t out_row, out_head; ATTENTION
            const float *lse, *dlse; float *dq, *dk, *dv, *dprefix_k, *dprefix_v; unsigned char* done;) {
  const Layout layout = layout_of(given);
  if (!layout.fits(given.rows)) return OTHER_LAYOUT;
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.branch_attention_backward(
        {as(given.grad, one), given.grad_row, given.grad_head, 0}, {as(given.out, one), given.out_row, given.out_head, 0},
        {as(given.q, one), given.q_row, given.q_head, 0}, {as(given.k, one), given.k_row, given.k_head, 0},
        {as(given.v, one), given.v_row, given.v_head, 0},
        {as(given.prefix_k, one), given.prefix_k_row, given.prefix_k_head, given.prefix_k_page},
        {as(given.prefix_v, one), given.prefix_v_row, given.prefix_v_head, given.prefix_v_page}, layout,
        {narrow(given.scale), narrow(given.softcap), given.window, false}, given.lse, given.dlse, given.dq, given.dk,
        given.dv, given.dprefix_k, given.dprefix_v, given.done, given.rows, given.heads, given.kv_heads, given.width,
        given.threads);
  });
}

FB_FUNCTION(fbcpu_topk_entropy,
            const void* logits; int64_t stride, rows, width, k; float *entropy, *values; int64_t* indices;
            int threads, narrow;) {
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.topk_entropy(as(given.logits, one), given.stride, given.rows, given.width, given.k, given.entropy,
                             given.values, given.indices, given.threads);
  });
}

FB_FUNCTION(fbcpu_rms_norm,
            const void *x, *residual, *weight; double eps; void *out, *sum; int64_t rows, width;
            int threads, wide_weight, narrow;) {
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.rms_norm(as(given.x, one), as(given.residual, one), given.weight, given.wide_weight, narrow(given.eps),
                         as(given.out, one), as(given.sum, one), given.rows, given.width, given.threads);
  });
}

FB_FUNCTION(fbcpu_swiglu,
            const void *gate, *up; int64_t stride; void* out; int64_t rows, width; int threads, narrow;) {
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.swiglu(as(given.gate, one), as(given.up, one), given.stride, as(given.out, one), given.rows,
                       given.width, given.threads);
  });
}

FB_FUNCTION(fbcpu_merge_attention_states,
            const float *out_a, *lse_a, *out_b, *lse_b; float *out, *lse; int64_t rows, heads, width;) {
  return kernels.merge_attention_states(given.out_a, given.lse_a, given.out_b, given.lse_b, given.out, given.lse,
                                        given.rows, given.heads, given.width);
}

FB_FUNCTION(fbcpu_candidate_head,
            const float* hidden; int64_t hidden_stride; const float *norm_weight, *head_weight, *bias; double eps;
            const void* group; int wide; float *score, *prob; int64_t* best; int64_t rows, groups, width;) {
  return kernels.candidate_head(given.hidden, given.hidden_stride, given.norm_weight, given.head_weight, given.bias,
                                narrow(given.eps), given.group, given.wide, given.score, given.prob, given.best,
                                given.rows, given.groups, given.width);
}

// `pulled` [rows, pull_stride] gets the gradient of log-sum-exp to x; `top` [rows] -inf. Or both null.
FB_FUNCTION(fbcpu_linear_logprob,
            const void* x; int64_t x_stride; const void* weight; int64_t weight_stride; const void *bias, *target;
            int wide; int64_t ignore_index; double scale, softcap, temperature;
            float *logprob, *lse, *entropy, *largest, *pulled, *top; int64_t pull_stride, rows, width, vocabulary;
            int threads, narrow;) {
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.linear_logprob(
        as(given.x, one), given.x_stride, as(given.weight, one), given.weight_stride, as(given.bias, one), given.target,
        given.wide, given.ignore_index, {narrow(given.scale), narrow(given.softcap), narrow(given.temperature)},
        given.logprob, given.lse, given.entropy, given.largest, {given.pulled, given.top, given.pull_stride}, given.rows,
        given.width, given.vocabulary, given.threads);
  });
}

// Upstream, of each row: what a target's logit gets, what e^(logit - shift) of every one is multiplied by, and by
// -(logit - shift).
FB_FUNCTION(fbcpu_linear_logprob_backward,
            const void* x; int64_t x_stride; const void* weight; int64_t weight_stride; const void *bias, *target;
            int wide; double scale, softcap, temperature; const float *on_target, *on_all, *on_entropy, *shift;
            void *dx, *dweight, *dbias; int64_t rows, width, vocabulary; int threads, narrow;) {
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.linear_logprob_backward(
        as(given.x, one), given.x_stride, as(given.weight, one), given.weight_stride, as(given.bias, one), given.target,
        given.wide, {narrow(given.scale), narrow(given.softcap), narrow(given.temperature)},
        {given.on_target, given.on_all, given.on_entropy, given.shift}, as(given.dx, one), as(given.dweight, one),
        as(given.dbias, one), given.rows, given.width, given.vocabulary, given.threads);
  });
}

FB_FUNCTION(fbcpu_target_logits,
            const void* x; int64_t x_stride; const void* weight; int64_t weight_stride; const void *bias, *target;
            int wide; int64_t ignore_index; double scale, softcap, temperature; float* out;
            int64_t rows, count, width, vocabulary; int threads, narrow;) {
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.target_logits(
        as(given.x, one), given.x_stride, as(given.weight, one), given.weight_stride, as(given.bias, one), given.target,
        given.wide, given.ignore_index, {narrow(given.scale), narrow(given.softcap), narrow(given.temperature)},
        given.out, given.rows, given.count, given.width, given.vocabulary, given.threads);
  });
}

FB_FUNCTION(fbcpu_qk_norm_rope,
            const void* qkv; int64_t qkv_stride; const void *q_weight, *k_weight, *cos, *sin; int wide_tables;
            int64_t length; const void* positions; int wide_positions; void *q, *k, *v, *k_cache;
            int64_t k_slot, k_head; void* v_cache; int64_t v_slot, v_head, size; const void* slots; int wide_slots;
            int64_t rows, heads, kv_heads, width; double eps; int threads, narrow;) {
  return typed(given.narrow, [&](const auto& step, auto one) {
    return step.qk_norm_rope(
        as(given.qkv, one), given.qkv_stride, as(given.q_weight, one), as(given.k_weight, one), given.cos,
        given.sin, given.wide_tables, given.length, given.positions, given.wide_positions, as(given.q, one),
        as(given.k, one), as(given.v, one), as(given.k_cache, one), given.k_slot, given.k_head, as(given.v_cache, one),
        given.v_slot, given.v_head, given.size, given.slots, given.wide_slots, given.rows, given.heads, given.kv_heads,
        given.width, narrow(given.eps), given.threads);
  });
}
