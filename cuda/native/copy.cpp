// The host build of the copies: one thread in place of all warps, lane after lane.
#include "copy.h"

namespace reprise {
namespace {

struct Table {
  uint32_t words[kTableWords];
  Table() { crc_fill_table(words, 0, 1); }
};

template <bool kGather>
void copy_all(const CopyArguments& arguments) {
  for (uint32_t unit = 0; unit < copy_units(arguments); ++unit) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) copy_unit<kGather>(arguments, unit, lane);
  }
}

template <CopyMode kMode>
void copy_all_checked(const CopyArguments& arguments) {
  const Table table;
  for (uint32_t unit = 0; unit < arguments.job_count * arguments.objects; ++unit) {
    uint32_t sum = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) sum ^= copy_object<kMode>(arguments, unit, lane, table.words);
    copy_finish(arguments, unit, ~sum);
  }
}

}  // namespace
}  // namespace reprise

extern "C" {

void reprise_host_gather(const reprise::CopyArguments* arguments) { reprise::copy_all<true>(*arguments); }

void reprise_host_scatter(const reprise::CopyArguments* arguments) { reprise::copy_all<false>(*arguments); }

void reprise_host_gather_checked(const reprise::CopyArguments* arguments) {
  reprise::copy_all_checked<reprise::CopyMode::kGather>(*arguments);
}

void reprise_host_scatter_checked(const reprise::CopyArguments* arguments) {
  reprise::copy_all_checked<reprise::CopyMode::kScatter>(*arguments);
}

void reprise_host_checksum(const reprise::CopyArguments* arguments) {
  reprise::copy_all_checked<reprise::CopyMode::kChecksumOfSlots>(*arguments);
}
}
