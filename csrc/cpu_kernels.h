// The kernels of cpu.cpp, which includes this file once per instruction set, with its LANES and VARIANT.
// A sum over a row has the same order wherever the row is and however many rows there are: results are bit-equal.

namespace VARIANT {

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef float Quad __attribute__((vector_size(16)));

constexpr int TILE = 4;                       // rows of a weight, or keys, that are summed together
constexpr int ROWS = 2;                       // rows of x, or query heads, that share what is read
constexpr int MANY = LANES == 16 ? 4 : ROWS;  // rows of x, where registers hold their sums with a tile
constexpr float FAR_BELOW = -1e4f;            // of the maximum: exp is 0 already, and 0 * -inf no term of the entropy
constexpr int64_t FEW_KEYS = 64;              // that many heads read one head at a time
constexpr int64_t MOST_LARGEST = 64;          // maximum k of topk_entropy

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

INLINE Lanes load(const float* from) {
  Lanes v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

INLINE Lanes load(const float* from, int64_t n) {  // fewer than LANES, then zeros
  Lanes v = {};
  std::memcpy(&v, from, n * sizeof(float));
  return v;
}

INLINE Lanes widened(Halves v) { return (Lanes)(__builtin_convertvector(v, Ints) << 16); }

INLINE Lanes load(const BFloat16* from) {
  Halves v;
  std::memcpy(&v, from, sizeof v);
  return widened(v);
}

INLINE Lanes load(const BFloat16* from, int64_t n) {
  Halves v = {};
  std::memcpy(&v, from, n * sizeof(BFloat16));
  return widened(v);
}

template <typename T>
INLINE Lanes some(const T* from, int64_t n) { return n == LANES ? load(from) : load(from, n); }

INLINE void store(float* to, Lanes v) { std::memcpy(to, &v, sizeof v); }

INLINE void store(float* to, Lanes v, int64_t n) { std::memcpy(to, &v, n * sizeof(float)); }

INLINE Lanes rounded(Lanes v) {  // to BFloat16's numbers, to nearest even
  Ints bits = (Ints)v, nearest = bits + 0x7fff + (bits >> 16 & 1);
  return (Lanes)((v == v ? nearest : Ints{} + 0x7fc00000) & ~0xffff);
}

INLINE Halves narrowed(Lanes v) { return __builtin_convertvector((Ints)rounded(v) >> 16, Halves); }

INLINE void store(BFloat16* to, Lanes v) {
  Halves half = narrowed(v);
  std::memcpy(to, &half, sizeof half);
}

INLINE void store(BFloat16* to, Lanes v, int64_t n) {
  Halves half = narrowed(v);
  std::memcpy(to, &half, n * sizeof(BFloat16));
}

INLINE Lanes repeated(const void* from) {  // 16 bytes in all quads
#if LANES == 16 && !defined(TILES)
  return (Lanes)_mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps((const float*)from));
#elif LANES == 8
  return (Lanes)_mm256_broadcast_ps((const __m128*)from);
#else
  Lanes v;
  for (int i = 0; i < LANES; i += 4) std::memcpy((float*)&v + i, from, 16);
  return v;
#endif
}

INLINE void rounded(float* x, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) {
    const int64_t n = width - i < LANES ? width - i : LANES;
    const Lanes v = rounded(some(x + i, n));
    if (n == LANES) store(x + i, v);
    else store(x + i, v, n);
  }
}

template <typename From, typename To>
INLINE void copied(const From* from, int64_t width, To* to) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(to + i, load(from + i));
  if (i < width) store(to + i, load(from + i, width - i), width - i);
}

// How products take x and a weight's elements: STEP columns as a vector each, whose products add to lanes of sums, one
// for each STEP / LANES columns, a place; `everywhere` has a place in all lanes, `in_quads` four in each four.
template <typename Element>
struct Widened {
  typedef Element W;
  typedef float X;
  typedef Lanes Vector;
  static constexpr int64_t STEP = LANES;
  INLINE Vector of(const float* x) { return load(x); }
  INLINE Vector of(const W* w, int64_t n) { return some(w, n); }
  INLINE Vector everywhere(const X* x) { return *x - Lanes{}; }
  INLINE Vector in_quads(const X* x) { return repeated(x); }
  INLINE void add(Vector a, Vector b, Lanes& sum) { sum += a * b; }
  INLINE void put(X* to, Lanes v) { store(to, v); }
};

template <typename Element>
struct Factors : Widened<Element> {};

#ifdef DOT_BF16
template <>
struct Factors<BFloat16> {
  typedef BFloat16 W, X;
  typedef __m512bh Vector;
  static constexpr int64_t STEP = 2 * LANES;
  INLINE Vector of(const BFloat16* x) { return (Vector)_mm512_loadu_si512(x); }
  INLINE Vector of(const BFloat16* w, int64_t n) {
    return n == STEP ? of(w) : (Vector)_mm512_maskz_loadu_epi16((1u << n) - 1, w);
  }
  INLINE Vector everywhere(const BFloat16* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (Vector)_mm512_set1_epi32(pair);
  }
  INLINE Vector in_quads(const X* x) { return (Vector)repeated(x); }
  INLINE void add(Vector a, Vector b, Lanes& sum) { sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, a, b); }
  INLINE void put(X* to, Lanes v) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)v)); }
};
#elif defined(TILES)
template <>
struct Factors<BFloat16> {  // of emulated tiles, which alone multiply
  typedef BFloat16 W, X;
  typedef Lanes Vector;
  static constexpr int64_t STEP = 2 * LANES;
  INLINE Vector of(const BFloat16* from, int64_t n) {
    Vector v = {};
    std::memcpy(&v, from, n * sizeof *from);
    return v;
  }
  INLINE void put(X* to, Lanes v) { store(to, v); }
};
#endif

template <typename F>
constexpr bool IN_TILES = false;  // whether its products are those of tiles.h

#ifdef TILES
template <>
constexpr bool IN_TILES<Factors<BFloat16>> = true;
typedef tiles::Registers Registers;
#else
struct Registers {};  // none are needed
#endif

template <typename F>
INLINE int64_t stride_of(int64_t width) {  // of rows of x
  return (width + F::STEP - 1) / F::STEP * F::STEP;
}

template <typename F>
INLINE void pad(typename F::X* row, int64_t width) {  // with zeros to whole vectors
  std::memset(row + width, 0, (stride_of<F>(width) - width) * sizeof *row);
}

INLINE Quad quarter(Lanes v) {  // lanes folded to four
  Quad part[LANES / 4];
  std::memcpy(part, &v, sizeof v);
#if LANES == 16
  return (part[0] + part[2]) + (part[1] + part[3]);
#elif LANES == 8
  return part[0] + part[1];
#else
  return part[0];
#endif
}

INLINE float largest(Lanes v) {
  Quad part[LANES / 4];
  std::memcpy(part, &v, sizeof v);
  Quad most = part[0];
  for (int i = 1; i < LANES / 4; ++i) most = part[i] > most ? part[i] : most;
  const float a = most[0] > most[1] ? most[0] : most[1], b = most[2] > most[3] ? most[2] : most[3];
  return a > b ? a : b;
}

// Of lanes that differ in bit D the sum: of a where the bit is 0, of b where it is 1.
template <int D, int... L>
INLINE Lanes folded(Lanes a, Lanes b, std::integer_sequence<int, L...>) {
  return SHUFFLE(a, b, (L & D ? LANES + L - D : L)...) + SHUFFLE(a, b, (L & D ? LANES + L : L + D)...);
}

template <int STEP, int... L>
INLINE Lanes spread(Lanes v, std::integer_sequence<int, L...>) {  // lane i is v's lane i * STEP, as far as there are
  return SHUFFLE(v, v, (L * STEP % LANES)...);
}

// Lane i is the sum of v[i], of N vectors, in the order of `quarter` and what follows it.
template <int N, int D = LANES / 2, int STEP = LANES / N>
INLINE Lanes sums(const Lanes* v) {
  constexpr std::make_integer_sequence<int, LANES> all;
  constexpr int LEFT = N > 1 ? N / 2 : 1;
  Lanes half[LEFT];
  for (int i = 0; i < LEFT; ++i) half[i] = folded<D>(v[i], v[i + N / 2], all);
  if constexpr (D > 1) return sums<LEFT, D / 2, STEP>(half);
  else return STEP == 1 ? half[0] : spread<STEP>(half[0], all);
}

// The sum of term(i, n), of n columns from i on; in float over stretches, so that long rows lose no more than short.
template <typename Term>
INLINE double added(int64_t width, Term term) {
  constexpr int64_t STRETCH = 64 * LANES;
  double total = 0;
  for (int64_t first = 0; first < width; first += STRETCH) {
    const int64_t stop = width - first < STRETCH ? width : first + STRETCH;
    Lanes even = {}, odd = {};
    int64_t i = first;
    for (; i + 2 * LANES <= stop; i += 2 * LANES) {
      even += term(i, LANES);
      odd += term(i + LANES, LANES);
    }
    if (i + LANES <= stop) {
      even += term(i, LANES);
      i += LANES;
    }
    if (i < stop) odd += term(i, stop - i);
    Quad four = quarter(even + odd);
    total += (four[0] + four[1]) + (four[2] + four[3]);
  }
  return total;
}

// out[r][t] = x[r] . w[t] for R * T vectors that add up to them.
template <int R, int T>
INLINE void write_sums(const Lanes each[R * T], float* out, int64_t out_stride) {
  constexpr int N = R * T < LANES ? R * T : LANES;
  float sum[R * T];
  for (int first = 0; first < R * T; first += N) {
    Lanes some = sums<N>(each + first);
    std::memcpy(sum + first, &some, N * sizeof(float));
  }
  for (int r = 0; r < R; ++r) std::memcpy(out + r * out_stride, sum + r * T, T * sizeof(float));
}

// To acc[r][t] the products of n columns of x[r] and w[t].
template <typename F, int R, int T>
INLINE void add_products(
    const typename F::X* x, int64_t x_stride, const typename F::W* w, int64_t w_stride, int64_t n, Lanes acc[R * T]) {
  typename F::Vector a[R];
  for (int r = 0; r < R; ++r) a[r] = F::of(x + r * x_stride);
#pragma GCC unroll 4  // else the sums are spilled
  for (int t = 0; t < T; ++t) {
    auto b = F::of(w + t * w_stride, n);
    for (int r = 0; r < R; ++r) F::add(a[r], b, acc[r * T + t]);
  }
}

// out[r][t] = x[r] . w[t]; rows of x are padded with zeros to whole vectors, those of w are not. The even vectors of a
// row add up, then the odd ones with what is left: one after the other, since registers do not hold both.
template <typename F, int R, int T>
INLINE void products(
    const typename F::X* x, int64_t x_stride, const typename F::W* w, int64_t w_stride, int64_t width, float* out,
    int64_t out_stride) {
  constexpr int64_t STEP = F::STEP;
  Lanes even[R * T] = {}, odd[R * T] = {};
  const int64_t rest = width % STEP, whole = width - rest;
  for (int64_t k = 0; k < whole; k += 2 * STEP) add_products<F, R, T>(x + k, x_stride, w + k, w_stride, STEP, even);
  for (int64_t k = STEP; k < whole; k += 2 * STEP) add_products<F, R, T>(x + k, x_stride, w + k, w_stride, STEP, odd);
  if (rest) add_products<F, R, T>(x + whole, x_stride, w + whole, w_stride, rest, odd);
  for (int i = 0; i < R * T; ++i) even[i] += odd[i];
  write_sums<R, T>(even, out, out_stride);
}

// The same for one row, which takes the vectors of w one after the other.
template <typename F, int T>
INLINE void row_products(const typename F::X* x, const typename F::W* w, int64_t w_stride, int64_t width, float* out) {
  Lanes each[T];
  for (int t = 0; t < T; ++t, w += w_stride) {
    Lanes even = {}, odd = {};
    int64_t k = 0;
    for (; k + 2 * F::STEP <= width; k += 2 * F::STEP) {
      F::add(F::of(x + k), F::of(w + k, F::STEP), even);
      F::add(F::of(x + k + F::STEP), F::of(w + k + F::STEP, F::STEP), odd);
    }
    if (k + F::STEP <= width) {
      F::add(F::of(x + k), F::of(w + k, F::STEP), even);
      k += F::STEP;
    }
    if (k < width) F::add(F::of(x + k), F::of(w + k, width - k), odd);
    each[t] = even + odd;
  }
  write_sums<1, T>(each, out, T);
}

// e^x to 1 ulp or two: Cephes' polynomial; 0 and inf beyond the range, subnormals in between, NaN of NaN.
INLINE Lanes exponential(Lanes x) {
  x = x > 89.0f ? Lanes{} + 89.0f : x;
  x = x < -104.0f ? Lanes{} - 104.0f : x;
  Lanes shifted = x * 1.44269504088896341f + 12582912.0f;  // its low bits are the nearest integer
  Lanes n = shifted - 12582912.0f;
  Lanes r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Ints whole = (Ints)shifted - 0x4B400000;
  Ints half = whole >> 1;  // in two factors: either is a normal number
  return p * (Lanes)((half + 127) << 23) * (Lanes)((whole - half + 127) << 23);
}

// e^x of scores, x at most about 0: to 1e-7 where it is near 1, 4e-7 at e^-20; 0 from where it would be subnormal, NaN
// of NaN.
INLINE Lanes probability(Lanes x) {
  x = x > 88.0f ? Lanes{} + 88.0f : x;
  const Lanes shifted = x * 1.44269504088896341f + 12582912.0f;  // its low bits are the nearest integer to log2
  const Lanes r = x * 1.44269504088896341f - (shifted - 12582912.0f);
  Lanes p = r * 1.3264727e-3f + 9.6715128e-3f;
  p = p * r + 5.5507337e-2f;
  p = p * r + 2.4022242e-1f;
  p = p * r + 6.9314698e-1f;
  p = p * r + 1.0f;
  const Lanes y = (Lanes)((Words)p + ((Words)shifted << 23));  // wraps where it is not taken
  return x >= -87.0f ? y : x < 0 ? Lanes{} : x;
}

// tanh to 2 ulps: Cephes' polynomial, from 0.625 on by the exponential.
INLINE Lanes tangent(Lanes x) {
  Lanes size = x < 0 ? -x : x, square = x * x;
  Lanes p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  Lanes near = p * square * x + x, far = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
  far = x < 0 ? -far : far;
  return size < 0.625f ? near : far;
}

// Of a row, 1 / sqrt(mean of squares + eps).
template <typename T>
INLINE float inverse_rms(const T* x, float eps, int64_t width) {
  double sum = added(width, [&](int64_t i, int64_t n) {
    Lanes v = some(x + i, n);
    return v * v;
  });
  return 1.0f / std::sqrt((float)(sum / width) + eps);
}

// to[i] = from[i] / rms(from) * weight[i]; without a weight a copy.
template <typename X, typename T, typename To>
INLINE void normed(const X* from, const T* weight, float eps, int64_t width, To* to) {
  if (!weight) return copied(from, width, to);
  const float inverse = inverse_rms(from, eps, width);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(to + i, load(from + i) * inverse * load(weight + i));
  if (i < width) store(to + i, load(from + i, width - i) * inverse * load(weight + i, width - i), width - i);
}

// Rows of x, normed where there is a weight, as products take them.
template <typename F, typename X>
INLINE void padded_rows(
    const X* x, int64_t x_stride, const typename F::W* norm_weight, float eps, int64_t rows, int64_t width,
    typename F::X* to) {
  for (int64_t row = 0; row < rows; ++row, to += stride_of<F>(width)) {
    normed(x + row * x_stride, norm_weight, eps, width, to);
    pad<F>(to, width);
  }
}

// to = silu(gate) * up, which are rounded first if asked.
template <bool ROUNDED = false, typename T, typename To>
INLINE void gated(const T* gate, const T* up, int64_t width, To* to) {
  for (int64_t i = 0; i < width; i += LANES) {
    int64_t n = width - i < LANES ? width - i : LANES;
    Lanes g = some(gate + i, n), u = some(up + i, n);
    if constexpr (ROUNDED) g = rounded(g), u = rounded(u);
    Lanes y = g / (1.0f + exponential(-g)) * u;
    if (n == LANES) store(to + i, y);
    else store(to + i, y, n);
  }
}

constexpr int64_t PANEL = 2 * LANES;  // columns of a weight, or keys, that are packed together

