#include "manager.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "checksum.h"
#include "completion_pool.h"
#include "registry.h"

namespace jdynoff {
namespace {

// Closed tickets whose statistics can still be asked for.
constexpr std::size_t kClosedTicketsKept = 256;
constexpr std::size_t kClosedLogsKept = 8;
constexpr std::size_t kLogEventsKept = 200'000;
// A burst of this size can be taken without waiting while the disk catches up. More would only
// write what may well have stayed in the pool.
constexpr std::uint64_t kLowWaterBytes = std::uint64_t{64} << 20;
// A reservation that turns out too small grows by this much at a time.
constexpr std::uint64_t kSpillGrowthBytes = std::uint64_t{16} << 20;
// Each I/O thread's own buffer, for reloads that find the pool full of what cannot be dropped.
constexpr std::size_t kBounceBytes = 4 * kPageBytes;
// Reads and writes alternate in some programs; the last few operations tell which phase it is.
constexpr std::uint32_t kRecentMask = 0xff;

std::int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double Seconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

}  // namespace

struct Manager::Entry {
  std::uint32_t token = 0;
  std::int64_t site = 0;
  std::int32_t dtype = 0;
  std::uint64_t bytes = 0;
  int readers_left = 0;
  bool freed = false;  // its units are released as soon as no transfer holds them
  std::vector<Unit> units;
};

// The one operation that a run has in flight.
struct Manager::Operation {
  bool is_offload = false;
  std::shared_ptr<Entry> entry;
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::size_t unit_bytes = 0;
  std::size_t next = 0;       // offload: first unit that nobody copies yet
  std::size_t remaining = 0;  // units not done
  int busy = 0;               // units being transferred, whose buffers must stay valid
  bool last_reader = false;
  bool waited = false;  // had to wait for the far tier or for room
  bool used_read_ahead = false;
  bool resumed = false;  // offload: goes on after its wait for room
  bool armed = false;    // the handler has returned "pending": completion is ours
  Status status;
  Done done;
  std::int64_t start_ns = 0;
};

struct Manager::Run {
  Ticket* ticket = nullptr;
  RunKey key;
  std::uint32_t counter = 0;
  std::uint32_t recent = 0;      // one bit per operation, newest lowest, set for a reload
  std::uint32_t last_token = 0;  // of the last reload
  bool forwards = false;         // entries are being read oldest first
  std::map<std::uint32_t, std::shared_ptr<Entry>> entries;
  UnitSet dirty;   // in the pool only
  UnitSet clean;   // in the pool and in the far tier
  UnitSet absent;  // in the far tier only
  std::shared_ptr<Operation> operation;
};

struct Manager::Ticket {
  std::uint32_t id = 0;
  std::uint64_t quota_pages = 0;
  PageArena::Lease lease;  // of so many
  std::uint64_t used_pages = 0;
  std::uint64_t clean_pages = 0;
  std::uint64_t writing_pages = 0;
  std::uint64_t written_pages = 0;  // ever, and those being written
  std::uint64_t expected_pages = 0;
  std::uint64_t spill_reserved = 0;
  std::uint64_t spill_used = 0;
  int transfers = 0;  // jobs and copies in flight
  bool closing = false;
  Status write_failure;  // sticky: what cannot be written stays in the pool
  std::vector<std::shared_ptr<Run>> runs;
  TicketStats stats;
  std::vector<Event> log;
};

struct Manager::Job {
  JobKind kind = JobKind::kCopyIn;
  std::shared_ptr<Ticket> ticket;
  std::shared_ptr<Run> run;
  std::shared_ptr<Operation> operation;
  std::vector<std::shared_ptr<Entry>> entries;  // keep the units alive
  std::vector<Unit*> units;
  std::byte* bounce = nullptr;
};

bool Manager::UnitOrder::operator()(const Unit* a, const Unit* b) const {
  if (a->entry->token != b->entry->token) return a->entry->token < b->entry->token;
  return a->index < b->index;
}

// Life of a manager.

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
  for (std::uint32_t id : open) CloseTicket(id);
  std::vector<std::thread> threads;
  {
    std::lock_guard lock(mutex_);
    threads.swap(threads_);
    work_.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
}

// Tickets.

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

// Operations.

Status Manager::Begin(std::uint32_t id, RunKey key) {
  std::lock_guard lock(mutex_);
  const auto found = tickets_.find(id);
  if (found == tickets_.end() || found->second->closing) {
    return {Code::kToken, "ticket " + std::to_string(id) +
                              " is not open; a managed step must be called through its wrapper, "
                              "which opens one for each call"};
  }
  auto run = std::make_shared<Run>();
  run->ticket = found->second.get();
  run->key = key;
  if (!runs_.emplace(key, run).second) {
    return {Code::kOrder, "run " + std::to_string(key.run_id) + " on device " +
                              std::to_string(key.device) +
                              " has begun already; a program must hold one managed step only"};
  }
  found->second->runs.push_back(std::move(run));
  found->second->stats.state = "running";
  return {};
}

std::shared_ptr<Manager::Run> Manager::FindRun(RunKey key, const char* operation,
                                               std::uint32_t serial, Status& status) {
  const auto found = runs_.find(key);
  if (found == runs_.end() || found->second->ticket->closing) {
    status = Status(Code::kToken, std::string(operation) + ": run " + std::to_string(key.run_id) +
                                      " on device " + std::to_string(key.device) +
                                      " is not open; its ticket was closed or never opened");
    return nullptr;
  }
  const std::shared_ptr<Run>& run = found->second;
  if (serial != run->counter || run->operation != nullptr) {
    status = Status(Code::kOrder,
                    std::string(operation) + " came with serial " + std::to_string(serial) +
                        " where " + std::to_string(run->counter) +
                        (run->operation != nullptr ? " is still in progress" : " is due") +
                        "; XLA must run the operations of a step in the order of their serials. "
                        "The step's results are not to be used");
    NoteFailure(*run->ticket, status);
    return nullptr;
  }
  status = Status();
  return run;
}

std::size_t Manager::UnitBytes(const Ticket& ticket) const {
  // Several units must fit the quota, or transfers could not overlap.
  const std::uint64_t quarter = ticket.quota_pages / 4 * kPageBytes;
  return std::clamp<std::uint64_t>(quarter, kPageBytes, options_.chunk_bytes);
}

Outcome Manager::Offload(RunKey key, std::span<const std::byte> source, std::uint32_t serial,
                         std::int64_t site, std::int32_t dtype, std::int32_t readers,
                         std::uint32_t& token, Done done) {
  const std::int64_t start_ns = NowNs();
  std::unique_lock lock(mutex_);
  Status status;
  const std::shared_ptr<Run> run = FindRun(key, "offload", serial, status);
  if (run == nullptr) return {status};
  Ticket& ticket = *run->ticket;
  if (readers < 1) {
    return {Status(Code::kOrder, "offload at site " + std::to_string(site) + " announces " +
                                     std::to_string(readers) +
                                     " reloads; there must be at least one")};
  }
  auto entry = std::make_shared<Entry>();
  entry->token = token = ++run->counter;
  entry->site = site;
  entry->dtype = dtype;
  entry->bytes = source.size();
  entry->readers_left = readers;
  const std::size_t unit_bytes = UnitBytes(ticket);
  entry->units.resize((source.size() + unit_bytes - 1) / unit_bytes);
  for (std::size_t i = 0; i < entry->units.size(); ++i) {
    entry->units[i].entry = entry.get();
    entry->units[i].index = static_cast<std::uint32_t>(i);
    entry->units[i].bytes = std::min(unit_bytes, source.size() - i * unit_bytes);
  }
  run->recent = (run->recent << 1) & kRecentMask;
  run->entries.emplace(token, entry);
  ++live_entries_;
  live_bytes_ += entry->bytes;
  ++ticket.stats.entries_offloaded;
  ticket.stats.bytes_offloaded += entry->bytes;
  ++ticket.stats.site_counts[site];

  auto op = std::make_shared<Operation>();
  op->is_offload = true;
  op->entry = entry;
  op->source = source.data();
  op->unit_bytes = unit_bytes;
  op->remaining = entry->units.size();
  op->start_ns = start_ns;
  run->operation = op;

  // What there is room for is copied here, at once; the rest is left to the I/O threads.
  ++ticket.transfers;
  while (op->status.ok() && op->next < entry->units.size()) {
    Unit& unit = entry->units[op->next];
    if (!TakePages(ticket, PagesFor(unit.bytes), unit.pages, /*evict=*/true)) break;
    const std::size_t offset = op->next++ * unit_bytes;
    ++unit.pins;
    lock.unlock();
    CopyIn(unit, source.data() + offset);
    lock.lock();
    --unit.pins;
    unit.in_pool = true;
    --op->remaining;
    SettleUnit(*run, unit);
    WakeFor(ticket, *run);
  }
  --ticket.transfers;
  if (ticket.closing) quiet_.notify_all();
  if (op->remaining == 0 && op->status.ok()) {
    FinishOperation(*run, *op);
    return {};
  }
  op->waited = true;
  op->done = std::move(done);
  op->armed = true;
  FailStuck(ticket);
  CompleteIfDone(*run);
  Wake();
  return {Status(), true};
}

Outcome Manager::Reload(RunKey key, std::uint32_t token, std::span<std::byte> target,
                        std::uint32_t serial, std::int64_t site, std::int32_t dtype,
                        std::uint32_t& next_serial, Done done) {
  const std::int64_t start_ns = NowNs();
  std::unique_lock lock(mutex_);
  Status status;
  const std::shared_ptr<Run> run = FindRun(key, "reload", serial, status);
  if (run == nullptr) return {status};
  Ticket& ticket = *run->ticket;
  const auto found = run->entries.find(token);
  if (found == run->entries.end()) {
    status = Status(Code::kToken, "reload at site " + std::to_string(site) + " asks for entry " +
                                      std::to_string(token) +
                                      ", which this run does not hold: it was never stored, or "
                                      "all its announced reloads have been made");
    NoteFailure(ticket, status);
    return {status};
  }
  const std::shared_ptr<Entry> entry = found->second;
  if (entry->site != site || entry->dtype != dtype || entry->bytes != target.size()) {
    status =
        Status(Code::kToken,
               "reload at site " + std::to_string(site) + " of " + std::to_string(target.size()) +
                   " bytes of dtype " + std::to_string(dtype) + " asks for entry " +
                   std::to_string(token) + ", which holds " + std::to_string(entry->bytes) +
                   " bytes of dtype " + std::to_string(entry->dtype) + " from site " +
                   std::to_string(entry->site) + "; a reload must match its offload");
    NoteFailure(ticket, status);
    return {status};
  }
  next_serial = ++run->counter;
  run->recent = ((run->recent << 1) | 1) & kRecentMask;
  run->last_token = token;
  // Nearer to the oldest or to the youngest of what is left: which end is being read?
  const std::uint32_t oldest = run->entries.begin()->first;
  const std::uint32_t youngest = run->entries.rbegin()->first;
  run->forwards = token - oldest < youngest - token;

  auto op = std::make_shared<Operation>();
  op->entry = entry;
  op->target = target.data();
  op->unit_bytes = entry->units.empty() ? 0 : entry->units.front().bytes;
  op->remaining = entry->units.size();
  op->last_reader = entry->readers_left == 1;
  op->start_ns = start_ns;
  run->operation = op;
  ++ticket.transfers;

  std::vector<Unit*> here;
  for (Unit& unit : entry->units) {
    op->used_read_ahead |= unit.read_ahead;
    if (unit.in_pool) {
      ++unit.pins;
      Displace(*run, unit);
      here.push_back(&unit);
    } else {
      unit.wanted = true;
      op->waited = true;
    }
  }
  op->busy += static_cast<int>(here.size());
  WakeFor(ticket, *run);
  // The far tier works while this thread copies what is at hand.
  for (Unit* unit : here) {
    lock.unlock();
    CopyOut(*unit, target.data() + unit->index * op->unit_bytes);
    lock.lock();
    --unit->pins;
    --op->busy;
    FinishUnitOfReload(*run, *op, *unit);
  }
  --ticket.transfers;
  if (ticket.closing) quiet_.notify_all();
  if (op->remaining == 0 && op->status.ok()) {
    FinishOperation(*run, *op);
    WakeFor(ticket, *run);
    return {};
  }
  op->done = std::move(done);
  op->armed = true;
  CompleteIfDone(*run);
  Wake();
  return {Status(), true};
}

Status Manager::Discard(RunKey key, std::uint32_t token, std::uint32_t serial, std::int64_t site,
                        std::uint32_t& next_serial) {
  const std::int64_t start_ns = NowNs();
  std::lock_guard lock(mutex_);
  Status status;
  const std::shared_ptr<Run> run = FindRun(key, "discard", serial, status);
  if (run == nullptr) return status;
  Ticket& ticket = *run->ticket;
  if (token != 0) {
    const auto found = run->entries.find(token);
    if (found == run->entries.end() || found->second->site != site) {
      status = Status(Code::kToken, "discard at site " + std::to_string(site) + " asks for entry " +
                                        std::to_string(token) +
                                        ", which this run does not hold for that site");
      NoteFailure(ticket, status);
      return status;
    }
    ++ticket.stats.entries_discarded;
    if (log_enabled_ && ticket.log.size() < kLogEventsKept) {
      ticket.log.push_back({"discard", site, found->second->bytes, start_ns, NowNs()});
    }
    FreeEntry(*run, token);
    WakeFor(ticket, *run);
  }
  next_serial = ++run->counter;
  return {};
}

Status Manager::End(RunKey key, std::uint32_t serial, std::uint32_t& ticket_id) {
  std::lock_guard lock(mutex_);
  Status status;
  const std::shared_ptr<Run> run = FindRun(key, "end", serial, status);
  if (run == nullptr) return status;
  Ticket& ticket = *run->ticket;
  while (!run->entries.empty()) {
    ++ticket.stats.entries_unread;
    FreeEntry(*run, run->entries.begin()->first);
  }
  runs_.erase(key);
  std::erase(ticket.runs, run);
  if (ticket.runs.empty()) ticket.stats.state = "ended";
  ticket_id = ticket.id;
  return {};
}

// Pages and file space.

bool Manager::EvictOne(Ticket& ticket) {
  for (const auto& run : ticket.runs) {
    if (run->clean.empty()) continue;
    // What will be needed last: in last-in first-out order the oldest.
    Unit& unit = run->forwards && !Pushing(*run) ? **run->clean.rbegin() : **run->clean.begin();
    Displace(*run, unit);
    ReturnPages(ticket, unit);
    unit.in_pool = false;
    unit.read_ahead = false;
    Place(*run, unit);
    return true;
  }
  return false;
}

bool Manager::TakePages(Ticket& ticket, std::size_t count, std::vector<std::byte*>& pages,
                        bool evict) {
  while (ticket.quota_pages - ticket.used_pages < count) {
    if (!evict || !EvictOne(ticket)) return false;
  }
  pages.reserve(count);
  for (std::size_t i = 0; i < count; ++i) pages.push_back(arena_.Take(ticket.lease));
  ticket.used_pages += count;
  ticket.stats.pool_peak_bytes =
      std::max<std::uint64_t>(ticket.stats.pool_peak_bytes, ticket.used_pages * kPageBytes);
  return true;
}

void Manager::ReturnPages(Ticket& ticket, Unit& unit) {
  ticket.used_pages -= unit.pages.size();
  // Backwards, so that the next to take them gets them in ascending order again.
  for (auto page = unit.pages.rbegin(); page != unit.pages.rend(); ++page) {
    arena_.Return(ticket.lease, *page);
  }
  unit.pages.clear();
}

void Manager::FreeExtents(Ticket& ticket, Unit& unit) {
  for (const Extent& extent : unit.extents) {
    far_->Free(extent);
    ticket.spill_used -= extent.bytes;
  }
  unit.extents.clear();
}

void Manager::Place(Run& run, Unit& unit) {
  if (unit.pins > 0 || unit.writing || unit.reading || unit.entry->freed) return;
  if (unit.in_pool && unit.in_far) {
    run.clean.insert(&unit);
    unit.where = Where::kClean;
    run.ticket->clean_pages += unit.pages.size();
  } else if (unit.in_pool) {
    run.dirty.insert(&unit);
    unit.where = Where::kDirty;
  } else if (unit.in_far) {
    run.absent.insert(&unit);
    unit.where = Where::kAbsent;
  }
}

void Manager::Displace(Run& run, Unit& unit) {
  switch (unit.where) {
    case Where::kDirty:
      run.dirty.erase(&unit);
      break;
    case Where::kClean:
      run.clean.erase(&unit);
      run.ticket->clean_pages -= unit.pages.size();
      break;
    case Where::kAbsent:
      run.absent.erase(&unit);
      break;
    case Where::kNowhere:
      break;
  }
  unit.where = Where::kNowhere;
}

void Manager::FreeUnit(Run& run, Unit& unit) {
  Displace(run, unit);
  if (unit.pins > 0 || unit.writing || unit.reading) return;  // SettleUnit comes back to it
  ReturnPages(*run.ticket, unit);
  FreeExtents(*run.ticket, unit);
  unit.in_pool = unit.in_far = false;
}

void Manager::FreeEntry(Run& run, std::uint32_t token) {
  const auto found = run.entries.find(token);
  const std::shared_ptr<Entry> entry = found->second;
  entry->freed = true;
  for (Unit& unit : entry->units) FreeUnit(run, unit);
  --live_entries_;
  live_bytes_ -= entry->bytes;
  run.entries.erase(found);
}

// A transfer of the unit has ended: it goes where its state says, or away if its entry has gone.
void Manager::SettleUnit(Run& run, Unit& unit) {
  Displace(run, unit);
  if (unit.entry->freed) {
    FreeUnit(run, unit);
  } else {
    Place(run, unit);
  }
}

// What the I/O threads should do.

bool Manager::Pushing(const Run& run) const { return (run.recent & 1) == 0; }

std::uint64_t Manager::LowWaterPages(const Ticket& ticket) const {
  return std::min<std::uint64_t>(ticket.quota_pages / 4, kLowWaterBytes / kPageBytes);
}

bool Manager::WantsWrite(const Ticket& ticket, const Run& run) const {
  if (run.dirty.empty() || !ticket.write_failure.ok()) return false;
  std::uint64_t wanted = 0;
  const Operation* op = run.operation.get();
  const bool waiting =
      op != nullptr && op->is_offload && op->armed && op->next < op->entry->units.size();
  if (waiting) wanted = PagesFor(op->entry->units[op->next].bytes);
  if (Pushing(run)) wanted = std::max(wanted, LowWaterPages(ticket));
  const std::uint64_t coming =
      ticket.quota_pages - ticket.used_pages + ticket.clean_pages + ticket.writing_pages;
  if (coming < wanted) return true;
  // Known from the start: this much cannot stay.
  return Pushing(run) &&
         ticket.written_pages + ticket.quota_pages <
             ticket.expected_pages + LowWaterPages(ticket) &&
         ticket.expected_pages > ticket.quota_pages;
}

void Manager::AddUnit(Job& job, Unit& unit) {
  Displace(*job.run, unit);
  job.units.push_back(&unit);
  const auto entry = job.run->entries.find(unit.entry->token)->second;
  if (job.entries.empty() || job.entries.back() != entry) job.entries.push_back(entry);
}

bool Manager::PickDemandRead(Ticket& ticket, Run& run, Job& job) {
  Operation* op = run.operation.get();
  if (op == nullptr || op->is_offload || !op->status.ok()) return false;
  std::uint64_t batch_bytes = 0;
  bool pages_short = false;
  for (Unit& unit : op->entry->units) {
    if (!unit.wanted || unit.reading) continue;
    if (unit.where != Where::kAbsent) continue;
    const std::size_t pages = PagesFor(unit.bytes);
    if (batch_bytes > 0 && batch_bytes + pages * kPageBytes > options_.chunk_bytes) break;
    if (!TakePages(ticket, pages, unit.pages, /*evict=*/true)) {
      pages_short = true;
      break;
    }
    AddUnit(job, unit);
    unit.reading = true;
    ++op->busy;
    batch_bytes += pages * kPageBytes;
  }
  if (!job.units.empty()) {
    job.kind = JobKind::kRead;
    job.operation = run.operation;
    return true;
  }
  // The pool is full of what cannot be dropped. If no transfer will change that, go round it.
  if (!pages_short || ticket.transfers > 0) return false;
  for (Unit& unit : op->entry->units) {
    if (!unit.wanted || unit.where != Where::kAbsent) continue;
    AddUnit(job, unit);
    unit.reading = true;
    ++op->busy;
    job.kind = JobKind::kBouncedRead;
    job.operation = run.operation;
    return true;
  }
  return false;
}

bool Manager::PickCopyIn(Ticket& ticket, Run& run, Job& job) {
  Operation* op = run.operation.get();
  if (op == nullptr || !op->is_offload || !op->armed || !op->status.ok() ||
      op->next == op->entry->units.size()) {
    return false;
  }
  // A step that had to wait goes on when there is room for several entries, not for one: waking it
  // for each small one would cost more than the disk does.
  if (!op->resumed) {
    const std::uint64_t available = ticket.quota_pages - ticket.used_pages + ticket.clean_pages;
    const bool more_to_come = ticket.writing_pages > 0 || WantsWrite(ticket, run);
    if (more_to_come && available < LowWaterPages(ticket) / 2) return false;
  }
  Unit& unit = op->entry->units[op->next];
  if (!TakePages(ticket, PagesFor(unit.bytes), unit.pages, /*evict=*/true)) return false;
  op->resumed = true;
  ++op->next;
  AddUnit(job, unit);
  ++unit.pins;
  ++op->busy;
  job.kind = JobKind::kCopyIn;
  job.operation = run.operation;
  return true;
}

bool Manager::PickWrite(Ticket& ticket, Run& run, Job& job) {
  if (!WantsWrite(ticket, run)) return false;
  std::uint64_t bytes = 0;
  auto next = run.dirty.begin();
  std::vector<Unit*> batch;
  for (; next != run.dirty.end(); ++next) {
    const std::uint64_t unit_bytes = (*next)->pages.size() * kPageBytes;
    if (!batch.empty() && bytes + unit_bytes > options_.chunk_bytes) break;
    batch.push_back(*next);
    bytes += unit_bytes;
  }
  if (ticket.spill_used + bytes > ticket.spill_reserved) {
    // The path was longer than what was reserved for.
    const std::uint64_t missing = ticket.spill_used + bytes - ticket.spill_reserved;
    std::uint64_t growth = std::max(missing, kSpillGrowthBytes);
    Status status = far_->Reserve(growth);
    if (!status.ok() && growth > missing) {
      growth = missing;
      status = far_->Reserve(growth);
    }
    if (!status.ok()) {
      ticket.write_failure = status;
      FailStuck(ticket);
      return false;
    }
    ticket.spill_reserved += growth;
  }
  std::vector<Extent> extents = far_->Allocate(bytes);
  ticket.spill_used += bytes;
  auto extent = extents.begin();
  for (Unit* unit : batch) {
    std::uint64_t left = unit->pages.size() * kPageBytes;
    while (left > 0) {
      const std::uint64_t taken = std::min(left, extent->bytes);
      unit->extents.push_back({extent->offset, taken});
      extent->offset += taken;
      extent->bytes -= taken;
      left -= taken;
      if (extent->bytes == 0) ++extent;
    }
    AddUnit(job, *unit);
    unit->writing = true;
    ticket.writing_pages += unit->pages.size();
    ticket.written_pages += unit->pages.size();
  }
  job.kind = JobKind::kWrite;
  return true;
}

bool Manager::PickReadAhead(Ticket& ticket, Run& run, Job& job) {
  // Before the first reload there is no telling; afterwards the log of pushes is the order.
  if (run.recent == 0 || run.absent.empty()) return false;
  // Where pushes are still mixed in, they keep the room that spares them a wait.
  const bool mixed = (run.recent & 0b11) != 0b11;
  const std::uint64_t kept = mixed ? LowWaterPages(ticket) : 0;
  std::uint64_t batch_bytes = 0;
  while (!run.absent.empty()) {
    Unit* unit = nullptr;
    if (run.forwards) {
      auto next = std::find_if(run.absent.begin(), run.absent.end(),
                               [&](const Unit* u) { return u->entry->token >= run.last_token; });
      unit = next != run.absent.end() ? *next : *run.absent.begin();
    } else {
      Entry probe_entry;
      probe_entry.token = run.last_token;
      Unit probe;
      probe.entry = &probe_entry;
      probe.index = ~std::uint32_t{0};
      auto next = run.absent.upper_bound(&probe);
      unit = next != run.absent.begin() ? *std::prev(next) : *run.absent.rbegin();
    }
    // Skipping it would fetch what is needed later; trying again would go on until its reload.
    if (unit->read_failed) break;
    const std::uint64_t pages = PagesFor(unit->bytes);
    if (ticket.quota_pages - ticket.used_pages < pages + kept) break;
    if (batch_bytes > 0 && batch_bytes + pages * kPageBytes > options_.chunk_bytes) break;
    if (!TakePages(ticket, pages, unit->pages, /*evict=*/false)) break;
    AddUnit(job, *unit);
    unit->reading = true;
    unit->read_ahead = true;
    batch_bytes += pages * kPageBytes;
  }
  if (job.units.empty()) return false;
  job.kind = JobKind::kRead;
  return true;
}

bool Manager::PickJob(Job& job) {
  // What a step waits for comes first, whichever step it is; then in turn.
  struct Choice {
    bool (Manager::*pick)(Ticket&, Run&, Job&);
    bool uses_far_tier;
  };
  constexpr Choice kByUrgency[] = {{&Manager::PickDemandRead, true},
                                   {&Manager::PickCopyIn, false},
                                   {&Manager::PickWrite, true},
                                   {&Manager::PickReadAhead, true}};
  if (tickets_.empty()) return false;
  for (const Choice& choice : kByUrgency) {
    if (choice.uses_far_tier && in_far_tier_ == options_.io_threads) continue;
    auto turn = tickets_.upper_bound(next_turn_);
    for (std::size_t i = 0; i < tickets_.size(); ++i) {
      if (turn == tickets_.end()) turn = tickets_.begin();
      const std::shared_ptr<Ticket>& ticket = turn->second;
      ++turn;
      if (ticket->closing) continue;
      // By index: a pick that fails a stuck operation never changes the list, but be explicit.
      for (std::size_t r = 0; r < ticket->runs.size(); ++r) {
        job = Job();
        job.ticket = ticket;
        job.run = ticket->runs[r];
        if ((this->*choice.pick)(*ticket, *job.run, job)) {
          next_turn_ = ticket->id;
          if (choice.uses_far_tier) ++in_far_tier_;
          return true;
        }
      }
    }
  }
  return false;
}

void Manager::Wake() {
  if (idle_threads_ > 0) work_.notify_one();
}

// Waking a thread that finds nothing to do costs more than the copy of a small entry.
void Manager::WakeFor(const Ticket& ticket, const Run& run) {
  if (idle_threads_ == 0 || far_ == nullptr) return;
  const bool waiting = run.operation != nullptr && run.operation->waited;
  const bool can_read_ahead = run.recent != 0 && !run.absent.empty();
  if (waiting || can_read_ahead || WantsWrite(ticket, run)) work_.notify_one();
}

void Manager::Work() {
  struct AlignedFree {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{kPageBytes}); }
  };
  const std::unique_ptr<std::byte[], AlignedFree> bounce(
      static_cast<std::byte*>(::operator new[](kBounceBytes, std::align_val_t{kPageBytes})));
  std::unique_lock lock(mutex_);
  for (;;) {
    Job job;
    if (PickJob(job)) {
      // There may be more, unless the far tier has all the transfers that it may have: one thread
      // wakes the next.
      if (in_far_tier_ < options_.io_threads) Wake();
      job.bounce = bounce.get();
      ++job.ticket->transfers;
      Execute(job, lock);
      --job.ticket->transfers;
      FailStuck(*job.ticket);
      if (job.ticket->closing) quiet_.notify_all();
      continue;
    }
    if (stopping_) return;
    ++idle_threads_;
    work_.wait(lock);
    --idle_threads_;
  }
}

