// Which sub-problem of a rank comes next: the order by ETA (III-G1), or the fixed one.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <queue>
#include <tuple>
#include <vector>

#include "uncut_result.hpp"

namespace uncut {

// Steps of k without any tile here that a scan without batching looks at. Each tile of theirs may have other holders,
// but the earliest are rarely far ahead, and k can have hundreds of steps.
constexpr int most_blanks = 8;

// Sub-problems that all selections together look at, half a second or so; without batching each takes as long as so
// many others. Looking at all that are left for each one that is chosen takes the square of their number. So of very
// many the last ones are taken in their own order.
constexpr std::int64_t most_looked_at = std::int64_t{1} << 28;
constexpr std::int64_t cost_without_batching = 32;

// Of matrices in parts a scan routes tiles of many kinds, which takes as long for each two ranks that lack one as
// looking at so many sub-problems.
constexpr std::int64_t cost_of_a_hop = 20;

// Estimates of tiles of different kinds that a scan keeps, a power of two: more than there are but for matrices in very
// many parts.
constexpr std::size_t most_estimates = 4096;

class Order {
  public:
    Order(const Input &in, const Tiling &tiling, Links &links, Router &router, Result &result)
        : in_(in),
          tiling_(tiling),
          links_(links),
          router_(router),
          result_(result),
          by_eta_(in.eta_order && in.caching),
          in_parts_(std::ranges::any_of(in.pieces, [](const auto &pieces) { return pieces.size() > 1; })),
          queues_(tiling.workers.size()) {
        const auto [rows, cols, inner] = tiling.num_kinds;
        blank_seen_.resize(inner);
        single_c_.resize(rows * cols);
        estimates_.resize(std::min(most_estimates, std::bit_ceil(8 * rows * cols * inner)));
        for (const Worker &w : tiling.workers) {
            Queue &queue = queues_[w.number];
            const std::size_t tiles = w.num_c();
            queue.left = static_cast<std::int64_t>(w.owned.empty() ? tiles : w.owned.size()) * tiling.kt;
            if (!by_eta_) continue;
            queue.done.assign(tiles * tiling.kt, false);
            queue.ready.resize(tiles);
            queue.waiting.resize(tiles);
            queue.lacks_c.resize(tiles);
            for (std::size_t c = 0; c < tiles; ++c)
                queue.lacks_c[c] = result.awaited(w, c);
            queue.awaits_c = std::ranges::find(queue.lacks_c, true) != queue.lacks_c.end();
            for (const int side : {side_a, side_b})
                queue.known[side].assign(tiling.kt, 0);
            // Where both A and B are at home, sub-problems can run from the start.
            const std::vector<std::int32_t> &a = w.panels[side_a].home, &b = w.panels[side_b].home;
            for (std::size_t at = 0; at < a.size(); ++at)
                queue.known[side_a][at % tiling.kt] += a[at] >= 0;
            for (std::size_t at = 0; at < b.size(); ++at)
                if (b[at] >= 0)
                    arrived(w,
                            tiling.tile(w, side_b, static_cast<int>(at) / tiling.kt, static_cast<int>(at) % tiling.kt));
        }
    }

    // Sub-problems of a worker that have yet to come, and the next one.
    std::int64_t left(const Worker &w) const { return queues_[w.number].left; }

    Subproblem next(const Worker &w) {
        Queue &queue = queues_[w.number];
        --queue.left;
        if (!by_eta_) return next_fixed(w);
        const Subproblem chosen = select(w);
        queue.done[sub_index(w, chosen)] = true;
        return chosen;
    }

    // What has changed: a tile of A or B is at a worker or under way; a tile of C is open; it has got one more product.
    void arrived(const Worker &w, const Tile &t) {
        if (!by_eta_) return;
        ++queues_[w.number].known[t.side][t.p];
        const int other = 1 - t.side;
        const std::vector<Time> &etas = router_.etas(w, other);
        for (int o = 0; o < w.cuts[other]->count(); ++o)
            if (etas[tiling_.tile_index(o, t.p)] < never)
                add_known(w, t.side == side_a ? Subproblem{t.outer, o, t.p} : Subproblem{o, t.outer, t.p});
    }

