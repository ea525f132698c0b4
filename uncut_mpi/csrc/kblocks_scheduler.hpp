// The tasks of planning/kblocks.py, which says what they do; who computes what and in which steps comes from there.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "records.hpp"

namespace uncut {

struct KWorker {
    int rank = 0;
    std::int64_t first_row = 0, last_row = 0, first_col = 0, last_col = 0;
    std::int64_t first_k = 0, last_k = 0;
    std::vector<std::int64_t> heights;  // where its row blocks start, from its first row, and their end
    std::vector<std::int64_t> starts;   // of its column blocks, from its first column, and their end
    std::array<int, 4> panel{};    // of A, B, C and of blocks of C that are formed directly; -1: the caller's matrix
    std::int64_t direct_left = 0;  // the first column of the last one, from its first column
    bool is_direct = false;        // whether it forms blocks directly that can be
    std::int64_t k_step = 1;       // its products have multiples of it along k, but for one with the rest
};

struct KAdder {
    int rank = 0;
    std::vector<std::int64_t> firsts, lasts;  // columns of C, per column block
    std::vector<std::int64_t> places;         // where they begin in its buffers, per column block
    std::vector<int> partial;                 // buffer for what each member brings, -1 for itself
    int staging = -1;                         // buffer for C itself
};

// A block of C: who multiplies for it, one rank per part of k, and who adds up.
struct KBlock {
    std::vector<KWorker> members;
    std::vector<KAdder> adders;
};

enum KStep : int { fetch_a = 0, fetch_b = 1, fetch_c = 2, multiply = 3, finish = 4 };

struct KMove {
    int step = 0, split = 0;
    std::int64_t first_k = 0, last_k = 0;  // from the first of the rank's part of k
    int first = 0, last = 0;               // column blocks
    int top = 0, bottom = 1;               // row blocks
    bool direct = false;                   // whether this block of C can be formed directly
    bool direct_at_home = false;           // the same by a rank where C is
};

struct KOrigin {
    bool on_host = false;
    int rank = -1;  // -1: host memory of all ranks
};

struct KInput {
    int rows = 0, cols = 0;                // bands of rows and columns of C
    std::vector<std::int64_t> row_starts;  // where bands of rows start, and their end
    std::vector<int> block_of;             // row * cols + col -> index into blocks, -1 for none; a block may have
                                           // several bands of rows, which its neighbours cut elsewhere
    std::vector<KBlock> blocks;
    std::vector<std::vector<KMove>> moves;  // of each part of k; those of all parts are taken in turn
    std::array<KOrigin, 3> origin;
    bool trans_a = false, trans_b = false, reads_c = false, half = false;
    bool combines = false;       // whether sums are formed apart from products
    bool serial_copies = false;  // one lane for a rank's fetches and one for its results to other devices
    bool earliest = false;       // whether each copy between devices goes as soon as its ports are free
    std::int64_t itemsize = 8, min_slice_bytes = 1, first_block = 1;
    int most_summands = 8;
    int product_lanes = 1;  // 1 or 2: how many products a rank may have begun
};

struct KTables {
    std::vector<TaskRecord> tasks;
    std::vector<OperandRecord> operands;
    std::vector<RegionRecord> regions;
    std::vector<std::int32_t> awaits;
    std::vector<LaneRecord> lanes;
};

KTables schedule_kblocks(const KInput &input);

}  // namespace uncut
