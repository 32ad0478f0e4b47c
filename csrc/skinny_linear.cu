// skinny_linear: up to 32 rows through a linear layer at the speed of its weight, which is read once. Weight rows are
// the long side of each product, activations the short one; both go from global memory to registers, no operand
// through shared memory. The order of additions to an output depends on the number of columns alone.
#include "device.cuh"

namespace fb::skinny {

constexpr int kMostRows = 32;
constexpr int kSlices = 8;  // warps of a block, each with its own columns of the weight
constexpr int kThreads = kSlices * kWarp;
constexpr int kResident = 2;      // blocks of a multiprocessor
constexpr int kTileRows = 16;     // weight rows that a block holds at a time
constexpr int kStep = 32;         // columns that a warp takes at a time, of each row 16 bytes to a thread
constexpr int kPair = 2 * kStep;  // a warp takes two steps beside each other: whole lines of 128 bytes
constexpr int kMostColumns = 1 << 29;  // and outputs

template <typename T>
struct SkinnyLinear {
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
  bool swiglu, frozen;  // frozen: what the kernel before may still write is not the weight
};

// Where step u of what a thread holds begins, behind the thread's first column.
__device__ constexpr int step_begin(int u) { return u / 2 * kSlices * kPair + u % 2 * kStep; }

// 8 elements of which `left` lie inside the row, zero behind it. Without kWide from any address.
template <bool kWide, bool kStreaming = false, typename T>
__device__ inline uint4 load_eight(const T* from, int left) {
  uint4 value = {0, 0, 0, 0};
  if constexpr (kWide) {
    if constexpr (kStreaming) value = load_streaming_if(left > 0, from);
    else if (left > 0) value = *reinterpret_cast<const uint4*>(from);
  } else {
    const auto* bits = reinterpret_cast<const uint16_t*>(from);
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < left) words[i / 2] |= static_cast<uint32_t>(bits[i]) << (16 * (i % 2));
    value = {words[0], words[1], words[2], words[3]};
  }
  return value;
}

// What a thread loads next of a tile: two weight rows, of gate and up the same one, else one and the eighth behind.
// Rows beyond the last are the last again, for outputs that are not written.
template <typename T>
struct Cursor {
  const T *low, *high;
  int left;  // columns from here on