INLINE int64_t in_panels(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

// Rows whose sums with a panel the registers hold, and where those are too many.
template <typename F>
constexpr int PANEL_ROWS = IN_TILES<F> ? 32 : LANES == 16 ? 12 : 6;
template <typename F>
constexpr int FEW = IN_TILES<F> ? 16 : LANES == 16 ? 4 : 2;

template <typename F>
INLINE int64_t in_fews(int64_t rows) { return (rows + FEW<F> - 1) / FEW<F> * FEW<F>; }

template <int D, int... L>
INLINE void exchanged(Lanes& a, Lanes& b, std::integer_sequence<int, L...>) {  // of lanes that differ in bit D
  const Lanes low = SHUFFLE(a, b, (L & D ? LANES + L - D : L)...);
  b = SHUFFLE(a, b, (L & D ? LANES + L : L + D)...);
  a = low;
}

template <int PART = 1, int D = LANES / 2>
INLINE void transposed(Lanes v[LANES / PART]) {  // of parts of so many lanes
  if constexpr (D >= PART) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES / PART; ++i)
      if (!(i & D / PART)) exchanged<D>(v[i], v[i + D / PART], std::make_integer_sequence<int, LANES>());
    transposed<PART, D / 2>(v);
  }
}

// Rows of a weight, at(0) to at(columns), as a panel: of each STEP / LANES places in them a vector for LANES rows.
template <typename F, typename At>
INLINE void packed(const At& at, int64_t columns, int64_t width, float* panel) {
  for (int64_t first = 0; first < PANEL; first += LANES)
    for (int64_t k = 0; k < width; k += F::STEP) {
      Lanes v[LANES];
      for (int i = 0; i < LANES; ++i)
        v[i] = first + i < columns ? (Lanes)F::of(at(first + i) + k, width - k < F::STEP ? width - k : F::STEP)
                                   : Lanes{};
      transposed(v);
      for (int i = 0; i < LANES; ++i) store(panel + (k / F::STEP * LANES + i) * PANEL + first, v[i]);
    }
}

#ifdef TILES
// Sums of 16 rows, or of 16 outputs, that lie `stride` floats apart: two tiles of columns, of R times 16 rows.
template <int R>
INLINE void load_sums(const float* from, int64_t stride) {
  tiles::load<0>(from, 4 * stride);
  tiles::load<1>(from + 16, 4 * stride);
  if constexpr (R == 2) {
    tiles::load<2>(from + 16 * stride, 4 * stride);
    tiles::load<3>(from + 16 * stride + 16, 4 * stride);
  }
}

template <int R>
INLINE void store_sums(float* to, int64_t stride) {
  tiles::store<0>(to, 4 * stride);
  tiles::store<1>(to + 16, 4 * stride);
  if constexpr (R == 2) {
    tiles::store<2>(to + 16 * stride, 4 * stride);
    tiles::store<3>(to + 16 * stride + 16, 4 * stride);
  }
}

INLINE void no_sums() {
  tiles::zero<0>();
  tiles::zero<1>();
  tiles::zero<2>();
  tiles::zero<3>();
}

// As panel_products, of R times 16 rows and of whole tiles of places.
template <bool ADDED, int R>
INLINE void tile_products(
    const BFloat16* x, int64_t x_stride, int64_t count, const float* panel, int64_t panel_stride, float* out,
    int64_t out_stride) {
  if constexpr (ADDED) load_sums<R>(out, out_stride);
  else no_sums();
  for (int64_t k = 0; k < count; k += 32, panel += 16 * panel_stride) {
    tiles::load<6>(panel, 4 * panel_stride);
    tiles::load<7>(panel + 16, 4 * panel_stride);
    tiles::load<4>(x + k, 2 * x_stride);
    tiles::multiply<0, 4, 6>();
    tiles::multiply<1, 4, 7>();
    if constexpr (R == 2) {
      tiles::load<5>(x + 16 * x_stride + k, 2 * x_stride);
      tiles::multiply<2, 5, 6>();
      tiles::multiply<3, 5, 7>();
    }
  }
  store_sums<R>(out, out_stride);
}

// 32 places of 16 rows of a weight; beyond those that there are, zeros.
template <int T>
INLINE void load_weight(const BFloat16* from, int64_t stride, int64_t rows, int64_t places) {
  if (rows >= 16 && places >= 32) return tiles::load<T>(from, 2 * stride);
  alignas(64) BFloat16 edge[16][32] = {};
  for (int64_t r = 0; r < std::min<int64_t>(rows, 16); ++r)
    std::memcpy(edge[r], from + r * stride, std::min<int64_t>(places, 32) * sizeof *from);
  tiles::load<T>(edge, 64);
}

// To the sums of W times 16 outputs and X times 16 rows the products of a weight's rows, low[count] and high[above], and
// a panel of x.
template <int W, int X>
static void weight_products(
    const BFloat16* low, int64_t count, const BFloat16* high, int64_t above, int64_t stride, int64_t width,
    const float* panel) {
  for (int64_t k = 0; k < width; k += 32) {
    load_weight<4>(low + k, stride, count, width - k);
    if constexpr (W == 2) load_weight<5>(high + k, stride, above, width - k);
    const float* x = panel + k / 2 * PANEL;
    tiles::load<6>(x, 4 * PANEL);
    tiles::multiply<0, 4, 6>();
    if constexpr (W == 2) tiles::multiply<2, 5, 6>();
    if constexpr (X == 2) {
      tiles::load<7>(x + 16, 4 * PANEL);
      tiles::multiply<1, 4, 7>();
      if constexpr (W == 2) tiles::multiply<3, 5, 7>();
    }
  }
}

// made(row, rows, output, outputs, block): block[r][PANEL] is what rows of x, in panels, and outputs `first` to `stop`
// of a weight multiply to. With `second`, of 16 outputs, and of those as far behind them in the block's other half.
template <typename Made>
INLINE void tile_outputs(
    const float* x, int64_t rows, const BFloat16* weight, int64_t weight_stride, int64_t width, int64_t first,
    int64_t stop, int64_t second, const Made& made) {
  const int64_t step = second ? 16 : 32, apart = second ? second : 16;
  const int64_t panel = stride_of<Factors<BFloat16>>(width) / 2 * PANEL;
  for (int64_t output = first; output < stop; output += step) {
    const BFloat16 *low = weight + output * weight_stride, *high = low + apart * weight_stride;
    const int64_t count = std::min(step, stop - output), above = second ? count : count - 16;
    const float* from = x;
    for (int64_t row = 0; row < rows; row += PANEL, from += panel) {
      no_sums();
      auto multiply = above > 0 ? rows - row > 16 ? weight_products<2, 2> : weight_products<2, 1>
                                : rows - row > 16 ? weight_products<1, 2> : weight_products<1, 1>;
      multiply(low, count, high, above, weight_stride, width, from);
      alignas(64) float sums[PANEL * PANEL], block[PANEL * PANEL];  // [outputs, rows], [rows, outputs]
      store_sums<2>(sums, PANEL);
      for (int64_t r = 0; r < std::min(PANEL, rows - row); r += 16)
        for (int64_t o = 0; o < (above > 0 ? PANEL : 16); o += 16) {
          Lanes v[LANES];
          for (int i = 0; i < LANES; ++i) v[i] = load(sums + (o + i) * PANEL + r);
          transposed(v);
          for (int i = 0; i < LANES; ++i) store(block + (r + i) * PANEL + o, v[i]);
        }
      made(row, std::min<int64_t>(PANEL, rows - row), output, count, block);
    }
  }
}

// out[r][o] of rows of x in panels, o from `output` to `stop`.
INLINE void products_in_tiles(
    const float* x, int64_t rows, const BFloat16* weight, int64_t weight_stride, int64_t width, int64_t output,
    int64_t stop, float* out, int64_t out_stride) {
  auto put = [=](int64_t row, int64_t some, int64_t at, int64_t count, const float* block) {
    for (int64_t r = 0; r < some; ++r)
      std::memcpy(out + (row + r) * out_stride + at, block + r * PANEL, count * sizeof *out);
  };
  tile_outputs(x, rows, weight, weight_stride, width, output, stop, 0, put);
}
#endif

// out[row][t] = x[row] . weight[t], t from `output` to `stop`, of padded rows of x.
template <typename F>
INLINE void tiled(
    const typename F::X* x, int64_t rows, const typename F::W* weight, int64_t weight_stride, int64_t width,
    int64_t output, int64_t stop, float* out, int64_t out_stride) {
  const int64_t stride = stride_of<F>(width);
  for (; output + TILE <= stop; output += TILE) {  // of each tile all rows, while it lies in the cache
    const typename F::W* w = weight + output * weight_stride;
    float* to = out + output;
    int64_t row = 0;
    for (; row + MANY <= rows; row += MANY)
      products<F, MANY, TILE>(x + row * stride, stride, w, weight_stride, width, to + row * out_stride, out_stride);
    if (MANY > ROWS && row + ROWS <= rows) {
      products<F, ROWS, TILE>(x + row * stride, stride, w, weight_stride, width, to + row * out_stride, out_stride);
      row += ROWS;
    }
    for (; row < rows; ++row) row_products<F, TILE>(x + row * stride, w, weight_stride, width, to + row * out_stride);
  }
  for (; output < stop; ++output)
    for (int64_t row = 0; row < rows; ++row)
      row_products<F, 1>(x + row * stride, weight + output * weight_stride, 0, width, out + row * out_stride + output);
}

// Rows of x, and their places, lie so far apart.
template <typename X>
struct Factor {
  const X* data;
  int64_t row, place;
};

