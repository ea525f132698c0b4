// Which sub-problem of a rank comes next: the order by ETA (III-G1).
#include "uncut_state.hpp"

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

}  // namespace

Subproblem Scheduler::next_fixed(Worker &w) const {
    const std::int64_t at = w.next++;
    const std::int64_t c = w.owned.empty() ? at / kt_ : w.owned[static_cast<std::size_t>(at / kt_)];
    return {static_cast<int>(c % w.mt), static_cast<int>(c / w.mt), static_cast<int>(at % kt_)};
}

void Scheduler::add_known(Worker &w, const Subproblem &s) {
    const Time eta = std::max(w.sides[side_a].eta[tile_index(s.i, s.p)], w.sides[side_b].eta[tile_index(s.j, s.p)]);
    const std::size_t c = c_index(w, s.i, s.j);
    ReadyHeap &heap = needs_c(w, c) ? w.waiting[c] : w.pending;
    heap.push({eta, s.j, s.i, s.p});
}

Subproblem Scheduler::select(Worker &w) {
    if (looked_at_ > most_looked_at) {
        Subproblem next = next_fixed(w);
        while (w.done[sub_index(w, next)])
            next = next_fixed(w);
        return next;
    }
    const Time compute_free = free_[resource_of(w.rank)];
    for (drop_done(w, w.pending); !w.pending.empty() && w.pending.top().eta <= compute_free; drop_done(w, w.pending)) {
        const Ready top = w.pending.top();
        const std::size_t c = c_index(w, top.i, top.j);
        w.ready[c].push(top);
        w.ready_tiles.push({w.c[c].progress, static_cast<int>(c)});
        w.pending.pop();
    }
    for (; !w.ready_tiles.empty(); w.ready_tiles.pop()) {
        const ReadyTile top = w.ready_tiles.top();
        ReadyHeap &heap = w.ready[top.tile];
        drop_done(w, heap);
        if (heap.empty() || w.c[top.tile].progress != top.progress) continue;
        return {heap.top().i, heap.top().j, heap.top().p};
    }
    Choice best;
    if (!w.pending.empty()) {
        const Ready &top = w.pending.top();
        best = {top.eta, 0, 0, {top.i, top.j, top.p}, opens(w, top.i, top.j)};
    }
    ++scan_;
    if (w.awaits_c) looked_at_ += static_cast<std::int64_t>(w.waiting.size());
    for (std::size_t c = 0; w.awaits_c && c < w.waiting.size(); ++c) {
        ReadyHeap &heap = w.waiting[c];
        drop_done(w, heap);
        if (heap.empty()) continue;
        const Ready &top = heap.top();
        const Subproblem s{top.i, top.j, top.p};
        const Time start = std::max({compute_free, top.eta, estimate(w, s, false, false, true)});
        const Choice choice{start, 1, static_cast<int>(heap.size()), s, in_.finish_first};
        if (choice < best) best = choice;
    }
    scan_missing(w, compute_free, best);
    return best.s;
}

// Sub-problems that lack A or B.
void Scheduler::scan_missing(Worker &w, Time compute_free, Choice &best) {
    const Tiles &a = w.sides[side_a], &b = w.sides[side_b];
    int blanks = 0;
    looked_at_ += kt_;
    for (int p = 0; p < kt_; ++p) {
        if (a.known[p] == w.mt && b.known[p] == w.nt) continue;
        if (!a.known[p] && !b.known[p]) {
            if (in_.batch) {
                // All like the first such p of this kind, which wins by its index.
                unsigned &seen = blank_seen_[k_cuts_.kinds[p]];
                if (seen == scan_) continue;
                seen = scan_;
            } else if (++blanks > most_blanks) {
                continue;
            }
        }
        looked_at_ += std::int64_t{w.mt} * w.nt * (in_.batch ? 1 : cost_without_batching);
        for (int j = 0; j < w.nt; ++j) {
            const Time b_eta = b.eta[tile_index(j, p)];
            for (int i = 0; i < w.mt; ++i) {
                const Time a_eta = a.eta[tile_index(i, p)];
                const bool a_missing = a_eta >= never, b_missing = b_eta >= never;
                if (!a_missing && !b_missing) continue;
                const bool c_missing = needs_c(w, c_index(w, i, j));
                Time start = std::max(compute_free, estimate(w, {i, j, p}, a_missing, b_missing, c_missing));
                if (!a_missing) start = std::max(start, a_eta);
                if (!b_missing) start = std::max(start, b_eta);
                const int reuse = a_missing ? (b_missing ? 0 : b.known[p]) : a.known[p];
                const Choice choice{start, a_missing + b_missing + c_missing, reuse, {i, j, p}, opens(w, i, j)};
                if (choice < best) best = choice;
            }
        }
    }
}

