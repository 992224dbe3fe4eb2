// SPDX-License-Identifier: Apache-2.0
// float <-> FP8 bytes, rounded to nearest even. Finite overflow and infinity saturate to the largest finite value. NaN
// stays NaN (0x7F with the sign bit). The bits are those of torch's x.clamp(-max, max).to(float8 dtype).
#pragma once

#include <cstdint>
#include <cstring>

#include "device/platform.h"

namespace lorakernels {

// e4m3fn has no infinity: its all-ones exponent holds finite values up to 448, and only 0x7F is NaN.
struct E4M3 {
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr uint8_t kMaxFinite = 0x7E;
  static constexpr float kMax = 448.0f;
};

struct E5M2 {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr uint8_t kMaxFinite = 0x7B;
  static constexpr float kMax = 57344.0f;
};

constexpr uint8_t kFp8Nan = 0x7F;

LORAKERNELS_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

LORAKERNELS_HD float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// value / 2^shift to the nearest integer, ties to even; shift >= 1.
LORAKERNELS_HD uint32_t shift_right_rne(uint32_t value, int shift) {
  if (shift > 31) return 0;
  const uint32_t kept = value >> shift;
  const uint32_t rest = value & ((1u << shift) - 1);
  const uint32_t half = 1u << (shift - 1);
  return kept + (rest > half || (rest == half && (kept & 1u)));
}

template <typename Format>
LORAKERNELS_HD uint8_t fp8_encode(float x) {
  const uint32_t bits = float_bits(x);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | kFp8Nan;
  if (magnitude >= float_bits(Format::kMax)) return sign | Format::kMaxFinite;
  const int exponent = static_cast<int>(magnitude >> 23) - 127 + Format::kBias;
  const uint32_t mantissa = (magnitude & 0x7FFFFFu) | (magnitude >= 0x800000u ? 0x800000u : 0u);
  const int drop = 23 - Format::kMantissaBits;
  // Below the format's normal numbers the exponent stays 1 and the mantissa is shifted right.
  const uint32_t rounded = exponent >= 1 ? shift_right_rne(mantissa, drop) + ((exponent - 1) << Format::kMantissaBits)
                                         : shift_right_rne(mantissa, drop + 1 - exponent);
  return sign | static_cast<uint8_t>(rounded);
}

template <typename Format>
LORAKERNELS_HD float fp8_decode(uint8_t byte) {
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80u) << 24;
  const uint32_t magnitude = byte & 0x7Fu;
  if (magnitude > Format::kMaxFinite) {
    const bool infinite = magnitude == Format::kMaxFinite + 1u && magnitude != kFp8Nan;
    return bits_float(sign | (infinite ? 0x7F800000u : 0x7FC00000u));
  }
  const uint32_t exponent = magnitude >> Format::kMantissaBits;
  const uint32_t mantissa = magnitude & ((1u << Format::kMantissaBits) - 1);
  if (exponent == 0) {
    const float smallest = bits_float(static_cast<uint32_t>(127 + 1 - Format::kBias - Format::kMantissaBits) << 23);
    return bits_float(sign | float_bits(static_cast<float>(mantissa) * smallest));
  }
  return bits_float(sign | ((exponent + 127 - Format::kBias) << 23) | (mantissa << (23 - Format::kMantissaBits)));
}

}  // namespace lorakernels
