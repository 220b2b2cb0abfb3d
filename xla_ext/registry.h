// Finds the manager that a ticket or a run belongs to: XLA's handlers are functions of the
// process, managers are objects.
//
// The one global of the library. It also knows whether this process is a forked child, in which
// the I/O threads do not exist and the mutexes may be held for ever: everything refuses there.
#pragma once

#include <cstdint>
#include <memory>

#include "manager.h"

namespace jdynoff {

// True in a child made by fork() after the library was loaded.
bool InForkedChild();
Status ForkedChildStatus();

// Makes the manager known to the fork handler.
void RegisterManager(const std::shared_ptr<Manager>& manager);
// Shuts every manager down; at the interpreter's exit.
void ShutdownAllManagers();

// Opens a ticket, never 0 and unique in the process, and registers it.
Status OpenTicket(const std::shared_ptr<Manager>& manager, std::uint64_t pool_bytes,
                  std::uint64_t spill_bytes, std::uint64_t expected_bytes, std::uint32_t& ticket);
void CloseTicket(std::uint32_t ticket);

Status BeginRun(std::uint32_t ticket, RunKey key,
                std::optional<std::uint64_t> expected_pages = std::nullopt);
// Null when no such run is open.
std::shared_ptr<Manager> ManagerOfRun(RunKey key);
void ForgetRun(RunKey key);
// The same and its ticket, from the run's beginning until the ticket closes, even if it has ended.
std::shared_ptr<Manager> TicketOfRun(RunKey key, std::uint32_t& ticket);

}  // namespace jdynoff
