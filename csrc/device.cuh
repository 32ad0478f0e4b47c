// What all kernels here share: element types, warp products, launches. Compiled by nvcc for the device or, with
// -DFB_HOST_EMULATION, for the host (emulation.h), with warp instructions as loops.
#pragma once

#include "interface.h"

#ifdef FB_HOST_EMULATION
#include "emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <utility>
#include <vector>
#endif

namespace fb {

enum DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr int kWarp = 32;
constexpr int kNotTaken = -1;  // these arguments are for another implementation; nothing was launched

#ifdef FB_HOST_EMULATION
using half = emulation::half;
using bfloat16 = emulation::bfloat16;
#else
using half = __half;
using bfloat16 = __nv_bfloat16;
#endif

__host__ __device__ inline int divide_up(int64_t n, int64_t by) { return static_cast<int>((n + by - 1) / by); }

__device__ inline float to_float(float x) { return x; }
#ifdef FB_HOST_EMULATION
inline float to_float(half x) { return emulation::widen(x); }
inline float to_float(bfloat16 x) { return emulation::widen(x); }
#else
__device__ inline float to_float(half x) { return __half2float(x); }
__device__ inline float to_float(bfloat16 x) { return __bfloat162float(x); }
#endif

template <typename T>
__device__ inline T from_float(float x);  // to nearest even
template <>
__device__ inline float from_float<float>(float x) { return x; }
#ifdef FB_HOST_EMULATION
template <>
inline half from_float<half>(float x) { return emulation::narrow<half>(x); }
template <>
inline bfloat16 from_float<bfloat16>(float x) { return emulation::narrow<bfloat16>(x); }
#else
template <>
__device__ inline half from_float<half>(float x) { return __float2half_rn(x); }
template <>
__device__ inline bfloat16 from_float<bfloat16>(float x) { return __float2bfloat16_rn(x); }
#endif

// Two neighbouring elements of 2 bytes in a register, the first in its low half.
template <typename T>
__device__ inline float2 unpack(uint32_t pair) {
#ifdef FB_HOST_EMULATION
  return {emulation::element<T>(pair, 0), emulation::element<T>(pair, 1)};
#else
  if constexpr (__is_same(T, half)) return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  else return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
#endif
}

template <typename T>
__device__ inline uint32_t pack(float first, float second) {
#ifdef FB_HOST_EMULATION
  return from_float<T>(first).bits | static_cast<uint32_t>(from_float<T>(second).bits) << 16;
#else
  if constexpr (__is_same(T, half)) {
    const __half2 both = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&both);
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
#endif
}

// Loads 16 bytes that nothing writes while the kernel runs, and that are read once: not kept in the L1 cache.
__device__ inline uint4 load_streaming(const void* address) {
#if defined(FB_HOST_EMULATION)
  return *static_cast<const uint4*>(address);
#else
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
#endif
}

// Loads 16 bytes that an earlier launch may have written, and that are read once: not kept in the L1 cache.
__device__ inline uint4 load_once(const void* address) {
#if defined(FB_HOST_EMULATION)
  return *static_cast<const uint4*>(address);
#else
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
#endif
}

// The cache policy "evict first" for the L2 cache. Made once per kernel, not at every load.
__device__ inline uint64_t evicted_first() {
  uint64_t policy = 0;
#if !defined(FB_HOST_EMULATION)
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// load_streaming if `inside`, else zeros without reading the address.
__device__ inline uint4 load_streaming_if(bool inside, const void* address, [[maybe_unused]] uint64_t policy) {
#if defined(FB_HOST_EMULATION)
  return inside ? load_streaming(address) : uint4{0, 0, 0, 0};
#else
  uint4 value;
  asm volatile(
      "{.reg .pred inside; setp.ne.b32 inside, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@inside ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6;}"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(address), "r"(static_cast<int>(inside)), "l"(policy));
  return value;
#endif
}

// A launch's dynamic shared memory (shared_bytes), aligned to 16 bytes.
__device__ inline void* dynamic_shared() {
#ifdef FB_HOST_EMULATION
  return emulation::dynamic_shared(*emulation::block);
#else
  extern __shared__ uint4 bytes[];
  return bytes;
#endif
}

// Copies 16 bytes that an earlier launch may have written to shared memory, or zeros without reading the address. This
// thread sees them after its wait_for_copies, other threads after a barrier that follows it.
__device__ inline void copy_async_if(bool inside, uint4* to, const void* from) {
#ifdef FB_HOST_EMULATION
  emulation::copy_later(to, inside ? from : nullptr);
#else
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
#endif
}

__device__ inline void wait_for_copies() {
#ifdef FB_HOST_EMULATION
  emulation::finish_copies();
#else
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// 16 bytes of a row.
template <typename T>
union Chunk {
  static constexpr int kElements = 16 / sizeof(T);
  uint4 bits;
  T elements[kElements];
};

// Elements from `first` on, zero bits after the row's end; `aligned`: the row begins at a multiple of 16 bytes.
template <typename T>
__device__ inline Chunk<T> load_chunk(const T* row, int64_t first, int64_t width, bool aligned) {
  Chunk<T> chunk;
  if (aligned && first + Chunk<T>::kElements <= width) {
    chunk.bits = load_once(row + first);
  } else {
    chunk.bits = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < Chunk<T>::kElements; ++j)
      if (first + j < width) chunk.elements[j] = row[first + j];
  }
  return chunk;
}

inline bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// Four bytes out of a (bytes 0 to 3) and b (4 to 7): each hexadecimal digit of the selector names one, the lowest
// first. Volatile, since the compiler would else move it to the front of a loop, where it waits for loads too early.
template <uint32_t selector>
__device__ inline uint32_t permute_bytes(uint32_t a, uint32_t b) {
  uint32_t result = 0;
#ifdef FB_HOST_EMULATION
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
#else
  asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "n"(selector));
#endif
  return result;
}

// d[16, 8] += a[16, 16] b[16, 8] over a warp, in float32; with g = lane / 4 and t = lane % 4
//   a: {(g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..)}, two neighbouring columns in each register
//   b: {(2t.., g), (2t + 8.., g)}, two neighbouring rows in each
//   d: {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)}
template <typename T>
__device__ inline void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef FB_HOST_EMULATION
  emulation::mma_16x8x16<T>(d, a, b);
#else
  if constexpr (sizeof(T) == 2) {
    if constexpr (__is_same(T, half)) {
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                   "{%0, %1, %2, %3};"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                   "{%0, %1, %2, %3};"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
#endif
}

// Loads mma_16x8x16's a from shared memory: lane i passes the address of row i % 16 from column 8 (i / 16) on.
__device__ inline void load_16x16(uint32_t (&a)[4], const void* row) {
#ifdef FB_HOST_EMULATION
  emulation::load_16x16(a, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
#endif
}

// 2^x to 2 ulps; 0 where the result is below the normal numbers.
__device__ inline float exp2_of(float x) {
#ifdef FB_HOST_EMULATION
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// Counts an arrival; whether it is the last of `count`. The last thread sees all that the others wrote before, and what
// threads wrote that met one of them at a barrier. The counter is then zero again.
__device__ inline bool arrives_last(unsigned* counter, unsigned count) {
#define FB_ARRIVE "atom.acq_rel.gpu.global.inc.u32"
  const unsigned wraps_at = count - 1;
#if defined(FB_HOST_EMULATION)
  const unsigned before = emulation::atomic(FB_ARRIVE, counter, wraps_at);
#else
  unsigned before;
  asm volatile(FB_ARRIVE " %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(wraps_at)
               : "memory");
#endif
  return before == count - 1;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kClusters = false;
#else
constexpr bool kClusters = true;  // blocks can work in clusters
#endif

// A barrier of all threads of a cluster's blocks; each then sees what the others wrote before.
__device__ inline void sync_cluster() {
#if defined(FB_HOST_EMULATION)
  emulation::sync_cluster();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
#endif
}

// `own`'s counterpart in the dynamic shared memory of block `rank` of the cluster. It may be read after a barrier of
// both blocks, until that block ends.
template <typename T>
__device__ inline const T* of_rank(const T* own, int rank) {
#if defined(FB_HOST_EMULATION)
  return reinterpret_cast<const T*>(emulation::of_rank(own, rank));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(rank));
  return there;
#else
  return own;
#endif
}

// Programmatic dependent launch: before `wait_for_previous` a kernel touches nothing that the one before it in the
// stream writes or reads; `let_next_begin` allows the next one to be scheduled.
__device__ inline void wait_for_previous() {
#if !defined(FB_HOST_EMULATION) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void let_next_begin() {
#if !defined(FB_HOST_EMULATION) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// What launchers need to know of the current device.
struct Chip {
  int multiprocessors, major;
  // bytes of shared memory: most of a block; of a multiprocessor; what the system reserves of that for each block
  int block_shared, shared, reserved_shared;
  int device;
};

#ifdef FB_HOST_EMULATION

using Stream = void*;

inline int current_chip(Chip* chip) {
  *chip = {emulation::multiprocessors, 9, 227 * 1024, 228 * 1024, 1024, 0};
  return 0;
}

inline int set_zero(void* address, int64_t bytes, Stream) {
  std::memset(address, 0, bytes);
  return 0;
}

// Host streams are numbers: 1 is a stream that captures, 0 the default stream, others are plain streams.
inline int is_capturing(Stream stream, bool* result) {
  *result = stream == reinterpret_cast<Stream>(1);
  return 0;
}

inline int id_of(Stream stream, uint64_t* id) {
  *id = reinterpret_cast<uint64_t>(stream);
  return 0;
}

template <typename... Parameters, typename... Arguments>
int launch_clusters(void (*kernel)(Parameters...), int cluster, int grid, int block, int shared_bytes, Stream stream,
                    Arguments... arguments) {
  return emulation::run(stream == reinterpret_cast<Stream>(1), grid, cluster, block, shared_bytes,
                        [=] { kernel(static_cast<Parameters>(arguments)...); });
}

#else

using Stream = cudaStream_t;

// The current device's data, which are read once for all devices. Returns 0 or an error.
inline int current_chip(Chip* chip) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  static const std::vector<Chip> chips = [] {
    int count = 0;
    std::vector<Chip> found;
    if (cudaGetDeviceCount(&count) != cudaSuccess) return found;
    for (int i = 0; i < count; ++i) {
      Chip one{};
      one.device = i;
      const auto ask = [i](int* value, cudaDeviceAttr what) { return cudaDeviceGetAttribute(value, what, i); };
      if (ask(&one.multiprocessors, cudaDevAttrMultiProcessorCount) != cudaSuccess ||
          ask(&one.major, cudaDevAttrComputeCapabilityMajor) != cudaSuccess ||
          ask(&one.block_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin) != cudaSuccess ||
          ask(&one.shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor) != cudaSuccess ||
          ask(&one.reserved_shared, cudaDevAttrReservedSharedMemoryPerBlock) != cudaSuccess)
        break;
      found.push_back(one);
    }
    return found;
  }();
  if (device >= static_cast<int>(chips.size())) return cudaErrorInvalidDevice;
  *chip = chips[device];
  return cudaSuccess;
}

inline int set_zero(void* address, int64_t bytes, Stream stream) {
  return cudaMemsetAsync(address, 0, bytes, stream);
}

// Whether launches on the stream are captured into a graph. 0 or an error.
inline int is_capturing(Stream stream, bool* result) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  *result = status == cudaStreamCaptureStatusActive;
  return error;
}

// A number that is not 0 and that no other stream of this process has. Returns 0 or an error.
inline int id_of(Stream stream, uint64_t* id) {
  unsigned long long found = 0;
  const cudaError_t error = cudaStreamGetId(stream, &found);
  *id = found + 1;
  return error;
}

// Before a kernel's first launch on a device: allow it all shared memory, and prefer the same split of the L1 cache for
// all kernels, since kernels with different splits do not overlap. 0 or an error.
inline int prepare(const void* kernel, const Chip& chip) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> prepared;
  const std::lock_guard<std::mutex> lock(mutex);
  if (prepared.count({kernel, chip.device})) return 0;
  cudaFuncAttributes of{};
  cudaError_t error = cudaFuncGetAttributes(&of, kernel);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 chip.block_shared - static_cast<int>(of.sharedSizeBytes));
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess) prepared.insert({kernel, chip.device});
  return error;
}

