// The pool's pages: which ticket uses which, and how much memory they take up.
//
// Small fixed pages instead of one block per tensor: nothing fragments, an entry wastes less than
// one page, and a transfer gathers up to 64 of them in one call. A ticket takes its pages from a
// *lease*, which holds as many as the ticket's quota. Behind it are blocks of the size of a huge
// page, each in one lease at a time: when the ticket closes, whole blocks fall free, however mixed
// the use of their pages was. They stay resident for the next lease, as long as that is no more
// than the last few tickets needed together; the rest is given back to the operating system.
//
// The trap: a huge page becomes resident as a whole and is given back as a whole only. What a
// quota needs beyond whole blocks is therefore a *tail*: a block without huge pages, resident
// page by page. Not thread-safe: the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "near_tier.h"

namespace jdynoff {

// Also the unit of file space, hence a multiple of every common device's O_DIRECT alignment.
inline constexpr std::size_t kPageBytes = 16 * 1024;
inline constexpr std::size_t kBlockPages = kBlockBytes / kPageBytes;

constexpr std::uint64_t PagesFor(std::uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes;
}

class PageArena {
 public:
  // Each of the last few tickets tells how much memory is worth keeping: one small step between
  // large ones must not cost the next large one its pages.
  static constexpr std::size_t kRecentTickets = 8;

  struct Block {
    std::byte* base = nullptr;
    std::uint64_t resident_pages = 0;  // the first so many
    bool huge = false;
  };

  // What one ticket may use. Moved from is empty.
  class Lease {
   public:
    Lease() = default;

   private:
    friend class PageArena;
    std::vector<Block> blocks;         // at most one tail, the last
    std::uint64_t pages = 0;           // all that may be taken
    std::uint64_t used = 0;            // pages ever taken: the first so many of the blocks
    std::vector<std::byte*> returned;  // last in, first out: what is warm is used again
  };

  explicit PageArena(NearTier& memory) : memory_(memory) {}
  PageArena(const PageArena&) = delete;
  PageArena& operator=(const PageArena&) = delete;
  ~PageArena();

  // False, with the lease as it was, when the operating system refuses.
  bool Open(std::uint64_t pages, Lease& lease);
  // All pages must have been returned.
  void Close(Lease& lease);

  // Precondition: fewer pages are out than the lease has, which the ticket's quota guarantees.
  std::byte* Take(Lease& lease);
  void Return(Lease& lease, std::byte* page) { lease.returned.push_back(page); }

  // Removes the free blocks that are more than is worth keeping; to be called after each Open and
  // Close. The caller gives their resident pages back, without the mutex because it may take
  // milliseconds, and then calls Reclaim.
  std::vector<Block> TakeExcess();
  void Reclaim(const std::vector<Block>& given_back);

  // What takes up memory: at most the larger of what is leased and what was leased at the opening
  // of one of the last few tickets, unless TakeExcess returned blocks that are not reclaimed yet.
  std::uint64_t resident_pages() const { return resident_pages_; }

 private:
  struct Region {
    std::byte* base;
    std::size_t bytes;
  };

  // Free blocks of one kind; the last is the next to be used.
  struct Shelf {
    std::vector<Block> resident;
    std::vector<Block> blank;
  };

  Shelf& ShelfOf(const Block& block) { return block.huge ? whole_ : tails_; }
  bool Stock(Shelf& shelf, std::size_t blocks, bool huge);
  Block Draw(Shelf& shelf);

  NearTier& memory_;
  std::vector<Region> regions_;
  Shelf whole_;
  Shelf tails_;
  std::uint64_t leased_pages_ = 0;             // whether used or not
  std::uint64_t resident_pages_ = 0;           // in leases, on shelves and being given back
  std::uint64_t kept_pages_ = 0;               // of these, on shelves
  std::deque<std::uint64_t> recently_leased_;  // leased_pages_ after each of the last openings
};

}  // namespace jdynoff
