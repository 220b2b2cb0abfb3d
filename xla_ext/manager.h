// The buffer manager: takes tensors away from a running step and brings them back.
//
// Plain C++: it knows nothing of Python, XLA or programs. A *ticket* is the permission for one
// step to use so much pool memory and spill space; a *run* is one execution of it on one device;
// an *entry* is one tensor taken away, named by its token. Entries are split into *units*, the
// grain of transfers. A unit is in the pool, in the far tier, or both ("clean": droppable at
// once).
//
// The trap: nothing here may wait for another run. An operation that cannot finish at once
// returns "pending" and is finished by the I/O threads, which need only the ticket's own writes
// to make room. Each run has at most one operation in flight, because its serial makes them a
// chain.
#pragma once

#include <compare>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "far_tier.h"
#include "near_tier.h"
#include "page_arena.h"
#include "status.h"

namespace jdynoff {

struct RunKey {
  std::int64_t run_id = 0;
  std::int32_t device = 0;
  auto operator<=>(const RunKey&) const = default;
};

struct ManagerOptions {
  std::optional<SpillFileOptions> spill;  // none: memory only
  std::size_t chunk_bytes = std::size_t{1} << 20;
  int io_threads = 4;  // transfers in the far tier at once
  bool verify = false;
};

struct TicketStats {
  std::string state = "open";  // open, running, ended, closed
  std::uint64_t pool_bytes = 0;
  std::uint64_t bytes_offloaded = 0;
  std::uint64_t bytes_reloaded = 0;
  std::uint64_t bytes_written = 0;  // to the far tier, whole pages
  std::uint64_t bytes_read = 0;     // from the far tier, whole pages
  std::uint64_t entries_offloaded = 0;
  std::uint64_t entries_reloaded = 0;
  std::uint64_t entries_discarded = 0;
  std::uint64_t entries_unread = 0;
  std::uint64_t pool_peak_bytes = 0;
  std::uint64_t read_ahead_hits = 0;      // reloads whose bytes came from the far tier in time
  std::uint64_t read_ahead_misses = 0;    // reloads that had to wait for the far tier
  std::uint64_t read_ahead_failures = 0;  // transfers; the reload tries again
  double offload_stall_seconds = 0;       // waiting for room, as the step sees it
  double reload_stall_seconds = 0;        // waiting for bytes, as the step sees it
  std::map<std::int64_t, std::uint64_t> site_counts;
  std::string error;  // the first failure, with its code; empty if none
};

// "offload", "reload" and "discard" are the step's operations, from their call to their end;
// "write" and "read" one transfer of an I/O thread, whole pages, named after its first entry.
struct Event {
  const char* operation = "";
  std::int64_t site = 0;
  std::uint64_t bytes = 0;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
};

struct ManagerTotals {
  std::uint64_t live_entries = 0;
  std::uint64_t live_bytes = 0;
  std::uint64_t arena_bytes = 0;  // resident pool memory, in use or kept for the next steps
  std::uint64_t spill_file_bytes = 0;
  std::uint64_t open_tickets = 0;
};

// Called with the result, on a completion thread, if and only if the operation was pending.
using Done = std::function<void(const Status&)>;

struct Outcome {
  Status status;
  bool pending = false;
};

class Manager {
 public:
  // Returns null and sets `status` when the spill directory cannot be used.
  static std::shared_ptr<Manager> Create(const ManagerOptions& options, Status& status);

  ~Manager();
  Manager(const Manager&) = delete;
  Manager& operator=(const Manager&) = delete;

  // Reserves all or nothing. `expected_bytes`, if not zero, is what the step will probably
  // offload: what cannot stay in the pool is then written from the start on, not only when the
  // pool runs low.
  Status Open(std::uint32_t ticket, std::uint64_t pool_bytes, std::uint64_t spill_bytes,
              std::uint64_t expected_bytes);
  // Fails what the ticket's runs wait for, waits for its own transfers, frees all. Idempotent.
  void Close(std::uint32_t ticket);

  // `expected_pages`: what this run will probably offload, if that is better known by now than
  // when the ticket was opened.
  Status Begin(std::uint32_t ticket, RunKey key,
               std::optional<std::uint64_t> expected_pages = std::nullopt);
  Outcome Offload(RunKey key, std::span<const std::byte> source, std::uint32_t serial,
                  std::int64_t site, std::int32_t dtype, std::int32_t readers, std::uint32_t& token,
                  Done done);
  Outcome Reload(RunKey key, std::uint32_t token, std::span<std::byte> target, std::uint32_t serial,
                 std::int64_t site, std::int32_t dtype, std::uint32_t& next_serial, Done done);
  Status Discard(RunKey key, std::uint32_t token, std::uint32_t serial, std::int64_t site,
                 std::uint32_t& next_serial);
  Status End(RunKey key, std::uint32_t serial, std::uint32_t& ticket);

