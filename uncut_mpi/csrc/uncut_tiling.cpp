#include "uncut_tiling.hpp"

#include <algorithm>

namespace uncut {

Tiling::Tiling(const Input &given) : in(given), workers_of_rank(given.num_ranks, -1) {
    make_cuts();
    find_origins();
    make_workers();
}

// Tiles as long as asked for, from each edge on.
Cuts Tiling::cut(Extent of, const std::vector<std::int64_t> &edges) const {
    Cuts made;
    made.edges.push_back(of.first);
    for (std::size_t number = 0; number < edges.size(); ++number) {
        const std::int64_t last = std::min(edges[number], of.last);
        while (made.edges.back() < last) {
            const std::int64_t size = std::min(in.tile, last - made.edges.back());
            made.kinds.push_back(static_cast<int>(2 * number) + (size < in.tile));
            made.edges.push_back(made.edges.back() + size);
        }
    }
    return made;
}

// Tiles end where pieces of the matrices do, so that each lies in one.
void Tiling::make_cuts() {
    std::vector<std::int64_t> rows{in.m}, cols{in.n}, inner{in.k};
    const auto add = [&](int matrix, std::vector<std::int64_t> &down, std::vector<std::int64_t> &along) {
        for (const KPiece &piece : in.pieces[matrix]) {  // where one begins another ends
            down.push_back(piece.rows.last);
            along.push_back(piece.cols.last);
        }
    };
    add(matrix_a, rows, inner);
    add(matrix_b, inner, cols);
    add(matrix_c, rows, cols);
    for (std::vector<std::int64_t> *edges : {&rows, &cols, &inner}) {
        std::ranges::sort(*edges);
        edges->erase(std::unique(edges->begin(), edges->end()), edges->end());
    }
    for (std::size_t row = 0; row + 1 < in.row_starts.size(); ++row)
        outer_cuts[side_a].push_back(cut({in.row_starts[row], in.row_starts[row + 1]}, rows));
    for (std::size_t col = 0; col + 1 < in.col_starts.size(); ++col)
        outer_cuts[side_b].push_back(cut({in.col_starts[col], in.col_starts[col + 1]}, cols));
    k_cuts = cut({0, in.k}, inner);
    kt = k_cuts.count();
    num_kinds = {2 * rows.size(), 2 * cols.size(), 2 * inner.size()};
}

std::int32_t Tiling::piece_of(int matrix, Extent rows, Extent cols, std::int32_t hint) const {
    const std::vector<KPiece> &pieces = in.pieces[matrix];
    const auto has = [&](const KPiece &piece) { return piece.rows.contains(rows) && piece.cols.contains(cols); };
    if (has(pieces[hint])) return hint;
    const auto found = std::ranges::find_if(pieces, has);
    require(found != pieces.end(), "every tile lies in a piece");
    return static_cast<std::int32_t>(found - pieces.begin());
}

std::int32_t Tiling::home_of(int matrix, std::int32_t piece, int rank) const {
    const auto last = piece + static_cast<std::int32_t>(in.pieces[matrix][piece].holders);
    for (; piece < last; ++piece)
        if (in.pieces[matrix][piece].origin.on_device_of(rank)) return piece;
    return -1;
}

void Tiling::find_origins() {
    for (int side = 0; side < 2; ++side) {
        sharers[side].resize(outer_cuts[side].size());
        for (const Cuts &outer : outer_cuts[side]) {
            std::vector<std::int32_t> &pieces = origins[side].emplace_back();
            std::int32_t piece = 0;
            for (int o = 0; o < outer.count(); ++o)
                for (int p = 0; p < kt; ++p)
                    pieces.push_back(piece = side == side_a ? piece_of(side, outer[o], k_cuts[p], piece)
                                                            : piece_of(side, k_cuts[p], outer[o], piece));
        }
    }
}

void Tiling::make_workers() {
    const bool dealt = !in.owned.empty();
    const auto cols = static_cast<int>(outer_cuts[side_b].size());
    for (std::size_t cell = 0; cell < in.cell_rank.size(); ++cell) {
        Worker w;
        w.number = static_cast<int>(workers.size());
        w.rank = static_cast<int>(in.cell_rank[cell]);
        if (!dealt) w.group = {static_cast<int>(cell) / cols, static_cast<int>(cell) % cols};
        w.cuts = {&outer_cuts[side_a][w.group[side_a]], &outer_cuts[side_b][w.group[side_b]]};
        w.mt = w.cuts[side_a]->count();
        w.nt = w.cuts[side_b]->count();
        if (dealt) w.owned = in.owned[cell];
        if (w.mt == 0 || w.nt == 0 || (dealt && w.owned.empty())) continue;
        for (int side = 0; side < 2; ++side) {
            w.panels[side] = make_panel(w, side);
            sharers[side][w.group[side]].push_back(w.number);
        }
        workers_of_rank[w.rank] = w.number;
        workers.push_back(std::move(w));
    }
}

// Tiles that a worker needs, and the rows or columns of C with them, lie in its panels one after the other.
Panel Tiling::make_panel(const Worker &w, int side) const {
    Panel made{static_cast<int>((side == side_a ? in.a_panel : in.b_panel)[w.rank]), {}, {}};
    const Cuts &outer = *w.cuts[side];
    std::vector<bool> needed(outer.count(), w.owned.empty());
    for (const std::int64_t c : w.owned)
        needed[static_cast<std::size_t>(side == side_a ? c % w.mt : c / w.mt)] = true;
    std::int64_t next = 0;
    for (int o = 0; o < outer.count(); ++o) {
        made.place.push_back(needed[o] ? next : -1);
        if (needed[o]) next += outer[o].size();
    }
    made.home = origins[side][w.group[side]];
    for (std::int32_t &piece : made.home)
        piece = home_of(side, piece, w.rank);
    return made;
}

}  // namespace uncut
