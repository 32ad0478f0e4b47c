// skinny_linear: up to 32 rows through a linear layer; reading the weight once takes all the time. So weight rows are
// the long side (16) of each product and go from global memory straight to registers; rows of x are the short side (8)
// and stay, normed, in shared memory. If there are too few outputs for all multiprocessors, the two blocks of a cluster
// share the columns. The order of additions to an output depends only on the numbers of columns and outputs and the
// device.
#include "device.cuh"

namespace fb::skinny {

constexpr int kMostRows = 32;
constexpr int kSlices = 8;  // warps of a block: each sums over its own columns of the weight
constexpr int kThreads = kSlices * kWarp;
constexpr int kResident = 2;      // blocks of a multiprocessor
constexpr int kTileRows = 16;     // weight rows that a block holds at a time
constexpr int kStep = 32;         // columns of a step: four threads load 16 bytes each of a weight row
constexpr int kPair = 2 * kStep;  // a warp takes two adjacent steps, so that it reads whole lines of 128 bytes
constexpr int kPiece = kSlices * kPair;      // columns of one pair of all warps
constexpr int kSweep = kWarp * 8 * kSlices;  // columns of which every thread copies 8: whole batches
constexpr int kPad = 4;                      // padding of a row in shared memory, in 16 bytes: two rows fill all banks
constexpr int kMostStaged = 64 * 1024;       // bytes of up to 16 rows in shared memory, so that two blocks fit
constexpr int kMostWhole = 128 * 1024;       // of more rows: reading x for each tile would outweigh the weight
constexpr int kMostColumns = 1 << 29;        // also the most outputs: indices fit an int

template <typename T>
struct SkinnyLinear {
  // x [rows, in]; weight [out or, with swiglu, 2 out, in]; bias like the weight's rows; norm_weight [in];
  // residual, out [rows, out]; bias, norm_weight and residual may be null
  const T* x;
  int64_t x_stride;
  const T* weight;
  int64_t weight_stride;
  const T* bias;
  const T* norm_weight;
  const T* residual;
  int64_t residual_stride;
  T* out;
  int64_t out_stride;
  float eps;
  int rows, in_features, out_features, tiles, tile_outputs;
  int share;            // columns of a block: all, or those of a cluster's first block, in whole pieces
  int window;           // columns of x in shared memory at a time: all, or whole sweeps
  bool swiglu, frozen;  // frozen: the launch before this one does not write weight and norm_weight
};

// The column of a thread's step u, counted from the thread's first column.
__device__ constexpr int step_begin(int u) { return u / 2 * kPiece + u % 2 * kStep; }

template <int kEights>
struct Shared {
  float partial[2][kSlices][kEights][4][kWarp];  // each warp's sums of a tile; two tiles, in turn
  float squares[kSlices][kEights * 8];           // each warp's sum of squares of each row
  float inverse[kSlices][kWarp];  // of each row, for each warp
};

// 8 elements at any address, of which `left` are inside the row; zero after its end.
template <typename T>
__device__ inline uint4 load_eight(const T* from, int left) {
  const auto* bits = reinterpret_cast<const uint16_t*>(from);
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < left) words[i / 2] |= static_cast<uint32_t>(bits[i]) << (16 * (i % 2));
  return {words[0], words[1], words[2], words[3]};
}

// The two weight rows of a tile that a thread loads next: the same row of gate and up, or a row and the eighth row
// after it. Past the end it repeats the last row; those outputs are not written.
template <typename T>
struct Cursor {
  const T *low, *high;
  int left;  // columns from here on

  __device__ void begin(const SkinnyLinear<T>& of, int tile, int g, int column, int end) {
    const int last = of.out_features - 1, row = min(tile * of.tile_outputs + g, last);
    low = of.weight + row * of.weight_stride + column;
    high = of.weight + (of.swiglu ? row + of.out_features : min(row + 8, last)) * of.weight_stride + column;
    left = tile < of.tiles ? end - column : 0;
  }
};

