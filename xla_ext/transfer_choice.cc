// What an I/O thread should do next: a demanded read, a copy into room just made, a write, a
// read-ahead, in this order.
//
// Nothing here transfers. A pick takes pages and file space and marks what the transfer holds, so
// that the next pick, by another thread, finds the rest. The trap: runs must never wait for each
// other, so pages come from the run's own ticket only.
#include <algorithm>
#include <utility>

#include "manager_state.h"

namespace jdynoff {
namespace {

// A burst of this size can be taken without waiting while the disk catches up. More would only
// write what may well have stayed in the pool.
constexpr std::uint64_t kLowWaterBytes = std::uint64_t{64} << 20;
// A reservation that turns out too small grows by this much at a time.
constexpr std::uint64_t kSpillGrowthBytes = std::uint64_t{16} << 20;

}  // namespace

bool Manager::Pushing(const Run& run) const { return (run.recent & 1) == 0; }

std::uint64_t Manager::LowWaterPages(const Ticket& ticket) const {
  return std::min<std::uint64_t>(ticket.quota_pages / 4, kLowWaterBytes / kPageBytes);
}

// Whether the step is expected to need no more than the pool, and has not exceeded that so far.
bool Manager::WillFit(const Ticket& ticket) const {
  return ticket.expected_pages > 0 && ticket.expected_pages <= ticket.quota_pages &&
         ticket.stats.bytes_offloaded <= ticket.expected_pages * kPageBytes;
}

bool Manager::WantsWrite(const Ticket& ticket, const Run& run) const {
  if (run.dirty.empty() || !ticket.write_failure.ok()) return false;
  std::uint64_t wanted = 0;
  const Operation* op = run.operation.get();
  const bool waiting =
      op != nullptr && op->is_offload && op->armed && op->next < op->entry->units.size();
  if (waiting) wanted = PagesFor(op->entry->units[op->next].bytes);
  // Of another run of the ticket, whose own entries may all be written or read already.
  if (ticket.waiting > 0) wanted = std::max<std::uint64_t>(wanted, PagesFor(UnitBytes(ticket)));
  if (Pushing(run) && !WillFit(ticket)) wanted = std::max(wanted, LowWaterPages(ticket));
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

}  // namespace jdynoff
