// The pool's pages: mapped once, handed out and taken back in constant time, never returned.
//
// Small fixed pages instead of one block per tensor: nothing fragments, an entry wastes less than
// one page, and a transfer gathers up to 64 of them in one call. Not thread-safe: the manager's
// mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "near_tier.h"

namespace jdynoff {

// Also the unit of file space, hence a multiple of every common device's O_DIRECT alignment.
inline constexpr std::size_t kPageBytes = 16 * 1024;

constexpr std::uint64_t PagesFor(std::uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes;
}

class PageArena {
 public:
  explicit PageArena(NearTier& memory) : memory_(memory) {}
  PageArena(const PageArena&) = delete;
  PageArena& operator=(const PageArena&) = delete;

  ~PageArena() {
    for (const Region& region : regions_) memory_.Unmap(region.base, region.bytes);
  }

  // Makes the arena at least `pages` large. Returns false, with nothing changed, when refused.
  bool GrowTo(std::uint64_t pages) {
    if (pages <= total_pages_) return true;
    const std::uint64_t extra = pages - total_pages_;
    std::byte* base = memory_.Map(extra * kPageBytes);
    if (base == nullptr) return false;
    regions_.push_back({base, extra * kPageBytes});
    free_.reserve(pages);
    // Descending, so that pages are handed out ascending and neighbours merge into one iovec.
    for (std::uint64_t i = extra; i > 0; --i) free_.push_back(base + (i - 1) * kPageBytes);
    total_pages_ = pages;
    return true;
  }

  // Precondition: the sum of what is handed out stays below total_pages(), which the tickets'
  // quotas guarantee.
  std::byte* Take() {
    std::byte* page = free_.back();
    free_.pop_back();
    return page;
  }

  void Return(std::byte* page) { free_.push_back(page); }

  std::uint64_t total_pages() const { return total_pages_; }

 private:
  struct Region {
    std::byte* base;
    std::size_t bytes;
  };

  NearTier& memory_;
  std::vector<Region> regions_;
  std::vector<std::byte*> free_;
  std::uint64_t total_pages_ = 0;
};

}  // namespace jdynoff
