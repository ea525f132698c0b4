// The tasks of planning/kblocks.py, which says what they do; how C and k are cut comes from there.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "records.hpp"
#include "too_many_tasks.hpp"

namespace uncut {

namespace kblocks {

constexpr int matrix_a = 0, matrix_b = 1, matrix_c = 2;
constexpr int panel_direct = 3;  // where a worker forms blocks of C directly

struct Extent {
    std::int64_t first = 0, last = 0;
    std::int64_t size() const { return last - first; }
    Extent shifted(std::int64_t by) const { return {first + by, last + by}; }
};

// Cuts an extent into contiguous parts whose sizes differ by at most one, larger ones first.
inline Extent part_of(std::int64_t extent, std::int64_t parts, std::int64_t number) {
    const std::int64_t size = extent / parts, more = extent % parts;
    const std::int64_t first = number * size + std::min(number, more);
    return {first, first + size + (number < more ? 1 : 0)};
}

}  // namespace kblocks

struct KWorker {
    int rank = 0;
    std::int64_t first_row = 0, last_row = 0, first_col = 0, last_col = 0;
    std::int64_t first_k = 0, last_k = 0;
    std::vector<std::int64_t> heights;         // where its row blocks start, from its first row, and their end
    std::vector<std::int64_t> starts;          // of its column blocks, from its first column, and their end
    std::array<int, 4> panel{-1, -1, -1, -1};  // of A, B, C and of blocks of C formed directly; -1: the caller's matrix
    std::int64_t direct_left = 0;              // the first column of the last one, from its first column
    bool is_direct = false;                    // whether it forms blocks directly that can be
    std::int64_t k_step = 1;                   // its products have multiples of it along k, but for one with the rest
};

struct KAdder {
    int rank = 0;
    struct Part {
        kblocks::Extent cols;    // of C
        std::int64_t place = 0;  // where they begin in its buffers
    };
    std::vector<Part> parts;   // per column block, and one without columns behind the last
    std::vector<int> partial;  // buffer for what each member brings, -1 for itself
    int staging = -1;          // buffer for C itself
};

// A block of C: who multiplies for it, one rank per part of k, and who adds up.
struct KBlock {
    std::vector<KWorker> members;
    std::vector<KAdder> adders;
};

// How a rank has its products aligned: `Alignment` of planning/alignment.py.
struct KAlignment {
    std::array<bool, 2> copies{};  // A and B into panels although it holds them
    bool apart = false;
    std::int64_t k_step = 1;
};

// How C is cut, whoever computes: `Partition` of planning/partition.py.
struct KPlaces {
    struct Block {
        kblocks::Extent rows, cols;  // empty where there are more ranks than C has rows or columns
    };
    std::vector<std::int64_t> row_starts;    // of bands, and their end
    std::vector<std::vector<int>> place_of;  // by band and column of ranks, -1 for none
    std::vector<Block> blocks;               // by place
};

// A block of C before anything is laid out.
struct KPlace {
    kblocks::Extent rows, cols;
    std::vector<int> ranks;             // one per part of k
    std::vector<KAlignment> alignment;  // of each
};

// Blocks of C that need no sums apart from the products.
struct KDirect {
    bool any = false;
    int first = 0;            // the first column block among them
    int down = 0, along = 0;  // up to which row block and which column block there are other ones
};

enum KStep : int { fetch_a = 0, fetch_b = 1, fetch_c = 2, multiply = 3, finish = 4 };

struct KMove {
    int step = 0, split = 0;
    std::int64_t first_k = 0, last_k = 0;  // from the first of the rank's part of k
    int first = 0, last = 0;               // column blocks
    int top = 0, bottom = 1;               // row blocks
    bool early = false;                    // whether this block of C is fetched before its products
    bool direct = false;                   // whether this block of C can be formed directly
    bool direct_at_home = false;           // the same by a rank where C is
};

// Whether there is a block of C that two steps are about.
inline bool meet(const KMove &one, const KMove &other) {
    return one.first < other.last && other.first < one.last && one.top < other.bottom && other.top < one.bottom;
}

enum KOrder : int { by_k = 0, by_columns = 1, from_corner = 2, by_k_and_columns = 3 };

// How a rank's part of a product is cut and in which order it is taken: `moves` of planning/blocking.py.
struct KBlocking {
    std::int64_t extent = 0;  // of k
    std::int64_t first = 1, most = 1, growth = 2;
    int columns = 1, rows = 1;  // equal blocks, the last of which is halved so often if there are several
    int halvings = 0;
    int order = by_k;
    // Whether k-blocks of B are rows far apart in host memory: the largest end at multiples of their length, and what
    // goes by column blocks has all of k.
    bool whole = false;
    int tail_parts = 4;  // the last part of k that the orders by k take column block by column block
    int lookahead = 0;   // products for which fetches are issued before a product is
};

struct KOrigin {
    bool on_host = false;
    int rank = -1;  // -1: host memory of all ranks
};

struct KInput {
    // Asked for.
    int num_ranks = 0;
    int rows = 0, cols = 0;                // bands of rows and columns of C
    std::vector<std::int64_t> row_starts;  // where bands of rows start, and their end
    std::vector<int> block_of;             // row * cols + col -> index into places, -1 for none; a block may have
                                           // several bands of rows, which its neighbours cut elsewhere
    std::vector<KPlace> places;
    std::vector<std::int64_t> k_starts;     // of the parts of k, and their end
    std::vector<std::vector<KMove>> moves;  // of each part of k; those of all parts are taken in turn
    std::array<KOrigin, 3> origin;
    bool trans_a = false, trans_b = false, reads_c = false, half = false;
    bool combines = false;       // whether sums are formed apart from products
    bool at_owner = false;       // whether C's owner combines column blocks, those before
    int first_away = 0;          // this one; the others, if there are any, are combined where they are computed
    bool serial_copies = false;  // one lane for a rank's fetches and one for its results to other devices
    bool earliest = false;       // whether each copy between devices goes as soon as its ports are free
    int row_blocks = 1, column_blocks = 1, halvings = 0;
    std::int64_t step = 1;      // where blocks of rows and columns start is a multiple of it,
    std::int64_t multiple = 1;  // and of this, a power of two, or of a half of a half of it: block_edges
    std::uint8_t dtype = 0, accumulator = 0;
    std::int64_t itemsize = 8, accumulator_itemsize = 8, min_slice_bytes = 1, first_block = 1;
    std::int64_t buffer_alignment = 256, column_alignment = 64;  // bytes, of buffers and of their columns
    int most_summands = 8;
    std::int64_t most_tasks = std::numeric_limits<std::int32_t>::max();  // a schedule of more is given up
    int product_lanes = 1;  // 1 or 2: how many products a rank may have begun
    // Laid out.
    std::array<KDirect, 2> direct;         // of a rank where C is not, and where it is
    std::vector<KBlock> blocks;            // of each place
    std::vector<BufferRecord> buffers;     // the caller's A, B and C, then those of ranks
    std::vector<std::int64_t> rank_bytes;  // what each rank's take
};

struct KTables {
    std::vector<TaskRecord> tasks;
    std::vector<OperandRecord> operands;
    std::vector<RegionRecord> regions;
    std::vector<std::int32_t> awaits;
    std::vector<LaneRecord> lanes;
    void clear() {
        tasks.clear();
        operands.clear();
        regions.clear();
        awaits.clear();
        lanes.clear();
    }
};

// How many blocks of rows or columns there are of so many equal ones.
int count_blocks(int blocks, int halvings);

std::vector<KMove> make_steps(const KBlocking &how);

// The same for the same steps of all parts of k.
std::uint64_t digest_of_steps(const std::vector<std::vector<KMove>> &parts);

// Says which steps are about blocks of C that can be formed directly.
void mark_direct(KInput &input);

// Where blocks of rows or columns start, and `extent` at the end: `blocks` equal ones, the last of several halved. They
// start at multiples of `multiple`, halved until equal blocks have four times as many elements, or else of `step`.
std::vector<std::int64_t> block_edges(std::int64_t extent, int blocks, std::int64_t step, std::int64_t multiple,
                                      int halvings);

// Gives the blocks of C that have elements to ranks: part s of k of place p to number s * places + p.
void set_places(KInput &input, const KPlaces &places, const std::vector<int> &devices);

inline void require(bool good, const char *what) {
    if (!good) throw std::invalid_argument(what);
}

// Refuses what would be read or written outside of its table, divide by zero or never end, of what is not changed
// between `lay_out_kblocks` and `schedule_kblocks`.
void check_kblocks(const KInput &input);

// Says who has what of each block, and where: workers, adders and buffers.
void lay_out_kblocks(KInput &input);

// Into tables of which the memory is used. Throws TooManyTasks if there are more than `most_tasks`.
void schedule_kblocks(const KInput &input, KTables &tables);

// Undoes `lay_out_kblocks`.
void clear_layout(KInput &input);

}  // namespace uncut