void Manager::Execute(Job& job, std::unique_lock<std::mutex>& lock) {
  switch (job.kind) {
    case JobKind::kCopyIn:
      return ExecuteCopyIn(job, lock);
    case JobKind::kWrite:
      return ExecuteWrite(job, lock);
    case JobKind::kRead:
      return ExecuteRead(job, lock);
    case JobKind::kBouncedRead:
      return ExecuteBouncedRead(job, lock);
  }
}

void Manager::ExecuteCopyIn(Job& job, std::unique_lock<std::mutex>& lock) {
  Unit& unit = *job.units.front();
  Operation& op = *job.operation;
  lock.unlock();
  CopyIn(unit, op.source + unit.index * op.unit_bytes);
  lock.lock();
  --unit.pins;
  --op.busy;
  --op.remaining;
  unit.in_pool = true;
  SettleUnit(*job.run, unit);
  CompleteIfDone(*job.run);
}

namespace {

// Appends pages, merging neighbours.
void Gather(std::vector<iovec>& memory, std::byte* page, std::size_t bytes) {
  if (!memory.empty()) {
    iovec& last = memory.back();
    if (static_cast<std::byte*>(last.iov_base) + last.iov_len == page) {
      last.iov_len += bytes;
      return;
    }
  }
  memory.push_back({page, bytes});
}

// One transfer per contiguous piece of the file, in the file's order.
struct Piece {
  Extent extent;
  std::vector<std::byte*> pages;
};

std::vector<Segment> MakeSegments(std::vector<Piece> pieces) {
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.extent.offset < b.extent.offset; });
  std::vector<Segment> segments;
  std::uint64_t end = 0;
  for (const Piece& piece : pieces) {
    if (segments.empty() || piece.extent.offset != end) {
      segments.push_back({piece.extent.offset, {}});
    }
    for (std::byte* page : piece.pages) Gather(segments.back().memory, page, kPageBytes);
    end = piece.extent.offset + piece.extent.bytes;
  }
  return segments;
}

}  // namespace

