// The near tier: the memory that the pool lives in, and the copies between it and XLA's buffers.
//
// One implementation per kind of device. The manager reaches pool memory and user buffers only
// through this interface, so that a device whose memory the host cannot address needs a second
// implementation and no change in the manager.
#pragma once

#include <cstddef>
#include <memory>

namespace jdynoff {

// The grain of mappings: a huge page of the host. A smaller part of one cannot be given back.
inline constexpr std::size_t kBlockBytes = std::size_t{2} << 20;

class NearTier {
 public:
  virtual ~NearTier() = default;

  // Maps whole blocks of pool memory, aligned to blocks, or returns null. Without `huge`, pages
  // become resident one by one. Never called on a step's path.
  virtual std::byte* Map(std::size_t bytes, bool huge) = 0;
  virtual void Unmap(std::byte* base, std::size_t bytes) = 0;
  // Gives the memory up and keeps the addresses; what is read there next is undefined. Thread-safe.
  virtual void GiveBack(std::byte* base, std::size_t bytes) = 0;

  virtual void CopyIn(std::byte* page, const std::byte* buffer, std::size_t bytes) = 0;
  virtual void CopyOut(std::byte* buffer, const std::byte* page, std::size_t bytes) = 0;
};

// Host memory: device and pool are the same RAM, and count against the same budget.
std::unique_ptr<NearTier> MakeHostMemory();

}  // namespace jdynoff
