# SPDX-License-Identifier: Apache-2.0
"""csrc/host/device.cu with a CUDA runtime that counts calls: what is asked once, and when again; needs no GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
RUNTIME = """
#pragma once
#include <atomic>
#include <cstddef>
using cudaError_t = int;
enum { cudaSuccess = 0 };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor = 9, cudaDevAttrComputeCapabilityMinor = 0, cudaDevAttrMultiProcessorCount = 100
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline thread_local int device = 0;
using cudaFunction_t = const char*;
inline std::atomic<int> asked{0}, told{0}, found{0}, fails{0};
inline const char* cudaGetErrorName(cudaError_t) { return "name"; }
inline const char* cudaGetErrorString(cudaError_t) { return "string"; }
inline cudaError_t cudaGetLastError() { return 0; }
inline cudaError_t cudaSetDevice(int value) { device = value; return 0; }
inline cudaError_t cudaGetDevice(int* value) { *value = device; return 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int of) {
  ++asked;
  *value = which + (which == cudaDevAttrMultiProcessorCount ? of : 0);
  return fails;
}
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { ++told; return fails; }
inline cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* kernel) {
  ++found;
  *function = static_cast<const char*>(kernel) + device;
  return fails;
}
"""
PROGRAM = """
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>
#include "host/device.cu"
using namespace lorakernels;

const char kernel[2] = {}, other[2] = {};

void line(const char* what) { std::printf("%s %d %d %d\\n", what, int(asked), int(told), int(found)); }

void ask(const char* of, int bytes) {
  if (function_of(of, bytes) != of + device) std::puts("another function");
}

void on_both_devices() {
  for (int i = 0; i < 1000; ++i) {
    device = i % 2;
    if (current_device().multiprocessors != 100 + device) std::puts("another device's");
    ask(kernel, 1000);
  }
}

int main() {
  fails = 1;
  try { current_device(); } catch (const std::runtime_error& error) { std::puts(error.what()); }
  try { function_of(kernel, 1000); } catch (const std::runtime_error&) { std::puts("refused"); }
  try { function_of(kernel, 0); } catch (const std::runtime_error&) { std::puts("not found"); }
  fails = asked = told = found = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(on_both_devices);
  for (std::thread& thread : threads) thread.join();
  line("threads");
  device = 0;
  ask(kernel, 999), line("less");
  ask(kernel, 1001), line("more");
  ask(other, 1000), line("another kernel");
  ask(other, 1000), line("again");
  const char none[2] = {};
  ask(none, 0), line("no shared memory");
}
"""


def test_a_device_is_asked_once_and_a_failure_is_not_remembered(tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "cuda_runtime.h").write_text(RUNTIME)
    (tmp_path / "main.cpp").write_text(PROGRAM)
    command = [compiler, "-std=c++17", "-pthread", f"-I{tmp_path}", f"-I{CSRC}"]
    subprocess.run([*command, "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    said = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    error, *lines = said.splitlines()
    assert error.startswith("cudaDeviceGetAttribute(&value, which, device) failed: name")
    assert lines == [
        "refused",
        "not found",
        "threads 6 2 2",  # three attributes of two devices; one kernel on each of them
        "less 6 2 2",
        "more 6 3 2",
        "another kernel 6 4 3",
        "again 6 4 3",
        "no shared memory 6 4 4",
    ]
