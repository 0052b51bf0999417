// Zeroed memory straight from the system, in huge pages where it offers them: weights are read end to end in
// every step, and small pages would spend the time on address translation.
#pragma once

#include <stddef.h>

namespace tandem {

class Region {
 public:
  Region() = default;
  explicit Region(size_t bytes);  // throws std::bad_alloc
  // The file's first bytes, only to be read. Processes that map one file have its bytes in memory once.
  Region(int file, size_t bytes);  // throws std::system_error
  ~Region();
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;

  char* data() const { return data_; }
  size_t size() const { return size_; }

  // At least this many bytes, zeroed when they are new. Old contents are lost when it grows.
  void reserve(size_t bytes);

 private:
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tandem
