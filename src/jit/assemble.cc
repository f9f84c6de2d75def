// Writes the source of a kernel: an include, the variant, and one extern "C" entry that names a
// KernelConfig value. Everything else is in the embedded texts.
#include <algorithm>

#include "base/environment.h"
#include "jit/jit.h"
#include "jit/texts.h"
#include "plait/error.h"
#include "sm80/layout.h"
#include "sm90/smem.h"
#include "variants/functors.h"

namespace plait::jit {
namespace {

constexpr int kPlainThreads = 128;  // plain::kNumThreads, which only NVRTC can read

// How a functor is declared, and how a combined variant passes a call on.
struct FunctorForm {
  const char *name, *result, *context, *argument;
};
constexpr FunctorForm kForms[] = {
    {"query_transform", "void", "RowContext", "Row& row"},
    {"key_transform", "void", "RowContext", "Row& row"},
    {"value_transform", "void", "RowContext", "Row& row"},
    {"logits_transform", "float", "LogitContext", "float logit"},
    {"logits_mask", "bool", "LogitContext", ""},
    {"output_transform", "float", "OutputContext", "float value"},
};

bool on_row(const FunctorForm& form) { return form.result == std::string("void"); }

std::string declaration(const FunctorForm& form) {
  const std::string argument = form.argument;
  return concat(on_row(form) ? "template <class Row> " : "", "PLAIT_HD static ", form.result, " ",
                form.name, "(const Params& p, const ", form.context, "& c",
                argument.empty() ? "" : ", ", argument, ")");
}

// The same between the parts of a combined variant, where a logit stays in its parts.
FunctorForm between_parts(FunctorForm form) {
  if (form.name == std::string("logits_transform")) {
    form.result = "Logit";
    form.argument = "Logit logit";
  }
  return form;
}

int count_lines(const std::string& text) {
  return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
}

std::string field(const VariantParam& p) {
  const char* type = p.kind == VariantParam::kFloat ? "float"
                     : p.kind == VariantParam::kInt ? "int"
                                                    : "const float*";  // no kTable: built-ins only
  return concat("alignas(8) ", type, " ", p.name, ";");
}

// User text as it is compiled within a namespace: `includes` gets its #include lines, which must
// stay outside; blank lines take their place.
std::string move_includes_out(const std::string& source, const std::string& file,
                              std::string& includes) {
  const std::string code = without_comments(source);
  std::string body;
  int line_number = 0;
  for (size_t begin = 0; begin < source.size();) {
    const size_t end = std::min(source.find('\n', begin), source.size());
    ++line_number;
    const bool is_include =
        include_on(std::string_view(code).substr(begin, end - begin)).has_value();
    const std::string line = source.substr(begin, end - begin);
    if (is_include) {
      includes += concat("#line ", line_number, " \"", file, "\"\n", line, "\n");
    } else {
      body += line;
    }
    body += '\n';
    begin = end + 1;
  }
  return body;
}

std::string part_namespace(const VariantPart& part) { return "custom_" + part.name; }
std::string part_type(const VariantPart& part) {
  return part.source.empty() ? part.struct_name : part_namespace(part) + "::" + part.struct_name;
}
std::string part_params(const VariantPart& part) {
  return part.source.empty() ? part.struct_name + "::Params" : part_namespace(part) + "::Params";
}

// What defines the struct of one part: an include of a built-in, or the user's text.
void add_part(const VariantPart& part, std::string& text) {
  if (part.source.empty()) {
    text += concat("#include \"host_device/variants/", part.name, ".h\"\n");
    return;
  }
  const std::string file = part.name + ".cuh";
  std::string includes;
  const std::string body = move_includes_out(part.source, file, includes);
  text += "#include \"host_device/variant.h\"\n#include \"host_device/row.h\"\n" + includes;
  text += concat("namespace plait::", part_namespace(part), " {\nstruct Params {\n");
  for (const VariantParam& p : part.params) text += concat("  ", field(p), "\n");
  text += concat("};\n#line 1 \"", file, "\"\n", body);
  text += concat("#line ", count_lines(text) + 2, " \"generated_variant.h\"\n");
  text += concat("static_assert(defines_a_functor<", part.struct_name,
                 ">(), \"no functor is a member of ", part.struct_name, "\");\n");
  text += concat("static_assert(agrees_on_softmax<", part.struct_name, ">(",
                 part.use_softmax ? "true" : "false",
                 "), \"kUseSoftmax differs from the variant's use_softmax\");\n");
  const std::vector<std::string> functors = functors_of(part);
  for (const FunctorForm& form : kForms) {
    if (std::find(functors.begin(), functors.end(), form.name) == functors.end()) continue;
    text += concat("static_assert(FunctorFits<", part.struct_name, ", Params>::", form.name,
                   ", \"write it as: ", declaration(form), "\");\n");
  }
  text += "}\n";
}

// One struct that hands each functor to the parts that define it, one after the other.
std::string combination(const Variant& variant) {
  const std::vector<VariantPart>& parts = variant.parts;
  std::string text = "struct Variant {\n  struct Params {\n";
  for (size_t i = 0; i < parts.size(); ++i) {  // an empty struct would take a slot
    if (!parts[i].params.empty()) text += concat("    ", part_params(parts[i]), " part", i, ";\n");
  }
  text += "  };\n";
  for (const FunctorForm& form : kForms) {
    // What is changed: a row in place; a logit or a value, call within call; nothing by a mask.
    const std::string argument = form.argument;
    std::string changed = argument.substr(argument.rfind(' ') + 1);
    std::string masks, statements;
    for (size_t i = 0; i < parts.size(); ++i) {
      const std::vector<std::string> functors = functors_of(parts[i]);
      if (std::find(functors.begin(), functors.end(), form.name) == functors.end()) continue;
      const std::string params =
          parts[i].params.empty() ? part_params(parts[i]) + "{}" : concat("p.part", i);
      const std::string call = concat(part_type(parts[i]), "::", form.name, "(", params, ", c",
                                      argument.empty() ? "" : ", ", changed, ")");
      statements += concat("    ", call, ";\n");
      masks += concat(masks.empty() ? "" : " && ", call);
      if (!on_row(form) && !argument.empty()) changed = call;
    }
    if (statements.empty()) continue;
    text += concat("  ", declaration(between_parts(form)), " {\n",
                   on_row(form) ? statements
                                : concat("    return ", argument.empty() ? masks : changed, ";\n"),
                   "  }\n");
  }
  return text +
         concat("  static constexpr bool kUseSoftmax = ", variant.use_softmax() ? "true" : "false",
                ";\n  static constexpr bool kCustomMask = ",
                variant.custom_mask() ? "true" : "false", ";\n};\n");
}

const char* short_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return "f32";
    case Dtype::kBfloat16:
      return "bf16";
    case Dtype::kFloat16:
      return "f16";
    case Dtype::kE4m3:
      return "e4m3";
    case Dtype::kE5m2:
      return "e5m2";
  }
  return "?";
}
std::string literal(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return "Dtype::kFloat32";
    case Dtype::kBfloat16:
      return "Dtype::kBfloat16";
    case Dtype::kFloat16:
      return "Dtype::kFloat16";
    case Dtype::kE4m3:
      return "Dtype::kE4m3";
    case Dtype::kE5m2:
      return "Dtype::kE5m2";
  }
  return "?";
}

