// What Python holds of the compiled recorder: counters, the ring and the marks, each an object of a type of its own.

#pragma once

#include <Python.h>

#include <atomic>
#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <utility>

#include "native_marks.hpp"
#include "native_ring.hpp"

namespace trimtab {

using Counter = std::atomic<int64_t>;

inline int64_t now_ns() {  // as time.perf_counter_ns
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

template <typename Value>
struct Object {
  PyObject_HEAD
  std::shared_ptr<Value> value;
  PyObject* callable;
};

template <typename Value>
void deallocate(PyObject* self) {
  auto* object = reinterpret_cast<Object<Value>*>(self);
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(object->callable);
  object->value.~shared_ptr<Value>();
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Value>
PyObject* make_object(PyTypeObject* type, std::shared_ptr<Value> value, PyObject* callable) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    auto* object = reinterpret_cast<Object<Value>*>(self);
    new (&object->value) std::shared_ptr<Value>(std::move(value));
    object->callable = Py_XNewRef(callable);
  }
  return self;
}

template <typename Value>
Value& value_of(PyObject* self) {
  return *reinterpret_cast<Object<Value>*>(self)->value;
}

template <typename Value>
const std::shared_ptr<Value>& shared_value(PyObject* self) {
  return reinterpret_cast<Object<Value>*>(self)->value;
}

// ----------------------------------------------------------------------------------------------------- counters

inline PyObject* counter_new(PyTypeObject* type, PyObject*, PyObject*) {
  return make_object<Counter>(type, std::make_shared<Counter>(0), nullptr);
}
inline PyObject* counter_take(PyObject* self, PyObject*) {
  return PyLong_FromLongLong(value_of<Counter>(self).fetch_add(1, std::memory_order_relaxed));
}
inline PyObject* counter_count(PyObject* self, PyObject*) {
  return PyLong_FromLongLong(value_of<Counter>(self).load(std::memory_order_relaxed));
}
inline PyMethodDef counter_methods[] = {
    {"take", counter_take, METH_NOARGS, "The next number, from 0 on."},
    {"count", counter_count, METH_NOARGS, "How many were taken."},
    {nullptr, nullptr, 0, nullptr},
};

// --------------------------------------------------------------------------------------------------------- ring

inline PyObject* store_new(PyTypeObject* type, PyObject* args, PyObject*) {
  long long size = 0, limit = 0;
  PyObject* wake = nullptr;
  if (!PyArg_ParseTuple(args, "LLO", &size, &limit, &wake)) {
    return nullptr;
  }
  return make_object<Ring>(type, std::make_shared<Ring>(size, limit), wake);
}
inline PyObject* store_push(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  constexpr Py_ssize_t kFields = Ring::kWidth - 1;
  if (count != kFields) {
    PyErr_Format(PyExc_TypeError, "a row has %zd fields", kFields);
    return nullptr;
  }
  int64_t fields[kFields];
  for (Py_ssize_t field = 0; field < kFields; ++field) {
    fields[field] = PyLong_AsLongLong(args[field]);
    if (fields[field] == -1 && PyErr_Occurred()) {
      return nullptr;
    }
  }
  bool wake = false;
  const bool stored = value_of<Ring>(self).push(fields, &wake);
  if (wake) {
    PyObject* done = PyObject_CallNoArgs(reinterpret_cast<Object<Ring>*>(self)->callable);
    if (done == nullptr) {
      return nullptr;
    }
    Py_DECREF(done);
  }
  return PyBool_FromLong(stored);
}
inline PyObject* store_head(PyObject* self, PyObject*) { return PyLong_FromLongLong(value_of<Ring>(self).head()); }
inline PyObject* store_dropped(PyObject* self, PyObject*) { return PyLong_FromLongLong(value_of<Ring>(self).dropped()); }
inline PyObject* store_drained(PyObject* self, PyObject* tail) {
  const int64_t number = PyLong_AsLongLong(tail);
  if (number == -1 && PyErr_Occurred()) {
    return nullptr;
  }
  value_of<Ring>(self).drained(number);
  Py_RETURN_NONE;
}
inline int store_buffer(PyObject* self, Py_buffer* view, int flags) {
  auto& ring = value_of<Ring>(self);
  return PyBuffer_FillInfo(view, self, ring.rows(), ring.bytes(), 1, flags);
}
inline PyMethodDef store_methods[] = {
    {"push", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(store_push)), METH_FASTCALL, "See ring.Ring."},
    {"head", store_head, METH_NOARGS, "Rows whose place is taken."},
    {"dropped", store_dropped, METH_NOARGS, "Rows for which there was no room."},
    {"drained", store_drained, METH_O, "All rows before this one may be written over."},
    {nullptr, nullptr, 0, nullptr},
};

