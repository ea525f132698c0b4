// Tiles of C: fetched, combined and written back.
#include "uncut_state.hpp"

namespace uncut {

// To a holder of a tile, or from there.
Scheduler::CWay Scheduler::c_way(const Worker &w, int i, int j, std::int32_t piece, bool inward, Time not_before) {
    const int holder = location_of(matrix_c, piece), from = inward ? holder : w.rank, to = inward ? w.rank : holder;
    CWay way;
    way.link = link(from, to, w.rank);
    if (!inward && in_.overlap) way.link.resource = way.link.at;  // results have a lane of their own
    way.busy = cost(way.link, c_bytes(w, i, j));
    way.arrival = std::max(free_[way.link.resource], not_before) + way.busy;
    const Detour *d = detour(matrix_c, from, to);
    if (!d) return way;
    for (int x = 0; x < d->relays; ++x)
        if (!can_keep(d->relay[x], matrix_c)) return way;
    const Rectangle r{0, 0, row_extent(w, i).size(), col_extent(w, j).size()};
    const int chunks = relay_chunks_of(matrix_c, r);
    const std::int64_t bytes = chunk_bytes_of(matrix_c, r, chunks);
    Arrival real{not_before, not_before};
    const Arrival seen = over(*d, real, bytes, chunks);
    for (int l = 0; l <= d->relays; ++l)
        real = next_hop(real, free_[d->leg[l].resource], cost(d->leg[l], bytes), chunks);
    if (seen.last >= std::max(free_at(way.link), not_before) + way.busy) return way;
    return {d, d->leg[0], real.last, chunks * cost(d->leg[0], bytes)};
}

Time Scheduler::copy_c(Worker &w, int i, int j, std::int32_t piece, bool inward, CPlace place, std::int32_t awaited,
                       Time not_before, std::int32_t &task) {
    const CWay way = c_way(w, i, j, piece, inward, not_before);
    if (way.detour) return relay_c(w, i, j, piece, inward, place, *way.detour, awaited, not_before, task);
    const std::int32_t local = c_region(w, i, j, place), user = held_c_region(w, i, j, piece);
    task = add_task(copy_task, lane_for_copy(way.link, !inward), -1,
                    {{inward ? local : user, one}, {inward ? user : local, one}}, {awaited});
    free_[way.link.resource] = way.arrival;
    end_ = std::max(end_, way.arrival);
    return way.arrival;
}

Time Scheduler::relay_c(Worker &w, int i, int j, std::int32_t piece, bool inward, CPlace place, const Detour &d,
                        std::int32_t awaited, Time not_before, std::int32_t &task) {
    const Rectangle r{0, 0, row_extent(w, i).size(), col_extent(w, j).size()};
    const int chunks = relay_chunks_of(matrix_c, r), group = next_group_++;
    const std::int64_t bytes = chunk_bytes_of(matrix_c, r, chunks);
    const std::int32_t local = c_region(w, i, j, place, chunks), user = held_c_region(w, i, j, piece, chunks);
    std::array<std::int32_t, most_relays + 2> places{inward ? user : local};
    Arrival arrival{not_before, not_before};
    for (int l = 0; l <= d.relays; ++l) {
        if (l < d.relays) {
            Cached copy = keep_copy(d.relay[l], matrix_c, r.rows, r.cols);
            places[l + 1] = chunk_regions(copy.regions, copy.buffer, copy.place, chunks);
        }
        Time &until = free_[d.leg[l].resource];
        arrival = next_hop(arrival, until, cost(d.leg[l], bytes), chunks);
        until = arrival.last;
    }
    places[d.relays + 1] = inward ? local : user;
    for (int q = 0; q < chunks; ++q) {
        std::int32_t previous = awaited;
        for (int l = 0; l <= d.relays; ++l)
            previous = add_task(copy_task, lane_for_copy(d.leg[l], !inward), group,
                                {{places[l + 1] + q, one}, {places[l] + q, one}}, {previous});
        task = previous;
    }
    end_ = std::max(end_, arrival.last);
    return arrival.last;
}

// Brings a tile to all who hold it but the rank that has formed it.
void Scheduler::write_back(Worker &w, const CTile &c, int i, int j, CPlace place, std::int32_t awaited,
                           Time not_before) {
    const auto last = c.piece + static_cast<std::int32_t>(in_.pieces[matrix_c][c.piece].holders);
    std::int32_t task = -1;
    for (std::int32_t piece = c.piece; piece < last; ++piece)
        if (piece != c.home) copy_c(w, i, j, piece, false, place, awaited, not_before, task);
}

void Scheduler::open(Worker &w, CTile &c, int i, int j) {
    c.lane = lane_for_compute(w.rank, in_.overlap ? w.opened % in_.compute_lanes : 0);
    ++w.opened;
    if (fetches(c) && !in_.lazy) c.fetched = copy_c(w, i, j, c.piece, true, in_place(c), -1, 0, c.fetch);
    if (!track_known_) return;
    ReadyHeap &waiting = w.waiting[c_index(w, i, j)];
    for (; !waiting.empty(); waiting.pop())
        w.pending.push(waiting.top());
}

void Scheduler::close(Worker &w, CTile &c, int i, int j) {
    const std::int64_t elements = row_extent(w, i).size() * col_extent(w, j).size();
    const bool combines = in_.rounds_c || (in_.lazy && fetches(c));
    if (fetches(c) && in_.lazy) c.fetched = copy_c(w, i, j, c.piece, true, in_place(c), -1, 0, c.fetch);
    if (combines) {
        const std::int32_t sum = c_region(w, i, j, CPlace::panel);
        const std::int32_t out = c_region(w, i, j, out_place(c));
        std::int64_t bytes = elements * (in_.accumulator_itemsize + in_.itemsize[matrix_c]);
        if (in_.reads_c) {
            bytes += elements * in_.itemsize[matrix_c];
            c.last = add_task(combine_task, c.lane, -1,
                              {{out, one}, {sum, one}, {c_region(w, i, j, in_place(c)), beta}}, {c.fetch});
        } else {
            c.last = add_task(combine_task, c.lane, -1, {{out, one}, {sum, one}}, {});
        }
        c.computed = run_on(w.rank, std::max(c.fetched, c.computed), combine_time(w.rank, bytes));
    }
    write_back(w, c, i, j, out_place(c), c.last, c.computed);
}

}  // namespace uncut
