// The texts that cmake/embed_text.cmake compiles into the library: every file of kernels/ under its
// name relative to that folder, and plait/plan_data.h.
#pragma once

namespace plait::jit {

struct EmbeddedFile {
  const char* name;
  const char* text;
};
extern const EmbeddedFile kEmbeddedFiles[];
extern const int kNumEmbeddedFiles;

}  // namespace plait::jit
