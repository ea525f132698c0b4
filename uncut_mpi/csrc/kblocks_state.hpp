// What the scheduler of few large products works with: who computes, where things lie, and the records it makes.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "kblocks_scheduler.hpp"

namespace uncut::kblocks {

// Compute lanes of a rank. COMBINEs take turns on two: each waits for a flag, and runs while the next one waits. So do
// products where that is asked for: one begins as the one before it runs out of blocks.
constexpr std::array product_lanes{0, 3};
constexpr int sum_lane = 1, sum_lanes = 2;
constexpr std::size_t usual_pieces = 16;  // that products of a rank have not awaited
constexpr std::size_t usual_lanes = 16;   // of a rank, all kinds together

struct Region {
    int buffer = 0;
    std::int64_t row = 0, col = 0, rows = 0, cols = 0;
    bool operator==(const RegionRecord &other) const {
        return buffer == other.buffer && row == other.row && col == other.col && rows == other.rows &&
               cols == other.cols;
    }
    Region columns(std::int64_t first, std::int64_t last) const {
        return {buffer, row, col + first, rows, last - first};
    }
    bool empty() const { return rows == 0 || cols == 0; }
};

// Where each region is in their table, by open addressing.
class RegionIndex {
  public:
    std::int32_t find_or_add(const Region &r, std::vector<RegionRecord> &table) {
        if (2 * (table.size() + 1) > slots_.size()) grow(table);
        std::size_t at = hash(r.buffer, r.row, r.col, r.rows, r.cols) & (slots_.size() - 1);
        for (; slots_[at] >= 0; at = (at + 1) & (slots_.size() - 1))
            if (r == table[static_cast<std::size_t>(slots_[at])]) return slots_[at];
        slots_[at] = static_cast<std::int32_t>(table.size());
        table.push_back({r.buffer, 0, r.row, r.col, r.rows, r.cols});
        return slots_[at];
    }

  private:
    static std::size_t hash(int buffer, std::int64_t row, std::int64_t col, std::int64_t rows, std::int64_t cols) {
        // Products that do not wait for each other.
        const std::uint64_t h =
            (static_cast<std::uint64_t>(buffer) + static_cast<std::uint64_t>(row) * 0x9e3779b97f4a7c15) ^
            static_cast<std::uint64_t>(col) * 0xc2b2ae3d27d4eb4f ^
            static_cast<std::uint64_t>(rows) * 0x165667b19e3779f9 ^
            static_cast<std::uint64_t>(cols) * 0xd6e8feb86659fd93;
        return static_cast<std::size_t>((h * 0x9e3779b97f4a7c15) >> 32);
    }
    void grow(const std::vector<RegionRecord> &table) {
        slots_.assign(std::max<std::size_t>(1024, 2 * slots_.size()), -1);
        for (std::size_t number = 0; number < table.size(); ++number) {
            const RegionRecord &r = table[number];
            std::size_t at = hash(r.buffer, r.row, r.col, r.rows, r.cols) & (slots_.size() - 1);
            while (slots_[at] >= 0)
                at = (at + 1) & (slots_.size() - 1);
            slots_[at] = static_cast<std::int32_t>(number);
        }
    }

