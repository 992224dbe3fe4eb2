// SPDX-License-Identifier: Apache-2.0
#include "host/launch_list.h"

#include <algorithm>
#include <stdexcept>

namespace lorakernels {
namespace {

thread_local std::shared_ptr<LaunchList> recorder;

std::string text(uint64_t number) { return std::to_string(number); }

// Refuses addresses that are not symbolic.
class CheckSymbolic final : public Rewriting {
 public:
  uint64_t address(uint64_t symbolic) override {
    if (symbolic != 0 && symbolic >> kOffsetBits == 0) {
      throw std::invalid_argument("an address given while a LaunchList records must be symbolic, got " +
                                  text(symbolic));
    }
    return symbolic;
  }
  uint32_t site(uint32_t index) override {
    if (index >= LaunchValues::kMost) {
      throw std::invalid_argument("a site given while a LaunchList records must be an index below " +
                                  text(LaunchValues::kMost) + ", got " + text(index));
    }
    return index;
  }
};

// What an address is in a list that is placed; nothing is changed if `changes` is false.
class PlaceEach final : public Rewriting {
 public:
  PlaceEach(const std::vector<LaunchList::Place>& places, bool changes) : places_(places), changes_(changes) {}

  uint64_t address(uint64_t symbolic) override {
    if (symbolic == 0) return 0;
    const uint64_t index = (symbolic >> kOffsetBits) - 1;
    if (index >= places_.size()) {
      throw std::invalid_argument("places must have an entry for each recorded index, found " + text(places_.size()) +
                                  ", but index " + text(index) + " was recorded");
    }
    const auto [base, before] = places_[index];
    const uint64_t offset = before + (symbolic & kOffsetMask);
    if (offset > kOffsetMask) throw std::invalid_argument("places[" + text(index) + "] ends beyond 2^48 bytes");
    used_bases |= uint64_t{1} << base;
    return changes_ ? (base + 1) << kOffsetBits | offset : symbolic;
  }
  uint32_t site(uint32_t index) override {
    sites = std::max<size_t>(sites, index + 1);
    return index;
  }

  uint64_t used_bases = 0;
  size_t sites = 0;

 private:
  const std::vector<LaunchList::Place>& places_;
  bool changes_;
};

// Keeps what a run would launch with, and changes nothing.
class CollectEach final : public Rewriting {
 public:
  explicit CollectEach(const LaunchValues& values) : values_(values) {}

  uint64_t address(uint64_t placed) override {
    addresses.push_back(values_.address(placed));
    return placed;
  }
  uint32_t site(uint32_t index) override {
    sites.push_back(values_.site(index));
    return index;
  }

  std::vector<uint64_t> addresses, sites;

 private:
  const LaunchValues& values_;
};

}  // namespace

LaunchList* LaunchList::recording() { return recorder.get(); }

void LaunchList::begin() {
  if (recorder != nullptr) throw std::runtime_error("LaunchList.begin: this thread records into a list already");
  if (state_ != State::kNew) throw std::runtime_error("LaunchList.begin: this list has been recorded already");
  state_ = State::kRecording;
  recorder = shared_from_this();
}

void LaunchList::end() {
  if (recorder.get() != this) throw std::runtime_error("LaunchList.end: this thread does not record into this list");
  state_ = State::kRecorded;
  recorder.reset();
}

void LaunchList::append(std::unique_ptr<Launch> launch) {
  CheckSymbolic check;
  launch->rewrite(check);
  launches_.push_back(std::move(launch));
}

void LaunchList::place(const std::vector<Place>& places, const std::vector<bool>& aligned) {
  if (state_ != State::kRecorded) throw std::runtime_error("LaunchList.place: must be called once, after end()");
  if (aligned.size() > LaunchValues::kMost) {
    throw std::invalid_argument("aligned must have at most " + text(LaunchValues::kMost) + " bases, got " +
                                text(aligned.size()));
  }
  for (const Place& each : places) {
    if (each.base >= aligned.size() || each.offset > kOffsetMask) {
      throw std::invalid_argument("places must have a base below len(aligned) = " + text(aligned.size()) +
                                  " and an offset below 2^48, got (" + text(each.base) + ", " + text(each.offset) +
                                  ")");
    }
  }
  PlaceEach check(places, false), change(places, true);
  for (const auto& launch : launches_) launch->rewrite(check);
  for (const auto& launch : launches_) launch->rewrite(change);
  bases_ = aligned.size(), sites_ = check.sites, used_bases_ = check.used_bases;
  for (size_t base = 0; base < aligned.size(); ++base) aligned_ |= uint64_t{aligned[base]} << base;
  state_ = State::kPlaced;
}

bool LaunchList::takes(const LaunchValues& values, size_t addresses, size_t sites) const {
  if (state_ != State::kPlaced) throw std::runtime_error("LaunchList.run: place() must have been called");
  if (addresses != bases_) {
    throw std::invalid_argument("addresses must have " + text(bases_) + " entries, got " + text(addresses));
  }
  if (sites < sites_) {
    throw std::invalid_argument("sites must have at least " + text(sites_) + " entries, got " + text(sites));
  }
  uint64_t misaligned = 0;
  for (size_t base = 0; base < bases_; ++base) {
    if (values.addresses[base] == 0 && (used_bases_ >> base & 1) != 0) {
      throw std::invalid_argument("addresses[" + text(base) + "] is used and must not be 0");
    }
    misaligned |= uint64_t{values.addresses[base] % 16 != 0} << base;
  }
  return (misaligned & aligned_) == 0;
}

std::vector<std::pair<std::string, std::vector<uint64_t>>> LaunchList::calls(const LaunchValues& values) const {
  std::vector<std::pair<std::string, std::vector<uint64_t>>> calls;
  for (const auto& launch : launches_) {
    CollectEach collect(values);
    launch->rewrite(collect);
    collect.addresses.insert(collect.addresses.end(), collect.sites.begin(), collect.sites.end());
    calls.emplace_back(launch->name(), std::move(collect.addresses));
  }
  return calls;
}

}  // namespace lorakernels
