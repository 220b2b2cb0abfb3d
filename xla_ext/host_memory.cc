// Pool memory for XLA:CPU: anonymous mappings.
//
// Pages are not touched here. They become resident when first used and stay so, and the arena's
// free list is last-in first-out: a step that needs half of its quota keeps half of it resident.
#include <sys/mman.h>

#include <cstring>

#include "near_tier.h"

namespace jdynoff {
namespace {

class HostMemory final : public NearTier {
 public:
  std::byte* Map(std::size_t bytes) override {
    void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    // A forked child never uses the pool. Without this, a fork during a step would make the parent
    // copy each page that it writes next. Best effort: old kernels may refuse.
    (void)::madvise(base, bytes, MADV_DONTFORK);
    // Fewer pages to fault in, to pin and to describe to the disk in each transfer.
    (void)::madvise(base, bytes, MADV_HUGEPAGE);
    return static_cast<std::byte*>(base);
  }

  void Unmap(std::byte* base, std::size_t bytes) override { ::munmap(base, bytes); }

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
