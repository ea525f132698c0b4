// Makes the tasks of a layout: kblocks_scheduler.cpp has their order, products and C, kblocks_fetch.cpp and
// kblocks_delivery.cpp have A and B.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "kblocks_layout.hpp"
#include "kblocks_store.hpp"
#include "tables.hpp"

namespace uncut {

// Into tables of which the memory is used. Throws TooManyTasks if there are more than `most_tasks`.
void schedule_kblocks(const KLayout &layout, std::int64_t most_tasks, Tables &tables);

// How many tasks that makes; `most_tasks` + 1 if there are more.
std::int64_t count_kblocks(const KLayout &layout, std::int64_t most_tasks);

namespace kblocks {

// COMBINEs of a rank take turns on two lanes: each waits for a flag, and runs while the next one waits.
constexpr int sum_lane = 1, sum_lanes = 2;

// Tasks that stand together in a list.
struct TaskList {
    std::int32_t first = 0, count = 0;
};

// A part of C where a row block and a column block cross, in a panel.
struct Cell {
    bool begun = false;            // whether it has a product
    TaskList c_there;              // copies that put C into the panel
    ByLane products = on_no_lane;  // the last ones
};

struct WorkerState {
    std::size_t lane = 0;  // of the last product,
    KStep last;            // and what that was; no product yet if it is none
};

struct Summand {
    Region region;
    ByLane made_by;  // -1 for none
};

// A rectangle of A or B that comes from one piece.
struct Run {
    Rectangle what;
    const KPiece *from;
    std::span<const KPiece> holders;  // those who have it: one of them
};

// Some of A or B on its way to those that need it, of one node where they are handed it in turn.
struct Delivery {
    struct Taker {
        std::size_t block;
        std::int32_t task = -1;  // the copy that brings it, once that is chosen,
        double there = 0;        // and when it is there
        bool has_it() const { return task >= 0; }
    };
    std::vector<Run> runs;
    KStep step;
    KOrigin origin;
    bool origin_sends;  // whether they may get it from there: host memory and other nodes have sent it already
    Extent columns;     // of the run as it is stored, if it is a slice of one
    double bytes;
    std::int64_t elements;
    std::vector<Taker> takers;
    std::size_t left;  // how many have not got it
};

class Scheduler {
  public:
    // Counts if there are no tables. The store keeps its notes.
    Scheduler(const KLayout &layout, Store &store, std::int64_t most_tasks, Tables *out);

    void run();

    std::int64_t num_tasks() const { return out_.count(); }

  private:
    // Numbers of blocks.
    using Blocks = std::vector<std::size_t>;

    // What waits for nothing begins before most fetches are issued, which takes a while. All others wait for the first
    // one, which goes before it.
    void begin_residents();

    static bool is_fetch(const KStep &step) { return step.kind == fetch_a || step.kind == fetch_b; }

    // Whether all fetches of a stretch of k are looked at together.
    bool in_stretches() const {
        const bool from_devices = problem_.on_device(matrix_a) || problem_.on_device(matrix_b);
        const bool deals = from_devices || !problem_.ways.even() || problem_.locations.num_nodes() > 1;
        return problem_.serial_copies || (how_.earliest && deals);
    }

    // Where the fetches of one stretch of k end, those of all splits: each sums a k of its own. Of a device that serves
    // its copies in turn the pieces of a stretch that are handed on come first, so that all ranks have theirs at one
    // time.
    std::size_t end_of_stretch(std::size_t at) const;

    // Fetches what strips of rows need of A or of columns of B: all, or what several ranks need, or what one does.
    void fetch_groups(const KStep &step, std::optional<bool> shared);

    bool is_shared(int matrix, const Blocks &blocks, int split) const;
    // Whether a rank has to be sent what it needs of A or B. What holds it may copy it for itself.
    bool takes(int matrix, const KPart &part) const { return part.panel[matrix] >= 0 && !part.home[matrix]; }

    // -- who ---------------------------------------------------------------------------------

    const KRequest::Round &round_of(const KStep &step) const {
        return layout_.request.rounds[static_cast<std::size_t>(step.round)];
    }
    const KBlock &block_of(std::size_t number) const { return layout_.blocks[number]; }
    const KPart &member(std::size_t block, int split) const {
        return layout_.blocks[block].parts[static_cast<std::size_t>(split)];
    }
    template <typename What>
    static void each_cell(const KBlock &block, const KStep &step, const What &what) {
        for (int row = step.top; row < step.bottom; ++row)
            for (int column = step.first; column < step.last; ++column)
                what(block.cell(row, column));
    }
    bool is_direct(const KPart &part, const KStep &step) const {
        return part.is_direct && (part.home[matrix_c] ? step.direct_at_home : step.direct);
    }
    int panel_of_c(const KPart &part, const KStep &step) const {
        return is_direct(part, step) ? panel_direct : matrix_c;
    }
    // Whether a rank forms this part of C where the caller has it.
    bool in_place(const KPart &part, const KStep &step) const {
        return part.home[matrix_c] && part.panel[panel_of_c(part, step)] < 0;
    }

