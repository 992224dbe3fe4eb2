// SPDX-License-Identifier: Apache-2.0
// What bindings take: addresses, and tuples by position, which are Python's NamedTuples of lorakernels/values.py.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "device/dropout.h"
#include "device/float_type.h"

namespace lorakernels {

// An integer, or an object with a method data_ptr(); 0 for None.
struct Address {
  uintptr_t value = 0;

  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(value);
  }
};

// A struct with `members()` is taken as a tuple of as many entries.
template <typename... T>
constexpr auto in_order(T... members) {
  return std::tuple<T...>(members...);
}

struct Dropout {
  Address slot;
  double p;
  uint32_t site, row0, col0;
  Address dropped;
  RowChunks chunks;

  static constexpr auto members() {
    return in_order(&Dropout::slot, &Dropout::p, &Dropout::site, &Dropout::row0, &Dropout::col0, &Dropout::dropped,
                    &Dropout::chunks);
  }
};

struct Scaled {
  Address data, scale_inv;

  static constexpr auto members() { return in_order(&Scaled::data, &Scaled::scale_inv); }
};

struct Weight {
  Address data, scale_inv;

  static constexpr auto members() { return in_order(&Weight::data, &Weight::scale_inv); }
};

struct Up {
  Address B, s;
  float scaling = 1.0f;

  static constexpr auto members() { return in_order(&Up::B, &Up::s, &Up::scaling); }
};

// In the FP8 state: where a tensor's amax goes, and its scale, which is taken if it is above 0; and scratch memory.
struct Scale {
  Address amax, kept, partials;

  static constexpr auto members() { return in_order(&Scale::amax, &Scale::kept, &Scale::partials); }
};

struct Sizes {
  int64_t rows, cols;

  static constexpr auto members() { return in_order(&Sizes::rows, &Sizes::cols); }
};

struct RankSizes {
  int64_t rows, cols, rank;

  static constexpr auto members() { return in_order(&RankSizes::rows, &RankSizes::cols, &RankSizes::rank); }
};

struct Where {
  uintptr_t stream;
  int device;  // -1: the current one

  static constexpr auto members() { return in_order(&Where::stream, &Where::device); }
};

// Two dtypes, by torch's names.
struct Dtypes {
  std::string first, second;

  static constexpr auto members() { return in_order(&Dtypes::first, &Dtypes::second); }
};

inline FloatType float_type(const char* argument, const std::string& name) {
  if (name == "float32") return FloatType::kFloat32;
  if (name == "bfloat16") return FloatType::kBFloat16;
  if (name == "float16") return FloatType::kFloat16;
  throw std::invalid_argument(std::string(argument) + " must be 'float32', 'bfloat16' or 'float16', got '" + name +
                              "'");
}

inline FloatType half_type(const char* argument, const std::string& name) {
  const FloatType type = float_type(argument, name);
  if (type == FloatType::kFloat32) {
    throw std::invalid_argument(std::string(argument) + " must be 'bfloat16' or 'float16', got 'float32'");
  }
  return type;
}

inline bool is_e5m2(const char* argument, const std::string& format) {
  if (format != "e5m2" && format != "e4m3fn") {
    throw std::invalid_argument(std::string(argument) + " must be 'e5m2' or 'e4m3fn', got '" + format + "'");
  }
  return format == "e5m2";
}

// 65536 p rounded, halves up, at most 65535: the double arithmetic of numerics/dropout.py, so that no p is rounded to
// another integer.
inline uint32_t dropout_threshold(double p) {
  if (!(p >= 0.0 && p < 1.0)) {
    throw std::invalid_argument("p must be in [0, 1), got " + std::to_string(p));
  }
  return std::min(static_cast<uint32_t>(kDropoutLaneRange * p + 0.5), kDropoutLaneRange - 1);
}

inline DropoutParams params_of(const std::optional<Dropout>& dropout) {
  if (!dropout) return {};
  const uint32_t threshold = dropout_threshold(dropout->p);
  if (threshold > 0 && dropout->slot.value == 0) throw std::invalid_argument("slot must be given where p > 0");
  const RowsOfTensor rows(dropout->row0, dropout->chunks);
  return {{dropout->slot.as<const int64_t>(), dropout->site, threshold, dropout->col0}, rows};
}

}  // namespace lorakernels

namespace pybind11::detail {

template <>
struct type_caster<lorakernels::Address> {
  PYBIND11_TYPE_CASTER(lorakernels::Address, const_name("int"));

  bool load(handle source, bool) {
    value.value = 0;
    if (source.is_none()) return true;
    object number = reinterpret_borrow<object>(source);
    if (!PyLong_Check(source.ptr())) {
      if (!hasattr(source, "data_ptr")) return false;
      number = source.attr("data_ptr")();
    }
    value.value = PyLong_AsUnsignedLongLong(number.ptr());
    if (PyErr_Occurred() != nullptr) throw error_already_set();
    return true;
  }
};

// () or [] where rows are not shared; else three integers.
template <>
struct type_caster<lorakernels::RowChunks> {
  PYBIND11_TYPE_CASTER(lorakernels::RowChunks, const_name("Sequence[int]"));

  bool load(handle source, bool) {
    value = {};
    if (!PyTuple_Check(source.ptr()) && !PyList_Check(source.ptr())) return false;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(source.ptr());
    if (count != 0 && count != 3) return false;
    uint32_t* const to[] = {&value.rank, &value.ranks, &value.size};
    for (Py_ssize_t i = 0; i < count; ++i) {
      make_caster<uint32_t> caster;
      if (!caster.load(PySequence_Fast_GET_ITEM(source.ptr(), i), false)) return false;
      *to[i] = cast_op<uint32_t>(caster);
    }
    return true;
  }
};

// pybind11's own casters of tuples ask for each entry through the protocol of sequences, which takes a microsecond more
// in a call with several tuples.
template <typename T>
struct type_caster<T, std::void_t<decltype(T::members())>> {
  PYBIND11_TYPE_CASTER(T, const_name("tuple"));

  bool load(handle source, bool convert) {
    constexpr size_t kCount = std::tuple_size_v<decltype(T::members())>;
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != static_cast<Py_ssize_t>(kCount)) return false;
    return load_each(source.ptr(), convert, std::make_index_sequence<kCount>());
  }

 private:
  template <size_t... I>
  bool load_each(PyObject* tuple, bool convert, std::index_sequence<I...>) {
    return (load_one(value.*std::get<I>(T::members()), PyTuple_GET_ITEM(tuple, I), convert) && ...);
  }

  template <typename Member>
  static bool load_one(Member& member, PyObject* entry, bool convert) {
    make_caster<Member> caster;
    if (!caster.load(entry, convert)) return false;
    member = cast_op<Member>(std::move(caster));
    return true;
  }
};

}  // namespace pybind11::detail