    void opened(const Worker &w, int i, int j) {
        if (!by_eta_) return;
        Queue &queue = queues_[w.number];
        const std::size_t c = w.c_index(i, j);
        queue.lacks_c[c] = false;
        for (ReadyHeap &waiting = queue.waiting[c]; !waiting.empty(); waiting.pop())
            queue.pending.push(waiting.top());
    }

    void advanced(const Worker &w, int i, int j) {
        if (!by_eta_) return;
        Queue &queue = queues_[w.number];
        const std::size_t c = w.c_index(i, j);
        const int progress = result_.progress(w, c);
        if (progress < tiling_.kt && !queue.ready[c].empty()) queue.ready_tiles.push({progress, static_cast<int>(c)});
    }

  private:
    struct Ready {
        Time eta;
        int j, i, p;
        auto operator<=>(const Ready &) const = default;
        Subproblem subproblem() const { return {i, j, p}; }
    };
    using ReadyHeap = std::priority_queue<Ready, std::vector<Ready>, std::greater<>>;

    // A C tile with sub-problems that can run now: the most advanced first.
    struct ReadyTile {
        int progress, tile;
        bool operator<(const ReadyTile &other) const {
            return progress != other.progress ? progress < other.progress : tile > other.tile;
        }
    };

    // A worker's sub-problems. Of those whose A and B are here or under way, first those of C tiles that may start, by
    // ETA, then those whose ETA has passed, per C tile. Last those that wait for their C tile to be chosen.
    struct Queue {
        std::int64_t left = 0, next = 0;
        std::vector<bool> done;
        std::array<std::vector<int>, 2> known;  // per p, tiles of A and of B that are here or under way
        std::vector<char> lacks_c;              // tiles of C that their first product has to wait for
        bool awaits_c = false;                  // whether there is one at all
        ReadyHeap pending;
        std::vector<ReadyHeap> ready, waiting;
        std::priority_queue<ReadyTile> ready_tiles;
    };

    // Smaller is better; see planning/uncut.py for the order in words.
    struct Choice {
        Time start = never;
        int fetches = 0;
        int reuse = 0;
        Subproblem s{0, 0, 0};
        bool opens = false;
        auto key() const { return std::make_tuple(start, opens, fetches, -reuse, s.j, s.i, s.p); }
        bool operator<(const Choice &other) const { return key() < other.key(); }
    };
    // What a sub-problem lacks.
    struct Missing {
        bool a, b, c;
    };
    // One fetch, for one rank, on one link.
    struct SingleFetch {
        unsigned scan = 0;
        std::size_t resource = 0;
        Time eta = 0, cost = 0;
    };
    struct Estimate {
        unsigned scan = 0;
        std::size_t of = 0;
        Time eta = 0;
    };

    std::size_t sub_index(const Worker &w, const Subproblem &s) const { return w.c_index(s.i, s.j) * tiling_.kt + s.p; }
    // Whether a sub-problem begins a C tile, where that counts against it.
    bool opens(const Worker &w, int i, int j) const {
        return in_.finish_first && result_.progress(w, w.c_index(i, j)) == 0;
    }

    Subproblem next_fixed(const Worker &w) {
        const int kt = tiling_.kt;
        const std::int64_t at = queues_[w.number].next++;
        const std::int64_t c = w.owned.empty() ? at / kt : w.owned[static_cast<std::size_t>(at / kt)];
        return {static_cast<int>(c % w.mt), static_cast<int>(c / w.mt), static_cast<int>(at % kt)};
    }

    void add_known(const Worker &w, const Subproblem &s) {
        const Time eta = std::max(router_.etas(w, side_a)[tiling_.tile_index(s.i, s.p)],
                                  router_.etas(w, side_b)[tiling_.tile_index(s.j, s.p)]);
        Queue &queue = queues_[w.number];
        const std::size_t c = w.c_index(s.i, s.j);
        (queue.lacks_c[c] ? queue.waiting[c] : queue.pending).push({eta, s.j, s.i, s.p});
    }

    void drop_done(const Worker &w, ReadyHeap &heap) const {
        while (!heap.empty() && queues_[w.number].done[sub_index(w, heap.top().subproblem())])
            heap.pop();
    }

