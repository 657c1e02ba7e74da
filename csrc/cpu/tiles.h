// The tile registers of AMX: how a thread gets them and gives them back.
#pragma once

#include <immintrin.h>

#include "cpu/cpu.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

// Tiles of 64 bytes a row for the scope's lifetime; then the thread's former configuration, which others may reuse.
class TileScope {
 public:
  // Tiles 0, 1 and 4 have `first` rows, 2, 3 and 5 `second`, 6 and 7 all 16.
  explicit TileScope(int first = 16, int second = 16) {
    alignas(64) Config wanted{1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    for (int tile : {0, 1, 4}) wanted.rows[tile] = uint8_t(first);
    for (int tile : {2, 3, 5}) wanted.rows[tile] = uint8_t(second);
    _tile_storeconfig(&saved_);
    _tile_loadconfig(&wanted);
    asm volatile("" ::"m"(wanted));  // the intrinsic does not tell that it reads
  }
  ~TileScope() {
    if (saved_.palette != 0)
      _tile_loadconfig(&saved_);
    else
      _tile_release();
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  alignas(64) Config saved_;
};

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
