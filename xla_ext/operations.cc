// What a step asks for: begin, offload, reload, discard, end; and how what is pending ends.
//
// An operation does at once what it can, on the step's own thread. What it would have to wait for
// is left to the I/O threads (transfers.cc). The trap: whoever changes what a pending operation
// waits for, or its status, calls CompleteIfDone afterwards, or the step hangs.
#include <algorithm>
#include <utility>

#include "completion_pool.h"
#include "manager_state.h"

namespace jdynoff {
namespace {

constexpr std::size_t kLogEventsKept = 200'000;
// Reads and writes alternate in some programs; the last few operations tell which phase it is.
constexpr std::uint32_t kRecentMask = 0xff;

double Seconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

}  // namespace

Status Manager::Begin(std::uint32_t id, RunKey key, std::optional<std::uint64_t> expected_pages) {
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
  if (expected_pages) found->second->expected_pages = *expected_pages;
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
  ++ticket.waiting;
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
    Note(ticket, "discard", site, found->second->bytes, start_ns);
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

void Manager::FinishUnitOfReload(Run& run, Operation& op, Unit& unit) {
  --op.remaining;
  // Room is made as early as possible: an entry may be larger than the whole pool.
  if (op.last_reader && op.status.ok()) {
    FreeUnit(run, unit);
  } else {
    SettleUnit(run, unit);
  }
}

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

void Manager::Note(Ticket& ticket, const char* operation, std::int64_t site, std::uint64_t bytes,
                   std::int64_t start_ns) {
  if (!log_enabled_ || ticket.log.size() >= kLogEventsKept) return;
  ticket.log.push_back({operation, site, bytes, start_ns, NowNs()});
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
  Note(ticket, op.is_offload ? "offload" : "reload", entry.site, entry.bytes, op.start_ns);
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
  if (op.armed && op.is_offload) --ticket.waiting;
  if (op.armed) {
    SubmitCompletion([done = std::move(op.done), status = op.status] { done(status); });
  }
}

void Manager::NoteFailure(Ticket& ticket, const Status& status) {
  if (ticket.stats.error.empty()) ticket.stats.error = status.ToString();
}

}  // namespace jdynoff