std::vector<Segment> Manager::SegmentsOf(const std::vector<Unit*>& units) {
  std::vector<Piece> pieces;
  for (const Unit* unit : units) {
    auto page = unit->pages.begin();
    for (const Extent& extent : unit->extents) {
      const auto count = static_cast<std::ptrdiff_t>(extent.bytes / kPageBytes);
      pieces.push_back({extent, {page, page + count}});
      page += count;
    }
  }
  return MakeSegments(std::move(pieces));
}

std::uint64_t Manager::ChecksumOf(const Unit& unit) {
  Checksum sum;
  std::size_t left = unit.bytes;
  for (const std::byte* page : unit.pages) {
    const std::size_t bytes = std::min(left, kPageBytes);
    sum.Update(page, bytes);
    left -= bytes;
  }
  return sum.Finish();
}

void Manager::ExecuteWrite(Job& job, std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  if (options_.verify) {
    for (Unit* unit : job.units) unit->checksum = ChecksumOf(*unit);
  }
  const Status status = far_->Write(SegmentsOf(job.units));
  lock.lock();
  --in_far_tier_;
  Ticket& ticket = *job.ticket;
  for (Unit* unit : job.units) {
    ticket.writing_pages -= unit->pages.size();
    unit->writing = false;
    if (status.ok()) {
      unit->in_far = true;
      ticket.stats.bytes_written += unit->pages.size() * kPageBytes;
    } else {
      FreeExtents(ticket, *unit);
    }
    SettleUnit(*job.run, *unit);
  }
  if (!status.ok() && ticket.write_failure.ok()) ticket.write_failure = status;
}

