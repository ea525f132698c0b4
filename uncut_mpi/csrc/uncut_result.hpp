// Tiles of C: their products, and how they are fetched, combined and written back.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <vector>

#include "uncut_router.hpp"

namespace uncut {

class Result {
  public:
    Result(const Input &in, const Tiling &tiling, Links &links, Records &records)
        : in_(in),
          tiling_(tiling),
          links_(links),
          records_(records),
          is_input_(in.reads_c && !in.lazy && !in.rounds_c()),
          opened_(tiling.workers.size(), 0) {
        for (const Worker &w : tiling.workers) {
            tiles_.emplace_back(w.num_c());
            for (std::int32_t piece = 0, j = 0; j < w.nt; ++j)
                for (int i = 0; i < w.mt; ++i) {
                    CTile &c = tile(w, i, j);
                    c.piece = piece = tiling.piece_of(matrix_c, w.rows(i), w.cols(j), piece);
                    c.home = tiling.home_of(matrix_c, piece, w.rank);
                }
        }
    }

    // How many sub-problems of a tile are scheduled, and whether the first one awaits the tile.
    int progress(const Worker &w, std::size_t c) const { return tiles_[w.number][c].progress; }
    bool awaited(const Worker &w, std::size_t c) const { return is_input_ && tiles_[w.number][c].home < 0; }

    // Begins a tile with its first sub-problem; returns whether this is it.
    bool open(const Worker &w, int i, int j) {
        CTile &c = tile(w, i, j);
        if (c.progress > 0) return false;
        c.lane = records_.compute_lane_of(w.rank, in_.overlap ? opened_[w.number] % in_.compute_lanes : 0);
        ++opened_[w.number];
        if (fetches(c) && !in_.lazy) fetch(w, c, i, j);
        c.sum = records_.writer().region(region(w, i, j, sum_place(c)));
        return true;
    }

    // A task that makes or brings something, and when it has.
    struct Done {
        std::int32_t task;
        Time end;
    };

    // Adds one product to a tile that is open, and ends the tile with its last one.
    Done add(const Worker &w, const Subproblem &s, const Router::Source &a, const Router::Source &b) {
        CTile &c = tile(w, s.i, s.j);
        const bool first = c.progress == 0, awaits_c = first && is_input_;
        const bool beta_now = first && in_.reads_c && !in_.rounds_c() && (c.home >= 0 || is_input_);
        const std::array<OperandRecord, 4> operands{
            {{c.sum, one}, {a.region, alpha, in_.op_a}, {b.region, one, in_.op_b}, {c.sum, beta_now ? beta : one}}};
        const std::array awaits{a.task, b.task, awaits_c ? c.fetch : -1};
        const std::size_t count = first && !beta_now ? 3 : 4;  // without what is added to
        c.last = records_.writer().task(gemm_task, c.lane, -1, std::span(operands).first(count), awaits);
        const double flops = 2.0 * static_cast<double>(w.rows(s.i).size()) * static_cast<double>(w.cols(s.j).size()) *
                             static_cast<double>(tiling_.k_cuts[s.p].size());
        c.computed = links_.compute(w.rank, std::max({a.eta, b.eta, awaits_c ? c.fetched : 0}),
                                    std::llround(flops * in_.ps_per_flop[w.rank]));
        const Done product{c.last, c.computed};
        if (++c.progress == tiling_.kt) close(w, c, s.i, s.j);
        return product;
    }

    // How a tile travels.
    struct CWay {
        Detour path;  // without relays the link
        Chunks chunks;
        Time arrival = 0;  // of all of it
        Time busy() const {
            return chunks.count * cost(path.leg[0], chunks.bytes);
        }  // how long it keeps the first link
    };
    CWay way_in(const Worker &w, int i, int j) { return find_way(w, i, j, tile(w, i, j).piece, true, 0); }

  private:
    struct CTile {
        int progress = 0;                   // sub-problems scheduled
        std::int32_t piece = 0, home = -1;  // of its first holder, and the one on the rank's own device if there is one
        std::int32_t lane = -1, sum = -1, fetch = -1, last = -1;  // sum: the region of what is summed
        Time fetched = 0, computed = 0;
    };
    enum class Place { user, panel, staging };

    CTile &tile(const Worker &w, int i, int j) { return tiles_[w.number][w.c_index(i, j)]; }
    bool fetches(const CTile &c) const { return in_.reads_c && c.home < 0; }
    // Sum of products, and where C_in is fetched to and C_out is written back from.
    Place sum_place(const CTile &c) const { return c.home >= 0 && !in_.rounds_c() ? Place::user : Place::panel; }
    Place in_place(const CTile &c) const { return in_.lazy ? staged(c, Place::staging) : out_place(c); }
    Place out_place(const CTile &c) const { return staged(c, in_.rounds_c() ? Place::staging : Place::panel); }
    static Place staged(const CTile &c, Place elsewhere) { return c.home >= 0 ? Place::user : elsewhere; }