template <typename T>
__device__ inline float square_sum(const uint4& x) {
  const float2 a = unpack<T>(x.x), b = unpack<T>(x.y), c = unpack<T>(x.z), d = unpack<T>(x.w);
  return ((a.x * a.x + a.y * a.y) + (b.x * b.x + b.y * b.y)) + ((c.x * c.x + c.y * c.y) + (d.x * d.x + d.y * d.y));
}

template <typename T>
__device__ inline uint32_t scaled(uint32_t x, float inverse, uint32_t weight) {
  const float2 value = unpack<T>(x), by = unpack<T>(weight);
  return pack<T>(value.x * inverse * by.x, value.y * inverse * by.y);
}

// The first column of each sweep that this thread copies to shared memory. A warp copies the columns that it
// multiplies, so that no block barrier is needed.
__device__ inline int own_column() {
  const int lane = threadIdx.x % kWarp, slice = threadIdx.x / kWarp;
  return lane / 8 * kPiece + slice * kPair + lane % 8 * 8;
}

// Copies a warp's share of `columns` columns of a row, zeros from `left` on; complete after wait_for_copies.
template <bool kWide, typename T>
__device__ inline void stage(uint4* to, const T* from, int columns, int left) {
#pragma unroll 1
  for (int column = own_column(); column < columns; column += kSweep) {
    if constexpr (kWide) copy_async_if(column < left, to + column / 8, from + column);
    else to[column / 8] = load_eight(from + column, left - column);
  }
}

// out = y + residual or silu(gate) * up of y = [gate, up], with y = rms_norm(x) weight^T + bias.
// Grid: kBlocks == 1: as many blocks as fit the device, at most one a tile; kBlocks == 2: a cluster of two a tile.
// A block owns kTileRows weight rows at a time and all rows of x (kEights times 8); a warp owns kPair columns of every
//   kPiece, and the block's columns are all or, in a cluster, half.
// Loop: over tiles; inside over batches of columns; the loads of the next batch or tile follow each product.
// Memory: shared: [rows, window] of x, norm_weight, the warps' partial sums. Registers of a thread: kDepth steps of two
//   weight rows, so that 2 kDepth loads of 16 bytes are in flight, and sums [kEights, 2, 4] in float32.
// Layout: as in SkinnyLinear; x, weight, residual, out by their row strides, adjacent columns.
template <typename T, int kEights, int kDepth, bool kNorm, bool kWide, int kBlocks>
__global__ void __launch_bounds__(kThreads, kResident) skinny_linear_kernel(SkinnyLinear<T> of) {
  constexpr int kBatch = kDepth / 2 * kPiece;  // columns that all warps hold
  constexpr bool kSplit = kBlocks > 1;
  if constexpr (kSplit && !kClusters) return;  // never launched there
  static_assert(kSweep % kBatch == 0);
  const int lane = threadIdx.x % kWarp, slice = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % kBlocks, place = blockIdx.x / kBlocks, places = gridDim.x / kBlocks;
  const int share = kSplit ? of.share : of.in_features, from = rank * share;
  const int end = kSplit ? min(from + share, of.in_features) : of.in_features;  // of this block's columns
  const int first = slice * kPair + t * 8, whole = divide_up(share, kPiece) * kPiece;
  const int stride = of.window / 8 + kPad;
  auto& shared = *static_cast<Shared<kEights>*>(dynamic_shared());
  const auto& other = *of_rank(&shared, rank ^ 1);
  uint4* staged = reinterpret_cast<uint4*>(&shared + 1);  // x: [rows, stride], 8 columns to an element
  uint4* norm = staged + of.rows * stride;                // [whole / 8]

  let_next_begin();
  uint4 low[kDepth] = {}, high[kDepth] = {};
  Cursor<T> weight;
  weight.begin(of, place, g, from + first, end);
  const uint64_t policy = evicted_first();  // weights leave the cache to data that the next step reads again
  const auto load = [&](const T* row, int u) {
    if constexpr (kWide) return load_streaming_if(weight.left > step_begin(u), row + step_begin(u), policy);
    else return load_eight(row + step_begin(u), weight.left - step_begin(u));
  };
  if (!of.frozen) wait_for_previous();
  if (of.in_features > 0) {  // this branch keeps the compiler from moving the wait before the loads
#pragma unroll
    for (int u = 0; u < kDepth; ++u) {
      low[u] = load(weight.low, u);
      high[u] = load(weight.high, u);
    }
    if constexpr (kNorm) stage<kWide>(norm, of.norm_weight + from, whole, end - from);
  }
  wait_for_previous();

  const auto sync = [&] {
    if constexpr (kSplit) sync_cluster();
    else __syncthreads();
  };
  // This warp's columns of all rows, from `begin` on.
  const auto fetch = [&](int begin) {
    __syncwarp();
    for (int row = 0; row < of.rows; ++row)
      stage<kWide>(staged + row * stride, of.x + row * of.x_stride + from + begin, of.window, end - from - begin);
    wait_for_copies();
  };
  constexpr int kTogether = kEights == 1 ? 1 : 2;  // rows summed together; past the end, the last one again
  const auto each = [&](int i) { return min(i, of.rows - 1); };
  const auto scale = [&](int begin) {
    for (int column = own_column(); column < min(of.window, whole - begin); column += kSweep) {
      const uint4 by = norm[(begin + column) / 8];
      uint4* at = staged + column / 8;
#pragma unroll 1
      for (int row = 0; row < of.rows; ++row, at += stride) {
        const float factor = shared.inverse[slice][row];
        const uint4 value = *at;
        *at = {scaled<T>(value.x, factor, by.x), scaled<T>(value.y, factor, by.y), scaled<T>(value.z, factor, by.z),
               scaled<T>(value.w, factor, by.w)};
      }
    }
  };

  int held = -1;  // first column of the window of x in shared memory
  if constexpr (kNorm) {
    float total = 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < share; begin += of.window) {
      fetch(begin);
#pragma unroll 1
      for (int row = 0; row < of.rows; row += kTogether) {
#pragma unroll 1
        for (int sweep = 0; sweep < of.window; sweep += kSweep) {
          const int column = sweep + own_column();
          float sum[kTogether];
#pragma unroll
          for (int i = 0; i < kTogether; ++i)
            sum[i] = column < of.window ? square_sum<T>(staged[each(row + i) * stride + column / 8]) : 0.0f;
#pragma unroll
          for (int mask = kWarp / 2; mask > 0; mask /= 2) {
#pragma unroll
            for (int i = 0; i < kTogether; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], mask);
          }
#pragma unroll
          for (int i = 0; i < kTogether; ++i)
            if (lane == row + i) total += sum[i];
        }
      }
    }
    if (lane < kEights * 8) shared.squares[slice][lane] = total;
    float sum = 0.0f;
    sync();
