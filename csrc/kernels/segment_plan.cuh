// A model of what the segmented route's kernels take, on the host: it decides how long segments are, and who folds their maps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "packet.cuh"

namespace jax_kda {

// Cycles of an H200, fitted to its measured kernels. segments.py has them too.
inline constexpr double kKernel = 6000.;                      // from one kernel's end to the next one's first products
inline constexpr double kMaps64 = 770., kMaps128 = 1200., kMapsMemory = 10.;  // a chunk: for CTAs of 64 and 128 rows, and of all SMs' memory traffic
inline constexpr double kOutputs64 = 1230., kOutputs128 = 2300., kOutputsMemory = 16.;
inline constexpr double kFold = 1000., kApply = 2600.;  // a map in step 3, and in step 4

inline double rounds_of(int64_t ctas, int sms) { return double((ctas + sms - 1) / sms); }

// What becomes of the maps of sequences of so many segments.
struct FoldPlan {
  bool folded;    // in step 3
  int64_t group;  // segments of a group; none where one fold along the sequence is quicker
  double cycles;
};
inline FoldPlan plan_fold(int64_t tasks, int64_t segments, bool packed, int sms) {
  if (segments <= 2 && !packed) return {true, 0, 0.};
  const double along = segments <= 2 ? 0. : kKernel + double(segments - 2) * kFold * rounds_of(tasks * (kHeadDim / 16), sms);
  int64_t group = 2;
  while (group * group < segments) ++group;
  const int64_t groups = (segments - 1) / group;  // those before the last
  const double in_groups = double(group - 1) * kFold * rounds_of(tasks * groups * (2 * kHeadDim / 16), sms);
  const double grouped = 2. * kKernel + kApply + in_groups + double(groups - 1) * kFold * rounds_of(tasks * (kHeadDim / 16), sms);
  // Not where CTAs have 128 rows, which are short of registers, nor where one sequence may have the segments of all.
  const double in_step4 = 2 * tasks * segments <= sms && !packed ? double(segments - 2) * kApply : INFINITY;
  if (in_step4 <= along && in_step4 <= grouped) return {false, 0, in_step4};
  return grouped < along ? FoldPlan{true, group, grouped} : FoldPlan{true, 0, along};
}

// Chunks of the longest of N sequences in a row of T tokens, of which only that is known: of a row cut at random places, on average.
inline int64_t longest_chunks(int64_t T, int64_t N) {
  const int64_t row = std::max<int64_t>((T + kChunk - 1) / kChunk, 1);
  if (N <= 1) return row;
  const double spread = std::log(double(N)) + 0.5772 + 0.5 / double(N);
  return std::min(std::max<int64_t>(int64_t(double(row) / double(N) * spread), 1), row);
}

}  // namespace jax_kda
