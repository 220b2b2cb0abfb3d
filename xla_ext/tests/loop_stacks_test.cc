// What the stacks of loops promise: every frame comes back exact, in reverse, whatever its size
// and whatever else runs; and nothing is left, whoever does not come back for it.
#include "loop_stacks.h"

#include <thread>

#include "check.h"

namespace jdynoff {
namespace {

using testing::Bytes;
using testing::Driver;
using testing::MakeBytes;
using testing::MakeDiskManager;
using testing::Waiter;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

std::int64_t NextRun() {
  static std::atomic<std::int64_t> next{std::int64_t{1} << 40};
  return next++;
}

// One execution of one loop.
class Loop {
 public:
  Loop(RunKey run, std::vector<std::int64_t> sizes) : sizes_(std::move(sizes)) {
    CHECK_OK(LoopStacks::Get().Open(run, sizes_, handle_));
  }

  Bytes Value(std::uint32_t trip, std::size_t i) const {
    return MakeBytes(static_cast<std::size_t>(sizes_[i]), handle_ * 1000003u + trip * 17u + i);
  }

  Status Push() {
    std::vector<Bytes> values;
    for (std::size_t i = 0; i < sizes_.size(); ++i) values.push_back(Value(trips_, i));
    Waiter waiter;
    return waiter.Wait(
        LoopStacks::Get().Push(handle_, trips_++, {values.begin(), values.end()}, waiter.done()));
  }

  std::uint32_t Seal() {
    std::uint32_t sealed = 0;
    Waiter waiter;
    CHECK_OK(waiter.Wait(LoopStacks::Get().Seal(handle_, trips_, sealed, waiter.done())));
    return sealed;
  }

  void Forward(int trips) {
    for (int i = 0; i < trips; ++i) CHECK_OK(Push());
    Seal();
  }

  bool Claim() const {
    std::uint32_t claimed = 0;
    LoopStacks::Get().Claim(handle_, trips_, sizes_, claimed);
    CHECK(claimed == 0 || claimed == handle_);
    return claimed != 0;
  }

  Status Pop() {
    std::vector<Bytes> values;
    for (std::int64_t size : sizes_) values.emplace_back(static_cast<std::size_t>(size));
    Waiter waiter;
    const Status status = waiter.Wait(
        LoopStacks::Get().Pop(handle_, trips_, {values.begin(), values.end()}, waiter.done()));
    if (!status.ok()) return status;
    --trips_;
    for (std::size_t i = 0; i < sizes_.size(); ++i) CHECK(values[i] == Value(trips_, i));
    return {};
  }

  void Backward() {
    CHECK(Claim());
    while (trips_ > 0) CHECK_OK(Pop());
  }

  std::uint32_t handle() const { return handle_; }
  std::uint32_t trips() const { return trips_; }