    Subproblem select(const Worker &w) {
        Queue &queue = queues_[w.number];
        if (looked_at_ > most_looked_at) {
            Subproblem next = next_fixed(w);
            while (queue.done[sub_index(w, next)])
                next = next_fixed(w);
            return next;
        }
        const Time compute_free = links_.computes_until(w.rank);
        ReadyHeap &pending = queue.pending;
        for (drop_done(w, pending); !pending.empty() && pending.top().eta <= compute_free; drop_done(w, pending)) {
            const Ready top = pending.top();
            const std::size_t c = w.c_index(top.i, top.j);
            queue.ready[c].push(top);
            queue.ready_tiles.push({result_.progress(w, c), static_cast<int>(c)});
            pending.pop();
        }
        for (; !queue.ready_tiles.empty(); queue.ready_tiles.pop()) {
            const ReadyTile top = queue.ready_tiles.top();
            ReadyHeap &heap = queue.ready[top.tile];
            drop_done(w, heap);
            if (!heap.empty() && result_.progress(w, top.tile) == top.progress) return heap.top().subproblem();
        }
        Choice best;
        if (!pending.empty()) {
            const Ready &top = pending.top();
            best = {top.eta, 0, 0, top.subproblem(), opens(w, top.i, top.j)};
        }
        ++scan_;
        if (queue.awaits_c) looked_at_ += static_cast<std::int64_t>(queue.waiting.size());
        for (std::size_t c = 0; queue.awaits_c && c < queue.waiting.size(); ++c) {
            ReadyHeap &heap = queue.waiting[c];
            drop_done(w, heap);
            if (heap.empty()) continue;
            const Subproblem s = heap.top().subproblem();
            const Time start = std::max({compute_free, heap.top().eta, estimate(w, s, {false, false, true})});
            const Choice choice{start, 1, static_cast<int>(heap.size()), s, in_.finish_first};
            if (choice < best) best = choice;
        }
        scan_missing(w, compute_free, best);
        return best.s;
    }

    // Sub-problems that lack A or B.
    void scan_missing(const Worker &w, Time compute_free, Choice &best) {
        const std::vector<Time> &a_etas = router_.etas(w, side_a), &b_etas = router_.etas(w, side_b);
        const Queue &queue = queues_[w.number];
        const std::vector<int> &a_known = queue.known[side_a], &b_known = queue.known[side_b];
        int blanks = 0;
        looked_at_ += tiling_.kt;
        for (int p = 0; p < tiling_.kt; ++p) {
            if (a_known[p] == w.mt && b_known[p] == w.nt) continue;
            if (!a_known[p] && !b_known[p]) {
                if (in_.batch) {
                    // All like the first such p of this kind, which wins by its index.
                    unsigned &seen = blank_seen_[tiling_.k_cuts.kinds[p]];
                    if (seen == scan_) continue;
                    seen = scan_;
                } else if (++blanks > most_blanks) {
                    continue;
                }
            }
            looked_at_ += std::int64_t{w.mt} * w.nt * (in_.batch ? 1 : cost_without_batching);
            for (int j = 0; j < w.nt; ++j) {
                const Time b_eta = b_etas[tiling_.tile_index(j, p)];
                for (int i = 0; i < w.mt; ++i) {
                    const Time a_eta = a_etas[tiling_.tile_index(i, p)];
                    const Missing missing{a_eta >= never, b_eta >= never,
                                          queue.awaits_c && queue.lacks_c[w.c_index(i, j)]};
                    if (!missing.a && !missing.b) continue;
                    Time start = std::max(compute_free, estimate(w, {i, j, p}, missing));
                    if (!missing.a) start = std::max(start, a_eta);
                    if (!missing.b) start = std::max(start, b_eta);
                    if (start > best.start) continue;
                    const int reuse = !missing.a ? a_known[p] : missing.b ? 0 : b_known[p];
                    const Choice choice{start, missing.a + missing.b + missing.c, reuse, {i, j, p}, opens(w, i, j)};
                    if (choice < best) best = choice;
                }
            }
        }
    }

