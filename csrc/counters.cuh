// Counters of the blocks that have arrived (arrives_last); zero before and after each launch. Each source file that
// includes this has its own counters.
#pragma once

#include <atomic>

#include "device.cuh"

namespace fb {

constexpr int kGraphCounters = 1 << 20;  // 4 MB; a step of 64 rows of Qwen3-1.7B takes 14,336

// Each captured launch keeps its own counters here for ever; they need no clearing, since each run leaves them zero.
static __device__ unsigned graph_counters[kGraphCounters];

struct Counters {
  unsigned* given;  // or null
  int first;        // else the index of the first one above
};

static __device__ inline unsigned* counter_at(const Counters& counters, int64_t index) {
  return (counters.given != nullptr ? counters.given : graph_counters + counters.first) + index;
}

// Counters for a launch on this stream: own ones if it is captured and some are left, else the given ones, zeroed.
static inline int counters_for(int count, unsigned* given, Stream stream, Counters* counters) {
  static std::atomic<int> taken{0};
  bool captured = false;
  if (const int error = is_capturing(stream, &captured)) return error;
  *counters = {nullptr, taken.load()};
  while (captured && counters->first + count <= kGraphCounters)
    if (taken.compare_exchange_weak(counters->first, counters->first + count)) return 0;
  counters->given = given;
  return set_zero(given, count * sizeof(unsigned), stream);
}

}  // namespace fb
