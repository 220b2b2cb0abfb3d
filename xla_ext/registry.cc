#include "registry.h"

#include <pthread.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "loop_stacks.h"

namespace jdynoff {
namespace {

struct Registry {
  std::mutex mutex;  // guards all below
  std::vector<std::weak_ptr<Manager>> managers;
  std::map<std::uint32_t, std::shared_ptr<Manager>> by_ticket;
  std::map<RunKey, std::shared_ptr<Manager>> by_run;
  std::map<std::uint32_t, std::vector<RunKey>> runs_of_ticket;
  std::map<RunKey, std::uint32_t> ticket_of_run;
  std::uint32_t last_ticket = 0;
};

std::atomic<bool> forked_child{false};

Registry& TheRegistry();

// The mutex is held across the fork, so that the child finds the list of managers whole.
void BeforeFork() { TheRegistry().mutex.lock(); }
void AfterForkInParent() { TheRegistry().mutex.unlock(); }
void AfterForkInChild() {
  forked_child.store(true, std::memory_order_relaxed);
  for (const auto& weak : TheRegistry().managers) {
    if (const auto manager = weak.lock()) manager->AbandonAfterFork();
  }
  TheRegistry().mutex.unlock();
}

Registry& TheRegistry() {
  // Leaked: steps may still be in flight while static objects are destroyed.
  static Registry& registry = *[] {
    auto* made = new Registry;
    ::pthread_atfork(BeforeFork, AfterForkInParent, AfterForkInChild);
    return made;
  }();
  return registry;
}

}  // namespace

bool InForkedChild() { return forked_child.load(std::memory_order_relaxed); }

Status ForkedChildStatus() {
  return {Code::kConfiguration,
          "managed steps cannot run in a forked child: its parent's I/O threads do not exist "
          "there. Start workers with the 'spawn' or 'forkserver' method, or call the step in the "
          "parent"};
}

void RegisterManager(const std::shared_ptr<Manager>& manager) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  std::erase_if(registry.managers, [](const auto& weak) { return weak.expired(); });
  registry.managers.push_back(manager);
}

void ShutdownAllManagers() {
  if (InForkedChild()) return;
  Registry& registry = TheRegistry();
  std::vector<std::shared_ptr<Manager>> managers;
  {
    std::lock_guard lock(registry.mutex);
    for (const auto& weak : registry.managers) {
      if (auto manager = weak.lock()) managers.push_back(std::move(manager));
    }
  }
  for (const auto& manager : managers) manager->Shutdown();
}

Status OpenTicket(const std::shared_ptr<Manager>& manager, std::uint64_t pool_bytes,
                  std::uint64_t spill_bytes, std::uint64_t expected_bytes, std::uint32_t& ticket) {
  Registry& registry = TheRegistry();
  {
    std::lock_guard lock(registry.mutex);
    do {
      ticket = ++registry.last_ticket;
    } while (ticket == 0 || registry.by_ticket.contains(ticket));
    registry.by_ticket.emplace(ticket, manager);
  }
  const Status status = manager->Open(ticket, pool_bytes, spill_bytes, expected_bytes);
  if (!status.ok()) {
    std::lock_guard lock(registry.mutex);
    registry.by_ticket.erase(ticket);
  }
  return status;
}

void CloseTicket(std::uint32_t ticket) {
  Registry& registry = TheRegistry();
  std::shared_ptr<Manager> manager;
  {
    std::lock_guard lock(registry.mutex);
    const auto found = registry.by_ticket.find(ticket);
    if (found == registry.by_ticket.end()) return;
    manager = found->second;
  }
  manager->Close(ticket);
  LoopStacks::Get().TicketClosed(ticket);
  std::lock_guard lock(registry.mutex);
  registry.by_ticket.erase(ticket);
  if (const auto runs = registry.runs_of_ticket.find(ticket);
      runs != registry.runs_of_ticket.end()) {
    for (RunKey key : runs->second) {
      registry.by_run.erase(key);
      registry.ticket_of_run.erase(key);
    }
    registry.runs_of_ticket.erase(runs);
  }
}

Status BeginRun(std::uint32_t ticket, RunKey key, std::optional<std::uint64_t> expected_pages) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  const auto found = registry.by_ticket.find(ticket);
  if (found == registry.by_ticket.end()) {
    return {Code::kToken, "ticket " + std::to_string(ticket) +
                              " is not open; a managed step must be called through its wrapper, "
                              "which opens one for each call"};
  }
  // Under the registry's mutex, so that a close in between cannot leave a stale run behind.
  if (Status status = found->second->Begin(ticket, key, expected_pages); !status.ok())
    return status;
  registry.by_run.insert_or_assign(key, found->second);
  registry.runs_of_ticket[ticket].push_back(key);
  registry.ticket_of_run.insert_or_assign(key, ticket);
  return {};
}

std::shared_ptr<Manager> ManagerOfRun(RunKey key) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  const auto found = registry.by_run.find(key);
  return found == registry.by_run.end() ? nullptr : found->second;
}

void ForgetRun(RunKey key) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  registry.by_run.erase(key);
}

std::shared_ptr<Manager> TicketOfRun(RunKey key, std::uint32_t& ticket) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  const auto found = registry.ticket_of_run.find(key);
  if (found == registry.ticket_of_run.end()) return nullptr;
  ticket = found->second;
  const auto manager = registry.by_ticket.find(ticket);
  return manager == registry.by_ticket.end() ? nullptr : manager->second;
}

}  // namespace jdynoff
