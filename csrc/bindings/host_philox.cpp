// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <stdexcept>
#include <string>

#include "bindings/register.h"
#include "bindings/values.h"
#include "device/dropout.h"
#include "device/philox.h"

namespace lorakernels {
namespace {

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  PhiloxDraw draw[1] = {{{counter[0], counter[1], counter[2], counter[3]}}};
  philox4x32_10(draw, key[0], key[1]);
  return {draw[0].word[0], draw[0].word[1], draw[0].word[2], draw[0].word[3]};
}

bool dropout_keep(uint32_t row, uint32_t col, uint64_t seed, uint64_t offset, uint32_t site, uint32_t threshold) {
  check_threshold(threshold);
  return dropout_keeps(dropout_draw(row, col / kDropoutLanesPerDraw, seed, offset, site), col, threshold);
}

void dropout_mask_host(Address out, const Sizes& sizes, const Dropout& dropout) {
  const auto [rows, cols] = sizes;
  check_sizes("dropout_mask_host", {{"rows", rows}, {"cols", cols}});
  const DropoutParams draw = params_of(dropout);
  const uint64_t seed = draw.slot == nullptr ? 0 : static_cast<uint64_t>(draw.slot[0]);
  const uint64_t offset = draw.slot == nullptr ? 0 : static_cast<uint64_t>(draw.slot[1]);
  const uint32_t first_col = draw.first_col;
  auto* mask = out.as<uint8_t>();
  for (int64_t r = 0; r < rows; ++r) {
    const uint32_t row = draw.rows(static_cast<uint32_t>(r));
    for (int64_t c = 0; c < cols;) {
      const uint32_t group = (first_col + static_cast<uint32_t>(c)) / kDropoutLanesPerDraw;
      const PhiloxDraw lanes = dropout_draw(row, group, seed, offset, draw.site);
      do {
        mask[r * cols + c] = dropout_keeps(lanes, first_col + static_cast<uint32_t>(c), draw.threshold);
        ++c;
      } while (c < cols && (first_col + static_cast<uint32_t>(c)) % kDropoutLanesPerDraw != 0);
    }
  }
}

// torch's kernel gives each of the two numbers a thread of its own, and a draw of 64 bits. It takes them modulo the
// number of values, 2^64 - 2, and adds the lowest.
void torch_slots_host(uintptr_t out, int64_t count, uint64_t seed, uint64_t offset) {
  check_sizes("torch_slots_host", {{"count", count}});
  constexpr uint64_t kMost = (uint64_t{1} << 63) - 1;
  auto* slots = reinterpret_cast<uint64_t*>(out);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t group = offset / 4 + static_cast<uint64_t>(i);
    for (uint32_t thread = 0; thread < 2; ++thread) {
      const auto word = philox({static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), thread, 0},
                               {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
      slots[2 * i + thread] = (uint64_t{word[0]} << 32 | word[1]) % (2 * kMost) - kMost;
    }
  }
}

}  // namespace

void register_philox(py::module_& m) {
  m.def("philox4x32_10", &philox, py::arg("counter"), py::arg("key"));
  m.def("dropout_threshold", &dropout_threshold, py::arg("p"), "65536 p rounded, halves up, at most 65535");
  m.def(
      "dropout_survivor_scale",
      [](uint32_t threshold) {
        check_threshold(threshold);
        return dropout_survivor_scale(threshold);
      },
      py::arg("threshold"));
  m.def("dropout_keep", &dropout_keep, py::arg("row"), py::arg("col"), py::arg("seed"), py::arg("offset"),
        py::arg("site"), py::arg("threshold"));
  m.def("dropout_mask_host", &dropout_mask_host, py::arg("out"), py::arg("sizes"), py::arg("dropout"),
        py::call_guard<py::gil_scoped_release>(),
        "Writes the row-major uint8 keep mask [rows, cols] in host memory, in which the slot is, too");
  m.def("torch_slots_host", &torch_slots_host, py::arg("out"), py::arg("count"), py::arg("seed"), py::arg("offset"),
        "Writes int64 [count, 2] at the host address out: in row i what torch.randint(-(2**63 - 1), 2**63 - 1, (2,)) "
        "draws from a CUDA generator with this seed at offset + 4 i, offset being a multiple of 4");
}

}  // namespace lorakernels
