// XLA's view of the manager: one FFI handler per operation of a rewritten step.
#pragma once

namespace jdynoff {

struct Handler {
  const char* name;
  void* function;  // XLA_FFI_Handler*
};

inline constexpr int kHandlerCount = 6;

// The custom-call targets, in the order begin, offload, reload, discard, end, after.
const Handler (&Handlers())[kHandlerCount];

}  // namespace jdynoff
