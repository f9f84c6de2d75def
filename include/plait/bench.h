// Measurements that need no GPU, as rows for `plait bench`: each names a case, a metric, its value
// and unit.
#pragma once
#include <string>
#include <vector>

namespace plait {

struct BenchRow {
  std::string case_name, metric;
  double value = 0;
  std::string unit;
};

// Host time of one plan (median, and smallest) in C++ on one core, memory used again: decode of
// lengths (37 i mod 8000) + 1, batch 1, 16, 256, 4096, 32/8 heads, page 16, 132 and 264 CTAs.
// "view + plan" starts from the caller's arrays (lengths on the host, a page table on the device),
// "plan alone" from the block-sparse view.
std::vector<BenchRow> bench_plan();

// Modelled balance (busiest CTA / mean) of decode of b x 4096 keys, b = 1 ... 64, 8 kv heads of
// group 4, 132 CTAs: the worst and where, the mean, and the most partial tiles a CTA. Beside it the
// modelled time of Scheduler::kPrefixSum over kAuto's, of these, of b = 65 ... 128, and of batches
// of 16 requests of very unequal lengths.
std::vector<BenchRow> bench_balance();

// Bytes a second, read and written together, of a 256 MiB copy on all threads of the CPU backend:
// the median of 7. The ceiling beside which decode on the CPU is read.
double copy_bandwidth();

}  // namespace plait
