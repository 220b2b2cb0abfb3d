#include "loop_stacks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "completion_pool.h"
#include "registry.h"

namespace jdynoff {
namespace {

// Frames smaller than a quarter of a segment are packed: an entry takes up whole pages.
constexpr std::uint64_t kSegmentBytes = std::uint64_t{256} << 10;
constexpr std::uint64_t kLargeFrameBytes = kSegmentBytes / 4;
constexpr std::uint64_t kSmallestTopBytes = 1024;
// Tops of sealed stacks, which are in no pool, together. A loop in a long scan leaves many.
constexpr std::int64_t kTopsBytes = std::int64_t{4} << 20;
// A stack that this many younger executions have passed is given up.
constexpr std::size_t kRunsKept = 16;
// Unless its backward loop has begun: that cannot be computed again.
constexpr std::chrono::seconds kIdleBackward{60};
// All entries of loops are of one site, and their types are the loop's own affair.
constexpr std::int64_t kLoopSite = -1;
constexpr std::int32_t kBytes = 0;
constexpr std::uint32_t kMostEntries = 0xffff0000u;

using Clock = std::chrono::steady_clock;

Status OrderFailure(const char* operation, std::uint32_t handle, std::uint32_t serial,
                    std::uint32_t due) {
  return {Code::kOrder, std::string(operation) + " of loop " + std::to_string(handle) +
                            " came with serial " + std::to_string(serial) + " where " +
                            std::to_string(due) +
                            " is due; XLA must run the trips of a loop in order. The step's "
                            "results are not to be used"};
}

}  // namespace

struct LoopStacks::Home {
  std::shared_ptr<Manager> manager;
  std::uint32_t ticket = 0;  // 0: none open
  std::uint64_t pool_bytes = 0;
  bool managed = false;  // on a managed step's ticket, which its wrapper closes
  std::uint64_t live = 0;
  std::deque<RunKey> recent_runs;
  std::atomic<std::int64_t> top_bytes{0};
};

struct LoopStacks::Stack {
  enum class Phase { kPushing, kSealed, kPopping };
  struct Segment {
    std::uint32_t token = 0;
    std::uint32_t frames = 0;
  };

  ~Stack() { home->top_bytes -= static_cast<std::int64_t>(top_capacity); }

  std::uint64_t frame_bytes() const {
    return std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0});
  }
  bool packed() const { return frame_bytes() < kLargeFrameBytes; }

  void Resize(std::uint64_t capacity) {
    if (capacity == top_capacity) return;
    std::unique_ptr<std::byte[]> bytes;
    if (capacity > 0) {
      bytes.reset(new std::byte[capacity]);
      const std::uint64_t used = std::min(capacity, top_frames * frame_bytes());
      if (used > 0) std::memcpy(bytes.get(), top.get(), used);
    }
    top = std::move(bytes);
    home->top_bytes +=
        static_cast<std::int64_t>(capacity) - static_cast<std::int64_t>(top_capacity);
    top_capacity = capacity;
  }

  std::uint32_t handle = 0;
  RunKey run;
  std::shared_ptr<Home> home;
  std::vector<std::int64_t> sizes;

  // Guarded by State::mutex.
  Phase phase = Phase::kPushing;
  bool busy = false;  // an operation is in flight, and may use what is below without the mutex
  bool lost = false;  // to be freed when it ends
  Clock::time_point touched = Clock::now();

  std::uint32_t frames = 0;
  std::unique_ptr<std::byte[]> top;  // packed frames that are no entry yet
  std::uint64_t top_capacity = 0;
  std::uint64_t top_frames = 0;
  std::vector<Segment> segments;  // if packed
  bool begun = false;             // the manager has a run for it
  RunKey key;
  std::uint32_t serial = 0;
};

