// An emulated torch device `rbln`, for tests of the code that uses one. It says nothing about an NPU's speed.
//
// One compilation unit; Python talks to it through `torch.ops.rbln_emulator`, so it needs no Python headers.
#include <torch/library.h>

#include "fallback.hpp"
#include "guard.hpp"

namespace emulated {

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

void configure(int64_t devices, int64_t capacity_bytes, int64_t delay) {
  TORCH_CHECK(devices > 0 && devices <= kMaxDevices, "emulated rbln: 1 to ", kMaxDevices, " devices");
  device_count = static_cast<int>(devices);
  Memory::get().capacity = capacity_bytes;
  delay_us = delay;
}

c10::Dict<std::string, int64_t> counted() {
  c10::Dict<std::string, int64_t> out;
  std::lock_guard lock(counters.mutex);
  for (const auto& [name, value] : counters.values) out.insert(name, value);
  return out;
}

void reset_counters() {
  std::lock_guard lock(counters.mutex);
  counters.values.clear();
}

void refuse_fallback(std::vector<std::string> names) {
  std::lock_guard lock(strict.mutex);
  strict.names = {names.begin(), names.end()};
}

TORCH_LIBRARY(rbln_emulator, m) {
  m.def("configure", &configure);
  m.def("counted", &counted);
  m.def("reset_counters", &reset_counters);
  m.def("refuse_fallback", &refuse_fallback);
  m.def("device_count", [] { return static_cast<int64_t>(device_count); });
  m.def("current_device", [] { return static_cast<int64_t>(current_device); });
  m.def("set_device", [](int64_t d) {
    TORCH_CHECK(d >= 0 && d < device_count, "emulated rbln: no device ", d);
    current_device = static_cast<DeviceIndex>(d);
  });
  m.def("synchronize", [](int64_t d) { synchronize(static_cast<DeviceIndex>(d)); });
  m.def("current_stream", [](int64_t d) { return current_stream[d]; });
  m.def("set_stream", [](int64_t d, int64_t id) { current_stream[d] = id; });
  m.def("memory_bytes", [] { return Memory::get().bytes.load(); });
  m.def("peak_bytes", [] { return Memory::get().peak.load(); });
  m.def("reset_peak", [] { Memory::get().peak = Memory::get().bytes.load(); });
  // direct storage's side
  m.def("allocate", [](int64_t bytes) { return reinterpret_cast<int64_t>(allocate(bytes)); });
  m.def("release", [](int64_t address) { release(reinterpret_cast<void*>(address)); });
  m.def("bind", [](int64_t address) { bind(address); });
  m.def("bound_bytes", [](int64_t address) { return bound_bytes(address); });
  m.def("sync_to_device", [](int64_t address) { sync_to_device(address); });
  m.def("mark_device_updated", [](int64_t address) { mark_device_updated(address); });
  m.def("transfer", [](bool write, int64_t fd, int64_t address, int64_t offset) {
    transfer(write, static_cast<int>(fd), address, offset);
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("_local_scalar_dense", scalar);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("resize_", resize);
}

}  // namespace emulated
