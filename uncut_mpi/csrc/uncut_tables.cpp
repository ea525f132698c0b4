// Records of the schedule: regions, lanes, tasks and the copies in relays' caches.

#include "uncut_state.hpp"

namespace uncut {

std::int32_t Scheduler::add_region(int buffer, const Rectangle &r) {
    out_.regions.push_back({buffer, 0, r.row, r.col, r.rows, r.cols});
    return static_cast<std::int32_t>(out_.regions.size()) - 1;
}

// First of `chunks` regions that cut a tile along its stored columns, remainders to the first.
std::int32_t Scheduler::chunk_regions(Regions &known, int buffer, const Rectangle &r, int chunks) {
    if (chunks == 1) {
        if (known.whole < 0) known.whole = add_region(buffer, r);
        return known.whole;
    }
    if (known.chunked < 0) {
        known.chunked = static_cast<std::int32_t>(out_.regions.size());
        std::int64_t col = r.col;
        for (int q = 0; q < chunks; ++q) {
            const std::int64_t cols = r.cols / chunks + (q < r.cols % chunks ? 1 : 0);
            add_region(buffer, {r.row, col, r.rows, cols});
            col += cols;
        }
    }
    return known.chunked;
}

std::int32_t Scheduler::origin_region(const Worker &w, int side, int outer, int p, int chunks) {
    Origins &origins = origins_[side][group_of(w, side)];
    const std::size_t tile = tile_index(outer, p);
    const KPiece &piece = in_.pieces[side][origins.piece[tile]];
    return chunk_regions(origins.regions[tile], piece.buffer,
                         in_piece(side, piece, outer_extent(w, side, outer), k_extent(p)), chunks);
}

// In a rank's panel, or in what it holds of a matrix beside the first holder.
std::int32_t Scheduler::own_region(Worker &w, int side, int outer, int p, int chunks) {
    Tiles &t = w.sides[side];
    const Extent extent = outer_extent(w, side, outer);
    const std::size_t tile = tile_index(outer, p);
    if (t.home[tile] >= 0) {
        const KPiece &piece = in_.pieces[side][t.home[tile]];
        return chunk_regions(t.regions[tile], piece.buffer, in_piece(side, piece, extent, k_extent(p)), chunks);
    }
    const Extent place{t.place[outer], t.place[outer] + extent.size()};
    return chunk_regions(t.regions[tile], t.buffer, stored(side, place, k_extent(p)), chunks);
}

// Where a rank reads a tile of A or B.
std::int32_t Scheduler::read_region(Worker &w, int side, int outer, int p) {
    const std::size_t tile = tile_index(outer, p);
    const bool is_origin = w.sides[side].home[tile] == origins_[side][group_of(w, side)].piece[tile];
    return is_origin ? origin_region(w, side, outer, p, 1) : own_region(w, side, outer, p, 1);
}

std::int32_t Scheduler::c_region(Worker &w, int i, int j, CPlace place, int chunks) {
    const Extent rows = row_extent(w, i), cols = col_extent(w, j);
    const std::size_t tile = c_index(w, i, j);
    if (place == CPlace::user) return held_c_region(w, i, j, w.c[tile].own(), chunks);
    Regions &known = (place == CPlace::panel ? w.c_panel : w.c_staging)[tile];
    const auto buffer = static_cast<int>((place == CPlace::panel ? in_.c_panel : in_.c_staging)[w.rank]);
    return chunk_regions(known, buffer, {w.sides[side_a].place[i], w.sides[side_b].place[j], rows.size(), cols.size()},
                         chunks);
}

std::int32_t Scheduler::held_c_region(Worker &w, int i, int j, std::int32_t piece, int chunks) {
    const Extent rows = row_extent(w, i), cols = col_extent(w, j);
    const std::size_t tile = c_index(w, i, j);
    const KPiece &held = in_.pieces[matrix_c][piece];
    const Rectangle r{held.row + rows.first - held.rows.first, held.col + cols.first - held.cols.first, rows.size(),
                      cols.size()};
    Regions elsewhere;  // a copy for another holder, the only one
    return chunk_regions(piece == w.c[tile].own() ? w.c_user[tile] : elsewhere, held.buffer, r, chunks);
}

std::int32_t Scheduler::add_task(Kind kind, std::int32_t lane, int group, std::initializer_list<OperandSpec> operands,
                                 std::initializer_list<std::int32_t> awaits) {
    if (static_cast<std::int64_t>(out_.tasks.size()) >= in_.most_tasks) throw TooManyTasks();
    TaskRecord task;
    task.kind = kind;
    task.num_operands = static_cast<std::uint16_t>(operands.size());
    task.rank = out_.lanes[lane].rank;
    task.lane = lane;
    task.group = group;
    task.first_operand = static_cast<std::int32_t>(out_.operands.size());
    task.first_await = static_cast<std::int32_t>(out_.awaits.size());
    for (const OperandSpec &o : operands)
        out_.operands.push_back({o.region, o.factor, o.op, 0});
    for (const std::int32_t awaited : awaits)  // a lane is first in, first out
        if (awaited >= 0 && out_.tasks[awaited].lane != lane) out_.awaits.push_back(awaited);
    const auto first = out_.awaits.begin() + task.first_await;
    std::sort(first, out_.awaits.end());
    out_.awaits.erase(std::unique(first, out_.awaits.end()), out_.awaits.end());
    task.num_awaits = static_cast<std::int32_t>(out_.awaits.size()) - task.first_await;
    out_.tasks.push_back(task);
    return static_cast<std::int32_t>(out_.tasks.size()) - 1;
}

std::int32_t Scheduler::add_lane(const LaneRecord &lane) {
    out_.lanes.push_back(lane);
    next_lane_.push_back(-1);
    return static_cast<std::int32_t>(out_.lanes.size()) - 1;
}

std::int32_t Scheduler::lane_for_compute(int rank, int number) {
    std::int32_t &lane = lane_of_compute_[static_cast<std::size_t>(rank) * in_.compute_lanes + number];
    if (lane < 0) lane = add_lane({rank, compute_lane, no_source, number});
    return lane;
}

// Results have lanes of their own between devices: one that awaits its product holds up no fetch.
std::int32_t Scheduler::lane_for_copy(const Link &l, bool result) {
    if (!in_.overlap) return lane_for_compute(l.issuer, 0);
    const int from = in_.locations.end(l.source), to = in_.locations.end(l.destination);
    const bool with_host = in_host(from) || in_host(to);
    result = result && !with_host;
    const bool together = in_.serial_copies && from == l.issuer && !with_host;
    const int destination = together ? l.issuer : to;  // its own place in the table is free
    std::int32_t *lane = &(result ? result_lanes_ : copy_lanes_)[index(from, destination)];
    while (*lane >= 0 && out_.lanes[*lane].rank != l.issuer)
        lane = &next_lane_[*lane];
    if (*lane >= 0) return *lane;
    // Adding one moves the lanes, and what they point to.
    const auto number = static_cast<std::int32_t>(out_.lanes.size());
    *lane = number;
    return add_lane({l.issuer, result ? result_lane : copy_lane, from, together ? any_device : to});
}

// A copy of a tile in a relay's cache; the caller has asked `can_keep`.
Cached Scheduler::keep_copy(int rank, int matrix, std::int64_t rows, std::int64_t cols) {
    int &number = cache_of_rank_[rank][matrix];
    if (number < 0) {
        number = static_cast<int>(out_.caches.size());
        out_.caches.push_back({rank, matrix, 0});
    }
    cache_bytes_[rank] -= in_.tile_bytes[matrix];
    Cached copy;
    copy.rank = rank;
    copy.buffer = in_.first_cache + number;
    copy.place = {0, out_.caches[number][2]++ * in_.tile_shape[matrix][1], rows, cols};
    return copy;
}

}  // namespace uncut