// out[r][c] = x[r] . column c of a panel over `count` places, or added to it; each sum in the order of its terms.
template <typename F, bool ADDED, int R>
INLINE void panel_products(
    const Factor<typename F::X>& x, int64_t first, int64_t count, const float* panel, int64_t panel_stride, float* out,
    int64_t out_stride) {
  const typename F::X* of = x.data + first * x.row;
  out += first * out_stride;
  constexpr int64_t TAKEN = F::STEP / LANES;
  Lanes low[R] = {}, high[R] = {};
  for (int r = 0; ADDED && r < R; ++r) {
    low[r] = load(out + r * out_stride);
    high[r] = load(out + r * out_stride + LANES);
  }
  for (int64_t k = 0; k < count; k += TAKEN, panel += panel_stride) {
    const auto b = (typename F::Vector)load(panel), c = (typename F::Vector)load(panel + LANES);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const auto a = F::everywhere(of + r * x.row + k * x.place);
      F::add(a, b, low[r]);
      F::add(a, c, high[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    store(out + r * out_stride, low[r]);
    store(out + r * out_stride + LANES, high[r]);
  }
}

// The same of any number of rows.
template <typename F, bool ADDED>
INLINE void panel_rows(
    const Factor<typename F::X>& x, int64_t rows, int64_t count, const float* panel, int64_t panel_stride, float* out,
    int64_t out_stride) {
  int64_t row = 0;
  for (; row + PANEL_ROWS<F> <= rows; row += PANEL_ROWS<F>)
    panel_products<F, ADDED, PANEL_ROWS<F>>(x, row, count, panel, panel_stride, out, out_stride);
  for (; row + FEW<F> <= rows; row += FEW<F>)
    panel_products<F, ADDED, FEW<F>>(x, row, count, panel, panel_stride, out, out_stride);
  for (; row < rows; ++row) panel_products<F, ADDED, 1>(x, row, count, panel, panel_stride, out, out_stride);
}

#ifdef TILES
// Of tiles: x lies in memory for 16 rows more, `out` need not.
template <bool ADDED>
INLINE void rows_in_tiles(
    const Factor<BFloat16>& x, int64_t rows, int64_t count, const float* panel, int64_t panel_stride, float* out,
    int64_t out_stride) {
  int64_t row = 0;
  for (; row + 32 <= rows; row += 32)
    tile_products<ADDED, 2>(x.data + row * x.row, x.row, count, panel, panel_stride, out + row * out_stride, out_stride);
  for (; row < rows; row += 16) {
    alignas(64) float last[16 * PANEL];
    const int64_t some = std::min<int64_t>(16, rows - row);
    float* to = out + row * out_stride;
    for (int64_t r = 0; ADDED && r < some; ++r) std::memcpy(last + r * PANEL, to + r * out_stride, PANEL * sizeof *to);
    tile_products<ADDED, 1>(x.data + row * x.row, x.row, count, panel, panel_stride, last, PANEL);
    for (int64_t r = 0; r < some; ++r) std::memcpy(to + r * out_stride, last + r * PANEL, PANEL * sizeof *to);
  }
}

template <>
inline __attribute__((always_inline)) void panel_rows<Factors<BFloat16>, false>(
    const Factor<BFloat16>& x, int64_t rows, int64_t count, const float* panel, int64_t panel_stride, float* out,
    int64_t out_stride) {
  rows_in_tiles<false>(x, rows, count, panel, panel_stride, out, out_stride);
}

template <>
inline __attribute__((always_inline)) void panel_rows<Factors<BFloat16>, true>(
    const Factor<BFloat16>& x, int64_t rows, int64_t count, const float* panel, int64_t panel_stride, float* out,
    int64_t out_stride) {
  rows_in_tiles<true>(x, rows, count, panel, panel_stride, out, out_stride);
}
#endif

// A sum of products with a weight runs over the places of its columns in four chains, of places 0, 4, 8, ..., and so on;
// then they add up. So it can be made with a weight's columns in lanes, and with rows of x in lanes.
constexpr int QUADS = LANES / 4;

template <int D, int... L>
INLINE Lanes swapped(Lanes v, std::integer_sequence<int, L...>) {
  return SHUFFLE(v, v, (L ^ D)...);
}

// out[r][o] of R rows and QUADS rows of a weight, which lie where `from` says: a vector has the four chains of each.
template <typename F, int R>
static void quad_products(
    const typename F::X* x, int64_t x_stride, const typename F::W* const* from, int64_t width, float* out) {
  constexpr int64_t TAKEN = F::STEP / LANES, AHEAD = 1024 / sizeof(typename F::W);
  constexpr std::make_integer_sequence<int, LANES> all;
  Lanes sum[R] = {};
  auto step = [&](int64_t k, int64_t count) {
    Lanes v[QUADS];
#pragma GCC unroll 4
    for (int i = 0; i < QUADS; ++i) {
      v[i] = (Lanes)F::of(from[i] + k, count);
      __builtin_prefetch(from[i] + k + AHEAD);
    }
    transposed<4>(v);
#pragma GCC unroll 4
    for (int q = 0; q < QUADS; ++q)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        F::add(F::in_quads(x + r * x_stride + k + 4 * q * TAKEN), (typename F::Vector)v[q], sum[r]);
  };
  int64_t k = 0;
  for (; k + F::STEP <= width; k += F::STEP) step(k, F::STEP);
  if (k < width) step(k, width - k);
  for (int r = 0; r < R; ++r) {
    const Lanes s = sum[r], all_four = ((s + swapped<1>(s, all)) + swapped<2>(s, all)) + swapped<3>(s, all);
    store(out + r * QUADS, spread<4>(all_four, all), QUADS);
  }
}

constexpr int64_t FEW_ROWS = 8;  // that take a weight as it lies

// out[r][o] of so few rows, which read QUADS places of a weight far apart: processors fetch ahead by page.
template <typename F>
INLINE void few_products(
    const typename F::X* x, int64_t rows, const typename F::W* weight, int64_t weight_stride, int64_t width,
    int64_t outputs, float* out, int64_t out_stride) {
  const int64_t stride = stride_of<F>(width), apart = (outputs + QUADS - 1) / QUADS;
  for (int64_t first = 0; first < apart; ++first) {
    const typename F::W* from[QUADS];
    float sums[FEW_ROWS * QUADS];
    for (int i = 0; i < QUADS; ++i) from[i] = weight + std::min(first + i * apart, outputs - 1) * weight_stride;
    int64_t row = 0;
    auto take = [&](auto products, int64_t some) {
      for (; row + some <= rows; row += some) products(x + row * stride, stride, from, width, sums + row * QUADS);
    };
    take(quad_products<F, 8>, 8);
    take(quad_products<F, 4>, 4);
    take(quad_products<F, 2>, 2);
    take(quad_products<F, 1>, 1);
    for (row = 0; row < rows; ++row)
      for (int i = 0; i < QUADS; ++i)
        if (first + i * apart < outputs) out[row * out_stride + first + i * apart] = sums[row * QUADS + i];
  }
}

// Rows of a weight that come next, so many bytes apart, or none: a processor does not foresee them.
struct Next {
  const char* row;
  int64_t stride;
};

// sums[o][v] = w[o] . row v of a panel of x, of V vectors of rows. O rows of a weight are multiplied as they lie, a chain
// at a time, while so many of the next are fetched.
template <typename F, int O, int V>
static void lane_products(
    const typename F::X* w, int64_t stride, int64_t width, const float* panel, float* sums, int64_t sums_stride,
    const Next& next) {
  constexpr int64_t TAKEN = F::STEP / LANES, LINE = 64 / sizeof(float);
  for (int64_t chain = 0; chain < 4; ++chain) {
    Lanes sum[O][V] = {};
    auto step = [&](const typename F::X* at, int64_t apart, int64_t place) {
      typename F::Vector x[V];
      for (int v = 0; v < V; ++v) x[v] = (typename F::Vector)load(panel + place * PANEL + v * LANES);
#pragma GCC unroll 24
      for (int o = 0; o < O; ++o) {
        const auto a = F::everywhere(at + o * apart);
        for (int v = 0; v < V; ++v) F::add(a, x[v], sum[o][v]);
      }
    };
    int64_t place = chain;
    for (; (place + 1) * TAKEN <= width; place += 4) {
      for (int64_t row = place % LINE; next.row && row < O; row += LINE)
        __builtin_prefetch(next.row + row * next.stride + place / LINE * 64, 0, 2);
      step(w + place * TAKEN, stride, place);
    }
    if (place * TAKEN < width) {  // the first of a pair
      typename F::X last[O][TAKEN] = {};
      for (int o = 0; o < O; ++o) last[o][0] = w[o * stride + place * TAKEN];
      step(last[0], TAKEN, place);
    }
    for (int o = 0; o < O; ++o)
      for (int v = 0; v < V; ++v) {
        float* to = sums + o * sums_stride + v * LANES;
        store(to, chain ? load(to) + sum[o][v] : sum[o][v]);
      }
  }
}

// The same of `count` rows of a weight.
template <typename F, int V>
static void lane_rows(
    const typename F::X* w, int64_t stride, int64_t count, int64_t width, const float* panel, float* sums,
    int64_t sums_stride, Next next) {
  constexpr int MOST = LANES == 16 ? 12 : 6, REST = PANEL % MOST;  // whose sums registers hold
  int64_t o = 0;
  auto take = [&](auto products, int64_t taken) {
    products(w + o * stride, stride, width, panel, sums + o * sums_stride, sums_stride, next);
    o += taken;
    if (next.row) next.row += taken * next.stride;
  };
  while (o + MOST <= count) take(lane_products<F, MOST, V>, MOST);
  while (o + REST <= count) take(lane_products<F, REST, V>, REST);
  while (o < count) take(lane_products<F, 1, V>, 1);
}

// At most PANEL rows of a weight, as they lie or, if they share sets of the cache or are widened, closer in `room`.
template <typename F>
struct WeightRows {
  typedef typename F::X X;
  static constexpr bool AS_THEY_LIE = std::is_same_v<typename F::W, X>;
  const X* rows;
  int64_t stride, count;

  static int64_t room(int64_t width) { return PANEL * (padded(width) + LANES); }  // floats

  WeightRows(const typename F::W* from, int64_t from_stride, int64_t count, int64_t width, float* room)
      : rows((const X*)from), stride(from_stride), count(count) {
    if (AS_THEY_LIE && from_stride * sizeof *from % 2048) return;
    X* apart = (X*)room;
    stride = padded(width) + LANES;
    for (int64_t o = 0; o < count; ++o) {
      if constexpr (AS_THEY_LIE) std::memcpy(apart + o * stride, from + o * from_stride, width * sizeof *from);
      else copied(from + o * from_stride, width, apart + o * stride);
    }
    rows = apart;
  }
};

// Rows of x as `products_of` takes them: padded, and where they are not few in panels, whose lanes are rows.
template <typename F>
struct Rows {
  const typename F::X* x;
  const float* panels;
  int64_t rows, width;

  static int64_t a_panel(int64_t width) { return stride_of<F>(width) / (F::STEP / LANES) * PANEL; }
  static int64_t floats(int64_t rows, int64_t width) { return (rows + PANEL - 1) / PANEL * a_panel(width); }
  static int64_t room(int64_t width) { return PANEL * PANEL + WeightRows<F>::room(width); }  // floats

  static void pack(const typename F::X* x, int64_t stride, int64_t rows, int64_t width, float* panels) {
    typedef std::conditional_t<std::is_same_v<typename F::X, float>, Widened<float>, F> G;
    for (int64_t row = 0; row < rows; row += PANEL, panels += a_panel(width))
      packed<G>([=](int64_t i) { return x + (row + i) * stride; }, rows - row, width, panels);
  }
};

// out[r][o] of at most PANEL rows from `row` and rows of a weight, while the next are fetched; room[PANEL * PANEL].
template <typename F>
INLINE void block_products(
    const Rows<F>& of, int64_t row, const WeightRows<F>& w, const Next& next, float* out, int64_t out_stride,
    float* room) {
  const int64_t n = std::min(of.rows - row, PANEL);
  const float* panel = of.panels + row / PANEL * Rows<F>::a_panel(of.width);
  (n > LANES ? lane_rows<F, 2> : lane_rows<F, 1>)(w.rows, w.stride, w.count, of.width, panel, room, PANEL, next);
  for (int64_t r = 0; r < n; r += LANES)
    for (int64_t o = 0; o < w.count; o += LANES) {
      Lanes v[LANES];
      for (int i = 0; i < LANES; ++i) v[i] = load(room + (o + i) * PANEL + r);
      transposed(v);
      for (int i = 0; i < LANES && r + i < n; ++i) {
        float* to = out + (r + i) * out_stride + o;
        if (w.count - o >= LANES) store(to, v[i]);
        else store(to, v[i], w.count - o);
      }
    }
}

// out[r][o] = x[r] . row o of a weight, each sum in the same order whatever the number of rows.
template <typename F>
INLINE void products_of(
    const Rows<F>& of, const typename F::W* weight, int64_t weight_stride, int64_t outputs, float* out,
    int64_t out_stride, float* room, const typename F::W* next = nullptr) {
  if (of.rows <= FEW_ROWS)
    return few_products<F>(of.x, of.rows, weight, weight_stride, of.width, outputs, out, out_stride);
  for (int64_t first = 0; first < outputs; first += PANEL) {
    const typename F::W* from = weight + first * weight_stride;
    const typename F::W* then = first + PANEL < outputs ? from + PANEL * weight_stride : next;
    const WeightRows<F> w(from, weight_stride, std::min(PANEL, outputs - first), of.width, room + PANEL * PANEL);
    for (int64_t row = 0; row < of.rows; row += PANEL) {
      const Next ahead = {row ? nullptr : (const char*)then, weight_stride * (int64_t)sizeof *from};
      block_products<F>(of, row, w, ahead, out + row * out_stride + first, out_stride, room);
    }
  }
}

// Outputs of a weight of which a thread takes whole numbers.
template <typename F>
constexpr int64_t OUTPUTS = IN_TILES<F> ? 32 : TILE;

// To x[width] what is given of a bias and a residual.
template <typename B, typename R>
INLINE void add(const B* bias, const R* residual, int64_t width, float* x) {
  for (int64_t i = 0; i < width && (bias || residual); i += LANES) {
    const int64_t n = width - i < LANES ? width - i : LANES;
    Lanes y = some(x + i, n);
    if (bias) y += some(bias + i, n);
    if (residual) y += some(residual + i, n);
    if (n == LANES) store(x + i, y);
    else store(x + i, y, n);
  }
}

// What a linear layer makes of its sums, and where: with a bias and a residual, or gated by `inner` columns. A gate's are
// rounded first, as if they had been written.
template <typename T>
struct Epilogue {
  const T *bias, *residual;
  int64_t residual_stride, inner;
  T* out;
  int64_t out_stride;

  void operator()(
      int64_t row, int64_t rows, int64_t at, int64_t count, float* sums, float* up, int64_t stride) const {
    const T* none = nullptr;
    for (const int64_t last = row + rows; row < last; ++row, sums += stride, up += stride) {
      T* to = out + row * out_stride + at;
      add(bias ? bias + at : bias, residual ? residual + row * residual_stride + at : none, count, sums);
      if (!inner) {
        copied(sums, count, to);
        continue;
      }
      add(bias ? bias + inner + at : bias, none, count, up);
      gated<(sizeof(T) < sizeof *up)>(sums, up, count, to);
    }
  }
};

template <typename T>
static int skinny_linear(
    const T* x, int64_t x_stride, const T* weight, int64_t weight_stride, const T* bias, const T* norm_weight,
    float eps, const T* residual, int64_t residual_stride, T* out, int64_t out_stride, int64_t rows, int64_t width,
    int64_t outputs, int swiglu, int threads) {
  typedef Factors<T> F;
  if (!rows) return 0;
  const int64_t stride = stride_of<F>(width), inner = swiglu ? outputs / 2 : 0, columns = swiglu ? inner : outputs;
  constexpr int64_t CACHE = 1 << 20;  // elements of rows that meet a panel
  const int64_t most = std::max<int64_t>(96, CACHE / stride), blocks = (rows + most - 1) / most;
  const bool few = rows <= FEW_ROWS;  // whose outputs a thread makes all at once
  const int64_t taken = few ? rows : in_panels((rows + blocks - 1) / blocks);
  const int64_t step = few ? (columns / threads + OUTPUTS<F>) / OUTPUTS<F> * OUTPUTS<F> : PANEL;
  const int64_t block = (few ? rows : PANEL) * step, closer = WeightRows<F>::room(width);
  const int64_t floats = Rows<F>::floats(taken, width), owned = padded(2 * block + PANEL * PANEL + 2 * closer);
  const Scratch scratch(padded(taken * stride) + floats + threads * owned);
  float* memory = scratch.data();
  if (!memory) return OUT_OF_MEMORY;
  float* panels = memory + threads * owned;
  auto input = (typename F::X*)(panels + floats);
  const Epilogue<T> put = {bias, residual, residual_stride, inner, out, out_stride};
  for (int64_t first = 0; first < rows; first += taken) {
    const int64_t n = std::min(rows - first, taken);
    const Rows<F> of = {input, panels, n, width};
    share(n, PANEL, (int)std::min<int64_t>(threads, in_panels(n) / PANEL), [=](int64_t row, int64_t stop) {
      const T* from = x + (first + row) * x_stride;
      float* to = panels + Rows<F>::floats(row, width);
      if constexpr (std::is_same_v<T, typename F::X>)
        if (!few && !norm_weight) return Rows<F>::pack(from, x_stride, stop - row, width, to);
      padded_rows<F>(from, x_stride, norm_weight, eps, stop - row, width, input + row * stride);
      if (!few) Rows<F>::pack(input + row * stride, stride, stop - row, width, to);
    });
    share(columns, few ? OUTPUTS<F> : PANEL, threads, [=](int64_t at, int64_t stop) {
      float *low = memory + (threads > 1 ? part() : 0) * owned, *high = low + block, *room = high + block;
      float* closer_rows = room + PANEL * PANEL;
      for (; at < stop; at += step) {
        const int64_t count = std::min(step, stop - at);
        const T *w = weight + at * weight_stride, *up = w + inner * weight_stride;
        if (few) {
          few_products<F>(input, n, w, weight_stride, width, count, low, step);
          if (swiglu) few_products<F>(input, n, up, weight_stride, width, count, high, step);
          put(first, n, at, count, low, high, step);
          continue;
        }
        const WeightRows<F> of_low(w, weight_stride, count, width, closer_rows);
        const WeightRows<F> of_high(up, weight_stride, swiglu ? count : 0, width, closer_rows + closer);
        for (int64_t row = 0; row < n; row += PANEL) {
          const T* then = w + step * weight_stride;
          auto ahead = [=](const T* from) {
            return Next{row ? nullptr : (const char*)from, weight_stride * (int64_t)sizeof *from};
          };
          block_products<F>(of, row, of_low, ahead(swiglu ? up : then), low, PANEL, room);
          if (swiglu) block_products<F>(of, row, of_high, ahead(then), high, PANEL, room);
          put(first + row, std::min(n - row, PANEL), at, count, low, high, PANEL);
        }
      }
    });
  }
  return 0;
}

#ifdef TILES
// skinny_linear of any number of rows, by tiles: as many at a time as lie in a cache while the weight is read.
template <>
int skinny_linear(
    const BFloat16* x, int64_t x_stride, const BFloat16* weight, int64_t weight_stride, const BFloat16* bias,
    const BFloat16* norm_weight, float eps, const BFloat16* residual, int64_t residual_stride, BFloat16* out,
    int64_t out_stride, int64_t rows, int64_t width, int64_t outputs, int swiglu, int threads) {
  typedef Factors<BFloat16> F;
  constexpr int64_t CACHE = 1 << 20;  // bytes
  const int64_t stride = stride_of<F>(width), inner = swiglu ? outputs / 2 : 0, columns = swiglu ? inner : outputs;
  const int64_t most = std::min((rows + PANEL - 1) / PANEL, std::max<int64_t>(1, CACHE / (2 * stride * PANEL))) * PANEL;
  const int64_t room = most * stride / 2, owned = norm_weight ? PANEL * stride / 2 : 0;
  const Scratch scratch(room + threads * owned);
  float* panels = scratch.data();
  if (!panels) return OUT_OF_MEMORY;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t taken = std::min(most, rows - first);
    const int packers = (int)std::min<int64_t>(threads, taken / PANEL);
    share((taken + PANEL - 1) / PANEL, 1, packers, [=](int64_t panel, int64_t last) {
      auto normed_rows = (BFloat16*)(panels + room + (packers > 1 ? part() : 0) * owned);
      for (; panel < last; ++panel) {
        const int64_t some = std::min(PANEL, taken - panel * PANEL);
        const BFloat16* from = x + (first + panel * PANEL) * x_stride;
        if (norm_weight) padded_rows<F>(from, x_stride, norm_weight, eps, some, width, normed_rows);
        packed<F>([=](int64_t i) { return norm_weight ? normed_rows + i * stride : from + i * x_stride; }, some, width,
                  panels + panel * PANEL * stride / 2);
      }
    });
    share(columns, swiglu ? 16 : OUTPUTS<F>, threads, [=](int64_t begin, int64_t end) {
      const Registers registers;
      const Epilogue<BFloat16> finish = {bias, residual, residual_stride, inner, out, out_stride};
      auto put = [=](int64_t row, int64_t some, int64_t at, int64_t count, float* block) {
        finish(first + row, some, at, count, block, block + 16, PANEL);
      };
      tile_outputs(panels, taken, weight, weight_stride, width, begin, end, inner, put);
    });
  }
  return 0;
}
#endif

constexpr int64_t KEYS = 256;                  // keys that a block of rows takes at a time
constexpr int64_t KEY_STRIDE = KEYS + LANES;   // of rows of scores: not of one set of the cache
constexpr int64_t MOST_SPARE = 16;             // query heads that fill a panel's last rows
constexpr int64_t QUERIES = 384;               // query heads of a block's rows, whose scores stay in a cache
constexpr int64_t FEWEST = 48;                 // of them, for which keys are worth packing

// Keys whose products with values are made together.
template <typename F>
constexpr int64_t TOGETHER = IN_TILES<F> ? 32 : LANES;

template <typename F>
INLINE int64_t whole(int64_t keys) { return (keys + TOGETHER<F> - 1) / TOGETHER<F> * TOGETHER<F>; }

template <typename F>
constexpr int64_t value_panel() { return KEYS * LANES / F::STEP * PANEL; }  // floats of PANEL columns of KEYS values

INLINE Lanes pairs(Lanes low, Lanes high) {  // of numbers of 16 bits, one below the other in the registers of tiles
  return (Lanes)(((Ints)low >> 16 & 0xffff) | (Ints)high);
}

// Values at(begin) to at(count) as panels of PANEL columns; what is not finite is 0 in them. Whether all is.
template <typename F, typename At>
INLINE bool packed_values(const At& at, int64_t begin, int64_t count, int64_t width, float* panel) {
  constexpr int64_t TAKEN = F::STEP / LANES;
  Lanes strange = {};
  auto finite = [&](int64_t j, int64_t e) {
    if (j >= count) return Lanes{};
    Lanes v = some(at(j) + e, width - e < LANES ? width - e : LANES), none = v - v;
    strange += none;
    return none == 0 ? v : Lanes{};
  };
  for (int64_t j = begin; j < (IN_TILES<F> ? whole<F>(count) : count); j += TAKEN)
    for (int64_t e = 0; e < width; e += LANES) {
      Lanes v = finite(j, e);
      if (TAKEN == 2) v = pairs(v, finite(j + 1, e));
      store(panel + e / PANEL * value_panel<F>() + j / TAKEN * PANEL + e % PANEL, v);
    }
  float sum = 0;
  for (int i = 0; i < LANES; ++i) sum += strange[i];
  return sum == 0;
}

// Rows at(0) to at(count), or zeros where it is null, as panels of PANEL columns `apart` floats apart: pairs of rows.
template <typename At>
INLINE void pair_panels(const At& at, int64_t count, int64_t width, int64_t apart, float* panels) {
  auto read = [&](int64_t j, int64_t e) {
    const BFloat16* from = j < count ? at(j) : nullptr;
    return from ? some(from + e, std::min<int64_t>(LANES, width - e)) : Lanes{};
  };
  for (int64_t j = 0; j < count; j += 2)
    for (int64_t e = 0; e < width; e += LANES)
      store(panels + e / PANEL * apart + j / 2 * PANEL + e % PANEL, pairs(read(j, e), read(j + 1, e)));
}

struct Span {
  int64_t low, high;
};

// The keys that each query head of a block's rows sees, from head `first` on: all `repeat` of a row the same, and those
// that fill a panel's last rows none.
struct Spans {
  const Span* of;
  int64_t repeat, first;

  const Span& operator[](int64_t r) const { return of[(first + r) / repeat]; }
  Spans from(int64_t r) const { return {of, repeat, first + r}; }

  Span rows(int64_t count, int64_t low, int64_t high) const {  // outside which none of `count` sees keys low to high
    auto none = [&](int64_t r) { return (*this)[r].low >= high || (*this)[r].high <= low; };
    int64_t from = 0, to = count;
    while (from < to && none(from)) ++from;
    while (from < to && none(to - 1)) --to;
    return {from, to};
  }
};

// score[r][j] = x[r] . keys(j) from `begin` on, only where row r sees a key near j. `few`: x, in panels for tiles, for
// which keys are multiplied as they lie; or null.
template <typename F, typename At>
INLINE void key_products(
    const typename F::X* x, int64_t stride, int64_t rows, const At& keys, int64_t begin, int64_t count, int64_t width,
    const typename F::X* few, const Spans& seen, float* panel, float* score) {
  if constexpr (!IN_TILES<F>)
    if (few) return tiled<F>(few, rows, keys(0), keys.step(0, count), width, 0, count, score, KEY_STRIDE);
  for (int64_t j = begin; j < count; j += PANEL) {
    auto [from, to] = seen.rows(rows, j, j + PANEL);
    if (from == to) continue;
    if constexpr (IN_TILES<F>) {
      const int64_t some = std::min(PANEL, count - j), step = few ? keys.step(j, some) : 0;
      if (step) {
        products_in_tiles((const float*)few, rows, keys(j), step, width, 0, some, score + j, KEY_STRIDE);
        continue;
      }
    }
    from = from / FEW<F> * FEW<F>, to = std::min(rows, in_fews<F>(to));
    packed<F>([&](int64_t i) { return keys(j + i); }, count - j, width, panel);
    panel_rows<F, false>({x + from * stride, stride, 1}, to - from, stride, panel, PANEL, score + from * KEY_STRIDE + j,
                         KEY_STRIDE);
  }
}

// To out[r] the sum over the keys that row r sees, from `begin` on, of p[r][j] values(j), in panels.
template <typename F>
INLINE void value_products(
    const typename F::X* p, int64_t stride, int64_t rows, const Spans& seen, int64_t begin, int64_t width,
    const float* panel, float* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; r += PANEL_ROWS<F>) {
    const int64_t some = std::min<int64_t>(PANEL_ROWS<F>, rows - r);
    int64_t low = KEYS, high = 0;
    for (int64_t i = r; i < r + some; ++i) low = std::min(low, seen[i].low), high = std::max(high, seen[i].high);
    low = std::max(begin, low / TOGETHER<F> * TOGETHER<F>);
    for (int64_t e = 0; e < width && low < high; e += PANEL)
      panel_rows<F, true>({p + r * stride + low, stride, 1}, some, high - low,
                          panel + e / PANEL * value_panel<F>() + low * LANES / F::STEP * PANEL, PANEL,
                          out + r * out_stride + e, out_stride);
  }
}

