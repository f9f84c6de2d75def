#include "base/hash.h"

namespace plait {

void Hash128::mix(std::string_view bytes) {
  constexpr unsigned __int128 kPrime = (static_cast<unsigned __int128>(1) << 88) | 0x13bu;
  for (const char c : bytes) {
    state_ ^= static_cast<unsigned char>(c);
    state_ *= kPrime;
  }
}

Hash128& Hash128::add(std::string_view bytes) {
  mix(std::to_string(bytes.size()) + ":");
  mix(bytes);
  return *this;
}

std::string Hash128::hex() const {
  std::string text(32, '0');
  unsigned __int128 rest = state_;
  for (int i = 31; i >= 0; --i, rest >>= 4)
    text[i] = "0123456789abcdef"[static_cast<int>(rest & 15)];
  return text;
}

std::string hash_of(std::string_view bytes) { return Hash128().add(bytes).hex(); }

}  // namespace plait
