// The tile registers of AMX: 8 of 16 rows of 64 bytes, whose product of bfloat16 sums in float32. EMULATED_TILES has
// them in memory, with sums in the same order, so that any processor can test what is made of them.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef EMULATED_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tiles {

#ifdef EMULATED_TILES

thread_local uint32_t registers[8][16][16];
thread_local int users = 0;

struct Registers {  // a thread has its registers while one of these lives, of which it makes one at a time
  Registers() {
    if (users++) __builtin_trap();
  }
  Registers(const Registers&) = delete;
  ~Registers() { users--; }
};

inline bool granted() { return true; }

template <int T>
INLINE void zero() {
  std::memset(registers[T], 0, sizeof registers[T]);
}

template <int T>
INLINE void load(const void* from, int64_t stride) {
  if (!users) __builtin_trap();  // as a processor does
  for (int i = 0; i < 16; ++i) std::memcpy(registers[T][i], (const char*)from + i * stride, 64);
}

template <int T>
INLINE void store(void* to, int64_t stride) {
  for (int i = 0; i < 16; ++i) std::memcpy((char*)to + i * stride, registers[T][i], 64);
}

INLINE float of_bits(uint32_t bits) {  // subnormal numbers are zeros of their sign
  float x;
  bits = bits & 0x7f800000 ? bits : bits & 0x80000000;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE float flushed(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return of_bits(bits);
}

// c += a b: of each sum the even and the odd terms are a chain of fused multiply-adds each, and c comes last.
template <int C, int A, int B>
INLINE void multiply() {
  float low[16][16], high[16][16];
  for (int p = 0; p < 16; ++p)
    for (int j = 0; j < 16; ++j) {
      low[p][j] = of_bits(registers[B][p][j] << 16);
      high[p][j] = of_bits(registers[B][p][j] & 0xffff0000);
    }
  for (int i = 0; i < 16; ++i) {
    float even[16] = {}, odd[16] = {}, sum[16];
    for (int p = 0; p < 16; ++p) {
      const float x = of_bits(registers[A][i][p] << 16), y = of_bits(registers[A][i][p] & 0xffff0000);
      for (int j = 0; j < 16; ++j) even[j] = flushed(__builtin_fmaf(x, low[p][j], even[j]));
      for (int j = 0; j < 16; ++j) odd[j] = flushed(__builtin_fmaf(y, high[p][j], odd[j]));
    }
    std::memcpy(sum, registers[C][i], sizeof sum);
    for (int j = 0; j < 16; ++j) sum[j] = flushed(flushed(sum[j]) + flushed(even[j] + odd[j]));
    std::memcpy(registers[C][i], sum, sizeof sum);
  }
}

#else

struct alignas(64) Shape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// In assembly: intrinsics of g++ 12 do not say that they read or write memory.
struct Registers {
  Registers() {
    static const Shape shape;
    asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
  }
  Registers(const Registers&) = delete;
  ~Registers() { asm volatile("tilerelease" ::: "memory"); }
};

// Whether the system lets this process use the registers: Linux wants to be asked.
inline bool granted() {
  constexpr long REQUEST = 0x1023, DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, DATA) == 0;
}

template <int T>
INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
INLINE void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
INLINE void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

template <int C, int A, int B>
INLINE void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace tiles
