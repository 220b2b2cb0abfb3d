// When the disk, the filesystem or the caller fails: one clear error, nothing left behind, and the
// next step works.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "check.h"

namespace jdynoff {
namespace {

using testing::Bytes;
using testing::Driver;
using testing::MakeBytes;
using testing::MakeDiskManager;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// Pushes eight and pops eight through a pool of two; returns the first failure.
Status Step(const std::shared_ptr<Manager>& manager) {
  Driver run(manager, 2 * kMiB, 8 * kMiB);
  if (!run.opened().ok()) return run.opened();
  std::vector<std::uint32_t> tokens(8);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (Status status = run.Push(MakeBytes(kMiB, i), tokens[i]); !status.ok()) return status;
  }
  for (std::size_t i = tokens.size(); i > 0; --i) {
    Bytes back(kMiB);
    if (Status status = run.Pop(tokens[i - 1], back); !status.ok()) return status;
    CHECK(back == MakeBytes(kMiB, i - 1));
  }
  return run.End();
}

void CheckFaultThenGoodStep(Fault fault, Code code) {
  auto manager = MakeDiskManager();
  CHECK_OK(Step(manager));
  manager->InjectFault(fault, 1, -1);
  CHECK_CODE(Step(manager), code);
  CHECK_EQ(manager->Totals().live_entries, 0u);
  CHECK_EQ(manager->Totals().open_tickets, 0u);
  manager->InjectFault(Fault::kNone, 0, 0);
  CHECK_OK(Step(manager));
}

TEST(a_write_error_fails_the_step_that_has_no_room_left) {
  CheckFaultThenGoodStep(Fault::kWriteError, Code::kIo);
}
TEST(a_full_disk_is_named_as_such) {
  CheckFaultThenGoodStep(Fault::kWriteNoSpace, Code::kDiskFull);
}
TEST(a_write_that_stops_is_an_error) { CheckFaultThenGoodStep(Fault::kWriteShort, Code::kIo); }
TEST(a_read_error_fails_the_step) { CheckFaultThenGoodStep(Fault::kReadError, Code::kIo); }
TEST(a_short_read_fails_the_step) { CheckFaultThenGoodStep(Fault::kReadShort, Code::kIo); }
TEST(a_changed_byte_is_found_by_the_checksum) {
  CheckFaultThenGoodStep(Fault::kCorrupt, Code::kChecksum);
}

TEST(a_failed_write_keeps_the_entry_while_the_pool_has_room) {
  auto manager = MakeDiskManager();
  manager->InjectFault(Fault::kWriteError, 0, 1);
  Driver run(manager, 16 * kMiB, 64 * kMiB);
  // Thirteen pass the low-water mark, so that writes begin, and still fit.
  std::vector<std::uint32_t> tokens(13);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    CHECK_OK(run.Push(MakeBytes(kMiB, i), tokens[i]));
  }
  for (std::size_t i = tokens.size(); i > 0; --i) {
    Bytes back(kMiB);
    CHECK_OK(run.Pop(tokens[i - 1], back));
    CHECK(back == MakeBytes(kMiB, i - 1));
  }
  CHECK_OK(run.End());
}

TEST(a_failed_read_ahead_is_not_tried_again_before_its_reload) {
  auto manager = MakeDiskManager();
  constexpr std::size_t kEntries = 8;
  Driver run(manager, 2 * kMiB, kEntries * kMiB);
  std::vector<std::uint32_t> tokens(kEntries);
  for (std::size_t i = 0; i < kEntries; ++i) CHECK_OK(run.Push(MakeBytes(kMiB, i), tokens[i]));
  manager->InjectFault(Fault::kReadError, 0, -1);
  // The youngest is in the pool still; its reload makes room and starts the read-ahead.
  Bytes back(kMiB);
  CHECK_OK(run.Pop(tokens.back(), back));
  while (run.Stats().read_ahead_failures == 0) std::this_thread::yield();
  // Ample time to try again: another step, which needs no disk.
  Driver other(manager, 64 * kMiB, 0);
  std::vector<std::uint32_t> others(64);
  for (std::uint32_t& token : others) CHECK_OK(other.Push(MakeBytes(kMiB, token), token));
  for (std::uint32_t token : others) CHECK_OK(other.Discard(token));
  // A unit is in one transfer only.
  const std::uint64_t units = kEntries * kMiB / (2 * kMiB / 4);
  CHECK(run.Stats().read_ahead_failures <= units);

  // The disk is well again before the bytes are needed: nothing is lost.
  manager->InjectFault(Fault::kNone, 0, 0);
  for (std::size_t i = kEntries - 1; i > 0; --i) {
    CHECK_OK(run.Pop(tokens[i - 1], back));
    CHECK(back == MakeBytes(kMiB, i - 1));
  }
  CHECK_OK(run.End());
}

TEST(memory_alone_says_what_is_missing) {
  Status status;
  auto manager = Manager::Create(ManagerOptions{}, status);
  CHECK_OK(status);
  CHECK_CODE(Step(manager), Code::kConfiguration);  // the reservation
  Driver run(manager, 2 * kMiB, 0);
  std::uint32_t token = 0;
  CHECK_OK(run.Push(MakeBytes(2 * kMiB, 1), token));
  CHECK_CODE(run.Push(MakeBytes(kMiB, 1), token), Code::kHostLimit);
}

