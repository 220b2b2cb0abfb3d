// How much memory the pool takes up: what it says, what the operating system says, and how much
// of it stays when steps become smaller.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <random>

#include "check.h"
#include "page_arena.h"

namespace jdynoff {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// Host memory that knows what is resident of it.
class WatchedMemory final : public NearTier {
 public:
  std::byte* Map(std::size_t bytes, bool huge) override {
    std::byte* base = memory_->Map(bytes, huge);
    if (base != nullptr) regions_.emplace_back(base, bytes);
    return base;
  }
  void Unmap(std::byte* base, std::size_t bytes) override { memory_->Unmap(base, bytes); }
  void GiveBack(std::byte* base, std::size_t bytes) override {
    ++give_backs;
    memory_->GiveBack(base, bytes);
  }
  void CopyIn(std::byte*, const std::byte*, std::size_t) override {}
  void CopyOut(std::byte*, const std::byte*, std::size_t) override {}

  std::uint64_t ResidentBytes() const {
    const auto system_page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    std::uint64_t resident = 0;
    for (const auto& [base, bytes] : regions_) {
      std::vector<unsigned char> pages(bytes / system_page);
      CHECK_EQ(::mincore(base, bytes, pages.data()), 0);
      for (unsigned char page : pages) resident += (page & 1) * system_page;
    }
    return resident;
  }
  std::uint64_t MappedBytes() const {
    return std::accumulate(regions_.begin(), regions_.end(), std::uint64_t{0},
                           [](std::uint64_t sum, const auto& r) { return sum + r.second; });
  }

  int give_backs = 0;

 private:
  std::unique_ptr<NearTier> memory_ = MakeHostMemory();
  std::vector<std::pair<std::byte*, std::size_t>> regions_;
};

// A ticket's life in the arena.
class Step {
 public:
  Step(PageArena& arena, WatchedMemory& memory, std::uint64_t pages)
      : arena_(arena), memory_(memory), quota_(pages) {
    CHECK(arena_.Open(pages, lease_));
    GiveBackExcess();
  }
  ~Step() {
    Return(pages_.size());
    arena_.Close(lease_);
    GiveBackExcess();
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  void Take(std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      pages_.push_back(arena_.Take(lease_));
      std::memset(pages_.back(), 1, kPageBytes);
    }
  }
  void Return(std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      arena_.Return(lease_, pages_.back());
      pages_.pop_back();
    }
  }
  std::uint64_t quota() const { return quota_; }
  const std::vector<std::byte*>& pages() const { return pages_; }

 private:
  void GiveBackExcess() {
    const std::vector<PageArena::Block> excess = arena_.TakeExcess();
    for (const PageArena::Block& block : excess) {
      memory_.GiveBack(block.base, block.resident_pages * kPageBytes);
    }
    arena_.Reclaim(excess);
  }

  PageArena& arena_;
  WatchedMemory& memory_;
  const std::uint64_t quota_;
  PageArena::Lease lease_;
  std::vector<std::byte*> pages_;
};

TEST(a_large_pool_is_given_back_after_a_few_smaller_ones) {
  WatchedMemory memory;
  PageArena arena(memory);
  const std::uint64_t large = PagesFor(45 * kMiB) + 5;
  const std::uint64_t small = PagesFor(5 * kMiB) + 7;
  Step(arena, memory, large).Take(large);
  CHECK_EQ(memory.ResidentBytes(), large * kPageBytes);
  for (std::size_t i = 1; i < PageArena::kRecentTickets; ++i) {
    Step(arena, memory, small).Take(small);
    // But for one block: the two have tails of different lengths.
    CHECK(arena.resident_pages() + kBlockPages > large);
  }
  Step step(arena, memory, small);
  CHECK(memory.ResidentBytes() <= small * kPageBytes);
  step.Take(small);
  CHECK_EQ(memory.ResidentBytes(), small * kPageBytes);
  CHECK_EQ(arena.resident_pages(), small);
}

TEST(equal_steps_find_the_same_pages_resident) {
  WatchedMemory memory;
  PageArena arena(memory);
  const std::uint64_t quota = PagesFor(9 * kMiB) + 3;
  std::vector<std::byte*> first;
  for (int i = 0; i < 40; ++i) {
    Step step(arena, memory, quota);
    step.Take(quota);
    if (first.empty()) first = step.pages();
    CHECK(step.pages() == first);
    CHECK_EQ(arena.resident_pages(), quota);
  }
  CHECK_EQ(memory.give_backs, 0);
  CHECK_EQ(memory.MappedBytes(), 10 * kMiB);
}

