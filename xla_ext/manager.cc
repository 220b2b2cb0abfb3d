// The life of a manager and of its tickets, and what can be asked of them.
//
// The trap: Close waits for the ticket's transfers in flight, and Shutdown for the I/O threads.
// Neither may be called on one of these.
#include <utility>

#include "manager_state.h"
#include "registry.h"

namespace jdynoff {
namespace {

// Closed tickets whose statistics can still be asked for.
constexpr std::size_t kClosedTicketsKept = 256;
constexpr std::size_t kClosedLogsKept = 8;

}  // namespace

std::shared_ptr<Manager> Manager::Create(const ManagerOptions& options, Status& status) {
  status = Status();
  if (options.io_threads < 1 || options.chunk_bytes < kPageBytes ||
      options.chunk_bytes % kPageBytes != 0) {
    status = Status(Code::kConfiguration,
                    "io_threads is " + std::to_string(options.io_threads) + " and chunk_bytes " +
                        std::to_string(options.chunk_bytes) +
                        "; there must be at least one I/O thread, and a chunk must be a positive "
                        "multiple of " +
                        std::to_string(kPageBytes) + " bytes");
    return nullptr;
  }
  std::unique_ptr<FarTier> far;
  if (options.spill.has_value()) {
    far = OpenSpillFile(*options.spill, status);
    if (far == nullptr) return nullptr;
  }
  // In a forked child the mutex may be held and the condition variables waited on by threads that
  // do not exist there: destroying them would hang.
  std::shared_ptr<Manager> manager(new Manager(options, std::move(far)), [](Manager* m) {
    if (!InForkedChild()) delete m;
  });
  RegisterManager(manager);
  manager->StartThreads();
  return manager;
}

Manager::Manager(const ManagerOptions& options, std::unique_ptr<FarTier> far)
    : options_(options), near_(MakeHostMemory()), far_(std::move(far)), arena_(*near_) {}

Manager::~Manager() { Shutdown(); }

void Manager::StartThreads() {
  if (far_ == nullptr) return;  // without a far tier nothing is ever left to a thread
  // One more than may be in the far tier at once: it copies while they transfer.
  const int count = options_.io_threads + 1;
  threads_.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) threads_.emplace_back([this] { Work(); });
}

void Manager::AbandonAfterFork() {
  if (far_ != nullptr) far_->AbandonAfterFork();
}