#pragma unroll
    for (int i = 0; i < kSlices; ++i) sum += shared.squares[i][lane % (kEights * 8)];
    if constexpr (kSplit) {
      float rest = 0.0f;
#pragma unroll
      for (int i = 0; i < kSlices; ++i) rest += other.squares[i][lane % (kEights * 8)];
      sum += rest;
    }
    shared.inverse[slice][lane] = rsqrtf(sum / static_cast<float>(of.in_features) + of.eps);
    __syncwarp();
    if (share <= of.window) {
      scale(0);
      __syncwarp();
      held = 0;
    }
  }

  // This thread writes one row's output of each half of a tile (in a cluster, only in the first block): (row, output)
  // is its element of the product's result.
  const int eight = slice / 2, odd = slice % 2, row = eight * 8 + 2 * t + odd;
  const bool finishes = row < of.rows && rank == 0;
  for (int tile = place; tile < of.tiles; tile += places) {
    const int output = tile * of.tile_outputs + g;
    uint16_t residual[2] = {};  // loaded while the sums are formed
    if (finishes && of.residual) {
      const auto* from = reinterpret_cast<const uint16_t*>(of.residual) + row * of.residual_stride;
      if (output < of.out_features) residual[0] = from[output];
      if (output + 8 < of.out_features) residual[1] = from[output + 8];
    }

    float sum[kEights][2][4] = {};  // of 8 rows each; even and odd products apart, so that they do not wait
    for (int begin = 0; begin < share; begin += of.window) {
      if (begin != held) {
        fetch(begin);
        if constexpr (kNorm) scale(begin);
        __syncwarp();
        held = begin;
      }
      const uint4* x[kEights];  // past the end, the last row again
#pragma unroll
      for (int j = 0; j < kEights; ++j) x[j] = staged + min(j * 8 + g, of.rows - 1) * stride + first / 8;
      for (int done = begin; done < min(begin + of.window, share); done += kBatch) {
        // Each register is loaded again right after its product: next columns, or the first ones of the next tile.
        if (done + kBatch < share) {
          weight.low += kBatch;
          weight.high += kBatch;
          weight.left -= kBatch;
        } else {
          weight.begin(of, tile + places, g, from + first, end);
        }
#pragma unroll
        for (int u = 0; u < kDepth; ++u) {
          if (done + u / 2 * kPiece < share) {
            const uint32_t even[4] = {low[u].x, high[u].x, low[u].y, high[u].y};
            const uint32_t odds[4] = {low[u].z, high[u].z, low[u].w, high[u].w};
#pragma unroll
            for (int j = 0; j < kEights; ++j) {
              const uint4 value = x[j][step_begin(u) / 8];
              mma_16x8x16<T>(sum[j][0], even, {value.x, value.y});
              mma_16x8x16<T>(sum[j][1], odds, {value.z, value.w});
            }
          }
          low[u] = load(weight.low, u);
          high[u] = load(weight.high, u);
        }
#pragma unroll
        for (int j = 0; j < kEights; ++j) x[j] += kBatch / 8;
      }
    }

    const int turn = tile / places % 2;  // two buffers in turn: one barrier a tile is enough
    auto& slices = shared.partial[turn];
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) slices[slice][j][i][lane] = sum[j][0][i] + sum[j][1][i];
    }
    sync();  // the sums are complete; this buffer is written again only after the next tile's barrier
    if (!finishes) continue;
    float y[2] = {};
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {  // warps in a fixed order
      y[0] += slices[i][eight][odd][lane];
      y[1] += slices[i][eight][2 + odd][lane];
    }
    if constexpr (kSplit) {
      float rest[2] = {};
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        rest[0] += other.partial[turn][i][eight][odd][lane];
        rest[1] += other.partial[turn][i][eight][2 + odd][lane];
      }
      y[0] += rest[0];
      y[1] += rest[1];
    }
    T* to = of.out + row * of.out_stride + output;
    if (of.swiglu) {
      if (output >= of.out_features) continue;
      if (of.bias) {
        y[0] += to_float(of.bias[output]);
        y[1] += to_float(of.bias[output + of.out_features]);
      }
      const float gate = to_float(from_float<T>(y[0])), up = to_float(from_float<T>(y[1]));
      to[0] = from_float<T>(gate / (1.0f + __expf(-gate)) * up);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (output + 8 * i >= of.out_features) continue;
      if (of.bias) y[i] += to_float(of.bias[output + 8 * i]);
      to[8 * i] = from_float<T>(y[i] + unpack<T>(residual[i]).x);
    }
  }
  if constexpr (kSplit) sync_cluster();  // a block's memory must last until the other block has read it
}