const char* short_name(Loader loader) {
  switch (loader) {
    case Loader::kAffine:
      return "affine";
    case Loader::kPaged:
      return "paged";
    case Loader::kGather:
      return "gather";
  }
  return "?";
}
std::string literal(Loader loader) {
  switch (loader) {
    case Loader::kAffine:
      return "Loader::kAffine";
    case Loader::kPaged:
      return "Loader::kPaged";
    case Loader::kGather:
      return "Loader::kGather";
  }
  return "?";
}

std::string literal(const KernelConfig& c) {
  std::string shapes;
  for (int i = 0; i < c.num_shapes; ++i) {
    const TileShape& s = c.shapes[i];
    const char* mma = s.mma == Mma::kWgmma     ? "Mma::kWgmma"
                      : s.mma == Mma::kMmaSync ? "Mma::kMmaSync"
                                               : "Mma::kScalar";
    shapes += concat(i ? ", " : "", "{", mma, ", ", s.tile_q, ", ", s.key_split, "}");
  }
  return concat(
      "KernelConfig{.dtype_q = ", literal(c.dtype_q), ", .dtype_kv = ", literal(c.dtype_kv),
      ", .dtype_out = ", literal(c.dtype_out), ", .head_dim_qk = ", c.head_dim_qk,
      ", .head_dim_vo = ", c.head_dim_vo, ", .loader = ", literal(c.loader),
      ", .tile_kv = ", c.tile_kv, ", .num_stages = ", c.num_stages,
      ", .num_q_stages = ", c.num_q_stages,
      ", .num_consumer_warpgroups = ", c.num_consumer_warpgroups,
      ", .producer_registers = ", c.producer_registers,
      ", .consumer_registers = ", c.consumer_registers, ", .ctas_per_sm = ", c.ctas_per_sm,
      ", .num_shapes = ", c.num_shapes, ", .shapes = {", shapes, "}, .num_warps = ", c.num_warps,
      ", .num_landing_stages = ", c.num_landing_stages, ", .num_wide_tiles = ", c.num_wide_tiles,
      c.chunk_keys > 0 ? concat(", .chunk_keys = ", c.chunk_keys) : "", "}");
}

