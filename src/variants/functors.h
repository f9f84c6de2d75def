// What a user's variant source says, read as text: the functors it defines, misspelt ones, PTX,
// includes. The compiler has the last word; this gives the errors that it would give badly, and
// what the host must know without compiling.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace plait {

inline constexpr const char* kFunctorNames[] = {"query_transform", "key_transform",
                                                "value_transform", "logits_transform",
                                                "logits_mask",     "output_transform"};

// The source with comments, string and character literals blanked, line breaks kept.
std::string without_comments(std::string_view source);
bool is_identifier(std::string_view name);  // a C++ identifier that is no keyword
// The functors that `source` defines, in the order of kFunctorNames: a name followed by '('.
std::vector<std::string> functors_in(std::string_view source);
// Whether a function of host_device/base.h that takes powers, logarithms or quotients is called.
bool computes_powers_in(std::string_view source);
// Throws ArgumentError unless `source` defines `struct struct_name`, at least one functor and
// nothing that looks like a misspelt one, and leaves Params to us. `where`: "variant 'alibi'".
void check_source(const std::string& where, const std::string& struct_name,
                  std::string_view source);
// The line (from 1) of the first `asm` that no preprocessor test of the target guards; 0: none.
int line_of_ptx(std::string_view source);

}  // namespace plait