struct LoopStacks::State {
  mutable std::mutex mutex;  // guards all below; never held while a ticket closes
  std::shared_ptr<Manager> manager;
  std::uint64_t pool_bytes = 0;
  std::map<std::int32_t, std::shared_ptr<Home>> homes;     // by device
  std::map<std::uint32_t, std::shared_ptr<Home>> managed;  // by ticket
  std::map<std::uint32_t, std::shared_ptr<Stack>> stacks;  // by handle
  std::uint32_t last_handle = 0;
  LoopTotals totals;
};

// The manager's operations that one operation of a stack consists of, one after another.
struct LoopStacks::Chain {
  struct Step {
    bool offload = false;
    std::uint32_t token = 0;
    std::span<const std::byte> source;
    std::span<std::byte> target;
  };
  std::shared_ptr<Stack> stack;
  std::vector<Step> steps;
  std::size_t next = 0;
  std::function<void()> after;  // what remains to be copied
  Done done;
};

LoopStacks::LoopStacks() : state_(std::make_unique<State>()) {}

LoopStacks& LoopStacks::Get() {
  static LoopStacks& stacks = *new LoopStacks;  // leaked, like the registry
  return stacks;
}

void LoopStacks::Configure(std::shared_ptr<Manager> manager, std::uint64_t pool_bytes) {
  std::lock_guard lock(state_->mutex);
  state_->manager = std::move(manager);
  state_->pool_bytes = pool_bytes;
}

std::shared_ptr<LoopStacks::Home> LoopStacks::FindHome(RunKey run, Status& status) {
  State& state = *state_;
  std::uint32_t ticket = 0;
  if (auto manager = TicketOfRun(run, ticket)) {
    auto& home = state.managed[ticket];
    if (home == nullptr) {
      home = std::make_shared<Home>();
      home->manager = std::move(manager);
      home->ticket = ticket;
      home->managed = true;
    }
    return home;
  }
  if (state.manager == nullptr) {
    status = Status(Code::kConfiguration,
                    "a jdynoff.while_loop runs in a process that has not compiled it, so there is "
                    "no buffer manager; call the function through jax.jit in this process");
    return nullptr;
  }
  auto& home = state.homes[run.device];
  if (home == nullptr || home->manager != state.manager || home->pool_bytes != state.pool_bytes) {
    home = std::make_shared<Home>();
    home->manager = state.manager;
    home->pool_bytes = state.pool_bytes;
  }
  if (home->ticket == 0) {
    status = OpenTicket(home->manager, home->pool_bytes, 0, 0, home->ticket);
    if (!status.ok()) {
      home->ticket = 0;
      return nullptr;
    }
  }
  return home;
}

void LoopStacks::DropOrphans(Home& home, RunKey run) {
  auto& recent = home.recent_runs;
  if (std::find(recent.begin(), recent.end(), run) != recent.end()) return;
  recent.push_back(run);
  if (recent.size() <= kRunsKept) return;
  recent.pop_front();
  std::vector<std::shared_ptr<Stack>> orphans;
  for (const auto& [handle, stack] : state_->stacks) {
    if (stack->home.get() != &home) continue;
    if (std::find(recent.begin(), recent.end(), stack->run) != recent.end()) continue;
    const bool idle = Clock::now() - stack->touched > kIdleBackward;
    if (stack->phase != Stack::Phase::kPopping || idle) orphans.push_back(stack);
  }
  for (const auto& stack : orphans) Drop(stack);
}

void LoopStacks::Drop(const std::shared_ptr<Stack>& stack) {
  if (stack->lost) return;
  stack->lost = true;
  ++state_->totals.dropped;
  if (!stack->busy) Free(*stack);
}

void LoopStacks::Free(Stack& stack) {
  std::uint32_t ticket = 0;
  // Fails if the ticket has been closed, which has freed the entries.
  if (stack.begun) (void)!stack.home->manager->End(stack.key, stack.serial, ticket).ok();
  stack.begun = false;
  const std::shared_ptr<Home> home = stack.home;
  state_->stacks.erase(stack.handle);
  if (--home->live > 0 || home->managed || home->ticket == 0) return;
  // Not here: a close waits for the ticket's transfers in flight.
  SubmitCompletion([closing = std::exchange(home->ticket, 0)] { CloseTicket(closing); });
}

