// What the compiled kernels know: Python's side, groups, ends that were told, and how arguments and errors are read.

#pragma once

#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "native_lane.hpp"

namespace {

using c10::IValue;
using torch::jit::Stack;
using namespace trimtab;  // NOLINT: of one file only

// What an operator's arguments mean, by position (see operators.py); -1 where there is none.
struct Operator {
  PyObject* object = nullptr;
  size_t arguments = 0;
  int group_at = -1;
  int async_at = -1;
  int root_at = -1;
  int tag_at = -1;
  int counted_at = -1;
  bool times_members = false;
  bool collective = false;
};

struct Group {
  c10::weak_intrusive_ptr<torch::CustomClassHolder> process_group;
  PyObject* object;
  int64_t size;
};

// Python's side: called with the GIL, and everything here is read and written with it.
struct Python {
  PyObject* module = nullptr;
  PyObject* started = nullptr;
  PyObject* issued = nullptr;
  PyObject* wait_begins = nullptr;
  PyObject* wait_ends = nullptr;
  PyObject* complain = nullptr;
  PyObject* site_of = nullptr;
  PyObject* wake = nullptr;
  std::unordered_map<const void*, Group> groups;
  std::array<PyObject*, static_cast<size_t>(c10::ScalarType::NumOptions)> dtypes{};
};

// Ends of communications, told by threads of the backend that need not have the GIL for it.
struct Ends {
  std::mutex mutex;
  std::vector<std::pair<PyObject*, int64_t>> list;
  std::atomic<bool> any{false};
};

// The communication that a thread is just now telling Python about.
struct Issue {
  c10d::Work* work = nullptr;
  const IValue* outputs = nullptr;
  PyObject* met = nullptr;
};

// None of these is ever destroyed: threads of a backend may outlive static objects.
Python& python = *new Python;
Ends& ends = *new Ends;
std::vector<c10::RegistrationHandleRAII>& registrations = *new std::vector<c10::RegistrationHandleRAII>;
std::atomic<bool> attached{false};
std::shared_ptr<Lane>& open_lane = *new std::shared_ptr<Lane>;  // by std::atomic_load and atomic_store only
PyTypeObject *counter_type = nullptr, *store_type = nullptr, *marking_type = nullptr;
thread_local Issue issue;

const c10::DispatchKeySet after_select(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

// ------------------------------------------------------------------------------------------------------ errors

int raise_kept(void* kept) {
  auto* error = static_cast<PyObject*>(kept);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_DECREF(error);
  return -1;
}

PyObject* take_error() {
#if PY_VERSION_HEX >= 0x030C0000
  return PyErr_GetRaisedException();
#else
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return value;
#endif
}

// A failure of ours is reported, and that is all. What is no Exception (Ctrl-C, a signal handler that exits) happened
// to come while we ran, but is meant for the job: it is raised where the job's own code goes on.
void tell_error(PyObject* about) {
  PyObject* error = take_error();
  if (error == nullptr) {
    return;
  }
  if (!PyErr_GivenExceptionMatches(error, PyExc_Exception)) {
    if (Py_AddPendingCall(raise_kept, error) != 0) {
      Py_DECREF(error);
    }
    return;
  }
  PyObject* done = python.complain ? PyObject_CallFunctionObjArgs(python.complain, about, error, nullptr) : nullptr;
  Py_XDECREF(done);
  Py_DECREF(error);
  PyErr_Clear();
}

// ------------------------------------------------------------------------------------------------------- facts

const torch::CustomClassHolder* holder(const IValue& value) {
  return value.isObject() ? value.toObjectRef().getSlot(0).toCapsule().get() : nullptr;
}

int64_t bytes_of(const IValue& value) {
  const auto* tensor = value.isTensor() ? value.unsafeToTensorImpl() : nullptr;
  const bool dense = tensor != nullptr && tensor->layout() == c10::kStrided;
  return dense ? tensor->numel() * static_cast<int64_t>(tensor->itemsize()) : 0;
}

// Bytes of a tensor or of a list of them, and the type of the (first) tensor.
std::pair<int64_t, c10::ScalarType> measure(const IValue& value) {
  int64_t bytes = 0;
  auto dtype = c10::ScalarType::Undefined;
  try {
    if (value.isTensor()) {
      dtype = c10::typeMetaToScalarType(value.unsafeToTensorImpl()->dtype());
      bytes = bytes_of(value);
    } else if (value.isList()) {
      const auto list = value.toListRef();
      if (!list.empty() && list[0].isTensor()) {
        dtype = c10::typeMetaToScalarType(list[0].unsafeToTensorImpl()->dtype());
      }
      for (const auto& item : list) {
        bytes += bytes_of(item);
      }
    }
  } catch (const std::exception&) {  // a tensor whose size is not known
    bytes = 0;
  }
  return {bytes, dtype};
}

PyObject* name_of(c10::ScalarType dtype) {
  auto& name = python.dtypes.at(static_cast<size_t>(dtype));
  if (name == nullptr) {
    const bool known = dtype != c10::ScalarType::Undefined;
    name = PyUnicode_InternFromString(known ? std::string(c10::getDtypeNames(dtype).first).c_str() : "");
  }
  return name;
}

// A group of NCCL may take the short way from now on. Without its counter it cannot: with the GIL, and no error is kept.
void add_to(Lane& lane, const void* address, const Group& group) {
  PyObject* nccl = PyObject_GetAttrString(group.object, "is_nccl");
  PyObject* counter = PyObject_GetAttrString(group.object, "counter");
  if (nccl == Py_True && counter != nullptr && Py_TYPE(counter) == counter_type) {
    lane.add(address, LaneGroup{group.process_group, shared_value<Counter>(counter), group.size, {}});
  }
  Py_XDECREF(nccl);
  Py_XDECREF(counter);
  PyErr_Clear();
}

// The Group of a process group; one that is new is shown to Python by an operator of ours (see native.py).
const Group* group_of(const IValue& value) {
  const void* address = holder(value);
  if (address == nullptr) {
    return nullptr;
  }
  auto found = python.groups.find(address);
  if (found != python.groups.end()) {
    if (!found->second.process_group.expired()) {
      return &found->second;
    }
    Py_DECREF(found->second.object);
    python.groups.erase(found);
  }
  issue.met = nullptr;
  Stack stack{value};
  c10::Dispatcher::singleton().findSchemaOrThrow("trimtab::met", "").callBoxed(&stack);
  if (issue.met == nullptr) {
    return nullptr;
  }
  PyObject* object = std::exchange(issue.met, nullptr);
  PyObject* size = PyObject_GetAttrString(object, "size");
  const int64_t members = size ? PyLong_AsLongLong(size) : 1;
  Py_XDECREF(size);
  const auto weak = c10::weak_intrusive_ptr<torch::CustomClassHolder>(value.toObjectRef().getSlot(0).toCapsule());
  const Group* group = &python.groups.emplace(address, Group{weak, object, members}).first->second;
  if (const auto lane = std::atomic_load(&open_lane)) {
    add_to(*lane, address, *group);
  }
  return group;
}

}  // namespace