    // When what a sub-problem lacks would be there, if it were chosen now. With batching all tiles of a kind that are
    // missing are missing alike, so few values serve a whole scan.
    Time estimate(const Worker &w, const Subproblem &s, Missing missing) {
        if (!in_.batch) return estimate_single(w, s, missing);
        const std::size_t of = tiling_.kind_of_c(w, s.i, s.j) * blank_seen_.size() + tiling_.k_cuts.kinds[s.p];
        const std::size_t which = of << 3 | static_cast<unsigned>(missing.a | missing.b << 1 | missing.c << 2);
        Estimate &known = estimates_[which & (estimates_.size() - 1)];
        if (known.scan != scan_ || known.of != which) known = {scan_, which, estimate_batched(w, s, missing)};
        return known.eta;
    }

    // Books the links of A before B is routed, and those of both before C is.
    Time estimate_batched(const Worker &w, const Subproblem &s, Missing missing) {
        if (in_parts_) {
            const std::size_t ranks = std::max(tiling_.sharers[side_a][w.group[side_a]].size(),
                                               tiling_.sharers[side_b][w.group[side_b]].size());
            looked_at_ += cost_of_a_hop * static_cast<std::int64_t>(ranks * ranks);
        }
        Time eta = 0;
        before_.clear();
        if (missing.a) {
            eta = router_.find(w, tiling_.tile(w, side_a, s.i, s.p), trial_);
            if (missing.b || missing.c) router_.book(trial_, &before_);
        }
        if (missing.b) {
            eta = std::max(eta, router_.find(w, tiling_.tile(w, side_b, s.j, s.p), trial_));
            if (missing.c) router_.book(trial_, &before_);
        }
        if (missing.c) eta = std::max(eta, result_.way_in(w, s.i, s.j).arrival);
        links_.give_back(before_);
        return eta;
    }

    // Without batching each tile has its own holders, so the best fetch of each is kept for a scan;
    // fetches that share a link follow one another on it.
    Time estimate_single(const Worker &w, const Subproblem &s, Missing missing) {
        std::array<const SingleFetch *, 3> fetches;
        std::array<Time, 3> etas;
        std::size_t count = 0;
        if (missing.a) fetches[count++] = &single_fetch(w, tiling_.tile(w, side_a, s.i, s.p));
        if (missing.b) fetches[count++] = &single_fetch(w, tiling_.tile(w, side_b, s.j, s.p));
        if (missing.c) fetches[count++] = &c_fetch(w, s.i, s.j);
        Time eta = 0;
        for (std::size_t f = 0; f < count; ++f) {
            etas[f] = fetches[f]->eta;
            for (std::size_t before = 0; before < f; ++before)
                if (fetches[before]->resource == fetches[f]->resource)
                    etas[f] = std::max(etas[f], etas[before] + fetches[f]->cost);
            eta = std::max(eta, etas[f]);
        }
        return eta;
    }

    const SingleFetch &single_fetch(const Worker &w, const Tile &t) {
        if (single_[t.side].size() <= t.at) single_[t.side].resize(tiling_.origins[t.side][t.group].size());
        SingleFetch &known = single_[t.side][t.at];
        if (known.scan == scan_) return known;
        const Time eta = router_.find(w, t, trial_);
        const Link &first = *trial_.legs[0].link;
        return known = {scan_, first.resource, eta, trial_.chunks.count * cost(first, trial_.chunks.bytes)};
    }

    // Tiles of C of a kind are all alike.
    const SingleFetch &c_fetch(const Worker &w, int i, int j) {
        SingleFetch &known = single_c_[tiling_.kind_of_c(w, i, j)];
        if (known.scan == scan_) return known;
        const Result::CWay way = result_.way_in(w, i, j);
        return known = {scan_, way.path.leg[0].resource, way.arrival, way.busy()};
    }

    const Input &in_;
    const Tiling &tiling_;
    Links &links_;
    Router &router_;
    Result &result_;
    const bool by_eta_;
    bool in_parts_ = false;
    std::vector<Queue> queues_;   // by worker
    std::int64_t looked_at_ = 0;  // sub-problems, by all selections
    // Scratch of selection.
    unsigned scan_ = 0;
    Route trial_;
    Links::Before before_;
    std::vector<Estimate> estimates_;
    std::vector<unsigned> blank_seen_;  // per kind of k, in which scan
    std::array<std::vector<SingleFetch>, 2> single_;
    std::vector<SingleFetch> single_c_;  // per kind of rows and of columns
};

}  // namespace uncut
