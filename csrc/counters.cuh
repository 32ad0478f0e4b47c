// Counters of the blocks that have arrived (arrives_last); zero before and after each launch. Each source file that
// includes this has its own counters.
#pragma once

#include <atomic>

#include "device.cuh"

namespace fb {

constexpr int kGraphCounters = 1 << 20;  // 4 MB; a step of 64 rows of Qwen3-1.7B takes 14,336
constexpr int kStreams = 32, kStreamCounters = 1 << 14;  // 2 MB

// They need no clearing, since each run leaves them zero: each captured launch keeps its own for ever, then come those of
// the first streams, on which launches run one after the other.
static __device__ unsigned kept_counters[kGraphCounters + kStreams * kStreamCounters];

struct Counters {
  unsigned* given;  // or null
  int first;        // else the index of the first one above
};

static __device__ inline unsigned* counter_at(const Counters& counters, int64_t index) {
  return (counters.given != nullptr ? counters.given : kept_counters + counters.first) + index;
}

// Which of the first streams this is, or kStreams.
static inline int place_of(uint64_t stream) {
  static std::atomic<uint64_t> known[kStreams];  // 0 where none is
  for (int place = 0; place < kStreams; ++place) {
    uint64_t found = 0;
    if (known[place].compare_exchange_strong(found, stream) || found == stream) return place;
  }
  return kStreams;
}

// Counters for a launch on this stream: kept ones if some are left, else the given ones, zeroed. Clearing is work of its
// own on the stream, behind which a kernel cannot start early.
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
