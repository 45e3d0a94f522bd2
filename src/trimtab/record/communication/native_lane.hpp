// The short way of a collective that runs in the current stream (NCCL, synchronous): from its issue to its row without
// Python and without the GIL. It records what Works would; whatever is out of the ordinary goes there.

#pragma once

#include <pthread.h>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "native_objects.hpp"

namespace torch::autograd {
int get_current_graph_task_id();  // of graph_task.h, which would bring half of autograd with it
}

namespace trimtab {

// What tells a group's sites apart: operator, type, root, and whether a thread issued it that trains.
using SiteKey = std::tuple<const void*, int, int64_t, bool>;

struct LaneGroup {
  c10::weak_intrusive_ptr<torch::CustomClassHolder> process_group;
  std::shared_ptr<Counter> collectives;
  int64_t members = 1;
  std::map<SiteKey, int64_t> sites;
};

// A collective on its way.
struct Passage {
  int64_t members = 1;
  int64_t site = -1;
  int64_t step = -1;
  int64_t event_id = -1;
  int64_t ready = Marks::kUnknown;
  int64_t seq = -1;
  int64_t bytes = 0;
  void* stream = nullptr;  // that it runs in
};

class Lane {
 public:
  Lane(std::shared_ptr<Ring> ring, std::shared_ptr<Marking> marking, std::shared_ptr<Counter> ids, uint64_t main)
      : ring_(std::move(ring)), marking_(std::move(marking)), ids_(std::move(ids)), main_(main) {}

  // Set by Python: is this step recorded, and is there a reason to go the long way?
  std::atomic<int64_t> step{-1};
  std::atomic<bool> active{false};
  std::atomic<int> closed{0};

  // With the GIL; the group is one of NCCL.
  void add(const void* address, LaneGroup group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_.insert_or_assign(address, std::move(group));
  }

  // Counts a collective of that group; false where it is not for this way, and then it is not counted.
  bool enter(const void* address, Passage* passage) {
    if (closed.load(std::memory_order_acquire) != 0) {
      return false;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = groups_.find(address);
    if (found == groups_.end() || found->second.process_group.expired()) {
      return false;
    }
    passage->members = found->second.members;
    passage->seq = found->second.collectives->fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  // Number of its site; below -1: not known yet.
  int64_t site(const void* address, const SiteKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = groups_.find(address);
    if (found == groups_.end()) {
      return -1;
    }
    const auto known = found->second.sites.find(key);
    return known == found->second.sites.end() ? kNew : known->second;
  }

  void learn(const void* address, const SiteKey& key, int64_t site) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = groups_.find(address);
    if (found != groups_.end() && found->second.sites.size() < kSitesKept) {
      found->second.sites[key] = site;
    }
  }

  bool in_foreground() const {
    return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(reinterpret_cast<void*>(pthread_self()))) == main_ ||
           torch::autograd::get_current_graph_task_id() >= 0;
  }

  // True where it is to be recorded.
  bool begin(Passage* passage) {
    passage->step = step.load(std::memory_order_relaxed);
    passage->event_id = ids_->fetch_add(1, std::memory_order_relaxed);
    return marking_->now(&passage->ready, &passage->stream);
  }

  // True: a half of the ring is full.
  bool end(const Passage& of) {
    const int64_t end = of.ready == Marks::kUnknown ? Marks::kUnknown : marking_->marks.on(of.stream);
    const int64_t fields[] = {of.site, of.step, of.event_id, -1, -1, of.ready, of.ready, end, -1, -1, -1, of.seq, of.bytes, 0};
    bool wake = false;
    ring_->push(fields, &wake);
    return wake;
  }

  static constexpr int64_t kNew = -2;

 private:
  static constexpr size_t kSitesKept = 4096;
  const std::shared_ptr<Ring> ring_;
  const std::shared_ptr<Marking> marking_;
  const std::shared_ptr<Counter> ids_;
  const uint64_t main_;
  std::mutex mutex_;
  std::unordered_map<const void*, LaneGroup> groups_;
};

}  // namespace trimtab
