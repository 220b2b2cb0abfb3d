// The disk tier: one unlinked file, transferred past the page cache.
//
// The file has no name from the moment it exists (O_TMPFILE; where the filesystem has none, a
// fresh name that is unlinked at once), so it cannot survive the process, however that ends.
// O_DIRECT keeps spilled bytes out of the page cache, which would otherwise be the very memory
// that spilling is meant to save; a filesystem that refuses it gets buffered writes that are
// pushed out at once.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include "far_tier.h"
#include "page_arena.h"

namespace jdynoff {
namespace {

std::string Errno(int error) {
  // strerror is not thread-safe; strerrordesc_np returns constant strings.
  const char* text = ::strerrordesc_np(error);
  return std::string(text == nullptr ? "unknown error" : text) + " (errno " +
         std::to_string(error) + ")";
}

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~FileDescriptor() { Close(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void Close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

struct AlignedDelete {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{kPageBytes}); }
};
using AlignedBuffer = std::unique_ptr<std::byte[], AlignedDelete>;

AlignedBuffer MakeAligned(std::size_t bytes) {
  return AlignedBuffer(
      static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{kPageBytes})));
}

// Drops the first `bytes` of an iovec list.
void Advance(std::vector<iovec>& memory, std::size_t bytes) {
  auto it = memory.begin();
  while (it != memory.end() && bytes >= it->iov_len) {
    bytes -= it->iov_len;
    ++it;
  }
  memory.erase(memory.begin(), it);
  if (bytes > 0) {
    memory.front().iov_base = static_cast<std::byte*>(memory.front().iov_base) + bytes;
    memory.front().iov_len -= bytes;
  }
}

std::uint64_t TotalBytes(const std::vector<iovec>& memory) {
  std::uint64_t total = 0;
  for (const iovec& part : memory) total += part.iov_len;
  return total;
}

// Keeps one direction of transfers to a rate: each one's share of time begins when that of the one
// before is over.
class Pace {
 public:
  explicit Pace(std::uint64_t bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  // Called after a transfer; returns when its share of time is over.
  void Wait(std::uint64_t bytes) {
    if (bytes_per_second_ == 0) return;
    const auto share = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
        static_cast<double>(bytes) / static_cast<double>(bytes_per_second_)));
    std::unique_lock lock(mutex_);
    // Time in which nothing was moved is lost, but for that of the transfer itself.
    const Clock::time_point until = over_ = std::max(over_, Clock::now() - share) + share;
    ended_.wait_until(lock, until, [this] { return hurried_; });
  }

  void Hurry() {
    {
      std::lock_guard lock(mutex_);
      hurried_ = true;
    }
    ended_.notify_all();
  }

 private:
  using Clock = std::chrono::steady_clock;

  const std::uint64_t bytes_per_second_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool hurried_ = false;    // guarded by mutex_
  Clock::time_point over_;  // guarded by mutex_
};

std::uint64_t TotalBytes(std::span<const Segment> segments) {
  std::uint64_t total = 0;
  for (const Segment& segment : segments) total += TotalBytes(segment.memory);
  return total;
}

class SpillFile final : public FarTier {
 public:
  SpillFile(FileDescriptor fd, bool direct_io, SpillFileOptions options)
      : fd_(std::move(fd)),
        direct_io_(direct_io),
        options_(std::move(options)),
        writes_(options_.bytes_per_second),
        reads_(options_.bytes_per_second) {}

  Status Reserve(std::uint64_t bytes) override {
    const std::uint64_t wanted = reserved_ + bytes;
    if (wanted > size_) {
      const std::uint64_t rounded = PagesFor(wanted) * kPageBytes;
      if (Status status = GrowFile(rounded); !status.ok()) return status;
      AddFree({size_, rounded - size_});
      size_.store(rounded, std::memory_order_relaxed);
    }
    reserved_ = wanted;
    return {};
  }

  void Unreserve(std::uint64_t bytes) override { reserved_ -= std::min(bytes, reserved_); }

  std::vector<Extent> Allocate(std::uint64_t bytes) override {
    std::vector<Extent> extents;
    // First fit keeps the used part of the file dense and, with it, most transfers in one piece.
    auto fit = std::find_if(free_.begin(), free_.end(),
                            [bytes](const auto& range) { return range.second >= bytes; });
    if (fit == free_.end()) fit = free_.begin();
    while (bytes > 0 && fit != free_.end()) {
      const std::uint64_t taken = std::min(bytes, fit->second);
      extents.push_back({fit->first, taken});
      const std::uint64_t rest_offset = fit->first + taken;
      const std::uint64_t rest_bytes = fit->second - taken;
      fit = free_.erase(fit);
      if (rest_bytes > 0) fit = free_.emplace_hint(fit, rest_offset, rest_bytes);
      bytes -= taken;
    }
    if (bytes > 0) {  // Only when a caller allocates more than it reserved.
      for (const Extent& extent : extents) AddFree(extent);
      extents.clear();
    }
    return extents;
  }

