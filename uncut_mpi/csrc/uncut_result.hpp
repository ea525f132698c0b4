// Tiles of C: their products, and how they are fetched, combined and written back.
#pragma once

#include <algorithm>
#include <vector>

#include "uncut_router.hpp"

namespace uncut {

class Result {
  public:
    Result(const Input &in, const Tiling &tiling, Links &links, Records &records);

    // How many sub-problems of a tile are scheduled, and whether the first one awaits the tile.
    int progress(const Worker &w, std::size_t c) const { return tiles_[w.number][c].progress; }
    bool awaited(const Worker &w, std::size_t c) const { return is_input_ && tiles_[w.number][c].home < 0; }
    // Begins a tile with its first sub-problem; returns whether this is it.
    bool open(const Worker &w, int i, int j);
    // A task that makes or brings something, and when it has.
    struct Done {
        std::int32_t task;
        Time end;
    };
    // Adds one product to a tile that is open, and ends the tile with its last one.
    Done add(const Worker &w, const Subproblem &s, const Router::Source &a, const Router::Source &b);

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
    Region region(const Worker &w, int i, int j, Place place);
    Region held_region(const Worker &w, int i, int j, std::int32_t piece) const {
        return in_piece(in_.pieces[matrix_c][piece], w.rows(i), w.cols(j), false);
    }
    // To a holder of a tile, or from there.
    CWay find_way(const Worker &w, int i, int j, std::int32_t piece, bool inward, Time not_before);
    Done copy(const Worker &w, int i, int j, std::int32_t piece, bool inward, Place place, std::int32_t awaited,
              Time not_before);
    void fetch(const Worker &w, CTile &c, int i, int j);
    void close(const Worker &w, CTile &c, int i, int j);

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
