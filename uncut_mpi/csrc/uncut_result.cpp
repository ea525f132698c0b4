// Tiles of C: fetched, combined and written back.
#include "uncut_state.hpp"

namespace uncut {

Scheduler::CWay Scheduler::c_way(const Worker &w, int i, int j, bool inward, Time not_before) {
    const int from = inward ? in_.c.location : w.rank, to = inward ? w.rank : in_.c.location;
    CWay way;
    way.link = link_of(matrix_c, from, to, w.rank);
    if (!inward && in_.overlap) way.link.resource = way.link.at;  // results have a lane of their own
    way.busy = cost(way.link, c_bytes(w, i, j));
    way.arrival = std::max(free_[way.link.resource], not_before) + way.busy;
    const Detour *d = detour(matrix_c, from, to);
    if (!d) return way;
    for (int x = 0; x < d->relays; ++x)
        if (!has_slot(d->relay[x], matrix_c)) return way;
    const Rectangle r{0, 0, row_extent(w, i).size, col_extent(w, j).size};
    const int chunks = relay_chunks_of(r);
    const std::int64_t bytes = chunk_bytes_of(r, chunks);
    Arrival seen{not_before, not_before}, real = seen;
    for (int l = 0; l <= d->relays; ++l) {
        const Time c = cost(d->leg[l], bytes);
        seen = next_hop(seen, free_at(d->leg[l]), c, chunks);
        real = next_hop(real, free_[d->leg[l].resource], c, chunks);
    }
    if (seen.last >= std::max(free_at(way.link), not_before) + way.busy) return way;
    return {d, d->leg[0], real.last, chunks * cost(d->leg[0], bytes)};
}

Time Scheduler::copy_c(Worker &w, int i, int j, bool inward, CPlace place, std::int32_t awaited, Time not_before,
                       std::int32_t &task) {
    const CWay way = c_way(w, i, j, inward, not_before);
    if (way.detour) return relay_c(w, i, j, inward, place, *way.detour, awaited, not_before, task);
    const std::int32_t local = c_region(w, i, j, place), user = c_region(w, i, j, CPlace::user);
    task = add_task(copy_task, lane_for_copy(way.link, !inward), -1,
                    {{inward ? local : user, one}, {inward ? user : local, one}}, {awaited});
    free_[way.link.resource] = way.arrival;
    end_ = std::max(end_, way.arrival);
    return way.arrival;
}

Time Scheduler::relay_c(Worker &w, int i, int j, bool inward, CPlace place, const Detour &d, std::int32_t awaited,
                        Time not_before, std::int32_t &task) {
    const Rectangle r{0, 0, row_extent(w, i).size, col_extent(w, j).size};
    const int chunks = relay_chunks_of(r), group = next_group_++;
    const std::int64_t bytes = chunk_bytes_of(r, chunks);
    const std::int32_t local = c_region(w, i, j, place, chunks), user = c_region(w, i, j, CPlace::user, chunks);
    std::array<std::int32_t, most_relays + 2> places{inward ? user : local};
    Arrival arrival{not_before, not_before};
    for (int l = 0; l <= d.relays; ++l) {
        if (l < d.relays) {
            Cached slot = take_slot(d.relay[l], matrix_c, r.rows, r.cols);
            places[l + 1] = chunk_regions(slot.whole, slot.chunked, slot.buffer, slot.place, chunks);
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

void Scheduler::open(Worker &w, CTile &c, int i, int j) {
    c.lane = lane_for_compute(w.rank, in_.overlap ? w.opened % in_.compute_lanes : 0);
    ++w.opened;
    if (fetches_c(w) && !in_.lazy) c.fetched = copy_c(w, i, j, true, in_place(w), -1, 0, c.fetch);
    if (!track_known_) return;
    ReadyHeap &waiting = w.waiting[static_cast<std::size_t>(j) * w.mt + i];
    for (; !waiting.empty(); waiting.pop())
        w.pending.push(waiting.top());
}

void Scheduler::close(Worker &w, CTile &c, int i, int j) {
    const std::int64_t elements = row_extent(w, i).size * col_extent(w, j).size;
    const bool combines = in_.half || (in_.lazy && fetches_c(w));
    if (fetches_c(w) && in_.lazy) c.fetched = copy_c(w, i, j, true, in_place(w), -1, 0, c.fetch);
    if (combines) {
        const std::int32_t sum = c_region(w, i, j, CPlace::panel);
        const std::int32_t out = c_region(w, i, j, out_place(w));
        std::int64_t bytes = elements * (in_.accumulator_itemsize + in_.itemsize);
        if (in_.reads_c) {
            bytes += elements * in_.itemsize;
            c.last = add_task(combine_task, c.lane, -1,
                              {{out, one}, {sum, one}, {c_region(w, i, j, in_place(w)), beta}}, {c.fetch});
        } else {
            c.last = add_task(combine_task, c.lane, -1, {{out, one}, {sum, one}}, {});
        }
        c.computed = run_on(w.rank, std::max(c.fetched, c.computed), combine_time(w.rank, bytes));
    }
    if (!w.c_home) {
        std::int32_t task = -1;
        copy_c(w, i, j, false, out_place(w), c.last, c.computed, task);
    }
}

}  // namespace uncut