TEST(a_large_step_between_small_ones_keeps_its_pages) {
  WatchedMemory memory;
  PageArena arena(memory);
  for (int i = 0; i < 20; ++i) {
    Step(arena, memory, PagesFor(40 * kMiB)).Take(PagesFor(40 * kMiB));
    for (int k = 0; k < 4; ++k) Step(arena, memory, PagesFor(4 * kMiB)).Take(PagesFor(4 * kMiB));
  }
  CHECK_EQ(memory.give_backs, 0);
}

TEST(a_page_out_of_a_small_quota_costs_a_page) {
  WatchedMemory memory;
  PageArena arena(memory);
  Step step(arena, memory, 3);
  CHECK_EQ(memory.ResidentBytes(), 0u);
  step.Take(1);
  CHECK_EQ(memory.ResidentBytes(), kPageBytes);
  CHECK_EQ(arena.resident_pages(), 1u);
}

TEST(pages_are_handed_out_in_ascending_order) {
  WatchedMemory memory;
  PageArena arena(memory);
  Step step(arena, memory, 5 * kBlockPages);
  step.Take(5 * kBlockPages);
  for (std::size_t i = 1; i < step.pages().size(); ++i) {
    CHECK(step.pages()[i] == step.pages()[i - 1] + kPageBytes);
  }
}

TEST(no_more_is_resident_than_open_or_recent_quotas_whatever_the_order) {
  std::mt19937_64 random(5);
  WatchedMemory memory;
  PageArena arena(memory);
  std::deque<std::uint64_t> recent;
  std::vector<std::unique_ptr<Step>> open;
  std::uint64_t leased = 0;
  for (int i = 0; i < 3000; ++i) {
    // Sizes of a few pages to a few blocks, in phases, with several steps open at a time.
    const std::uint64_t largest = i / 500 % 2 == 0 ? 6 * kBlockPages : kBlockPages + 20;
    const std::uint64_t action = random() % 4;
    if (action == 0 && open.size() < 6) {
      const std::uint64_t quota = random() % largest;
      open.push_back(std::make_unique<Step>(arena, memory, quota));
      leased += quota;
      recent.push_back(leased);
      if (recent.size() > PageArena::kRecentTickets) recent.pop_front();
    } else if (!open.empty()) {
      const std::size_t chosen = random() % open.size();
      Step& step = *open[chosen];
      if (action == 1) {
        leased -= step.quota();
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(chosen));
      } else if (action == 2) {
        step.Take(random() % (step.quota() - step.pages().size() + 1));
      } else {
        step.Return(random() % (step.pages().size() + 1));
      }
    }
    std::uint64_t bound = leased;
    for (std::uint64_t pages : recent) bound = std::max(bound, pages);
    CHECK(arena.resident_pages() <= bound);
    if (i % 10 == 0) CHECK(memory.ResidentBytes() <= arena.resident_pages() * kPageBytes);
  }
  // No page is in two steps.
  std::vector<std::byte*> all;
  for (const auto& step : open) all.insert(all.end(), step->pages().begin(), step->pages().end());
  std::sort(all.begin(), all.end());
  CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
}

TEST(a_manager_gives_back_what_its_steps_need_no_more) {
  Status status;
  auto manager = Manager::Create(ManagerOptions{}, status);
  CHECK_OK(status);
  {
    testing::Driver run(manager, 64 * kMiB, 0);
    std::uint32_t token = 0;
    CHECK_OK(run.Push(testing::MakeBytes(64 * kMiB, 1), token));
    CHECK_OK(run.End());
  }
  CHECK_EQ(manager->Totals().arena_bytes, 64 * kMiB);
  for (std::size_t i = 0; i < PageArena::kRecentTickets; ++i) {
    testing::Driver run(manager, 3 * kMiB, 0);
    std::uint32_t token = 0;
    CHECK_OK(run.Push(testing::MakeBytes(3 * kMiB, 1), token));
    CHECK_OK(run.End());
  }
  CHECK_EQ(manager->Totals().arena_bytes, 3 * kMiB);
}

}  // namespace
}  // namespace jdynoff

int main() { return jdynoff::testing::RunAll(); }
