// The smallest test harness that serves: claims with names, checks that print values, and a run
// of one operation that waits for its completion.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "manager.h"
#include "registry.h"

namespace jdynoff::testing {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

struct Registration {
  Registration(const char* name, void (*body)()) { Tests().push_back({name, body}); }
};

[[noreturn]] inline void Fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, what.c_str());
  std::abort();
}

template <typename A, typename B>
void CheckEqual(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << " (" << a << " against " << b << ")";
  Fail(file, line, out.str());
}

inline void CheckOk(const Status& status, const char* text, const char* file, int line) {
  if (!status.ok()) Fail(file, line, std::string(text) + ": " + status.ToString());
}

// Turns a pending operation into a result that can be waited for.
class Waiter {
 public:
  Done done() {
    return [promise = promise_](const Status& status) { promise->set_value(status); };
  }
  Status Wait(const Outcome& outcome) {
    return outcome.pending ? promise_->get_future().get() : outcome.status;
  }

 private:
  std::shared_ptr<std::promise<Status>> promise_ = std::make_shared<std::promise<Status>>();
};

using Bytes = std::vector<std::byte>;

// Bytes that depend on the seed and on the position, so that no two pieces are alike.
inline Bytes MakeBytes(std::size_t size, std::uint64_t seed) {
  Bytes bytes(size);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  // A word at a time: under the sanitizers the test data cost more than what is tested.
  for (std::size_t at = 0; at < size; at += sizeof(state)) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const std::uint64_t word = state ^ (state >> 32);
    std::memcpy(bytes.data() + at, &word, std::min(sizeof(word), size - at));
  }
  return bytes;
}

// One run, driven the way a rewritten step drives it.
class Driver {
 public:
  Driver(std::shared_ptr<Manager> manager, std::uint64_t pool_bytes, std::uint64_t spill_bytes,
         std::uint64_t expected_bytes = 0)
      : manager_(std::move(manager)) {
    static std::atomic<std::int64_t> next_run{1};
    key_ = {next_run++, 0};
    opened_ = OpenTicket(manager_, pool_bytes, spill_bytes, expected_bytes, ticket_);
    if (opened_.ok()) opened_ = BeginRun(ticket_, key_);
  }
  ~Driver() { CloseTicket(ticket_); }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  Status Push(const Bytes& bytes, std::uint32_t& token, std::int64_t site = 1, int readers = 1) {
    Waiter waiter;
    const Status status = waiter.Wait(
        manager_->Offload(key_, bytes, serial_, site, kDtype, readers, token, waiter.done()));
    if (status.ok()) serial_ = token;
    return status;
  }

  Status Pop(std::uint32_t token, Bytes& bytes, std::int64_t site = 1) {
    Waiter waiter;
    std::uint32_t next = serial_;
    const Status status = waiter.Wait(
        manager_->Reload(key_, token, bytes, serial_, site, kDtype, next, waiter.done()));
    if (status.ok()) serial_ = next;
    return status;
  }

  Status Discard(std::uint32_t token, std::int64_t site = 1) {
    return manager_->Discard(key_, token, serial_, site, serial_);
  }

  Status End() {
    std::uint32_t ticket = 0;
    const Status status = manager_->End(key_, serial_, ticket);
    if (status.ok()) ForgetRun(key_);
    if (status.ok() && ticket != ticket_) return {Code::kInternal, "End returned a wrong ticket"};
    return status;
  }

  TicketStats Stats() const { return *manager_->Stats(ticket_); }
  Status opened() const { return opened_; }
  RunKey key() const { return key_; }
  std::uint32_t ticket() const { return ticket_; }
  std::uint32_t serial() const { return serial_; }

  static constexpr std::int32_t kDtype = 11;

 private:
  std::shared_ptr<Manager> manager_;
  RunKey key_;
  std::uint32_t ticket_ = 0;
  std::uint32_t serial_ = 0;
  Status opened_;
};

inline std::string SpillDirectory() {
  const char* named = std::getenv("JDYNOFF_SPILL_DIR");
  return named != nullptr ? named : "/var/tmp";
}

inline std::shared_ptr<Manager> MakeDiskManager(bool verify = true, int io_threads = 2) {
  ManagerOptions options;
  options.spill = SpillFileOptions{SpillDirectory(), true, 0, 0};
  options.verify = verify;
  options.io_threads = io_threads;
  Status status;
  std::shared_ptr<Manager> manager = Manager::Create(options, status);
  CheckOk(status, "Manager::Create", __FILE__, __LINE__);
  return manager;
}

inline int RunAll() {
  for (const Test& test : Tests()) {
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.body();
  }
  std::printf("%zu passed, 0 failed\n", Tests().size());
  return 0;
}

}  // namespace jdynoff::testing

#define TEST(name)                                                                \
  static void name();                                                             \
  static const ::jdynoff::testing::Registration name##_registration(#name, name); \
  static void name()
#define CHECK(condition) \
  ((condition) ? void(0) : ::jdynoff::testing::Fail(__FILE__, __LINE__, #condition))
#define CHECK_EQ(a, b) ::jdynoff::testing::CheckEqual(a, b, #a " == " #b, __FILE__, __LINE__)
#define CHECK_OK(status) ::jdynoff::testing::CheckOk(status, #status, __FILE__, __LINE__)
#define CHECK_CODE(status, expected)                          \
  CHECK_EQ(std::string(::jdynoff::CodeName((status).code())), \
           std::string(::jdynoff::CodeName(expected)))