    // -- tasks -------------------------------------------------------------------------------

    // The first operand is written, the others are read.
    std::int32_t task(Kind kind, std::int32_t on, std::span<const Operand> operands, Tasks awaits) {
        const Tasks readers = store_.take_note(out_.count(), on, operands.front().region, operands.subspan(1));
        return out_.task(kind, on, operands, awaits, readers);
    }
    std::int32_t copy(std::int32_t on, const Region &there, const Region &source, Tasks awaits) {
        const std::array<Operand, 2> operands{{{there}, {source}}};
        return task(copy_task, on, operands, awaits);
    }
    std::int32_t push(int rank, int to, const Region &there, const Region &source, std::int32_t awaited) {
        return send(copy_lane, rank, to, there, source, {&awaited, 1});
    }
    // Results have lanes of their own between devices: one that awaits its product holds up no fetch.
    std::int32_t push_result(int rank, int to, const Region &there, const Region &source, Tasks awaits) {
        return send(result_lane, rank, to, there, source, awaits);
    }
    // Over other ranks where the link is slow, in chunks; returns the last copy of the last lane.
    std::int32_t send(LaneKind kind, int rank, int to, const Region &there, const Region &source, Tasks awaits) {
        if (beside(rank, to) && problem_.ways.has_relays(rank, to)) return relay(kind, rank, to, there, source, awaits);
        return copy(lane_to(rank, kind, to), there, source, awaits);
    }
    std::int32_t relay(LaneKind kind, int rank, int to, const Region &there, const Region &source, Tasks awaits);
    std::int32_t copy_in(const KOrigin &origin, int rank, const Region &there, const Region &source) {
        if (!origin.on_host) return push(origin.rank, rank, there, source, -1);
        return copy(host_lane(origin, rank, true), there, source, {});
    }
    // The ends of lanes that are no device have their names here alone.
    std::int32_t lane_to(int rank, LaneKind kind, int to) {
        return out_.lane(rank, kind, rank, problem_.serial_copies && to != rank && beside(rank, to) ? any_device : to);
    }
    // Whether two ranks are on one node.
    bool beside(int one, int other) const { return problem_.node_of(one) == problem_.node_of(other); }
    std::int32_t host_lane(const KOrigin &host, int rank, bool in) {
        const int by = host.rank == nobody ? rank : host.rank;
        return in ? out_.lane(by, copy_lane, host.end, rank) : out_.lane(by, copy_lane, rank, host.end);
    }
    std::int32_t compute(int rank, int number) { return out_.lane(rank, compute_lane, no_source, number); }

    // -- A and B -----------------------------------------------------------------------------

    // Counts elements that each rank alone needs, by block and split: nobody hands these on to it. And those that each
    // rank sends, whoever hands on what. These are what it holds of A and B, once to a group of takers, C to those who
    // add to it, and its own results.
    void count();

    // Which of the takers of a piece gets it from its origin and hands it on. It is one of those that get most from
    // there alone, and of these one that sends least so far. What is handed on goes to the others' ports, so that the
    // origin's next copy finds its target's port free.
    std::size_t first_taker(const KOrigin &origin, int split) const;

    // Brings one piece of A or B to all that need it. Row blocks of ranks beside each other may differ: the rows
    // between all their edges go when the first of them needs them.
    void fetch(int matrix, Extent strip, const Blocks &blocks, const KStep &step);

    void fetch_same_k(int matrix, Extent strip, const Blocks &blocks, const KStep &step);
    // Calls for the k of a step, from the first of a part's, which need not begin there.
    template <typename What>
    static void each_extent(const KPart &part, const KStep &step, const What &what) {
        const std::int64_t all = part.k.size();
        const Extent one = Extent{step.first_k, step.last_k}.shifted(part.begins);
        if (one.first >= all) {
            what(one.shifted(-all));
        } else if (one.last <= all) {
            what(one);
        } else {
            what({one.first, all});
            what({0, one.last - all});
        }
    }
    // The same for products, which read what is held in place: cut where that begins and ends, and from the first of
    // all k.
    template <typename What>
    static void each_product(const KPart &part, const KStep &step, const What &what) {
        each_extent(part, step, [&](Extent one) {
            one = one.shifted(part.k.first);
            while (one.size() > 0) {
                std::int64_t end = one.last;
                for (const Extent &held : part.held)
                    for (const std::int64_t edge : {held.first, held.last})
                        if (held.size() > 0 && one.first < edge && edge < end) end = edge;
                what({one.first, end});
                one.first = end;
            }
        });
    }

