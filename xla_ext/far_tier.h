// The far tier: where entries go that the pool has no room for.
//
// Space is reserved before a step is dispatched (Reserve) and handed out during it (Allocate);
// both are called under the manager's mutex. Write and Read are called by several I/O threads at
// once, without that mutex.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "status.h"

namespace jdynoff {

struct Extent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// One contiguous transfer: `memory` gathers pages whose sizes add up to the length.
struct Segment {
  std::uint64_t offset = 0;
  std::vector<iovec> memory;
};

enum class Fault {
  kNone,
  kWriteError,    // EIO
  kWriteNoSpace,  // ENOSPC
  kWriteShort,    // the write stops early and makes no further progress
  kReadError,     // EIO
  kReadShort,     // the read ends early, as at the end of a truncated file
  kCorrupt,       // one byte changes on its way to the disk
};

class FarTier {
 public:
  virtual ~FarTier() = default;

  // Sets aside `bytes` more, growing the file where needed. All or nothing.
  virtual Status Reserve(std::uint64_t bytes) = 0;
  virtual void Unreserve(std::uint64_t bytes) = 0;

  // Finds room for `bytes` (a multiple of the page size) within what is reserved. Several extents
  // where the free space is fragmented; it never fails while reservations are respected.
  virtual std::vector<Extent> Allocate(std::uint64_t bytes) = 0;
  virtual void Free(const Extent& extent) = 0;

  virtual Status Write(std::span<const Segment> segments) = 0;
  virtual Status Read(std::span<const Segment> segments) = 0;

  virtual std::uint64_t size_bytes() const = 0;
  virtual bool direct_io() const = 0;

  // Makes the next operations of that kind fail: `after` of them pass first, then `count` fail.
  virtual void InjectFault(Fault fault, std::int64_t after, std::int64_t count) = 0;

  // Lets nobody wait any more for the time that a transfer should take; for the end.
  virtual void Hurry() = 0;

  // Gives the descriptor up without touching anything shared; for the child of a fork.
  virtual void AbandonAfterFork() = 0;
};

struct SpillFileOptions {
  std::string directory;
  bool direct_io = true;
  std::uint64_t limit_bytes = 0;  // 0: no limit but the filesystem's
  // Written at most, and read at most, by all threads together; 0: as fast as the disk is.
  std::uint64_t bytes_per_second = 0;
};

// Creates the spill file, unlinked from the start. On failure returns null and sets `status`.
std::unique_ptr<FarTier> OpenSpillFile(const SpillFileOptions& options, Status& status);

}  // namespace jdynoff
