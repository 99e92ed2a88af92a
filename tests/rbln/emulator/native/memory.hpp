// Memory of the emulated device.
//
// An area has one address, which tensors carry and which the host can neither read nor write (PROT_NONE: a load faults),
// and up to two sides behind it, as the vendor's virtual memory has: a *host side*, which torch's copies and operators
// use, and, once the area is bound to a device, a *device side*, which direct storage reads and writes without telling
// anyone. `latest` says which side has the bytes that count. What torch does keeps it true by itself; direct storage does
// not: who forgets `sync_to_device` before a transfer out, or `mark_device_updated` after one in, gets old bytes.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

namespace emulated {

using c10::DeviceIndex;
constexpr size_t kPage = 4096;

enum class Latest { Both, Host, Device };

struct Area {
  char* host = nullptr;
  char* device = nullptr;  // until it is bound there is none
  size_t mapped = 0;
  Latest latest = Latest::Host;
};

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, Area> areas;  // by address
  std::atomic<int64_t> bytes{0}, peak{0};
  int64_t capacity = 0;  // bytes in this process, 0 for no limit

  static Memory& get() {
    static Memory* memory = new Memory;  // never destroyed: tensors outlive static destructors
    return *memory;
  }
};

inline thread_local DeviceIndex current_device = 0;

inline char* map_memory(size_t bytes, int protection) {
  void* at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "emulated rbln: mmap of ", bytes, " bytes failed");
  return static_cast<char*>(at);
}

inline void* allocate(size_t bytes) {
  auto& memory = Memory::get();
  Area area;
  area.mapped = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  const auto mapped = static_cast<int64_t>(area.mapped);
  TORCH_CHECK(!memory.capacity || memory.bytes.load() + mapped <= memory.capacity,
              "SYS_ENOMEM: Out of memory (emulated rbln, capacity ", memory.capacity, ")");
  area.host = map_memory(area.mapped, PROT_READ | PROT_WRITE);
  void* address = map_memory(area.mapped, PROT_NONE);
  {
    std::lock_guard lock(memory.mutex);
    memory.areas[reinterpret_cast<uintptr_t>(address)] = area;
  }
  const int64_t now = memory.bytes += mapped;
  for (int64_t peak = memory.peak; now > peak && !memory.peak.compare_exchange_weak(peak, now);) {
  }
  return address;
}

inline void release(void* address) {
  auto& memory = Memory::get();
  Area area;
  {
    std::lock_guard lock(memory.mutex);
    auto found = memory.areas.find(reinterpret_cast<uintptr_t>(address));
    if (found == memory.areas.end()) return;
    area = found->second;
    memory.areas.erase(found);
  }
  munmap(address, area.mapped);
  munmap(area.host, area.mapped);
  if (area.device) munmap(area.device, area.mapped);
  memory.bytes -= static_cast<int64_t>(area.mapped);
}

// The area that `bytes` bytes at `address` lie in. Call with the mutex held.
inline std::pair<uintptr_t, Area*> area_of(uintptr_t address, size_t bytes) {
  auto& areas = Memory::get().areas;
  auto found = areas.upper_bound(address);
  TORCH_CHECK(found != areas.begin(), "emulated rbln: not an address of the device");
  --found;
  TORCH_CHECK(address - found->first + bytes <= found->second.mapped, "emulated rbln: access past the end of an area");
  return {found->first, &found->second};
}

// Host-side memory of `bytes` bytes at `address`, for torch to read or write.
inline char* reach(const void* pointer, size_t bytes, bool write) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard lock(Memory::get().mutex);
  auto [start, area] = area_of(address, bytes);
  if (area->latest == Latest::Device) {
    std::memcpy(area->host, area->device, area->mapped);
    area->latest = Latest::Both;
  }
  if (write) area->latest = Latest::Host;
  return area->host + (address - start);
}

// Zeroes a whole area by giving its pages back; false if that is not what it is. Engines zero gigabytes of KV at start.
inline bool zero_whole(const void* pointer, size_t bytes) {
  std::lock_guard lock(Memory::get().mutex);
  auto [start, area] = area_of(reinterpret_cast<uintptr_t>(pointer), bytes);
  if (start != reinterpret_cast<uintptr_t>(pointer) || (bytes + kPage - 1) / kPage * kPage != area->mapped) return false;
  area->latest = Latest::Host;
  return madvise(area->host, area->mapped, MADV_DONTNEED) == 0;
}

// --- direct storage's view, of whole areas by their first address

inline Area& bound_area(uintptr_t address) {
  auto [start, area] = area_of(address, 1);
  TORCH_CHECK(start == address, "emulated rbln: not the first address of an area");
  TORCH_CHECK(area->device, "emulated rbln: the area is not bound to a device");
  return *area;
}

inline void bind(uintptr_t address) {
  std::lock_guard lock(Memory::get().mutex);
  auto [start, area] = area_of(address, 1);
  TORCH_CHECK(start == address, "emulated rbln: only a whole area can be bound");
  if (area->device) return;
  area->device = map_memory(area->mapped, PROT_READ | PROT_WRITE);
  std::memset(area->device, 0xEE, area->mapped);  // never zero: old bytes must not look right by chance
}

// Bytes of a bound area, 0 of any other: there is nothing behind it that direct storage could reach.
inline int64_t bound_bytes(uintptr_t address) {
  std::lock_guard lock(Memory::get().mutex);
  auto found = Memory::get().areas.find(address);
  return found == Memory::get().areas.end() || !found->second.device ? 0 : static_cast<int64_t>(found->second.mapped);
}

inline void sync_to_device(uintptr_t address) {
  std::lock_guard lock(Memory::get().mutex);
  Area& area = bound_area(address);
  if (area.latest == Latest::Host) {
    std::memcpy(area.device, area.host, area.mapped);
    area.latest = Latest::Both;
  }
}

inline void mark_device_updated(uintptr_t address) {
  std::lock_guard lock(Memory::get().mutex);
  bound_area(address).latest = Latest::Device;
}

// Moves a whole device side from or to a file. Nobody is told that it changed.
inline void transfer(bool write, int fd, uintptr_t address, int64_t offset) {
  char* device;
  size_t bytes;
  {
    std::lock_guard lock(Memory::get().mutex);
    Area& area = bound_area(address);
    device = area.device;
    bytes = area.mapped;
  }
  for (size_t done = 0; done < bytes;) {
    const auto at = static_cast<off_t>(offset + done);
    const ssize_t moved =
        write ? pwrite(fd, device + done, bytes - done, at) : pread(fd, device + done, bytes - done, at);
    TORCH_CHECK(moved > 0, write ? "pwrite: " : "pread: ", moved < 0 ? strerror(errno) : "short");
    done += moved;
  }
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? emulated::allocate(bytes) : nullptr;
    return {address, address, &release, c10::Device(c10::DeviceType::PrivateUse1, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(reach(to, bytes, true), reach(from, bytes, false), bytes);
  }
};
inline DeviceAllocator device_allocator;

}  // namespace emulated
