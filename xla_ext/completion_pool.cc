#include "completion_pool.h"

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace jdynoff {
namespace {

struct Pool {
  std::mutex mutex;  // guards the three below
  std::condition_variable ready;
  std::deque<std::function<void()>> queue;
  std::size_t idle = 0;
};

Pool& ThePool() {
  static Pool& pool = *new Pool;  // leaked: its threads may outlive static destruction
  return pool;
}

void Serve(std::function<void()> completion) {
  Pool& pool = ThePool();
  for (;;) {
    completion();
    completion = nullptr;  // what it captured must not live on while this thread is idle
    std::unique_lock lock(pool.mutex);
    ++pool.idle;
    pool.ready.wait(lock, [&] { return !pool.queue.empty(); });
    --pool.idle;
    completion = std::move(pool.queue.front());
    pool.queue.pop_front();
  }
}

}  // namespace

void SubmitCompletion(std::function<void()> completion) {
  Pool& pool = ThePool();
  {
    std::lock_guard lock(pool.mutex);
    // A thread that was notified but has not woken yet still counts as idle.
    if (pool.idle > pool.queue.size()) {
      pool.queue.push_back(std::move(completion));
      pool.ready.notify_one();
      return;
    }
  }
  try {
    std::thread(Serve, completion).detach();
  } catch (const std::system_error&) {
    completion();  // No thread to be had: late is better than never.
  }
}

}  // namespace jdynoff
