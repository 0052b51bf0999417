#include "region.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes)
#endif

#include <new>
#include <system_error>
#include <utility>

namespace tandem {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;
constexpr size_t kSlack = 4096;  // tile prefetches run past the end, tile loads past a row's
constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, since Linux 5.14

}  // namespace

Region::Region(size_t bytes) : size_(bytes) {
  mapped_ = bytes + kSlack + kHugePage;
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  const auto address = reinterpret_cast<uintptr_t>(mapping_);
  data_ = static_cast<char*>(mapping_) + ((kHugePage - address % kHugePage) % kHugePage);
  // Only prefetches and tile loads reach past the end, and neither is instrumented.
  ASAN_POISON_MEMORY_REGION(data_ + bytes, static_cast<char*>(mapping_) + mapped_ - (data_ + bytes));
#if defined(MADV_HUGEPAGE)
  if (bytes >= kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
}

Region::Region(int file, size_t bytes) : Region(bytes) {
  // Over the anonymous memory, whose end stays readable. It is aligned as huge pages of the file's cache are.
  if (mmap(data_, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "mmap");
#if defined(MADV_HUGEPAGE)
  madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  // Read now, so that no step waits for it and a disk's error is a sentence and no signal.
  if (madvise(data_, bytes, kPopulateRead) != 0 && errno != EINVAL)
    throw std::system_error(errno, std::generic_category(), "the file cannot be read");
}

Region::~Region() {
  if (!mapping_) return;
  ASAN_UNPOISON_MEMORY_REGION(mapping_, mapped_);
  munmap(mapping_, mapped_);
}

Region::Region(Region&& other) noexcept { *this = std::move(other); }

Region& Region::operator=(Region&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void Region::reserve(size_t bytes) {
  if (bytes <= size_) return;
  *this = Region();  // the old one goes first: both together may not fit
  *this = Region(bytes);
}

}  // namespace tandem
