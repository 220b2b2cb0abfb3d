// What the manager keeps of a ticket: its runs, their entries, units, operations and transfers.
//
// For the manager's own files. The trap: all of it is guarded by Manager::mutex_, except what a
// transfer uses without it, which stays as it is because of a mark: `pins`, `writing` or `reading`
// keep a unit's pages and extents, `busy` keeps an operation's buffers, Job::entries keep the
// units themselves.
#pragma once

#include <chrono>

#include "manager.h"

namespace jdynoff {

inline std::int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Where a unit is: the run's set that holds it.
enum class Manager::Where { kNowhere, kDirty, kClean, kAbsent };

struct Manager::Unit {
  Entry* entry = nullptr;
  std::uint32_t index = 0;
  std::size_t bytes = 0;
  std::vector<std::byte*> pages;
  std::vector<Extent> extents;
  std::uint64_t checksum = 0;
  int pins = 0;          // copies between the pool and a buffer of the step in progress
  bool in_pool = false;  // `pages` hold the data
  bool in_far = false;   // `extents` hold the data
  bool writing = false;
  bool reading = false;
  bool wanted = false;       // the run's reload still needs it, and it was not in the pool
  bool read_ahead = false;   // brought back before it was asked for
  bool read_failed = false;  // the last time: only its reload tries again
  Where where = Where::kNowhere;
};

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

// From the oldest entry to the youngest, and within an entry in its order.
struct Manager::UnitOrder {
  bool operator()(const Unit* a, const Unit* b) const {
    if (a->entry->token != b->entry->token) return a->entry->token < b->entry->token;
    return a->index < b->index;
  }
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
  int waiting = 0;    // offloads that wait for room, which any run's writes can make
  bool closing = false;
  Status write_failure;  // sticky: what cannot be written stays in the pool
  std::vector<std::shared_ptr<Run>> runs;
  TicketStats stats;
  std::vector<Event> log;
};

enum class Manager::JobKind { kCopyIn, kWrite, kRead, kBouncedRead };

struct Manager::Job {
  JobKind kind = JobKind::kCopyIn;
  std::shared_ptr<Ticket> ticket;
  std::shared_ptr<Run> run;
  std::shared_ptr<Operation> operation;
  std::vector<std::shared_ptr<Entry>> entries;  // keep the units alive
  std::vector<Unit*> units;
  std::byte* bounce = nullptr;
};

}  // namespace jdynoff