    // Whether the first row block with a row, of those that its ranks have it in, is among those of a fetch.
    bool is_needed(const Blocks &blocks, const KStep &step, std::int64_t row) const;

    // Brings some rows of a piece of A, or a piece of B: a slice to each, and from each to the others.
    void fetch_rows(int matrix, const Blocks &blocks, const KStep &step, Extent of_a);
    Region source_of(const Run &run) const {
        return store_.users(run.what.matrix, *run.from, rows_of(run.what), cols_of(run.what));
    }
    // Finds who needs a run from another one, and has those that hold it copy it where they use it.
    void find_takers(const Run &run, const Blocks &blocks, const KStep &step, Blocks &takers);
    // Whether two runs, one after the other, are brought as one.
    bool go_together(const Run &one, const Run &other) const;
    // Brings runs that go together to those who take them.
    void hand_out(const KStep &step);
    void hand_out_whole(const KStep &step);
    void hand_out_in_slices(const Run &run, const KStep &step);
    // The same where some who take them are on other nodes than the origin. Each slice goes round the nodes, so that it
    // enters each once and leaves each once; the rank of a node that gets it hands it on there.
    void hand_out_over_nodes(const KStep &step);
    // What goes round nodes: where its takers of each node end, who has got it last.
    struct RoundNodes {
        Delivery slice;
        std::vector<std::size_t> ends;
        std::int64_t turn;
        const Delivery::Taker *from = nullptr;
        std::vector<std::int32_t> came{};  // the legs to it
    };
    void go_round();
    void go_on(RoundNodes &one, std::size_t at);
    // Brings a slice to a node in legs, each as soon as it has come where it comes from: `came` are those, and then
    // those that went.
    void pass_in_legs(const Delivery &slice, const Delivery::Taker *from, Delivery::Taker &to,
                      std::vector<std::int32_t> &came);
    // Who of a node gets a slice first, by turns; null if it is the origin's turn, which is there.
    Delivery::Taker *first_of_node(std::span<Delivery::Taker> takers, const Delivery &slice, std::int64_t turn) const;
    // What all who are on the node of one that has it get from there; null: from the origin.
    void hand_on(const Delivery &slice, std::span<Delivery::Taker> takers, const Delivery::Taker *from);
    // In how many slices of a few bytes at least a run is cut, for so many who get one.
    std::int64_t count_slices(const Run &run, std::int64_t most) const;
    int node_of(const Delivery::Taker &taker, const KStep &step) const {
        return problem_.node_of(rank_of(taker.block, step));
    }
    int node_of(const KOrigin &origin) const { return problem_.node_of(origin); }
    // Some columns of some runs, or all.
    Delivery to_deliver(std::span<const Run> runs, Extent columns, const KStep &step) const;
    // Brings it to one of those who take it: from one that has it, or null: from the origin.
    void pass(const Delivery &what, const Delivery::Taker *from, Delivery::Taker &to);

    int rank_of(std::size_t block, const KStep &step) const { return member(block, step.split).rank; }
    // What a step brings to a block; of A these rows.
    Rectangle piece(int matrix, std::size_t number, const KStep &step, Extent of_a) const {
        const Extent inner = Extent{step.first_k, step.last_k}.shifted(member(number, step.split).k.first);
        return {matrix, matrix == matrix_a ? of_a : block_of(number).cols_of(step), inner};
    }
    // Where that is in a block's panel, or in the caller's matrix.
    Region here(std::size_t number, const KStep &step, const Rectangle &what) const {
        return store_.at(block_of(number), member(number, step.split), what.matrix, rows_of(what), cols_of(what));
    }
    static Extent rows_of(const Rectangle &what) { return what.matrix == matrix_a ? what.across : what.k; }
    static Extent cols_of(const Rectangle &what) { return what.matrix == matrix_a ? what.k : what.across; }
    void arrives(std::size_t block, const KStep &step, const Rectangle &what, std::int32_t task) {
        store_.arrives(member(block, step.split).worker, what, task);
    }
    // Elements that a rank alone needs of matrices with a part on the device of a piece.
    std::int64_t needed_alone(const KOrigin &origin, std::size_t block, int split) const;

    // -- A and B between devices, each copy when its ports are free: kblocks_delivery.cpp ------

    // A copy that could be next: from the piece's origin, or from a taker that has it.
    struct NextCopy {
        Delivery *piece = nullptr;
        Delivery::Taker *from = nullptr, *to = nullptr;
        double begins = 0;
    };
    void deliver();
    NextCopy next_copy(std::vector<Delivery> &deliveries);
    int sender(const NextCopy &copy) const;
    // When a copy to a rank (-1: to whomever) could begin, and how much later it ends than on the fastest link.
    double could_begin(int from, int to, double there, double bytes) const;
    // Takes the ports and links of a copy, and returns when it is over.
    double occupy(int from, int to, double begins, double bytes);

