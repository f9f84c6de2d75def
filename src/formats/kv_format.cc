// The KV formats by name.
#include "plait/kv_format.h"

#include "plait/error.h"
#include "tensor_checks.h"

namespace plait {

KvFormat ragged_kv() { return {}; }

KvFormat paged_kv(int page_size, bool hnd) {
  check(page_size >= 1, "paged_kv: page_size is ", page_size, "; it must be >= 1");
  return {KvFormat::kPaged, page_size, hnd, 1};
}

KvFormat composed_kv(KvFormat format, int num_levels) {
  check_num_levels("composed_kv: num_levels", num_levels);
  check(format.num_levels == 1, "composed_kv: format is composed already, of ", format.num_levels,
        " levels; compose a ragged or paged one");
  format.num_levels = num_levels;
  return format;
}

}  // namespace plait
