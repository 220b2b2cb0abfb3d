// XLA's view of the manager: one FFI handler per operation of a rewritten step.
#pragma once

namespace jdynoff {

struct Handler {
  const char* name;
  void* function;  // XLA_FFI_Handler*
};

inline constexpr int kHandlerCount = 11;

// The custom-call targets: begin, offload, reload, discard, end, after, and those of loops' stacks.
const Handler (&Handlers())[kHandlerCount];

}  // namespace jdynoff
