// Working memory that a thread keeps between calls.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

#include "cpu/cpu.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

// The calling thread's memory, kept between calls: it grows to the largest call seen, which the limits above bound.
class KeptMemory {
 public:
  ~KeptMemory() { std::free(data_); }
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      bytes = size_t((int64_t(bytes) + 4095) / 4096 * 4096);
      data_ = static_cast<char*>(std::aligned_alloc(4096, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
