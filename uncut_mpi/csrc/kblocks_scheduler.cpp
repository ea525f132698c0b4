#include "kblocks_scheduler.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace uncut {
namespace {

constexpr int matrix_a = 0, matrix_b = 1, matrix_c = 2;
constexpr int panel_direct = 3;  // where a worker forms blocks of C directly
// Compute lanes of a rank. COMBINEs take turns on two: each waits for a flag, and runs while the next one waits. So do
// products where that is asked for: one begins as the one before it runs out of blocks.
constexpr std::array product_lanes{0, 3};
constexpr int sum_lane = 1, sum_lanes = 2;

struct Extent {
    std::int64_t first = 0, last = 0;
    std::int64_t size() const { return last - first; }
    Extent shifted(std::int64_t by) const { return {first + by, last + by}; }
};

struct Region {
    int buffer = 0;
    std::int64_t row = 0, col = 0, rows = 0, cols = 0;
    auto key() const { return std::tie(buffer, row, col, rows, cols); }
    bool operator==(const Region &other) const { return key() == other.key(); }
    Region columns(std::int64_t first, std::int64_t last) const {
        return {buffer, row, col + first, rows, last - first};
    }
    bool empty() const { return rows == 0 || cols == 0; }
};

struct RegionHash {
    std::size_t operator()(const Region &r) const {
        std::uint64_t h = static_cast<std::uint64_t>(r.buffer);
        for (const std::int64_t part : {r.row, r.col, r.rows, r.cols})
            h = (h ^ static_cast<std::uint64_t>(part)) * 0x9e3779b97f4a7c15ULL + (h >> 29);
        return static_cast<std::size_t>(h);
    }
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
    std::vector<bool> begun;            // blocks with a product
    std::vector<std::int32_t> c_there;  // copy that put C into the panel, -1 for none; per block
    std::vector<Piece> arriving;
    std::vector<ByLane> products;  // the last ones, per block
    std::size_t lane = 0;          // of the last product,
    KMove last;                    // and what that was; no product yet if it is none
};

struct Summand {
    Region region;
    std::vector<std::int32_t> made_by;
};

// Whether a product of some of a worker's rows reads a fetched piece.
bool meet(const Piece &piece, const KMove &product, Extent rows) {
    const KMove &move = piece.move;
    if (move.first_k >= product.last_k || product.first_k >= move.last_k) return false;
    if (move.step == fetch_a) return piece.rows.first < rows.last && rows.first < piece.rows.last;
    return move.first < product.last && product.first < move.last;
}

// Cuts an extent into contiguous parts whose sizes differ by at most one, larger ones first.
Extent part_of(std::int64_t extent, std::int64_t parts, std::int64_t number) {
    const std::int64_t size = extent / parts, more = extent % parts;
    const std::int64_t first = number * size + std::min(number, more);
    return {first, first + size + (number < more ? 1 : 0)};
}

class Scheduler {
  public:
    explicit Scheduler(const KInput &in) : in_(in) {
        std::size_t most = 0;
        for (const std::vector<KMove> &moves : in_.moves)
            most = std::max(most, moves.size());
        for (std::size_t at = 0; at < most; ++at)
            for (const std::vector<KMove> &moves : in_.moves)
                if (at < moves.size()) moves_.push_back(moves[at]);
        for (const KMove &move : moves_)
            any_direct_ = any_direct_ || move.direct;
        for (const KBlock &block : in_.blocks) {
            states_.emplace_back(block.members.size());
            c_in_.emplace_back(block.adders.size());
            const std::size_t count = (block.members.front().heights.size() - 1) * columns_in(block.members.front());
            for (WorkerState &state : states_.back()) {
                state.begun.assign(count, false);
                state.c_there.assign(count, -1);
                state.products.assign(count, on_no_lane);
            }
            for (auto &tasks : c_in_.back())
                tasks.assign(count, -1);
            finished_.emplace_back(count, 0);
        }
        if (in_.serial_copies) {
            count_alone();
            count_sent();
        }
    }

