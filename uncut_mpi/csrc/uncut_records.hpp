// What a schedule of tiles is written to: its records, and the caches in which relays keep copies.
#pragma once

#include <array>
#include <vector>

#include "uncut_links.hpp"
#include "uncut_tiling.hpp"

namespace uncut {

// The copies of one leg, with the first region of each end, one for each chunk.
struct LegCopies {
    std::int32_t lane, parent;  // parent: the hop that brings what is read; -1: it is there when `awaits` is over
    std::int32_t read = -1, write = -1, awaits = -1, reader = -1;  // reader: of what was there
    std::int32_t brought = -1;                                     // the last copy so far
};

class Records {
  public:
    Records(const Input &in, const Tiling &tiling);

    TableWriter &writer() { return writer_; }
    std::int32_t compute_lane_of(int rank, int number) { return writer_.lane(rank, compute_lane, no_source, number); }
    std::int32_t copy_lane_of(const Link &l, bool result = false);
    // One chunk after the other goes all its way.
    void copy_chunks(std::vector<LegCopies> &hops, int chunks);
    bool can_keep(int rank, int matrix) const { return cache_bytes_[rank] >= in_.tile_bytes[matrix]; }
    // Where a relay keeps a copy of a tile; the caller has asked `can_keep`.
    Region keep(int rank, int matrix, const Region &tile);
    UncutTables take() { return std::move(out_); }

  private:
    const Input &in_;
    UncutTables out_;
    TableWriter writer_;
    int next_group_ = 0;
    std::vector<std::int64_t> cache_bytes_;          // that are left
    std::vector<std::array<int, 3>> cache_of_rank_;  // index into UncutTables::caches per matrix, or -1
};

}  // namespace uncut
