// Pool memory for XLA:CPU: anonymous mappings.
//
// Pages are not touched here. They become resident when first used and stay so until they are
// given back: a step that needs half of its quota has half of it resident.
#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#include "near_tier.h"

namespace jdynoff {
namespace {

class HostMemory final : public NearTier {
 public:
  std::byte* Map(std::size_t bytes, bool huge) override {
    // The system aligns to its small pages: take one block more and give back what is too much.
    const std::size_t mapped = bytes + kBlockBytes;
    void* start = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    auto* base = static_cast<std::byte*>(start);
    const std::size_t before = -reinterpret_cast<std::uintptr_t>(base) % kBlockBytes;
    if (before > 0) ::munmap(base, before);
    base += before;
    ::munmap(base + bytes, kBlockBytes - before);
    // A forked child never uses the pool. Without this, a fork during a step would make the parent
    // copy each page that it writes next. Best effort: old kernels may refuse.
    (void)::madvise(base, bytes, MADV_DONTFORK);
    // Huge: fewer pages to fault in, to pin and to describe to the disk in each transfer.
    (void)::madvise(base, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return base;
  }

  void Unmap(std::byte* base, std::size_t bytes) override { ::munmap(base, bytes); }

  // Refused for locked memory only, which its owner wants to stay.
  void GiveBack(std::byte* base, std::size_t bytes) override {
    (void)::madvise(base, bytes, MADV_DONTNEED);
  }

  void CopyIn(std::byte* page, const std::byte* buffer, std::size_t bytes) override {
    std::memcpy(page, buffer, bytes);
  }

  void CopyOut(std::byte* buffer, const std::byte* page, std::size_t bytes) override {
    std::memcpy(buffer, page, bytes);
  }
};

}  // namespace

std::unique_ptr<NearTier> MakeHostMemory() { return std::make_unique<HostMemory>(); }

}  // namespace jdynoff