  void Free(const Extent& extent) override { AddFree(extent); }

  Status Write(std::span<const Segment> segments) override {
    const Fault fault = TakeFault(/*write=*/true);
    for (const Segment& segment : segments) {
      if (Status status = Transfer(segment, /*write=*/true, fault); !status.ok()) return status;
    }
    writes_.Wait(TotalBytes(segments));
    return {};
  }

  Status Read(std::span<const Segment> segments) override {
    const Fault fault = TakeFault(/*write=*/false);
    for (const Segment& segment : segments) {
      if (Status status = Transfer(segment, /*write=*/false, fault); !status.ok()) return status;
    }
    reads_.Wait(TotalBytes(segments));
    return {};
  }

  std::uint64_t size_bytes() const override { return size_.load(std::memory_order_relaxed); }
  bool direct_io() const override { return direct_io_; }

  void InjectFault(Fault fault, std::int64_t after, std::int64_t count) override {
    std::lock_guard lock(fault_mutex_);
    fault_ = fault;
    fault_after_ = after;
    fault_count_ = count;
    fault_armed_.store(fault != Fault::kNone, std::memory_order_release);
  }

  void Hurry() override {
    writes_.Hurry();
    reads_.Hurry();
  }

  void AbandonAfterFork() override { fd_.Close(); }

 private:
  Status GrowFile(std::uint64_t bytes) {
    if (options_.limit_bytes > 0 && bytes > options_.limit_bytes) {
      return {Code::kDiskFull,
              "the spill file in '" + options_.directory + "' would have to grow to " +
                  std::to_string(bytes) + " bytes, more than its limit of " +
                  std::to_string(options_.limit_bytes) +
                  " bytes; raise the limit of the disk tier, or the budget so that less is moved"};
    }
    // A hole would pass every check here and fail in the middle of a step.
    int error = 0;
    do {
      error = ::fallocate(fd_.get(), 0, static_cast<off_t>(size_),
                          static_cast<off_t>(bytes - size_)) == 0
                  ? 0
                  : errno;
    } while (error == EINTR);
    if (error == EOPNOTSUPP) error = GrowSparse(bytes);
    if (error == 0) return {};
    // A part may have been allocated before the failure. If giving it back fails as well, the next
    // attempt finds it and uses it.
    (void)!::ftruncate(fd_.get(), static_cast<off_t>(size_));
    struct statvfs info{};
    const bool known = ::fstatvfs(fd_.get(), &info) == 0;
    const std::uint64_t available =
        known ? static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize : 0;
    return {Code::kDiskFull, "cannot reserve " + std::to_string(bytes - size_) +
                                 " more bytes of spill space in '" + options_.directory +
                                 "': " + Errno(error) + "; " + std::to_string(available) +
                                 " bytes are available there. Free some space, or choose another "
                                 "directory with JDYNOFF_SPILL_DIR or tiers=[jdynoff.Disk(path)]"};
  }

  // For filesystems that cannot preallocate: the check is then only as good as the moment.
  int GrowSparse(std::uint64_t bytes) {
    struct statvfs info{};
    if (::fstatvfs(fd_.get(), &info) != 0) return errno;
    if (static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize < bytes - size_) return ENOSPC;
    return ::ftruncate(fd_.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  }

  void AddFree(Extent extent) {
    if (extent.bytes == 0) return;
    auto next = free_.lower_bound(extent.offset);
    if (next != free_.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == extent.offset) {
        extent.offset = previous->first;
        extent.bytes += previous->second;
        free_.erase(previous);
      }
    }
    if (next != free_.end() && extent.offset + extent.bytes == next->first) {
      extent.bytes += next->second;
      free_.erase(next);
    }
    free_.emplace(extent.offset, extent.bytes);
  }

