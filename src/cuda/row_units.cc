#include "cuda/row_units.h"

#include <cstdlib>
#include <numeric>

#include "plait/error.h"

namespace plait::cuda {

RowUnits row_units(const char* name, const KvStrides& stride, i64 num_blocks, int block_size,
                   int element_bytes) {
  const i64 block = num_blocks > 1 ? stride.block * element_bytes : 0;
  const i64 token = block_size > 1 ? stride.token * element_bytes : 0;
  i64 unit = std::gcd(block, token);
  if (unit == 0) return {0, 0, 0};
  if (unit > kMaxInt) unit = std::gcd(unit, i64{1} << 30);
  const i64 blocks = block / unit, tokens = token / unit;
  // Products of the largest factors stay below 2^63: a tensor has that many bytes at most.
  const i64 farthest = (num_blocks - 1) * std::abs(blocks) + (block_size - 1) * std::abs(tokens);
  check(farthest <= kMaxInt, "run: ", name, ", ", num_blocks, " pages of ", block_size,
        " tokens with strides of ", block, " and ", token,
        " bytes, has rows more than 2^31 times the strides' common divisor, ", unit,
        " bytes, apart, which kernel sm90a cannot gather; kernel=\"plain\" takes it");
  return {static_cast<int>(blocks), static_cast<int>(tokens), static_cast<int>(unit)};
}

}  // namespace plait::cuda
