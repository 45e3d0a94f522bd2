// The marks of cuda.py by the CUDA runtime itself: recorded and turned into times without the GIL.
//
// The runtime is the one that this process has loaded; Python finds its functions, so nothing of CUDA is needed to
// compile this. A mark is a handle as in clocks.py: FIRST_HANDLE less the number of marks so far.

#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace trimtab {

// Functions of the CUDA runtime; each returns 0 where all is well.
struct Runtime {
  int (*create)(void** event, unsigned flags) = nullptr;
  int (*record)(void* event, void* stream) = nullptr;
  int (*query)(void* event) = nullptr;
  int (*elapsed)(float* milliseconds, void* begin, void* end) = nullptr;
  int (*capturing)(void* stream, int* status) = nullptr;
  int (*get_device)(int* device) = nullptr;
  int (*set_device)(int device) = nullptr;
  int (*last_error)() = nullptr;  // and forgets it, so that the job does not find it
  int64_t (*clock)() = nullptr;   // the host's
};

// This thread's device is another for a while, where it has to be.
class OnDevice {
 public:
  OnDevice(const Runtime& runtime, int device) : runtime_(runtime) {
    if (runtime_.get_device(&before_) != 0 || before_ == device || runtime_.set_device(device) != 0) {
      before_ = -1;
    }
  }
  ~OnDevice() {
    if (before_ >= 0) {
      runtime_.set_device(before_);
    }
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const Runtime& runtime_;
  int before_ = -1;
};

// Events that nobody uses, of one GPU, for all marks that are ever made on it. Making one takes longer than recording it.
class Events {
 public:
  void* take(const Runtime& runtime) noexcept {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        void* event = idle_.back();
        idle_.pop_back();
        return event;
      }
    }
    void* event = nullptr;
    if (runtime.create(&event, 0) != 0) {
      runtime.last_error();
      return nullptr;
    }
    return event;
  }

  void give(void* event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(event);
  }

  // Make some ahead, on a thread that does not train.
  void provide(const Runtime& runtime, size_t spare) {
    for (size_t made = 0; made < spare && idle() < spare; ++made) {
      void* event = nullptr;
      if (runtime.create(&event, 0) != 0) {
        runtime.last_error();
        return;
      }
      give(event);
    }
  }

  size_t idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return idle_.size();
  }

 private:
  std::mutex mutex_;
  std::vector<void*> idle_;
};

// Those of a GPU. They are not destroyed: the context may be gone by then.
inline Events& events_of(int device) {
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::map<int, Events>;
  const std::lock_guard<std::mutex> lock(mutex);
  return known[device];
}

using Knots = std::vector<std::pair<int64_t, int64_t>>;  // device time, host time: nanoseconds, as AnchorLine.knots

class Marks {
 public:
  static constexpr int64_t kUnknown = -1;
  static constexpr int64_t kFirstHandle = -2;

  Marks(const Runtime& runtime, c10::DeviceType kind, int device, int64_t pool)
      : runtime_(runtime), guard_(c10::impl::getDeviceGuardImpl(kind)),
        place_(kind, static_cast<c10::DeviceIndex>(kind == c10::DeviceType::CPU ? 0 : device)), device_(device), pool_(pool),
        events_(events_of(device)), slots_(new Slot[pool]) {}

  ~Marks() {
    for (int64_t slot = 0; slot < pool_; ++slot) {
      if (slots_[slot].event != nullptr) {
        events_.give(slots_[slot].event);
      }
    }
  }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;

  // The handle of this thread's current stream; false where its number in PyTorch is a new one (see `learn`).
  bool current(void** stream, int64_t* number) {
    *number = guard_->getStream(place_).id();
    const std::lock_guard<std::mutex> lock(streams_mutex_);
    for (const auto& [known, handle] : streams_) {
      if (known == *number) {
        *stream = handle;
        return true;
      }
    }
    return false;
  }

  // PyTorch's numbers of streams keep their meaning: pools are never given back, and others are numbered by handle.
  void learn(int64_t number, void* stream) {
    const std::lock_guard<std::mutex> lock(streams_mutex_);
    if (streams_.size() < kStreamsKept) {
      streams_.emplace_back(number, stream);
    }
  }

  bool capturing(void* stream) noexcept {
    int status = 0;
    if (runtime_.capturing(stream, &status) != 0) {
      runtime_.last_error();
      return true;
    }
    return status != 0;
  }

  // A mark on a stream of this GPU that is not being captured.
  int64_t on(void* stream) noexcept {
    const int64_t number = next_.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = slots_[number % pool_];
    int state = slot.state.load(std::memory_order_acquire);
    if (state == kPending || state == kTaken || !slot.state.compare_exchange_strong(state, kTaken)) {
      return kUnknown;
    }
    const OnDevice here(runtime_, device_);
    if (slot.event == nullptr) {
      slot.event = events_.take(runtime_);
    }
    if (slot.event == nullptr || runtime_.record(slot.event, stream) != 0) {
      runtime_.last_error();
      slot.state.store(kFree, std::memory_order_release);
      return kUnknown;
    }
    slot.number.store(number, std::memory_order_relaxed);
    slot.state.store(kPending, std::memory_order_release);
    return kFirstHandle - number;
  }

