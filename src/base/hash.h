// 128-bit FNV-1a, for cache keys and checksums: an accident is found, an attacker is not.
// Each piece is preceded by its length, so that ("ab", "c") and ("a", "bc") differ.
#pragma once
#include <string>
#include <string_view>

namespace plait {

class Hash128 {
 public:
  Hash128& add(std::string_view bytes);
  std::string hex() const;  // 32 lower-case digits

 private:
  void mix(std::string_view bytes);
  unsigned __int128 state_ = (static_cast<unsigned __int128>(0x6c62272e07bb0142ull) << 64) |
                             0x62b821756295c58dull;  // FNV offset basis
};

std::string hash_of(std::string_view bytes);

}  // namespace plait