Status LoopStacks::Open(RunKey run, std::span<const std::int64_t> sizes, std::uint32_t& handle) {
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  Status status;
  const std::shared_ptr<Home> home = FindHome(run, status);
  if (home == nullptr) return status;
  // Counted first: the orphans may be all that there is.
  ++home->live;
  if (!home->managed) DropOrphans(*home, run);
  auto stack = std::make_shared<Stack>();
  do {
    handle = ++state.last_handle;
  } while (handle == 0 || state.stacks.contains(handle));
  stack->handle = handle;
  stack->run = run;
  stack->home = home;
  stack->sizes.assign(sizes.begin(), sizes.end());
  // Executions have devices from 0 on, so the manager's other runs never have such a key.
  stack->key = {handle, -1 - run.device};
  state.stacks.emplace(handle, std::move(stack));
  ++state.totals.opened;
  return {};
}

// Null and ok: the stack was dropped.
std::shared_ptr<LoopStacks::Stack> LoopStacks::Take(std::uint32_t handle, const char* operation,
                                                    bool popping, std::uint32_t serial,
                                                    Status& status) {
  const auto found = state_->stacks.find(handle);
  if (found == state_->stacks.end() || found->second->lost) {
    if (popping) {
      status = Status(Code::kToken, std::string(operation) + ": loop " + std::to_string(handle) +
                                        " has no stack: it failed, its step was aborted, or it "
                                        "was idle for long while many others ran");
    }
    return nullptr;
  }
  const std::shared_ptr<Stack>& stack = found->second;
  const bool right_phase = (stack->phase == Stack::Phase::kPopping) == popping &&
                           stack->phase != Stack::Phase::kSealed && !stack->busy;
  if (serial != stack->frames || !right_phase) {
    status = OrderFailure(operation, handle, serial, stack->frames);
    return nullptr;
  }
  stack->busy = true;
  stack->touched = Clock::now();
  return stack;
}

Status LoopStacks::BeginRun(Stack& stack) {
  if (stack.begun) return {};
  Status status = stack.home->manager->Begin(stack.home->ticket, stack.key);
  stack.begun = status.ok();
  return status;
}

Outcome LoopStacks::Start(const std::shared_ptr<Chain>& chain, Done done) {
  chain->done = std::move(done);
  Status status;
  if (!chain->steps.empty()) status = BeginRun(*chain->stack);
  if (status.ok() && !Advance(chain, status)) return {Status(), true};
  Finish(*chain, status);
  return {status};
}

// False: pending; the chain goes on when the manager calls back.
bool LoopStacks::Advance(const std::shared_ptr<Chain>& chain, Status& status) {
  Stack& stack = *chain->stack;
  Manager& manager = *stack.home->manager;
  status = Status();
  while (status.ok() && chain->next < chain->steps.size()) {
    const Chain::Step& step = chain->steps[chain->next++];
    if (stack.serial >= kMostEntries) {
      status =
          Status(Code::kHostLimit,
                 "a loop of " + std::to_string(stack.frames) +
                     " trips has made more entries than can be counted in 32 bits; put several "
                     "trips into one, with an inner lax.scan");
      break;
    }
    Done resume = [this, chain](const Status& result) {
      Status last = result;
      if (last.ok() && !Advance(chain, last)) return;
      Finish(*chain, last);
      chain->done(last);
    };
    // The next serial is stored before the operation can be resumed by another thread.
    const Outcome outcome =
        step.offload ? manager.Offload(stack.key, step.source, stack.serial, kLoopSite, kBytes, 1,
                                       stack.serial, std::move(resume))
                     : manager.Reload(stack.key, step.token, step.target, stack.serial, kLoopSite,
                                      kBytes, stack.serial, std::move(resume));
    if (outcome.pending) return false;
    status = outcome.status;
  }
  return true;
}

