// Runs kernels on the host: one fiber per thread, two blocks (or those of a cluster) at a time, in random order; finds
// wrong indexing and missing barriers, not races between running threads. Has only what the kernels here use.
#pragma once

#include <link.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static thread_local  // of the current block, see `enter`
#define __align__(n) alignas(n)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace emulation {

struct half {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

inline float widen(half x) {
  _Float16 value;
  std::memcpy(&value, &x.bits, 2);
  return static_cast<float>(value);
}
inline float widen(bfloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <typename T>
T narrow(float x);
template <>
inline half narrow<half>(float x) {
  _Float16 value = static_cast<_Float16>(x);
  half result;
  std::memcpy(&result.bits, &value, 2);
  return result;
}
template <>
inline bfloat16 narrow<bfloat16>(float x) {
  if (x != x) return {0x7fff};
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits += 0x7fff + ((bits >> 16) & 1);
  return {static_cast<uint16_t>(bits >> 16)};
}

constexpr int kLanes = 32;
constexpr size_t kStack = 64 * 1024;

struct Barrier {
  int expected = 0, arrived = 0;
  int64_t generation = 0;
};

struct Copy {
  void* to;
  const void* from;  // null for zeros
};

struct Thread {
  ucontext_t context;
  std::vector<Copy> copies;  // not yet done
  std::unique_ptr<char[]> stack;
  bool done = false;
  const Barrier* waits = nullptr;  // waits until the barrier's generation changes
  int64_t generation = 0;
};

struct Warp {
  Barrier barrier;
  uint64_t slots[kLanes][8];  // values that lanes exchange
};

struct Block {
  std::vector<char> variables;  // its __shared__ variables while another block runs
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier all;
  int votes = 0;
  std::vector<char> shared;
  unsigned index = 0;
  int current = 0, left = 0;  // the running thread; threads that have not ended
};

// Blocks that run at the same time.
struct Cluster {
  std::vector<Block> blocks;
  char* variables = nullptr;  // __shared__ variables of the current block: all thread_local ones of the library
  size_t variables_size = 0;
  Barrier all;
  std::function<void()> body;
  ucontext_t scheduler;
};

inline Cluster* cluster = nullptr;  // the running cluster, and its current block
inline Block* block = nullptr;
inline std::mt19937 order{0};
inline int multiprocessors = 2;  // of the device

inline dim3 thread_index() { return {static_cast<unsigned>(block->current)}; }
inline dim3 block_index() { return {block->index}; }
inline dim3 grid_dim_, block_dim_;

inline void leave() { swapcontext(&block->threads[block->current].context, &cluster->scheduler); }

inline thread_local char anchor = 0;

inline int find_variables(dl_phdr_info* library, size_t, void* of) {
  auto& here = *static_cast<Cluster*>(of);
  here.variables = static_cast<char*>(library->dlpi_tls_data);
  for (int i = 0; i < library->dlpi_phnum; ++i)
    if (library->dlpi_phdr[i].p_type == PT_TLS) here.variables_size = library->dlpi_phdr[i].p_memsz;
  return here.variables != nullptr && &anchor >= here.variables && &anchor < here.variables + here.variables_size;
}

inline void enter(Block* next) {
  if (block == next) return;
  if (block != nullptr) std::memcpy(block->variables.data(), cluster->variables, cluster->variables_size);
  std::memcpy(cluster->variables, next->variables.data(), cluster->variables_size);
  block = next;
}

inline void arrive(Barrier& barrier) {
  Thread& self = block->threads[block->current];
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  self.waits = &barrier;
  self.generation = barrier.generation;
  leave();
  self.waits = nullptr;
}

inline void entry() {
  cluster->body();
  block->threads[block->current].done = true;
  leave();
}

inline void poison(std::vector<char>& memory) { std::fill(memory.begin(), memory.end(), static_cast<char>(0xff)); }

inline int run_cluster(Cluster& here) {
  cluster = &here;
  block = nullptr;
  const int threads = static_cast<int>(here.blocks[0].threads.size());
  const int count = threads * static_cast<int>(here.blocks.size());
  std::vector<int> turn(count);
  for (int i = 0; i < count; ++i) {
    turn[i] = i;
    Thread& thread = here.blocks[i / threads].threads[i % threads];
    thread.done = false;
    thread.waits = nullptr;
    thread.copies.clear();
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &here.scheduler;
    makecontext(&thread.context, entry, 0);
  }
  for (int left = count; left > 0;) {
    std::shuffle(turn.begin(), turn.end(), order);
    // most rounds run a single warp, so that it gets as far ahead of the others as barriers allow
    const int alone = count > kLanes && order() % 8 != 0 ? turn[0] / kLanes : -1;
    std::stable_partition(turn.begin(), turn.end(), [&, first = turn[0]](int i) { return i / threads == first / threads; });
    bool moved = false;
    for (int i : turn) {
      if (alone >= 0 && i / kLanes != alone) continue;
      Thread& thread = here.blocks[i / threads].threads[i % threads];
      if (thread.done || (thread.waits != nullptr && thread.waits->generation == thread.generation)) continue;
      enter(&here.blocks[i / threads]);
      block->current = i % threads;
      moved = true;
      swapcontext(&here.scheduler, &thread.context);
      left -= thread.done;
      block->left -= thread.done;
      if (block->left == 0) poison(block->shared);  // shared memory ends with its block
    }
    if (!moved && alone < 0) {
      std::fprintf(stderr, "emulation: %d of %d threads wait at a barrier that the others do not reach\n", left, count);
      return 719;  // CUDA's code of a launch failure
    }
  }
  return 0;
}

inline int run(int grid, int cluster_blocks, int threads, int shared_bytes, std::function<void()> body) {
  if (threads < 1 || threads > 1024 || threads % kLanes != 0 || grid < 0 || grid % cluster_blocks != 0) return 1;
  Cluster here;
  here.body = std::move(body);
  anchor = 1;  // makes sure that the thread has its variables
  if (!dl_iterate_phdr(find_variables, &here)) return 1;
  std::vector<int> turn(grid / cluster_blocks);
  for (size_t i = 0; i < turn.size(); ++i) turn[i] = static_cast<int>(i);
  std::shuffle(turn.begin(), turn.end(), order);
  here.blocks.resize(cluster_blocks > 1 ? cluster_blocks : std::min(grid, 2));
  for (Block& one : here.blocks) {
    one.threads.resize(threads);
    for (Thread& thread : one.threads) thread.stack.reset(new char[kStack]);
    one.warps.resize(threads / kLanes);
    one.shared.resize(static_cast<size_t>(shared_bytes) + 16);
    one.variables.resize(here.variables_size);
  }
  block_dim_ = {static_cast<unsigned>(threads)};
  grid_dim_ = {static_cast<unsigned>(grid)};
  for (int begun = 0; begun < grid;) {
    here.blocks.resize(std::min<size_t>(here.blocks.size(), grid - begun));
    here.all = {threads * cluster_blocks};
    for (Block& one : here.blocks) {
      one.index = static_cast<unsigned>(turn[begun / cluster_blocks] * cluster_blocks + begun % cluster_blocks);
      ++begun;
      one.left = threads;
      one.all = {threads};
      for (Warp& warp : one.warps) warp.barrier = {kLanes};
      poison(one.shared);  // NaN in every float type
      if (order() % 2 != 0) poison(one.variables);  // else they keep what another block left
    }
    if (const int error = run_cluster(here)) return error;
  }
  return 0;
}

inline void* dynamic_shared() {
  const auto address = reinterpret_cast<uintptr_t>(block->shared.data());
  return reinterpret_cast<void*>((address + 15) / 16 * 16);
}

// The address in another block of the cluster that corresponds to one in this block's dynamic memory.
inline char* of_rank(const void* own, int rank) {
  Block* const self = block;
  const auto offset = static_cast<const char*>(own) - static_cast<const char*>(dynamic_shared());
  block = &cluster->blocks[rank];
  char* const there = static_cast<char*>(dynamic_shared()) + offset;
  block = self;
  return there;
}

inline void copy_later(void* to, const void* from) { block->threads[block->current].copies.push_back({to, from}); }

inline void finish_copies() {
  auto& copies = block->threads[block->current].copies;
  for (const Copy& copy : copies) {
    if (copy.from != nullptr) std::memcpy(copy.to, copy.from, 16);
    else std::memset(copy.to, 0, 16);
  }
  copies.clear();
}

inline Warp& own_warp() { return block->warps[block->current / kLanes]; }
inline int own_lane() { return block->current % kLanes; }

template <typename T>
T exchange(T value, int from) {
  static_assert(sizeof(T) <= 8);
  Warp& warp = own_warp();
  std::memcpy(warp.slots[own_lane()], &value, sizeof(T));
  arrive(warp.barrier);
  T result;
  std::memcpy(&result, warp.slots[from], sizeof(T));
  arrive(warp.barrier);
  return result;
}

template <typename T>
float element(uint32_t pair, int index) {
  T value;
  value.bits = static_cast<uint16_t>(pair >> (16 * index));
  return widen(value);
}

template <typename T>
void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Warp& warp = own_warp();
  const int lane = own_lane();
  for (int i = 0; i < 4; ++i) warp.slots[lane][i] = a[i];
  for (int i = 0; i < 2; ++i) warp.slots[lane][4 + i] = b[i];
  arrive(warp.barrier);
  const int g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + (i / 2) * 8, column = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const auto a_pair = static_cast<uint32_t>(warp.slots[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2]);
      const auto b_pair = static_cast<uint32_t>(warp.slots[column * 4 + k % 8 / 2][4 + k / 8]);
      d[i] += element<T>(a_pair, k % 2) * element<T>(b_pair, k % 2);
    }
  }
  arrive(warp.barrier);
}