std::string names_of_parts(const Variant& variant) {
  std::string text;
  for (const VariantPart& part : variant.parts) text += (text.empty() ? "" : "|") + part.name;
  return text.empty() ? "standard" : text;
}

std::string describe(const KernelConfig& c) {
  std::string shapes;
  for (int i = 0; i < c.num_shapes; ++i) {
    shapes += concat(i ? "+" : "", c.shapes[i].tile_q, "x", c.tile_kv);
  }
  if (template_of(c) == Template::kSm80) shapes += concat("x", c.num_stages);
  std::string dims = concat("d", c.head_dim_qk);
  if (c.head_dim_vo != c.head_dim_qk) dims += concat("/", c.head_dim_vo);
  std::string dtypes = short_name(c.dtype_q);
  if (c.dtype_kv != c.dtype_q) dtypes += concat("/", short_name(c.dtype_kv));
  return concat(dtypes, " ", dims, " ", short_name(c.loader), " ", shapes,
                c.chunk_keys > 0 ? concat(" invariant ", c.chunk_keys) : "");
}

// What turns naps on (kernels/ptx/nap.cuh): of the text, by which kernels are cached.
std::string naps() {
  const auto seed = environment("PLAIT_JIT_NAPS");
  if (!seed) return "";
  check(seed->size() < 10 && seed->find_first_not_of("0123456789") == std::string::npos,
        "PLAIT_JIT_NAPS is \"", *seed, "\"; taken is a number below 10^9");
  return concat("#define PLAIT_NAPS ", std::stoul(*seed), "u\n");
}

}  // namespace

std::string_view text_of(const VariantPart& part) {
  if (!part.source.empty()) return part.source;
  const char* text = embedded_text(concat("host_device/variants/", part.name, ".h"));
  if (text == nullptr) {
    fail("variant '", part.name, "' is not built in: kernels/host_device/variants/ has no ",
         part.name, ".h");
  }
  return text;
}

std::vector<std::string> functors_of(const VariantPart& part) { return functors_in(text_of(part)); }

