// Every other operator runs on the CPU, over the host side of its arguments. It is counted as `fallback.NAME`, and in
// strict mode refused: a transfer that needs one would take a detour through the host on the vendor's device too.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>

#include <set>
#include <vector>

#include "copies.hpp"

namespace emulated {

struct Strict {
  std::mutex mutex;
  std::set<std::string> names;  // "*" for all

  bool refuses(const std::string& name) {
    std::lock_guard lock(mutex);
    return names.count("*") || names.count(name);
  }
};
inline Strict strict;

using Stack = torch::jit::Stack;

template <typename Each>
std::vector<at::Tensor> each_of(const c10::IValue& list, Each each) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& t : list.toTensorVector()) out.push_back(each(t));
  return out;
}

// The arguments' device, their queued work waited for; none when torch's own, copying fallback has to do.
inline std::optional<c10::Device> device_of_arguments(const Stack& stack, size_t base) {
  std::optional<c10::Device> device;
  auto see = [&](const at::Tensor& t) {
    if (t.defined() && on_device(t)) {
      device = t.device();
      drain(t);
    }
    return t;
  };
  for (size_t i = base; i < stack.size(); ++i) {
    if (stack[i].isTensor()) see(stack[i].toTensor());
    else if (stack[i].isTensorList()) each_of(stack[i], see);
    else if (stack[i].isOptionalTensorList() || stack[i].isDevice()) return std::nullopt;
  }
  return device;
}

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.operator_name().name;
  counters.add("fallback." + name);
  TORCH_CHECK(!strict.refuses(name), "emulated rbln, strict: ", name, " would run on the CPU");
  const size_t count = schema.arguments().size(), base = stack->size() - count;
  const auto device = device_of_arguments(*stack, base);
  if (!device) return at::native::cpu_fallback(op, stack);

  const std::vector<c10::IValue> given(stack->begin() + base, stack->end());
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[base + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool write = alias && alias->isWrite();
    auto lower = [&](const at::Tensor& t) { return t.defined() && on_device(t) ? host_view(t, write) : t; };
    if (value.isTensor()) value = c10::IValue(lower(value.toTensor()));
    else if (value.isTensorList()) value = c10::IValue(each_of(value, lower));
  }
  const std::vector<c10::IValue> lowered(stack->begin() + base, stack->end());
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  } catch (const c10::Error& error) {
    if (std::string(error.what()).find("not resizable") == std::string::npos) throw;
    stack->resize(base);
    stack->insert(stack->end(), given.begin(), given.end());
    return at::native::cpu_fallback(op, stack);
  }
  for (size_t i = 0; i < count; ++i) {  // an empty out= argument was resized on the host side
    if (!given[i].isTensor() || !given[i].toTensor().defined() || !on_device(given[i].toTensor())) continue;
    if (lowered[i].toTensor().sizes() != given[i].toTensor().sizes())
      copy_from_and_resize(lowered[i].toTensor(), given[i].toTensor());
  }
  auto lift = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined() || t.device().type() != c10::DeviceType::CPU) return t;
    for (size_t i = 0; i < count; ++i)
      if (lowered[i].isTensor() && lowered[i].toTensor().is_same(t)) return given[i].toTensor();
    return t.to(*device);
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = c10::IValue(lift(value.toTensor()));
    else if (value.isTensorList()) value = c10::IValue(each_of(value, lift));
  }
}

}  // namespace emulated
