#include "uncut_order.hpp"

#include <algorithm>
#include <bit>

namespace uncut {
namespace {

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

}  // namespace

Order::Order(const Input &in, const Tiling &tiling, Links &links, Router &router, Result &result)
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
                arrived(w, tiling.tile(w, side_b, static_cast<int>(at) / tiling.kt, static_cast<int>(at) % tiling.kt));
    }
}

Subproblem Order::next(const Worker &w) {
    Queue &queue = queues_[w.number];
    --queue.left;
    if (!by_eta_) return next_fixed(w);
    const Subproblem chosen = select(w);
    queue.done[sub_index(w, chosen)] = true;
    return chosen;
}

void Order::arrived(const Worker &w, const Tile &t) {
    if (!by_eta_) return;
    ++queues_[w.number].known[t.side][t.p];
    const int other = 1 - t.side;
    const std::vector<Time> &etas = router_.etas(w, other);
    for (int o = 0; o < w.cuts[other]->count(); ++o)
        if (etas[tiling_.tile_index(o, t.p)] < never)
            add_known(w, t.side == side_a ? Subproblem{t.outer, o, t.p} : Subproblem{o, t.outer, t.p});
}

void Order::opened(const Worker &w, int i, int j) {
    if (!by_eta_) return;
    Queue &queue = queues_[w.number];
    const std::size_t c = w.c_index(i, j);
    queue.lacks_c[c] = false;
    for (ReadyHeap &waiting = queue.waiting[c]; !waiting.empty(); waiting.pop())
        queue.pending.push(waiting.top());
}

void Order::advanced(const Worker &w, int i, int j) {
    if (!by_eta_) return;
    Queue &queue = queues_[w.number];
    const std::size_t c = w.c_index(i, j);
    const int progress = result_.progress(w, c);
    if (progress < tiling_.kt && !queue.ready[c].empty()) queue.ready_tiles.push({progress, static_cast<int>(c)});
}

Subproblem Order::next_fixed(const Worker &w) {
    const int kt = tiling_.kt;
    const std::int64_t at = queues_[w.number].next++;
    const std::int64_t c = w.owned.empty() ? at / kt : w.owned[static_cast<std::size_t>(at / kt)];
    return {static_cast<int>(c % w.mt), static_cast<int>(c / w.mt), static_cast<int>(at % kt)};
}

void Order::add_known(const Worker &w, const Subproblem &s) {
    const Time eta = std::max(router_.etas(w, side_a)[tiling_.tile_index(s.i, s.p)],
                              router_.etas(w, side_b)[tiling_.tile_index(s.j, s.p)]);
    Queue &queue = queues_[w.number];
    const std::size_t c = w.c_index(s.i, s.j);
    (queue.lacks_c[c] ? queue.waiting[c] : queue.pending).push({eta, s.j, s.i, s.p});
}

void Order::drop_done(const Worker &w, ReadyHeap &heap) const {
    while (!heap.empty() && queues_[w.number].done[sub_index(w, heap.top().subproblem())])
        heap.pop();
}

// When what a sub-problem lacks would be there, if it were chosen now. With batching all tiles of a kind that are
// missing are missing alike, so few values serve a whole scan.
inline Time Order::estimate(const Worker &w, const Subproblem &s, Missing missing) {
    if (!in_.batch) return estimate_single(w, s, missing);
    const std::size_t of = tiling_.kind_of_c(w, s.i, s.j) * blank_seen_.size() + tiling_.k_cuts.kinds[s.p];
    const std::size_t which = of << 3 | static_cast<unsigned>(missing.a | missing.b << 1 | missing.c << 2);
    Estimate &known = estimates_[which & (estimates_.size() - 1)];
    if (known.scan != scan_ || known.of != which) known = {scan_, which, estimate_batched(w, s, missing)};
    return known.eta;
}

Subproblem Order::select(const Worker &w) {
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
void Order::scan_missing(const Worker &w, Time compute_free, Choice &best) {
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
                const Missing missing{a_eta >= never, b_eta >= never, queue.awaits_c && queue.lacks_c[w.c_index(i, j)]};
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

// Books the links of A before B is routed, and those of both before C is.
Time Order::estimate_batched(const Worker &w, const Subproblem &s, Missing missing) {
    if (in_parts_) {
        const std::size_t ranks =
            std::max(tiling_.sharers[side_a][w.group[side_a]].size(), tiling_.sharers[side_b][w.group[side_b]].size());
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
Time Order::estimate_single(const Worker &w, const Subproblem &s, Missing missing) {
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

// Tiles of C of a kind are all alike.
const Order::SingleFetch &Order::c_fetch(const Worker &w, int i, int j) {
    SingleFetch &known = single_c_[tiling_.kind_of_c(w, i, j)];
    if (known.scan == scan_) return known;
    const Result::CWay way = result_.way_in(w, i, j);
    return known = {scan_, way.path.leg[0].resource, way.arrival, way.busy()};
}

const Order::SingleFetch &Order::single_fetch(const Worker &w, const Tile &t) {
    if (single_[t.side].size() <= t.at) single_[t.side].resize(tiling_.origins[t.side][t.group].size());
    SingleFetch &known = single_[t.side][t.at];
    if (known.scan == scan_) return known;
    const Time eta = router_.find(w, t, trial_);
    const Link &first = *trial_.legs[0].link;
    return known = {scan_, first.resource, eta, trial_.chunks.count * cost(first, trial_.chunks.bytes)};
}

}  // namespace uncut
