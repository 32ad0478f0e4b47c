// Runs kernels on the host: blocks on threads, a few at a time, and the threads of each as fibers in random order; finds
// wrong indexing and missing barriers, and under ThreadSanitizer races between blocks. Has only what the kernels here use.
#pragma once

#include <link.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static thread_local
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
constexpr int kResident = 4;  // blocks at a time, in whole clusters

struct Barrier {  // of threads of a block
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
  bool done = false;
  const int64_t* waits = nullptr;  // until this is no longer `generation`
  int64_t generation = 0;
};

struct Warp {
  Barrier barrier;
  uint64_t slots[kLanes][8];  // values that lanes exchange
};

// The blocks of a cluster, each on its own thread.
struct Cluster {
  std::vector<struct Block> blocks;
  int size = 0;  // of them
  std::mutex mutex;
  std::condition_variable changed;
  int expected = 0, arrived = 0;  // threads at the barrier of all
  int64_t generation = 0;
  int idle = 0, ended = 0;  // blocks whose threads all wait for other blocks; and that have ended
  bool stuck = false;       // no block can go on

  // Until the barrier opens again; returns whether it does.
  bool wait(int64_t last) {
    std::unique_lock<std::mutex> lock(mutex);
    if (generation == last) ++idle;
    look();
    changed.wait(lock, [&] { return generation != last || stuck; });
    return generation != last;
  }

  // A block ends, and waits for the others of its cluster.
  void end() {
    std::unique_lock<std::mutex> lock(mutex);
    const int64_t last = generation;
    if (++ended == size) {
      ended = 0;
      open();
    }
    look();
    changed.wait(lock, [&] { return generation != last || stuck; });
  }

  void open() {
    idle = 0;
    ++generation;
    changed.notify_all();
  }

 private:
  void look() {
    stuck |= idle > 0 && idle + ended == size;
    if (stuck) changed.notify_all();
  }
};

struct Block {
  Cluster* cluster = nullptr;
  const std::function<void()>* body = nullptr;
  std::mt19937 order{0};
  std::unique_ptr<char[]> stacks;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier all;
  int votes = 0;
  std::vector<char> shared;
  unsigned index = 0;
  int current = 0;   // the running thread
  int64_t met = 0;  // generation of the cluster's barrier
  ucontext_t scheduler;
};

inline thread_local Block* block = nullptr;  // that this thread runs
inline int multiprocessors = 2;              // of the device
inline dim3 grid_dim_, block_dim_;

inline dim3 thread_index() { return {static_cast<unsigned>(block->current)}; }
inline dim3 block_index() { return {block->index}; }

inline Thread& own_thread() { return block->threads[block->current]; }
inline Warp& own_warp() { return block->warps[block->current / kLanes]; }
inline int own_lane() { return block->current % kLanes; }

inline void leave() { swapcontext(&own_thread().context, &block->scheduler); }

inline void wait_while(const int64_t& generation) {
  own_thread().generation = generation;
  own_thread().waits = &generation;
  leave();
  own_thread().waits = nullptr;
}

inline void arrive(Barrier& barrier) {
  if (++barrier.arrived < barrier.expected) return wait_while(barrier.generation);
  barrier.arrived = 0;
  ++barrier.generation;
}

// The barrier of all threads of a cluster.
inline void sync_cluster() {
  Cluster& here = *block->cluster;
  {
    const std::lock_guard<std::mutex> lock(here.mutex);
    block->met = here.generation;
    if (++here.arrived == here.expected) {
      here.arrived = 0;
      return here.open();
    }
  }
  wait_while(block->met);
}

inline void entry() {
  (*block->body)();
  own_thread().done = true;
  leave();
}

inline void poison(void* memory, size_t size) { std::memset(memory, 0xff, size); }  // NaN in every float type

struct Variables {  // all thread_local ones of the library that this thread has
  void* data = nullptr;
  size_t size = 0;
};

inline int find_variables(dl_phdr_info* library, size_t, void* found) {
  static thread_local char anchor;
  const auto data = static_cast<char*>(library->dlpi_tls_data);
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const auto& part = library->dlpi_phdr[i];
    if (part.p_type != PT_TLS || data == nullptr || &anchor < data || &anchor >= data + part.p_memsz) continue;
    *static_cast<Variables*>(found) = {data, part.p_memsz};
    return 1;
  }
  return 0;
}

