// The interception of communication without Python's dispatcher kernels: see native.py.
//
// A Python kernel has every argument made into a Python object and back, twice: ten microseconds and more for each
// communication. This one reads the few facts that are wanted where they lie, hands them to Interception as plain
// numbers, and passes the arguments on untouched. What is recorded is decided there, once for both kinds of kernels.
// Nothing in here may throw into the job.

#include "native_state.hpp"

namespace {

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

// Number of the site of what takes the short way; -1 where it cannot be had.
int64_t ask_for_site(const Operator& op, const void* address, c10::ScalarType dtype, int64_t root, bool foreground) {
  const Gil gil;
  const auto group = python.groups.find(address);
  if (python.site_of == nullptr || group == python.groups.end()) {
    return -1;
  }
  PyObject* number = PyLong_FromLongLong(root);
  PyObject* facts[] = {op.object, group->second.object, name_of(dtype), number, foreground ? Py_True : Py_False};
  PyObject* found = PyObject_Vectorcall(python.site_of, facts, 5, nullptr);
  Py_XDECREF(number);
  const int64_t site = found != nullptr ? PyLong_AsLongLong(found) : -1;
  Py_XDECREF(found);
  if (PyErr_Occurred()) {
    tell_error(op.object);
    return -1;
  }
  return site;
}

int wake_writer(void*) {  // in the main thread
  PyObject* done = python.wake != nullptr ? PyObject_CallNoArgs(python.wake) : nullptr;
  if (done == nullptr && PyErr_Occurred()) {
    tell_error(Py_None);
  }
  Py_XDECREF(done);
  return 0;
}

enum class Way { kLong, kUnseen, kSeen };

// Is the short way for this one, and is it to be recorded there?
Way enter(Lane& lane, const Operator& op, const IValue* arguments, Passage* passage) noexcept {
  bool counted = false;
  try {
    const IValue& async = arguments[op.async_at];
    const void* address = holder(arguments[op.group_at]);
    if (!async.isBool() || async.toBool() || !lane.enter(address, passage)) {
      return Way::kLong;
    }
    counted = true;
    if (!lane.active.load(std::memory_order_acquire)) {
      return Way::kUnseen;
    }
    auto dtype = c10::ScalarType::Undefined;
    if (op.counted_at >= 0) {
      std::tie(passage->bytes, dtype) = measure(arguments[op.counted_at]);
    }
    passage->bytes *= op.times_members ? passage->members : 1;
    const int64_t root = integer_at(arguments, op.root_at);
    const bool foreground = lane.in_foreground();
    const SiteKey key{&op, static_cast<int>(dtype), root, foreground};
    passage->site = lane.site(address, key);
    if (passage->site == Lane::kNew) {
      passage->site = ask_for_site(op, address, dtype, root, foreground);
      if (passage->site >= 0) {
        lane.learn(address, key, passage->site);
      }
    }
    return passage->site >= 0 && lane.begin(passage) ? Way::kSeen : Way::kUnseen;
  } catch (...) {
    return counted ? Way::kUnseen : Way::kLong;
  }
}

void leave(Lane& lane, const Passage& passage) noexcept {
  if (lane.end(passage)) {
    Py_AddPendingCall(wake_writer, nullptr);
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
    const auto lane = op.collective && op.async_at >= 0 ? std::atomic_load(&open_lane) : nullptr;
    if (lane != nullptr && stack->size() >= op.arguments) {
      Passage passage;
      const Way way = enter(*lane, op, stack->data() + (stack->size() - op.arguments), &passage);
      if (way != Way::kLong) {
        handle.redispatchBoxed(keys & after_select, stack);
        if (way == Way::kSeen) {
          leave(*lane, passage);
        }
        return;
      }
    }
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
  std::atomic_store(&open_lane, std::shared_ptr<Lane>());
  registrations.clear();
  for (auto* object : {&python.module, &python.started, &python.issued, &python.wait_begins, &python.wait_ends,
                       &python.complain, &python.site_of, &python.wake}) {
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
      int times = 0, collective = 0;
      if (!PyArg_ParseTuple(PyList_GetItem(rows, row), "ssOiiiiipp", &name, &overload, &op->object, &op->group_at,
                            &op->async_at, &op->root_at, &op->tag_at, &op->counted_at, &times, &collective)) {
        let_go();
        return nullptr;
      }
      Py_INCREF(op->object);
      op->times_members = times != 0;
      op->collective = collective != 0;
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

PyObject* py_open_lane(PyObject*, PyObject* args) {
  PyObject *store, *marking, *ids, *site_of, *wake;
  unsigned long long main = 0;
  if (!PyArg_ParseTuple(args, "O!O!O!OOK", store_type, &store, marking_type, &marking, counter_type, &ids, &site_of, &wake,
                        &main)) {
    return nullptr;
  }
  Py_XSETREF(python.site_of, Py_NewRef(site_of));
  Py_XSETREF(python.wake, Py_NewRef(wake));
  auto lane = std::make_shared<Lane>(shared_value<Ring>(store), shared_value<Marking>(marking), shared_value<Counter>(ids), main);
  for (const auto& [address, group] : python.groups) {
    add_to(*lane, address, group);
  }
  std::atomic_store(&open_lane, std::move(lane));
  Py_RETURN_NONE;
}

PyObject* py_lane_step(PyObject*, PyObject* args) {
  long long step = -1;
  int active = 0;
  if (!PyArg_ParseTuple(args, "Lp", &step, &active)) {
    return nullptr;
  }
  if (const auto lane = std::atomic_load(&open_lane)) {
    lane->step.store(step, std::memory_order_relaxed);
    lane->active.store(active != 0, std::memory_order_release);
  }
  Py_RETURN_NONE;
}

PyObject* py_close_lane(PyObject*, PyObject* args) {
  int reason = 0, closed = 0;
  if (!PyArg_ParseTuple(args, "ip", &reason, &closed)) {
    return nullptr;
  }
  if (const auto lane = std::atomic_load(&open_lane)) {
    closed ? lane->closed.fetch_or(reason) : lane->closed.fetch_and(~reason);
  }
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
    {"open_lane", py_open_lane, METH_VARARGS, "Let synchronous collectives of NCCL go the short way."},
    {"lane_step", py_lane_step, METH_VARARGS, "(step, active): what the short way records."},
    {"close_lane", py_close_lane, METH_VARARGS, "(reason, closed): the short way is closed while any reason says so."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "trimtab_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_trimtab_native() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) {
    return nullptr;
  }
  counter_type = make_type<Counter>("trimtab_native.Counter", counter_new, counter_methods);
  store_type = make_type<Ring>("trimtab_native.Store", store_new, store_methods, store_buffer);
  marking_type = make_type<Marking>("trimtab_native.Marks", marking_new, marking_methods);
  for (auto* type : {counter_type, store_type, marking_type}) {
    if (type == nullptr || PyModule_AddType(module, type) != 0) {
      Py_DECREF(module);
      return nullptr;
    }
  }
  return module;
}