// Launches a kernel on a one-dimensional grid; on Hopper as a dependent launch, in clusters of `cluster` blocks.
// Returns 0 or an error.
template <typename... Parameters, typename... Arguments>
int launch_clusters(void (*kernel)(Parameters...), int cluster, int grid, int block, int shared_bytes, Stream stream,
                    Arguments... arguments) {
  if (grid == 0) return 0;
  Chip chip;
  if (const int error = current_chip(&chip)) return error;
  if (const int error = prepare(reinterpret_cast<const void*>(kernel), chip)) return error;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t configuration{};
  configuration.gridDim = dim3(grid);
  configuration.blockDim = dim3(block);
  configuration.dynamicSmemBytes = shared_bytes;
  configuration.stream = stream;
  configuration.attrs = attributes;
  configuration.numAttrs = chip.major < 9 ? 0 : cluster > 1 ? 2 : 1;
  const cudaError_t error = cudaLaunchKernelEx(&configuration, kernel, static_cast<Parameters>(arguments)...);
  if (error != cudaSuccess) cudaGetLastError();  // clears it, or the next launch would report it again
  return error;
}

#endif

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), int grid, int block, int shared_bytes, Stream stream, Arguments... arguments) {
  return launch_clusters(kernel, 1, grid, block, shared_bytes, stream, arguments...);
}

}  // namespace fb
