// A few threads that work through a step together. Between steps they sleep.
#pragma once

#include <stdint.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace tandem {

class Team {
 public:
  // One thread per entry; the first is the caller of run(). Each stays on its core, unless that is negative.
  explicit Team(std::vector<int> cores);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(cores_.size()); }

  // How often threads have met so far: at the beginning and the end of each run(), and at each barrier.
  int64_t meetings() const { return meetings_; }

  // Every thread runs work(thread). Returns when all have finished. `work` must not throw.
  void run(const std::function<void(int)>& work);

  // Within run(): waits for all threads, then resets the task counters.
  void barrier();

  // Within run(): calls f(task) for this thread's share of [0, count) in order, then for what others have left.
  // A barrier must come before the next call.
  template <typename F>
  void divide(int thread, int count, F&& f) {
    const int n = size();
    for (int i = 0; i < n; i++) {
      const int whose = (thread + i) % n;
      const int64_t begin = static_cast<int64_t>(count) * whose / n, end = static_cast<int64_t>(count) * (whose + 1) / n;
      for (int64_t task; (task = begin + take(whose)) < end;) f(static_cast<int>(task));
    }
  }

  // The same, with all threads taking from one queue: for tasks of unequal size, largest first.
  template <typename F>
  void share(int count, F&& f) {
    for (int task; (task = take(0)) < count;) f(task);
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int> taken{0};
  };

  int take(int whose) { return counters_[whose].taken.fetch_add(1, std::memory_order_relaxed); }
  void serve(int thread);
  void await_change(std::atomic<int>& value, int old);
  void change(std::atomic<int>& value);

  std::vector<int> cores_;
  std::unique_ptr<Counter[]> counters_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  bool stopping_ = false;
  int64_t meetings_ = 0;
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> generation_{0};  // of run()
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};  // of barrier()
};

}  // namespace tandem
