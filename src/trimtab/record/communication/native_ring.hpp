// The ring of ring.py for producers that do not hold the GIL: the same rows, numbered by an atomic counter.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace trimtab {

class Ring {
 public:
  static constexpr int64_t kWidth = 15;  // as ring.FIELDS

  // `size` is a power of two; `limit` rows may wait to be drained.
  Ring(int64_t size, int64_t limit) : rows_(new int64_t[size * kWidth]()), size_(size), limit_(limit), full_(limit) {}

  // Stores a row: `fields` are all but its number. False and counted as dropped where there is no room. `wake`: a half
  // has been filled.
  bool push(const int64_t* fields, bool* wake) noexcept {
    if (next_.load(std::memory_order_relaxed) >= full_.load(std::memory_order_acquire)) {
      dropped_.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    const int64_t number = next_.fetch_add(1, std::memory_order_relaxed);
    int64_t* row = rows_.get() + (number & (size_ - 1)) * kWidth;
    for (int64_t field = 1; field < kWidth; ++field) {
      row[field] = fields[field - 1];
    }
    __atomic_store_n(row, number + 1, __ATOMIC_RELEASE);  // last: the writer takes a row by its number
    *wake = (number & (size_ / 2 - 1)) == 0;
    return true;
  }

  int64_t head() const noexcept { return next_.load(std::memory_order_acquire); }
  int64_t dropped() const noexcept { return dropped_.load(std::memory_order_relaxed); }
  void drained(int64_t tail) noexcept { full_.store(tail + limit_, std::memory_order_release); }
  int64_t* rows() noexcept { return rows_.get(); }
  int64_t bytes() const noexcept { return size_ * kWidth * static_cast<int64_t>(sizeof(int64_t)); }

 private:
  std::unique_ptr<int64_t[]> rows_;
  const int64_t size_;
  const int64_t limit_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> full_;
  std::atomic<int64_t> dropped_{0};
};

}  // namespace trimtab