template <typename T>
INLINE bool all_finite(const T* x, int64_t width) {
  Lanes sum = {};
  for (int64_t e = 0; e < width; e += LANES) sum += some(x + e, width - e < LANES ? width - e : LANES) * 0.0f;
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += sum[i];
  return total == 0;
}

// A row's scores, but for a factor, from its products, in place, in the whole lanes from `begin` on that hold what it
// sees; -inf around that. Returns the factor.
INLINE float scored(float* score, const Span& seen, int64_t begin, const Scoring& how) {
  const int64_t end = padded(seen.high);
  if (how.softcap != 0)
    for (int64_t i = begin; i < end; i += LANES)
      store(score + i, tangent(load(score + i) * how.scale / how.softcap) * how.softcap);
  for (int64_t i = begin; i < seen.low; ++i) score[i] = -INFINITY;
  for (int64_t i = seen.high; i < end; ++i) score[i] = -INFINITY;
  return how.softcap != 0 ? 1.0f : how.scale;
}

constexpr int MULTIPLY = 1, WEIGH = 2, GATHER = 4, ALL_STEPS = 7;  // products with keys, softmax, products with values

// Keys of the prefix, then of a branch: `own` of them from row `own_at` on. The steps are for those from `begin` on.
struct Piece {
  int64_t at, shared, own_at, own, begin;
  int steps;
};

// One after another: the first `count`, then others; nobody sees one before `low`.
template <typename T>
struct Joined {
  Keys<T> first, then;
  int64_t count, low;
  const T* operator()(int64_t j) const {
    j = std::max(j, low);
    return j < count ? first(j) : then(j - count);
  }
  int64_t step(int64_t j, int64_t n) const {
    if (j < low) return 0;
    return j + n <= count ? first.step(j, n) : j < count ? 0 : then.step(j - count, n);
  }
};

// Rows of a block of one key head: queries, and of the keys so far the largest score, sum exp(s - top) and sum
// exp(s - top) value.
template <typename F>
struct Attended {
  typedef typename F::X X;
  X* query;
  const X* few = nullptr;
  float *sum, *top, *total, *score, *key_panel, *panel;
  int64_t width, stride, sum_stride, taken = 0;

  static int64_t floats(int64_t rows, int64_t width) {
    const int64_t panels = (width + PANEL - 1) / PANEL;
    return padded(panels * value_panel<F>() + stride_of<F>(width) * PANEL +
                  rows * (KEY_STRIDE + panels * PANEL + stride_of<F>(width) + 2));
  }

  Attended(float* memory, int64_t rows, int64_t width) : width(width), stride(stride_of<F>(width)) {
    sum_stride = in_panels(width);
    panel = memory;
    key_panel = panel + sum_stride / PANEL * value_panel<F>();
    score = key_panel + stride * PANEL;
    sum = score + rows * KEY_STRIDE;
    query = (X*)(sum + rows * sum_stride);
    top = sum + rows * (sum_stride + stride);
    total = top + rows;
  }

  void begin(const Block<const typename F::W>& from, int64_t rows) {
    taken = rows;
    for (int64_t r = 0; r < rows + FEW<F> - 1; ++r) {  // those that fill a panel's last rows are 0
      if (r < rows) {
        copied(from[r], width, query + r * stride);
        pad<F>(query + r * stride, width);
      } else {
        std::memset(query + r * stride, 0, stride * sizeof *query);
      }
      std::memset(sum + r * sum_stride, 0, sum_stride * sizeof *sum);
      top[r] = -INFINITY;
      total[r] = 0;
    }
    float* half = key_panel + stride / 2 * PANEL;  // is free: elements of a panel in tiles have 16 bits
    if (!IN_TILES<F>) return;
    few = rows <= PANEL ? (X*)half : nullptr;
    if (few) Rows<F>::pack(query, stride_of<F>(width), rows, width, half);
  }

  // Rows from `first` on meet keys and values of a piece; row first + r sees seen[r] of them. `lie`: keys as they lie.
  // Whether all values are finite.
  template <typename Keys, typename Values>
  bool meet(
      int64_t first, int64_t rows, const Keys& keys, const Values& values, const Piece& piece, bool lie,
      const Spans& seen, const Scoring& how) {
    const int64_t begin = piece.begin, count = piece.shared + piece.own;
    float* scores = score + first * KEY_STRIDE;
    const X* x = query + first * stride;
    const int64_t made = first + rows == taken ? in_fews<F>(rows) : rows;
    if (piece.steps & MULTIPLY) {
      const X* as_they_lie = IN_TILES<F> ? rows == taken ? few : nullptr : lie ? x : nullptr;
      key_products<F>(x, stride, as_they_lie ? rows : made, keys, begin, count, width, as_they_lie, seen, key_panel,
                      scores);
    }
    for (int64_t r = first; piece.steps & WEIGH && r < first + rows; ++r) {
      float* of = score + r * KEY_STRIDE;
      const Span& own = seen[r - first];
      const int64_t begin = own.low / LANES * LANES, end = padded(own.high);
      const float factor = scored(of, own, begin, how), before = top[r];
      Lanes most = Lanes{} - INFINITY;
      for (int64_t i = begin; i < end; i += LANES) {
        Lanes s = load(of + i);
        most = s > most ? s : most;
      }
      top[r] = std::max(before, largest(most) * factor);
      const float shift = top[r] == -INFINITY ? 0 : top[r];
      const float kept = before == top[r] ? 1 : before == -INFINITY ? 0 : std::exp(before - shift);
      Lanes added = {};
      auto p = (X*)of;
      for (int64_t i = 0; i < begin; i += LANES) F::put(p + i, Lanes{});
      for (int64_t i = begin; i < end; i += LANES) {
        Lanes e = probability(load(of + i) * factor - shift);
        F::put(p + i, e);
        added += e;
      }
      for (int64_t i = end; i < whole<F>(count); i += LANES) F::put(p + i, Lanes{});
      Quad four = quarter(added);
      total[r] = total[r] * kept + ((four[0] + four[1]) + (four[2] + four[3]));
      if (kept != 1 && before != -INFINITY)
        for (int64_t e = 0; e < width; e += LANES)
          store(sum + r * sum_stride + e, load(sum + r * sum_stride + e) * kept);
    }
    if (!(piece.steps & GATHER)) return true;
    const bool finite = packed_values<F>(values, begin, count, width, panel);
    value_products<F>((X*)scores, KEY_STRIDE * sizeof(float) / sizeof(X), made, seen, begin, width, panel,
                      sum + first * sum_stride, sum_stride);
    return finite;
  }
};

// The keys that a block of a group's rows sees, in pieces that are the same in every block: of the prefix, then of each
// branch; if how.whole, in pieces of the sequence of both, wherever the prefix ends, so that its sums are the same. Of the one
// that it ends in, all rows multiply with the whole tiles of keys before that end, then each branch with the rest; once
// weighed, they gather the values in that order.
// meet(piece, from, to, few, seen): rows `from` to `to` meet these keys, `few` where their branch is short, of which
// seen[0] and so on say what their query heads see.
template <typename Meet>
INLINE void each_piece(
    const Layout& layout, const Scoring& how, bool own, int64_t g, int64_t first, int64_t stop, int64_t repeat,
    const Meet& meet) {
  const int64_t length = layout.length[g];
  int64_t began[QUERIES], least = 0, b = layout.branch_of(first);  // each row's branch; the first key that one sees
  for (int64_t row = first, at = b; row < stop; ++row) {
    while (layout.branch[at + 1] <= row) ++at;
    began[row - first] = layout.branch[at];
    const int64_t low = length + row - layout.branch[at] + 1 - how.window;
    least = row == first ? low : std::min(least, low);
  }
  Span of[QUERIES + MOST_SPARE];
  const Spans seen = {of, repeat, 0};
  // Rows `from` to `to` see of `count` keys those up to stop(row), and of these the window's.
  auto see = [&](int64_t from, int64_t to, int64_t count, const auto& stop) {
    for (int64_t row = from; row < to; ++row) {
      const int64_t end = std::max<int64_t>(0, stop(row));
      auto within = [&](int64_t key) { return std::min(count, std::max<int64_t>(0, key)); };
      of[row - from] = {within(end - how.window), within(end)};
    }
    std::fill_n(of + (to - from), MOST_SPARE, Span{KEYS, 0});
  };
  const int64_t left = how.whole && own ? length % KEYS : 0, ends = length - left;  // that many with the branch's own
  const int64_t common = left / PANEL * PANEL;
  for (int64_t at = std::max<int64_t>(0, least) / KEYS * KEYS; at < ends; at += KEYS) {
    const int64_t count = std::min(KEYS, ends - at);
    see(first, stop, count, [&](int64_t row) { return length + row - began[row - first] + 1 - at; });
    meet(Piece{at, count, 0, 0, 0, ALL_STEPS}, first, stop, false, seen);
  }
  auto meet_own = [&](int64_t begin, int steps) {  // of branch b; by single steps its first keys alone
    const int64_t start = layout.branch[b], end = layout.branch[b + 1];
    const int64_t from = std::max(first, start), to = std::min(stop, end), of_all = left + to - start;
    const int64_t oldest = left + from + 1 - how.window - start, later = left ? KEYS : 0;
    const bool all = steps == ALL_STEPS;
    const int64_t last = from == to ? 0 : all ? of_all : 1;
    for (int64_t at = all ? std::max(later, oldest / KEYS * KEYS) : 0; at < last; at += KEYS) {
      const int64_t count = std::min(KEYS, of_all - at), shared = std::max<int64_t>(0, std::min(count, left - at));
      see(from, to, count, [&](int64_t row) { return left + row - start + 1 - at; });
      const Piece piece{ends + at, shared, start + at + shared - left, count - shared, begin, steps};
      meet(piece, from, to, end - start < PANEL, seen);
    }
  };
  auto for_branches = [&](const auto& work) {
    for (b = layout.branch_of(first); b < layout.branches && layout.branch[b] < stop; ++b) work();
  };
  for (int steps = MULTIPLY; left && steps <= GATHER; steps *= 4) {
    see(first, stop, common, [&](int64_t row) { return left + row - began[row - first] + 1; });
    if (common) meet(Piece{ends, common, 0, 0, 0, steps}, first, stop, false, seen);
    for_branches([&] { meet_own(common, steps == MULTIPLY ? MULTIPLY | WEIGH : GATHER); });
  }
  if (own) for_branches([&] { meet_own(0, ALL_STEPS); });
}

// The number of threads for so many pieces of so much work.
INLINE int sharing(int threads, int64_t pieces, int64_t products) {
  return (int)std::max<int64_t>(1, std::min<int64_t>({threads, pieces, products / SHARE}));
}

// Rows `first` to `stop` of a group meet the keys of head h that they see. `sound`: those that met nothing but finite
// numbers.
template <typename T>
INLINE void attend(
    Attended<Factors<T>>& of, const Heads<T>& q, const Heads<T>& k, const Heads<T>& v, const Heads<T>& prefix_k,
    const Heads<T>& prefix_v, const Layout& layout, const Scoring& how, int64_t h, int64_t g, int64_t first,
    int64_t stop, int64_t repeat, bool* sound) {
  const int64_t width = of.width;
  std::fill_n(sound, stop - first, true);
  of.begin(q.queries(first, h, repeat), (stop - first) * repeat);
  const Keys<T> shared_k = layout.keys(prefix_k, g, h), shared_v = layout.keys(prefix_v, g, h);
  each_piece(layout, how, k.data, g, first, stop, repeat, [&](
      const Piece& piece, int64_t from, int64_t to, bool few, const Spans& seen) {
    const int64_t at = piece.own_at, count = piece.own, begin = (from - first) * repeat, n = (to - from) * repeat;
    const Keys<T> before_k = shared_k.from(piece.at), before_v = shared_v.from(piece.at);
    const Keys<T> own_k = count ? k.of(h).from(at) : before_k, own_v = count ? v.of(h).from(at) : before_v;
    bool strange = !count;
    if (how.whole) {
      int64_t low = piece.shared + count;
      for (int64_t row = 0; row < to - from; ++row) low = std::min(low, seen.of[row].low);
      Piece given = piece;
      if (low == piece.shared + count) given.steps &= ~GATHER;  // nobody sees any
      const Joined<T> keys{before_k, own_k, piece.shared, low}, values{before_v, own_v, piece.shared, low};
      if (of.meet(begin, n, keys, values, given, false, seen, how)) return;
      for (int64_t j = std::max(piece.begin, low); count && j < piece.shared; ++j)
        strange = strange || !all_finite(before_v(j), width);
    } else if (of.meet(begin, n, own_k, own_v, piece, few, seen, how)) {
      return;
    }
    for (int64_t row = count ? at : from; row < to; ++row) {
      strange = strange || (row < at + count && !all_finite(v.at(row, h), width));
      if (row >= from && strange) sound[row - first] = false;
    }
  });
  for (int64_t r = 0; r < (stop - first) * repeat; ++r) {
    const float total = of.total[r], inverse = total == 0 ? 0 : 1 / total;
    float* sum = of.sum + r * of.sum_stride;
    for (int64_t e = 0; e < width; e += LANES) store(sum + e, load(sum + e) * inverse);
    if (total - total != 0 || !all_finite(sum, width)) sound[r / repeat] = false;
  }
}

