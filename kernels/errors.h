// Exceptions end at the C interface: they become a status and a message.
#pragma once

#include <exception>
#include <string>

namespace tandem {

std::string& last_error();  // of the calling thread

template <typename F>
int guarded(F&& f) {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    last_error() = e.what();
    return -1;
  }
}

}  // namespace tandem
