// The I/O threads, and the transfers that they carry out.
//
// The mutex is released around each copy, read and write. The trap: afterwards nothing that was
// known before holds but what the transfer's own marks protect: an entry may have been freed, a
// reload may have come to wait for a unit, the ticket may be closing.
#include <algorithm>
#include <new>
#include <utility>

#include "checksum.h"
#include "manager_state.h"

namespace jdynoff {
namespace {

// Each I/O thread's own buffer, for reloads that find the pool full of what cannot be dropped.
constexpr std::size_t kBounceBytes = 4 * kPageBytes;

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

void Manager::NoteTransfer(const Job& job, const char* operation, std::int64_t start_ns) {
  std::uint64_t pages = 0;
  for (const Unit* unit : job.units) pages += PagesFor(unit->bytes);
  Note(*job.ticket, operation, job.units.front()->entry->site, pages * kPageBytes, start_ns);
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
  const std::int64_t start_ns = NowNs();
  const Status status = far_->Write(SegmentsOf(job.units));
  lock.lock();
  --in_far_tier_;
  Ticket& ticket = *job.ticket;
  if (status.ok()) NoteTransfer(job, "write", start_ns);
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
  const std::int64_t start_ns = NowNs();
  const Status status = far_->Read(SegmentsOf(job.units));
  lock.lock();
  --in_far_tier_;
  if (status.ok()) NoteTransfer(job, "read", start_ns);
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
  const std::int64_t start_ns = NowNs();
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
    NoteTransfer(job, "read", start_ns);
    FinishUnitOfReload(*job.run, op, unit);
  } else {
    if (op.status.ok()) op.status = status;
    SettleUnit(*job.run, unit);
  }
  CompleteIfDone(*job.run);
}

}  // namespace jdynoff