 private:
  std::vector<std::int64_t> sizes_;
  std::uint32_t handle_ = 0;
  std::uint32_t trips_ = 0;
};

void ExpectNothingLeft(const std::shared_ptr<Manager>& manager) {
  CHECK_EQ(LoopStacks::Get().Totals().live_stacks, 0u);
  CHECK_EQ(LoopStacks::Get().Totals().top_bytes, 0u);
  CHECK_EQ(manager->Totals().live_entries, 0u);
  // The last stack's ticket is closed on another thread.
  for (int i = 0; i < 5000 && manager->Totals().open_tickets > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK_EQ(manager->Totals().open_tickets, 0u);
}

std::shared_ptr<Manager> Configure(std::uint64_t pool_bytes) {
  auto manager = MakeDiskManager();
  LoopStacks::Get().Configure(manager, pool_bytes);
  return manager;
}

TEST(frames_of_any_size_come_back_exact_through_a_pool_of_any_size) {
  const std::vector<std::vector<std::int64_t>> frames = {
      {4}, {1, 0, 3}, {40'000, 7}, {65'536}, {300'000, 12, 0, 5'000}, {}, {0}};
  for (std::uint64_t pool : {std::uint64_t{16} << 10, kMiB, 64 * kMiB}) {
    auto manager = Configure(pool);
    for (const auto& sizes : frames) {
      for (int trips : {0, 1, 2, 20}) {
        Loop loop({NextRun(), 0}, sizes);
        loop.Forward(trips);
        loop.Backward();
        ExpectNothingLeft(manager);
      }
    }
  }
}

TEST(small_frames_share_entries) {
  auto manager = Configure(64 * kMiB);
  Loop loop({NextRun(), 0}, {8, 4});
  loop.Forward(50'000);
  CHECK(manager->Totals().live_entries < 5);
  CHECK(manager->Totals().live_bytes + LoopStacks::Get().Totals().top_bytes < 610'000);
  loop.Backward();
  ExpectNothingLeft(manager);
}

TEST(many_loops_at_once_share_one_pool) {
  auto manager = Configure(2 * kMiB);
  const RunKey run{NextRun(), 0};
  std::vector<Loop> loops;
  for (int i = 0; i < 60; ++i) {
    loops.emplace_back(run, std::vector<std::int64_t>{i % 3 == 0 ? 100'000 : 900, 4});
    loops.back().Forward(i % 7 * 9);
  }
  CHECK_EQ(manager->Totals().open_tickets, 1u);
  CHECK(manager->Totals().arena_bytes <= 4 * kMiB);
  // The order of the backward loops is the program's affair.
  for (std::size_t i = 0; i < loops.size(); i += 2) loops[i].Backward();
  for (std::size_t i = 1; i < loops.size(); i += 2) loops[i].Backward();
  ExpectNothingLeft(manager);
}

TEST(a_long_scan_of_short_loops_holds_little_outside_the_pool) {
  auto manager = Configure(kMiB);
  const RunKey run{NextRun(), 0};
  std::vector<Loop> loops;
  for (int i = 0; i < 900; ++i) {
    loops.emplace_back(run, std::vector<std::int64_t>{6000});
    loops.back().Forward(1);
  }
  CHECK(LoopStacks::Get().Totals().top_bytes < 5 * kMiB);
  for (auto loop = loops.rbegin(); loop != loops.rend(); ++loop) loop->Backward();
  ExpectNothingLeft(manager);
}

TEST(loops_of_several_threads_and_devices_do_not_mix) {
  auto manager = Configure(kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int round = 0; round < 3; ++round) {
        const RunKey run{NextRun(), t % 2};
        Loop outer(run, {30'000, 8});
        Loop other(run, {70'000});
        for (int i = 0; i < 40; ++i) {
          CHECK_OK(outer.Push());
          CHECK_OK(other.Push());
        }
        outer.Seal();
        other.Seal();
        CHECK(outer.Claim() && other.Claim());
        while (outer.trips() > 0) {
          CHECK_OK(outer.Pop());
          CHECK_OK(other.Pop());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectNothingLeft(manager);
}

TEST(an_offload_that_waits_for_room_is_helped_by_a_loop_that_is_being_read) {
  auto manager = Configure(kMiB);
  const RunKey run{NextRun(), 0};
  Loop read(run, {200'000});
  read.Forward(5);
  CHECK(read.Claim());
  CHECK_OK(read.Pop());  // it writes nothing by itself any more
  Loop written(run, {200'000});
  written.Forward(20);
  while (read.trips() > 0) CHECK_OK(read.Pop());
  written.Backward();
  ExpectNothingLeft(manager);
}

TEST(a_stack_is_claimed_once_and_only_as_it_is) {
  auto manager = Configure(kMiB);
  Loop loop({NextRun(), 0}, {100});
  loop.Forward(3);
  std::uint32_t claimed = 1;
  const std::vector<std::int64_t> right{100};
  const std::vector<std::int64_t> wrong{104};
  LoopStacks::Get().Claim(loop.handle(), 3, wrong, claimed);
  CHECK_EQ(claimed, 0u);
  LoopStacks::Get().Claim(loop.handle(), 2, right, claimed);
  CHECK_EQ(claimed, 0u);
  LoopStacks::Get().Claim(0, 3, right, claimed);
  CHECK_EQ(claimed, 0u);
  loop.Backward();
  CHECK(!loop.Claim());
  ExpectNothingLeft(manager);
}

TEST(a_trip_out_of_order_is_an_error) {
  auto manager = Configure(kMiB);
  Loop loop({NextRun(), 0}, {4});
  CHECK_OK(loop.Push());
  Bytes value(4);
  Waiter waiter;
  CHECK_CODE(waiter.Wait(LoopStacks::Get().Push(loop.handle(), 2, {value}, waiter.done())),
             Code::kOrder);
  CHECK_CODE(waiter.Wait(LoopStacks::Get().Pop(loop.handle(), 1, {value}, waiter.done())),
             Code::kOrder);
  loop.Seal();
  CHECK_CODE(waiter.Wait(LoopStacks::Get().Push(loop.handle(), 1, {value}, waiter.done())),
             Code::kOrder);
  loop.Backward();
  CHECK_CODE(waiter.Wait(LoopStacks::Get().Pop(loop.handle(), 1, {value}, waiter.done())),
             Code::kToken);
  ExpectNothingLeft(manager);
}

TEST(what_nobody_comes_back_for_is_given_up) {
  auto manager = Configure(kMiB);
  for (int i = 0; i < 200; ++i) {
    Loop sealed({NextRun(), 0}, {100'000});
    sealed.Forward(8);
    Loop broken_off({NextRun(), 0}, {5});
    CHECK_OK(broken_off.Push());
    CHECK(LoopStacks::Get().Totals().live_stacks <= 34);
  }
  CHECK(LoopStacks::Get().Totals().dropped >= 300);
  // Another manager takes over; what is left of this one goes with it.
  CHECK(manager->Totals().live_entries <= 34u * 8u);
  manager->Shutdown();
  ExpectNothingLeft(manager);
}

TEST(a_dropped_stack_swallows_pushes_and_is_missed_by_its_claim) {
  auto manager = Configure(kMiB);
  Loop old({NextRun(), 0}, {100'000});
  CHECK_OK(old.Push());
  for (int i = 0; i < 40; ++i) {
    Loop({NextRun(), 0}, {4}).Forward(0);
  }
  CHECK_OK(old.Push());
  CHECK_EQ(old.Seal(), 0u);
  CHECK(!old.Claim());
  manager->Shutdown();
  ExpectNothingLeft(manager);
}

TEST(a_failed_write_fails_the_loop_and_frees_all_of_its_run) {
  auto manager = Configure(kMiB);
  const RunKey run{NextRun(), 0};
  Loop other(run, {1000});
  other.Forward(10);
  manager->InjectFault(Fault::kWriteNoSpace, 0, -1);
  Loop loop(run, {200'000});
  Status status;
  for (int i = 0; i < 20 && status.ok(); ++i) status = loop.Push();
  CHECK_CODE(status, Code::kDiskFull);
  manager->InjectFault(Fault::kNone, 0, 0);
  ExpectNothingLeft(manager);
  Loop next({NextRun(), 0}, {200'000});
  next.Forward(20);
  next.Backward();
  ExpectNothingLeft(manager);
}

TEST(a_failed_read_and_changed_bytes_are_errors) {
  for (Fault fault : {Fault::kReadError, Fault::kReadShort, Fault::kCorrupt}) {
    for (std::int64_t size : {1000, 200'000}) {
      auto manager = Configure(64 * kMiB / 1024);
      Loop loop({NextRun(), 0}, {size});
      if (fault == Fault::kCorrupt) manager->InjectFault(fault, 0, -1);
      loop.Forward(size == 1000 ? 2000 : 20);
      if (fault != Fault::kCorrupt) manager->InjectFault(fault, 0, -1);
      CHECK(loop.Claim());
      Status status;
      while (loop.trips() > 0 && status.ok()) status = loop.Pop();
      CHECK_CODE(status, fault == Fault::kCorrupt ? Code::kChecksum : Code::kIo);
      ExpectNothingLeft(manager);
    }
  }
}

TEST(inside_a_managed_step_a_stack_lives_on_its_ticket) {
  auto manager = MakeDiskManager();
  auto elsewhere = Configure(kMiB);
  {
    Driver step(manager, kMiB, 0);
    Loop loop(step.key(), {100'000});
    loop.Forward(30);
    CHECK_EQ(manager->Totals().live_entries, 30u);
    CHECK_EQ(elsewhere->Totals().live_entries, 0u);
    CHECK(step.Stats().pool_peak_bytes > 0 && step.Stats().pool_peak_bytes <= kMiB);
    loop.Backward();
    CHECK_EQ(manager->Totals().live_entries, 0u);
    CHECK_OK(step.End());
    // A loop that nothing orders before the end still belongs to the step.
    Loop late(step.key(), {100'000});
    late.Forward(30);
    CHECK_EQ(manager->Totals().live_entries, 30u);
    Loop in_the_middle(step.key(), {1000});
    CHECK_OK(in_the_middle.Push());
  }
  ExpectNothingLeft(manager);
}

TEST(closing_a_ticket_ends_a_loop_in_flight) {
  auto manager = MakeDiskManager();
  Driver step(manager, kMiB, 0);
  Loop loop(step.key(), {100'000});
  for (int i = 0; i < 20; ++i) CHECK_OK(loop.Push());
  CloseTicket(step.ticket());
  CHECK_OK(loop.Push());  // swallowed
  CHECK_EQ(loop.Seal(), 0u);
  ExpectNothingLeft(manager);
}

TEST(many_loops_do_not_grow_memory_or_file) {
  auto manager = Configure(4 * kMiB);
  std::uint64_t arena = 0;
  std::uint64_t file = 0;
  for (int i = 0; i < 16; ++i) {
    Loop loop({NextRun(), 0}, {200'000});
    loop.Forward(40);
    loop.Backward();
    ExpectNothingLeft(manager);
    if (i == 4) {
      arena = manager->Totals().arena_bytes;
      file = manager->Totals().spill_file_bytes;
    }
  }
  CHECK_EQ(manager->Totals().arena_bytes, arena);
  CHECK_EQ(manager->Totals().spill_file_bytes, file);
}

}  // namespace
}  // namespace jdynoff

int main() { return jdynoff::testing::RunAll(); }
