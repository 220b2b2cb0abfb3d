// The result of an operation: a code that Python turns into an exception class, and a sentence.
//
// A message says what happened with the values, what must hold, and what to do next. ToString()
// prefixes it with "[jdynoff:<code>]": the text crosses XLA as an error string, and
// jdynoff.errors.from_xla finds the class again by that prefix, so the names are a contract.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace jdynoff {

enum class Code {
  kOk,
  kDiskFull,       // no room in the spill directory, or its limit is reached
  kIo,             // the operating system refused or shortened a read or write
  kChecksum,       // bytes read back differ from the bytes written
  kOrder,          // an operation came out of the order that its serial prescribes
  kToken,          // unknown run, ticket or entry, or an entry of another shape
  kHostLimit,      // the memory pool is full and there is nowhere to move to
  kConfiguration,  // what was asked for cannot work here
  kInternal,
};

constexpr std::string_view CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kDiskFull:
      return "disk-full";
    case Code::kIo:
      return "io";
    case Code::kChecksum:
      return "checksum";
    case Code::kOrder:
      return "order";
    case Code::kToken:
      return "token";
    case Code::kHostLimit:
      return "host-limit";
    case Code::kConfiguration:
      return "configuration";
    case Code::kInternal:
      break;
  }
  return "internal";
}

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  std::string ToString() const {
    return "[jdynoff:" + std::string(CodeName(code_)) + "] " + message_;
  }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

}  // namespace jdynoff
