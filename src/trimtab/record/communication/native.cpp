// The interception of communication without Python's dispatcher kernels: see native.py.
//
// A Python kernel has every argument made into a Python object and back, twice: ten microseconds and more for each
// communication. This one reads the few facts that are wanted where they lie, hands them to Interception as plain
// numbers, and passes the arguments on untouched. What is recorded is decided there, once for both kinds of kernels.
// Nothing in here may throw into the job.

#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <atomic>
#include <ctime>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using torch::jit::Stack;

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

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
thread_local Issue issue;

const c10::DispatchKeySet after_select(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

int64_t now_ns() {  // as time.perf_counter_ns
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

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
  return &python.groups.emplace(address, Group{weak, object, members}).first->second;
}

// ----------------------------------------------------------------------------------------------------- kernels

int64_t integer_at(const IValue* arguments, int position) {
  return position >= 0 && arguments[position].isInt() ? arguments[position].toInt() : -1;
}

PyObject* begin(const Operator& op, const IValue* arguments) noexcept {
  try {
    const bool in_place = op.async_at >= 0 && arguments[op.async_at].isBool() && !arguments[op.async_at].toBool();
    auto [bytes, dtype] = op.counted_at < 0 ? std::pair<int64_t, c10::ScalarType>{0, c10::ScalarType::Undefined}
                                            : measure(arguments[op.counted_at]);
    const Gil gil;
    if (python.started == nullptr) {
      return nullptr;
    }
    const Group* group = group_of(arguments[op.group_at]);
    if (group == nullptr) {
      return nullptr;
    }
    if (op.times_members) {
      bytes *= group->size;
    }
    PyObject* root = PyLong_FromLongLong(integer_at(arguments, op.root_at));
    PyObject* tag = PyLong_FromLongLong(integer_at(arguments, op.tag_at));
    PyObject* size = PyLong_FromLongLong(bytes);
    PyObject* depth = PyLong_FromLong(1);
    PyObject* facts[] = {op.object, group->object, root, tag, in_place ? Py_True : Py_False, size, name_of(dtype), depth};
    PyObject* pending = PyObject_Vectorcall(python.started, facts, 8, nullptr);
    for (PyObject* made : {root, tag, size, depth}) {
      Py_XDECREF(made);
    }
    if (pending == nullptr) {
      tell_error(op.object);
    } else if (pending == Py_None) {
      Py_CLEAR(pending);
    }
    return pending;
  } catch (...) {
    return nullptr;
  }
}

// `pending` is given away.
void issued(const Operator& op, PyObject* pending, const Stack& stack, const IValue& outputs) noexcept {
  try {
    c10::intrusive_ptr<torch::CustomClassHolder> work;
    if (!stack.empty() && stack.back().isObject()) {  // the work is what an operator returns last
      work = stack.back().toObjectRef().getSlot(0).toCapsule();
    }
    const Gil gil;
    if (python.issued != nullptr) {
      issue.work = static_cast<c10d::Work*>(work.get());
      issue.outputs = &outputs;
      PyObject* address = PyLong_FromSize_t(reinterpret_cast<size_t>(issue.work));
      PyObject* facts[] = {pending, address, python.module};
      PyObject* done = PyObject_Vectorcall(python.issued, facts, 3, nullptr);
      issue.work = nullptr;
      issue.outputs = nullptr;
      Py_XDECREF(address);
      if (done == nullptr) {
        tell_error(op.object);
      }
      Py_XDECREF(done);
    }
    Py_DECREF(pending);
  } catch (...) {
  }
}

void forget(PyObject* pending) noexcept {
  const Gil gil;
  Py_DECREF(pending);
}

class Communication final : public c10::OperatorKernel {
 public:
  explicit Communication(const Operator* op) : op_(op) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
    const Operator& op = *op_;  // it outlives this kernel, which may be removed while the call is under way
    PyObject* pending = nullptr;
    IValue outputs;
    if (attached.load(std::memory_order_acquire) && stack->size() >= op.arguments) {
      const IValue* arguments = stack->data() + (stack->size() - op.arguments);
      pending = begin(op, arguments);
      if (pending != nullptr) {
        outputs = arguments[0];
      }
    }
    if (pending == nullptr) {
      handle.redispatchBoxed(keys & after_select, stack);
      return;
    }
    try {
      handle.redispatchBoxed(keys & after_select, stack);
    } catch (...) {
      forget(pending);
      throw;
    }
    issued(op, pending, *stack, outputs);
  }

 private:
  const Operator* op_;
};

const void* data_of(const IValue& value) noexcept {
  try {
    return value.isTensor() && value.unsafeToTensorImpl()->has_storage() ? value.unsafeToTensorImpl()->data() : nullptr;
  } catch (...) {
    return nullptr;
  }
}

PyObject* call_one(PyObject* function, PyObject* argument) noexcept {
  PyObject* result = function && argument ? PyObject_CallOneArg(function, argument) : nullptr;
  if (result == nullptr && PyErr_Occurred()) {
    tell_error(Py_None);
  }
  return result;
}

class WaitTensor final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
    PyObject* pending = nullptr;
    const void* data = attached.load(std::memory_order_acquire) ? data_of(stack->back()) : nullptr;
    if (data != nullptr) {
      const Gil gil;
      PyObject* address = PyLong_FromSize_t(reinterpret_cast<size_t>(data));
      pending = call_one(python.wait_begins, address);
      Py_XDECREF(address);
      if (pending == Py_None) {
        Py_CLEAR(pending);
      }
    }
    try {
      handle.redispatchBoxed(keys & after_select, stack);
    } catch (...) {
      if (pending != nullptr) {
        forget(pending);
      }
      throw;
    }
    if (pending != nullptr) {
      const Gil gil;
      Py_XDECREF(call_one(python.wait_ends, pending));
      Py_DECREF(pending);
    }
  }
};

