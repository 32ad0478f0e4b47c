// What every kernel here shares: element types, warp products, launches. Compiled by nvcc for the device, and with
// -DFB_HOST_EMULATION by a host compiler, which runs blocks as fibers (emulation.h) and warp instructions as loops.
#pragma once

#include <cstdint>

#ifdef FB_HOST_EMULATION
#include "emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
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

// 16 bytes of memory that no kernel of the launch writes, read once: they leave the first cache to others.
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

#ifdef FB_HOST_EMULATION

using Stream = void*;

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), int grid, int block, int shared_bytes, Stream, Arguments... arguments) {
  return emulation::run(grid, block, shared_bytes, [=] { kernel(static_cast<Parameters>(arguments)...); });
}

#else

using Stream = cudaStream_t;

// Kernels are launched on one-dimensional grids, as dependent launches where the device knows these. 0 or an error.
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), int grid, int block, int shared_bytes, Stream stream, Arguments... arguments) {
  if (grid == 0) return 0;
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess && shared_bytes > 48 * 1024)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t configuration{};
  configuration.gridDim = dim3(grid);
  configuration.blockDim = dim3(block);
  configuration.dynamicSmemBytes = shared_bytes;
  configuration.stream = stream;
  configuration.attrs = &dependent;
  configuration.numAttrs = major >= 9 ? 1 : 0;
  error = cudaLaunchKernelEx(&configuration, kernel, static_cast<Parameters>(arguments)...);
  return error != cudaSuccess ? error : cudaPeekAtLastError();
}

#endif

inline int divide_up(int64_t n, int64_t by) { return static_cast<int>((n + by - 1) / by); }

}  // namespace fb