void Manager::ExecuteRead(Job& job, std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  const Status status = far_->Read(SegmentsOf(job.units));
  lock.lock();
  --in_far_tier_;
  // What follows may take a while, and the next transfer need not wait for it.
  if (options_.verify || job.run->operation != nullptr) Wake();
  std::vector<bool> intact(job.units.size(), true);
  if (status.ok() && options_.verify) {
    lock.unlock();
    for (std::size_t i = 0; i < job.units.size(); ++i) {
      intact[i] = ChecksumOf(*job.units[i]) == job.units[i]->checksum;
    }
    lock.lock();
  }
  Run& run = *job.run;
  const bool demanded = job.operation != nullptr;
  const bool all_intact = std::find(intact.begin(), intact.end(), false) == intact.end();
  if (!demanded && !(status.ok() && all_intact)) ++job.ticket->stats.read_ahead_failures;
  for (std::size_t i = 0; i < job.units.size(); ++i) {
    Unit& unit = *job.units[i];
    unit.reading = false;
    unit.read_failed = !status.ok() || !intact[i];
    if (demanded) --job.operation->busy;
    if (!unit.read_failed) {
      unit.in_pool = true;
      job.ticket->stats.bytes_read += unit.pages.size() * kPageBytes;
      if (unit.wanted && !unit.entry->freed) {
        DeliverWanted(job, unit, lock);
      } else {
        SettleUnit(run, unit);
      }
      continue;
    }
    // A failed read-ahead is no error: the reload that needs the bytes tries again and reports.
    ReturnPages(*job.ticket, unit);
    unit.read_ahead = false;
    if (demanded && job.operation->status.ok()) {
      job.operation->status = status.ok() ? ChecksumFailure(unit) : status;
    }
    SettleUnit(run, unit);
  }
  CompleteIfDone(run);
}

