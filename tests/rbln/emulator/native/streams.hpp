// Streams of the emulated device: a queue and a thread each, so that what is queued happens later, and a missing
// synchronise shows as wrong bytes. `delay_us` before each piece of work makes that certain.
#pragma once

#include <c10/core/InferenceMode.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <thread>

#include "memory.hpp"

namespace emulated {

constexpr int kStreams = 8;  // besides the default stream, which is 0
constexpr int kMaxDevices = 16;

inline std::atomic<int64_t> delay_us{0};

class Queue {
 public:
  // Returns the work's number; `wait` takes it.
  uint64_t push(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { loop(); }).detach();
    }
    work_.push_back(std::move(work));
    wake_.notify_one();
    return ++submitted_;
  }
  uint64_t submitted() {
    std::lock_guard lock(mutex_);
    return submitted_;
  }
  bool done(uint64_t number) {
    std::lock_guard lock(mutex_);
    return done_ >= number;
  }
  void wait(uint64_t number) {
    std::unique_lock lock(mutex_);
    progress_.wait(lock, [&] { return done_ >= number; });
  }
  void drain() { wait(submitted()); }

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable wake_, progress_;
  std::deque<std::function<void()>> work_;
  bool started_ = false;
  uint64_t submitted_ = 0, done_ = 0;
};

// The first error of queued work, raised by the next call that waits.
struct LateError {
  std::mutex mutex;
  std::exception_ptr error;

  void keep(std::exception_ptr e) {
    std::lock_guard lock(mutex);
    if (!error) error = e;
  }
  void raise() {
    std::exception_ptr e;
    {
      std::lock_guard lock(mutex);
      std::swap(e, error);
    }
    if (e) std::rethrow_exception(e);
  }
};
inline LateError late_error;

inline void Queue::loop() {
  c10::InferenceMode guard;
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return !work_.empty(); });
      work = std::move(work_.front());
      work_.pop_front();
    }
    if (const auto us = delay_us.load()) std::this_thread::sleep_for(std::chrono::microseconds(us));
    try {
      work();
    } catch (...) {
      late_error.keep(std::current_exception());
    }
    work = nullptr;  // tensors that it held are free before anyone hears that it is done
    std::lock_guard lock(mutex_);
    ++done_;
    progress_.notify_all();
  }
}

inline Queue& queue(DeviceIndex device, int64_t stream) {
  static Queue* queues = new Queue[kMaxDevices * (kStreams + 1)];  // never destroyed: their threads use them to the end
  TORCH_CHECK(device >= 0 && device < kMaxDevices && stream >= 0 && stream <= kStreams, "emulated rbln: no such stream");
  return queues[device * (kStreams + 1) + stream];
}

inline thread_local int64_t current_stream[kMaxDevices] = {};

inline Queue& current_queue(DeviceIndex device) { return queue(device, current_stream[device]); }

inline void synchronize(DeviceIndex device) {
  for (int stream = 0; stream <= kStreams; ++stream) queue(device, stream).drain();
  late_error.raise();
}

}  // namespace emulated
