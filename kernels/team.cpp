#include "team.h"

#include <time.h>

#if defined(__linux__)
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tandem {
namespace {

// How long a thread looks before it sleeps: longer than another thread's share of a phase usually is, short
// enough that an idle engine costs nothing.
constexpr int64_t kSpinNanoseconds = 50'000;

// How long it sleeps before it looks again: should a wake be lost, a step takes that much longer, and does not hang.
constexpr int64_t kSleepNanoseconds = 100'000'000;

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

// Counts for ever: past the largest number it begins again.
int next(int count) { return static_cast<int>(static_cast<unsigned>(count) + 1); }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Keeps the calling thread on a core while a step runs, and gives it back its freedom afterwards.
class Pin {
 public:
  explicit Pin(int core) {
#if defined(__linux__)
    if (core < 0 || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    if (CPU_COUNT(&before_) == 1) return;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    changed_ = sched_setaffinity(0, sizeof only, &only) == 0;
#else
    (void)core;
#endif
  }
  ~Pin() {
#if defined(__linux__)
    if (changed_) sched_setaffinity(0, sizeof before_, &before_);
#endif
  }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

 private:
#if defined(__linux__)
  cpu_set_t before_;
  bool changed_ = false;
#endif
};

}  // namespace

// Returns when `value` is no longer `old`.
void Team::await_change(std::atomic<int>& value, int old) {
  int64_t deadline = 0;
  for (;;) {
    for (int i = 0; i < 64; i++) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
    }
    const int64_t t = now();
    if (deadline == 0) deadline = t + kSpinNanoseconds;
    if (t > deadline) break;
  }
#if defined(__linux__)
  const timespec moment{kSleepNanoseconds / 1'000'000'000, kSleepNanoseconds % 1'000'000'000};
  // Count this sleeper before reading the value; change() reads the count after changing the value. So one of the two sees the other.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value.load(std::memory_order_seq_cst) == old) syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, &moment, nullptr, 0);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
#else
  value.wait(old, std::memory_order_acquire);
#endif
}

// Advances the value, and wakes the threads that wait for it.
void Team::change(std::atomic<int>& value) {
  value.store(next(value.load(std::memory_order_relaxed)), std::memory_order_seq_cst);
#if defined(__linux__)
  if (sleepers_.load(std::memory_order_seq_cst) > 0) syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
  value.notify_all();
#endif
}

Team::Team(std::vector<int> cores) : cores_(std::move(cores)), counters_(new Counter[cores_.size()]) {
  try {
    for (int i = 1; i < size(); i++) threads_.emplace_back([this, i] { serve(i); });
  } catch (...) {
    stopping_ = true;
    change(generation_);
    for (std::thread& t : threads_) t.join();
    throw;
  }
}

Team::~Team() {
  stopping_ = true;
  change(generation_);
  for (std::thread& t : threads_) t.join();
}

void Team::serve(int thread) {
#if defined(__linux__)
  if (cores_[thread] >= 0) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(cores_[thread], &only);
    sched_setaffinity(0, sizeof only, &only);  // this thread; refused: it runs where it may
  }
#endif
  for (int seen = 0;; seen = next(seen)) {
    await_change(generation_, seen);
    if (stopping_) return;
    (*work_)(thread);
    barrier();
  }
}

void Team::run(const std::function<void(int)>& work) {
  meetings_++;
  if (size() == 1) {
    counters_[0].taken.store(0, std::memory_order_relaxed);
    work(0);
    return barrier();
  }
  const Pin pin(cores_[0]);
  for (int i = 0; i < size(); i++) counters_[i].taken.store(0, std::memory_order_relaxed);
  work_ = &work;
  change(generation_);
  work(0);
  barrier();
}

void Team::barrier() {
  if (size() == 1) {
    meetings_++;
    counters_[0].taken.store(0, std::memory_order_relaxed);
    return;
  }
  const int phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size()) return await_change(phase_, phase);
  meetings_++;
  for (int i = 0; i < size(); i++) counters_[i].taken.store(0, std::memory_order_relaxed);
  arrived_.store(0, std::memory_order_relaxed);
  change(phase_);
}

}  // namespace tandem