void LoopStacks::Finish(Chain& chain, const Status& status) {
  if (status.ok() && chain.after) chain.after();
  std::lock_guard lock(state_->mutex);
  const std::shared_ptr<Stack> stack = chain.stack;
  stack->busy = false;
  if (!status.ok()) {
    // The execution has failed: none of its loops will be asked for any more.
    std::vector<std::shared_ptr<Stack>> failed;
    for (const auto& [handle, other] : state_->stacks) {
      if (other->run == stack->run) failed.push_back(other);
    }
    for (const auto& other : failed) Drop(other);
  }
  const auto found = state_->stacks.find(stack->handle);
  if (found == state_->stacks.end()) return;
  const bool empty = stack->phase == Stack::Phase::kPopping && stack->frames == 0;
  if (stack->lost || empty) Free(*stack);
}

Outcome LoopStacks::Push(std::uint32_t handle, std::uint32_t serial,
                         std::vector<std::span<const std::byte>> values, Done done) {
  auto chain = std::make_shared<Chain>();
  {
    std::lock_guard lock(state_->mutex);
    Status status;
    chain->stack = Take(handle, "push", false, serial, status);
    if (chain->stack == nullptr) return {status};
    const auto& sizes = chain->stack->sizes;
    const bool match = std::equal(values.begin(), values.end(), sizes.begin(), sizes.end(),
                                  [](const auto& value, std::int64_t size) {
                                    return value.size() == static_cast<std::size_t>(size);
                                  });
    if (!match) {
      chain->stack->busy = false;
      return {Status(Code::kToken, "push to loop " + std::to_string(handle) +
                                       ": the arrays are not of the sizes that it was opened for")};
    }
    ++chain->stack->frames;
    ++state_->totals.frames_pushed;
  }
  Stack& stack = *chain->stack;
  if (!stack.packed()) {
    for (const auto& value : values) chain->steps.push_back({true, 0, value, {}});
    return Start(chain, std::move(done));
  }
  const std::uint64_t frame = stack.frame_bytes();
  const std::uint64_t used = stack.top_frames * frame;
  if (used + frame > stack.top_capacity) {
    const std::uint64_t most =
        std::max(frame, kSegmentBytes / std::max<std::uint64_t>(frame, 1) * frame);
    stack.Resize(std::min(most, std::max({used + frame, 2 * used, kSmallestTopBytes})));
  }
  std::byte* target = stack.top.get() + used;
  for (const auto& value : values) {
    if (!value.empty()) std::memcpy(target, value.data(), value.size());
    target += value.size();
  }
  ++stack.top_frames;
  if (frame > 0 && used + 2 * frame > kSegmentBytes) FlushTop(*chain);
  return Start(chain, std::move(done));
}

void LoopStacks::FlushTop(Chain& chain) {
  Stack& stack = *chain.stack;
  chain.steps.push_back({true, 0, {stack.top.get(), stack.top_frames * stack.frame_bytes()}, {}});
  stack.segments.push_back({stack.serial + 1, static_cast<std::uint32_t>(stack.top_frames)});
  chain.after = [&stack] { stack.top_frames = 0; };
}

Outcome LoopStacks::Seal(std::uint32_t handle, std::uint32_t serial, std::uint32_t& sealed,
                         Done done) {
  auto chain = std::make_shared<Chain>();
  {
    std::lock_guard lock(state_->mutex);
    Status status;
    sealed = 0;
    chain->stack = Take(handle, "the end of the forward pass", false, serial, status);
    if (chain->stack == nullptr) return {status};
    sealed = handle;
    chain->stack->phase = Stack::Phase::kSealed;
  }
  Stack& stack = *chain->stack;
  if (stack.top_frames > 0 && stack.home->top_bytes > kTopsBytes) {
    FlushTop(*chain);
    chain->after = [&stack] {
      stack.top_frames = 0;
      stack.Resize(0);
    };
  } else {
    stack.Resize(stack.top_frames * stack.frame_bytes());
  }
  return Start(chain, std::move(done));
}

