// Every operation takes and returns a u32 serial: the step's dataflow makes XLA run them in that
// order, and the manager refuses any other. Offload and reload return a future, so that a wait
// for the disk never holds one of XLA's threads; buffers stay valid until it completes.
#include "handlers.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "loop_stacks.h"
#include "manager.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace jdynoff {
namespace {

namespace ffi = xla::ffi;

using Scalar = ffi::BufferR0<ffi::U32>;

ffi::Error ToError(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  switch (status.code()) {
    case Code::kDiskFull:
    case Code::kHostLimit:
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, status.ToString());
    case Code::kChecksum:
      return ffi::Error(ffi::ErrorCode::kDataLoss, status.ToString());
    default:
      return ffi::Error(ffi::ErrorCode::kInternal, status.ToString());
  }
}

void Complete(ffi::Promise& promise, const Status& status) {
  if (status.ok()) {
    promise.SetAvailable();
  } else {
    promise.SetError(ToError(status));
  }
}

// XLA may pack several of these into a byte, and does not tell a handler whether it did: the size
// of such a buffer is unknown here.
bool IsSubByte(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::S1:
    case ffi::DataType::S2:
    case ffi::DataType::S4:
    case ffi::DataType::U1:
    case ffi::DataType::U2:
    case ffi::DataType::U4:
    case ffi::DataType::F4E2M1FN:
      return true;
    default:
      return false;
  }
}

Status CheckMovable(const ffi::AnyBuffer& buffer) {
  if (!IsSubByte(buffer.element_type())) return {};
  return {Code::kConfiguration, "values of fewer than eight bits cannot be moved (XLA's dtype " +
                                    std::to_string(static_cast<int>(buffer.element_type())) +
                                    "); leave them to XLA, or store them as int8"};
}

// The manager of a run, or an error that says why there is none.
std::shared_ptr<Manager> FindManager(RunKey key, Status& status) {
  if (InForkedChild()) {
    status = ForkedChildStatus();
    return nullptr;
  }
  std::shared_ptr<Manager> manager = ManagerOfRun(key);
  status = manager != nullptr
               ? Status()
               : Status(Code::kToken, "run " + std::to_string(key.run_id) + " on device " +
                                          std::to_string(key.device) +
                                          " is not open: it never began, or its ticket was closed "
                                          "while the step was running");
  return manager;
}

// In the place of a number of pages: as the ticket was opened.
constexpr std::uint32_t kAsOpened = 0xffffffff;

ffi::Error Begin(ffi::RunId run, std::int32_t device, Scalar ticket, Scalar expected_pages,
                 ffi::Result<Scalar> serial) {
  if (InForkedChild()) return ToError(ForkedChildStatus());
  *serial->typed_data() = 0;
  std::optional<std::uint64_t> expected;
  if (*expected_pages.typed_data() != kAsOpened) expected = *expected_pages.typed_data();
  return ToError(BeginRun(*ticket.typed_data(), {run.run_id, device}, expected));
}

ffi::Future Offload(ffi::RunId run, std::int32_t device, ffi::AnyBuffer source, Scalar serial,
                    ffi::Result<Scalar> token, std::int64_t site, std::int32_t readers) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const RunKey key{run.run_id, device};
  Status status = CheckMovable(source);
  if (const auto manager = status.ok() ? FindManager(key, status) : nullptr) {
    const Outcome outcome = manager->Offload(
        key, {static_cast<const std::byte*>(source.untyped_data()), source.size_bytes()},
        *serial.typed_data(), site, static_cast<std::int32_t>(source.element_type()), readers,
        *token->typed_data(),
        [promise](const Status& result) mutable { Complete(promise, result); });
    if (outcome.pending) return future;
    status = outcome.status;
  }
  Complete(promise, status);
  return future;
}