    Region region(const Worker &w, int i, int j, Place place) {
        const CTile &c = tile(w, i, j);
        if (place == Place::user) return held_region(w, i, j, c.home);
        const auto buffer = static_cast<int>((place == Place::panel ? in_.c_panel : in_.c_staging)[w.rank]);
        return {buffer, w.panels[side_a].place[i], w.panels[side_b].place[j], w.rows(i).size(), w.cols(j).size()};
    }

    Region held_region(const Worker &w, int i, int j, std::int32_t piece) const {
        return in_piece(in_.pieces[matrix_c][piece], w.rows(i), w.cols(j), false);
    }

    // To a holder of a tile, or from there.
    CWay find_way(const Worker &w, int i, int j, std::int32_t piece, bool inward, Time not_before) {
        const int holder = in_.pieces[matrix_c][piece].origin.location, from = inward ? holder : w.rank,
                  to = inward ? w.rank : holder;
        const Region tile = held_region(w, i, j, piece);
        CWay way{{}, links_.chunks(matrix_c, tile, 1)};
        const auto arrival = [&](const CWay &one, bool idle) {
            return links_.over(one.path, {not_before, not_before}, one.chunks, idle).last;
        };
        Link &direct = way.path.leg[0] = links_.link(from, to);
        if (!inward && in_.overlap) {
            direct.resource = direct.at;  // results have a lane of their own
        } else if (!inward && !links_.in_host(to)) {
            direct.issuer = w.rank, direct.resource = links_.resource_of(w.rank);
        }
        const Detour *d = links_.detour(matrix_c, from, to);
        const auto keeps = [&](const Link &leg) { return records_.can_keep(leg.destination, matrix_c); };
        if (d && std::all_of(d->leg.begin(), d->leg.begin() + d->relays, keeps)) {
            const CWay relayed{*d, links_.relayed_chunks(matrix_c, tile)};
            if (arrival(relayed, links_.blind()) < arrival(way, links_.blind())) way = relayed;
        }
        way.arrival = arrival(way, false);
        return way;
    }

    Done copy(const Worker &w, int i, int j, std::int32_t piece, bool inward, Place place, std::int32_t awaited,
              Time not_before) {
        const CWay way = find_way(w, i, j, piece, inward, not_before);
        const int relays = way.path.relays, chunks = way.chunks.count;
        const Region own = region(w, i, j, place);
        TableWriter &writer = records_.writer();
        const std::int32_t local = writer.regions(own, chunks),
                           user = writer.regions(held_region(w, i, j, piece), chunks);
        copies_.clear();
        Arrival arrival{not_before, not_before};
        for (int l = 0; l <= relays; ++l) {
            const Link &leg = way.path.leg[l];
            LegCopies hop{.lane = records_.copy_lane_of(leg, !inward), .parent = l - 1, .awaits = awaited};
            hop.read = l > 0 ? copies_[l - 1].write : inward ? user : local;
            hop.write = l == relays ? (inward ? local : user)
                                    : writer.regions(records_.keep(leg.destination, matrix_c, own), chunks);
            copies_.push_back(hop);
            arrival = next_hop(arrival, links_.busy_until(leg), cost(leg, way.chunks.bytes), chunks);
            links_.take(leg, arrival.last);
        }
        records_.copy_chunks(copies_, chunks);
        return {copies_.back().brought, way.arrival};
    }

    void fetch(const Worker &w, CTile &c, int i, int j) {
        const Done done = copy(w, i, j, c.piece, true, in_place(c), -1, 0);
        c.fetch = done.task;
        c.fetched = done.end;
    }

    // Combines what is summed, and brings the tile to all who hold it but the rank that has formed it.
    void close(const Worker &w, CTile &c, int i, int j) {
        if (fetches(c) && in_.lazy) fetch(w, c, i, j);
        if (in_.rounds_c() || (in_.lazy && fetches(c))) {
            const std::array<Operand, 3> operands{{{region(w, i, j, out_place(c))},
                                                   {region(w, i, j, Place::panel)},
                                                   {region(w, i, j, in_place(c)), beta}}};
            const std::size_t regions = in_.reads_c ? 3 : 2;
            const std::int64_t bytes = w.rows(i).size() * w.cols(j).size() *
                                       (bytes_of(in_.accumulator()) + (in_.reads_c ? 2 : 1) * in_.itemsize(matrix_c));
            c.last = records_.writer().task(combine_task, c.lane, std::span(operands).first(regions), {&c.fetch, 1});
            c.computed = links_.compute(w.rank, std::max(c.fetched, c.computed), links_.combine_time(w.rank, bytes));
        }
        const auto last = c.piece + static_cast<std::int32_t>(in_.pieces[matrix_c][c.piece].holders);
        for (std::int32_t piece = c.piece; piece < last; ++piece)
            if (piece != c.home) copy(w, i, j, piece, false, out_place(c), c.last, c.computed);
    }

    const Input &in_;
    const Tiling &tiling_;
    Links &links_;
    Records &records_;
    const bool is_input_;                    // whether first products wait for C
    std::vector<std::vector<CTile>> tiles_;  // by worker: [j * mt + i]
    std::vector<int> opened_;                // likewise
    std::vector<LegCopies> copies_;          // scratch
};

}  // namespace uncut
