// Which sub-problem of a rank comes next: the order by ETA (III-G1), or the fixed one.
#pragma once

#include <array>
#include <functional>
#include <queue>
#include <tuple>
#include <vector>

#include "uncut_result.hpp"

namespace uncut {

class Order {
  public:
    Order(const Input &in, const Tiling &tiling, Links &links, Router &router, Result &result);

    // Sub-problems of a worker that have yet to come, and the next one.
    std::int64_t left(const Worker &w) const { return queues_[w.number].left; }
    Subproblem next(const Worker &w);
    // What has changed: a tile of A or B is at a worker or under way; a tile of C is open; it has got one more product.
    void arrived(const Worker &w, const Tile &t);
    void opened(const Worker &w, int i, int j);
    void advanced(const Worker &w, int i, int j);

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
    Subproblem next_fixed(const Worker &w);
    void add_known(const Worker &w, const Subproblem &s);
    void drop_done(const Worker &w, ReadyHeap &heap) const;
    Subproblem select(const Worker &w);
    void scan_missing(const Worker &w, Time compute_free, Choice &best);
    Time estimate(const Worker &w, const Subproblem &s, Missing missing);
    Time estimate_batched(const Worker &w, const Subproblem &s, Missing missing);
    Time estimate_single(const Worker &w, const Subproblem &s, Missing missing);
    const SingleFetch &single_fetch(const Worker &w, const Tile &t);
    const SingleFetch &c_fetch(const Worker &w, int i, int j);

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