    KTables run() {
        for (std::size_t at = 0; at < moves_.size(); ++at) {
            const KMove &move = moves_[at];
            if (!is_fetch(move)) {
                for (std::size_t block = 0; block < in_.blocks.size(); ++block)
                    take(block, move);
            } else if (in_.serial_copies) {
                const std::size_t end = end_of_stretch(at);
                for (const bool shared : {true, false})
                    for (std::size_t which = at; which < end; ++which)
                        fetch_groups(moves_[which], [&](bool found) { return found == shared; });
                at = end - 1;
            } else {
                fetch_groups(move, [](bool) { return true; });
            }
        }
        return std::move(out_);
    }

  private:
    // What waits for nothing begins before most fetches are issued, which takes a while. All others wait for the first
    // one, which goes before it.
    void begin_residents() {
        if (out_.tasks.empty() || std::exchange(residents_begun_, true)) return;
        for (std::size_t block = 0; block < in_.blocks.size(); ++block)
            for (std::size_t split = 0; split < in_.blocks[block].members.size(); ++split)
                if (resident(in_.blocks[block].members[split]))
                    multiply_here(in_.blocks[block].members[split], states_[block][split], static_cast<int>(split), 1);
    }

    static bool is_fetch(const KMove &move) { return move.step == fetch_a || move.step == fetch_b; }

    // Where the fetches of one stretch of k end, those of all splits: each sums a k of its own. Of a device that serves
    // its copies in turn the pieces of a stretch that are handed on come first, so that all ranks have theirs at one
    // time.
    std::size_t end_of_stretch(std::size_t at) const {
        const KMove &first = moves_[at];
        while (++at < moves_.size() && is_fetch(moves_[at]) && moves_[at].first_k == first.first_k &&
               moves_[at].last_k == first.last_k) {
        }
        return at;
    }

    // Fetches what bands of rows need of A or of columns of B, where several ranks do or one, as asked for.
    void fetch_groups(const KMove &move, const std::function<bool(bool)> &wanted) {
        const int matrix = move.step == fetch_a ? matrix_a : matrix_b;
        for (int group = 0; group < (matrix == matrix_a ? in_.rows : in_.cols); ++group) {
            const auto blocks = matrix == matrix_a ? blocks_of_row(group) : blocks_of_col(group);
            if (!wanted(is_shared(matrix, blocks, move.split))) continue;
            fetch(matrix, group, blocks, move);
            begin_residents();
        }
    }

    bool is_shared(int matrix, const std::vector<std::size_t> &blocks, int split) const {
        int takers = 0;
        for (const std::size_t block : blocks)
            takers += takes(matrix, in_.blocks[block].members[static_cast<std::size_t>(split)]);
        return takers > 1;
    }
    // Whether a worker has to be sent what it needs of A or B. What holds it may copy it for itself.
    bool takes(int matrix, const KWorker &w) const { return w.panel[matrix] >= 0 && !at_home(matrix, w.rank); }

    // -- who ---------------------------------------------------------------------------------

