// What a schedule of tiles is written to: its records, and the caches in which relays keep copies.
#pragma once

#include <algorithm>
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
    Records(const Input &in, const Tiling &tiling)
        : in_(in),
          writer_(&out_, in.num_ranks, in.most_tasks),
          cache_bytes_(in.cache_bytes),
          cache_of_rank_(in.num_ranks, {-1, -1, -1}) {
        std::size_t copies = 0, c_tiles = 0;
        for (const Worker &w : tiling.workers) {
            copies += (static_cast<std::size_t>(w.mt) + w.nt) * tiling.kt * in.chunks;
            c_tiles += w.num_c();
        }
        const auto most = static_cast<std::size_t>(in.most_tasks);  // beyond it all is given up
        const std::size_t gemms = std::min(most, c_tiles * tiling.kt);
        copies = std::min(most, copies);
        writer_.reserve(copies + gemms + 3 * c_tiles, 2 * copies + 4 * gemms + 6 * c_tiles, copies + gemms / 4,
                        copies + 2 * gemms + 3 * c_tiles);
    }

    TableWriter &writer() { return writer_; }
    std::int32_t compute_lane_of(int rank, int number) { return writer_.lane(rank, compute_lane, no_source, number); }

    // Results have lanes of their own between devices: one that awaits its product holds up no fetch.
    std::int32_t copy_lane_of(const Link &l, bool result = false) {
        if (!in_.overlap) return compute_lane_of(l.issuer, 0);
        const int from = in_.locations.end(l.source), to = in_.locations.end(l.destination);
        const bool with_host = in_.locations.in_host(from) || in_.locations.in_host(to);
        result = result && !with_host;
        const bool together = in_.serial_copies && from == l.issuer && !with_host;
        return writer_.lane(l.issuer, result ? result_lane : copy_lane, from, together ? any_device : to);
    }

    // One chunk after the other goes all its way.
    void copy_chunks(std::vector<LegCopies> &hops, int chunks) {
        const int group = hops.size() > 1 ? next_group_++ : -1;
        for (int q = 0; q < chunks; ++q)
            for (LegCopies &hop : hops) {
                const std::array awaits{hop.parent < 0 ? hop.awaits : hops[hop.parent].brought, hop.reader};
                const std::array<OperandRecord, 2> regions{{{hop.write + q, one}, {hop.read + q, one}}};
                hop.brought = writer_.task(copy_task, hop.lane, group, regions, awaits);
            }
    }

    bool can_keep(int rank, int matrix) const { return cache_bytes_[rank] >= in_.tile_bytes[matrix]; }

    // Where a relay keeps a copy of a tile; the caller has asked `can_keep`.
    Region keep(int rank, int matrix, const Region &tile) {
        int &number = cache_of_rank_[rank][matrix];
        if (number < 0) {
            number = static_cast<int>(out_.caches.size());
            out_.caches.push_back({rank, matrix, 0});
        }
        cache_bytes_[rank] -= in_.tile_bytes[matrix];
        const std::int64_t left = out_.caches[number][2]++ * in_.tile_shape[matrix][1];
        return {in_.first_cache + number, 0, left, tile.rows, tile.cols};
    }

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
