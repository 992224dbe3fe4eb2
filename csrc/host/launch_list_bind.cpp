// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstring>
#include <map>

#include "bindings/register.h"
#include "host/kernel_launch.h"
#include "host/launch_list.h"

namespace lorakernels {
namespace {

uint64_t unsigned_of(PyObject* number) {
  const auto value = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

// Of a number, or of a tensor, which is asked for its data_ptr().
uint64_t address_of(PyObject* given) {
  if (PyLong_Check(given)) return unsigned_of(given);
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  const auto found = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(given, data_ptr));
  if (!found && PyErr_ExceptionMatches(PyExc_AttributeError) != 0) {
    PyErr_Clear();
    throw py::type_error(std::string("addresses must be integers or tensors, got ") + Py_TYPE(given)->tp_name);
  }
  if (!found) throw py::error_already_set();
  return unsigned_of(found.ptr());
}

int device_of(PyObject* number) {
  const long value = PyLong_AsLong(number);
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return static_cast<int>(value);
}

size_t length_of(const char* argument, PyObject* tuple) {
  if (!PyTuple_Check(tuple)) throw py::type_error(std::string(argument) + " must be a tuple");
  const auto length = static_cast<size_t>(PyTuple_GET_SIZE(tuple));
  if (length > LaunchValues::kMost) {
    throw std::invalid_argument(std::string(argument) + " must have at most " + std::to_string(LaunchValues::kMost) +
                                " entries, got " + std::to_string(length));
  }
  return length;
}

// Fills `values`; false if an address of an aligned base is no multiple of 16.
bool read(const LaunchList& list, PyObject* addresses, PyObject* sites, LaunchValues* values) {
  const size_t bases = length_of("addresses", addresses), streams = length_of("sites", sites);
  for (size_t i = 0; i < bases; ++i) {
    values->addresses[i] = address_of(PyTuple_GET_ITEM(addresses, static_cast<Py_ssize_t>(i)));
  }
  for (size_t i = 0; i < streams; ++i) {
    const uint64_t site = unsigned_of(PyTuple_GET_ITEM(sites, static_cast<Py_ssize_t>(i)));
    if (site > UINT32_MAX) throw std::invalid_argument("sites must be below 2^32, got " + std::to_string(site));
    values->sites[i] = static_cast<uint32_t>(site);
  }
  return list.takes(*values, bases, streams);
}

bool run(PyObject* self, PyObject* const* arguments) {
  const auto& list = py::handle(self).cast<const LaunchList&>();
  const uint64_t stream = unsigned_of(arguments[2]);
  const int device = device_of(arguments[3]);
  LaunchValues values;
  if (!read(list, arguments[0], arguments[1], &values)) return false;
  list.launch(values, reinterpret_cast<void*>(stream), device);
  return true;
}

PyObject* run_method(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "run() takes 4 positional arguments, got %zd", count);
  try {
    return PyBool_FromLong(run(self, arguments));
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// A method of C because the call of a pybind11 method takes several times as long.
PyMethodDef run_definition = {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_method)),
                              METH_FASTCALL, "run(addresses, sites, stream, device)"};

py::list calls(const LaunchList& list, const py::tuple& addresses, const py::tuple& sites) {
  LaunchValues values;
  read(list, addresses.ptr(), sites.ptr(), &values);
  return py::cast(list.calls(values));
}

void place(LaunchList& list, const std::vector<std::pair<size_t, uint64_t>>& places, const std::vector<bool>& aligned) {
  std::vector<LaunchList::Place> each;
  for (const auto& [base, offset] : places) each.push_back({base, offset});
  list.place(each, aligned);
}

template <typename T>
uint64_t bits_of(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));  // the host is little-endian
  return bits;
}

// By Triton's name of the type.
KernelParameter parameter_of(const std::string& type, const py::object& value) {
  static const std::map<std::string, uint64_t (*)(const py::object&)> kReaders{
      {"*", [](const py::object& v) { return v.cast<uint64_t>(); }},
      {"i8", [](const py::object& v) { return bits_of(v.cast<int8_t>()); }},
      {"i16", [](const py::object& v) { return bits_of(v.cast<int16_t>()); }},
      {"i32", [](const py::object& v) { return bits_of(v.cast<int32_t>()); }},
      {"i64", [](const py::object& v) { return bits_of(v.cast<int64_t>()); }},
      {"u8", [](const py::object& v) { return bits_of(v.cast<uint8_t>()); }},
      {"u16", [](const py::object& v) { return bits_of(v.cast<uint16_t>()); }},
      {"u32", [](const py::object& v) { return bits_of(v.cast<uint32_t>()); }},
      {"u64", [](const py::object& v) { return bits_of(v.cast<uint64_t>()); }},
      {"fp32", [](const py::object& v) { return bits_of(v.cast<float>()); }},
      {"fp64", [](const py::object& v) { return bits_of(v.cast<double>()); }}};
  const auto reader = kReaders.find(type);
  if (reader == kReaders.end()) {
    throw std::invalid_argument(
        "parameters must be of type '*', 'i8' to 'i64', 'u8' to 'u64', 'fp32' or 'fp64', got '" + type + "'");
  }
  try {
    return {type == "*", reader->second(value)};
  } catch (const py::cast_error&) {
    throw std::invalid_argument("a parameter of type '" + type + "' cannot be " + py::repr(value).cast<std::string>());
  }
}

void record_kernel(uintptr_t function, const std::array<uint32_t, 3>& grid, uint32_t threads, uint32_t shared_bytes,
                   bool early, const std::vector<std::pair<std::string, py::object>>& parameters) {
  LaunchList* const list = LaunchList::recording();
  if (list == nullptr) throw std::runtime_error("record_kernel: this thread records into no LaunchList");
  if (function == 0) throw std::invalid_argument("record_kernel: function must not be 0");
  if (parameters.size() > KernelLaunch::kMostParameters) {
    throw std::invalid_argument("record_kernel: parameters must be at most " +
                                std::to_string(KernelLaunch::kMostParameters) + ", got " +
                                std::to_string(parameters.size()));
  }
  auto kernel = std::make_unique<KernelLaunch>();
  kernel->function = reinterpret_cast<void*>(function);
  kernel->grid = grid, kernel->threads = threads, kernel->shared_bytes = shared_bytes, kernel->early = early;
  for (const auto& [type, value] : parameters) kernel->parameters.push_back(parameter_of(type, value));
  if (grid[0] > 0 && grid[1] > 0 && grid[2] > 0) list->append(std::move(kernel));
}

}  // namespace

void register_launch_list(py::module_& m) {
  py::class_<LaunchList, std::shared_ptr<LaunchList>> type(
      m, "LaunchList", "Launches that are recorded once and run with other addresses (csrc/host/launch_list.h)");
  type.def(py::init<>())
      .def("begin", &LaunchList::begin)
      .def("end", &LaunchList::end)
      .def("place", &place, py::arg("places"), py::arg("aligned"))
      .def("calls", &calls, py::arg("addresses"), py::arg("sites"))
      .def("__len__", &LaunchList::size);
  const auto descriptor = py::reinterpret_steal<py::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &run_definition));
  if (!descriptor) throw py::error_already_set();
  type.attr("run") = descriptor;
  m.def("record_kernel", &record_kernel, py::arg("function"), py::arg("grid"), py::arg("threads"),
        py::arg("shared_bytes"), py::arg("early"), py::arg("parameters"),
        "Appends the launch of a CUfunction to the list that this thread records into");
}

}  // namespace lorakernels