// Whether every row of 2-byte elements begins at a multiple of 16 bytes.
inline bool wide_rows(const void* address, int64_t stride, int rows) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0 && (rows == 1 || stride % 8 == 0);
}

template <typename T, int kEights, int kDepth, bool kWide>
int launch_kernel(const SkinnyLinear<T>& of, const Chip& chip, Stream stream) {
  const int norm_bytes = of.norm_weight ? divide_up(of.share, kPiece) * kPiece * 2 : 0;
  const int bytes = sizeof(Shared<kEights>) + of.rows * (of.window * 2 + kPad * 16) + norm_bytes;
  if (bytes > chip.block_shared) return kNotTaken;
  if (of.share < of.in_features) {
    const auto kernel = of.norm_weight ? skinny_linear_kernel<T, kEights, kDepth, true, kWide, 2>
                                       : skinny_linear_kernel<T, kEights, kDepth, false, kWide, 2>;
    return launch_clusters(kernel, 2, 2 * of.tiles, kThreads, bytes, stream, of);
  }
  const auto kernel = of.norm_weight ? skinny_linear_kernel<T, kEights, kDepth, true, kWide, 1>
                                     : skinny_linear_kernel<T, kEights, kDepth, false, kWide, 1>;
  const int resident = min(kResident, chip.shared / (bytes + chip.reserved_shared));
  return launch(kernel, min(of.tiles, chip.multiprocessors * resident), kThreads, bytes, stream, of);
}