void LoopStacks::Claim(std::uint32_t handle, std::uint32_t trips,
                       std::span<const std::int64_t> sizes, std::uint32_t& claimed) {
  std::lock_guard lock(state_->mutex);
  claimed = 0;
  const auto found = state_->stacks.find(handle);
  if (found != state_->stacks.end()) {
    Stack& stack = *found->second;
    const bool free = stack.phase == Stack::Phase::kSealed && !stack.busy && !stack.lost;
    if (free && stack.frames == trips &&
        std::equal(sizes.begin(), sizes.end(), stack.sizes.begin(), stack.sizes.end())) {
      claimed = handle;
      stack.phase = Stack::Phase::kPopping;
      stack.touched = Clock::now();
      if (trips == 0) Free(stack);
      return;
    }
  }
  ++state_->totals.missed;
}

Outcome LoopStacks::Pop(std::uint32_t handle, std::uint32_t serial,
                        std::vector<std::span<std::byte>> targets, Done done) {
  auto chain = std::make_shared<Chain>();
  {
    std::lock_guard lock(state_->mutex);
    Status status;
    chain->stack = Take(handle, "pop", true, serial, status);
    if (chain->stack == nullptr) return {status};
    const auto& sizes = chain->stack->sizes;
    const bool match = std::equal(targets.begin(), targets.end(), sizes.begin(), sizes.end(),
                                  [](const auto& target, std::int64_t size) {
                                    return target.size() == static_cast<std::size_t>(size);
                                  });
    if (serial == 0 || !match) {
      chain->stack->busy = false;
      return {Status(Code::kToken, "pop from loop " + std::to_string(handle) + " with " +
                                       std::to_string(serial) +
                                       " trips left: there must be one, and the arrays must be of "
                                       "the sizes that were pushed")};
    }
    --chain->stack->frames;
    ++state_->totals.frames_popped;
  }
  Stack& stack = *chain->stack;
  if (!stack.packed()) {
    // Every entry has used one serial, so the tokens are known.
    const std::size_t count = targets.size();
    const auto first = static_cast<std::uint32_t>((serial - 1) * count + 1);
    for (std::size_t i = count; i > 0; --i) {
      chain->steps.push_back(
          {false, static_cast<std::uint32_t>(first + i - 1), {}, targets[i - 1]});
    }
    return Start(chain, std::move(done));
  }
  const std::uint64_t frame = stack.frame_bytes();
  if (stack.top_frames == 0) {
    const Stack::Segment segment = stack.segments.back();
    stack.segments.pop_back();
    const std::uint64_t bytes = segment.frames * frame;
    if (bytes > stack.top_capacity) stack.Resize(bytes);
    stack.top_frames = segment.frames;
    chain->steps.push_back({false, segment.token, {}, {stack.top.get(), bytes}});
  }
  chain->after = [&stack, frame, targets = std::move(targets)] {
    const std::byte* source = stack.top.get() + --stack.top_frames * frame;
    for (const auto& target : targets) {
      if (!target.empty()) std::memcpy(target.data(), source, target.size());
      source += target.size();
    }
  };
  return Start(chain, std::move(done));
}

void LoopStacks::TicketClosed(std::uint32_t ticket) {
  std::lock_guard lock(state_->mutex);
  std::vector<std::shared_ptr<Stack>> closed;
  for (const auto& [handle, stack] : state_->stacks) {
    if (stack->home->ticket == ticket) closed.push_back(stack);
  }
  for (const auto& stack : closed) {
    stack->begun = false;
    stack->home->ticket = 0;
    Drop(stack);
  }
  for (const auto& [device, home] : state_->homes) {
    if (home->ticket == ticket) home->ticket = 0;
  }
  state_->managed.erase(ticket);
}

LoopTotals LoopStacks::Totals() const {
  std::lock_guard lock(state_->mutex);
  LoopTotals totals = state_->totals;
  totals.live_stacks = state_->stacks.size();
  for (const auto& [handle, stack] : state_->stacks) totals.top_bytes += stack->top_capacity;
  return totals;
}

}  // namespace jdynoff