Status Manager::ChecksumFailure(const Unit& unit) const {
  return {Code::kChecksum, "entry " + std::to_string(unit.entry->token) + " of site " +
                               std::to_string(unit.entry->site) + ", part " +
                               std::to_string(unit.index) + " (" + std::to_string(unit.bytes) +
                               " bytes): the bytes read back are not the bytes written; the disk "
                               "under the spill directory is not reliable, choose another with "
                               "JDYNOFF_SPILL_DIR"};
}

// Copies a unit that has just arrived to the reload that waits for it.
void Manager::DeliverWanted(Job& job, Unit& unit, std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Operation> op = job.run->operation;
  unit.wanted = false;
  ++unit.pins;
  ++op->busy;
  lock.unlock();
  CopyOut(unit, op->target + unit.index * op->unit_bytes);
  lock.lock();
  --unit.pins;
  --op->busy;
  FinishUnitOfReload(*job.run, *op, unit);
}

void Manager::ExecuteBouncedRead(Job& job, std::unique_lock<std::mutex>& lock) {
  Unit& unit = *job.units.front();
  Operation& op = *job.operation;
  std::byte* target = op.target + unit.index * op.unit_bytes;
  lock.unlock();
  Status status;
  Checksum sum;
  std::size_t done = 0;
  for (const Extent& extent : unit.extents) {
    for (std::uint64_t at = 0; at < extent.bytes && status.ok(); at += kBounceBytes) {
      const std::size_t length = std::min<std::uint64_t>(kBounceBytes, extent.bytes - at);
      const Segment segment{extent.offset + at, {{job.bounce, length}}};
      status = far_->Read({&segment, 1});
      if (!status.ok()) break;
      const std::size_t useful = std::min(length, unit.bytes - done);
      near_->CopyOut(target + done, job.bounce, useful);
      if (options_.verify) sum.Update(job.bounce, useful);
      done += useful;
    }
  }
  if (status.ok() && options_.verify && sum.Finish() != unit.checksum) {
    status = ChecksumFailure(unit);
  }
  lock.lock();
  --in_far_tier_;
  unit.reading = false;
  unit.read_failed = !status.ok();
  unit.wanted = false;
  --op.busy;
  if (status.ok()) {
    job.ticket->stats.bytes_read += PagesFor(unit.bytes) * kPageBytes;
    FinishUnitOfReload(*job.run, op, unit);
  } else {
    if (op.status.ok()) op.status = status;
    SettleUnit(*job.run, unit);
  }
  CompleteIfDone(*job.run);
}