    // -- C -----------------------------------------------------------------------------------

    void take(std::size_t block, const KStep &step);

    void bring_c(std::size_t block, const KStep &step);

    // Columns that one adder has of some column blocks, and where they are in its buffers.
    struct Columns {
        int block;  // the first one
        Extent cols;
        std::int64_t place;
        Columns part(Extent of) const { return {block, of, place + of.first - cols.first}; }
    };
    template <typename What>
    static void each_slice(const KAdder &adder, const KStep &step, const What &what) {
        Columns slice{};
        for (int column = step.first; column < step.last; ++column) {
            const Extent cols = adder.slices[static_cast<std::size_t>(column)].cols;
            if (cols.size() == 0) continue;
            if (slice.cols.size() > 0 && slice.cols.last == cols.first) {
                slice.cols.last = cols.last;
                continue;
            }
            if (slice.cols.size() > 0) what(slice);
            slice = {column, cols, adder.slices[static_cast<std::size_t>(column)].place};
        }
        if (slice.cols.size() > 0) what(slice);
    }
    Region in_staging(int buffer, const KAdder &adder, Extent rows, const Columns &slice) const {
        return store_.beside(adder, buffer, rows, slice.place, slice.cols.size());
    }
    // Brings a rectangle of C to where it is added to, and returns the copies.
    template <typename There>
    TaskList copy_c_in(int rank, Extent rows, Extent cols, const There &there);
    // Copies a rectangle of C to all that have it, but for what is where it comes from.
    template <typename From>
    void copy_c_out(int rank, Extent rows, Extent cols, const KPiece *but, const From &from, Tasks awaits);
    void await_all(const TaskList &list) {
        awaits_.insert(awaits_.end(), c_copies_.begin() + list.first, c_copies_.begin() + list.first + list.count);
    }

    // Whether a rank has all that its products need from the start.
    bool resident(const KPart &part) const {
        const bool awaits_c =
            layout_.any_direct && part.is_direct && !(part.home[matrix_c] && part.panel[matrix_c] < 0);
        return has_operands(part) && !awaits_c;
    }
    static bool has_operands(const KPart &part) { return part.panel[matrix_a] < 0 && part.panel[matrix_b] < 0; }

    // Products of all of k, whose sums stay in registers: one where C is at home, else one per column block, at most
    // `most` of those that are left. The step says of which round and split.
    void multiply_here(std::size_t block, KStep step, int most);

    void multiply_block(std::size_t block, const KStep &step);

    void multiply_piece(std::size_t block, const KStep &step);

    // Adds up what its ranks have of a part of C, and hands it on.
    void finish_part(std::size_t block, const KStep &step);

    Summand combine(std::size_t block, std::size_t a, const KStep &step, const Columns &slice, Extent rows,
                    std::vector<Summand> &summands);

    // What becomes of one block of C.
    struct BlockState {
        std::vector<std::vector<Cell>> cells;     // for each part of k
        std::vector<std::vector<TaskList>> c_in;  // per adder and cell: copies of C
        std::vector<int> finished;                // per cell: parts of k that have
    };

    const KLayout &layout_;
    const KProblem &problem_;
    const KBlocking &how_;
    Store &store_;
    TableWriter out_;
    std::vector<Operand> summed_;         // of one COMBINE
    std::vector<std::int32_t> awaits_;    // of one task
    std::vector<std::int32_t> c_copies_;  // what lists of them are parts of
    bool residents_begun_ = false;
    std::vector<int> sums_;                                        // COMBINEs of each rank so far
    std::array<std::vector<std::vector<std::int64_t>>, 2> alone_;  // of A and B, by block and split
    std::vector<std::int64_t> sent_;                               // elements, of each rank
    std::vector<WorkerState> workers_;
    std::vector<BlockState> blocks_;
    std::vector<Run> runs_;  // that go together,
    Blocks takers_, found_;  // who takes them, and who takes the next one
    std::vector<std::int64_t> edges_;
    std::vector<Summand> summands_;   // of one part of C
    std::vector<RoundNodes> rounds_;  // what a fetch sends round nodes
    // What waits to be delivered, and until when each rank's port to other devices and from them is busy, in bytes.
    std::vector<std::vector<Delivery>> deliveries_;  // on each node
    std::vector<double> sends_until_, receives_until_, link_until_, host_until_;
    // What each rank hands on for others: the slot that comes next, and who read each of them last.
    struct Slots {
        std::size_t next = 0;
        std::array<std::int32_t, relay_slots> read_by;
    };
    std::array<std::vector<Slots>, element_types.size()> slots_;  // as the relays of the layout
};

}  // namespace kblocks
}  // namespace uncut
