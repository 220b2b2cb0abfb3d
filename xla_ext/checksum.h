// A 64-bit checksum over a sequence of pages, for the round trip through the far tier.
//
// It guards against a disk that returns other bytes than it was given, not against an adversary.
// Four independent lanes keep the multiplier busy, so that it runs at memory speed and verifying
// costs less than the copy beside it. The state is carried from page to page: every page but the
// last must be a multiple of kChecksumStride.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jdynoff {

inline constexpr std::size_t kChecksumStride = 32;

class Checksum {
 public:
  void Update(const std::byte* data, std::size_t bytes) {
    std::size_t done = 0;
    for (; done + kChecksumStride <= bytes; done += kChecksumStride) {
      std::array<std::uint64_t, 4> words;
      std::memcpy(words.data(), data + done, kChecksumStride);
      for (int lane = 0; lane < 4; ++lane) lanes_[lane] = Mix(lanes_[lane], words[lane]);
    }
    if (done < bytes) {
      std::array<std::uint64_t, 4> words{};
      std::memcpy(words.data(), data + done, bytes - done);
      for (int lane = 0; lane < 4; ++lane) lanes_[lane] = Mix(lanes_[lane], words[lane]);
    }
    length_ += bytes;
  }

  std::uint64_t Finish() const {
    std::uint64_t value = length_ * kOddA;
    for (std::uint64_t lane : lanes_) value = Mix(value, lane);
    value ^= value >> 32;
    value *= kOddB;
    return value ^ (value >> 29);
  }

 private:
  // Odd constants without structure (fractional bits of square roots): multiplication by an odd
  // number is a bijection, so a single changed word always changes its lane.
  static constexpr std::uint64_t kOddA = 0x6a09e667f3bcc909ull;
  static constexpr std::uint64_t kOddB = 0xbb67ae8584caa73bull;

  static std::uint64_t Mix(std::uint64_t state, std::uint64_t word) {
    return std::rotl((state ^ word) * kOddA, 29) * kOddB;
  }

  std::array<std::uint64_t, 4> lanes_{0x3c6ef372fe94f82bull, 0xa54ff53a5f1d36f1ull,
                                      0x510e527fade682d1ull, 0x9b05688c2b3e6c1full};
  std::uint64_t length_ = 0;
};

}  // namespace jdynoff