    std::vector<std::int32_t> slots_;  // a power of two, at most half of them taken
};

struct Operand {
    Region region;
    std::uint8_t factor = one;
    bool transposed = false;
};

using ByLane = std::array<std::int32_t, product_lanes.size()>;
constexpr ByLane on_no_lane{-1, -1};

// A copy that products on some lane have not awaited yet.
struct Piece {
    KMove move;
    Extent rows;  // of A, from the worker's first row
    std::int32_t task;
    ByLane awaited_by = on_no_lane;
};

struct WorkerState {
    struct Block {
        bool begun = false;            // whether it has a product
        std::int32_t c_there = -1;     // copy that put C into the panel, -1 for none
        ByLane products = on_no_lane;  // the last ones
    };
    std::vector<Block> blocks;
    std::vector<Piece> arriving;
    // Before which one all pieces have been awaited on a lane: products look at what has come since.
    std::array<std::size_t, product_lanes.size()> awaited_until{};
    std::size_t lane = 0;  // of the last product,
    KMove last;            // and what that was; no product yet if it is none
};

struct Summand {
    Region region;
    ByLane made_by;  // -1 for none
};

using Tasks = std::span<const std::int32_t>;

// A piece of A or B on its way from a device to those that need it.
struct Delivery {
    struct Taker {
        std::size_t block;
        std::int32_t task = -1;  // the copy that brings it, once that is chosen,
        double there = 0;        // and when it is there
        bool has_it() const { return task >= 0; }
    };
    int matrix;
    KMove move;
    Extent of_a;
    Region source;
    double bytes;
    std::vector<Taker> takers;
    std::size_t left;  // how many have not got it
};

// Whether a product of some of a worker's rows reads a fetched piece.
inline bool meet(const Piece &piece, const KMove &product, Extent rows) {
    const KMove &move = piece.move;
    if (move.first_k >= product.last_k || product.first_k >= move.last_k) return false;
    if (move.step == fetch_a) return piece.rows.first < rows.last && rows.first < piece.rows.last;
    return move.first < product.last && product.first < move.last;
}

// Makes the tasks of one problem; kblocks_fetch.cpp and kblocks_delivery.cpp have A and B, kblocks_scheduler.cpp the
// order, products and C.
class Scheduler {
  public:
    Scheduler(const KInput &in, KTables &out);

    void run();

  private:
    // What waits for nothing begins before most fetches are issued, which takes a while. All others wait for the first
    // one, which goes before it.
    void begin_residents();

    static bool is_fetch(const KMove &move) { return move.step == fetch_a || move.step == fetch_b; }

    // Whether all fetches of a stretch of k are looked at together.
    bool in_stretches() const {
        const bool from_devices = !in_.origin[matrix_a].on_host || !in_.origin[matrix_b].on_host;
        return in_.serial_copies || (in_.earliest && from_devices);
    }

    // Where the fetches of one stretch of k end, those of all splits: each sums a k of its own. Of a device that serves
    // its copies in turn the pieces of a stretch that are handed on come first, so that all ranks have theirs at one
    // time.
    std::size_t end_of_stretch(std::size_t at) const;

    // Fetches what bands of rows need of A or of columns of B: all, or what several ranks need, or what one does.
    void fetch_groups(const KMove &move, std::optional<bool> shared);

    bool is_shared(int matrix, const std::vector<std::size_t> &blocks, int split) const;
    // Whether a worker has to be sent what it needs of A or B. What holds it may copy it for itself.
    bool takes(int matrix, const KWorker &w) const { return w.panel[matrix] >= 0 && !at_home(matrix, w.rank); }

    // -- who ---------------------------------------------------------------------------------

    // The blocks in each band of rows, or each column of ranks.
    std::vector<std::vector<std::size_t>> blocks_in(bool rows) const {
        std::vector<std::vector<std::size_t>> found(static_cast<std::size_t>(rows ? in_.rows : in_.cols));
        for (int row = 0; row < in_.rows; ++row)
            for (int col = 0; col < in_.cols; ++col) {
                const int block = in_.block_of[static_cast<std::size_t>(row) * in_.cols + col];
                std::vector<std::size_t> &group = found[static_cast<std::size_t>(rows ? row : col)];
                const auto one = static_cast<std::size_t>(block);
                if (block >= 0 && (group.empty() || group.back() != one)) group.push_back(one);
            }
        return found;
    }
    bool at_home(int matrix, int rank) const { return !in_.origin[matrix].on_host && in_.origin[matrix].rank == rank; }
    bool transposed(int matrix) const {
        return matrix == matrix_a ? in_.trans_a : matrix == matrix_b ? in_.trans_b : false;
    }
    Extent band(int row) const { return {in_.row_starts[row], in_.row_starts[row + 1]}; }
    static Extent columns_of(const KWorker &w, int first, int last) {
        return {w.first_col + w.starts[first], w.first_col + w.starts[last]};
    }
    static Extent rows_of(const KWorker &w, int top, int bottom) {
        return {w.first_row + w.heights[top], w.first_row + w.heights[bottom]};
    }
    static std::size_t columns_in(const KWorker &w) { return w.starts.size() - 1; }
    static std::size_t index(const KWorker &w, int row, int column) {
        return static_cast<std::size_t>(row) * columns_in(w) + static_cast<std::size_t>(column);
    }
    template <typename What>
    static void each_block(const KWorker &w, const KMove &move, const What &what) {
        for (int row = move.top; row < move.bottom; ++row)
            for (int column = move.first; column < move.last; ++column)
                what(index(w, row, column));
    }
    bool is_direct(const KWorker &w, const KMove &move) const {
        return w.is_direct && (at_home(matrix_c, w.rank) ? move.direct_at_home : move.direct);
    }
    int panel_of_c(const KWorker &w, const KMove &move) const { return is_direct(w, move) ? panel_direct : matrix_c; }
    // Whether a worker forms this block of C where the caller has it.
    bool in_place(const KWorker &w, const KMove &move) const {
        return at_home(matrix_c, w.rank) && w.panel[panel_of_c(w, move)] < 0;
    }