// Attention of branches of any length. `done`: rows that saw nothing but finite values.
template <typename T>
static int branch_attention(
    Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> prefix_k, Heads<T> prefix_v, const Layout& layout, Scoring how,
    T* out, float* lse, unsigned char* done, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width,
    int threads) {
  typedef Factors<T> F;
  how.whole = how.whole || IN_TILES<F>;
  if (rows) std::memset(done, 1, rows);
  if (!rows || !heads) return 0;
  const int64_t repeat = heads / kv_heads, fitting = std::max<int64_t>(1, QUERIES / repeat);
  const int64_t enough = (rows * kv_heads + 4 * threads - 1) / (4 * threads);  // rows of a block, four to a thread
  const int64_t most = std::min(fitting, std::max(enough, FEWEST / repeat + 1)), room = most * repeat + FEW<F>;
  const Blocks blocks(layout, kv_heads, most, how.window);
  threads = sharing(threads, blocks.count(), blocks.products(repeat * width));
  const int64_t floats = Attended<F>::floats(room, width);
  const Scratch scratch(threads * floats);
  float* memory = scratch.data();
  if (!memory) return OUT_OF_MEMORY;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
  for (int64_t i = 0; i < blocks.count(); ++i) {
    const auto [h, g, first, stop, pairs] = blocks.pieces[i];
    [[maybe_unused]] const Registers registers;
    bool sound[QUERIES];
    Attended<F> of(memory + (threads > 1 ? part() : 0) * floats, room, width);
    attend(of, q, k, v, prefix_k, prefix_v, layout, how, h, g, first, stop, repeat, sound);
    for (int64_t r = 0; r < (stop - first) * repeat; ++r) {
      const int64_t row = first + r / repeat, head = h * repeat + r % repeat;
      copied(of.sum + r * of.sum_stride, width, out + (row * heads + head) * width);
      lse[head * rows + row] = of.top[r] + std::log(of.total[r]);
      if (!sound[row - first]) {
#pragma omp atomic write
        done[row] = 0;
      }
    }
  }
  return 0;
}

// With p the probabilities: ds = p (grad . v - grad . out + dlse), where dlse may be null for zeros, and dq = scale ds k,
// dk = scale ds q and dv = p grad, summed over the rows that see a key; those of the prefix are added to what is there,
// in the order of the groups, unless they are null. `done`: rows of dq, then of dk and dv, that nothing but finite
// values reached.
template <typename T>
static int branch_attention_backward(
    Heads<T> grad, Heads<T> out, Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> prefix_k, Heads<T> prefix_v,
    const Layout& layout, const Scoring& how, const float* lse, const float* dlse, float* dq, float* dk, float* dv,
    float* dprefix_k, float* dprefix_v, unsigned char* done, int64_t rows, int64_t heads, int64_t kv_heads,
    int64_t width, int threads) {
  typedef std::conditional_t<IN_TILES<Factors<T>>, Factors<T>, Widened<T>> F;
  typedef typename F::X X;
  constexpr int64_t SCORE_STRIDE = KEY_STRIDE * sizeof(float) / sizeof(X);  // where scores have become X
  if (rows) std::memset(done, 1, 2 * rows);
  if (!rows || !heads) return 0;
  const int64_t repeat = heads / kv_heads, most = std::max<int64_t>(1, QUERIES / repeat), room = most * repeat + FEW<F>;
  const int64_t span = stride_of<F>(width), stride = in_panels(width);
  const int64_t panels = stride / PANEL * value_panel<F>(), high = IN_TILES<F> ? in_panels(room) : 0;
  const int64_t of_block = padded(room * (2 * span + stride + 2 * (KEY_STRIDE + 1)) + high * stride);
  const int64_t of_thread = padded(span * PANEL + panels + KEYS * stride + high / 2 * PANEL);
  const bool apart = !dprefix_k || !dprefix_v;  // then groups have no sum in common
  const int64_t pieces = kv_heads * (apart ? layout.groups : 1);
  const Blocks blocks(layout, kv_heads, most, how.window);
  threads = sharing(threads, layout.first(layout.groups), blocks.products(repeat * width));
  const bool together = threads > 1 && pieces < 4 * threads;  // threads share each block: all have enough to do
  const Scratch scratch(threads * (of_block + of_thread));
  float* memory = scratch.data();
  if (!memory) return OUT_OF_MEMORY;
  auto undo = [=](int64_t place) {
#pragma omp atomic write
    done[place] = 0;
  };
  auto wait = [=] {
    if (together) {
#pragma omp barrier
    }
  };
  auto block = [=, &layout, &how](int64_t h, int64_t g, int64_t first, int64_t stop) {
    const int64_t n = (stop - first) * repeat, thread = threads > 1 ? part() : 0;
    const int64_t me = together ? thread : 0, team = together ? parts() : 1;
    auto mine = [=](int64_t count) -> Span {  // of rows or keys, by panels
      const int64_t units = (count + PANEL_ROWS<F> - 1) / PANEL_ROWS<F>;
      return {units * me / team * PANEL_ROWS<F>, std::min(count, units * (me + 1) / team * PANEL_ROWS<F>)};
    };
    float* of_all = memory + (together ? 0 : thread) * of_block;
    X *query = (X*)of_all, *slope = query + room * span;
    float *sum = of_all + 2 * room * span, *score = sum + room * stride, *ds = score + room * KEY_STRIDE;
    float *log = ds + room * KEY_STRIDE, *delta = log + room;
    [[maybe_unused]] float *query_pairs = delta + room, *slope_pairs = query_pairs + high / 2 * stride;
    float* key_panel = memory + (together ? 1 : threads) * of_block + thread * of_thread;
    float *panel = key_panel + span * PANEL, *part = panel + panels;
    [[maybe_unused]] auto across = (X*)(part + KEYS * stride);  // [PANEL, high]
    const Block<const T> queries = q.queries(first, h, repeat), slopes = grad.queries(first, h, repeat);
    const Block<const T> outs = out.queries(first, h, repeat);
    const Span loaded = mine(n);
    for (int64_t r = loaded.low; r < loaded.high; ++r) {
      copied(queries[r], width, query + r * span);
      copied(slopes[r], width, slope + r * span);
      pad<F>(query + r * span, width);
      pad<F>(slope + r * span, width);
      std::memset(sum + r * stride, 0, stride * sizeof(float));
      const int64_t place = (h * repeat + r % repeat) * rows + first + r / repeat;
      log[r] = lse[place] == -INFINITY ? 0 : lse[place];
      delta[r] = (float)added(
          width, [&](int64_t e, int64_t m) { return some(outs[r] + e, m) * some(slopes[r] + e, m); });
      if (dlse) delta[r] -= dlse[place];
      if (!all_finite(query + r * span, width) || !all_finite(slope + r * span, width)) undo(first + r / repeat);
    }
    if constexpr (IN_TILES<F>)
      for (auto [x, pairs] : {std::pair(query, query_pairs), std::pair(slope, slope_pairs)})
        pair_panels([=, x = x](int64_t r) { return (r += loaded.low) < loaded.high ? x + r * span : nullptr; },
                    (loaded.high - loaded.low + PANEL - 1) / PANEL * PANEL, span, high / 2 * PANEL,
                    pairs + loaded.low / 2 * PANEL);
    // To each of `count` rows of `to`, as far as they are this thread's, sum_r p[r][j] x[r] of `taken` rows from `first`
    // on; x in tiles as pairs.
    auto collect = [&](const X* p, const auto* x, int64_t first, int64_t taken, int64_t count, const Spans& seen,
                       float* to) {
      const auto [begin, end] = mine(count);
      for (int64_t j = begin; j < end; j += PANEL_ROWS<F>) {
        const int64_t keys = std::min<int64_t>(PANEL_ROWS<F>, end - j);
        const auto [from, stop] = seen.rows(taken, j, j + keys);
        if constexpr (IN_TILES<F>) {
          const int64_t low = first + from, end = first + stop, begin = low / PANEL * PANEL;
          const int64_t places = from < stop ? (end - begin + PANEL - 1) / PANEL * PANEL : 0;
          for (int64_t r = 0; r < places; r += LANES)
            for (int64_t i = 0; i < PANEL; i += LANES) {
              Lanes v[LANES];
              for (int l = 0; l < LANES; ++l) {
                const int64_t row = begin + r + l;
                v[l] = row >= low && row < end ? load(p + row * SCORE_STRIDE + j + i) : Lanes{};
              }
              transposed(v);
              for (int l = 0; l < LANES; ++l) F::put(across + (i + l) * high + r, v[l]);
            }
          for (int64_t e = 0; e < width; e += PANEL)
            panel_rows<F, false>({across, high, 1}, PANEL, places, x + (e / PANEL * high + begin) / 2 * PANEL, PANEL,
                                 part + j * stride + e, stride);
        } else {
          const int64_t at = first + from;
          for (int64_t e = 0; e < width; e += PANEL)
            panel_rows<F, false>({p + at * KEY_STRIDE + j, 1, KEY_STRIDE}, keys, stop - from, x + at * span + e, span,
                                 part + j * stride + e, stride);
        }
      }
      for (int64_t j = begin; j < end; ++j)
        for (int64_t e = 0; e < width; e += LANES) {
          const int64_t m = width - e < LANES ? width - e : LANES;
          float* at = to + j * kv_heads * width + e;
          store(at, some(at, m) + load(part + j * stride + e), m);
        }
    };
    wait();
    each_piece(layout, how, k.data, g, first, stop, repeat, [&](
        const Piece& piece, int64_t from, int64_t to, bool few, const Spans& all) {
      const bool own = piece.own;
      const int64_t at = own ? piece.own_at : piece.at, count = own ? piece.own : piece.shared;
      const Keys<T> keys = (own ? k.of(h) : layout.keys(prefix_k, g, h)).from(at);
      const Keys<T> values = (own ? v.of(h) : layout.keys(prefix_v, g, h)).from(at);
      const int64_t begin = (from - first) * repeat, taken = (to - from) * repeat;
      const auto [low_row, high_row] = mine(taken);
      const int64_t start = begin + low_row, own_rows = high_row - low_row;
      const Spans seen = all.from(low_row);
      auto multiply = [&](const X* x, const Keys<T>& with, float* into) {
        x += start * span;
        key_products<F>(x, span, own_rows, with, 0, count, width, few && !IN_TILES<F> ? x : nullptr, seen, key_panel,
                        into + start * KEY_STRIDE);
      };
      multiply(query, keys, score);
      multiply(slope, values, ds);
      for (int64_t r = start; r < start + own_rows; ++r) {
        float *p = score + r * KEY_STRIDE, *d = ds + r * KEY_STRIDE;
        const auto [low, stop] = seen[r - start];
        for (int64_t i = low / LANES * LANES; i < stop; i += LANES) {
          Lanes s = load(p + i) * how.scale, slant = Lanes{} + how.scale;
          if (how.softcap != 0) {
            const Lanes t = tangent(s / how.softcap);
            s = t * how.softcap;
            slant *= 1.0f - t * t;
          }
          const Lanes e = probability(s - log[r]);
          F::put((X*)p + i, e);
          F::put((X*)d + i, e * (load(d + i) - delta[r]) * slant);
        }
        for (X* masked : {(X*)p, (X*)d}) {
          for (int64_t i = 0; i < low; ++i) masked[i] = X{};
          for (int64_t i = stop; i < (IN_TILES<F> ? whole<F>(count) : count); ++i) masked[i] = X{};
        }
      }
      bool finite = packed_values<F>(values, 0, count, width, panel);
      finite = packed_values<F>(keys, 0, count, width, panel) && finite;
      bool strange = !own;
      for (int64_t row = own ? at : from; row < to && !finite; ++row) {
        if (own && row < at + count) {
          strange = strange || !all_finite(k.at(row, h), width) || !all_finite(v.at(row, h), width);
          undo(rows + row);
        }
        if (row >= from && strange) undo(row);
      }
      value_products<F>((X*)(ds + start * KEY_STRIDE), SCORE_STRIDE, own_rows, seen, 0, width, panel,
                        sum + start * stride, stride);
      wait();
      const int64_t place = ((own ? at : layout.start[g] + at) * kv_heads + h) * width;
      auto gather = [&](const float* p, const auto* x, float* to) {
        if (to) collect((const X*)p, x, begin, taken, count, all, to + place);
      };
      if constexpr (IN_TILES<F>) {
        gather(ds, query_pairs, own ? dk : dprefix_k);
        gather(score, slope_pairs, own ? dv : dprefix_v);
      } else {
        gather(ds, query, own ? dk : dprefix_k);
        gather(score, slope, own ? dv : dprefix_v);
      }
      wait();
    });
    for (int64_t r = loaded.low; r < loaded.high; ++r) {
      copied(sum + r * stride, width, dq + ((first + r / repeat) * heads + h * repeat + r % repeat) * width);
      if (!all_finite(sum + r * stride, width)) undo(first + r / repeat);
    }
    wait();
  };
  auto work = [=, &layout](int64_t piece) {
    const int64_t h = apart ? piece / layout.groups : piece;
    int64_t g = apart ? piece % layout.groups : 0;
    for (const int64_t past = apart ? g + 1 : layout.groups; g < past; ++g) {
      const int64_t start = layout.first(g), end = layout.first(g + 1);
      for (int64_t row = start; row < end; row += most) block(h, g, row, std::min(end, row + most));
      for (int64_t row = start; row < end && k.data; ++row)
        for (const float* of : {dk, dv})
          if (!all_finite(of + (row * kv_heads + h) * width, width)) undo(rows + row);
    }
  };
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    [[maybe_unused]] const Registers registers;
    if (together) {
      for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
    } else {
#pragma omp for schedule(dynamic, 1)
      for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
    }
  }
  return 0;
}

// A head x[width], normed and rotated, to to[width].
template <typename X, typename T>
INLINE void turned(
    const X* x, const T* weight, float eps, const float* cos, const float* sin, int64_t width, float scale,
    float* buffer, float* to) {
  normed(x, weight, eps, width, buffer);
  int64_t half = width / 2;
  for (int64_t i = 0; i < half; ++i) {
    to[i] = (buffer[i] * cos[i] - buffer[i + half] * sin[i]) * scale;
    to[i + half] = (buffer[i + half] * cos[i + half] + buffer[i] * sin[i + half]) * scale;
  }
}

INLINE float softmax(float* score, int64_t count) {  // in place; returns the log of the sum
  for (int64_t i = count; i < padded(count); ++i) score[i] = -INFINITY;
  Lanes most = Lanes{} - INFINITY, total = {};
  for (int64_t i = 0; i < count; i += LANES) {
    Lanes s = load(score + i);
    most = s > most ? s : most;
  }
  float top = largest(most), sum = 0;
  for (int64_t i = 0; i < count; i += LANES) {
    Lanes p = exponential(load(score + i) - top);
    store(score + i, p);
    total += p;
  }
  for (int i = 0; i < LANES; ++i) sum += total[i];
  float inverse = 1.0f / sum;
  for (int64_t i = 0; i < count; i += LANES) store(score + i, load(score + i) * inverse);
  return top + std::log(sum);
}

// The columns from e on of sum_j p[r][j] shared[j] + p[r][count] own[r]: V vectors, or `tail` columns where given. It
// goes on from what is there, or ends with the own one, where so said.
template <int R, int V, typename T>
INLINE void weighted(
    const float* p, int64_t p_stride, const T* shared, int64_t stride, int64_t count, const float* const own[R],
    int64_t e, int64_t tail, float* const to[R], bool goes_on, bool ends) {
  Lanes acc[R][V] = {};
  for (int r = 0; r < R && goes_on; ++r)
    for (int i = 0; i < V; ++i) acc[r][i] = tail ? load(to[r] + e + i * LANES, tail) : load(to[r] + e + i * LANES);
  for (int64_t j = 0; j < count; ++j)
    for (int i = 0; i < V; ++i) {
      const T* from = shared + j * stride + e + i * LANES;
      Lanes value = tail ? load(from, tail) : load(from);
      for (int r = 0; r < R; ++r) acc[r][i] += p[r * p_stride + j] * value;
    }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < V; ++i) {
      const float* from = own[r] + e + i * LANES;
      if (ends) acc[r][i] += p[r * p_stride + count] * (tail ? load(from, tail) : load(from));
      std::memcpy(to[r] + e + i * LANES, &acc[r][i], tail ? tail * sizeof(float) : sizeof(Lanes));
    }
}

