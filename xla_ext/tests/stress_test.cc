// Many runs at once, in random programs: every byte is checked, nothing may hang or be left over.
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <random>
#include <thread>

#include "check.h"

namespace jdynoff {
namespace {

using testing::Bytes;
using testing::Driver;
using testing::MakeBytes;
using testing::MakeDiskManager;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// Pushes, peeks, pops and discards at random, more pushes first and more pops later. Stops at the
// first failure, which only a closed or broken step may see.
Status RandomStep(Driver& run, std::uint64_t seed, int operations) {
  struct Live {
    std::size_t bytes;
    std::uint64_t seed;
    int readers;
    std::int64_t site;
  };
  std::mt19937_64 random(seed);
  std::map<std::uint32_t, Live> live;
  for (int i = 0; i < operations; ++i) {
    const bool forward = i * 2 < operations;
    const bool push = live.empty() || random() % 8 < (forward ? 6u : 2u);
    if (push) {
      const std::size_t bytes = random() % 16 == 0 ? 0 : random() % 600'000;
      const Live entry{bytes, random(), 1 + static_cast<int>(random() % 2),
                       static_cast<std::int64_t>(random() % 5)};
      std::uint32_t token = 0;
      const Status status =
          run.Push(MakeBytes(bytes, entry.seed), token, entry.site, entry.readers);
      if (!status.ok()) return status;
      live[token] = entry;
      continue;
    }
    // Mostly the newest, sometimes any.
    auto chosen = std::prev(live.end());
    if (random() % 4 == 0) {
      chosen = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
    }
    Live& entry = chosen->second;
    if (random() % 10 == 0) {
      if (Status status = run.Discard(chosen->first, entry.site); !status.ok()) return status;
      live.erase(chosen);
      continue;
    }
    Bytes back(entry.bytes);
    if (Status status = run.Pop(chosen->first, back, entry.site); !status.ok()) return status;
    CHECK(back == MakeBytes(entry.bytes, entry.seed));
    if (--entry.readers == 0) live.erase(chosen);
  }
  return run.End();
}

void Concurrently(int threads, const std::function<void(int)>& body) {
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) running.emplace_back(body, i);
  for (std::thread& thread : running) thread.join();
}

TEST(runs_in_many_threads_stay_exact) {
  auto manager = MakeDiskManager();
  Concurrently(4, [&](int thread) {
    for (int step = 0; step < 4; ++step) {
      const std::uint64_t pools[] = {std::uint64_t{64} << 10, kMiB, 4 * kMiB, 64 * kMiB};
      Driver run(manager, pools[(thread + step) % 4], kMiB);
      CHECK_OK(run.opened());
      CHECK_OK(RandomStep(run, static_cast<std::uint64_t>(thread * 100 + step), 80));
    }
  });
  CHECK_EQ(manager->Totals().live_entries, 0u);
  CHECK_EQ(manager->Totals().live_bytes, 0u);
  CHECK_EQ(manager->Totals().open_tickets, 0u);
}

TEST(steps_closed_while_they_run_leave_nothing) {
  auto manager = MakeDiskManager();
  for (int round = 0; round < 12; ++round) {
    Driver run(manager, kMiB, kMiB);
    std::atomic<int> progress{0};
    std::thread step([&] {
      progress = 1;
      progress.notify_all();
      const Status status = RandomStep(run, static_cast<std::uint64_t>(round), 120);
      CHECK(status.ok() || status.code() == Code::kToken);
    });
    progress.wait(0);
    CloseTicket(run.ticket());
    step.join();
    CHECK_EQ(manager->Totals().live_entries, 0u);
  }
}

TEST(faults_hit_one_step_and_spare_the_others) {
  auto manager = MakeDiskManager();
  std::atomic<int> failed{0};
  for (Fault fault : {Fault::kReadError, Fault::kWriteError, Fault::kCorrupt}) {
    manager->InjectFault(fault, 5, 1);
    Concurrently(3, [&](int thread) {
      Driver run(manager, kMiB, kMiB);
      const Status status = RandomStep(run, static_cast<std::uint64_t>(thread + 7), 60);
      if (!status.ok()) ++failed;
    });
    CHECK_EQ(manager->Totals().live_entries, 0u);
  }
  CHECK(failed <= 3);
  manager->InjectFault(Fault::kNone, 0, 0);
  Driver run(manager, kMiB, kMiB);
  CHECK_OK(RandomStep(run, 1, 60));
}

TEST(shutdown_while_steps_run_ends_them) {
  for (int round = 0; round < 4; ++round) {
    auto manager = MakeDiskManager();
    std::atomic<int> started{0};
    std::thread stop([&] {
      for (int seen = started; seen < 3; seen = started) started.wait(seen);
      manager->Shutdown();
    });
    Concurrently(3, [&](int thread) {
      Driver run(manager, kMiB, kMiB);
      ++started;
      started.notify_all();
      if (!run.opened().ok()) return;
      const Status status = RandomStep(run, static_cast<std::uint64_t>(thread), 100);
      CHECK(status.ok() || status.code() == Code::kToken);
    });
    stop.join();
    CHECK_EQ(manager->Totals().live_entries, 0u);
  }
}

}  // namespace
}  // namespace jdynoff

int main() { return jdynoff::testing::RunAll(); }