// Returns whether all threads came to their end.
inline bool run_block(Block& here) {
  const int count = static_cast<int>(here.threads.size());
  std::vector<int> turn(count);
  block = &here;
  here.all = {count};
  for (Warp& warp : here.warps) warp.barrier = {kLanes};
  poison(here.shared.data(), here.shared.size());
  for (int i = 0; i < count; ++i) {
    turn[i] = i;
    Thread& thread = here.threads[i];
    thread.done = false;
    thread.waits = nullptr;
    thread.copies.clear();
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = here.stacks.get() + i * kStack;
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &here.scheduler;
    makecontext(&thread.context, entry, 0);
  }
  for (int left = count; left > 0;) {
    std::shuffle(turn.begin(), turn.end(), here.order);
    // most rounds run a single warp, so that it gets as far ahead of the others as barriers allow
    const int alone = count > kLanes && here.order() % 8 != 0 ? turn[0] / kLanes : -1;
    bool moved = false;
    for (int i : turn) {
      if (alone >= 0 && i / kLanes != alone) continue;
      Thread& thread = here.threads[i];
      if (thread.done || (thread.waits != nullptr && *thread.waits == thread.generation)) continue;
      here.current = i;
      moved = true;
      swapcontext(&here.scheduler, &thread.context);
      left -= thread.done;
    }
    if (moved || alone >= 0) continue;
    if (!here.cluster->wait(here.met)) {
      std::fprintf(stderr, "emulation: %d of %d threads wait at a barrier that the others do not reach\n", left, count);
      return false;
    }
    ++here.met;
  }
  poison(here.shared.data(), here.shared.size());  // shared memory ends with its block
  return true;
}

inline int run_once(int grid, int cluster_blocks, int threads, int shared_bytes, const std::function<void()>& body) {
  if (threads < 1 || threads > 1024 || threads % kLanes != 0 || grid < 0 || grid % cluster_blocks != 0) return 1;
  static std::mt19937 order{0};
  block_dim_ = {static_cast<unsigned>(threads)};
  grid_dim_ = {static_cast<unsigned>(grid)};
  std::vector<int> turn(grid / cluster_blocks);
  for (size_t i = 0; i < turn.size(); ++i) turn[i] = static_cast<int>(i);
  std::shuffle(turn.begin(), turn.end(), order);
  std::vector<Cluster> clusters(std::min<size_t>(turn.size(), std::max(1, kResident / cluster_blocks)));
  std::atomic<bool> failed{false};
  const auto work = [&](Cluster& cluster, int rank) {
    Block& here = cluster.blocks[rank];
    Variables variables;
    if (!dl_iterate_phdr(find_variables, &variables)) failed = true;
    for (size_t i = &cluster - clusters.data(); i < turn.size() && !failed; i += clusters.size()) {
      if (here.order() % 2 != 0) poison(variables.data, variables.size);  // else they keep what another block left
      here.index = static_cast<unsigned>(turn[i] * cluster_blocks + rank);
      if (!run_block(here)) failed = true;
      cluster.end();
    }
  };
  std::vector<std::thread> running;
  for (Cluster& cluster : clusters) {
    cluster.expected = threads * cluster_blocks;
    cluster.size = cluster_blocks;
    cluster.blocks.resize(cluster_blocks);
    for (Block& each : cluster.blocks) {
      each.cluster = &cluster;
      each.body = &body;
      each.order.seed(order());
      each.stacks.reset(new char[threads * kStack]);
      each.threads.resize(threads);
      each.warps.resize(threads / kLanes);
      each.shared.resize(static_cast<size_t>(shared_bytes) + 16);
    }
  }
  for (Cluster& cluster : clusters)
    for (int rank = 0; rank < cluster_blocks; ++rank) running.emplace_back(work, std::ref(cluster), rank);
  for (std::thread& each : running) each.join();
  return failed ? 719 : 0;  // CUDA's code of a launch failure
}

inline void (*before_replay)() = nullptr;  // if there is one, what is captured runs once more after it

inline int run(bool captured, int grid, int cluster_blocks, int threads, int shared_bytes, std::function<void()> body) {
  const int error = run_once(grid, cluster_blocks, threads, shared_bytes, body);
  if (error != 0 || !captured || before_replay == nullptr) return error;
  before_replay();
  return run_once(grid, cluster_blocks, threads, shared_bytes, body);
}

inline char* dynamic_shared(Block& of) {
  const auto address = reinterpret_cast<uintptr_t>(of.shared.data());
  return reinterpret_cast<char*>((address + 15) / 16 * 16);
}

// The address in another block of the cluster that corresponds to one in this block's dynamic memory.
inline char* of_rank(const void* own, int rank) {
  const auto offset = static_cast<const char*>(own) - dynamic_shared(*block);
  return dynamic_shared(block->cluster->blocks[rank]) + offset;
}

inline void copy_later(void* to, const void* from) { own_thread().copies.push_back({to, from}); }

inline void finish_copies() {
  auto& copies = own_thread().copies;
  for (const Copy& copy : copies) {
    if (copy.from != nullptr) std::memcpy(copy.to, copy.from, 16);
    else std::memset(copy.to, 0, 16);
  }
  copies.clear();
}

// An `atom` on unsigned integers, with the operation, order and scope that the instruction names.
inline unsigned atomic(const char* instruction, unsigned* address, unsigned by) {
  const bool ordered = std::strstr(instruction, ".acq_rel.gpu.") != nullptr;
  const bool wraps = std::strstr(instruction, ".inc.") != nullptr;
  auto* counter = reinterpret_cast<std::atomic<unsigned>*>(address);
  unsigned before = counter->load(std::memory_order_relaxed), after;
  do after = wraps ? (before >= by ? 0 : before + 1) : before + by;
  while (!(ordered ? counter->compare_exchange_weak(before, after, std::memory_order_acq_rel)
                   : counter->compare_exchange_weak(before, after, std::memory_order_relaxed)));
  return before;
}

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