  Status Failure(bool write, const Segment& segment, std::uint64_t done, int error) const {
    const std::string what = std::string(write ? "writing " : "reading ") +
                             std::to_string(TotalBytes(segment.memory)) + " bytes at offset " +
                             std::to_string(segment.offset) + " of the spill file in '" +
                             options_.directory + "'";
    if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
      return {Code::kDiskFull, what + " failed: " + Errno(error) +
                                   "; free some space there, or choose another directory with "
                                   "JDYNOFF_SPILL_DIR or tiers=[jdynoff.Disk(path)]"};
    }
    if (error != 0) {
      return {Code::kIo, what + " failed: " + Errno(error) +
                             "; the disk must return what it was given: check it, or choose "
                             "another directory with JDYNOFF_SPILL_DIR"};
    }
    return {Code::kIo, what + " stopped after " + std::to_string(done) +
                           " bytes; the file must not be truncated while it is in use: choose "
                           "another directory with JDYNOFF_SPILL_DIR"};
  }

  Status Transfer(const Segment& segment, bool write, Fault fault) const {
    if (fault == Fault::kWriteError || fault == Fault::kReadError) {
      return Failure(write, segment, 0, EIO);
    }
    if (fault == Fault::kWriteNoSpace) return Failure(write, segment, 0, ENOSPC);
    if (fault == Fault::kWriteShort || fault == Fault::kReadShort) {
      return Failure(write, segment, TotalBytes(segment.memory) / 2, 0);
    }
    AlignedBuffer damaged;
    std::vector<iovec> memory = segment.memory;
    if (fault == Fault::kCorrupt && !memory.empty()) {
      damaged = MakeAligned(memory.front().iov_len);
      std::memcpy(damaged.get(), memory.front().iov_base, memory.front().iov_len);
      damaged[0] ^= std::byte{0x01};
      memory.front().iov_base = damaged.get();
    }
    std::uint64_t done = 0;
    while (!memory.empty()) {
      const int parts = static_cast<int>(std::min<std::size_t>(memory.size(), IOV_MAX));
      const off_t offset = static_cast<off_t>(segment.offset + done);
      const ssize_t moved = write ? ::pwritev(fd_.get(), memory.data(), parts, offset)
                                  : ::preadv(fd_.get(), memory.data(), parts, offset);
      if (moved < 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        return Failure(write, segment, done, errno);
      }
      if (moved == 0) return Failure(write, segment, done, 0);
      done += static_cast<std::uint64_t>(moved);
      Advance(memory, static_cast<std::size_t>(moved));
    }
    if (!direct_io_) {
      // Start write-back now and drop what is clean: cached spill pages would fill the memory that
      // spilling frees. Advice only, so failures do not matter.
      const auto offset = static_cast<off_t>(segment.offset);
      const auto length = static_cast<off_t>(done);
      if (write) (void)::sync_file_range(fd_.get(), offset, length, SYNC_FILE_RANGE_WRITE);
      (void)::posix_fadvise(fd_.get(), offset, length, POSIX_FADV_DONTNEED);
    }
    return {};
  }

  Fault TakeFault(bool write) {
    if (!fault_armed_.load(std::memory_order_acquire)) return Fault::kNone;
    std::lock_guard lock(fault_mutex_);
    const bool is_read = fault_ == Fault::kReadError || fault_ == Fault::kReadShort;
    if (fault_ == Fault::kNone || is_read == write) return Fault::kNone;
    if (fault_after_ > 0) {
      --fault_after_;
      return Fault::kNone;
    }
    const Fault fault = fault_;
    if (fault_count_ > 0 && --fault_count_ == 0) {
      fault_ = Fault::kNone;
      fault_armed_.store(false, std::memory_order_release);
    }
    return fault;
  }

  FileDescriptor fd_;
  const bool direct_io_;
  const SpillFileOptions options_;
  Pace writes_;
  Pace reads_;

  // Guarded by the manager's mutex; size_ is atomic because statistics read it without.
  std::atomic<std::uint64_t> size_{0};
  std::uint64_t reserved_ = 0;
  std::map<std::uint64_t, std::uint64_t> free_;  // offset -> bytes, neighbours merged

  std::mutex fault_mutex_;  // guards the three below
  Fault fault_ = Fault::kNone;
  std::int64_t fault_after_ = 0;
  std::int64_t fault_count_ = 0;
  std::atomic<bool> fault_armed_{false};
};

FileDescriptor CreateUnlinked(const std::string& directory, int& error) {
  // O_DIRECT is added afterwards, by fcntl: a filesystem without it would refuse the whole call.
  int fd = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT)) {
    // mkostemp creates with O_EXCL: it neither follows a symlink nor opens what exists.
    std::string name = directory + "/jdynoff-spill-XXXXXX";
    fd = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd >= 0) ::unlink(name.c_str());
  }
  error = fd < 0 ? errno : 0;
  return FileDescriptor(fd);
}

// Some filesystems accept the flag and refuse the transfer: only a write tells.
bool EnableDirectIo(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_DIRECT) != 0) return false;
  AlignedBuffer page = MakeAligned(kPageBytes);
  std::memset(page.get(), 0, kPageBytes);
  const bool works = ::pwrite(fd, page.get(), kPageBytes, 0) == static_cast<ssize_t>(kPageBytes);
  if (!works) (void)::fcntl(fd, F_SETFL, flags);
  (void)!::ftruncate(fd, 0);
  return works;
}

}  // namespace

std::unique_ptr<FarTier> OpenSpillFile(const SpillFileOptions& options, Status& status) {
  int error = 0;
  FileDescriptor fd = CreateUnlinked(options.directory, error);
  if (!fd.valid()) {
    status = Status(Code::kConfiguration,
                    "cannot create a spill file in '" + options.directory + "': " + Errno(error) +
                        ". The directory must exist and be writable: create it, or choose another "
                        "with JDYNOFF_SPILL_DIR or tiers=[jdynoff.Disk(path)]");
    return nullptr;
  }
  const bool direct_io = options.direct_io && EnableDirectIo(fd.get());
  status = Status();
  return std::make_unique<SpillFile>(std::move(fd), direct_io, options);
}

}  // namespace jdynoff