  __device__ void begin(const SkinnyLinear<T>& of, int tile, int g, int column) {
    const int end = of.out_features - 1, row = min(tile * of.tile_outputs + g, end);
    low = of.weight + row * of.weight_stride + column;
    high = of.weight + (of.swiglu ? row + of.out_features : min(row + 8, end)) * of.weight_stride + column;
    left = tile < of.tiles ? of.in_features - column : 0;
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

// kEights times 8 rows of x; a thread holds kDepth steps, so 2 kDepth loads of 16 bytes are under way for it.
template <typename T, int kEights, int kDepth, bool kNorm, bool kWide>
__global__ void __launch_bounds__(kThreads, kResident) skinny_linear_kernel(SkinnyLinear<T> of) {
  constexpr int kBatch = kDepth / 2 * kSlices * kPair;  // columns that all warps hold
  constexpr int kSixteens = (kEights + 1) / 2;
  __shared__ float partial[2][kSlices][kEights][4][kWarp];
  __shared__ float squares[kSlices][kEights * 8];
  const int lane = threadIdx.x % kWarp, slice = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const int first = slice * kPair + t * 8;

  let_next_begin();
  uint4 low[kDepth] = {}, high[kDepth] = {};
  Cursor<T> weight;
  weight.begin(of, blockIdx.x, g, first);
  if (!of.frozen) wait_for_previous();
  if (of.in_features > 0) {  // a branch, across which the compiler does not move the wait ahead of the loads
#pragma unroll
    for (int u = 0; u < kDepth; ++u) {
      low[u] = load_eight<kWide, true>(weight.low + step_begin(u), weight.left - step_begin(u));
      high[u] = load_eight<kWide, true>(weight.high + step_begin(u), weight.left - step_begin(u));
    }
  }
  wait_for_previous();

  const T* x[kEights];  // rows beyond the last are the last again
#pragma unroll
  for (int j = 0; j < kEights; ++j) x[j] = of.x + min(j * 8 + g, of.rows - 1) * of.x_stride + first;
  float inverse[kEights] = {};
  if constexpr (kNorm) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      float sums[2] = {};
      for (int done = 0; done < of.in_features; done += 4 * kSlices * kPair) {
#pragma unroll
        for (int u = 0; u < 8; ++u) {
          const int k = done + step_begin(u);
          sums[u % 2] += square_sum<T>(load_eight<kWide>(x[j] + k, of.in_features - first - k));
        }
      }
      float sum = sums[0] + sums[1];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (t == 0) squares[slice][j * 8 + g] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kSlices; ++i) sum += squares[i][j * 8 + g];
      inverse[j] = rsqrtf(sum / static_cast<float>(of.in_features) + of.eps);
    }
  }

  // This thread finishes one row's output of each half of a tile.
  const int eight = slice / 2, odd = slice % 2, row = eight * 8 + g;
  const bool finishes = row < of.rows;
  for (int tile = blockIdx.x; tile < of.tiles; tile += gridDim.x) {
    const int output = tile * of.tile_outputs + 2 * t + odd;
    uint16_t residual[2] = {};  // under way while the sums are formed
    if (finishes && of.residual) {
      const auto* from = reinterpret_cast<const uint16_t*>(of.residual) + row * of.residual_stride;
      if (output < of.out_features) residual[0] = from[output];
      if (output + 8 < of.out_features) residual[1] = from[output + 8];
    }

    float sum[kSixteens][2][2][4] = {};  // of 16 rows, a half of the tile and every other product
    for (int done = 0; done < of.in_features; done += kBatch) {
      // What is used makes room for the next columns, or for the next tile's first.
      if (done + kBatch < of.in_features) {
        weight.low += kBatch;
        weight.high += kBatch;
        weight.left -= kBatch;
      } else {
        weight.begin(of, tile + gridDim.x, g, first);
      }
#pragma unroll
      for (int u = 0; u < kDepth; ++u) {
        const int left = of.in_features - first - done - step_begin(u);
        uint4 norm = {0, 0, 0, 0};
        if constexpr (kNorm) norm = load_eight<kWide>(of.norm_weight + first + done + step_begin(u), left);
#pragma unroll
        for (int i = 0; i < kSixteens; ++i) {
          // A branch here too, or x is loaded further ahead than there are registers for.
          if (kEights > 1 && done + u / 2 * kSlices * kPair >= of.in_features) break;
          uint4 rows[2] = {};
#pragma unroll
          for (int j = 2 * i; j < min(2 * i + 2, kEights); ++j) {
            uint4 value = load_eight<kWide>(x[j] + step_begin(u), left);
            if constexpr (kNorm) {
              value.x = scaled<T>(value.x, inverse[j], norm.x);
              value.y = scaled<T>(value.y, inverse[j], norm.y);
              value.z = scaled<T>(value.z, inverse[j], norm.z);
              value.w = scaled<T>(value.w, inverse[j], norm.w);
            }
            rows[j % 2] = value;
          }
          const uint32_t even[4] = {rows[0].x, rows[1].x, rows[0].y, rows[1].y};
          const uint32_t odds[4] = {rows[0].z, rows[1].z, rows[0].w, rows[1].w};
          mma_16x8x16<T>(sum[i][0][0], even, {low[u].x, low[u].y});
          mma_16x8x16<T>(sum[i][1][0], even, {high[u].x, high[u].y});
          mma_16x8x16<T>(sum[i][0][1], odds, {low[u].z, low[u].w});
          mma_16x8x16<T>(sum[i][1][1], odds, {high[u].z, high[u].w});
        }
        low[u] = load_eight<kWide, true>(weight.low + step_begin(u), weight.left - step_begin(u));
        high[u] = load_eight<kWide, true>(weight.high + step_begin(u), weight.left - step_begin(u));
      }
      const int onward = done + kBatch < of.in_features ? kBatch : -done;
#pragma unroll
      for (int j = 0; j < kEights; ++j) x[j] += onward;
    }

    auto& slices = partial[tile / gridDim.x % 2];
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& half = sum[j / 2][i / 2];
        slices[slice][j][i][lane] = half[0][j % 2 * 2 + i % 2] + half[1][j % 2 * 2 + i % 2];
      }
    }
    __syncthreads();  // the next tile's keeps its writers off what is read here
    if (!finishes) continue;
    float y[2] = {};
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      y[0] += slices[i][eight][odd][lane];
      y[1] += slices[i][eight][2 + odd][lane];
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
}