inline void load_16x16(uint32_t (&a)[4], const void* row) {
  Warp& warp = own_warp();
  const int lane = own_lane();
  warp.slots[lane][0] = reinterpret_cast<uintptr_t>(row);
  arrive(warp.barrier);
  for (int i = 0; i < 4; ++i) a[i] = reinterpret_cast<const uint32_t*>(warp.slots[8 * i + lane / 4][0])[lane % 4];
  arrive(warp.barrier);
}

}  // namespace emulation

#define threadIdx (::emulation::thread_index())
#define blockIdx (::emulation::block_index())
#define blockDim (::emulation::block_dim_)
#define gridDim (::emulation::grid_dim_)

inline void __syncthreads() { emulation::arrive(emulation::block->all); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulation::arrive(emulation::own_warp().barrier); }
inline int __syncthreads_count(int predicate) {
  emulation::Block& block = *emulation::block;
  block.votes += predicate != 0;
  emulation::arrive(block.all);
  const int result = block.votes;
  emulation::arrive(block.all);
  block.votes -= predicate != 0;
  return result;
}
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned, T value, int from) { return emulation::exchange(value, from % emulation::kLanes); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) { return emulation::exchange(value, emulation::own_lane() ^ mask); }
template <typename T>
T __shfl_down_sync(unsigned, T value, int by) {
  const int from = emulation::own_lane() + by;
  return emulation::exchange(value, from < emulation::kLanes ? from : emulation::own_lane());
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int by) {
  const int from = emulation::own_lane() - by;
  return emulation::exchange(value, from >= 0 ? from : emulation::own_lane());
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  unsigned result = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane)
    result |= static_cast<unsigned>(emulation::exchange(predicate != 0, lane)) << lane;
  return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }

template <typename T>
T atomicAdd(T* address, T value) {
  T before = *address;
  *address = before + value;
  return before;
}
template <typename T>
T __ldcg(const T* address) { return *address; }
inline float __expf(float x) { return std::exp(x); }
inline float __int_as_float(int x) {
  float value;
  std::memcpy(&value, &x, 4);
  return value;
}
inline int __float_as_int(float x) {
  int value;
  std::memcpy(&value, &x, 4);
  return value;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float exp2f_(float x) { return std::exp2(x); }
using std::isnan;
using std::max;
using std::min;
