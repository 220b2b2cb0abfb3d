#include "page_arena.h"

#include <algorithm>

namespace jdynoff {

PageArena::~PageArena() {
  for (const Region& region : regions_) memory_.Unmap(region.base, region.bytes);
}

// Makes sure that so many blocks are on the shelf.
bool PageArena::Stock(Shelf& shelf, std::size_t blocks, bool huge) {
  const std::size_t present = shelf.resident.size() + shelf.blank.size();
  if (blocks <= present) return true;
  const std::size_t missing = blocks - present;
  std::byte* base = memory_.Map(missing * kBlockBytes, huge);
  if (base == nullptr) return false;
  regions_.push_back({base, missing * kBlockBytes});
  // Descending, so that blocks are drawn in ascending order and neighbours merge into one iovec.
  for (std::size_t i = missing; i > 0; --i) {
    shelf.blank.push_back({base + (i - 1) * kBlockBytes, 0, huge});
  }
  return true;
}

PageArena::Block PageArena::Draw(Shelf& shelf) {
  std::vector<Block>& blocks = shelf.resident.empty() ? shelf.blank : shelf.resident;
  const Block block = blocks.back();
  blocks.pop_back();
  kept_pages_ -= block.resident_pages;
  return block;
}

bool PageArena::Open(std::uint64_t pages, Lease& lease) {
  const std::uint64_t whole = pages / kBlockPages;
  const std::uint64_t rest = pages % kBlockPages;
  if (!Stock(whole_, whole, true) || !Stock(tails_, rest > 0 ? 1 : 0, false)) return false;
  lease.pages = pages;
  lease.blocks.reserve(whole + 1);
  for (std::uint64_t i = 0; i < whole; ++i) lease.blocks.push_back(Draw(whole_));
  if (rest > 0) {
    Block tail = Draw(tails_);
    if (tail.resident_pages > rest) {
      // Less than one block: not worth leaving to the caller.
      const std::uint64_t surplus = tail.resident_pages - rest;
      memory_.GiveBack(tail.base + rest * kPageBytes, surplus * kPageBytes);
      resident_pages_ -= surplus;
      tail.resident_pages = rest;
    }
    lease.blocks.push_back(tail);
  }
  leased_pages_ += pages;
  recently_leased_.push_back(leased_pages_);
  if (recently_leased_.size() > kRecentTickets) recently_leased_.pop_front();
  return true;
}

void PageArena::Close(Lease& lease) {
  leased_pages_ -= lease.pages;
  // Backwards, so that the next lease gets them in the same order.
  for (auto block = lease.blocks.rbegin(); block != lease.blocks.rend(); ++block) {
    Shelf& shelf = ShelfOf(*block);
    (block->resident_pages > 0 ? shelf.resident : shelf.blank).push_back(*block);
    kept_pages_ += block->resident_pages;
  }
  lease = Lease();
}

std::byte* PageArena::Take(Lease& lease) {
  if (!lease.returned.empty()) {
    std::byte* page = lease.returned.back();
    lease.returned.pop_back();
    return page;
  }
  Block& block = lease.blocks[lease.used / kBlockPages];
  const std::uint64_t index = lease.used++ % kBlockPages;
  if (index == block.resident_pages) {
    const std::uint64_t more = block.huge ? kBlockPages : 1;
    block.resident_pages += more;
    resident_pages_ += more;
  }
  return block.base + index * kPageBytes;
}

std::vector<PageArena::Block> PageArena::TakeExcess() {
  std::uint64_t worth = leased_pages_;
  for (std::uint64_t recent : recently_leased_) worth = std::max(worth, recent);
  const std::uint64_t room = worth - leased_pages_;
  std::vector<Block> excess;
  for (Shelf* shelf : {&whole_, &tails_}) {
    // The first were not used for the longest time.
    auto block = shelf->resident.begin();
    for (; kept_pages_ > room && block != shelf->resident.end(); ++block) {
      kept_pages_ -= block->resident_pages;
      excess.push_back(*block);
    }
    shelf->resident.erase(shelf->resident.begin(), block);
  }
  return excess;
}

void PageArena::Reclaim(const std::vector<Block>& given_back) {
  for (const Block& block : given_back) {
    resident_pages_ -= block.resident_pages;
    ShelfOf(block).blank.push_back({block.base, 0, block.huge});
  }
}

}  // namespace jdynoff
