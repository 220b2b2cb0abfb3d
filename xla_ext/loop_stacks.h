// Stacks for loops with a data-dependent trip count: what each trip keeps for the backward pass.
//
// A *stack* belongs to one execution of one loop and is named by a *handle*, which the program
// carries as data from its forward to its backward loop. A trip pushes a *frame*: a fixed list of
// arrays. Small frames are packed into segments; segments and the arrays of large frames are
// entries of a manager's run, one run for each stack, so that they share its pool, its disk, its
// transfers and its errors. Inside a managed step a stack lives on the step's ticket, elsewhere on
// one ticket for each device.
//
// The trap: XLA does not tell when an execution has ended, so a stack whose backward loop never
// runs cannot be seen to be dead. It is therefore droppable: `Claim` says whether the stack is
// still there, and the program computes the forward loop again where it is not. To drop a stack
// too early costs time, never correctness.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "manager.h"

namespace jdynoff {

struct LoopTotals {
  std::uint64_t live_stacks = 0;
  std::uint64_t top_bytes = 0;  // packed frames that are no entries yet
  std::uint64_t opened = 0;
  std::uint64_t frames_pushed = 0;
  std::uint64_t frames_popped = 0;
  std::uint64_t dropped = 0;  // stacks given up without a backward loop
  std::uint64_t missed = 0;   // backward loops that did not find their stack
};

class LoopStacks {
 public:
  // The process's only one.
  static LoopStacks& Get();

  // Where stacks go outside of managed steps, and how much memory they may use on each device.
  void Configure(std::shared_ptr<Manager> manager, std::uint64_t pool_bytes);

  // `sizes`: bytes of each array of a frame.
  Status Open(RunKey run, std::span<const std::int64_t> sizes, std::uint32_t& handle);
  Outcome Push(std::uint32_t handle, std::uint32_t serial,
               std::vector<std::span<const std::byte>> values, Done done);
  // The forward loop has ended. `sealed` is the handle, or 0 if the stack was dropped meanwhile.
  Outcome Seal(std::uint32_t handle, std::uint32_t serial, std::uint32_t& sealed, Done done);
  // Takes the stack for one backward loop. `claimed` is the handle, or 0 if there is no such stack
  // of `trips` frames of these sizes any more.
  void Claim(std::uint32_t handle, std::uint32_t trips, std::span<const std::int64_t> sizes,
             std::uint32_t& claimed);
  // Serials count down. The last pop frees the stack.
  Outcome Pop(std::uint32_t handle, std::uint32_t serial, std::vector<std::span<std::byte>> targets,
              Done done);

  // A managed step's ticket has been closed, and with it all entries of its stacks.
  void TicketClosed(std::uint32_t ticket);

  LoopTotals Totals() const;

 private:
  struct Stack;
  struct Home;
  struct State;
  struct Chain;

  LoopStacks();

  std::shared_ptr<Home> FindHome(RunKey run, Status& status);
  std::shared_ptr<Stack> Take(std::uint32_t handle, const char* operation, bool popping,
                              std::uint32_t serial, Status& status);
  void DropOrphans(Home& home, RunKey run);
  void Drop(const std::shared_ptr<Stack>& stack);
  void Free(Stack& stack);
  Status BeginRun(Stack& stack);
  bool Advance(const std::shared_ptr<Chain>& chain, Status& status);
  void Finish(Chain& chain, const Status& status);
  void FlushTop(Chain& chain);
  Outcome Start(const std::shared_ptr<Chain>& chain, Done done);

  const std::unique_ptr<State> state_;
};

}  // namespace jdynoff