  std::optional<TicketStats> Stats(std::uint32_t ticket) const;
  std::vector<Event> Log(std::uint32_t ticket) const;
  void EnableLog(bool enabled);
  ManagerTotals Totals() const;
  bool direct_io() const { return far_ != nullptr && far_->direct_io(); }
  bool has_far_tier() const { return far_ != nullptr; }
  void InjectFault(Fault fault, std::int64_t after, std::int64_t count);

  // Fails every pending operation, closes every ticket and stops the I/O threads.
  void Shutdown();

  // Closes the descriptor that a forked child has inherited; nothing else works there.
  void AbandonAfterFork();

 private:
  struct Entry;
  struct Run;
  struct Ticket;
  struct Operation;
  struct Job;
  struct Unit;
  struct UnitOrder;
  enum class Where;
  enum class JobKind;
  using UnitSet = std::set<Unit*, UnitOrder>;

  Manager(const ManagerOptions& options, std::unique_ptr<FarTier> far);
  void StartThreads();

  // All below need mutex_, unless they say otherwise; those that take its lock release it in
  // between.
  void GiveBackExcess(std::unique_lock<std::mutex>& lock);

  // operations.cc
  std::shared_ptr<Run> FindRun(RunKey key, const char* operation, std::uint32_t serial,
                               Status& status);
  std::size_t UnitBytes(const Ticket& ticket) const;
  void FinishUnitOfReload(Run& run, Operation& op, Unit& unit);
  void FailStuck(Ticket& ticket);
  void CompleteIfDone(Run& run);
  void FinishOperation(Run& run, Operation& op);
  void NoteFailure(Ticket& ticket, const Status& status);
  void Note(Ticket& ticket, const char* operation, std::int64_t site, std::uint64_t bytes,
            std::int64_t start_ns);

  // units.cc
  bool TakePages(Ticket& ticket, std::size_t count, std::vector<std::byte*>& pages, bool evict);
  bool EvictOne(Ticket& ticket);
  void ReturnPages(Ticket& ticket, Unit& unit);
  void FreeExtents(Ticket& ticket, Unit& unit);
  void Place(Run& run, Unit& unit);
  void Displace(Run& run, Unit& unit);
  void FreeUnit(Run& run, Unit& unit);
  void FreeEntry(Run& run, std::uint32_t token);
  void SettleUnit(Run& run, Unit& unit);
  // Without the mutex: a pin or a transfer's mark keeps the unit as it is.
  void CopyIn(const Unit& unit, const std::byte* source);
  void CopyOut(const Unit& unit, std::byte* target);

  // transfer_choice.cc
  bool Pushing(const Run& run) const;
  std::uint64_t LowWaterPages(const Ticket& ticket) const;
  bool WillFit(const Ticket& ticket) const;
  bool WantsWrite(const Ticket& ticket, const Run& run) const;
  bool PickJob(Job& job);
  bool PickCopyIn(Ticket& ticket, Run& run, Job& job);
  bool PickDemandRead(Ticket& ticket, Run& run, Job& job);
  bool PickWrite(Ticket& ticket, Run& run, Job& job);
  bool PickReadAhead(Ticket& ticket, Run& run, Job& job);
  void AddUnit(Job& job, Unit& unit);

  // transfers.cc
  void Work();  // an I/O thread; takes the mutex itself
  void Wake();
  void WakeFor(const Ticket& ticket, const Run& run);
  void Execute(Job& job, std::unique_lock<std::mutex>& lock);
  void NoteTransfer(const Job& job, const char* operation, std::int64_t start_ns);
  void ExecuteCopyIn(Job& job, std::unique_lock<std::mutex>& lock);
  void ExecuteWrite(Job& job, std::unique_lock<std::mutex>& lock);
  void ExecuteRead(Job& job, std::unique_lock<std::mutex>& lock);
  void ExecuteBouncedRead(Job& job, std::unique_lock<std::mutex>& lock);
  void DeliverWanted(Job& job, Unit& unit, std::unique_lock<std::mutex>& lock);
  Status ChecksumFailure(const Unit& unit) const;
  // Without the mutex, as above.
  static std::vector<Segment> SegmentsOf(const std::vector<Unit*>& units);
  static std::uint64_t ChecksumOf(const Unit& unit);

  const ManagerOptions options_;
  const std::unique_ptr<NearTier> near_;
  const std::unique_ptr<FarTier> far_;  // null: memory only

  mutable std::mutex mutex_;       // guards everything below, and far_'s space accounting
  std::condition_variable work_;   // there may be a job
  std::condition_variable quiet_;  // a ticket's transfers may have ended
  PageArena arena_;
  std::map<std::uint32_t, std::shared_ptr<Ticket>> tickets_;
  std::map<RunKey, std::shared_ptr<Run>> runs_;
  std::uint32_t next_turn_ = 0;  // round robin over tickets
  std::deque<std::pair<std::uint32_t, TicketStats>> closed_;
  std::deque<std::pair<std::uint32_t, std::vector<Event>>> closed_logs_;
  std::uint64_t live_entries_ = 0;
  std::uint64_t live_bytes_ = 0;
  int idle_threads_ = 0;
  int in_far_tier_ = 0;  // threads that read or write, at most options_.io_threads
  bool log_enabled_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace jdynoff