// ------------------------------------------------------------------------------------------- called from Python

void let_go() {
  attached.store(false, std::memory_order_release);
  registrations.clear();
  for (auto* object : {&python.module, &python.started, &python.issued, &python.wait_begins, &python.wait_ends,
                       &python.complain}) {
    Py_CLEAR(*object);
  }
  for (auto& known : python.groups) {
    Py_DECREF(known.second.object);
  }
  python.groups.clear();
}

void put_in(const char* name, const char* overload, c10::KernelFunction kernel) {
  registrations.emplace_back(c10::Dispatcher::singleton().registerImpl(
      c10::OperatorName(name, overload), c10::DispatchKey::BackendSelect, std::move(kernel), std::nullopt, nullptr, "trimtab"));
}

PyObject* py_install(PyObject* module, PyObject* args) {
  PyObject *rows, *started, *issued_, *begins, *ends_, *complain;
  if (!PyArg_ParseTuple(args, "O!OOOOO", &PyList_Type, &rows, &started, &issued_, &begins, &ends_, &complain)) {
    return nullptr;
  }
  try {
    for (Py_ssize_t row = 0; row < PyList_Size(rows); ++row) {
      auto* op = new Operator;  // never freed, see above
      const char *name, *overload;
      int times = 0;
      if (!PyArg_ParseTuple(PyList_GetItem(rows, row), "ssOiiiiip", &name, &overload, &op->object, &op->group_at,
                            &op->async_at, &op->root_at, &op->tag_at, &op->counted_at, &times)) {
        let_go();
        return nullptr;
      }
      Py_INCREF(op->object);
      op->times_members = times != 0;
      op->arguments = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).schema().arguments().size();
      put_in(name, overload, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Communication>(op)));
    }
    put_in("_c10d_functional::wait_tensor", "", c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<WaitTensor>()));
  } catch (const std::exception& error) {
    let_go();
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  python.module = Py_NewRef(module);
  python.started = Py_NewRef(started);
  python.issued = Py_NewRef(issued_);
  python.wait_begins = Py_NewRef(begins);
  python.wait_ends = Py_NewRef(ends_);
  python.complain = Py_NewRef(complain);
  attached.store(true, std::memory_order_release);
  Py_RETURN_NONE;
}

PyObject* py_remove(PyObject*, PyObject*) {
  let_go();
  Py_RETURN_NONE;
}

PyObject* py_met(PyObject*, PyObject* group) {
  issue.met = Py_NewRef(group);
  Py_RETURN_NONE;
}

PyObject* py_call_back(PyObject*, PyObject* pending) {
  try {
    const auto future = issue.work != nullptr ? issue.work->getFuture() : nullptr;
    if (future == nullptr) {
      Py_RETURN_FALSE;
    }
    Py_INCREF(pending);
    const auto tell = [pending](c10::ivalue::Future&) {
      const int64_t end = now_ns();
      const std::lock_guard<std::mutex> lock(ends.mutex);
      ends.list.emplace_back(pending, end);
      ends.any.store(true, std::memory_order_release);
    };
    future->addCallback(tell, /*uses_future=*/false);
    Py_RETURN_TRUE;
  } catch (const std::exception&) {  // the backend has no future for this operator
    Py_RETURN_FALSE;
  }
}

PyObject* py_outputs(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  const auto add = [list](const IValue& value) {
    const void* data = data_of(value);
    PyObject* address = data ? PyLong_FromSize_t(reinterpret_cast<size_t>(data)) : nullptr;
    if (address != nullptr) {
      PyList_Append(list, address);
      Py_DECREF(address);
    }
  };
  if (list != nullptr && issue.outputs != nullptr) {
    if (issue.outputs->isList()) {
      for (const auto& value : issue.outputs->toListRef()) {
        add(value);
      }
    } else {
      add(*issue.outputs);
    }
  }
  return list;
}

PyObject* py_told(PyObject*, PyObject*) {
  if (!ends.any.load(std::memory_order_acquire)) {
    Py_RETURN_NONE;
  }
  std::vector<std::pair<PyObject*, int64_t>> told;
  {
    const std::lock_guard<std::mutex> lock(ends.mutex);
    told.swap(ends.list);
    ends.any.store(false, std::memory_order_release);
  }
  PyObject* list = PyList_New(0);
  for (const auto& [pending, end] : told) {
    PyObject* entry = list ? Py_BuildValue("(NL)", pending, static_cast<long long>(end)) : nullptr;
    if (entry != nullptr) {
      PyList_Append(list, entry);
      Py_DECREF(entry);
    }
  }
  return list;
}

PyMethodDef methods[] = {
    {"install", py_install, METH_VARARGS, "Put the kernels in place."},
    {"remove", py_remove, METH_NOARGS, "Take them away."},
    {"met", py_met, METH_O, "Give the group of the process group that was shown."},
    {"call_back", py_call_back, METH_O, "See to it that the end of what is being issued is told; False if it cannot be."},
    {"outputs", py_outputs, METH_NOARGS, "Addresses of the data that what is being issued produces."},
    {"told", py_told, METH_NOARGS, "Ends since the last call: [(pending, nanoseconds)], or None."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "trimtab_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_trimtab_native() { return PyModule_Create(&definition); }
