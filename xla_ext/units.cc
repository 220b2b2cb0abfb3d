// Where the bytes of an entry are: its units, their pages in the pool and extents in the far tier.
//
// A unit that no transfer holds is in one of its run's three sets: dirty (in the pool only), clean
// (in both, so that its pages can be had at once) or absent (in the far tier only). The trap: a
// unit that a transfer holds can be neither freed nor moved. Whoever ends the transfer calls
// SettleUnit, which does what had to wait.
#include <algorithm>

#include "manager_state.h"

namespace jdynoff {

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

}  // namespace jdynoff