std::string variant_source(const Variant& variant) {
  std::string text;
  if (variant.parts.empty()) {
    return "#include \"host_device/variant.h\"\nnamespace plait {\nusing Variant = Standard;\n}\n";
  }
  size_t num_params = 0;
  for (const VariantPart& part : variant.parts) {
    add_part(part, text);
    num_params += part.params.size();
  }
  text += "namespace plait {\n";
  const VariantPart& only = variant.parts[0];
  if (variant.parts.size() > 1) {
    text += combination(variant);
  } else if (only.source.empty()) {
    text += concat("using Variant = ", only.struct_name, ";\n");
  } else {
    text += concat("struct Variant : ", part_type(only), " {\n  using Params = ", part_params(only),
                   ";\n  static constexpr bool kUseSoftmax = ", only.use_softmax ? "true" : "false",
                   ";\n};\n");
  }
  if (num_params > 0)
    text += concat("static_assert(sizeof(Variant::Params) == ", 8 * num_params, ");\n");
  return text + "}\n";
}

KernelSource assemble_attention(const KernelConfig& config, const Variant& variant) {
  const Template kind = template_of(config);
  for (int i = 0; i < config.num_shapes; ++i) {
    if ((config.shapes[i].mma == Mma::kWgmma) != (kind == Template::kSm90)) {
      fail("assemble: shape ", i, " mixes wgmma and other shapes in one kernel");
    }
  }
  struct Form {
    const char *name, *include, *call;
    int num_threads, smem_bytes;
  };
  const Form forms[] = {
      {"plain", "plain.cuh", "VariantCall", kPlainThreads, 0},
      {"sm80", "sm80/attention.cuh", "VariantCall", sm80::num_threads(config),
       sm80_smem_bytes(config)},
      {"sm90", "sm90/attention.cuh", "Sm90Call", sm90::num_threads(config),
       sm90_smem_bytes(config)},
  };
  const Form& form = forms[static_cast<int>(kind)];
  KernelSource source;
  source.name = concat(form.name, " ", describe(config), " ", names_of_parts(variant));
  source.variant_name = variant.name();
  source.entry = "plait_attention";
  source.num_threads = form.num_threads;
  source.smem_bytes = form.smem_bytes;
  source.contracts = config.chunk_keys == 0;
  const std::string same_threads =
      kind == Template::kPlain
          ? concat("static_assert(plain::kNumThreads == ", kPlainThreads, ");\n")
          : "";
  source.text =
      concat(naps(), "#include \"", form.include, "\"\n", variant_source(variant),
             "namespace plait {\n", same_threads, "extern \"C\" __global__ void __launch_bounds__(",
             source.num_threads, ", ", config.ctas_per_sm, ") ", source.entry,
             "(const __grid_constant__ ", form.call, "<Variant> call) {\n  ", form.name,
             "::attention<", literal(config), ", Variant>(call);\n}\n}\n");
  return source;
}

KernelSource assemble_utility(const std::string& name, std::optional<Dtype> dtype,
                              const std::string& call_type, int num_threads) {
  KernelSource source;
  source.name = concat(name, dtype ? " " : "", dtype ? short_name(*dtype) : "");
  source.variant_name = name;
  source.entry = "plait_" + name;
  source.num_threads = num_threads;
  // 1024 threads a multiprocessor: left alone, ptxas aims at fewer registers and spills around the
  // 64-bit division of append_kv. (A kernel of one CTA has it alone.)
  const int ctas_per_sm = num_threads == kUtilityThreads ? 1024 / num_threads : 1;
  source.text =
      concat("#include \"", name, ".cuh\"\nnamespace plait {\nextern \"C\" __global__ void ",
             "__launch_bounds__(", num_threads, ", ", ctas_per_sm, ") ", source.entry,
             "(const __grid_constant__ ", call_type, " call) {\n  ", name,
             dtype ? "<" + literal(*dtype) + ">" : "", "(call);\n}\n}\n");
  return source;
}

}  // namespace plait::jit