void Manager::FinishUnitOfReload(Run& run, Operation& op, Unit& unit) {
  --op.remaining;
  // Room is made as early as possible: an entry may be larger than the whole pool.
  if (op.last_reader && op.status.ok()) {
    FreeUnit(run, unit);
  } else {
    SettleUnit(run, unit);
  }
}

void Manager::CopyIn(const Unit& unit, const std::byte* source) {
  std::size_t done = 0;
  for (std::byte* page : unit.pages) {
    const std::size_t bytes = std::min(kPageBytes, unit.bytes - done);
    near_->CopyIn(page, source + done, bytes);
    done += bytes;
  }
}

void Manager::CopyOut(const Unit& unit, std::byte* target) {
  std::size_t done = 0;
  for (const std::byte* page : unit.pages) {
    const std::size_t bytes = std::min(kPageBytes, unit.bytes - done);
    near_->CopyOut(target + done, page, bytes);
    done += bytes;
  }
}

// The end of operations.

// With no way to make room, waiting would be for ever.
void Manager::FailStuck(Ticket& ticket) {
  if (ticket.transfers > 0) return;  // its end asks again
  for (std::size_t i = 0; i < ticket.runs.size(); ++i) {
    Run& run = *ticket.runs[i];
    Operation* op = run.operation.get();
    if (op == nullptr || !op->armed || !op->is_offload || !op->status.ok()) continue;
    if (op->next == op->entry->units.size()) continue;
    const std::uint64_t needed = PagesFor(op->entry->units[op->next].bytes);
    const std::uint64_t available = ticket.quota_pages - ticket.used_pages + ticket.clean_pages;
    if (available >= needed) continue;
    const bool can_write = far_ != nullptr && ticket.write_failure.ok();
    if (can_write && needed <= ticket.quota_pages) continue;
    if (!ticket.write_failure.ok()) {
      op->status =
          Status(ticket.write_failure.code(), ticket.write_failure.message() + ". The pool of " +
                                                  std::to_string(ticket.stats.pool_bytes) +
                                                  " bytes is full, so the step cannot go on");
    } else {
      op->status = Status(
          Code::kHostLimit,
          "the pool of " + std::to_string(ticket.stats.pool_bytes) + " bytes holds " +
              std::to_string(ticket.used_pages * kPageBytes) + " and has no room for " +
              std::to_string(op->entry->bytes) + " bytes from site " +
              std::to_string(op->entry->site) +
              (far_ == nullptr ? "; there is no disk tier to move to: raise the budget or add "
                                 "tiers=[jdynoff.Disk(path)]"
                               : "; the pool must hold at least one page: raise the budget"));
    }
    CompleteIfDone(run);
  }
}

