// Tiles of C: fetched, combined and written back.
#include "uncut_state.hpp"

namespace uncut {

// To a holder of a tile, or from there.
Scheduler::CWay Scheduler::c_way(const Worker &w, int i, int j, std::int32_t piece, bool inward, Time not_before) {
    const int holder = in_.pieces[matrix_c][piece].origin.location, from = inward ? holder : w.rank,
              to = inward ? w.rank : holder;
    const auto arrival = [&](const CWay &way, bool idle) {
        return over(way.path, {not_before, not_before}, way.chunk_bytes, way.chunks, idle).last;
    };
    const Region tile = held_c_region(w, i, j, piece);
    CWay way{{}, 1, chunk_bytes_of(matrix_c, tile, 1)};
    Link &direct = way.path.leg[0] = link(from, to);
    if (!inward && in_.overlap) {
        direct.resource = direct.at;  // results have a lane of their own
    } else if (!inward && !in_host(to)) {
        direct.issuer = w.rank, direct.resource = resource_of(w.rank);
    }
    const Detour *d = detour(matrix_c, from, to);
    const auto keeps = [&](int relay) { return can_keep(relay, matrix_c); };
    if (d && std::all_of(d->relay.begin(), d->relay.begin() + d->relays, keeps)) {
        const int chunks = relay_chunks_of(matrix_c, tile);
        const CWay relayed{*d, chunks, chunk_bytes_of(matrix_c, tile, chunks)};
        if (arrival(relayed, blind()) < arrival(way, blind())) way = relayed;
    }
    way.arrival = arrival(way, false);
    return way;
}

Time Scheduler::copy_c(Worker &w, int i, int j, std::int32_t piece, bool inward, CPlace place, std::int32_t awaited,
                       Time not_before, std::int32_t &task) {
    const CWay way = c_way(w, i, j, piece, inward, not_before);
    const Region own = c_region(w, i, j, place);
    const std::int32_t local = writer_.regions(own, way.chunks),
                       user = writer_.regions(held_c_region(w, i, j, piece), way.chunks);
    std::vector<LegCopies> &hops = copies_;
    hops.clear();
    Arrival arrival{not_before, not_before};
    for (int l = 0; l <= way.path.relays; ++l) {
        const Link &leg = way.path.leg[l];
        LegCopies hop{.lane = lane_for_copy(leg, !inward), .parent = l - 1, .awaits = awaited};
        hop.read = l > 0 ? hops[l - 1].write : inward ? user : local;
        hop.write = l == way.path.relays
                        ? (inward ? local : user)
                        : writer_.regions(keep_copy(way.path.relay[l], matrix_c, own).region, way.chunks);
        hops.push_back(hop);
        Time &until = free_[leg.resource];
        arrival = next_hop(arrival, until, cost(leg, way.chunk_bytes), way.chunks);
        until = arrival.last;
    }
    copy_chunks(hops, way.chunks);
    task = hops.back().brought;
    end_ = std::max(end_, way.arrival);
    return way.arrival;
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
    const bool combines = in_.rounds_c() || (in_.lazy && fetches(c));
    if (fetches(c) && in_.lazy) c.fetched = copy_c(w, i, j, c.piece, true, in_place(c), -1, 0, c.fetch);
    if (combines) {
        const std::array<Operand, 3> operands{{{c_region(w, i, j, out_place(c))},
                                               {c_region(w, i, j, CPlace::panel)},
                                               {c_region(w, i, j, in_place(c)), beta}}};
        const std::size_t regions = in_.reads_c ? 3 : 2;
        const std::int64_t bytes =
            elements * (bytes_of(in_.accumulator()) + (in_.reads_c ? 2 : 1) * in_.itemsize(matrix_c));
        c.last = writer_.task(combine_task, c.lane, std::span(operands).first(regions), {&c.fetch, 1});
        c.computed = run_on(w.rank, std::max(c.fetched, c.computed), combine_time(w.rank, bytes));
    }
    write_back(w, c, i, j, out_place(c), c.last, c.computed);
}

}  // namespace uncut