ffi::Future Reload(ffi::RunId run, std::int32_t device, Scalar token, Scalar serial,
                   ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> target,
                   ffi::Result<Scalar> next_serial, std::int64_t site) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const RunKey key{run.run_id, device};
  Status status = CheckMovable(*target);
  if (const auto manager = status.ok() ? FindManager(key, status) : nullptr) {
    const Outcome outcome = manager->Reload(
        key, *token.typed_data(),
        {static_cast<std::byte*>(target->untyped_data()), target->size_bytes()},
        *serial.typed_data(), site, static_cast<std::int32_t>(target->element_type()),
        *next_serial->typed_data(),
        [promise](const Status& result) mutable { Complete(promise, result); });
    if (outcome.pending) return future;
    status = outcome.status;
  }
  Complete(promise, status);
  return future;
}

ffi::Error Discard(ffi::RunId run, std::int32_t device, Scalar token, Scalar serial,
                   ffi::Result<Scalar> next_serial, std::int64_t site) {
  const RunKey key{run.run_id, device};
  Status status;
  if (const auto manager = FindManager(key, status)) {
    status = manager->Discard(key, *token.typed_data(), *serial.typed_data(), site,
                              *next_serial->typed_data());
  }
  return ToError(status);
}

ffi::Error End(ffi::RunId run, std::int32_t device, Scalar serial, ffi::Result<Scalar> sentinel) {
  const RunKey key{run.run_id, device};
  Status status;
  if (const auto manager = FindManager(key, status)) {
    status = manager->End(key, *serial.typed_data(), *sentinel->typed_data());
    if (status.ok()) ForgetRun(key);
  }
  return ToError(status);
}

// Returns its first argument, whose buffer it shares; the others only order the program.
ffi::Error After(ffi::AnyBuffer, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer>) {
  return ffi::Error::Success();
}

// The stacks of loops. Their calls are ordered by the loop's own dataflow.

using Sizes = ffi::Span<const std::int64_t>;

std::span<const std::int64_t> AsSpan(Sizes sizes) { return {sizes.begin(), sizes.size()}; }

// Starts an operation that tells its end by calling what it is given.
template <typename Start>
ffi::Future Run(Start start) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const Outcome outcome =
      start([promise](const Status& result) mutable { Complete(promise, result); });
  if (!outcome.pending) Complete(promise, outcome.status);
  return future;
}

Status Unreadable(const ffi::Error& error) {
  return {Code::kInternal, "XLA passed a buffer that cannot be read: " + error.message()};
}

ffi::Error StackOpen(ffi::RunId run, std::int32_t device, Scalar, ffi::Result<Scalar> handle,
                     Sizes sizes) {
  if (InForkedChild()) return ToError(ForkedChildStatus());
  return ToError(
      LoopStacks::Get().Open({run.run_id, device}, AsSpan(sizes), *handle->typed_data()));
}

ffi::Future StackPush(Scalar handle, Scalar serial, ffi::RemainingArgs arguments,
                      ffi::Result<Scalar> next_serial) {
  return Run([&](Done done) -> Outcome {
    std::vector<std::span<const std::byte>> values;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      auto value = arguments.get<ffi::AnyBuffer>(i);
      if (!value.has_value()) return {Unreadable(value.error())};
      values.emplace_back(static_cast<const std::byte*>(value->untyped_data()),
                          value->size_bytes());
    }
    *next_serial->typed_data() = *serial.typed_data() + 1;
    return LoopStacks::Get().Push(*handle.typed_data(), *serial.typed_data(), std::move(values),
                                  std::move(done));
  });
}

ffi::Future StackSeal(Scalar handle, Scalar serial, ffi::Result<Scalar> sealed) {
  return Run([&](Done done) {
    return LoopStacks::Get().Seal(*handle.typed_data(), *serial.typed_data(), *sealed->typed_data(),
                                  std::move(done));
  });
}

ffi::Error StackClaim(Scalar handle, Scalar trips, ffi::RemainingArgs, ffi::Result<Scalar> claimed,
                      Sizes sizes) {
  if (InForkedChild()) return ToError(ForkedChildStatus());
  LoopStacks::Get().Claim(*handle.typed_data(), *trips.typed_data(), AsSpan(sizes),
                          *claimed->typed_data());
  return ffi::Error::Success();
}

