// Threads that tell XLA that an operation has finished.
//
// XLA may go on with the step on the thread that completes a future, for as long as it likes, and
// may call user callbacks there. An I/O thread that did this would stop the transfers that the
// step waits for next, so completions have their own threads: one more whenever all are busy,
// which bounds their number by the operations in flight.
#pragma once

#include <functional>

namespace jdynoff {

// Runs `completion` soon, on a thread that may be kept for as long as it takes. The threads are
// never joined: at exit, a step that hangs in a user callback must not hang the process.
void SubmitCompletion(std::function<void()> completion);

}  // namespace jdynoff
