// Who forms which blocks of C, and where what they need lies and how large it is: made of a request, and never changed.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kblocks_request.hpp"

namespace uncut {

namespace kblocks {
constexpr int relay_slots = 8;   // of each rank that hands on
constexpr int panel_direct = 3;  // where a rank forms parts of C directly; panels of A, B and C have their numbers
}  // namespace kblocks

// What a rank has to do with a block of C: the products of its part of k.
struct KPart {
    int rank = 0;
    std::size_t worker = 0;  // of all ranks of all places
    Extent k;
    std::array<int, 4> panel{-1, -1, -1, -1};  // of A, B, C and of what is formed directly; -1: the caller's matrix
    std::array<const KPiece *, 3> home{};      // what of A, B and C is all there where the rank is, else null
    std::int64_t direct_left = 0;              // the first column of the last one, from the block's first column
    bool is_direct = false;                    // whether it forms directly what can be
    std::array<Extent, 2> held{};              // what of k it reads of A and B where the caller has them,
    std::array<Extent, 2> held_across{};       // of which rows and columns, in
    std::array<const KPiece *, 2> holds{};     // these pieces
    std::int64_t begins = 0;                   // where it begins, from the first of k; it ends before that
    std::int64_t k_step = 1;                   // its products have multiples of it along k, but for one with the rest

    // The piece where it reads some rows of A or columns of B for some of k, null if it has copied them.
    const KPiece *reads_in_place(int matrix, Extent across, Extent of_k) const {
        const bool is_held = held[matrix].contains(of_k) && held_across[matrix].contains(across);
        return is_held ? holds[matrix] : nullptr;
    }
};

struct KAdder {
    int rank = 0;
    Extent rows;                   // of C
    const KPiece *home = nullptr;  // where all of its C is, null if it is not where the rank is
    struct Slice {
        Extent cols;             // of C
        std::int64_t place = 0;  // where they begin in its buffers
    };
    std::vector<Slice> slices;  // per column block, and one without columns behind the last
    std::vector<int> partial;   // buffer for what each part of k brings, -1 for its own
    int staging = -1;           // buffer for C itself
};

// A block of C: who multiplies for it, one rank per part of k, and who adds up.
struct KBlock {
    int round = 0;
    Extent rows, cols;
    // Which row and column its ranks begin with, from the first. Beyond the last one comes the first one.
    std::int64_t begin_row = 0, begin_col = 0;
    std::vector<std::int64_t> heights;  // where its row blocks start, from where it begins, and their end
    std::vector<std::int64_t> starts;   // of its column blocks, and their end
    std::size_t alike = 0;              // the first block whose column blocks start there too, where some differ
    std::vector<KPart> parts;
    std::vector<KAdder> adders;

    std::size_t num_columns() const { return starts.size() - 1; }
    // Where a row block and a column block cross.
    std::size_t cell(int row, int column) const {
        return static_cast<std::size_t>(row) * num_columns() + static_cast<std::size_t>(column);
    }
    std::size_t num_cells() const { return (heights.size() - 1) * num_columns(); }
    Extent rows_to(std::size_t row) const { return {rows.first, rows.first + heights[row]}; }
    // Of one block, none of which goes beyond the last row or column, or of all.
    Extent rows_of(const KStep &step) const { return turned(rows, begin_row, heights[step.top], heights[step.bottom]); }
    Extent cols_of(const KStep &step) const { return turned(cols, begin_col, starts[step.first], starts[step.last]); }
    static Extent turned(Extent all, std::int64_t begin, std::int64_t first, std::int64_t last) {
        if (last - first == all.size()) return all;
        const std::int64_t at = all.first + (first + begin) % all.size();
        return {at, at + last - first};
    }
};

// A rank, and the blocks of C that it has a part of, one after the other.
struct KWorker {
    std::size_t split;
    std::vector<std::size_t> blocks;
    std::array<int, 2> ring{-1, -1};  // its panels of A and B where these are rings
};

// Where a rank keeps what it hands on for others: equal slots beside each other, each of so many columns.
struct KRelay {
    int buffer = -1;  // none
    std::int64_t columns = 0;
};

struct KLayout {
    explicit KLayout(const KRequest &asked);

    const KRequest &request;
    std::vector<KStep> steps;              // of all rounds and parts of k, in the order in which they are taken
    bool any_direct = false;               // whether a rank where C is not may form some of it directly
    std::vector<KWorker> workers;          // by place and part of k
    std::vector<KBlock> blocks;            // those of the request
    std::vector<BufferRecord> buffers;     // the caller's A, B and C, then those of ranks
    std::vector<std::int64_t> rank_bytes;  // what each rank's take
    std::array<std::vector<KRelay>, element_types.size()> relays;  // of each element type, by rank
};

}  // namespace uncut