void Manager::Shutdown() {
  std::vector<std::uint32_t> open;
  {
    std::lock_guard lock(mutex_);
    if (stopping_ && threads_.empty()) return;
    stopping_ = true;
    for (const auto& [id, ticket] : tickets_) open.push_back(id);
  }
  if (far_ != nullptr) far_->Hurry();
  for (std::uint32_t id : open) CloseTicket(id);
  std::vector<std::thread> threads;
  {
    std::lock_guard lock(mutex_);
    threads.swap(threads_);
    work_.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
}

Status Manager::Open(std::uint32_t id, std::uint64_t pool_bytes, std::uint64_t spill_bytes,
                     std::uint64_t expected_bytes) {
  std::unique_lock lock(mutex_);
  if (stopping_) return {Code::kConfiguration, "the manager has been shut down"};
  const std::uint64_t pages = pool_bytes / kPageBytes;
  if (spill_bytes > 0) {
    if (far_ == nullptr) {
      return {Code::kConfiguration, "a reservation of " + std::to_string(spill_bytes) +
                                        " bytes of spill space needs a disk tier, and this "
                                        "manager has none; add tiers=[jdynoff.Disk(path)]"};
    }
    if (Status status = far_->Reserve(spill_bytes); !status.ok()) return status;
  }
  auto ticket = std::make_shared<Ticket>();
  if (!arena_.Open(pages, ticket->lease)) {
    if (spill_bytes > 0) far_->Unreserve(spill_bytes);
    return {Code::kHostLimit, "cannot map a pool of " + std::to_string(pool_bytes) +
                                  " bytes: the operating system refuses; lower the budget or "
                                  "raise the process's limit (ulimit -v)"};
  }
  ticket->id = id;
  ticket->quota_pages = pages;
  ticket->spill_reserved = spill_bytes;
  ticket->expected_pages = PagesFor(expected_bytes);
  ticket->stats.pool_bytes = pages * kPageBytes;
  tickets_.emplace(id, std::move(ticket));
  GiveBackExcess(lock);
  return {};
}

void Manager::Close(std::uint32_t id) {
  std::unique_lock lock(mutex_);
  const auto found = tickets_.find(id);
  if (found == tickets_.end()) return;
  const std::shared_ptr<Ticket> ticket = found->second;
  ticket->closing = true;
  for (const auto& run : ticket->runs) {
    if (run->operation == nullptr) continue;
    if (run->operation->status.ok()) {
      run->operation->status =
          Status(Code::kToken, "the step's ticket " + std::to_string(id) +
                                   " was closed while the step was running; keep the step's "
                                   "results alive until it has finished");
    }
    CompleteIfDone(*run);
  }
  quiet_.wait(lock, [&] { return ticket->transfers == 0; });
  if (tickets_.erase(id) == 0) return;  // two threads closed it
  for (const auto& run : ticket->runs) {
    while (!run->entries.empty()) {
      ++ticket->stats.entries_unread;
      FreeEntry(*run, run->entries.begin()->first);
    }
    runs_.erase(run->key);
  }
  arena_.Close(ticket->lease);
  if (far_ != nullptr) far_->Unreserve(ticket->spill_reserved);
  ticket->stats.state = "closed";
  closed_.emplace_back(id, std::move(ticket->stats));
  if (closed_.size() > kClosedTicketsKept) closed_.pop_front();
  if (!ticket->log.empty()) {
    closed_logs_.emplace_back(id, std::move(ticket->log));
    if (closed_logs_.size() > kClosedLogsKept) closed_logs_.pop_front();
  }
  quiet_.notify_all();
  GiveBackExcess(lock);
}

// Other steps go on meanwhile: a large pool takes the system some time.
void Manager::GiveBackExcess(std::unique_lock<std::mutex>& lock) {
  const std::vector<PageArena::Block> excess = arena_.TakeExcess();
  if (excess.empty()) return;
  lock.unlock();
  for (const PageArena::Block& block : excess) {
    near_->GiveBack(block.base, block.resident_pages * kPageBytes);
  }
  lock.lock();
  arena_.Reclaim(excess);
}

std::optional<TicketStats> Manager::Stats(std::uint32_t id) const {
  std::lock_guard lock(mutex_);
  if (const auto found = tickets_.find(id); found != tickets_.end()) return found->second->stats;
  for (auto it = closed_.rbegin(); it != closed_.rend(); ++it) {
    if (it->first == id) return it->second;
  }
  return std::nullopt;
}

std::vector<Event> Manager::Log(std::uint32_t id) const {
  std::lock_guard lock(mutex_);
  if (const auto found = tickets_.find(id); found != tickets_.end()) return found->second->log;
  for (const auto& [closed, log] : closed_logs_) {
    if (closed == id) return log;
  }
  return {};
}

void Manager::EnableLog(bool enabled) {
  std::lock_guard lock(mutex_);
  log_enabled_ = enabled;
}

ManagerTotals Manager::Totals() const {
  std::lock_guard lock(mutex_);
  ManagerTotals totals;
  totals.live_entries = live_entries_;
  totals.live_bytes = live_bytes_;
  totals.arena_bytes = arena_.resident_pages() * kPageBytes;
  totals.spill_file_bytes = far_ == nullptr ? 0 : far_->size_bytes();
  totals.open_tickets = tickets_.size();
  return totals;
}

void Manager::InjectFault(Fault fault, std::int64_t after, std::int64_t count) {
  if (far_ != nullptr) far_->InjectFault(fault, after, count);
}

}  // namespace jdynoff
