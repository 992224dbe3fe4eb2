// SPDX-License-Identifier: Apache-2.0
// Launches that are recorded once and run many times, with other addresses each time.
//
// While a thread records, an op's binding checks its arguments and appends its parameters instead of launching. Its
// addresses are symbolic: (index + 1) << 48 | offset, and null stays 0. place() is told which base each index belongs
// to. It rewrites the addresses to (base + 1) << 48 | offset from the base. A run copies the parameters, replaces the
// bases by addresses, and launches. The number of a dropout stream ("site") is an index, too, into the run's sites.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lorakernels {

constexpr int kOffsetBits = 48;
constexpr uint64_t kOffsetMask = (uint64_t{1} << kOffsetBits) - 1;

// What a run is given.
struct LaunchValues {
  static constexpr size_t kMost = 64;

  uint64_t addresses[kMost];  // of the bases
  uint32_t sites[kMost];

  uint64_t address(uint64_t placed) const {
    return placed == 0 ? 0 : addresses[(placed >> kOffsetBits) - 1] + (placed & kOffsetMask);
  }
  uint32_t site(uint32_t index) const { return sites[index]; }
};

// What place() and the checks do to each address and site of a launch.
class Rewriting {
 public:
  virtual ~Rewriting() = default;
  virtual uint64_t address(uint64_t symbolic) = 0;
  virtual uint32_t site(uint32_t index) = 0;
};

// What each_address() beside an op's parameters is called with. `Values` is LaunchValues or Rewriting.
template <typename Values>
class Rewrite {
 public:
  explicit Rewrite(Values& values) : values_(values) {}

  template <typename... T>
  void operator()(T*&... pointers) const {
    ((pointers = reinterpret_cast<T*>(values_.address(reinterpret_cast<uint64_t>(pointers)))), ...);
  }
  void site(uint32_t& index) const { index = values_.site(index); }

 private:
  Values& values_;
};

class Launch {
 public:
  virtual ~Launch() = default;
  virtual std::string name() const = 0;
  virtual void rewrite(Rewriting& rewriting) = 0;
  virtual void run(const LaunchValues& values, void* stream) const = 0;  // on the current device
};

template <typename Params>
using LaunchFunction = void (*)(const Params& params, void* stream, int device);

template <typename Params>
class OpLaunch final : public Launch {
 public:
  OpLaunch(const char* op, const Params& params, LaunchFunction<Params> launch)
      : op_(op), params_(params), launch_(launch) {}

  std::string name() const override { return op_; }
  void rewrite(Rewriting& rewriting) override { each_address(params_, Rewrite<Rewriting>(rewriting)); }
  void run(const LaunchValues& values, void* stream) const override {
    Params params = params_;
    each_address(params, Rewrite<const LaunchValues>(values));
    launch_(params, stream, -1);
  }

 private:
  const char* op_;
  Params params_;
  LaunchFunction<Params> launch_;
};

// Any thread may run a list that is placed.
class LaunchList : public std::enable_shared_from_this<LaunchList> {
 public:
  struct Place {
    size_t base;
    uint64_t offset;  // bytes
  };

  // The list that the calling thread records into, or null.
  static LaunchList* recording();

  void begin();
  void end();
  void append(std::unique_ptr<Launch> launch);
  void place(const std::vector<Place>& places, const std::vector<bool>& aligned);

  // Throws if `values` cannot be run with. False if an address of an aligned base is no multiple of 16.
  bool takes(const LaunchValues& values, size_t addresses, size_t sites) const;
  void launch(const LaunchValues& values, void* stream, int device) const;
  // For each launch its name, then its addresses and its sites.
  std::vector<std::pair<std::string, std::vector<uint64_t>>> calls(const LaunchValues& values) const;
  size_t size() const { return launches_.size(); }

 private:
  enum class State { kNew, kRecording, kRecorded, kPlaced };

  State state_ = State::kNew;
  std::vector<std::unique_ptr<Launch>> launches_;
  size_t bases_ = 0, sites_ = 0;           // how many a run must be given
  uint64_t used_bases_ = 0, aligned_ = 0;  // a bit for each base
};

// Launches, or appends to the list that the calling thread records into.
template <typename Params>
void submit(const char* op, const Params& params, LaunchFunction<Params> launch, uintptr_t stream, int device) {
  if (LaunchList* const list = LaunchList::recording()) {
    list->append(std::make_unique<OpLaunch<Params>>(op, params, launch));
  } else {
    launch(params, reinterpret_cast<void*>(stream), device);
  }
}

}  // namespace lorakernels
