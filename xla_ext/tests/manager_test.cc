// What the manager promises when nothing goes wrong, and what it refuses.
#include <chrono>
#include <thread>

#include "check.h"
#include "checksum.h"

namespace jdynoff {
namespace {

using testing::Bytes;
using testing::Driver;
using testing::MakeBytes;
using testing::MakeDiskManager;
using testing::Waiter;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

std::shared_ptr<Manager> MakeMemoryManager() {
  Status status;
  auto manager = Manager::Create(ManagerOptions{}, status);
  CHECK_OK(status);
  return manager;
}

void RoundTrip(Driver& run, std::size_t entries, std::size_t bytes, bool newest_first) {
  std::vector<std::uint32_t> tokens(entries);
  for (std::size_t i = 0; i < entries; ++i) CHECK_OK(run.Push(MakeBytes(bytes, i), tokens[i]));
  Bytes back(bytes);
  for (std::size_t k = 0; k < entries; ++k) {
    const std::size_t i = newest_first ? entries - 1 - k : k;
    CHECK_OK(run.Pop(tokens[i], back));
    CHECK(back == MakeBytes(bytes, i));
  }
}

TEST(what_fits_the_pool_never_touches_the_disk) {
  auto manager = MakeDiskManager();
  Driver run(manager, 64 * kMiB, 0);
  RoundTrip(run, 16, kMiB, true);
  CHECK_EQ(run.Stats().bytes_written, 0u);
  CHECK_EQ(run.Stats().pool_peak_bytes, 16 * kMiB);
  CHECK_OK(run.End());
}

TEST(bytes_come_back_exact_through_a_pool_of_any_size_in_any_order) {
  for (std::uint64_t pool : {std::uint64_t{16} << 10, std::uint64_t{100} << 10, kMiB, 5 * kMiB}) {
    for (bool newest_first : {true, false}) {
      auto manager = MakeDiskManager();
      Driver run(manager, pool, 0);
      // Not a multiple of the page, and larger than the smaller pools.
      RoundTrip(run, 12, 434'567, newest_first);
      CHECK(run.Stats().pool_peak_bytes <= pool);
      CHECK(run.Stats().bytes_read > 0);
      CHECK_OK(run.End());
      CHECK_EQ(manager->Totals().live_bytes, 0u);
    }
  }
}

TEST(small_entries_share_transfers_and_come_back_exact) {
  auto manager = MakeDiskManager();
  Driver run(manager, kMiB, 0);
  RoundTrip(run, 200, 40'000, true);
  CHECK(run.Stats().bytes_written > 0);
  CHECK_OK(run.End());
}

TEST(last_in_first_out_is_read_ahead) {
  auto manager = MakeDiskManager();
  Driver run(manager, 16 * kMiB, 64 * kMiB);
  RoundTrip(run, 64, kMiB, true);
  CHECK(run.Stats().read_ahead_hits > 0);
  CHECK_OK(run.End());
}

TEST(an_entry_is_kept_until_its_last_reader) {
  auto manager = MakeDiskManager();
  Driver run(manager, kMiB, 0);
  const Bytes data = MakeBytes(3 * kMiB, 5);
  std::uint32_t token = 0;
  CHECK_OK(run.Push(data, token, 9, 3));
  Bytes back(data.size());
  for (int reader = 0; reader < 3; ++reader) {
    back.assign(back.size(), std::byte{0});
    CHECK_OK(run.Pop(token, back, 9));
    CHECK(back == data);
  }
  CHECK_EQ(manager->Totals().live_entries, 0u);
  CHECK_CODE(run.Pop(token, back, 9), Code::kToken);
  CHECK_OK(run.End());
}

TEST(empty_entries_need_no_room) {
  auto manager = MakeMemoryManager();
  Driver run(manager, 0, 0);
  std::uint32_t token = 0;
  CHECK_OK(run.Push({}, token));
  Bytes back;
  CHECK_OK(run.Pop(token, back));
  CHECK_OK(run.End());
}

TEST(a_wrong_serial_is_an_error) {
  auto manager = MakeMemoryManager();
  Driver run(manager, kMiB, 0);
  std::uint32_t token = 0;
  CHECK_OK(run.Push(MakeBytes(100, 1), token));
  Bytes back(100);
  Waiter waiter;
  std::uint32_t next = 0;
  CHECK_CODE(waiter.Wait(manager->Reload(run.key(), token, back, run.serial() + 1, 1,
                                         Driver::kDtype, next, waiter.done())),
             Code::kOrder);
  CHECK(run.Stats().error.find("[jdynoff:order]") == 0);
}

TEST(a_reload_must_match_site_dtype_and_size) {
  auto manager = MakeMemoryManager();
  Driver run(manager, kMiB, 0);
  std::uint32_t token = 0;
  CHECK_OK(run.Push(MakeBytes(100, 1), token, 4));
  Bytes right(100);
  Bytes longer(104);
  CHECK_CODE(run.Pop(token, right, 5), Code::kToken);
  CHECK_CODE(run.Pop(token, longer, 4), Code::kToken);
  CHECK_CODE(run.Pop(token + 1, right, 4), Code::kToken);
  Waiter waiter;
  std::uint32_t next = 0;
  CHECK_CODE(waiter.Wait(manager->Reload(run.key(), token, right, run.serial(), 4,
                                         Driver::kDtype + 1, next, waiter.done())),
             Code::kToken);
  CHECK_OK(run.Pop(token, right, 4));
  CHECK(right == MakeBytes(100, 1));
}

TEST(discard_frees_and_counts_in_the_serial) {
  auto manager = MakeDiskManager();
  Driver run(manager, kMiB, 0);
  std::uint32_t token = 0;
  CHECK_OK(run.Push(MakeBytes(4 * kMiB, 1), token));
  CHECK_OK(run.Discard(token));
  CHECK_OK(run.Discard(0));
  CHECK_EQ(run.serial(), 3u);
  CHECK_EQ(manager->Totals().live_entries, 0u);
  CHECK_CODE(run.Discard(token), Code::kToken);
  CHECK_EQ(run.Stats().entries_discarded, 1u);
  CHECK_OK(run.End());
}

TEST(end_frees_and_counts_what_nobody_read) {
  auto manager = MakeDiskManager();
  Driver run(manager, kMiB, 0);
  std::uint32_t token = 0;
  for (int i = 0; i < 5; ++i) CHECK_OK(run.Push(MakeBytes(kMiB, 1), token));
  CHECK_OK(run.End());
  CHECK_EQ(run.Stats().entries_unread, 5u);
  CHECK_EQ(run.Stats().state, "ended");
  CHECK_EQ(manager->Totals().live_entries, 0u);
}

TEST(closing_a_ticket_in_the_middle_reclaims_everything) {
  auto manager = MakeDiskManager();
  for (int round = 0; round < 8; ++round) {
    Driver run(manager, 2 * kMiB, 16 * kMiB);
    std::uint32_t token = 0;
    for (int i = 0; i < 8; ++i) CHECK_OK(run.Push(MakeBytes(kMiB, 1), token));
    CloseTicket(run.ticket());
    CloseTicket(run.ticket());
    CHECK_EQ(manager->Totals().live_entries, 0u);
    CHECK_EQ(manager->Totals().open_tickets, 0u);
    CHECK_EQ(run.Stats().state, "closed");
    CHECK_CODE(run.Push(MakeBytes(10, 1), token), Code::kToken);
  }
  CHECK_EQ(manager->Totals().spill_file_bytes, 16 * kMiB);
  CHECK_EQ(manager->Totals().arena_bytes, 2 * kMiB);
}

TEST(a_ticket_that_nobody_opened_is_refused) {
  CHECK_CODE(BeginRun(0xfffffff0u, {1 << 30, 0}), Code::kToken);
  CHECK(ManagerOfRun({1 << 30, 0}) == nullptr);
}

TEST(a_run_begins_once) {
  auto manager = MakeMemoryManager();
  Driver run(manager, kMiB, 0);
  CHECK_CODE(BeginRun(run.ticket(), run.key()), Code::kOrder);
}

TEST(the_same_run_on_two_devices_does_not_mix) {
  auto manager = MakeMemoryManager();
  Driver run(manager, kMiB, 0);
  const RunKey other{run.key().run_id, 1};
  CHECK_OK(BeginRun(run.ticket(), other));
  std::uint32_t token = 0;
  CHECK_OK(run.Push(MakeBytes(64, 1), token));
  Bytes back(64);
  Waiter waiter;
  std::uint32_t next = 0;
  CHECK_CODE(
      waiter.Wait(manager->Reload(other, token, back, 0, 1, Driver::kDtype, next, waiter.done())),
      Code::kToken);
  CHECK_OK(run.Pop(token, back));
}

TEST(expected_bytes_start_the_writes_before_the_pool_runs_low) {
  auto manager = MakeDiskManager();
  Driver run(manager, 32 * kMiB, 64 * kMiB, 64 * kMiB);
  std::uint32_t token = 0;
  for (int i = 0; i < 12; ++i) CHECK_OK(run.Push(MakeBytes(kMiB, 1), token));
  // Twenty of thirty-two are free. The end waits for nothing, so give the writers until the close.
  CHECK_OK(run.End());
  CloseTicket(run.ticket());
  CHECK(run.Stats().bytes_written > 0);
}

TEST(what_is_expected_to_fit_is_not_written) {
  // The pool runs low at twenty-four of thirty-two. Thirty are pushed; more than expected, the last
  // time.
  for (const std::uint64_t expected : {30, 27}) {
    auto manager = MakeDiskManager();
    std::uint32_t ticket = 0;
    CHECK_OK(OpenTicket(manager, 32 * kMiB, 64 * kMiB, 64 * kMiB, ticket));
    const RunKey key{(std::int64_t{1} << 40) + static_cast<std::int64_t>(expected), 0};
    CHECK_OK(BeginRun(ticket, key, expected * kMiB / kPageBytes));
    std::uint32_t token = 0;
    for (int i = 0; i < 30; ++i) {
      Waiter waiter;
      CHECK_OK(waiter.Wait(manager->Offload(key, MakeBytes(kMiB, 1), token, 1, Driver::kDtype, 1,
                                            token, waiter.done())));
    }
    const bool writes = expected < 30;
    for (int i = 0; i < (writes ? 1000 : 20) && manager->Stats(ticket)->bytes_written == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    CHECK_EQ(manager->Stats(ticket)->bytes_written > 0, writes);
    CloseTicket(ticket);
  }
}

TEST(an_overrun_of_the_reservation_grows_it) {
  auto manager = MakeDiskManager();
  Driver run(manager, kMiB, kMiB);
  RoundTrip(run, 40, kMiB, true);
  CHECK_OK(run.End());
  CHECK(manager->Totals().spill_file_bytes >= 39 * kMiB);
  CHECK(manager->Totals().spill_file_bytes < 80 * kMiB);
}

TEST(many_steps_do_not_grow_arena_or_file) {
  auto manager = MakeDiskManager();
  std::uint64_t arena = 0;
  std::uint64_t file = 0;
  for (int step = 0; step < 40; ++step) {
    Driver run(manager, kMiB, 4 * kMiB);
    RoundTrip(run, 4, kMiB, true);
    CHECK_OK(run.End());
    if (step == 0) {
      arena = manager->Totals().arena_bytes;
      file = manager->Totals().spill_file_bytes;
    }
  }
  CHECK_EQ(manager->Totals().arena_bytes, arena);
  CHECK_EQ(manager->Totals().spill_file_bytes, file);
}

TEST(the_log_tells_what_happened_in_order) {
  auto manager = MakeMemoryManager();
  manager->EnableLog(true);
  Driver run(manager, kMiB, 0);
  std::uint32_t token = 0;
  CHECK_OK(run.Push(MakeBytes(100, 1), token, 3));
  Bytes back(100);
  CHECK_OK(run.Pop(token, back, 3));
  const std::vector<Event> log = manager->Log(run.ticket());
  CHECK_EQ(log.size(), 2u);
  CHECK_EQ(std::string(log[0].operation), "offload");
  CHECK_EQ(std::string(log[1].operation), "reload");
  CHECK(log[0].end_ns <= log[1].start_ns);
}

TEST(the_log_tells_each_transfer) {
  for (std::uint64_t pool : {std::uint64_t{16} << 10, kMiB}) {  // the smaller one reads past it
    auto manager = MakeDiskManager();
    manager->EnableLog(true);
    Driver run(manager, pool, 0);
    RoundTrip(run, 12, 434'567, true);
    CHECK_OK(run.End());
    const TicketStats stats = run.Stats();
    std::uint64_t written = 0;
    std::uint64_t read = 0;
    for (const Event& event : manager->Log(run.ticket())) {
      CHECK(event.start_ns <= event.end_ns);
      if (std::string(event.operation) == "write") written += event.bytes;
      if (std::string(event.operation) == "read") read += event.bytes;
    }
    CHECK(read > 0);
    CHECK_EQ(written, stats.bytes_written);
    CHECK_EQ(read, stats.bytes_read);
  }
}

TEST(every_flipped_bit_changes_the_checksum) {
  Bytes data = MakeBytes(1000, 3);
  Checksum whole;
  whole.Update(data.data(), data.size());
  for (std::size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    Checksum changed;
    changed.Update(data.data(), data.size());
    CHECK(changed.Finish() != whole.Finish());
    data[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }
}

}  // namespace
}  // namespace jdynoff

int main() { return jdynoff::testing::RunAll(); }
