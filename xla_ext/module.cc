// The Python module jdynoff._native: the manager's Python face and the handlers as capsules.
//
// Everything that may wait (open, close, shutdown) releases the GIL: a step that waits for a user
// callback must be able to take it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "handlers.h"
#include "loop_stacks.h"
#include "manager.h"
#include "page_arena.h"
#include "registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jdynoff {
namespace {

// Raises jdynoff.errors.<class of the code>. The classes live in Python, where users see them.
void Raise(const Status& status, bool reservation) {
  if (status.ok()) return;
  const nb::object error = nb::module_::import_("jdynoff.errors")
                               .attr("from_code")(std::string(CodeName(status.code())),
                                                  status.message(), "reservation"_a = reservation);
  PyErr_SetObject(error.type().ptr(), error.ptr());
  throw nb::python_error();
}

void RefuseInForkedChild() {
  if (InForkedChild()) Raise(ForkedChildStatus(), false);
}

std::shared_ptr<Manager> MakeManager(const std::optional<std::string>& spill_dir,
                                     std::size_t chunk_bytes, int io_threads,
                                     std::optional<std::uint64_t> disk_limit_bytes,
                                     std::optional<std::uint64_t> disk_bytes_per_second,
                                     bool direct_io, bool verify) {
  RefuseInForkedChild();
  ManagerOptions options;
  options.chunk_bytes = chunk_bytes;
  options.io_threads = io_threads;
  options.verify = verify;
  if (spill_dir.has_value()) {
    options.spill = SpillFileOptions{*spill_dir, direct_io, disk_limit_bytes.value_or(0),
                                     disk_bytes_per_second.value_or(0)};
  }
  Status status;
  std::shared_ptr<Manager> manager = Manager::Create(options, status);
  Raise(status, false);
  return manager;
}

std::uint32_t Open(const std::shared_ptr<Manager>& manager, std::uint64_t pool_bytes,
                   std::uint64_t spill_bytes, int /*device*/, std::uint64_t expected_bytes) {
  RefuseInForkedChild();
  std::uint32_t ticket = 0;
  Status status;
  {
    nb::gil_scoped_release released;
    status = OpenTicket(manager, pool_bytes, spill_bytes, expected_bytes, ticket);
  }
  Raise(status, true);
  return ticket;
}

void Close(const std::shared_ptr<Manager>& /*manager*/, std::uint32_t ticket) {
  if (InForkedChild()) return;
  nb::gil_scoped_release released;
  CloseTicket(ticket);
}

nb::dict Stats(const std::shared_ptr<Manager>& manager, std::uint32_t ticket) {
  RefuseInForkedChild();
  const std::optional<TicketStats> stats = manager->Stats(ticket);
  if (!stats.has_value()) {
    throw nb::key_error(("no statistics of ticket " + std::to_string(ticket) +
                         ": it was never opened here, or too many were closed since")
                            .c_str());
  }
  nb::dict result;
  result["state"] = stats->state;
  result["pool_bytes"] = stats->pool_bytes;
  result["bytes_offloaded"] = stats->bytes_offloaded;
  result["bytes_reloaded"] = stats->bytes_reloaded;
  result["bytes_written"] = stats->bytes_written;
  result["bytes_read"] = stats->bytes_read;
  result["entries_offloaded"] = stats->entries_offloaded;
  result["entries_reloaded"] = stats->entries_reloaded;
  result["entries_discarded"] = stats->entries_discarded;
  result["entries_unread"] = stats->entries_unread;
  result["pool_peak_bytes"] = stats->pool_peak_bytes;
  result["read_ahead_hits"] = stats->read_ahead_hits;
  result["read_ahead_misses"] = stats->read_ahead_misses;
  result["offload_stall_seconds"] = stats->offload_stall_seconds;
  result["reload_stall_seconds"] = stats->reload_stall_seconds;
  result["stall_seconds"] = stats->offload_stall_seconds + stats->reload_stall_seconds;
  nb::dict sites;
  for (const auto& [site, count] : stats->site_counts) sites[nb::int_(site)] = count;
  result["site_counts"] = sites;
  result["error"] = stats->error.empty() ? nb::none() : nb::object(nb::str(stats->error.c_str()));
  return result;
}

void Shutdown(Manager& manager) {
  if (!InForkedChild()) manager.Shutdown();
}

nb::list Log(const std::shared_ptr<Manager>& manager, std::uint32_t ticket) {
  RefuseInForkedChild();
  nb::list events;
  for (const Event& event : manager->Log(ticket)) {
    events.append(
        nb::make_tuple(event.operation, event.site, event.bytes, event.start_ns, event.end_ns));
  }
  return events;
}

nb::dict Totals(const std::shared_ptr<Manager>& manager) {
  RefuseInForkedChild();
  const ManagerTotals totals = manager->Totals();
  nb::dict result;
  result["live_entries"] = totals.live_entries;
  result["live_bytes"] = totals.live_bytes;
  result["arena_bytes"] = totals.arena_bytes;
  result["spill_file_bytes"] = totals.spill_file_bytes;
  result["open_tickets"] = totals.open_tickets;
  return result;
}

nb::dict LoopStackTotals() {
  RefuseInForkedChild();
  const LoopTotals totals = LoopStacks::Get().Totals();
  nb::dict result;
  result["live_stacks"] = totals.live_stacks;
  result["top_bytes"] = totals.top_bytes;
  result["opened"] = totals.opened;
  result["frames_pushed"] = totals.frames_pushed;
  result["frames_popped"] = totals.frames_popped;
  result["dropped"] = totals.dropped;
  result["missed"] = totals.missed;
  return result;
}

void InjectFault(const std::shared_ptr<Manager>& manager, std::string_view kind, std::int64_t after,
                 std::int64_t count) {
  RefuseInForkedChild();
  struct Named {
    std::string_view name;
    Fault fault;
  };
  constexpr Named kFaults[] = {
      {"none", Fault::kNone},
      {"write_eio", Fault::kWriteError},
      {"write_enospc", Fault::kWriteNoSpace},
      {"write_short", Fault::kWriteShort},
      {"read_eio", Fault::kReadError},
      {"read_short", Fault::kReadShort},
      {"corrupt", Fault::kCorrupt},
  };
  for (const Named& named : kFaults) {
    if (named.name == kind) return manager->InjectFault(named.fault, after, count);
  }
  throw nb::value_error(("unknown fault '" + std::string(kind) + "'").c_str());
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The buffer manager and its XLA handlers. Use it through jdynoff.runtime.";
  // Managers live as long as the process, in a cache of jdynoff.runtime; nanobind would report
  // each of them as leaked when the interpreter exits.
  nb::set_leak_warnings(false);

  m.attr("PAGE_BYTES") = kPageBytes;

  m.def(
      "handlers",
      [] {
        nb::dict result;
        for (const Handler& handler : Handlers()) {
          result[handler.name] = nb::capsule(handler.function);
        }
        return result;
      },
      "XLA FFI handlers by custom-call target name, for jax.ffi.register_ffi_target.");

  m.def(
      "configure_loops",
      [](std::shared_ptr<Manager> manager, std::uint64_t pool_bytes) {
        RefuseInForkedChild();
        LoopStacks::Get().Configure(std::move(manager), pool_bytes);
      },
      "manager"_a, "pool_bytes"_a,
      "Where the stacks of loops go outside of managed steps, and their memory on each device.");
  m.def("loop_totals", &LoopStackTotals, "What is on the stacks of loops, and has been.");

  m.def("shutdown_all", &ShutdownAllManagers, nb::call_guard<nb::gil_scoped_release>(),
        "Shut every manager down: what a step waits for fails, the I/O threads end.");

  nb::class_<Manager>(m, "Manager", "One pool and one disk tier, shared by many steps.")
      .def(nb::new_(&MakeManager), "spill_dir"_a.none(), nb::kw_only(),
           "chunk_bytes"_a = std::size_t{1} << 20, "io_threads"_a = 4,
           "disk_limit_bytes"_a = nb::none(), "disk_bytes_per_second"_a = nb::none(),
           "direct_io"_a = true, "verify"_a = false)
      .def("open", &Open, "pool_bytes"_a, "spill_bytes"_a, "device"_a = 0, nb::kw_only(),
           "expected_bytes"_a = 0, "Reserve pool memory and spill space; returns a ticket.")
      .def("close", &Close, "ticket"_a, "Free all that belongs to a ticket. Idempotent.")
      .def("stats", &Stats, "ticket"_a)
      .def("log", &Log, "ticket"_a,
           "Events (operation, site, bytes, start_ns, end_ns) of a ticket, if enabled.")
      .def(
          "enable_log", [](Manager& self, bool enabled) { self.EnableLog(enabled); }, "enabled"_a)
      .def("totals", &Totals)
      .def("inject_fault", &InjectFault, "kind"_a, "after"_a = 0, "count"_a = 1,
           "Make I/O fail, for tests: `after` operations pass, then `count` fail (-1: all).")
      .def("shutdown", &Shutdown, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("direct_io", &Manager::direct_io);
}

}  // namespace jdynoff
