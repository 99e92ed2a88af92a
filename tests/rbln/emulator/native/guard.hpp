// What torch asks of a device: current device and stream, events, pinned memory.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

#include "copies.hpp"

namespace emulated {

inline int device_count = 1;
inline std::atomic<int64_t> next_stream{0};

// The state of an event: complete once `queue` has done its `number`-th piece of work.
struct EventState {
  Queue* queue = nullptr;
  uint64_t number = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto kType = c10::DeviceType::PrivateUse1;

  static DeviceIndex index(c10::Device d) { return d.index() < 0 ? current_device : d.index(); }
  static c10::Stream stream(DeviceIndex device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
  }
  static Queue& queue_of(const c10::Stream& s) { return queue(s.device_index(), s.id()); }
  static const EventState* state(void* event) { return static_cast<const EventState*>(event); }

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  c10::Device getDevice() const override { return {kType, current_device}; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = current_device;
    setDevice(d);
    return {kType, before};
  }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < device_count, "emulated rbln: no device ", static_cast<int>(d.index()));
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < device_count) current_device = d.index();
  }

  c10::Stream getStream(c10::Device d) const noexcept override { return stream(index(d), current_stream[index(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(index(d), 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return stream(index(d), 1 + (next_stream++ % kStreams));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    const auto before = current_stream[s.device_index()];
    current_stream[s.device_index()] = s.id();
    return stream(s.device_index(), before);
  }
  bool queryStream(const c10::Stream& s) const override { return queue_of(s).done(queue_of(s).submitted()); }
  void synchronizeStream(const c10::Stream& s) const override {
    queue_of(s).drain();
    late_error.raise();
  }
  void synchronizeDevice(const DeviceIndex d) const override { synchronize(d < 0 ? current_device : d); }

  void record(void** event, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new EventState;
    auto* recorded = static_cast<EventState*>(*event);
    recorded->queue = &queue_of(s);
    recorded->number = recorded->queue->submitted();
  }
  void block(void* event, const c10::Stream& s) const override {
    if (!event || !state(event)->queue || state(event)->queue == &queue_of(s)) return;
    const EventState waited = *state(event);
    queue_of(s).push([waited] { waited.queue->wait(waited.number); });
  }
  bool queryEvent(void* event) const override {
    return !event || !state(event)->queue || state(event)->queue->done(state(event)->number);
  }
  void synchronizeEvent(void* event) const override {
    if (!event || !state(event)->queue) return;
    state(event)->queue->wait(state(event)->number);
    late_error.raise();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
};

// Page-aligned host memory, remembered for is_pinned().
struct PinnedAllocator final : c10::Allocator {
  std::mutex mutex;
  std::map<void*, size_t> live;

  static PinnedAllocator& get() {
    static PinnedAllocator* allocator = new PinnedAllocator;
    return *allocator;
  }
  static void forget(void* p) {
    {
      std::lock_guard lock(get().mutex);
      get().live.erase(p);
    }
    std::free(p);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* p = bytes ? std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage) : nullptr;
    if (p) {
      std::lock_guard lock(mutex);
      live[p] = bytes;
    }
    return {p, p, &forget, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &forget; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  void setCurrentDevice(DeviceIndex d) const override { current_device = d; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    const auto before = current_device;
    if (d >= 0) current_device = d;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  bool isPinnedPtr(const void* p) const override {
    auto& pinned = PinnedAllocator::get();
    std::lock_guard lock(pinned.mutex);
    return pinned.live.count(const_cast<void*>(p)) > 0;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { grow(storage, bytes); }
};

}  // namespace emulated