    // -- where -------------------------------------------------------------------------------

    static Region stored(int buffer, Extent rows, Extent cols, bool turned) {
        if (turned) std::swap(rows, cols);
        return {buffer, rows.first, cols.first, rows.size(), cols.size()};
    }
    // A rectangle of op(A), op(B) or C in the caller's matrix, which is the buffer of its number.
    Region user(int matrix, Extent rows, Extent cols) const { return stored(matrix, rows, cols, transposed(matrix)); }
    // Where a worker has it, by its panel.
    Region held(const KWorker &w, int panel, Extent rows, Extent cols) const {
        if (w.panel[panel] < 0) return user(std::min(panel, matrix_c), rows, cols);
        const std::int64_t top = panel == matrix_b ? w.first_k : w.first_row;
        const std::int64_t left = panel == matrix_a       ? w.first_k
                                  : panel == panel_direct ? w.first_col + w.direct_left
                                                          : w.first_col;
        return stored(w.panel[panel], rows.shifted(-top), cols.shifted(-left), transposed(panel));
    }

    // -- records -----------------------------------------------------------------------------

    std::int32_t region(const Region &r) { return regions_.find_or_add(r, out_.regions); }
    std::int32_t lane(int rank, LaneKind kind, int source, int destination) {
        std::vector<std::int32_t> &own = lanes_[static_cast<std::size_t>(rank)];
        for (const std::int32_t number : own) {
            const LaneRecord &known = out_.lanes[static_cast<std::size_t>(number)];
            if (known.kind == kind && known.source == source && known.destination == destination) return number;
        }
        if (own.empty()) own.reserve(usual_lanes);
        own.push_back(static_cast<std::int32_t>(out_.lanes.size()));
        out_.lanes.push_back({rank, kind, source, destination});
        return own.back();
    }
    std::int32_t lane_to(int rank, LaneKind kind, int to) {
        return lane(rank, kind, rank, in_.serial_copies && to != rank ? any_device : to);
    }
    std::int32_t compute(int rank, int number) { return lane(rank, compute_lane, no_source, number); }

    std::int32_t task(Kind kind, std::int32_t on, const Region &write, std::span<const Operand> reads, Tasks awaits) {
        if (static_cast<std::int64_t>(out_.tasks.size()) >= in_.most_tasks) throw TooManyTasks();
        TaskRecord record;
        record.kind = kind;
        record.rank = out_.lanes[on].rank;
        record.lane = on;
        record.num_operands = static_cast<std::uint16_t>(1 + reads.size());
        record.first_operand = static_cast<std::int32_t>(out_.operands.size());
        record.first_await = static_cast<std::int32_t>(out_.awaits.size());
        out_.operands.push_back({region(write), one, 0, 0});
        for (const Operand &read : reads)
            out_.operands.push_back({region(read.region), read.factor, static_cast<std::uint8_t>(read.transposed), 0});
        for (const std::int32_t awaited : awaits)
            if (awaited >= 0 && out_.tasks[awaited].lane != on) out_.awaits.push_back(awaited);
        const auto own = out_.awaits.begin() + record.first_await;
        std::sort(own, out_.awaits.end());
        out_.awaits.erase(std::unique(own, out_.awaits.end()), out_.awaits.end());
        record.num_awaits = static_cast<std::int32_t>(out_.awaits.size()) - record.first_await;
        out_.tasks.push_back(record);
        return static_cast<std::int32_t>(out_.tasks.size()) - 1;
    }