// Whether every row of 2-byte elements begins at a multiple of 16 bytes.
inline bool wide_rows(const void* address, int64_t stride, int rows) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0 && (rows == 1 || stride % 8 == 0);
}

template <typename T, int kEights, int kDepth, bool kWide>
int launch_kernel(const SkinnyLinear<T>& of, Stream stream) {
  const auto kernel = of.norm_weight ? skinny_linear_kernel<T, kEights, kDepth, true, kWide>
                                     : skinny_linear_kernel<T, kEights, kDepth, false, kWide>;
  int count = 0;
  if (const int error = multiprocessors(&count)) return error;
  return launch(kernel, min(of.tiles, count * kResident), kThreads, 0, stream, of);
}

template <typename T>
int pick_kernel(const SkinnyLinear<T>& of, Stream stream) {
  const int weight_rows = of.swiglu ? 2 * of.out_features : of.out_features;
  const bool wide = of.in_features % 8 == 0 && wide_rows(of.x, of.x_stride, of.rows) &&
                    wide_rows(of.weight, of.weight_stride, weight_rows) && wide_rows(of.norm_weight, 0, 1);
  if (!wide) return launch_kernel<T, 4, 2, false>(of, stream);
  if (of.rows <= 8) return launch_kernel<T, 1, 8, true>(of, stream);
  if (of.rows <= 16) return launch_kernel<T, 2, 8, true>(of, stream);
  return launch_kernel<T, 4, 4, true>(of, stream);
}

template <typename T>
int run(const void* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias,
        const void* norm_weight, float eps, const void* residual, int64_t residual_stride, void* out,
        int64_t out_stride, int rows, int in_features, int out_features, int swiglu, int frozen, Stream stream) {
  const auto typed = [](const void* address) { return static_cast<const T*>(address); };
  const int tile_outputs = swiglu ? kTileRows / 2 : kTileRows, tiles = divide_up(out_features, tile_outputs);
  return pick_kernel<T>({typed(x), x_stride, typed(weight), weight_stride, typed(bias), typed(norm_weight),
                         typed(residual), residual_stride, static_cast<T*>(out), out_stride, eps, rows, in_features,
                         out_features, tiles, tile_outputs, swiglu != 0, frozen != 0},
                        stream);
}

}  // namespace fb::skinny

// out_features are those of `out`: with swiglu the weight and the bias hold twice as many, gate's and then up's.
extern "C" int fb_skinny_linear(const void* x, int64_t x_stride, const void* weight, int64_t weight_stride,
                                const void* bias, const void* norm_weight, float eps, const void* residual,
                                int64_t residual_stride, void* out, int64_t out_stride, int rows, int in_features,
                                int out_features, int swiglu, int frozen, int dtype, void* stream) {
  using namespace fb;
  const bool taken = rows <= skinny::kMostRows && in_features <= skinny::kMostColumns &&
                     out_features <= skinny::kMostColumns && !(swiglu && residual);
  if (!taken || (dtype != kFloat16 && dtype != kBFloat16)) return kNotTaken;
  if (rows <= 0 || out_features <= 0) return 0;
  const auto typed = dtype == kFloat16 ? skinny::run<half> : skinny::run<bfloat16>;
  return typed(x, x_stride, weight, weight_stride, bias, norm_weight, eps, residual, residual_stride, out, out_stride,
               rows, in_features, out_features, swiglu, frozen, static_cast<Stream>(stream));
}