// Keys or values that a block sees: a stretch, the same for all, then each row's own.
template <typename T>
struct Seen {
  const T* shared;
  int64_t stride;
  Block<const float> own;
};

// out[r][j] = x[r] . seen[j] for `count` shared ones and, at j = count, the row's own; x is padded to whole lanes.
template <typename T>
INLINE void all_products(
    const float* x, int64_t rows, const Seen<T>& seen, int64_t count, int64_t width, float* out, int64_t out_stride) {
  tiled<Widened<T>>(x, rows, seen.shared, seen.stride, width, 0, count, out, out_stride);
  for (int64_t row = 0; row < rows; ++row)
    row_products<Widened<float>, 1>(x + row * padded(width), seen.own[row], 0, width, out + row * out_stride + count);
}

template <int R, typename T>
INLINE void some_weighted(
    const float* p, int64_t p_stride, int64_t first, const Seen<T>& seen, int64_t count, int64_t width,
    const Block<float>& out, bool goes_on, bool ends) {
  const float* own[R];
  float* to[R];
  for (int r = 0; r < R; ++r) own[r] = seen.own[first + r], to[r] = out[first + r];
  p += first * p_stride;
  int64_t e = 0;
  for (; e + 4 * LANES <= width; e += 4 * LANES)
    weighted<R, 4>(p, p_stride, seen.shared, seen.stride, count, own, e, 0, to, goes_on, ends);
  for (; e < width; e += LANES) {
    const int64_t tail = width - e < LANES ? width - e : 0;
    weighted<R, 1>(p, p_stride, seen.shared, seen.stride, count, own, e, tail, to, goes_on, ends);
  }
}

// out[r] = sum_j p[r][j] seen[j], the row's own at j = count; in parts, where it goes on, or does not end yet.
template <typename T>
INLINE void all_weighted(
    const float* p, int64_t p_stride, int64_t rows, const Seen<T>& seen, int64_t count, int64_t width,
    const Block<float>& out, bool goes_on = false, bool ends = true) {
  int64_t row = 0;
  for (; row + MANY <= rows; row += MANY)
    some_weighted<MANY>(p, p_stride, row, seen, count, width, out, goes_on, ends);
  for (; row + ROWS <= rows; row += ROWS)
    some_weighted<ROWS>(p, p_stride, row, seen, count, width, out, goes_on, ends);
  for (; row < rows; ++row) some_weighted<1>(p, p_stride, row, seen, count, width, out, goes_on, ends);
}

// Rows of a sequence whose heads that share a key head are taken together, where threads have enough to share.
template <typename T>
INLINE int64_t rows_together(const Sequences<T>& in, int threads) {
  const int64_t most = rows_at_once(in.heads / in.kv_heads), units = in.count * in.each * in.kv_heads;
  return std::max<int64_t>(1, std::min({in.each, most, units / (4 * threads)}));
}

template <typename T>
INLINE int64_t scratch_of(const Sequences<T>& in, int64_t rows) {  // floats, for so many rows together
  typedef Factors<T> F;
  const int64_t repeat = in.heads / in.kv_heads, stride = padded(in.width);
  auto in_lanes = [&](int64_t n) { return (1 + 2 * rows + 2 * n) * stride + n * padded(in.most_seen() + 1); };
  if (!IN_TILES<F> && !in.whole) return in_lanes(rows * repeat);
  const int64_t own = padded(2 * in.table_width) + (2 + rows * (repeat + 2)) * stride;
  return std::max(in_lanes(repeat), own + Attended<F>::floats(rows * repeat + FEW<F>, in.width));
}

// Of rows after one sequence the heads that share key head g: queries, keys and values, each at `stride`. The latter
// two also go to their slots.
template <typename X, typename T, typename To>
INLINE void own_heads(
    const X* qkv, int64_t qkv_stride, const T* q_weight, const T* k_weight, const Sequences<T>& in, int64_t row,
    int64_t rows, int64_t g, float scale, int64_t stride, float* buffer, To* query, To* key, To* value) {
  const int64_t width = in.width, group = in.heads / in.kv_heads;
  for (int64_t r = 0; r < rows; ++r, key += stride, value += stride) {
    const X* x = qkv + (row + r) * qkv_stride;
    const int64_t place = in.positions[row + r] * width;
    auto turn = [&](int64_t head, const T* weight, float scale, To* to) {
      float* made = buffer + padded(width);
      if constexpr (sizeof(To) == sizeof(float)) made = to;
      turned(x + head * width, weight, in.eps, in.cos + place, in.sin + place, width, scale, buffer, made);
      if constexpr (sizeof(To) == sizeof(float)) pad<Widened<T>>(to, width);
      else copied(made, width, to);
    };
    for (int64_t h = 0; h < group; ++h, query += stride) turn(g * group + h, q_weight, scale, query);
    turn(in.heads + g, k_weight, 1.0f, key);
    copied(x + (in.heads + in.kv_heads + g) * width, width, value);
    if (!in.slots.data || in.slots[row + r] < 0) continue;
    const int64_t page = in.slots[row + r] / in.page, slot = in.slots[row + r] % in.page;
    copied(key, width, in.k + page * in.k_page + slot * in.k_slot + g * in.k_head);
    copied(value, width, in.v + page * in.v_page + slot * in.v_slot + g * in.v_head);
  }
}

// Attention of heads that share key head g, for rows after one sequence, from their qkv to those heads of the output;
// buffer[scratch_of(in, rows)]. Many heads read a few keys at a time, while these are in the cache.
template <typename X, typename T, typename Out>
INLINE void attended_in_lanes(
    const X* qkv, int64_t qkv_stride, const T* q_weight, const T* k_weight, const Sequences<T>& in, int64_t row,
    int64_t rows, int64_t g, float* buffer, Out* out, int64_t out_stride) {
  const int64_t width = in.width, stride = padded(width), group = in.heads / in.kv_heads, n = rows * group;
  const int64_t s = row / in.each, first = in.first(s), count = in.seen(s), score_stride = padded(count + 1);
  const int64_t most = n > MANY ? FEW_KEYS : count;
  float *own_key = buffer + stride, *own_value = own_key + rows * stride, *query = own_value + rows * stride;
  float *sum = query + n * stride, *score = sum + n * stride;
  own_heads(qkv, qkv_stride, q_weight, k_weight, in, row, rows, g, in.scale, stride, buffer, query, own_key, own_value);
  for (int64_t done = 0; done < count;) {
    const Stretch at = in.stretch(s, first + done, most);
    const T* from = in.k + at.page * in.k_page + at.slot * in.k_slot + g * in.k_head;
    tiled<Widened<T>>(query, n, from, in.k_slot, width, 0, at.count, score + done, score_stride);
    done += at.count;
  }
  for (int64_t i = 0; i < n; ++i) {
    float* of = score + i * score_stride;
    row_products<Widened<float>, 1>(query + i * stride, own_key + i / group * stride, 0, width, of + count);
    softmax(of, count + 1);
  }
  int64_t done = 0;
  do {
    const Stretch at = in.stretch(s, first + done, most);
    const T* from = in.v + at.page * in.v_page + at.slot * in.v_slot + g * in.v_head;
    all_weighted<T>(score + done, score_stride, n, {from, in.v_slot, {own_value, stride, 0, group}}, at.count, width,
                    {sum, group * stride, stride, group}, done > 0, done + at.count == count);
    done += at.count;
  } while (done < count);
  for (int64_t i = 0; i < n; ++i)
    copied(sum + i * stride, width, out + (row + i / group) * out_stride + (g * group + i % group) * width);
}

// The same by the kernel of branch attention, where rows are branches behind what their sequence holds; by the one above
// for those that met what is not finite.
template <typename X, typename T, typename Out>
INLINE void attended_as_branches(
    const X* qkv, int64_t qkv_stride, const T* q_weight, const T* k_weight, const Sequences<T>& in, int64_t row,
    int64_t rows, int64_t g, float* buffer, Out* out, int64_t out_stride) {
  typedef Factors<T> F;
  const int64_t width = in.width, stride = padded(width), repeat = in.heads / in.kv_heads, n = rows * repeat;
  const int64_t s = row / in.each, held = in.held[s], start = 0, groups[2] = {0, rows};
  int64_t branches[BLOCK + 1], *pages = (int64_t*)buffer;
  float *turning = buffer + padded(2 * in.table_width), *own = turning + 2 * stride;
  T *query = (T*)own, *key = query + n * stride, *value = key + rows * stride;
  own_heads(qkv, qkv_stride, q_weight, k_weight, in, row, rows, g, 1.0f, stride, turning, query, key, value);
  for (int64_t r = 0; r <= rows; ++r) branches[r] = r;
  for (int64_t at = in.table.data ? in.first(s) / in.page : held; at * in.page < held; ++at)  // a flat cache may be empty
    pages[at] = in.page_at(s, at);
  const Layout layout = {branches, groups, &start, &held, rows, 1, in.table.data ? pages : nullptr, in.table_width,
                         in.pages, in.page};
  const Heads<T> held_k = {in.k + g * in.k_head, in.k_slot, 0, in.k_page};
  const Heads<T> held_v = {in.v + g * in.v_head, in.v_slot, 0, in.v_page};
  const Scoring how = {in.scale, 0, in.window ? in.window : INT64_MAX, true};
  bool sound[BLOCK] = {};
  Attended<F> of(own + (n + 2 * rows) * stride, n + FEW<F>, width);
  if (in.scale > 0)  // the largest score is found before they are scaled
    attend<T>(of, {query, repeat * stride, stride, 0}, {key, stride, 0, 0}, {value, stride, 0, 0}, held_k, held_v,
              layout, how, 0, 0, 0, rows, repeat, sound);
  for (int64_t i = 0; i < n && in.scale > 0; ++i) {
    Out* to = out + (row + i / repeat) * out_stride;
    copied(of.sum + i * of.sum_stride, width, to + (g * repeat + i % repeat) * width);
    if (of.total[i] == 0) sound[i / repeat] = false;
  }
  for (int64_t r = 0; r < rows; ++r)
    if (!sound[r])
      attended_in_lanes(qkv, qkv_stride, q_weight, k_weight, in, row + r, 1, g, buffer, out, out_stride);
}

template <typename X, typename T, typename... Rest>
INLINE void attended(
    const X* qkv, int64_t qkv_stride, const T* q_weight, const T* k_weight, const Sequences<T>& in,
    const Rest&... rest) {
  if (IN_TILES<Factors<T>> || in.whole) attended_as_branches(qkv, qkv_stride, q_weight, k_weight, in, rest...);
  else attended_in_lanes(qkv, qkv_stride, q_weight, k_weight, in, rest...);
}

// Calls work(row, rows, key head) for the share of thread `me`, divided by the keys seen; rows are of one sequence.
template <typename T, typename Work>
INLINE void share_heads(const Sequences<T>& in, int64_t together, int64_t me, int64_t threads, const Work& work) {
  int64_t total = 0, begun = 0;
  for (int64_t s = 0; s < in.count; ++s) total += in.each * in.kv_heads * (in.seen(s) + 1);
  for (int64_t s = 0; s < in.count; ++s)
    for (int64_t g = 0; g < in.kv_heads; ++g)
      for (int64_t row = 0; row < in.each; row += together) {
        const int64_t rows = std::min(together, in.each - row);
        if (begun * threads / total == me) work(s * in.each + row, rows, g);
        begun += rows * (in.seen(s) + 1);
      }
}

template <typename T>
static int branch_attention_qkv(
    const T* qkv, int64_t qkv_stride, const T* q_weight, const T* k_weight, const Sequences<T>& in, T* out,
    int threads) {
  if (!in.fit()) return OUT_OF_RANGE;
  int64_t keys = 0;  // of all rows
  for (int64_t s = 0; s < in.count; ++s) keys += in.each * in.seen(s);
  threads = (int)std::max<int64_t>(1, std::min<int64_t>(threads, 2 * keys * in.heads * in.width / SHARE));
  const int64_t together = rows_together(in, threads), owned = scratch_of(in, together);
  const Scratch scratch(threads * owned);
  float* memory = scratch.data();
  if (!memory) return OUT_OF_MEMORY;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    [[maybe_unused]] const Registers registers;
    share_heads(in, together, part(), parts(), [=, &in](int64_t row, int64_t rows, int64_t g) {
      attended(qkv, qkv_stride, q_weight, k_weight, in, row, rows, g, memory + part() * owned, out, in.heads * in.width);
    });
  }
  return 0;
}

// A layer in one parallel region: every thread computes the norms for itself and its share of each product, and waits
// for the others where the next step needs all of it. Sums have the same order as in the separate ops, and with tiles the
// same bits.
template <typename T>
static int decoder_layer(
    const T* hidden, int64_t hidden_stride, const LayerWeights<T>& w, const Sequences<T>& in, T* out, int64_t model,
    int64_t inner, int threads) {
  typedef Factors<T> F;
  typedef typename F::X X;
  if (!in.fit()) return OUT_OF_RANGE;
  const int64_t rows = in.count * in.each;
  const int64_t attention = in.heads * in.width, all = attention + 2 * in.kv_heads * in.width;
  const int64_t heads_stride = stride_of<F>(attention), inner_stride = stride_of<F>(inner);
  const int64_t together = rows_together(in, threads);
  const int64_t most = std::max({model, attention, inner});
  const int64_t panels = Rows<F>::floats(rows, most), for_products = Rows<F>::room(most);
  const int64_t padded_row = in_fews<F>(rows);  // as many rows of x are read
  const int64_t owned = padded(std::max(padded_row * stride_of<F>(model), scratch_of(in, together))) + panels + for_products;
  const Scratch scratch(rows * (all + 2 * model + 2 * inner) + padded_row * (heads_stride + inner_stride) + threads * owned);
  float* qkv = scratch.data();
  if (!qkv) return OUT_OF_MEMORY;
  float *stream = qkv + rows * all, *sum = stream + rows * model, *gates = sum + rows * model;
  float* of_threads = gates + rows * 2 * inner;
  X *heads = (X*)(of_threads + threads * owned), *active = heads + padded_row * heads_stride;
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] const Registers registers;
    const int64_t me = part(), of = parts();
    float *own_panels = of_threads + me * owned, *room = own_panels + panels, *own = room + for_products;
    auto ready = [=](const X* x, int64_t width) {
      if (IN_TILES<F> || rows > FEW_ROWS) Rows<F>::pack(x, stride_of<F>(width), rows, width, own_panels);
      return x;
    };
    auto shared = [=](int64_t count, int64_t unit, auto work) {  // work(first, last) of this thread's share
      const int64_t units = (count + unit - 1) / unit;
      work(units * me / of * unit, std::min(count, units * (me + 1) / of * unit));
    };
    const float* none = nullptr;
    auto project = [=](const X* x, const T* weight, const T* bias, auto residual, int64_t residual_stride,
                       int64_t width, int64_t outputs, int64_t first, int64_t last, float* to) {
      const T* w = weight + first * width;
      if constexpr (IN_TILES<F>)
        products_in_tiles(own_panels, rows, w, width, width, 0, last - first, to + first, outputs);
      else products_of<F>({x, own_panels, rows, width}, w, width, last - first, to + first, outputs, room);
      const int64_t count = last - first;
      for (int64_t row = 0; row < rows; ++row) {
        auto more = residual ? residual + row * residual_stride + first : residual;
        float* y = to + row * outputs + first;
        if (sizeof(T) < sizeof *y && (IN_TILES<F> || in.whole)) {  // where the separate ops round, for a scored row's bits
          add(bias ? bias + first : bias, none, count, y);
          rounded(y, count);
          add(none, more, count, y);
          rounded(y, count);
        } else {
          add(bias ? bias + first : bias, more, count, y);
        }
      }
    };
    auto settled = [=](X* x, int64_t stride, int64_t count, int64_t first, int64_t width) {  // as the separate ops leave it
      if constexpr (sizeof(X) > sizeof(T))
        for (int64_t row = 0; row < count && in.whole; ++row) rounded(x + row * stride + first, width);
    };
    padded_rows<F>(hidden, hidden_stride, w.input_norm, in.eps, rows, model, (X*)own);
    settled((X*)own, stride_of<F>(model), rows, 0, model);
    const X* x = ready((X*)own, model);
    shared(all, OUTPUTS<F>, [=](int64_t first, int64_t last) {
      project(x, w.qkv, w.qkv_bias, none, 0, model, all, first, last, qkv);
    });
