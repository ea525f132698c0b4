// How A, B and C are cut into tiles, which ranks compute, and where they read tiles of A and B. All of it is settled
// before the first task is made.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "uncut_scheduler.hpp"

namespace uncut {

enum Side { side_a = 0, side_b = 1 };

// The tiles of an extent. Those of a kind have the same size, and who holds what of one of them holds it of all.
struct Cuts {
    std::vector<std::int64_t> edges;
    std::vector<int> kinds;
    int count() const { return static_cast<int>(kinds.size()); }
    Extent operator[](int tile) const { return {edges[tile], edges[tile + 1]}; }
};

// A tile of A or B, which a grid row (of A) or column (of B) shares. It is the `outer`-th one of its rows of op(A) or
// columns of op(B), and the `p`-th one along k.
struct Tile {
    int side, group, outer, p;
    std::size_t at;  // in tables of the group's tiles
};

struct Subproblem {
    int i, j, p;
};

// Where one rank reads A or B.
struct Panel {
    int buffer = -1;
    std::vector<std::int64_t> place;  // per row or column of tiles, where it begins there; -1: not needed
    std::vector<std::int32_t> home;   // of each tile the piece on its own device, read in place; -1: there is none
};

// A rank that computes.
struct Worker {
    int number = 0, rank = 0;
    std::array<int, 2> group{};  // its grid row and column
    int mt = 0, nt = 0;
    std::array<const Cuts *, 2> cuts{};  // of its rows and columns
    std::vector<std::int64_t> owned;     // the tiles of C that it computes, in order; empty: all
    std::array<Panel, 2> panels;
    Extent rows(int i) const { return (*cuts[side_a])[i]; }
    Extent cols(int j) const { return (*cuts[side_b])[j]; }
    std::size_t num_c() const { return static_cast<std::size_t>(mt) * nt; }
    std::size_t c_index(int i, int j) const { return static_cast<std::size_t>(j) * mt + i; }
};

struct Tiling {
    explicit Tiling(const Input &given) : in(given), workers_of_rank(given.num_ranks, -1) {
        make_cuts();
        find_origins();
        make_workers();
    }

    const Input &in;
    std::array<std::vector<Cuts>, 2> outer_cuts;  // of rows and columns, per grid row and column
    Cuts k_cuts;
    int kt = 1;
    std::array<std::size_t, 3> num_kinds{};  // of rows, columns and steps of k
    std::vector<Worker> workers;
    std::vector<int> workers_of_rank;                               // -1: computes nothing
    std::array<std::vector<std::vector<int>>, 2> sharers;           // workers per grid row (A) or column (B)
    std::array<std::vector<std::vector<std::int32_t>>, 2> origins;  // likewise, of each tile its first holder's piece

    std::size_t kind_of_c(const Worker &w, int i, int j) const {
        return w.cuts[side_a]->kinds[i] * num_kinds[side_b] + w.cuts[side_b]->kinds[j];
    }
    std::size_t tile_index(int outer, int p) const { return static_cast<std::size_t>(outer) * kt + p; }
    Tile tile(const Worker &w, int side, int outer, int p) const {
        return {side, w.group[side], outer, p, tile_index(outer, p)};
    }
    const std::vector<int> &sharers_of(const Tile &t) const { return sharers[t.side][t.group]; }
    const Worker &worker_of(int rank) const { return workers[workers_of_rank[rank]]; }
    // The one at a location that needs a tile, if there is one.
    const Worker *sharer(const Tile &t, int location) const {
        const int number = in.locations.in_host(location) ? -1 : workers_of_rank[location];
        if (number < 0) return nullptr;
        const Worker &w = workers[number];
        return w.group[t.side] == t.group && w.panels[t.side].place[t.outer] >= 0 ? &w : nullptr;
    }

    // The location of a tile's first holder, and where it has the tile.
    int origin(const Tile &t) const { return origin_piece(t).origin.location; }
    Region origin_region(const Tile &t) const { return tile_in(origin_piece(t), t); }
    // Where a rank has it: in what it holds of the matrix, or in its panel.
    Region own_region(const Worker &w, const Tile &t) const {
        const Panel &panel = w.panels[t.side];
        if (panel.home[t.at] >= 0) return tile_in(in.pieces[t.side][panel.home[t.at]], t);
        const std::int64_t place = panel.place[t.outer];
        return tile_in(panel.buffer, t, {place, place + outer_extent(t).size()});
    }
    Region shape(const Tile &t) const { return tile_in(-1, t, outer_extent(t)); }

    // The first of the pieces that have a rectangle.
    std::int32_t piece_of(int matrix, Extent rows, Extent cols, std::int32_t hint) const {
        const std::vector<KPiece> &pieces = in.pieces[matrix];
        const auto has = [&](const KPiece &piece) { return piece.rows.contains(rows) && piece.cols.contains(cols); };
        if (has(pieces[hint])) return hint;
        const auto found = std::ranges::find_if(pieces, has);
        require(found != pieces.end(), "every tile lies in a piece");
        return static_cast<std::int32_t>(found - pieces.begin());
    }

    // The one of those that have the same as a piece that is on a rank's device, or -1.
    std::int32_t home_of(int matrix, std::int32_t piece, int rank) const {
        const auto last = piece + static_cast<std::int32_t>(in.pieces[matrix][piece].holders);
        for (; piece < last; ++piece)
            if (in.pieces[matrix][piece].origin.on_device_of(rank)) return piece;
        return -1;
    }

  private:
    // Tiles end where pieces of the matrices do, so that each lies in one.
    void make_cuts() {
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

    // Tiles as long as asked for, from each edge on.
    Cuts cut(Extent of, const std::vector<std::int64_t> &edges) const {
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

    void find_origins() {
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

    void make_workers() {
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
    Panel make_panel(const Worker &w, int side) const {
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

    Extent outer_extent(const Tile &t) const { return outer_cuts[t.side][t.group][t.outer]; }
    const KPiece &origin_piece(const Tile &t) const { return in.pieces[t.side][origins[t.side][t.group][t.at]]; }
    // A tile in a buffer of which that is a part, and in a piece that has it.
    Region tile_in(int buffer, const Tile &t, Extent outer) const {
        Extent inner = k_cuts[t.p];
        if (t.side == side_b) std::swap(outer, inner);
        return stored(buffer, outer, inner, in.transposed(t.side));
    }
    Region tile_in(const KPiece &piece, const Tile &t) const {
        Extent outer = outer_extent(t), inner = k_cuts[t.p];
        if (t.side == side_b) std::swap(outer, inner);
        return in_piece(piece, outer, inner, in.transposed(t.side));
    }
};

}  // namespace uncut
