// The parameters of a variant as an executor takes them: 8 bytes each, in the order of
// Variant::parts and their params, from what was planned and what one run brings.
#pragma once
#include <vector>

#include "plait/variant.h"

namespace plait {

class VariantSlots {
 public:
  // `num_qo_heads`, `head_dim_qk`: what tensors are sized by; 0: not known, not checked.
  explicit VariantSlots(const Variant& variant, int num_qo_heads = 0, int head_dim_qk = 0);
  // The slots of one run. Throws ArgumentError for a name the variant lacks or that stands twice, a
  // number that its parameter does not take, a tensor that is missing or not contiguous float32 on
  // `device`.
  std::vector<unsigned long long> with(const std::vector<VariantArg>& args,
                                       const Device& device) const;

 private:
  struct Slot {
    VariantParam param;
    const VariantPart* part;
  };
  unsigned long long value_of(const Slot& slot, const VariantArg& arg, const Device& device) const;

  Variant variant_;
  int num_qo_heads_, head_dim_qk_;
  std::vector<Slot> slots_;
  std::vector<unsigned long long> planned_;  // values of numbers; 0 for tensors
};

// Values that a variant's slot points at, the same for every run; an executor puts them into its
// memory and the address into the slot (0 in what VariantSlots makes).
struct VariantTable {
  size_t slot;
  std::vector<unsigned long long> values;
};
std::vector<VariantTable> variant_tables(const Variant& variant, int head_dim_qk);

}  // namespace plait