#pragma omp barrier
    share_heads(in, together, me, of, [=, &in](int64_t row, int64_t count, int64_t g) {
      attended(qkv, all, w.q_norm, w.k_norm, in, row, count, g, own, heads, heads_stride);
      settled(heads + row * heads_stride, heads_stride, count, in.heads / in.kv_heads * in.width * g, attention / in.kv_heads);
      for (int64_t last = row + count; g == 0 && row < last; ++row) pad<F>(heads + row * heads_stride, attention);
    });
#pragma omp barrier
    x = ready(heads, attention);
    shared(model, OUTPUTS<F>, [=](int64_t first, int64_t last) {
      project(x, w.o, w.o_bias, hidden, hidden_stride, attention, model, first, last, stream);
    });
#pragma omp barrier
    padded_rows<F>(stream, model, w.post_norm, in.eps, rows, model, (X*)own);
    settled((X*)own, stride_of<F>(model), rows, 0, model);
    x = ready((X*)own, model);
    shared(inner, OUTPUTS<F>, [=](int64_t first, int64_t last) {
      for (int64_t up : {int64_t(0), inner})
        project(x, w.gate_up, w.gate_up_bias, none, 0, model, 2 * inner, up + first, up + last, gates);
      for (int64_t row = 0; row < rows; ++row) {
        const float* gate = gates + row * 2 * inner + first;
        gated(gate, gate + inner, last - first, active + row * inner_stride + first);
        if (last == inner) pad<F>(active + row * inner_stride, inner);
      }
      settled(active, inner_stride, rows, first, last - first);
    });
#pragma omp barrier
    x = ready(active, inner);
    shared(model, OUTPUTS<F>, [=](int64_t first, int64_t last) {
      project(x, w.down, w.down_bias, stream, model, inner, model, first, last, sum);
      for (int64_t row = 0; row < rows; ++row)
        copied(sum + row * model + first, last - first, out + row * model + first);
    });
  }
  return 0;
}

// The k largest of x[width], sorted into found; what may be among them is collected until it is four times as many.
template <typename T>
static void largest(const T* x, int64_t width, int64_t k, int64_t* found) {
  constexpr int64_t BLOCK = 8 * LANES;
  const int64_t room = std::max<int64_t>(4 * k, 64);
  int64_t kept = 0, i = 0;
  int32_t least = INT32_MIN;  // the k-th largest so far
  float bar = NAN;            // its value; a NaN is never at most that
  auto in_order = [](int32_t bits) { return bits < 0 ? bits ^ INT32_MAX : bits; };
  auto consider = [&](float v, int64_t index) {
    v = v == v ? v + 0.0f : NAN;  // all NaNs alike, and -0.0 a 0.0
    int32_t bits;
    std::memcpy(&bits, &v, sizeof v);
    if (in_order(bits) > least || kept < k)
      found[kept++] = (int64_t)in_order(bits) * (INT64_C(1) << 32) + (INT32_MAX - index);
    if (kept < room) return;
    drop_all_but(k, found, kept);
    kept = k;
    least = (int32_t)(found[k - 1] >> 32);
    bits = in_order(least);
    std::memcpy(&bar, &bits, sizeof bar);
  };
  auto none_in = [&](int64_t last) {
    Ints above{};
    for (int64_t j = i; j < last; j += LANES) above |= ~(load(x + j) <= bar);
    int32_t any = 0;
    for (int l = 0; l < LANES; ++l) any |= above[l];
    return !any && kept >= k;
  };
  for (; i + BLOCK <= width; i += BLOCK) {
    if (none_in(i + BLOCK)) continue;
    for (const int64_t last = i + BLOCK; i < last; i += LANES) {
      if (none_in(i + LANES)) continue;
      Lanes v = load(x + i);
      for (int l = 0; l < LANES; ++l) consider(v[l], i + l);
    }
    i -= BLOCK;
  }
  for (; i < width; ++i) consider(load(x + i, 1)[0], i);
  sort_largest(k, found, kept);
}

template <typename T>
static int topk_entropy(
    const T* logits, int64_t stride, int64_t rows, int64_t width, int64_t k, float* entropy, float* values,
    int64_t* indices, int threads) {
  share(rows, 1, threads, [=](int64_t row, int64_t last) {
    int64_t found[4 * MOST_LARGEST];
    for (; row < last; ++row) {
      const T* x = logits + row * stride;
      largest(x, width, k, found);
      float* value = values + row * k;
      for (int64_t j = 0; j < k; ++j) {
        int64_t index = INT32_MAX - (found[j] & UINT32_MAX);
        indices[row * k + j] = index;
        value[j] = load(x + index, 1)[0];
      }
      float top = value[0];
      double total = 0, weight = 0;  // double: many small terms follow a large one
      for (int64_t j = 0; j < k; j += LANES) {
        int64_t n = k - j < LANES ? k - j : LANES;
        Lanes shifted = load(value + j, n) - top, e = exponential(shifted);
        for (int64_t l = 0; l < n; ++l) {
          total += e[l];
          if (value[j + l] != -INFINITY) weight += e[l] * shifted[l];
        }
      }
      entropy[row] = std::isinf(top) ? NAN : static_cast<float>(std::log(total) - weight / total);
    }
  });
  return 0;
}

// s = x + residual, or x, and out = s / rms(s) * weight, which is of float where it is wide.
template <typename T>
static int rms_norm(
    const T* x, const T* residual, const void* weight, int wide, float eps, T* out, T* sum, int64_t rows,
    int64_t width, int threads) {
  share(rows, 1, threads, [=](int64_t row, int64_t last) {
    for (int64_t at = row * width; at < last * width; at += width) {
      const T* s = x + at;
      if (residual) {
        for (int64_t i = 0; i < width; i += LANES) {
          const int64_t n = width - i < LANES ? width - i : LANES;
          store(sum + at + i, some(x + at + i, n) + some(residual + at + i, n), n);
        }
        s = sum + at;
      }
      if (wide)
        normed(s, static_cast<const float*>(weight), eps, width, out + at);
      else
        normed(s, static_cast<const T*>(weight), eps, width, out + at);
    }
  });
  return 0;
}

template <typename T>
static int swiglu(const T* gate, const T* up, int64_t stride, T* out, int64_t rows, int64_t width, int threads) {
  share(rows, 1, threads, [=](int64_t row, int64_t last) {
    for (; row < last; ++row) gated(gate + row * stride, up + row * stride, width, out + row * width);
  });
  return 0;
}

// out[rows, heads, width] and lse[heads, rows] of two states; the out of an empty one, whose lse is -inf, is not read.
static int merge_attention_states(
    const float* out_a, const float* lse_a, const float* out_b, const float* lse_b, float* out, float* lse,
    int64_t rows, int64_t heads, int64_t width) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = head * rows + row, first = (row * heads + head) * width;
      const float a = lse_a[at] == INFINITY ? -INFINITY : lse_a[at], b = lse_b[at] == INFINITY ? -INFINITY : lse_b[at];
      float top = a > b || a != a ? a : b;  // NaN where one is
      if (top == -INFINITY) top = 0;
      float weight_a = std::exp(a - top), weight_b = std::exp(b - top);
      const float total = weight_a + weight_b, divisor = total == 0 ? 1 : total;
      lse[at] = top + std::log(total);
      weight_a /= divisor, weight_b /= divisor;
      const float *from_a = out_a + first, *from_b = out_b + first;
      float* to = out + first;
      if (a == -INFINITY)
        for (int64_t i = 0; i < width; ++i) to[i] = b == -INFINITY ? 0 : weight_b * from_b[i];
      else if (b == -INFINITY)
        for (int64_t i = 0; i < width; ++i) to[i] = weight_a * from_a[i];
      else
        for (int64_t i = 0; i < width; ++i) to[i] = weight_a * from_a[i] + weight_b * from_b[i];
    }
  return 0;
}

// The softmax of a group's scores and the index of the highest, -1 if there is none.
static int candidate_head(
    const float* hidden, int64_t hidden_stride, const float* norm_weight, const float* head_weight, const float* bias,
    float eps, const void* group, int wide, float* score, float* prob, int64_t* best, int64_t rows, int64_t groups,
    int64_t width) {
  for (int64_t g = 0; g <= groups; ++g) {
    const int64_t offset = entry(group, wide, g);
    if (g ? offset < entry(group, wide, g - 1) || offset > rows : offset != 0) return OUT_OF_RANGE;
  }
  for (int64_t row = 0; row < rows; ++row) {
    const float *x = hidden + row * hidden_stride, inverse = norm_weight ? inverse_rms(x, eps, width) : 1;
    const float sum = added(width, [&](int64_t i, int64_t n) {
      Lanes v = some(x + i, n);
      if (norm_weight) v = v * inverse * some(norm_weight + i, n);
      return v * some(head_weight + i, n);
    });
    score[row] = bias ? sum + *bias : sum;
  }
  int64_t row = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = row, last = entry(group, wide, g + 1);
    double top = -INFINITY, total = 0;  // NaN where one is
    best[g] = -1;
    for (; row < last; ++row) {
      const float s = score[row];
      if (s == s && (best[g] < 0 || s > score[first + best[g]])) best[g] = row - first;
      if (s > top || s != s) top = s;
    }
    for (row = first; row < last; ++row) total += std::exp(score[row] - top);
    for (row = first; row < last; ++row) prob[row] = std::exp(score[row] - top) / total;
  }
  for (; row < rows; ++row) prob[row] = 0;
  return 0;
}

// Of logits, or of none yet: the largest, sum exp(l - top) and sum (l - top) exp(l - top); NaN is never the largest.
struct Statistics {
  float top = -INFINITY;
  double total = 0, weighted = 0;

  void add(const Statistics& more) {
    const bool rises = more.top > top;
    const double fall = rises ? (double)top - more.top : (double)more.top - top;
    if (more.top == -INFINITY || top == -INFINITY) {  // then that total is 0, or NaN
      total += more.total;
      weighted += more.weighted;
    } else if (rises) {
      weighted = (weighted + total * fall) * std::exp(fall) + more.weighted;
      total = total * std::exp(fall) + more.total;
    } else {
      weighted += (more.weighted + more.total * fall) * std::exp(fall);
      total += more.total * std::exp(fall);
    }
    if (rises) top = more.top;
  }

  void write(float picked, float* logprob, float* lse, float* entropy, float* largest) const {
    const double log = std::log(total);
    *lse = top + log;
    *logprob = picked - (top + log);
    *largest = top - (top + log);
    *entropy = log - weighted / total;
  }
};

// Products as logits, with `slope` of the last soft-cap, if there is one.
template <typename B>
INLINE Lanes as_logits(Lanes product, const B* bias, const Change& change, int64_t n, Lanes* slope = nullptr) {
  Lanes l = product * change.scale;
  if (bias) l += some(bias, n);
  if (change.softcap != 0) {
    const Lanes t = tangent(l / change.softcap);
    l = t * change.softcap;
    if (slope) *slope = 1.0f - t * t;
  }
  if (change.temperature != 1) l /= change.temperature;
  return l;
}

// A row's products to logits, in place or not; -inf after the last, up to whole lanes.
template <typename B>
INLINE Statistics to_logits(const float* x, const B* bias, const Change& change, int64_t count, float* logit) {
  Lanes most = Lanes{} - INFINITY;
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t n = count - i < LANES ? count - i : LANES;
    Lanes l = as_logits(some(x + i, n), bias ? bias + i : bias, change, n);
    store(logit + i, l);
    for (int64_t j = i + n; j < i + LANES; ++j) logit[j] = -INFINITY;
    l = load(logit + i);
    most = l > most ? l : most;
  }
  Statistics of;
  of.top = largest(most);
  const float shift = of.top == -INFINITY ? 0 : of.top;
  for (int64_t first = 0; first < count; first += 64 * LANES) {  // in stretches, as in `added`
    Lanes sum = {}, product = {};
    for (int64_t i = first; i < count && i < first + 64 * LANES; i += LANES) {
      Lanes l = load(logit + i) - shift, e = exponential(l);
      sum += e;
      product += e * (l < FAR_BELOW ? Lanes{} + FAR_BELOW : l);
    }
    Quad sums = quarter(sum), products = quarter(product);
    of.total += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    of.weighted += (products[0] + products[1]) + (products[2] + products[3]);
  }
  return of;
}

INLINE bool targets_fit(const void* target, int wide, int64_t ignore_index, int64_t rows, int64_t vocabulary) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t id = entry(target, wide, row);
    if (id != ignore_index && (id < 0 || id >= vocabulary)) return false;
  }
  return true;
}


constexpr int64_t CHUNK = 16 * LANES;  // logits of a row in memory, and of HELD rows
constexpr int64_t HELD = 40 * 12;

// `width` of so many rows of a weight, at most PANEL, as places of a panel; zeros beyond, and up to whole ones.
template <typename F>
INLINE void weight_columns(const typename F::W* weight, int64_t stride, int64_t rows, int64_t width, float* panel) {
  if constexpr (F::STEP == LANES)
    for (int64_t row = 0; row < rows; ++row, panel += PANEL) {
      std::memset(panel, 0, PANEL * sizeof *panel);
      copied(weight + row * stride, width, panel);
    }
  else pair_panels([=](int64_t row) { return row < rows ? weight + row * stride : nullptr; }, whole<F>(rows), width, 0, panel);
}

// To out[r][c] x[r] . column c of such a panel; long sums in float32 by stretches, to lose no more than short ones:
// `room` holds a panel's columns for all rows.
template <typename F>
INLINE void add_products(
    const Factor<typename F::X>& x, int64_t rows, int64_t count, const float* panel, float* out, int64_t out_stride,
    float* room) {
  constexpr int64_t STRETCH = 512;
  if constexpr (F::STEP > LANES) return panel_rows<F, true>(x, rows, whole<F>(count), panel, PANEL, out, out_stride);
  for (int64_t k = 0; k < count; k += STRETCH) {
    panel_rows<F, false>({x.data + k * x.place, x.row, x.place}, rows, std::min(STRETCH, count - k), panel + k * PANEL,
                         PANEL, room, PANEL);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < PANEL; c += LANES)
        store(out + r * out_stride + c, load(out + r * out_stride + c) + load(room + r * PANEL + c));
  }
}

// To `to` what so many logits of n rows pull, which become e^(l - top) slope as products take it, with their rows of the
// weight.
template <typename F>
INLINE void add_pull(
    const Pulled& to, const Change& change, float* logit, int64_t n, int64_t columns, const typename F::W* weight,
    int64_t weight_stride, int64_t width, int64_t first, float* panel) {
  typedef typename F::X X;
  float *of = to.sums + first * to.stride, *top = to.top + first;
  for (int64_t row = 0; row < n; ++row) {
    float* l_of = logit + row * CHUNK;
    const float before = top[row];
    Lanes most = Lanes{} + before;
    for (int64_t i = 0; i < columns; i += LANES) {  // -inf after the last
      const Lanes l = load(l_of + i);
      most = l > most ? l : most;
    }
    top[row] = largest(most);
    const float shift = top[row] == -INFINITY ? 0 : top[row], kept = std::exp(before - shift);
    for (int64_t e = 0; e < to.stride && before < top[row]; e += LANES)
      store(of + row * to.stride + e, load(of + row * to.stride + e) * kept);
    for (int64_t i = 0; i < columns; i += LANES) {
      const Lanes l = load(l_of + i), t = change.softcap == 0 ? Lanes{} : l * (change.temperature / change.softcap);
      store((X*)l_of + i, exponential(l - shift) * (1.0f - t * t));
    }
    if (F::STEP > LANES) std::memset((X*)l_of + columns, 0, (whole<F>(columns) - columns) * sizeof(X));
  }
  for (int64_t e = 0; e < width; e += PANEL) {
    weight_columns<F>(weight + e, weight_stride, columns, std::min(PANEL, width - e), panel);
    add_products<F>({(X*)logit, CHUNK * (int64_t)(sizeof(float) / sizeof(X)), 1}, n, columns, panel, of + e, to.stride,
                    panel + CHUNK * PANEL);
  }
}