TEST(no_pool_at_all_is_an_error_not_a_wait) {
  auto manager = MakeDiskManager();
  Driver run(manager, 0, kMiB);
  std::uint32_t token = 0;
  CHECK_CODE(run.Push(MakeBytes(kMiB, 1), token), Code::kHostLimit);
}

TEST(a_limit_refuses_the_reservation_and_changes_nothing) {
  ManagerOptions options;
  options.spill = SpillFileOptions{testing::SpillDirectory(), true, 4 * kMiB, 0};
  Status status;
  auto manager = Manager::Create(options, status);
  CHECK_OK(status);
  std::uint32_t ticket = 0;
  CHECK_CODE(OpenTicket(manager, kMiB, 8 * kMiB, 0, ticket), Code::kDiskFull);
  CHECK_EQ(manager->Totals().open_tickets, 0u);
  CHECK_EQ(manager->Totals().arena_bytes, 0u);
  CHECK_OK(OpenTicket(manager, kMiB, 4 * kMiB, 0, ticket));
  CloseTicket(ticket);
}

TEST(a_limit_reached_in_the_middle_of_a_step_is_disk_full) {
  ManagerOptions options;
  options.spill = SpillFileOptions{testing::SpillDirectory(), true, 4 * kMiB, 0};
  Status status;
  auto manager = Manager::Create(options, status);
  CHECK_OK(status);
  Driver run(manager, 2 * kMiB, 2 * kMiB);
  std::uint32_t token = 0;
  Status pushed;
  for (int i = 0; i < 8 && pushed.ok(); ++i) pushed = run.Push(MakeBytes(kMiB, 1), token);
  CHECK_CODE(pushed, Code::kDiskFull);
}

TEST(a_file_size_limit_is_disk_full) {
  // In a child: the limit would hold for the other tests as well.
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(2);
    Status status;
    const auto far = OpenSpillFile({testing::SpillDirectory(), true, 0, 0}, status);
    if (!status.ok()) ::_exit(3);
    ::_exit(far->Reserve(8 << 20).code() == Code::kDiskFull ? 0 : 4);
  }
  int result = 0;
  CHECK_EQ(::waitpid(child, &result, 0), child);
  CHECK(WIFEXITED(result));
  CHECK_EQ(WEXITSTATUS(result), 0);
}

TEST(a_missing_directory_is_refused) {
  ManagerOptions options;
  options.spill = SpillFileOptions{"/nonexistent/spill", true, 0, 0};
  Status status;
  CHECK(Manager::Create(options, status) == nullptr);
  CHECK_CODE(status, Code::kConfiguration);
  CHECK(status.message().find("/nonexistent/spill") != std::string::npos);
}

TEST(buffered_writes_are_exact_too) {
  ManagerOptions options;
  options.spill = SpillFileOptions{testing::SpillDirectory(), false, 0, 0};
  options.verify = true;
  Status status;
  auto manager = Manager::Create(options, status);
  CHECK_OK(status);
  CHECK(!manager->direct_io());
  CHECK_OK(Step(manager));
}

TEST(shutdown_in_the_middle_of_a_step_fails_the_step) {
  auto manager = MakeDiskManager();
  Driver run(manager, 2 * kMiB, 16 * kMiB);
  std::uint32_t token = 0;
  for (int i = 0; i < 8; ++i) CHECK_OK(run.Push(MakeBytes(kMiB, 1), token));
  manager->Shutdown();
  CHECK_CODE(run.Push(MakeBytes(kMiB, 1), token), Code::kToken);
  std::uint32_t ticket = 0;
  CHECK_CODE(OpenTicket(manager, kMiB, 0, 0, ticket), Code::kConfiguration);
  manager->Shutdown();
}

TEST(a_forked_child_refuses_and_exits_while_the_parent_goes_on) {
  auto manager = MakeDiskManager();
  Driver run(manager, 2 * kMiB, 16 * kMiB);
  std::vector<std::uint32_t> tokens(8);
  for (std::size_t i = 0; i < 8; ++i) CHECK_OK(run.Push(MakeBytes(kMiB, i), tokens[i]));
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    const bool refused = InForkedChild() && ForkedChildStatus().code() == Code::kConfiguration;
    ShutdownAllManagers();
    manager.reset();
    ::_exit(refused ? 0 : 1);
  }
  int result = 0;
  CHECK_EQ(::waitpid(child, &result, 0), child);
  CHECK(WIFEXITED(result));
  CHECK_EQ(WEXITSTATUS(result), 0);
  Bytes back(kMiB);
  for (std::size_t i = tokens.size(); i > 0; --i) {
    CHECK_OK(run.Pop(tokens[i - 1], back));
    CHECK(back == MakeBytes(kMiB, i - 1));
  }
  CHECK_OK(run.End());
}

}  // namespace
}  // namespace jdynoff

int main() { return jdynoff::testing::RunAll(); }