// When what a sub-problem lacks would be there, if it were chosen now.
Time Scheduler::estimate(Worker &w, const Subproblem &s, bool a_missing, bool b_missing, bool c_missing) {
    return in_.batch ? estimate_batched(w, s, a_missing, b_missing, c_missing)
                     : estimate_single(w, s, a_missing, b_missing, c_missing);
}

// With batching all tiles of a kind that are missing are missing alike. So few values serve a whole scan, and each can
// afford to book the links of A before B is routed.
Time Scheduler::estimate_batched(Worker &w, const Subproblem &s, bool a_missing, bool b_missing, bool c_missing) {
    const std::size_t of = kind_of_c(w, s.i, s.j) * blank_seen_.size() + k_cuts_.kinds[s.p];
    const std::size_t which = of << 3 | static_cast<unsigned>(a_missing | b_missing << 1 | c_missing << 2);
    Estimate &known = estimates_[which & (estimates_.size() - 1)];
    if (known.scan == scan_ && known.of == which) return known.eta;
    if (in_parts_) {
        const std::size_t ranks = std::max(sharers_[side_a][w.row].size(), sharers_[side_b][w.col].size());
        looked_at_ += cost_of_a_hop * static_cast<std::int64_t>(ranks * ranks);
    }
    Time eta = 0;
    undo_.clear();
    if (a_missing) {
        eta = find_route(w, side_a, s.i, s.p, trial_);
        if (b_missing || c_missing) book(trial_, &undo_);
    }
    if (b_missing) {
        eta = std::max(eta, find_route(w, side_b, s.j, s.p, trial_));
        if (c_missing) book(trial_, &undo_);
    }
    if (c_missing) {
        eta = std::max(eta, c_way(w, s.i, s.j, w.c[c_index(w, s.i, s.j)].piece, true, 0).arrival);
    }
    for (auto it = undo_.rbegin(); it != undo_.rend(); ++it)
        free_[it->first] = it->second;
    known = {scan_, which, eta};
    return eta;
}

// Without batching each tile has its own holders, so the best fetch of each is kept for a scan;
// fetches that share a link follow one another on it.
Time Scheduler::estimate_single(Worker &w, const Subproblem &s, bool a_missing, bool b_missing, bool c_missing) {
    std::array<const SingleFetch *, 3> fetches;
    std::array<Time, 3> etas;
    std::size_t count = 0;
    if (a_missing) fetches[count++] = &single_fetch(w, side_a, s.i, s.p);
    if (b_missing) fetches[count++] = &single_fetch(w, side_b, s.j, s.p);
    if (c_missing) fetches[count++] = &c_fetch(w, s.i, s.j);
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
const Scheduler::SingleFetch &Scheduler::c_fetch(const Worker &w, int i, int j) {
    SingleFetch &known = single_c_[kind_of_c(w, i, j)];
    if (known.scan == scan_) return known;
    const CWay way = c_way(w, i, j, w.c[c_index(w, i, j)].piece, true, 0);
    return known = {scan_, way.path.leg[0].resource, way.arrival, way.busy()};
}

const Scheduler::SingleFetch &Scheduler::single_fetch(Worker &w, int side, int outer, int p) {
    const std::size_t tile = tile_index(outer, p);
    if (single_[side].size() <= tile) single_[side].resize(w.sides[side].eta.size());
    SingleFetch &known = single_[side][tile];
    if (known.scan == scan_) return known;
    const Time eta = find_route(w, side, outer, p, trial_);
    const Leg &first = trial_.legs[0];
    const Time chunk = cost(first.link, chunk_bytes_of(side, shape(w, side, outer, p), trial_.chunks));
    return known = {scan_, first.link.resource, eta, trial_.chunks * chunk};
}

}  // namespace uncut
