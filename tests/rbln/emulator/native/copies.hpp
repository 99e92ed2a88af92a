// The copy engine, what is counted, and the operators that make, resize and view tensors.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>

#include <string>

#include "streams.hpp"

namespace emulated {

struct Counters {
  std::mutex mutex;
  std::map<std::string, int64_t> values;

  void add(const std::string& name, int64_t value = 1) {
    std::lock_guard lock(mutex);
    values[name] += value;
  }
};
inline Counters counters;

inline bool on_device(const at::Tensor& t) { return t.device().type() == c10::DeviceType::PrivateUse1; }

// A CPU tensor over the host side of a device tensor.
inline at::Tensor host_view(const at::Tensor& t, bool write) {
  if (!on_device(t)) return t;
  const auto options = t.options().device(at::kCPU);
  if (t.numel() == 0) return at::empty(t.sizes(), options);
  size_t extent = 1;
  for (int64_t i = 0; i < t.dim(); ++i) extent += (t.size(i) - 1) * t.stride(i);
  return at::from_blob(reach(t.data_ptr(), extent * t.element_size(), write), t.sizes(), t.strides(), options);
}

// Waits for what is queued on the tensor's current stream, as an operator that runs after it would.
inline void drain(const at::Tensor& t) {
  current_queue(t.device().index()).drain();
  late_error.raise();
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const std::string kind = on_device(from) ? (on_device(to) ? "d2d" : "d2h") : "h2d";
  counters.add(kind + ".calls");
  counters.add(kind + ".bytes", to.nbytes());
  const bool direct =
      from.is_contiguous() && to.is_contiguous() && from.dtype() == to.dtype() && from.sizes() == to.sizes();
  if (!direct) counters.add(kind + ".strided");
  auto& stream = current_queue((on_device(to) ? to : from).device().index());
  auto work = [from, to] { host_view(to, true).copy_(host_view(from, false)); };
  if (non_blocking) {
    counters.add(kind + ".async");
    stream.push(std::move(work));
    return to;
  }
  stream.drain();
  late_error.raise();
  at::AutoDispatchBelowADInplaceOrView guard;
  work();
  return to;
}

inline void grow(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(storage.device());
  auto memory = device_allocator.allocate(bytes);
  if (const size_t keep = std::min(bytes, impl->nbytes())) device_allocator.copy_data(memory.get(), impl->data(), keep);
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    to.unsafeGetTensorImpl()->set_sizes_contiguous(from.sizes());
    const size_t needed = from.numel() * to.element_size();
    if (to.storage().nbytes() < needed) grow(to.storage(), needed);
  }
  return copy_from(from, to, false);
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

inline at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, kKeys, c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, kKeys, c10::dtype_or_default(dtype));
}

inline at::Tensor& fill(at::Tensor& t, const at::Scalar& value) {
  drain(t);
  host_view(t, true).fill_(value);
  return t;
}

inline at::Tensor& zero(at::Tensor& t) {
  drain(t);
  if (!t.is_contiguous() || !t.numel() || !zero_whole(t.data_ptr(), t.nbytes())) host_view(t, true).zero_();
  return t;
}

inline at::Scalar scalar(const at::Tensor& t) {
  drain(t);
  return host_view(t, false).item();
}

inline at::Tensor& set_storage(at::Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                               c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(t, std::move(storage), offset, size, stride);
}

inline at::Tensor& set_whole_storage(at::Tensor& t, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / t.element_size());
  return at::native::set_storage_cpu_(t, std::move(storage), 0, {count}, {});
}

inline at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& other) {
  return at::native::set_storage_cpu_(t, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

inline const at::Tensor& resize(const at::Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous || *format == at::MemoryFormat::Preserve,
              "emulated rbln: resize_ to another memory format");
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t needed = (t.storage_offset() + t.numel()) * t.element_size();
  if (t.storage().nbytes() < needed) {
    drain(t);
    grow(t.storage(), needed);
  }
  return t;
}

inline at::Tensor view(const at::Tensor& t, c10::IntArrayRef size) { return at::native::view(t, size); }

inline at::Tensor as_strided(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride,
                             std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}

inline at::Tensor reshape_alias(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(t, size, stride);
}

}  // namespace emulated
