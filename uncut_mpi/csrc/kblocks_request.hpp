// What is asked of the scheduler of few large products, which planning/kblocks.py describes. A request is made at once
// and never changed; kblocks_layout.hpp says where things lie, tables.hpp holds what is emitted.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "for_each.hpp"
#include "kblocks_ways.hpp"
#include "pieces.hpp"

namespace uncut {

struct SimulatedMachine;

// What all schedules of one problem on one machine have in common.
struct KProblem : PlacedProblem {
    std::int64_t step = 1;  // where blocks of rows and columns start is a multiple of it
    std::int64_t min_slice_bytes = 1;
    std::int64_t relay_bytes = 1;  // what goes over another rank goes in chunks of so many, or of one column
    KWays ways;
    // Whether sums are the same whoever forms them, and wherever matrices are. Then no product reads or writes a
    // caller's matrix, all have panels of one shape, and k-blocks come in their own order.
    bool same_sums = false;
    bool fuses = false;  // whether a product that has all of k may write C with its epilogue

    // Whether a part of a matrix lies on a device.
    bool on_device(int matrix) const {
        return std::ranges::any_of(pieces[matrix], [](const KPiece &one) { return !one.origin.on_host; });
    }
    // Whether a part of a matrix lies on the device of a rank.
    bool on_device(int matrix, int rank) const {
        return std::ranges::any_of(pieces[matrix], [&](const KPiece &one) { return one.origin.on_device_of(rank); });
    }
    bool has_replicas(int matrix) const {
        return std::ranges::any_of(pieces[matrix], [](const KPiece &one) { return one.holders > 1; });
    }
    // The piece on a rank's device that has all of a rectangle, null if there is none.
    const KPiece *home(int matrix, int rank, Extent rows, Extent cols) const {
        for (const KPiece &one : pieces[matrix])
            if (one.origin.on_device_of(rank) && one.rows.contains(rows) && one.cols.contains(cols)) return &one;
        return nullptr;
    }
    // What of k a rank's device has in one piece, for all of some rows of A or columns of B: the piece with most of it.
    const KPiece *held(int matrix, int rank, Extent across, Extent k) const {
        const KPiece *best = nullptr;
        for (const KPiece &one : pieces[matrix]) {
            if (!one.origin.on_device_of(rank) || !across_of(matrix, one).contains(across) ||
                k_of(matrix, one).common(k).size() <= 0)
                continue;
            if (!best || k_of(matrix, one).common(k).size() > k_of(matrix, *best).common(k).size()) best = &one;
        }
        return best;
    }
    // What of some rows of A or columns of B a rank's device has in one piece for all of k: the piece with most.
    const KPiece *held_across(int matrix, int rank, Extent across, Extent k) const {
        const KPiece *best = nullptr;
        for (const KPiece &one : pieces[matrix]) {
            const std::int64_t size = across_of(matrix, one).common(across).size();
            if (!one.origin.on_device_of(rank) || !k_of(matrix, one).contains(k) || size <= 0) continue;
            if (!best || size > across_of(matrix, *best).common(across).size()) best = &one;
        }
        return best;
    }
    static const Extent &k_of(int matrix, const KPiece &one) { return matrix == matrix_a ? one.cols : one.rows; }
    static const Extent &across_of(int matrix, const KPiece &one) { return matrix == matrix_a ? one.rows : one.cols; }
    // Calls for the pieces that together have a rectangle, of those that several have for the first, and for what of
    // the rectangle each has.
    template <typename What>
    void each_piece(int matrix, Extent rows, Extent cols, const What &what) const {
        const std::vector<KPiece> &all = pieces[matrix];
        for (std::size_t at = 0; at < all.size(); at += all[at].holders)
            if (all[at].rows.meets(rows) && all[at].cols.meets(cols))
                what(all[at], all[at].rows.common(rows), all[at].cols.common(cols));
    }
};

inline constexpr int halvings = 2;  // how often the last of several blocks of rows or columns is halved
// What goes from node to node is cut in so many at most, so that a node sends the first while the last comes.
inline constexpr std::int64_t most_legs = 4;
inline constexpr int lookahead =
    2;  // products for which fetches are issued before one is: it takes as long as six copies

enum KOrder : int { by_k = 0, by_columns = 1, from_corner = 2, by_k_and_columns = 3 };

// How a rank's part of a product is cut, and in which order it is taken: `Blocking` of planning/options.py and what
// planning/blocking.py adds to it.
struct KBlocking {
    std::int64_t first = 1, block = 1, growth = 2;
    int columns = 1, rows = 1;  // equal blocks, the last of which is halved if there are several
    int order = by_k;
    int lanes = 1;          // 1 or 2: how many products a rank may have begun
    bool earliest = false;  // whether each copy between devices goes as soon as its ports are free
    int tail_parts = 4;     // the last part of k that the orders by k take column block by column block
    // Whether k-blocks of B are rows far apart in host memory: the largest end at multiples of their length, and what
    // goes by column blocks has all of k.
    bool far_apart = false;
    // Whether each rank begins with what it holds of A or B, and reads that in place. And how much of k that is at
    // least, of those that hold any.
    bool from_held = false;
    std::int64_t held = 0;
    // Rows and columns of C that a rank forms at a time; 0: all that it has.
    std::int64_t c_rows = 0, c_cols = 0;
    // For how many k-blocks of A and of B a rank has room; 0: for all. And for how many blocks of C.
    std::array<int, 2> slots{};
    int c_slots = 1;
    bool returns = true;    // whether blocks of C and k are taken there and back, or each time from the start
    bool together = false;  // whether a slot is used again when all ranks of its node have used theirs
    // Whether C's owner combines it, but for the last few column blocks; else it is combined where it is computed.
    bool at_owner = false;
    std::int64_t away = 0;