  // Is the device certainly not yet where the mark is?
  bool ahead_of(int64_t mark) noexcept {
    Slot* slot = find(mark);
    if (slot == nullptr || slot->state.load(std::memory_order_acquire) != kPending) {
      return false;
    }
    const int found = runtime_.query(slot->event);
    if (found != 0) {
      runtime_.last_error();
    }
    return found == kNotReady;
  }

  // Record an event on an idle stream and wait for it, `limit_ns` at most: host times before and after; false: it did
  // not come.
  bool bracket(void* event, void* stream, int64_t limit_ns, int64_t* before, int64_t* after) noexcept {
    const OnDevice here(runtime_, device_);
    const auto now = runtime_.clock;
    *before = now();
    int found = runtime_.record(event, stream);
    while (found == 0 && (found = runtime_.query(event)) == kNotReady && now() - *before <= limit_ns) {
      found = 0;
    }
    *after = now();
    if (found != 0) {
      runtime_.last_error();
    }
    return found == 0;
  }

  // From here on marks are measured from this event.
  void anchor(void* event, int64_t device_ns, Knots line) {
    anchor_ = event;
    anchor_ns_ = device_ns;
    line_ = std::move(line);
  }

  // Finish marks in order of their age, so that their events can be used again, and have some ready. For one thread, as `resolve` is.
  void sweep() noexcept {
    const int64_t next = next_.load(std::memory_order_acquire);
    swept_ = std::max(swept_, next - pool_);
    for (; swept_ < next; ++swept_) {
      Slot& slot = slots_[swept_ % pool_];
      const int state = slot.state.load(std::memory_order_acquire);
      const bool another = slot.number.load(std::memory_order_relaxed) != swept_;
      if (state == kTaken || (another && state != kPending && swept_ >= next - kInTheMaking)) {
        break;  // a thread may be about to record it
      }
      if (state == kPending && !finish(slot)) {
        break;
      }
    }
    const OnDevice here(runtime_, device_);
    events_.provide(runtime_, kSpare);
  }

  // Nanoseconds of a mark, kUnknown if it never had any, the mark itself while the device has not got there.
  int64_t resolve(int64_t mark) noexcept {
    if (mark > kFirstHandle) {
      return mark;
    }
    Slot* slot = find(mark);
    if (slot == nullptr) {
      return kUnknown;
    }
    if (slot->state.load(std::memory_order_acquire) == kPending && !finish(*slot)) {
      return mark;
    }
    return slot->time;
  }

 private:
  enum : int { kFree, kTaken, kPending, kDone };
  static constexpr int kNotReady = 600;  // cudaErrorNotReady
  static constexpr size_t kStreamsKept = 1024;
  static constexpr int64_t kInTheMaking = 64;
  static constexpr size_t kSpare = 512;

  struct Slot {
    void* event = nullptr;
    std::atomic<int64_t> number{-1};
    std::atomic<int> state{kFree};
    int64_t time = kUnknown;
  };

  Slot* find(int64_t mark) noexcept {
    if (mark > kFirstHandle) {
      return nullptr;
    }
    const int64_t number = kFirstHandle - mark;
    Slot& slot = slots_[number % pool_];
    return slot.number.load(std::memory_order_acquire) == number ? &slot : nullptr;
  }

  bool finish(Slot& slot) noexcept {
    if (anchor_ == nullptr) {
      return false;
    }
    const int found = runtime_.query(slot.event);
    if (found == kNotReady) {
      runtime_.last_error();
      return false;
    }
    float milliseconds = 0;
    const bool told = found == 0 && runtime_.elapsed(&milliseconds, anchor_, slot.event) == 0;
    if (!told) {  // an event of another GPU of this process
      runtime_.last_error();
    }
    slot.time = told ? to_host(anchor_ns_ + std::llround(static_cast<double>(milliseconds) * 1e6)) : kUnknown;
    events_.give(std::exchange(slot.event, nullptr));
    slot.state.store(kDone, std::memory_order_release);
    return true;
  }

  // As clocks.AnchorLine.to_host.
  int64_t to_host(int64_t device) const noexcept {
    if (line_.size() < 2) {
      return kUnknown;
    }
    size_t after = 1;
    while (after + 1 < line_.size() && line_[after].first <= device) {
      ++after;
    }
    const auto& [d0, h0] = line_[after - 1];
    const auto& [d1, h1] = line_[after];
    const double rate = static_cast<double>(h1 - h0) / static_cast<double>(d1 - d0);
    return h0 + std::llround(static_cast<double>(device - d0) * rate);
  }

  const Runtime runtime_;
  const c10::impl::DeviceGuardImplInterface* const guard_;
  const c10::Device place_;
  const int device_;
  const int64_t pool_;
  Events& events_;
  const std::unique_ptr<Slot[]> slots_;
  std::atomic<int64_t> next_{0};
  std::mutex streams_mutex_;
  std::vector<std::pair<int64_t, void*>> streams_;
  int64_t swept_ = 0;
  void* anchor_ = nullptr;
  int64_t anchor_ns_ = 0;
  Knots line_;
};

}  // namespace trimtab
