#include "variant_args.h"

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstring>

#include "plait/error.h"
#include "tensor_checks.h"
#include "variants/rope.h"

namespace plait {
namespace {

unsigned long long float_slot(double value) {
  const float x = static_cast<float>(value);
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

struct Where {
  const std::string &param, &variant;
};
std::ostream& operator<<(std::ostream& os, const Where& where) {
  return os << "run: parameter '" << where.param << "' of variant '" << where.variant << "'";
}

std::string names_of(const Variant& variant) {
  std::string text;
  for (const VariantPart& part : variant.parts) {
    for (const VariantParam& param : part.params) {
      if (param.kind == VariantParam::kTable) continue;
      text += (text.empty() ? "" : ", ") + param.name;
    }
  }
  return text.empty() ? "none" : text;
}

}  // namespace

VariantSlots::VariantSlots(const Variant& variant, int num_qo_heads, int head_dim_qk)
    : variant_(variant), num_qo_heads_(num_qo_heads), head_dim_qk_(head_dim_qk) {
  for (const VariantPart& part : variant_.parts) {
    for (const VariantParam& param : part.params) {
      const Slot slot{param, &part};
      slots_.push_back(slot);
      if (param.kind == VariantParam::kTensor || param.kind == VariantParam::kTable) {
        planned_.push_back(0);
        continue;
      }
      VariantArg arg;
      arg.name = param.name;
      arg.number = param.value;
      planned_.push_back(value_of(slot, arg, {}));
    }
  }
}

unsigned long long VariantSlots::value_of(const Slot& slot, const VariantArg& arg,
                                          const Device& device) const {
  const std::string& part = slot.part->name;
  const char* name = arg.name.c_str();
  const Where where{arg.name, part};
  if (slot.param.kind == VariantParam::kTensor) {
    check(arg.tensor.defined(), where, " must be a tensor; a number is given");
    check_tensor({"run", name}, arg.tensor, arg.tensor.ndim, Dtype::kFloat32, device);
    for (int i = 0; i < arg.tensor.ndim; ++i) {
      int64_t dense = 1;
      for (int j = i + 1; j < arg.tensor.ndim; ++j) dense *= arg.tensor.shape[j];
      check(arg.tensor.shape[i] <= 1 || arg.tensor.stride(i) == dense, where, " has stride ",
            arg.tensor.stride(i), " in dimension ", i, "; it must be contiguous, ", dense);
    }
    const bool by_head = slot.param.size == VariantParam::kNumQoHeads;
    const int wanted = by_head                                       ? num_qo_heads_
                       : slot.param.size == VariantParam::kHeadDimQk ? head_dim_qk_
                                                                     : 0;
    int64_t size = 1;
    for (int i = 0; i < arg.tensor.ndim; ++i) size *= arg.tensor.shape[i];
    check(wanted == 0 || size == wanted, where, " has ", size, " elements; it must have ", wanted,
          by_head ? " (num_qo_heads)" : " (head_dim_qk)");
    return reinterpret_cast<uintptr_t>(arg.tensor.bytes());
  }
  check(!arg.tensor.defined(), where, " must be a number; it is ", Shown{arg.tensor});
  check(std::isfinite(arg.number), where, " is ", arg.number, "; it must be finite");
  if (slot.param.kind == VariantParam::kInt) {
    check(arg.number == std::floor(arg.number) && arg.number >= INT_MIN && arg.number <= INT_MAX,
          where, " is ", arg.number, "; it must be an int32");
    return static_cast<unsigned>(static_cast<int>(arg.number));
  }
  check(std::isfinite(static_cast<float>(arg.number)), where, " is ", arg.number,
        ", which is no float32");
  // Built-ins whose parameters may not be any number.
  check(!slot.part->source.empty() || !part.starts_with("rms_norm") || arg.number > 0, where,
        " is ", arg.number, "; it must be > 0");
  check(!slot.part->source.empty() || part != "soft_cap" ||
            static_cast<float>(arg.number) >= FLT_MIN,  // of a denormal the kernels' 1 / cap is inf
        where, " is ", arg.number, "; it must be > 0 and no denormal");
  return float_slot(arg.number);
}

std::vector<unsigned long long> VariantSlots::with(const std::vector<VariantArg>& args,
                                                   const Device& device) const {
  std::vector<unsigned long long> values = planned_;
  std::vector<bool> given(slots_.size());
  for (const VariantArg& arg : args) {
    bool found = false;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].param.name != arg.name || slots_[i].param.kind == VariantParam::kTable)
        continue;
      found = true;
      check(!given[i], "run: parameter '", arg.name, "' is given twice");
      given[i] = true;
      values[i] = value_of(slots_[i], arg, device);
    }
    if (!found) {
      check(false, "run: variant '", variant_.name(), "' has no parameter '", arg.name,
            "'; it has: ", names_of(variant_));
    }
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    check(given[i] || slots_[i].param.kind != VariantParam::kTensor, "run: parameter '",
          slots_[i].param.name, "' of variant '", slots_[i].part->name,
          "' is a tensor and has no value; give it to run()");
  }
  return values;
}

std::vector<VariantTable> variant_tables(const Variant& variant, int head_dim_qk) {
  std::vector<VariantTable> tables;
  size_t slot = 0;
  for (const VariantPart& part : variant.parts) {
    for (const VariantParam& param : part.params) {
      // rope's is the only one so far.
      if (param.kind == VariantParam::kTable)
        tables.push_back({slot, rope_table(part.rope, head_dim_qk)});
      ++slot;
    }
  }
  return tables;
}

}  // namespace plait