    bool in_rings() const { return slots[0] > 0; }

    // Calls for each of these that is a number of `Blocking`, with its name there.
    template <typename What>
    void each_option(const What &what) {
#define VISIT(what, name) what(#name, name);
        FOR_EACH(VISIT, what, first, block, growth, columns, rows, lanes, c_rows, c_cols, c_slots, away)
#undef VISIT
        what("slots", slots[matrix_a]);
        what("b_slots", slots[matrix_b]);
    }
};

enum KStepKind : int { fetch_a = 0, fetch_b = 1, fetch_c = 2, multiply = 3, finish = 4 };

struct KStep {
    int kind = 0, split = 0;
    std::int64_t first_k = 0, last_k = 0;  // from the first of the rank's part of k
    int first = 0, last = 0;               // column blocks
    int top = 0, bottom = 1;               // row blocks
    int round = 0;                         // which of its blocks of C each rank takes the step for
    bool early = false;                    // whether this part of C is fetched before its products
    bool direct = false;                   // whether this part of C can be formed directly
    bool direct_at_home = false;           // the same by a rank where C is

    // Whether both are about the same part of the same block of C.
    bool has_same_c(const KStep &other) const {
        return first == other.first && last == other.last && top == other.top && bottom == other.bottom &&
               round == other.round;
    }
};

// How C, or a part of it, is cut, whoever computes: `Partition` of planning/partition.py.
struct KPlaces {
    struct Block {
        Extent rows, cols;  // empty where there are more ranks than C has rows or columns
    };
    std::vector<Block> blocks;  // by place
};

// How a rank has its products aligned.
struct KAlignment {
    std::array<bool, 2> copies{};  // whether it copies A and B into panels although it holds them
    bool apart = false;            // whether its products are summed in a panel although C is at home
    std::int64_t k_step = 1;       // its products have multiples of it along k, but for one with the rest
};

struct KRequest {
    // A block of C, which the ranks of a place form together.
    struct Block {
        std::size_t place;
        Extent rows, cols;
        std::vector<KAlignment> alignment;  // for each part of k
    };
    // One block of C for each place that has one, and which of them share rows of A and columns of B. Ranks take one
    // round after the other.
    struct Round {
        std::size_t first, last;     // its blocks
        std::vector<Extent> strips;  // of rows, between all edges of blocks: a block may have several, which others cut
        std::vector<std::vector<std::size_t>> of_row, of_col;  // the blocks in each strip, and in each column of ranks
    };