    std::int32_t copy(std::int32_t on, const Region &there, const Region &source, Tasks awaits) {
        const Operand read{source};
        return task(copy_task, on, there, {&read, 1}, awaits);
    }
    std::int32_t push(int rank, int to, const Region &there, const Region &source, std::int32_t awaited) {
        return copy(lane_to(rank, copy_lane, to), there, source, {&awaited, 1});
    }
    // Results have lanes of their own between devices: one that awaits its product holds up no fetch.
    std::int32_t push_result(int rank, int to, const Region &there, const Region &source, Tasks awaits) {
        return copy(lane_to(rank, result_lane, to), there, source, awaits);
    }
    std::int32_t copy_in(const KOrigin &origin, int rank, const Region &there, const Region &source) {
        if (!origin.on_host) return push(origin.rank, rank, there, source, -1);
        return copy(lane(origin.rank < 0 ? rank : origin.rank, copy_lane, host_location(in_.num_ranks), rank), there,
                    source, {});
    }
    void copy_out(int rank, const KOrigin &goal, const Region &there, const Region &source, Tasks awaits) {
        if (!goal.on_host) {
            push_result(rank, goal.rank, there, source, awaits);
        } else {
            copy(lane(goal.rank < 0 ? rank : goal.rank, copy_lane, rank, host_location(in_.num_ranks)), there, source,
                 awaits);
        }
    }

    // -- A and B -----------------------------------------------------------------------------

    // Elements that each worker alone needs, by block and split: nobody hands these on to it.
    void count_alone();

    // Elements that each rank sends whoever hands on what: what it holds of A and B, once to a group of takers, C to
    // those who add to it, and its own results.
    void count_sent();

    // Which of the takers of a piece gets it from its origin and hands it on: one of those that get most from there
    // alone, and of these one that sends least so far. What is handed on goes to the others' ports, so that the
    // origin's next copy finds its target's port free.
    std::int64_t first_taker(int matrix, int split) const;

    // Brings one piece of A or B to all that need it. Row blocks of ranks beside each other may differ: the rows
    // between all their cuts go when the first of them needs them.
    void fetch(int matrix, int group, const std::vector<std::size_t> &blocks, const KMove &move);

    // Whether the first row block with a row, of those that its workers have it in, is among those of a fetch.
    bool is_needed(const std::vector<std::size_t> &blocks, const KMove &move, std::int64_t row) const;

    // Brings some rows of a piece of A, or a piece of B: a slice to each, and from each to the others.
    void fetch_rows(int matrix, const std::vector<std::size_t> &blocks, const KMove &move, Extent of_a);

    const KWorker &worker(std::size_t block, const KMove &move) const {
        return in_.blocks[block].members[static_cast<std::size_t>(move.split)];
    }
    // A piece where a worker has it, or in the caller's matrix.
    Region piece(int matrix, const KWorker &w, const KMove &move, Extent of_a, bool here) const {
        const Extent inner = Extent{move.first_k, move.last_k}.shifted(w.first_k);
        const Extent rows = matrix == matrix_a ? of_a : inner;
        const Extent cols = matrix == matrix_a ? inner : columns_of(w, move.first, move.last);
        return here ? held(w, matrix, rows, cols) : user(matrix, rows, cols);
    }
    void arrives(std::size_t block, const KMove &move, Extent of_a, std::int32_t task) {
        const std::int64_t top = worker(block, move).first_row;
        states_[block][static_cast<std::size_t>(move.split)].arriving.push_back(
            {move, of_a.shifted(-top), task, on_no_lane});
    }
    // Elements that a worker alone needs of what is where a matrix is.
    std::int64_t needed_alone(int matrix, std::size_t block, int split) const;

