// Records of the schedule: regions, lanes, tasks and the copies in relays' caches.

#include "uncut_state.hpp"

namespace uncut {

// Where a rank has a tile of A or B: in what it holds of the matrix, or in its panel.
Region Scheduler::own_region(const Worker &w, int side, int outer, int p) const {
    const Tiles &t = w.sides[side];
    const Extent extent = outer_extent(w, side, outer);
    const std::int32_t home = t.home[tile_index(outer, p)];
    if (home >= 0) return tile_in(in_.pieces[side][home], side, extent, k_extent(p));
    return tile_in(t.buffer, side, {t.place[outer], t.place[outer] + extent.size()}, k_extent(p));
}

Region Scheduler::c_region(const Worker &w, int i, int j, CPlace place) const {
    if (place == CPlace::user) return held_c_region(w, i, j, w.c[c_index(w, i, j)].own());
    const auto buffer = static_cast<int>((place == CPlace::panel ? in_.c_panel : in_.c_staging)[w.rank]);
    return {buffer, w.sides[side_a].place[i], w.sides[side_b].place[j], row_extent(w, i).size(),
            col_extent(w, j).size()};
}

Region Scheduler::held_c_region(const Worker &w, int i, int j, std::int32_t piece) const {
    return in_piece(in_.pieces[matrix_c][piece], row_extent(w, i), col_extent(w, j), false);
}

// Results have lanes of their own between devices: one that awaits its product holds up no fetch.
std::int32_t Scheduler::lane_for_copy(const Link &l, bool result) {
    if (!in_.overlap) return lane_for_compute(l.issuer, 0);
    const int from = in_.locations.end(l.source), to = in_.locations.end(l.destination);
    const bool with_host = in_host(from) || in_host(to);
    result = result && !with_host;
    const bool together = in_.serial_copies && from == l.issuer && !with_host;
    return writer_.lane(l.issuer, result ? result_lane : copy_lane, from, together ? any_device : to);
}

// A copy of a tile in a relay's cache; the caller has asked `can_keep`.
Cached Scheduler::keep_copy(int rank, int matrix, const Region &tile) {
    int &number = cache_of_rank_[rank][matrix];
    if (number < 0) {
        number = static_cast<int>(out_.caches.size());
        out_.caches.push_back({rank, matrix, 0});
    }
    cache_bytes_[rank] -= in_.tile_bytes[matrix];
    const std::int64_t left = out_.caches[number][2]++ * in_.tile_shape[matrix][1];
    return {rank, {in_.first_cache + number, 0, left, tile.rows, tile.cols}};
}

}  // namespace uncut