// -------------------------------------------------------------------------------------------------------- marks

// Marks, and how to ask Python for the handle of a stream.
struct Marking {
  Marking(const Runtime& runtime, c10::DeviceType kind, int device, int64_t pool, PyObject* raw_stream)
      : marks(runtime, kind, device, pool), device_(device), raw_stream_(Py_NewRef(raw_stream)) {}
  Marks marks;

  // A mark on this thread's current stream, which is given, too. With the GIL or without it. False where the stream is
  // being captured into a graph: a mark there would become a part of it, and `mark` is kUnknown.
  bool now(int64_t* mark, void** stream) noexcept {
    *mark = Marks::kUnknown;
    try {
      int64_t number = 0;
      if (!marks.current(stream, &number) && !ask(number, stream)) {
        return true;
      }
      if (marks.capturing(*stream)) {
        return false;
      }
      *mark = marks.on(*stream);
    } catch (const std::exception&) {  // PyTorch does not know the device
    }
    return true;
  }

 private:
  bool ask(int64_t number, void** stream) {
    const Gil gil;
    PyObject* found = PyObject_CallFunction(raw_stream_, "i", device_);
    const unsigned long long handle = found ? PyLong_AsUnsignedLongLong(found) : 0;
    Py_XDECREF(found);
    if (PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    *stream = reinterpret_cast<void*>(handle);
    marks.learn(number, *stream);
    return true;
  }

  const int device_;
  PyObject* const raw_stream_;  // for good: a thread may be asking it when Python lets go of this
};

inline PyObject* marking_new(PyTypeObject* type, PyObject* args, PyObject*) {
  const char* kind = nullptr;
  int device = 0;
  long long pool = 0;
  unsigned long long address[9];
  PyObject* raw_stream = nullptr;
  if (!PyArg_ParseTuple(args, "siLO(KKKKKKKKK)", &kind, &device, &pool, &raw_stream, &address[0], &address[1], &address[2],
                        &address[3], &address[4], &address[5], &address[6], &address[7], &address[8])) {
    return nullptr;
  }
  Runtime runtime;
  runtime.create = reinterpret_cast<decltype(runtime.create)>(address[0]);
  runtime.record = reinterpret_cast<decltype(runtime.record)>(address[1]);
  runtime.query = reinterpret_cast<decltype(runtime.query)>(address[2]);
  runtime.elapsed = reinterpret_cast<decltype(runtime.elapsed)>(address[3]);
  runtime.capturing = reinterpret_cast<decltype(runtime.capturing)>(address[4]);
  runtime.get_device = reinterpret_cast<decltype(runtime.get_device)>(address[5]);
  runtime.set_device = reinterpret_cast<decltype(runtime.set_device)>(address[6]);
  runtime.last_error = reinterpret_cast<decltype(runtime.last_error)>(address[7]);
  runtime.clock = address[8] != 0 ? reinterpret_cast<decltype(runtime.clock)>(address[8]) : now_ns;
  try {
    const auto device_type = std::string(kind) == "cuda" ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
    return make_object<Marking>(type, std::make_shared<Marking>(runtime, device_type, device, pool, raw_stream), nullptr);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}
inline PyObject* marking_mark(PyObject* self, PyObject*) {
  int64_t mark = Marks::kUnknown;
  void* stream = nullptr;
  value_of<Marking>(self).now(&mark, &stream);
  return PyLong_FromLongLong(mark);
}
inline bool read_handle(PyObject* number, void** handle) {
  *handle = reinterpret_cast<void*>(PyLong_AsUnsignedLongLong(number));
  return !PyErr_Occurred();
}
inline PyObject* marking_on(PyObject* self, PyObject* stream) {
  void* handle = nullptr;
  if (!read_handle(stream, &handle)) {
    return nullptr;
  }
  return PyLong_FromLongLong(value_of<Marking>(self).marks.on(handle));
}
inline PyObject* marking_ahead_of(PyObject* self, PyObject* mark) {
  const int64_t handle = PyLong_AsLongLong(mark);
  if (handle == -1 && PyErr_Occurred()) {
    return nullptr;
  }
  return PyBool_FromLong(value_of<Marking>(self).marks.ahead_of(handle));
}
inline PyObject* marking_bracket(PyObject* self, PyObject* args) {
  unsigned long long event = 0, stream = 0;
  long long limit = 0;
  if (!PyArg_ParseTuple(args, "KKL", &event, &stream, &limit)) {
    return nullptr;
  }
  int64_t before = 0, after = 0;
  bool came = false;
  Py_BEGIN_ALLOW_THREADS;
  came = value_of<Marking>(self).marks.bracket(reinterpret_cast<void*>(event), reinterpret_cast<void*>(stream), limit,
                                               &before, &after);
  Py_END_ALLOW_THREADS;
  if (!came) {
    Py_RETURN_NONE;
  }
  return Py_BuildValue("(LL)", static_cast<long long>(before), static_cast<long long>(after));
}
inline PyObject* marking_sweep(PyObject* self, PyObject* args) {
  unsigned long long event = 0;
  long long device_ns = 0;
  PyObject* line = nullptr;
  if (!PyArg_ParseTuple(args, "KLO!", &event, &device_ns, &PyList_Type, &line)) {
    return nullptr;
  }
  Knots knots;
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(line); ++place) {
    long long device = 0, host = 0;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(line, place), "LL", &device, &host)) {
      return nullptr;
    }
    knots.emplace_back(device, host);
  }
  auto& marks = value_of<Marking>(self).marks;
  Py_BEGIN_ALLOW_THREADS;
  marks.anchor(reinterpret_cast<void*>(event), device_ns, std::move(knots));
  marks.sweep();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}