ffi::Future StackPop(Scalar handle, Scalar serial, ffi::RemainingArgs,
                     ffi::Result<Scalar> next_serial, ffi::RemainingRets results) {
  return Run([&](Done done) -> Outcome {
    std::vector<std::span<std::byte>> targets;
    for (std::size_t i = 0; i < results.size(); ++i) {
      auto target = results.get<ffi::AnyBuffer>(i);
      if (!target.has_value()) return {Unreadable(target.error())};
      ffi::AnyBuffer& buffer = **target;
      targets.emplace_back(static_cast<std::byte*>(buffer.untyped_data()), buffer.size_bytes());
    }
    *next_serial->typed_data() = *serial.typed_data() - 1;
    return LoopStacks::Get().Pop(*handle.typed_data(), *serial.typed_data(), std::move(targets),
                                 std::move(done));
  });
}

XLA_FFI_DEFINE_HANDLER(kStackOpen, StackOpen,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<Scalar>()
                           .Ret<Scalar>()
                           .Attr<Sizes>("sizes"));

XLA_FFI_DEFINE_HANDLER(kStackPush, StackPush,
                       ffi::Ffi::Bind().Arg<Scalar>().Arg<Scalar>().RemainingArgs().Ret<Scalar>());

XLA_FFI_DEFINE_HANDLER(kStackSeal, StackSeal,
                       ffi::Ffi::Bind().Arg<Scalar>().Arg<Scalar>().Ret<Scalar>());

XLA_FFI_DEFINE_HANDLER(
    kStackClaim, StackClaim,
    ffi::Ffi::Bind().Arg<Scalar>().Arg<Scalar>().RemainingArgs().Ret<Scalar>().Attr<Sizes>(
        "sizes"));

XLA_FFI_DEFINE_HANDLER(
    kStackPop, StackPop,
    ffi::Ffi::Bind().Arg<Scalar>().Arg<Scalar>().RemainingArgs().Ret<Scalar>().RemainingRets());

XLA_FFI_DEFINE_HANDLER(kBegin, Begin,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<Scalar>()
                           .Arg<Scalar>()
                           .Ret<Scalar>());

XLA_FFI_DEFINE_HANDLER(kOffload, Offload,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<Scalar>()
                           .Ret<Scalar>()
                           .Attr<std::int64_t>("site")
                           .Attr<std::int32_t>("readers"));

XLA_FFI_DEFINE_HANDLER(kReload, Reload,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<Scalar>()
                           .Arg<Scalar>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<Scalar>()
                           .Attr<std::int64_t>("site"));

XLA_FFI_DEFINE_HANDLER(kDiscard, Discard,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<Scalar>()
                           .Arg<Scalar>()
                           .Ret<Scalar>()
                           .Attr<std::int64_t>("site"));

XLA_FFI_DEFINE_HANDLER(
    kEnd, End,
    ffi::Ffi::Bind().Ctx<ffi::RunId>().Ctx<ffi::DeviceOrdinal>().Arg<Scalar>().Ret<Scalar>());

XLA_FFI_DEFINE_HANDLER(
    kAfter, After, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>());

}  // namespace

const Handler (&Handlers()) [kHandlerCount] {
  static const Handler handlers[kHandlerCount] = {
      {"jdynoff_begin", reinterpret_cast<void*>(kBegin)},
      {"jdynoff_offload", reinterpret_cast<void*>(kOffload)},
      {"jdynoff_reload", reinterpret_cast<void*>(kReload)},
      {"jdynoff_discard", reinterpret_cast<void*>(kDiscard)},
      {"jdynoff_end", reinterpret_cast<void*>(kEnd)},
      {"jdynoff_after", reinterpret_cast<void*>(kAfter)},
      {"jdynoff_stack_open", reinterpret_cast<void*>(kStackOpen)},
      {"jdynoff_stack_push", reinterpret_cast<void*>(kStackPush)},
      {"jdynoff_stack_seal", reinterpret_cast<void*>(kStackSeal)},
      {"jdynoff_stack_claim", reinterpret_cast<void*>(kStackClaim)},
      {"jdynoff_stack_pop", reinterpret_cast<void*>(kStackPop)},
  };
  return handlers;
}

}  // namespace jdynoff