    // Part s of k of place p goes to number s * places + p of `devices`. Products are aligned where that pays on a
    // machine, if there is one. Refuses what would be read or written outside of its table, divide by zero or never
    // end.
    KRequest(const KProblem &problem, const KBlocking &how, std::vector<std::int64_t> k_starts,
             const std::vector<int> &devices, const std::vector<const KPlaces *> &rounds,
             const SimulatedMachine *aligns_for);
    KRequest(KProblem &&, const KBlocking &, std::vector<std::int64_t>, const std::vector<int> &,
             const std::vector<const KPlaces *> &, const SimulatedMachine *) = delete;  // it is to live on

    const KProblem &problem;  // which lives as long
    KBlocking how;
    std::vector<std::int64_t> k_starts;     // of the parts of k, and their end
    bool combines = false;                  // whether sums are formed apart from products
    int first_at_worker = 0;                // the first column block that is combined where it is computed,
    bool at_owner = false;                  // and whether C's owner combines those before
    std::vector<std::vector<KStep>> steps;  // for each part of k, the same for every block of C; in rings of all rounds
    std::vector<std::vector<int>> places;   // the ranks of each place, one per part of k
    std::vector<Block> blocks;              // of all rounds
    std::vector<Round> rounds;

    std::size_t splits() const { return k_starts.size() - 1; }
    // Whether slots of a ring lie behind each other along rows of A or columns of B, as k is contiguous in them. So no
    // distance of columns depends on how many there are.
    bool stacks_across(int matrix) const {
        return problem.same_sums && (matrix == matrix_b) != problem.transposed(matrix);
    }
    // Along k of a ring's slots.
    std::int64_t depth_of_slots() const {
        return problem.same_sums ? how.block : std::min(how.block, k_starts.back() - k_starts.front());
    }
    // More than there are tasks, found without looking at any, so that nobody counts where this is few.
    std::int64_t tasks_at_most() const;
};

// What makes a rank's products aligned; nothing where they stay as slow, or where it costs more than it brings.
KAlignment choose_alignment(const KRequest &request, const SimulatedMachine &machine, const KRequest::Block &block,
                            std::size_t split);

// How many blocks of rows or columns there are of so many equal ones.
int count_blocks(int blocks);

// How many k-blocks there are of so many elements of k, give or take one, without making them.
std::int64_t count_k_blocks(const KBlocking &how, std::int64_t extent);

std::vector<KStep> make_steps(const KBlocking &how, std::int64_t extent);

// The same in rings, of so many rounds of blocks of C, one after the other without a stop. The k-blocks are in the
// order in which they are taken, or in their own.
std::vector<KStep> make_steps_in_rings(const KBlocking &how, std::vector<Extent> k_blocks, int rounds, bool reads_c);

// The k-blocks of a ring, all of one length but for the last.
std::vector<Extent> equal_k_blocks(const KBlocking &how, std::int64_t extent);

// The same for the same steps of all parts of k.
std::uint64_t digest_of_steps(const std::vector<std::vector<KStep>> &parts);

// Where blocks of rows or columns start, and `extent` at the end: `blocks` equal ones, the last of several halved so
// often. They start at multiples of 256 elements, which a library's kernels compute at a time. Equal blocks of less
// than four times as many start at multiples of a half, or of a half of that, and so on, but at least of `step`.
// Calls with other blocks took 1 to 23 % longer (docs/performance.md, 2026-11-26, blocks at multiples of 256).
std::vector<std::int64_t> block_edges(std::int64_t extent, int blocks, std::int64_t step, int halved = halvings);

}  // namespace uncut