    std::vector<std::size_t> blocks_of_row(int row) const {
        std::vector<std::size_t> found;
        for (int col = 0; col < in_.cols; ++col)
            add_block(found, row, col);
        return found;
    }
    std::vector<std::size_t> blocks_of_col(int col) const {
        std::vector<std::size_t> found;
        for (int row = 0; row < in_.rows; ++row)
            add_block(found, row, col);
        return found;
    }
    void add_block(std::vector<std::size_t> &found, int row, int col) const {
        const int block = in_.block_of[static_cast<std::size_t>(row) * in_.cols + col];
        const auto one = static_cast<std::size_t>(block);
        if (block >= 0 && (found.empty() || found.back() != one)) found.push_back(one);
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

    std::int32_t region(const Region &r) {
        const auto [found, fresh] = regions_.try_emplace(r, static_cast<std::int32_t>(out_.regions.size()));
        if (fresh) out_.regions.push_back({r.buffer, 0, r.row, r.col, r.rows, r.cols});
        return found->second;
    }
    std::int32_t lane(int rank, LaneKind kind, int source, int destination) {
        const auto [found, fresh] =
            lanes_.try_emplace(std::make_tuple(rank, static_cast<int>(kind), source, destination),
                               static_cast<std::int32_t>(out_.lanes.size()));
        if (fresh) out_.lanes.push_back({rank, kind, source, destination});
        return found->second;
    }
    std::int32_t lane_to(int rank, LaneKind kind, int to) {
        return lane(rank, kind, rank, in_.serial_copies && to != rank ? any_device : to);
    }
    std::int32_t compute(int rank, int number) { return lane(rank, compute_lane, no_source, number); }

    std::int32_t task(Kind kind, std::int32_t on, const Region &write, const std::vector<Operand> &reads,
                      std::vector<std::int32_t> awaits) {
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
        std::sort(awaits.begin(), awaits.end());
        awaits.erase(std::unique(awaits.begin(), awaits.end()), awaits.end());
        for (const std::int32_t awaited : awaits)
            if (awaited >= 0 && out_.tasks[awaited].lane != on) out_.awaits.push_back(awaited);
        record.num_awaits = static_cast<std::int32_t>(out_.awaits.size()) - record.first_await;
        out_.tasks.push_back(record);
        return static_cast<std::int32_t>(out_.tasks.size()) - 1;
    }

    std::int32_t copy(std::int32_t on, const Region &there, const Region &source, std::vector<std::int32_t> awaits) {
        return task(copy_task, on, there, {{source}}, std::move(awaits));
    }
    std::int32_t push(int rank, int to, const Region &there, const Region &source, std::int32_t awaited) {
        return copy(lane_to(rank, copy_lane, to), there, source, {awaited});
    }
    // Results have lanes of their own between devices: one that awaits its product holds up no fetch.
    std::int32_t push_result(int rank, int to, const Region &there, const Region &source,
                             const std::vector<std::int32_t> &awaits) {
        return copy(lane_to(rank, result_lane, to), there, source, awaits);
    }
    std::int32_t copy_in(const KOrigin &origin, int rank, const Region &there, const Region &source) {
        if (!origin.on_host) return push(origin.rank, rank, there, source, -1);
        return copy(lane(origin.rank < 0 ? rank : origin.rank, copy_lane, host_owner, rank), there, source, {-1});
    }
    void copy_out(int rank, const KOrigin &goal, const Region &there, const Region &source,
                  const std::vector<std::int32_t> &awaits) {
        if (!goal.on_host) {
            push_result(rank, goal.rank, there, source, awaits);
        } else {
            copy(lane(goal.rank < 0 ? rank : goal.rank, copy_lane, rank, host_owner), there, source, awaits);
        }
    }

    // -- A and B -----------------------------------------------------------------------------

    // Elements that each worker alone needs, by block and split: nobody hands these on to it.
    void count_alone() {
        for (auto &of : alone_)
            for (const KBlock &block : in_.blocks)
                of.emplace_back(block.members.size(), 0);
        auto count = [&](int matrix, int group, const std::vector<std::size_t> &blocks) {
            if (blocks.empty()) return;
            for (std::size_t split = 0; split < in_.blocks[blocks.front()].members.size(); ++split) {
                std::vector<std::size_t> takers;
                for (const std::size_t block : blocks)
                    if (takes(matrix, in_.blocks[block].members[split])) takers.push_back(block);
                if (takers.size() != 1) continue;
                const KWorker &w = in_.blocks[takers.front()].members[split];
                const std::int64_t across = matrix == matrix_a
                                                ? band(group).size()
                                                : columns_of(w, 0, static_cast<int>(w.starts.size()) - 1).size();
                alone_[matrix][takers.front()][split] += across * (w.last_k - w.first_k);
            }
        };
        for (int row = 0; row < in_.rows; ++row)
            count(matrix_a, row, blocks_of_row(row));
        for (int col = 0; col < in_.cols; ++col)
            count(matrix_b, col, blocks_of_col(col));
    }

    // Elements that each rank sends whoever hands on what: what it holds of A and B, once to a group of takers, C to
    // those who add to it, and its own results.
    void count_sent() {
        const auto send = [&](const KOrigin &origin, std::int64_t elements) {
            if (!origin.on_host) sent_[origin.rank] += elements;
        };
        const auto panels = [&](int matrix, const std::vector<std::size_t> &blocks, const auto &across) {
            if (blocks.empty()) return;
            for (std::size_t split = 0; split < in_.blocks[blocks.front()].members.size(); ++split)
                for (const std::size_t block : blocks) {
                    const KWorker &w = in_.blocks[block].members[split];
                    if (!takes(matrix, w)) continue;
                    send(in_.origin[matrix], across(w) * (w.last_k - w.first_k));
                    break;
                }
        };
        for (int row = 0; row < in_.rows; ++row)
            panels(matrix_a, blocks_of_row(row), [&](const KWorker &) { return band(row).size(); });
        for (int col = 0; col < in_.cols; ++col)
            panels(matrix_b, blocks_of_col(col), [](const KWorker &w) { return w.last_col - w.first_col; });
        for (const KBlock &block : in_.blocks)
            for (const KWorker &w : block.members) {
                if (at_home(matrix_c, w.rank)) continue;
                const std::int64_t rows = w.last_row - w.first_row;
                sent_[w.rank] += rows * (w.last_col - w.first_col);
                for (const KAdder &adder : block.adders)
                    for (std::size_t at = 0; at < adder.firsts.size() && in_.reads_c; ++at)
                        if (adder.rank == w.rank)
                            send(in_.origin[matrix_c], rows * (adder.lasts[at] - adder.firsts[at]));
            }
    }

    // Which of the takers of a piece gets it from its origin and hands it on: one of those that get most from there
    // alone, and of these one that sends least so far. What is handed on goes to the others' ports, so that the
    // origin's next copy finds its target's port free.
    std::int64_t first_taker(int matrix, int split) const {
        const auto alone = [&](std::size_t block) {
            std::int64_t elements = 0;
            for (const int other : {matrix_a, matrix_b})
                if (in_.origin[other].rank == in_.origin[matrix].rank && !in_.origin[other].on_host)
                    elements += alone_[other][block][static_cast<std::size_t>(split)];
            return elements;
        };
        std::int64_t most = 0;
        for (const std::size_t taker : takers_)
            most = std::max(most, alone(taker));
        const auto sent = [&](std::size_t at) {
            const auto found = sent_.find(in_.blocks[takers_[at]].members[static_cast<std::size_t>(split)].rank);
            return found == sent_.end() ? 0 : found->second;
        };
        std::size_t best = takers_.size();
        for (std::size_t at = 0; at < takers_.size(); ++at)
            if (alone(takers_[at]) == most && (best == takers_.size() || sent(at) < sent(best))) best = at;
        return static_cast<std::int64_t>(best);
    }

    // Brings one piece of A or B to all that need it. Row blocks of ranks beside each other may differ: the rows
    // between all their cuts go when the first of them needs them.
    void fetch(int matrix, int group, const std::vector<std::size_t> &blocks, const KMove &move) {
        if (blocks.empty()) return;
        if (matrix == matrix_b) {
            fetch_rows(matrix, blocks, move, {});
            return;
        }
        std::vector<std::int64_t> cuts{band(group).first, band(group).last};
        for (const std::size_t block : blocks) {
            const KWorker &w = in_.blocks[block].members[static_cast<std::size_t>(move.split)];
            for (const std::int64_t height : w.heights)
                if (w.first_row + height > cuts[0] && w.first_row + height < cuts[1])
                    cuts.push_back(w.first_row + height);
        }
        std::sort(cuts.begin(), cuts.end());
        cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
        Extent rows{cuts.front(), cuts.front()};
        for (std::size_t at = 0; at + 1 < cuts.size(); ++at) {
            if (is_needed(blocks, move, cuts[at])) {
                rows = {rows.size() > 0 ? rows.first : cuts[at], cuts[at + 1]};
                continue;
            }
            if (rows.size() > 0) fetch_rows(matrix, blocks, move, rows);
            rows = {cuts[at + 1], cuts[at + 1]};
        }
        if (rows.size() > 0) fetch_rows(matrix, blocks, move, rows);
    }

    // Whether the first row block with a row, of those that its workers have it in, is among those of a fetch.
    bool is_needed(const std::vector<std::size_t> &blocks, const KMove &move, std::int64_t row) const {
        int least = -1;
        for (const std::size_t block : blocks) {
            const KWorker &w = in_.blocks[block].members[static_cast<std::size_t>(move.split)];
            if (w.panel[matrix_a] < 0) continue;
            const auto above = std::upper_bound(w.heights.begin(), w.heights.end(), row - w.first_row);
            const int at = static_cast<int>(above - w.heights.begin()) - 1;
            least = least < 0 ? at : std::min(least, at);
        }
        return move.top <= least && least < move.bottom;
    }

    // Brings some rows of a piece of A, or a piece of B: a slice to each, and from each to the others.
    void fetch_rows(int matrix, const std::vector<std::size_t> &blocks, const KMove &move, Extent of_a) {
        auto worker = [&](std::size_t block) -> const KWorker & { return in_.blocks[block].members[move.split]; };
        auto place = [&](const KWorker &w, bool here) {
            const Extent inner = Extent{move.first_k, move.last_k}.shifted(w.first_k);
            const Extent rows = matrix == matrix_a ? of_a : inner;
            const Extent cols = matrix == matrix_a ? inner : columns_of(w, move.first, move.last);
            return here ? held(w, matrix, rows, cols) : user(matrix, rows, cols);
        };
        auto arrives = [&](std::size_t block, std::int32_t task) {
            states_[block][move.split].arriving.push_back(
                {move, of_a.shifted(-worker(block).first_row), task, on_no_lane});
        };
        const Region source = place(worker(blocks.front()), false);
        if (source.empty()) return;
        takers_.clear();
        for (const std::size_t block : blocks) {
            if (takes(matrix, worker(block))) {
                takers_.push_back(block);
            } else if (worker(block).panel[matrix] >= 0) {
                const int rank = worker(block).rank;
                arrives(block, push(rank, rank, place(worker(block), true), source, -1));
            }
        }
        if (takers_.empty()) return;
        const auto count = static_cast<std::int64_t>(takers_.size());
        const std::int64_t size = source.rows * source.cols * in_.itemsize;
        // A device that serves its copies one after another sends fewer, longer ones.
        const bool whole = in_.serial_copies && !in_.origin[matrix].on_host;
        const std::int64_t parts =
            whole ? 1 : std::max<std::int64_t>(1, std::min({count, source.cols, size / in_.min_slice_bytes}));
        const std::int64_t turn = move.first_k / in_.first_block + (matrix == matrix_a ? move.top : 0);
        for (std::int64_t part = 0; part < parts; ++part) {
            const Extent slice = part_of(source.cols, parts, part);
            const std::int64_t chosen = whole ? first_taker(matrix, move.split) : (part + turn) % count;
            const std::size_t first = takers_[static_cast<std::size_t>(chosen)];
            const Region here = place(worker(first), true).columns(slice.first, slice.last);
            const std::int32_t came =
                copy_in(in_.origin[matrix], worker(first).rank, here, source.columns(slice.first, slice.last));
            arrives(first, came);
            if (whole) sent_[worker(first).rank] += (count - 1) * source.rows * source.cols;
            for (std::int64_t next = 1; next < count; ++next) {
                // The one that the origin sends to next comes last: its port is busy meanwhile.
                const std::int64_t at = whole ? chosen + count - next : next <= chosen ? next - 1 : next;
                const std::size_t other = takers_[static_cast<std::size_t>(at % count)];
                const Region there = place(worker(other), true).columns(slice.first, slice.last);
                arrives(other, push(worker(first).rank, worker(other).rank, there, here, came));
            }
        }
    }

    // -- C -----------------------------------------------------------------------------------

    void take(std::size_t block, const KMove &move) {
        const KBlock &of = in_.blocks[block];
        const KWorker &w = of.members[move.split];
        if (columns_of(w, move.first, move.last).size() == 0 || rows_of(w, move.top, move.bottom).size() == 0) return;
        if (move.step == multiply) {
            multiply_block(w, states_[block][move.split], move);
        } else if (move.step == fetch_c) {
            fetch_block(block, w, states_[block][move.split], move);
        } else if (++finished_[block][index(w, move.top, move.first)] == static_cast<int>(of.members.size())) {
            finish_block(block, move);
        }
    }

    void fetch_block(std::size_t block, const KWorker &w, WorkerState &state, const KMove &move) {
        if (!in_.reads_c || at_home(matrix_c, w.rank)) return;
        const Extent rows = rows_of(w, move.top, move.bottom);
        if (is_direct(w, move)) {
            const Extent cols = columns_of(w, move.first, move.last);
            state.c_there[index(w, move.top, move.first)] =
                copy_in(in_.origin[matrix_c], w.rank, held(w, panel_direct, rows, cols), user(matrix_c, rows, cols));
            return;
        }
        const std::vector<KAdder> &adders = in_.blocks[block].adders;
        for (std::size_t a = 0; a < adders.size(); ++a) {
            if (adders[a].rank != w.rank) continue;
            for (const Columns &part : parts_of(adders[a], move)) {
                const Region beside = in_staging(adders[a].staging, w, rows, part);
                c_in_[block][a][index(w, move.top, part.block)] =
                    copy_in(in_.origin[matrix_c], w.rank, beside, user(matrix_c, rows, part.cols));
            }
        }
    }

    // Columns that one adder has of some column blocks, and where they are in its buffers.
    struct Columns {
        int block;  // the first one
        Extent cols;
        std::int64_t place;
    };
    static std::vector<Columns> parts_of(const KAdder &adder, const KMove &move) {
        std::vector<Columns> found;
        for (int column = move.first; column < move.last; ++column) {
            const Extent cols{adder.firsts[column], adder.lasts[column]};
            if (cols.size() == 0) continue;
            if (!found.empty() && found.back().cols.last == cols.first) {
                found.back().cols.last = cols.last;
            } else {
                found.push_back({column, cols, adder.places[column]});
            }
        }
        return found;
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
    void multiply_here(const KWorker &w, WorkerState &state, int split, int most) {
        const int rows = static_cast<int>(w.heights.size()) - 1, columns = static_cast<int>(columns_in(w));
        const int step = w.panel[matrix_c] < 0 ? columns : 1;
        for (int column = 0; column < columns && most > 0; column += step) {
            const KMove whole{multiply, split, 0, w.last_k - w.first_k, column, column + step, 0, rows};
            if (state.begun[index(w, 0, column)] || columns_of(w, whole.first, whole.last).size() == 0) continue;
            multiply_piece(w, state, whole);
            --most;
        }
    }

    void multiply_block(const KWorker &w, WorkerState &state, const KMove &move) {
        if (resident(w)) {
            multiply_here(w, state, move.split, static_cast<int>(w.starts.size()));
        } else if (!has_operands(w)) {
            multiply_piece(w, state, move);
        } else if (!state.begun[index(w, move.top, move.first)]) {
            KMove whole = move;
            whole.first_k = 0, whole.last_k = w.last_k - w.first_k;
            multiply_piece(w, state, whole);
        }
    }

    void multiply_piece(const KWorker &w, WorkerState &state, const KMove &move) {
        const Extent rows = rows_of(w, move.top, move.bottom), cols = columns_of(w, move.first, move.last);
        const Extent all = Extent{move.first_k, move.last_k}.shifted(w.first_k);
        const std::int64_t left = all.size() > w.k_step ? all.size() % w.k_step : 0;
        const Extent inner{all.first, all.last - left};
        const Region target = held(w, panel_of_c(w, move), rows, cols);
        const auto factors = [&](Extent of) {
            return std::vector<Operand>{{held(w, matrix_a, rows, of), alpha, in_.trans_a},
                                        {held(w, matrix_b, of, cols), one, in_.trans_b}};
        };
        std::vector<Operand> reads = factors(inner);
        std::vector<std::int32_t> awaits;
        const std::size_t corner = index(w, move.top, move.first);
        if (state.begun[corner]) {
            reads.push_back({target, one});
        } else if (in_place(w, move) && in_.reads_c) {
            reads.push_back({target, beta});
        } else if (state.c_there[corner] >= 0) {
            reads.push_back({target, beta});
            awaits.push_back(state.c_there[corner]);
        }
        each_block(w, move, [&](std::size_t at) { state.begun[at] = true; });
        const bool goes_on = state.last.first == move.first && state.last.last == move.last &&
                             state.last.top == move.top && state.last.bottom == move.bottom;
        if (state.last.step == multiply && !goes_on)
            state.lane = (state.lane + 1) % static_cast<std::size_t>(in_.product_lanes);
        state.last = move;
        ByLane before = on_no_lane;  // what this block's sums so far were made by
        each_block(w, move, [&](std::size_t at) {
            for (std::size_t lane = 0; lane < before.size(); ++lane)
                before[lane] = std::max(before[lane], state.products[at][lane]);
        });
        awaits.insert(awaits.end(), before.begin(), before.end());
        // A lane is in order: what one product awaits the next ones need not, nor those that await it.
        const auto next = static_cast<std::int32_t>(out_.tasks.size());
        std::erase_if(state.arriving, [&](Piece &piece) {
            if (!meet(piece, move, rows.shifted(-w.first_row)) || piece.awaited_by[state.lane] >= 0) return false;
            bool awaited = false;
            for (std::size_t lane = 0; lane < before.size(); ++lane)
                awaited = awaited || (piece.awaited_by[lane] >= 0 && piece.awaited_by[lane] <= before[lane]);
            if (!awaited) awaits.push_back(piece.task);
            piece.awaited_by[state.lane] = next;
            return std::count_if(piece.awaited_by.begin(), piece.awaited_by.end(),
                                 [](std::int32_t by) { return by >= 0; }) == in_.product_lanes;
        });
        const std::int32_t on = compute(w.rank, product_lanes[state.lane]);
        std::int32_t made = task(gemm_task, on, target, reads, std::move(awaits));
        if (left > 0) {
            std::vector<Operand> rest = factors({inner.last, all.last});
            rest.push_back({target, one});
            made = task(gemm_task, on, target, rest, {});
        }
        each_block(w, move, [&](std::size_t at) {
            state.products[at] = on_no_lane;
            state.products[at][state.lane] = made;
        });
    }

    // Adds up what the members have of a block of C, and hands it on.
    void finish_block(std::size_t block, const KMove &move) {
        const KBlock &of = in_.blocks[block];
        const KWorker &front = of.members.front();
        if (in_place(front, move)) return;
        const Extent rows = rows_of(front, move.top, move.bottom);
        const bool sums = in_.combines && !is_direct(front, move);
        for (std::size_t a = 0; a < of.adders.size(); ++a) {
            const KAdder &adder = of.adders[a];
            for (const Columns &part : parts_of(adder, move)) {
                const Region target = user(matrix_c, rows, part.cols);
                std::vector<Summand> summands;
                for (std::size_t m = 0; m < of.members.size(); ++m) {
                    const KWorker &member = of.members[m];
                    const Region own = held(member, panel_of_c(member, move), rows, part.cols);
                    ByLane last = on_no_lane;
                    each_block(member, move, [&](std::size_t at) {
                        for (std::size_t lane = 0; lane < last.size(); ++lane)
                            last[lane] = std::max(last[lane], states_[block][m].products[at][lane]);
                    });
                    const std::vector<std::int32_t> products(last.begin(), last.end());
                    if (member.rank == adder.rank) {
                        summands.push_back({own, products});
                        continue;
                    }
                    const Region there = sums ? in_staging(adder.partial[m], member, rows, part) : target;
                    summands.push_back({there, {push_result(member.rank, adder.rank, there, own, products)}});
                }
                Summand out = summands.front();
                if (sums) out = combine(block, a, move, part, summands, target);
                if (!at_home(matrix_c, adder.rank))
                    copy_out(adder.rank, in_.origin[matrix_c], target, out.region, out.made_by);
            }
        }
    }

    Summand combine(std::size_t block, std::size_t a, const KMove &move, const Columns &part,
                    std::vector<Summand> &summands, const Region &target) {
        const KAdder &adder = in_.blocks[block].adders[a];
        const KWorker &front = in_.blocks[block].members.front();
        const std::int32_t on = compute(adder.rank, sum_lane + sums_[adder.rank]++ % sum_lanes);
        const auto most = static_cast<std::size_t>(in_.most_summands), room = most - (in_.reads_c ? 1 : 0);
        auto sum_up = [&](std::size_t count, const Region &into, bool with_c, const Region &c, std::int32_t c_task) {
            std::vector<Operand> reads;
            std::vector<std::int32_t> awaits;
            for (std::size_t s = 0; s < count; ++s) {
                reads.push_back({summands[s].region});
                awaits.insert(awaits.end(), summands[s].made_by.begin(), summands[s].made_by.end());
            }
            if (with_c) {
                reads.push_back({c, beta});
                awaits.push_back(c_task);
            }
            return task(combine_task, on, into, reads, std::move(awaits));
        };
        while (summands.size() > room) {
            const Region into = summands.front().region;
            const std::size_t count = std::min(most, summands.size());
            const std::int32_t sum = sum_up(count, into, false, into, -1);
            summands.erase(summands.begin() + 1, summands.begin() + static_cast<std::ptrdiff_t>(count));
            summands.front() = {into, {sum}};
        }
        const bool home = at_home(matrix_c, adder.rank);
        const Region beside = in_staging(adder.staging, front, rows_of(front, move.top, move.bottom), part);
        const Region out = home ? target : in_.half ? beside : summands.front().region;
        return {out,
                {sum_up(summands.size(), out, in_.reads_c, home ? target : beside,
                        c_in_[block][a][index(front, move.top, part.block)])}};
    }

    const KInput &in_;
    KTables out_;
    std::vector<KMove> moves_;
    std::unordered_map<Region, std::int32_t, RegionHash> regions_;
    bool residents_begun_ = false;
    bool any_direct_ = false;
    std::map<int, int> sums_;                                      // COMBINEs of a rank so far
    std::array<std::vector<std::vector<std::int64_t>>, 2> alone_;  // of A and B, by block and split
    std::unordered_map<int, std::int64_t> sent_;                   // elements, by rank
    std::map<std::tuple<int, int, int, int>, std::int32_t> lanes_;
    std::vector<std::vector<WorkerState>> states_;              // per block, per member
    std::vector<std::vector<std::vector<std::int32_t>>> c_in_;  // per block, per adder, per block of C
    std::vector<std::vector<int>> finished_;                    // per block, per block of C: members that have
    std::vector<std::size_t> takers_;
};

}  // namespace

KTables schedule_kblocks(const KInput &input) { return Scheduler(input).run(); }

}  // namespace uncut