    // -- A and B between devices, each copy when its ports are free: kblocks_delivery.cpp ------

    // A copy that could be next: from the piece's origin, or from a taker that has it.
    struct NextCopy {
        Delivery *piece = nullptr;
        Delivery::Taker *from = nullptr, *to = nullptr;
        double begins = 0;
    };
    void deliver();
    NextCopy next_copy();
    int sender(const NextCopy &copy) const;

    // -- C -----------------------------------------------------------------------------------

    void take(std::size_t block, const KMove &move);

    void fetch_block(std::size_t block, const KWorker &w, WorkerState &state, const KMove &move);

    // Columns that one adder has of some column blocks, and where they are in its buffers.
    struct Columns {
        int block;  // the first one
        Extent cols;
        std::int64_t place;
    };
    template <typename What>
    static void each_part(const KAdder &adder, const KMove &move, const What &what) {
        Columns part{};
        for (int column = move.first; column < move.last; ++column) {
            const Extent cols = adder.parts[static_cast<std::size_t>(column)].cols;
            if (cols.size() == 0) continue;
            if (part.cols.size() > 0 && part.cols.last == cols.first) {
                part.cols.last = cols.last;
                continue;
            }
            if (part.cols.size() > 0) what(part);
            part = {column, cols, adder.parts[static_cast<std::size_t>(column)].place};
        }
        if (part.cols.size() > 0) what(part);
    }
    static Region in_staging(int buffer, const KWorker &w, Extent rows, const Columns &part) {
        return {buffer, rows.first - w.first_row, part.place, rows.size(), part.cols.size()};
    }

    // Whether a rank has all that its products need from the start.
    bool resident(const KWorker &w) const {
        const bool awaits_c = any_direct_ && w.is_direct && !(at_home(matrix_c, w.rank) && w.panel[matrix_c] < 0);
        return has_operands(w) && !awaits_c;
    }
    static bool has_operands(const KWorker &w) { return w.panel[matrix_a] < 0 && w.panel[matrix_b] < 0; }

    // Products of all of k, whose sums stay in registers: one where C is at home, else one per column block, at most
    // `most` of those that are left.
    void multiply_here(const KWorker &w, WorkerState &state, int split, int most);

    void multiply_block(const KWorker &w, WorkerState &state, const KMove &move);

    void multiply_piece(const KWorker &w, WorkerState &state, const KMove &move);

    // Adds up what the members have of a block of C, and hands it on.
    void finish_block(std::size_t block, const KMove &move);

    Summand combine(std::size_t block, std::size_t a, const KMove &move, const Columns &part,
                    std::vector<Summand> &summands, const Region &target);

    const KInput &in_;
    KTables &out_;
    std::vector<KMove> moves_;
    RegionIndex regions_;
    std::vector<std::vector<std::size_t>> blocks_of_row_, blocks_of_col_;
    std::vector<Operand> summed_;       // of one COMBINE
    std::vector<std::int32_t> awaits_;  // of one task
    bool residents_begun_ = false;
    bool any_direct_ = false;
    std::vector<int> sums_;                                        // COMBINEs of each rank so far
    std::array<std::vector<std::vector<std::int64_t>>, 2> alone_;  // of A and B, by block and split
    std::vector<std::int64_t> sent_;                               // elements, of each rank
    std::vector<std::vector<std::int32_t>> lanes_;                 // of each rank
    std::vector<std::vector<WorkerState>> states_;                 // per block, per member
    std::vector<std::vector<std::vector<std::int32_t>>> c_in_;     // per block, per adder, per block of C
    std::vector<std::vector<int>> finished_;                       // per block, per block of C: members that have
    std::vector<std::size_t> takers_;
    std::vector<std::int64_t> cuts_;
    std::vector<Summand> summands_;  // of one block of C
    // What waits to be delivered, and until when each rank's port to other devices and from them is busy, in bytes.
    std::vector<Delivery> deliveries_;
    std::vector<double> sends_until_, receives_until_;
};

}  // namespace uncut::kblocks
