// One pass over a tensor on a CPU: the vector and the exponent histogram of trimtab.scope.vector.
//
// The elements go through in chunks that stay in the first cache: widened to float32 and counted by their exponents
// (integers), then summed in float64 (vectors). Chunks are summed within segments of fixed length, and segments in
// their order, so that the result does not depend on how many threads there are.
//
// Compiled for the processor at hand, see native.py. No library but the standard one: nothing depends on PyTorch's version.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

namespace {

constexpr int64_t chunk_size = 2048;
constexpr int64_t chunks_in_segment = 64;
constexpr int64_t segment_size = chunk_size * chunks_in_segment;
constexpr int bins = 256;
constexpr int lanes = 8;  // copies of the histogram: equal exponents in a row must not wait for one counter
constexpr int most_dimensions = 4;
constexpr uint32_t exponent_mask = 0x7f800000u;

enum Kind : int32_t { float32 = 0, bfloat16 = 1, float16 = 2, float8_e4m3fn = 3, float8_e5m2 = 4 };

struct Layout {
  int64_t dimensions;
  int64_t sizes[most_dimensions];
  int64_t strides[most_dimensions];
  int64_t elements;
};

struct Sums {
  double nan = 0, inf = 0, zeros = 0;
  double first = 0, absolute = 0, second = 0, third = 0, fourth = 0;
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();

  void add(const Sums& other) {
    nan += other.nan, inf += other.inf, zeros += other.zeros;
    first += other.first, absolute += other.absolute;
    second += other.second, third += other.third, fourth += other.fourth;
    low = std::min(low, other.low), high = std::max(high, other.high);
  }
};

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// A narrower binary format in the places of a float32's fields, times the power of two between their biases: exact for
// subnormal numbers, too.
inline float widened(uint32_t magnitude, uint32_t sign, float scale, bool special) {
  const uint32_t bits = to_bits(from_bits(magnitude) * scale);
  return from_bits((special ? (magnitude | exponent_mask) : bits) | sign);
}

template <Kind kind>
struct Format;

template <>
struct Format<float32> {
  using Stored = uint32_t;
  static float widen(Stored x) { return from_bits(x); }
};

template <>
struct Format<bfloat16> {
  using Stored = uint16_t;
  static float widen(Stored x) { return from_bits(static_cast<uint32_t>(x) << 16); }
};

template <>
struct Format<float16> {
  using Stored = uint16_t;
  static float widen(Stored x) {
    const uint32_t wide = x;
    return widened((wide & 0x7fffu) << 13, (wide & 0x8000u) << 16, 0x1p112f, (wide & 0x7c00u) == 0x7c00u);
  }
};

template <>
struct Format<float8_e4m3fn> {  // no infinities, and one NaN of either sign
  using Stored = uint8_t;
  static float widen(Stored x) {
    const uint32_t wide = x;
    return widened((wide & 0x7fu) << 20, (wide & 0x80u) << 24, 0x1p120f, (wide & 0x7fu) == 0x7fu);
  }
};

template <>
struct Format<float8_e5m2> {
  using Stored = uint8_t;
  static float widen(Stored x) {
    const uint32_t wide = x;
    return widened((wide & 0x7fu) << 21, (wide & 0x80u) << 24, 0x1p112f, (wide & 0x7cu) == 0x7cu);
  }
};

// Elements begin to begin + count, in the order of their addresses.
template <Kind kind>
void gather(const void* data, const Layout& layout, int64_t begin, int64_t count, float* out) {
  using Stored = typename Format<kind>::Stored;
  const Stored* base = static_cast<const Stored*>(data);
  const int64_t inner = layout.dimensions - 1;
  const int64_t size = layout.sizes[inner], stride = layout.strides[inner];
  while (count > 0) {
    int64_t row = begin / size;
    const int64_t column = begin % size;
    const int64_t run = std::min(count, size - column);
    int64_t offset = column * stride;
    for (int64_t d = inner - 1; d >= 0; --d) {
      offset += (row % layout.sizes[d]) * layout.strides[d];
      row /= layout.sizes[d];
    }
    const Stored* from = base + offset;
    if (stride == 1) {
#pragma omp simd
      for (int64_t i = 0; i < run; ++i) out[i] = Format<kind>::widen(from[i]);
    } else {
      for (int64_t i = 0; i < run; ++i) out[i] = Format<kind>::widen(from[i * stride]);
    }
    out += run, begin += run, count -= run;
  }
}

void count_exponents(const float* x, int64_t count, uint32_t (*counts)[bins]) {
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes)
    for (int lane = 0; lane < lanes; ++lane) ++counts[lane][(to_bits(x[i + lane]) >> 23) & 0xff];
  for (; i < count; ++i) ++counts[0][(to_bits(x[i]) >> 23) & 0xff];
}

// Takes out what is not finite, and says how much is left.
int64_t keep_finite(float* x, int64_t count, Sums& sums) {
  uint32_t special = 0;
#pragma omp simd reduction(| : special)
  for (int64_t i = 0; i < count; ++i) special |= (to_bits(x[i]) & exponent_mask) == exponent_mask;
  if (!special) return count;
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = to_bits(x[i]);
    if ((bits & exponent_mask) != exponent_mask)
      x[kept++] = x[i];
    else if (bits & ~(exponent_mask | 0x80000000u))
      ++sums.nan;
    else
      ++sums.inf;
  }
  return kept;
}