void Manager::CompleteIfDone(Run& run) {
  Operation* op = run.operation.get();
  if (op == nullptr || !op->armed || op->busy > 0) return;
  if (op->status.ok() && op->remaining > 0) return;
  FinishOperation(run, *op);
}

void Manager::FinishOperation(Run& run, Operation& op) {
  const std::shared_ptr<Operation> keep = std::move(run.operation);
  run.operation = nullptr;
  Ticket& ticket = *run.ticket;
  const std::int64_t end_ns = NowNs();
  Entry& entry = *op.entry;
  for (Unit& unit : entry.units) unit.wanted = false;
  if (op.waited) {
    (op.is_offload ? ticket.stats.offload_stall_seconds : ticket.stats.reload_stall_seconds) +=
        Seconds(end_ns - op.start_ns);
  }
  if (log_enabled_ && ticket.log.size() < kLogEventsKept) {
    ticket.log.push_back(
        {op.is_offload ? "offload" : "reload", entry.site, entry.bytes, op.start_ns, end_ns});
  }
  if (!op.status.ok()) {
    NoteFailure(ticket, op.status);
  } else if (!op.is_offload) {
    ++ticket.stats.entries_reloaded;
    ticket.stats.bytes_reloaded += entry.bytes;
    if (op.waited) {
      ++ticket.stats.read_ahead_misses;
    } else if (op.used_read_ahead) {
      ++ticket.stats.read_ahead_hits;
    }
    --entry.readers_left;
  }
  // A failed last reload has given up parts of the entry already.
  if (!op.is_offload && op.last_reader) FreeEntry(run, entry.token);
  if (op.armed) {
    SubmitCompletion([done = std::move(op.done), status = op.status] { done(status); });
  }
}

void Manager::NoteFailure(Ticket& ticket, const Status& status) {
  if (ticket.stats.error.empty()) ticket.stats.error = status.ToString();
}

// What can be asked.

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