// Whether two blocks share the columns: if each still has a multiprocessor to itself, since its second place is for the
// next launch, whose weights are loaded while this one ends; or if a block could not hold whole rows at once.
inline bool splits(const Chip& chip, int tiles, int in_features) {
  return chip.major >= 9 && 2 * tiles <= chip.multiprocessors && in_features > kSweep;
}

// How many of a block's columns of x are in shared memory at a time, or kNotTaken.
inline int window_of(int rows, int in_features, int share) {
  const int whole = divide_up(share, kPiece) * kPiece;
  if (rows > 16) return int64_t{rows} * in_features * 2 <= kMostWhole ? whole : kNotTaken;
  return min(whole, kMostStaged / 2 / rows / kSweep * kSweep);
}

template <typename T>
int pick_kernel(const SkinnyLinear<T>& of, const Chip& chip, Stream stream) {
  const int weight_rows = of.swiglu ? 2 * of.out_features : of.out_features;
  const bool wide = of.in_features % 8 == 0 && wide_rows(of.x, of.x_stride, of.rows) &&
                    wide_rows(of.weight, of.weight_stride, weight_rows) && wide_rows(of.norm_weight, 0, 1);
  if (!wide) return launch_kernel<T, 4, 2, false>(of, chip, stream);
  if (of.rows <= 8) return launch_kernel<T, 1, 8, true>(of, chip, stream);
  if (of.rows <= 16) return launch_kernel<T, 2, 8, true>(of, chip, stream);
  return launch_kernel<T, 4, 4, true>(of, chip, stream);
}

template <typename T, typename Fields>
int run(const Fields& given) {
  const auto typed = [](const void* address) { return static_cast<const T*>(address); };
  const int tile_outputs = given.swiglu ? kTileRows / 2 : kTileRows;
  const int tiles = divide_up(given.out_features, tile_outputs);
  Chip chip;
  if (const int error = current_chip(&chip)) return error;
  const bool halved = splits(chip, tiles, given.in_features);
  const int share = halved ? divide_up(given.in_features, 2 * kPiece) * kPiece : given.in_features;
  const int window = window_of(given.rows, given.in_features, share);
  if (window == kNotTaken) return kNotTaken;
  return pick_kernel<T>({typed(given.x), given.x_stride, typed(given.weight), given.weight_stride, typed(given.bias),
                         typed(given.norm_weight), typed(given.residual), given.residual_stride,
                         static_cast<T*>(given.out), given.out_stride, static_cast<float>(given.eps), given.rows,
                         given.in_features, given.out_features, tiles, tile_outputs, share, window, given.swiglu != 0,
                         given.frozen != 0},
                        chip, static_cast<Stream>(given.stream));
}

}  // namespace fb::skinny

// out_features are those of `out`: with swiglu the weight and the bias hold twice as many, gate's and then up's.
FB_FUNCTION(fb_skinny_linear,
            const void* x; int64_t x_stride; const void* weight; int64_t weight_stride;
            const void *bias, *norm_weight; double eps; const void* residual; int64_t residual_stride;
            void* out; int64_t out_stride; int rows, in_features, out_features, swiglu, frozen, dtype; void* stream;) {
  using namespace fb;
  if (given.rows > skinny::kMostRows || given.in_features > skinny::kMostColumns ||
      given.out_features > skinny::kMostColumns || (given.swiglu && given.residual) ||
      (given.dtype != kFloat16 && given.dtype != kBFloat16))
    return kNotTaken;
  if (given.rows <= 0 || given.out_features <= 0) return 0;
  return given.dtype == kFloat16 ? skinny::run<half>(given) : skinny::run<bfloat16>(given);
}