inline PyObject* marking_resolve(PyObject* self, PyObject* times) {
  Py_buffer view;
  if (PyObject_GetBuffer(times, &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) != 0) {
    return nullptr;
  }
  auto* values = static_cast<int64_t*>(view.buf);
  const Py_ssize_t count = view.len / static_cast<Py_ssize_t>(sizeof(int64_t));
  auto& marks = value_of<Marking>(self).marks;
  Py_BEGIN_ALLOW_THREADS;
  for (Py_ssize_t place = 0; place < count; ++place) {
    values[place] = marks.resolve(values[place]);
  }
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&view);
  Py_RETURN_NONE;
}
inline PyMethodDef marking_methods[] = {
    {"mark", marking_mark, METH_NOARGS, "A mark on this thread's current stream."},
    {"on", marking_on, METH_O, "A mark on the stream of this handle."},
    {"ahead_of", marking_ahead_of, METH_O, "Is the device certainly not yet where the mark is?"},
    {"bracket", marking_bracket, METH_VARARGS, "(event, stream, limit_ns): host times around an event; None."},
    {"sweep", marking_sweep, METH_VARARGS, "(event, device_ns, knots): finish what the device has passed."},
    {"resolve", marking_resolve, METH_O, "Turn the marks in a buffer of int64 into times, in place."},
    {nullptr, nullptr, 0, nullptr},
};

// -------------------------------------------------------------------------------------------------------- types

template <typename Value>
PyTypeObject* make_type(const char* name, newfunc create, PyMethodDef* methods, getbufferproc buffer = nullptr) {
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(create)},
      {Py_tp_dealloc, reinterpret_cast<void*>(deallocate<Value>)},
      {Py_tp_methods, methods},
      {buffer != nullptr ? Py_bf_getbuffer : 0, reinterpret_cast<void*>(buffer)},
      {0, nullptr},
  };
  PyType_Spec spec{name, static_cast<int>(sizeof(Object<Value>)), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace trimtab
