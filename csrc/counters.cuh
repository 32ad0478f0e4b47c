// Counters of the blocks that have arrived (arrives_last); zero before and after each launch. Each source file that
// includes this has its own counters.
#pragma once

#include <atomic>

#include "device.cuh"

namespace fb {

constexpr int kGraphCounters = 1 << 20;  // 4 MB; a step of 64 rows of Qwen3-1.7B takes 14,336
constexpr int kStreams = 32, kStreamCounters = 1 << 14;  // 2 MB

// No launch has to clear these counters, since each run leaves them zero. First come kGraphCounters for captured
// launches, each of which keeps its own for ever; then kStreamCounters for each of the first kStreams streams, whose
// launches run one after the other and can share them.
static __device__ unsigned kept_counters[kGraphCounters + kStreams * kStreamCounters];

struct Counters {
  unsigned* given;  // counters in the caller's workspace, or null
  int first;        // if null: index of the launch's first counter in kept_counters
};

static __device__ inline unsigned* counter_at(const Counters& counters, int64_t index) {
  return (counters.given != nullptr ? counters.given : kept_counters + counters.first) + index;
}

// The index of a stream among the first kStreams that were seen; kStreams for any later one.
static inline int place_of(uint64_t stream) {
  static std::atomic<uint64_t> known[kStreams];  // 0: a free place
  for (int place = 0; place < kStreams; ++place) {
    uint64_t found = 0;
    if (known[place].compare_exchange_strong(found, stream) || found == stream) return place;
  }
  return kStreams;
}

// Counters for a launch on this stream: of kept_counters while some are free, else `given`, set to zero first. That
// memset is one more operation on the stream, and a kernel behind it cannot start before its predecessor ends.
static inline int counters_for(int count, unsigned* given, Stream stream, Counters* counters) {
  static std::atomic<int> taken{0};
  bool captured = false;
  if (const int error = is_capturing(stream, &captured)) return error;
  *counters = {nullptr, taken.load()};
  if (captured) {
    while (counters->first + count <= kGraphCounters)
      if (taken.compare_exchange_weak(counters->first, counters->first + count)) return 0;
  } else if (count <= kStreamCounters) {
    uint64_t id = 0;
    if (const int error = id_of(stream, &id)) return error;
    const int place = id == 0 ? kStreams : place_of(id);
    counters->first = kGraphCounters + place * kStreamCounters;
    if (place < kStreams) return 0;
  }
  counters->given = given;
  return set_zero(given, count * sizeof(unsigned), stream);
}

}  // namespace fb