// Log-prob of the target, log-sum-exp, entropy and largest log-prob of each row; the logits never exist as a whole.
// Threads take stretches of the vocabulary, which depend only on its size, and so do the sums; with `pulled` rows.
template <typename T>
static int linear_logprob(
    const T* x, int64_t x_stride, const T* weight, int64_t weight_stride, const T* bias, const void* target, int wide,
    int64_t ignore_index, Change change, float* logprob, float* lse, float* entropy, float* largest, const Pulled pulled,
    int64_t rows, int64_t width, int64_t vocabulary, int threads) {
  typedef Factors<T> F;
  typedef typename F::X X;
  if (!targets_fit(target, wide, ignore_index, rows, vocabulary)) return OUT_OF_RANGE;
  const int64_t chunks = (vocabulary + CHUNK - 1) / CHUNK, stretch = (chunks + 15) / 16;  // chunks
  const int64_t stretches = (chunks + stretch - 1) / stretch, stride = stride_of<F>(width);
  const int64_t held = in_panels(std::min<int64_t>(rows, HELD)), places = std::max(stride, CHUNK) + held;
  const int64_t room = IN_TILES<F> ? 0 : Rows<F>::room(width) + Rows<F>::floats(held, width);
  const int64_t owned = padded(held * (stride + CHUNK) + room) + places * PANEL;
  threads = (int)std::min<int64_t>(threads, pulled.sums ? rows : stretches);
  const Scratch scratch(threads * owned + rows * (1 + stretches * (sizeof(Statistics) / sizeof(float))));
  float* memory = scratch.data();
  if (!memory) return OUT_OF_MEMORY;
  auto statistics = (Statistics*)(memory + threads * owned);  // [stretches, rows]
  auto picked = (float*)(statistics + stretches * rows);
  auto work = [=](int64_t row, int64_t end, int64_t begin, int64_t last) {  // rows, stretches
    [[maybe_unused]] const Registers registers;
    float *panel = memory + (threads > 1 ? part() : 0) * owned, *logit = panel + places * PANEL;
    float* panels = logit + held * CHUNK;
    X* input = (X*)(panels + room);
    for (int64_t first = row; first < end; first += HELD) {
      const int64_t n = std::min<int64_t>(end - first, HELD);
      padded_rows<F>(x + first * x_stride, x_stride, nullptr, 0, n, width, input);
      if (!IN_TILES<F> && n > FEW_ROWS) Rows<F>::pack(input, stride, n, width, panels);
      for (int64_t s = begin; s < last; ++s) {
        Statistics* of = statistics + s * rows + first;
        for (int64_t row = 0; row < n; ++row) of[row] = Statistics();
        const int64_t stop = std::min(vocabulary, (s + 1) * stretch * CHUNK);
        for (int64_t chunk = s * stretch * CHUNK; chunk < stop; chunk += CHUNK) {
          const int64_t columns = std::min<int64_t>(vocabulary - chunk, CHUNK);
          const T* w = weight + chunk * weight_stride;
          if constexpr (IN_TILES<F>)
            for (int64_t column = 0; column < columns; column += PANEL) {
              packed<F>([=](int64_t i) { return w + (column + i) * weight_stride; }, std::min(PANEL, columns - column), width,
                        panel);
              panel_rows<F, false>({input, stride, 1}, in_fews<F>(n), stride, panel, PANEL, logit + column, CHUNK);
            }
          else
            products_of<F>({input, panels, n, width}, w, weight_stride, columns, logit, CHUNK,
                                 panels + Rows<F>::floats(held, width), w + columns * weight_stride);
          for (int64_t row = 0; row < n; ++row) {
            float* of_row = logit + row * CHUNK;
            of[row].add(to_logits(of_row, bias ? bias + chunk : bias, change, columns, of_row));
            const int64_t id = entry(target, wide, first + row) - chunk;
            if (id >= 0 && id < columns) picked[first + row] = of_row[id];
          }
          if (pulled.sums)
            add_pull<F>(pulled, change, logit, n, columns, w, weight_stride, width, first, panel);
        }
      }
    }
  };
  if (pulled.sums) share(rows, FEW<F>, threads, [=](int64_t row, int64_t end) { work(row, end, 0, stretches); });
  else share(stretches, 1, threads, [=](int64_t at, int64_t last) { work(0, rows, at, last); });
  for (int64_t row = 0; row < rows; ++row) {
    Statistics of;
    for (int64_t s = 0; s < stretches; ++s) of.add(statistics[s * rows + row]);
    of.write(picked[row], logprob + row, lse + row, entropy + row, largest + row);
    if (pulled.sums) {
      const float scale = std::exp(pulled.top[row] - lse[row]) * (change.scale / change.temperature);
      for (int64_t e = 0; e < width; ++e) pulled.sums[row * pulled.stride + e] *= scale;
    }
    if (entry(target, wide, row) == ignore_index) logprob[row] = lse[row] = entropy[row] = largest[row] = 0;
  }
  return 0;
}

// Logits of `count` targets of each row, 0 for ignored ones: the sums of `products_of`, though not in tiles.
template <typename T>
static int target_logits(
    const T* x, int64_t x_stride, const T* weight, int64_t weight_stride, const T* bias, const void* target, int wide,
    int64_t ignore_index, const Change change, float* out, int64_t rows, int64_t count, int64_t width,
    int64_t vocabulary, int threads) {
  typedef std::conditional_t<IN_TILES<Factors<T>>, Widened<T>, Factors<T>> F;
  if (!targets_fit(target, wide, ignore_index, rows * count, vocabulary)) return OUT_OF_RANGE;
  const int64_t stride = stride_of<F>(width), owned = padded(stride);
  const Scratch scratch(threads * owned);
  float* memory = scratch.data();
  if (!memory) return OUT_OF_MEMORY;
  share(rows, 1, threads, [=](int64_t row, int64_t end) {
    auto input = (typename F::X*)(memory + (threads > 1 ? part() : 0) * owned);
    for (; row < end; ++row) {
      padded_rows<F>(x + row * x_stride, x_stride, nullptr, 0, 1, width, input);
      for (int64_t k = 0; k < count; k += QUADS) {
        const int64_t n = std::min<int64_t>(count - k, QUADS), at = row * count + k;
        const T* from[QUADS];
        float products[LANES] = {};
        T biases[LANES] = {};
        for (int i = 0; i < QUADS; ++i) {
          const int64_t id = entry(target, wide, at + std::min<int64_t>(i, n - 1)), column = id == ignore_index ? 0 : id;
          from[i] = weight + column * weight_stride;
          if (bias) biases[i] = bias[column];
        }
        quad_products<F, 1>(input, stride, from, width, products);
        const Lanes l = as_logits(load(products), bias ? biases : bias, change, LANES);
        for (int i = 0; i < n; ++i) out[at + i] = entry(target, wide, at + i) == ignore_index ? 0 : l[i];
      }
    }
  });
  return 0;
}

// From a row's products with `count` of PANEL outputs the gradient to them, to which id of them the target is; that to
// the bias is added.
template <typename T, typename X>
INLINE void pulled(
    const float* product, const T* bias, const Change& change, const Pull& by, int64_t row, int64_t id, int64_t count,
    float* onto_bias, X* to) {
  for (int64_t i = 0; i < PANEL; i += LANES) {
    const int64_t n = std::max<int64_t>(0, std::min<int64_t>(LANES, count - i));
    Lanes slope = Lanes{} + 1.0f, g = {};
    if (n > 0 && !by.none(row)) {
      Lanes f = as_logits(load(product + i), bias ? bias + i : bias, change, n, &slope) - by.shift[row];
      f = f < FAR_BELOW ? Lanes{} + FAR_BELOW : f;
      g = exponential(f) * (by.on_entropy ? by.on_all[row] - by.on_entropy[row] * f : Lanes{} + by.on_all[row]);
      for (int l = 0; l < LANES; ++l) {
        if (i + l == id) g[l] += by.on_target[row];
        if (l >= n) g[l] = 0;
      }
      g = g / change.temperature * slope;
      store(onto_bias + i, load(onto_bias + i) + g);
    }
    store(to + i, g * change.scale);
  }
}

// Gradients to x, weight and bias, as far as they are not null. A chunk of the vocabulary at a time: threads make the
// gradient to the products with panels of the weight, and from it that to those, then take panels of x's columns.
template <typename T>
static int linear_logprob_backward(
    const T* x, int64_t x_stride, const T* weight, int64_t weight_stride, const T* bias, const void* target, int wide,
    const Change& change, const Pull& by, T* dx, T* dweight, T* dbias, int64_t rows, int64_t width, int64_t vocabulary,
    int threads) {
  typedef Factors<T> F;
  typedef typename F::X X;
  constexpr int64_t ROWS_AT_ONCE = 480, KEPT_PULLS = (1 << 23) / sizeof(X), TAKEN = F::STEP / LANES;
  const int64_t stride = in_panels(width), x_width = stride_of<F>(width), high = in_panels(rows);
  const int64_t all = in_panels(vocabulary), terms = TAKEN == 1 ? rows : whole<F>(rows);
  const int64_t chunk = std::min(all, std::max(PANEL * threads, KEPT_PULLS / high / PANEL * PANEL));
  const int64_t blocks = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, held = in_fews<F>(std::min(rows, ROWS_AT_ONCE));
  const int64_t a_panel = std::max(stride, chunk) / TAKEN * PANEL, per_float = sizeof(float) / sizeof(X);
  const int64_t room = IN_TILES<F> ? 0 : Rows<F>::room(width), in_lanes = IN_TILES<F> ? 0 : Rows<F>::floats(rows, width);
  const int64_t owned = padded(a_panel + PANEL * (held + PANEL + 1 + (TAKEN == 2 ? high / per_float : 0)) + room);
  const int64_t inputs = high * stride / per_float, paired_floats = TAKEN == 2 ? high * stride / TAKEN : 0;
  const Scratch scratch(high * stride + inputs + paired_floats + high * chunk / per_float + in_lanes + threads * owned);
  float* sums = scratch.data();  // [high, stride]
  if (!sums) return OUT_OF_MEMORY;
  float *paired = sums + high * stride + inputs, *panels = paired + paired_floats + high * chunk / per_float;
  float* of_threads = panels + in_lanes;
  X *input = (X*)(sums + high * stride), *pulls = (X*)(paired + paired_floats);  // [high, stride], [high, chunk]
  std::memset(sums, 0, (high * stride + inputs) * sizeof *sums);
  for (int64_t r = 0; r < rows; ++r)  // what has no gradient may be inf or NaN
    if (!by.none(r)) copied(x + r * x_stride, width, input + r * x_width);
  if (!IN_TILES<F> && rows > FEW_ROWS) Rows<F>::pack(input, x_width, rows, width, panels);
  if constexpr (TAKEN == 2) pair_panels([=](int64_t r) { return input + r * x_width; }, high, stride, high / 2 * PANEL, paired);
  for (int64_t first = 0; first < vocabulary; first += chunk) {
    const int64_t outputs = std::min(chunk, vocabulary - first);
    share((outputs + PANEL - 1) / PANEL, 1, threads, [=, &change, &by](int64_t at, int64_t last) {
      [[maybe_unused]] const Registers registers;
      float *panel = of_threads + (threads > 1 ? part() : 0) * owned, *product = panel + a_panel;
      float *block = product + held * PANEL, *onto_bias = block + PANEL * PANEL;
      for (; at < last; ++at) {
        const int64_t output = first + at * PANEL, count = std::min(PANEL, vocabulary - output);
        const T* w = weight + output * weight_stride;
        X* to = pulls + at * PANEL;
        std::memset(onto_bias, 0, PANEL * sizeof *onto_bias);
        if constexpr (IN_TILES<F>) packed<F>([=](int64_t i) { return w + i * weight_stride; }, count, width, panel);
        for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
          const int64_t n = std::min(ROWS_AT_ONCE, rows - row);
          const X* of = input + row * x_width;
          if constexpr (IN_TILES<F>)
            panel_rows<F, false>({of, x_width, 1}, in_fews<F>(n), x_width, panel, PANEL, product, PANEL);
          else
            products_of<F>({of, panels + Rows<F>::floats(row, width), n, width}, w, weight_stride, count, product, PANEL,
                           onto_bias + PANEL + (TAKEN == 2 ? PANEL * high / per_float : 0), w + PANEL * weight_stride);
          for (int64_t r = row; r < row + n; ++r)
            pulled(product + (r - row) * PANEL, bias ? bias + output : bias, change, by, r,
                   entry(target, wide, r) - output, count, onto_bias, to + r * chunk);
        }
        for (int64_t r = rows; r < high; ++r) std::memset(to + r * chunk, 0, PANEL * sizeof *to);
        if (dbias) copied(onto_bias, count, dbias + output);
        Factor<X> across{to, 1, chunk};
        if constexpr (TAKEN == 2) {
          across = {(X*)(onto_bias + PANEL), high, 1};
          for (int64_t r = 0; dweight && r < high; r += LANES)
            for (int64_t o = 0; o < PANEL; o += LANES) {
              Lanes v[LANES];
              for (int i = 0; i < LANES; ++i) v[i] = load(to + (r + i) * chunk + o);
              transposed(v);
              for (int i = 0; i < LANES; ++i) store((X*)(onto_bias + PANEL) + (o + i) * high + r, v[i]);
            }
        }
        for (int64_t e = 0; dweight && e < width; e += PANEL) {
          const float* of = TAKEN == 2 ? paired + e / PANEL * (high / 2 * PANEL) : (const float*)input + e;
          panel_rows<F, false>(across, PANEL, terms, of, TAKEN == 2 ? PANEL : x_width, block, PANEL);
          for (int64_t o = 0; o < count; ++o)
            copied(block + o * PANEL, std::min(PANEL, width - e), dweight + (output + o) * width + e);
        }
      }
    });
    share(dx ? stride / PANEL * blocks : 0, 1, threads, [=](int64_t at, int64_t last) {
      [[maybe_unused]] const Registers registers;
      float* panel = of_threads + (threads > 1 ? part() : 0) * owned;
      for (int64_t made = -1; at < last; ++at) {
        const int64_t e = at / blocks * PANEL, row = at % blocks * ROWS_AT_ONCE, some = std::min(PANEL, width - e);
        if (e != made) weight_columns<F>(weight + first * weight_stride + e, weight_stride, outputs, some, panel);
        made = e;
        add_products<F>({pulls + row * chunk, chunk, 1}, std::min(ROWS_AT_ONCE, rows - row), outputs, panel,
                        sums + row * stride + e, stride, panel + a_panel);
      }
    });
  }
  for (int64_t row = 0; dx && row < rows; ++row) copied(sums + row * stride, width, dx + row * width);
  return 0;
}

// q, k and v of each row, normed where a weight is given, q and k rotated; k and v also to their slots of the caches,
// of which there are `size`. Without v a row has none. The tables are of float where they are wide.
template <typename T>
static int qk_norm_rope(
    const T* qkv, int64_t qkv_stride, const T* q_weight, const T* k_weight, const void* cos, const void* sin, int wide,
    int64_t length, const void* positions, int wide_positions, T* q, T* k, T* v, T* k_cache, int64_t k_slot, int64_t k_head, T* v_cache,
    int64_t v_slot, int64_t v_head, int64_t size, const void* slots, int wide_slots, int64_t rows, int64_t heads,
    int64_t kv_heads, int64_t width, float eps, int threads) {
  Slots taken;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = entry(positions, wide_positions, row);
    const int64_t slot = slots ? entry(slots, wide_slots, row) : -1;
    if (position < 0 || position >= length || slot >= size) return OUT_OF_RANGE;
    if (slot >= 0) taken.add(slot);
  }
  if (!taken.distinct()) return OUT_OF_RANGE;
  const Scratch scratch(threads * 4 * width);
  float* memory = scratch.data();
  if (!memory) return OUT_OF_MEMORY;
  share(rows, 1, threads, [=](int64_t row, int64_t last) {
    float* buffer = memory + (threads > 1 ? part() : 0) * 4 * width;
    float *head = buffer + width, *cosine = head + width, *sine = cosine + width;
    for (; row < last; ++row) {
      const T* x = qkv + row * qkv_stride;
      const int64_t place = entry(positions, wide_positions, row) * width;
      const int64_t slot = slots ? entry(slots, wide_slots, row) : -1;
      auto at = [=](const void* table, float* to) {
        if (wide) copied(static_cast<const float*>(table) + place, width, to);
        else copied(static_cast<const T*>(table) + place, width, to);
      };
      at(cos, cosine);
      at(sin, sine);
      T *to = q + row * heads * width, *key = k + row * kv_heads * width, *value = v + row * kv_heads * width;
      for (int64_t h = 0; h < heads; ++h, x += width, to += width) {
        turned(x, q_weight, eps, cosine, sine, width, 1.0f, buffer, head);
        copied(head, width, to);
      }
      for (int64_t g = 0; g < kv_heads; ++g, x += width, key += width) {
        turned(x, k_weight, eps, cosine, sine, width, 1.0f, buffer, head);
        copied(head, width, key);
        if (slot >= 0) copied(head, width, k_cache + slot * k_slot + g * k_head);
      }
      if (v) std::memcpy(value, x, kv_heads * width * sizeof *x);
      for (int64_t g = 0; g < kv_heads && slot >= 0; ++g, x += width)
        std::memcpy(v_cache + slot * v_slot + g * v_head, x, width * sizeof *x);
    }
  });
  return 0;
}

}  // namespace VARIANT