void sum(const float* x, int64_t count, double shift, Sums& sums) {
  int32_t zeros = 0;
  float low = std::numeric_limits<float>::infinity(), high = -low;
#pragma omp simd reduction(+ : zeros) reduction(min : low) reduction(max : high)
  for (int64_t i = 0; i < count; ++i) {
    zeros += (to_bits(x[i]) << 1) == 0;
    low = std::min(low, x[i]), high = std::max(high, x[i]);
  }
  double first = 0, absolute = 0, second = 0, third = 0, fourth = 0;
#pragma omp simd reduction(+ : first, absolute, second, third, fourth)
  for (int64_t i = 0; i < count; ++i) {
    const double value = x[i], y = value - shift, square = y * y;
    first += y, absolute += std::fabs(value);
    second += square, third += square * y, fourth += square * square;
  }
  sums.zeros += zeros;
  sums.first += first, sums.absolute += absolute;
  sums.second += second, sums.third += third, sums.fourth += fourth;
  if (count) sums.low = std::min<double>(sums.low, low), sums.high = std::max<double>(sums.high, high);
}

// About what to sum: the mean of the first chunk where it stands clear of 0, as a float32; else 0.
template <Kind kind>
double shift_of(const void* data, const Layout& layout) {
  float x[chunk_size];
  Sums sums;
  int64_t count = std::min(layout.elements, chunk_size);
  gather<kind>(data, layout, 0, count, x);
  count = keep_finite(x, count, sums);
  sum(x, count, 0.0, sums);
  const double mean = sums.first / std::max<int64_t>(count, 1), square = sums.second / std::max<int64_t>(count, 1);
  return mean * mean > 0.8 * square ? static_cast<double>(static_cast<float>(mean)) : 0.0;
}

template <Kind kind>
void segment(const void* data, const Layout& layout, int64_t begin, double shift, Sums& sums, int64_t* exponents) {
  alignas(64) float x[chunk_size];
  alignas(64) uint32_t counts[lanes][bins] = {};
  const int64_t end = std::min(begin + segment_size, layout.elements);
  for (int64_t at = begin; at < end; at += chunk_size) {
    const int64_t count = std::min(chunk_size, end - at);
    gather<kind>(data, layout, at, count, x);
    if (exponents) count_exponents(x, count, counts);
    sum(x, keep_finite(x, count, sums), shift, sums);
  }
  if (exponents)
    for (int bin = 0; bin < bins; ++bin)
      for (int lane = 0; lane < lanes; ++lane) exponents[bin] += counts[lane][bin];
}

template <Kind kind>
void measure(const void* data, const Layout& layout, int threads, double* vector, double* shift, int64_t* exponents) {
  *shift = shift_of<kind>(data, layout);
  const int64_t segments = (layout.elements + segment_size - 1) / segment_size;
  const int workers = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, segments)));
  std::vector<Sums> sums(segments);
  std::vector<int64_t> counted(exponents ? static_cast<size_t>(workers) * bins : 0);
  std::atomic<int64_t> next{0};
  auto work = [&](int worker) {
    for (int64_t i = next++; i < segments; i = next++)
      segment<kind>(data, layout, i * segment_size, *shift, sums[i], exponents ? &counted[worker * bins] : nullptr);
  };
  std::vector<std::thread> others;
  try {
    for (int worker = 1; worker < workers; ++worker) others.emplace_back(work, worker);
  } catch (...) {  // no more threads are to be had: those that are there do it
  }
  work(0);
  for (auto& other : others) other.join();
  Sums all;
  for (const auto& part : sums) all.add(part);
  const double fields[] = {static_cast<double>(layout.elements), all.nan,   all.inf,    all.zeros, all.first, all.absolute,
                           all.second,                           all.third, all.fourth, all.low,   all.high};
  std::copy(std::begin(fields), std::end(fields), vector);
  if (exponents) {
    std::fill(exponents, exponents + bins, 0);
    for (size_t i = 0; i < counted.size(); ++i) exponents[i % bins] += counted[i];
  }
}

}  // namespace

// vector: 11 doubles, shift: 1, exponents: 256 or null. Returns 0, or 1 for what it does not know.
extern "C" int trimtab_statistics(const void* data, int64_t dimensions, const int64_t* sizes, const int64_t* strides,
                                  int32_t kind, int32_t threads, double* vector, double* shift, int64_t* exponents) {
  if (dimensions < 1 || dimensions > most_dimensions) return 1;
  Layout layout{dimensions, {}, {}, 1};
  for (int64_t d = 0; d < dimensions; ++d) {
    layout.sizes[d] = sizes[d], layout.strides[d] = strides[d];
    layout.elements *= sizes[d];
  }
  if (layout.elements < 1) return 1;
  switch (kind) {
    case float32: measure<float32>(data, layout, threads, vector, shift, exponents); return 0;
    case bfloat16: measure<bfloat16>(data, layout, threads, vector, shift, exponents); return 0;
    case float16: measure<float16>(data, layout, threads, vector, shift, exponents); return 0;
    case float8_e4m3fn: measure<float8_e4m3fn>(data, layout, threads, vector, shift, exponents); return 0;
    case float8_e5m2: measure<float8_e5m2>(data, layout, threads, vector, shift, exponents); return 0;
    default: return 1;
  }
}
