// Follows the tasks of a schedule and derives what every rectangle of memory holds: the core of planning/verify.py.
//
// It starts from what the caller's matrices hold. Every read must be of what it should be and come after whatever wrote
// it; every write must come after whatever wrote or read there before.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "follower_clocks.hpp"
#include "follower_contents.hpp"
#include "follower_memory.hpp"
#include "locations.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

constexpr std::uint8_t not_transposed = 0, transposed = 1;
constexpr Event given{-1, -2};  // the writer of what is there at first, where something is expected

std::string buffer_text(std::int64_t buffer) { return "<buffer " + std::to_string(buffer) + ">"; }
std::string task_text(std::int64_t task) { return "<task " + std::to_string(task) + ">"; }
std::string name_of_op(std::uint8_t op) { return std::string(1, "NTC"[op]); }

void demand(bool good, const char *what) {
    if (!good) throw RuleBroken(what);
}

template <typename Record>
std::span<const Record> part_of(std::span<const Record> table, std::int64_t first, std::int64_t count) {
    const auto size = static_cast<std::int64_t>(table.size());
    if (first < 0 || count < 0 || first > size || count > size - first)
        throw std::invalid_argument("a task points outside its tables");
    return table.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
}

bool contains(const Rect &all, const Rect &rect) {
    return rect.top >= all.top && rect.left >= all.left && rect.top <= rect.bottom && rect.left <= rect.right &&
           rect.bottom <= all.bottom && rect.right <= all.right;
}

// What a final content of C is and why it is wrong; nothing if it is right.
std::string why_wrong(const Content &found, const Content &expected) {
    if (found.kind != expected.kind || found.matrix != expected.matrix) return text_of(found);
    if (!found.is_zero() && found.turned != expected.turned) return "values that are stored transposed";
    if (!found.is_zero() && (found.row != expected.row || found.col != expected.col))
        return "the values of elements displaced by " + std::to_string(found.row - expected.row) + " rows and " +
               std::to_string(found.col - expected.col) + " columns";
    if (found.ending != expected.ending)
        return is_epilogue(expected.ending) ? "what has not had its epilogue"
               : is_epilogue(found.ending)
                   ? "what has had an epilogue"
                   : "another part of it than the triangle that is asked for, or another diagonal";
    if (found.summed == expected.summed && found.c_in == expected.c_in && found.alpha == expected.alpha) return "";
    std::string why;
    const auto add = [&why](const std::string &what) { why += (why.empty() ? "" : "; ") + what; };
    if (found.summed != expected.summed && !expected.summed.empty()) add("k is " + text_of(expected.summed));
    if (found.alpha != expected.alpha && !found.summed.empty()) add("alpha is never applied");
    if (found.c_in != expected.c_in && expected.c_in == CIn::scaled) add("beta is never applied");
    return text_of(found) + " (" + (why.empty() ? "which is not the result asked for" : why) + ")";
}

constexpr auto content_of_tile = [](const Memory::Tile &tile) -> const Content & { return tile.fragment->content; };

using Range = std::pair<std::int64_t, std::int64_t>;

// What the rules need to know of the problem.
struct FollowedProblem {
    std::uint8_t op_a = 0, op_b = 0;
    std::array<std::uint8_t, 3> dtypes{};  // of A, B and C
    std::int64_t diagonal = 0;             // of a triangle: how far the first element of C is below it
};

// What an operand's region holds, or a part of it: a rectangle of a matrix, as that is stored.
struct HeldRecord {
    std::int32_t task = 0, operand = 0;  // the operand's number in its task; 0 is written
    std::int64_t matrix = 0, row = 0, col = 0, rows = 0, cols = 0;
};

class Follower {
  public:
    Follower(const FollowedProblem &problem, const ScheduleTables &tables)
        : problem_(problem),
          inputs_(tables.buffers.size()),
          clocks_(tables.lanes.size()),
          lanes_(tables.lanes.begin(), tables.lanes.end()) {
        const Locations &memories = *tables.locations;
        for (const BufferRecord &one : tables.buffers) {
            if (!memories.has(one.location)) throw std::invalid_argument("a buffer's location does not exist");
            const int at = one.location;
            buffers_.push_back(
                {memories.rank(at), memories.node(at), memories.in_host(at), one.dtype, {0, 0, one.rows, one.cols}});
            memories_.emplace_back(buffers_.back().all, Content{});
        }
        for (int at = 0; at < memories.count() && !memories.in_host(at); ++at)  // devices, by their ranks
            node_of_rank_.push_back(memories.node(at));
    }

    // A rectangle of a buffer is the caller's A or B and only read; matrix −1: it holds nothing that may be. Its
    // elements are those of the matrix so many rows and columns further on. If it is turned, element (c, r) of the
    // matrix is at (r, c).
    void give(std::int32_t buffer, const Range &rows, const Range &cols, const Range &by, bool turned, int matrix) {
        const Rect rect{rows.first, cols.first, rows.second, cols.second};
        Content content = matrix < 0 ? Content{} : Content::piece(static_cast<std::uint8_t>(matrix));
        if (matrix >= 0) content.turned = turned, content.row = by.first, content.col = by.second;
        std::vector<Input> &inputs = inputs_.at(static_cast<std::size_t>(buffer));
        const auto at = std::ranges::upper_bound(inputs, rect.left, {}, [](const Input &one) { return one.rect.left; });
        auto added = inputs.insert(at, {rect, rect.right, {content, given, {}}});
        for (std::int64_t furthest = added == inputs.begin() ? rect.right : std::prev(added)->furthest;
             added != inputs.end(); ++added)
            added->furthest = furthest = std::max(furthest, added->rect.right);
    }

    // What a rectangle of the caller's C must hold at the end: a `ResultPart` of model/problem.py. It holds C_in of the
    // same elements at first, if that takes part. RuleBroken if some of it has been said before or is no part of C.
    void expect(std::int32_t buffer, const Range &rows, const Range &cols, const Range &by, bool turned,
                const std::vector<Range> &summed, bool alpha, int takes_c_in, bool copied, std::uint8_t ending) {
        const Rect rect{rows.first, cols.first, rows.second, cols.second};
        Content content{.kind = copied ? Content::Kind::piece : Content::Kind::partial,
                        .turned = turned,
                        .alpha = alpha,
                        .ending = ending,
                        .c_in = static_cast<CIn>(takes_c_in),
                        .row = by.first,
                        .col = by.second};
        for (const auto &[start, stop] : summed)
            content.summed.push_back({start, stop});
        const Rect &all = buffers_.at(static_cast<std::size_t>(buffer)).all;
        const std::string place = buffer_text(buffer) + " " + text_of(rect);
        if (!contains(all, rect)) throw RuleBroken(place + " is to hold something, but is not all there");
        memories_[buffer].find(rect, tiles_);
        for (const auto &[there, fragment] : tiles_)
            if (fragment->writer.task == given.task) throw RuleBroken("what " + place + " is to hold is said twice");
        const Content c_in{.kind = Content::Kind::partial,
                           .turned = content.turned,
                           .c_in = CIn::raw,
                           .row = content.row,
                           .col = content.col};
        memories_[buffer].overwrite(rect, content.c_in == CIn::absent ? Content{} : c_in, given);
        expected_.push_back({buffer, rect, content});
    }

    // Keeps from now on what every operand holds, written ones after their tasks; zeros only where they are the
    // caller's C. Whether tasks are ordered by what they await is not looked at then.
    void keep_held() {
        keeps_held_ = true;
        clocks_.trust();
    }
    std::vector<HeldRecord> take_held() { return std::exchange(held_, {}); }

    // All tasks, once.
    void follow(const TaskTables &tables) {
        const auto awaits_of = [&](const TaskRecord &task) {
            return part_of(tables.awaits, task.first_await, task.num_awaits);
        };
        std::vector<std::int32_t> uses(tables.tasks.size(), 0);  // how many awaits name each task
        for (std::size_t i = 0; i < tables.tasks.size(); ++i)
            for (const std::int32_t awaited : awaits_of(tables.tasks[i])) {
                if (awaited < 0 || static_cast<std::size_t>(awaited) >= i)
                    throw std::invalid_argument("a task awaits one that is not earlier");
                ++uses[awaited];
            }
        for (std::size_t i = 0; i < tables.tasks.size(); ++i) {
            const TaskRecord &task = tables.tasks[i];
            if (task.lane < 0 || static_cast<std::size_t>(task.lane) >= lanes_.size())
                throw std::invalid_argument("a task's lane does not exist");
            clocks_.advance(task.lane, awaits_of(task), uses[i]);
            take_operands(tables, task);
            try {
                if (task.kind == join_task) {
                    demand(operands_.empty(), "a JOIN has no operands");
                    continue;
                }
                check_issuer(task);
                check_awaits(tables, task);
                if (task.kind == copy_task) copy();
                if (task.kind == send_task) send();
                if (task.kind == receive_task) receive();
                if (task.kind == gemm_task) gemm();
                if (task.kind == combine_task) combine();
            } catch (const RuleBroken &broken) {
                throw RuleBroken(task_text(clocks_.now().task) + ": " + broken.what());
            }
        }
    }

    // Checks what was expected.
    void finish() {
        std::map<std::int32_t, std::int64_t> elements;
        for (const Expected &expected : expected_)
            elements[expected.buffer] += expected.rect.rows() * expected.rect.cols();
        for (const auto &[buffer, count] : elements)
            if (const Rect &all = buffers_[buffer].all; count != all.rows() * all.cols())
                throw RuleBroken("of some elements of " + buffer_text(buffer) + " nothing says what they are to hold");
        for (const auto &[buffer, rect, expected] : expected_) {
            memories_[buffer].find(rect, tiles_);
            for (const auto &[place, fragment] : tiles_) {
                const std::string wrong = why_wrong(fragment->content, expected);
                if (wrong.empty()) continue;
                const std::int32_t writer = fragment->writer.task;
                const Rect of_c = (expected.turned ? place.transposed() : place).moved(-expected.row, -expected.col);
                throw RuleBroken("C " + text_of(of_c) + " ends with " + wrong + "; it is " +
                                 (writer < 0 ? "never written" : "written last by " + task_text(writer)));
            }
        }
    }

    std::int64_t reads() const { return reads_; }
    std::int64_t writes() const { return writes_; }

  private:
    // An operand of the present task.
    struct Operand {
        std::int32_t buffer;
        Rect rect;
        std::uint8_t factor, op;
        std::int64_t diagonal;
        bool operator==(const Operand &other) const { return buffer == other.buffer && rect == other.rect; }
        bool overlaps(const Operand &other) const { return buffer == other.buffer && rect.overlaps(other.rect); }
    };
    struct Part {
        Rect rect;
        Content content;
    };
    struct Expected {
        std::int32_t buffer;
        Rect rect;
        Content content;
    };
    // Rows and columns of op(A) or op(B).
    struct Extents {
        Interval rows, cols;
    };

    void take_operands(const TaskTables &tables, const TaskRecord &task) {
        operands_.clear();
        for (const OperandRecord &operand : part_of(tables.operands, task.first_operand, task.num_operands)) {
            const RegionRecord &region = part_of(tables.regions, operand.region, 1)[0];
            const Buffer &buffer = part_of(std::span<const Buffer>(buffers_), region.buffer, 1)[0];
            const Rect rect{region.row, region.col, region.row + region.rows, region.col + region.cols};
            if (!contains(buffer.all, rect)) throw std::invalid_argument("a region leaves its buffer");
            operands_.push_back({region.buffer, rect, operand.factor, operand.op, operand.diagonal});
        }
    }

    void check_issuer(const TaskRecord &task) const {
        demand(!operands_.empty(), "it writes nothing");
        demand(operands_[0].factor == one &&
                   (operands_[0].op == not_transposed || (task.kind == combine_task && operands_[0].op >= op_lower) ||
                    (task.kind == gemm_task && is_epilogue(operands_[0].op))),
               "the written operand has a factor or is transposed");
        const std::string rank = "rank " + std::to_string(task.rank);
        const bool over_net = task.kind == send_task || task.kind == receive_task;
        demand(over_net == (lanes_[task.lane].kind == net_lane),
               "SEND and RECV are on lanes of the net, and nothing else");
        for (const Operand &operand : operands_)
            if (const Buffer &buffer = buffers_[operand.buffer]; buffer.node != node_of_rank_.at(task.rank))
                throw RuleBroken(rank + " cannot reach " + buffer_text(operand.buffer) + ", which is on another node");
        if (over_net) {
            demand(operands_.size() == 1, "half a copy between nodes has one operand");
            const Buffer &buffer = buffers_[operands_[0].buffer];
            demand(buffer.owner < 0 || buffer.owner == task.rank, "half a copy between nodes is its memory's owner's");
            return;
        }
        const auto lies_in_host = [this](const Operand &operand) { return buffers_[operand.buffer].in_host; };
        const bool within_host = task.kind == copy_task && std::ranges::all_of(operands_, lies_in_host);
        demand(within_host || lanes_[task.lane].kind != host_lane,
               "a lane of the host makes copies within host memory, and no other tasks");
        demand(!within_host || lanes_[task.lane].kind == host_lane,
               "a copy within host memory keeps the thread that issues it: it belongs on a lane of the host");
        const bool transposes = task.kind == copy_task && operands_.back().op != not_transposed;
        for (const Operand &operand : operands_) {
            const Buffer &buffer = buffers_[operand.buffer];
            if ((task.kind != copy_task || (transposes && !within_host)) &&
                (buffer.in_host || buffer.owner != task.rank))
                throw RuleBroken(rank + " cannot compute on " + buffer_text(operand.buffer) + ": operands of " +
                                 (transposes ? "a COPY that transposes" : "GEMM and COMBINE") +
                                 " lie in the issuing rank's device memory" +
                                 (transposes ? ", or in host memory" : ""));
            if (buffer.in_host && buffer.owner >= 0 && buffer.owner != task.rank)
                throw RuleBroken(rank + " cannot reach " + buffer_text(operand.buffer) + ": rank " +
                                 std::to_string(buffer.owner) + " has to issue this copy");
        }
    }

    // Whatever crosses nodes besides is a message of its own, which no executor sends.
    void check_awaits(const TaskTables &tables, const TaskRecord &task) const {
        for (const std::int32_t awaited : part_of(tables.awaits, task.first_await, task.num_awaits))
            if (const TaskRecord &other = tables.tasks[awaited];
                node_of_rank_.at(other.rank) != node_of_rank_.at(task.rank) &&
                (task.kind != receive_task || awaited != clocks_.now().task - 1))
                throw RuleBroken("it awaits " + task_text(awaited) + ", which is on another node");
    }

    void copy() {
        demand(operands_.size() == 2 && operands_[1].factor == one && operands_[1].op <= transposed,
               "a COPY reads one region as it is, or transposed");
        const Operand &to = operands_[0], &from = operands_[1];
        const bool transposes = from.op == transposed;
        const Rect source = transposes ? from.rect.transposed() : from.rect;
        demand(to.rect.rows() == source.rows() && to.rect.cols() == source.cols(),
               "a COPY reads and writes regions of different shapes");
        demand(buffers_[to.buffer].dtype == buffers_[from.buffer].dtype, "a COPY does not convert types");
        require_apart(from);
        const std::int64_t rows = source.top - to.rect.top, cols = source.left - to.rect.left;
        read(from);
        for (const auto &[rect, fragment] : tiles_) {
            const Content &content = fragment->content;
            if (content.kind == Content::Kind::nothing) refuse_unwritten(from);
            parts_.push_back({(transposes ? rect.transposed() : rect).moved(rows, cols),
                              Content(transposes ? content.transposed() : content).moved(rows, cols)});
        }
        write(to);
    }

    void send() {
        read(operands_[0]);
        sent_ = operands_[0];
        message_.clear();
        for (const auto &[rect, fragment] : tiles_) {
            if (fragment->content.kind == Content::Kind::nothing) refuse_unwritten(sent_);
            message_.push_back({rect, fragment->content});
        }
    }

    void receive() {
        const Operand &to = operands_[0];
        demand(to.rect.rows() == sent_.rect.rows() && to.rect.cols() == sent_.rect.cols() &&
                   buffers_[to.buffer].dtype == buffers_[sent_.buffer].dtype,
               "SEND and RECV have regions of different shapes or types");
        const std::int64_t rows = sent_.rect.top - to.rect.top, cols = sent_.rect.left - to.rect.left;
        for (const auto &[rect, content] : message_)
            parts_.push_back({rect.moved(rows, cols), Content(content).moved(rows, cols)});
        write(to);
    }

    void gemm() {
        if (operands_.size() != 3 && operands_.size() != 4)
            throw RuleBroken("a GEMM has 3 or 4 operands, not " + std::to_string(operands_.size()));
        const Operand &to = operands_[0];
        demand((operands_[1].factor == one || operands_[1].factor == alpha) && operands_[2].factor == one,
               "a GEMM scales op(A) by alpha or 1, and op(B) by 1");
        const Extents a = input(matrix_a, operands_[1]), b = input(matrix_b, operands_[2]);
        if (a.cols != b.rows)
            throw RuleBroken("op(A) holds k " + text_of(a.cols) + " and op(B) holds k " + text_of(b.rows));
        demand(a.rows.stop - a.rows.start == to.rect.rows() && b.cols.stop - b.cols.start == to.rect.cols(),
               "op(A) op(B) and the written region differ in shape");
        Content product{.kind = Content::Kind::partial,
                        .alpha = operands_[1].factor == alpha,
                        .row = a.rows.start - to.rect.top,
                        .col = b.cols.start - to.rect.left,
                        .summed = {a.cols}};
        const bool rounded = rounds(to);
        if (is_epilogue(to.op)) require_placed(to, product);
        if (operands_.size() == 3) {
            product.rounded = rounded;
            product.ending = to.op;
            parts_.push_back({to.rect, std::move(product)});
        } else {
            const Operand &same = operands_[3];
            demand(same == to && same.op == not_transposed,
                   "a GEMM accumulates onto the region that it writes, as stored");
            read(same);
            for (const auto &[rect, fragment] : tiles_) {
                if (fragment->content.kind == Content::Kind::nothing) refuse_unwritten(same);
                Content total = sum(scaled(fragment->content, same.factor), product);
                total.rounded = rounded;
                total.ending = to.op;
                parts_.push_back({rect, std::move(total)});
            }
        }
        write(to);
    }

    void combine() {
        const Operand &to = operands_[0];
        Memory sums(to.rect, Content::zeros());
        for (std::size_t i = 1; i < operands_.size(); ++i) {
            const Operand &term = operands_[i];
            demand(
                term.rect.rows() == to.rect.rows() && term.rect.cols() == to.rect.cols() && term.op == not_transposed,
                "a COMBINE reads regions of the shape that it writes, as stored");
            if (!(term == to)) require_apart(term);
            const std::int64_t rows = term.rect.top - to.rect.top, cols = term.rect.left - to.rect.left;
            read(term);
            if (term.factor == zero) continue;
            for (const auto &[rect, fragment] : tiles_) {
                if (fragment->content.kind == Content::Kind::nothing) refuse_unwritten(term);
                const Content value = scaled(fragment->content, term.factor).moved(rows, cols);
                sums.find(rect.moved(rows, cols), cells_);
                for (const auto &[cell, so_far] : cells_)
                    so_far->content = sum(std::move(so_far->content), value);
            }
        }
        const bool rounded = rounds(to);
        if (is_triangle(to.op)) require_c_beyond(to);
        sums.find(to.rect, cells_);
        for (const auto &[cell, total] : cells_) {
            total->content.rounded = rounded && (!total->content.summed.empty() || total->content.c_in == CIn::scaled);
            if (is_epilogue(to.op)) require_placed(to, total->content);
            total->content.ending = to.op;
            parts_.push_back({cell, std::move(total->content)});
        }
        write(to);
    }

    // What a triangle leaves as it was is C_in, and the diagonal is where it is in C.
    void require_c_beyond(const Operand &to) {
        read(to);
        for (const auto &[rect, fragment] : tiles_) {
            const Content &there = fragment->content;
            demand(there.c_in == CIn::raw && there.summed.empty() && !there.turned,
                   "beyond a triangle there is something else than C_in");
            demand(to.rect.top + there.row - to.rect.left - there.col + problem_.diagonal == to.diagonal,
                   "the diagonal of a triangle is not that of C");
        }
    }

    // Elements of an epilogue's vectors go to the rows, or columns, of C that they are for.
    void require_placed(const Operand &to, const Content &sum) const {
        demand(!sum.is_zero() && !sum.turned, "an epilogue is of a sum for a place in C, stored as C is");
        const std::int64_t row = to.rect.top + sum.row, col = to.rect.left + sum.col;
        demand(place_of(to.op, row, col, 0) == to.diagonal, "an epilogue begins with another element of its vectors");
    }

    // Pieces have the problem's type wherever they are: they come from the caller by copies, which keep it.
    Extents input(std::uint8_t matrix, const Operand &operand) {
        const std::string name = std::string("op(") + "AB"[matrix] + ")";
        require_apart(operand);
        read(operand);
        if (tiles_.empty()) throw RuleBroken(name + " is empty");
        const Content &content = tiles_[0].fragment->content;
        for (const auto &[rect, fragment] : tiles_)
            if (fragment->content.kind == Content::Kind::nothing) refuse_unwritten(operand);
        if (content.kind != Content::Kind::piece || content.matrix != matrix)
            throw RuleBroken(name + " reads " + text_of(content) + " in " + text_of_place(operand));
        for (const auto &[rect, fragment] : tiles_)
            if (fragment->content != content)
                throw RuleBroken(name + " reads pieces that do not belong side by side in " + text_of_place(operand));
        const std::uint8_t op = matrix == matrix_a ? problem_.op_a : problem_.op_b;
        // Of what is stored transposed, op(X) is op T of X or the other way round; nothing conjugates without
        // transposing.
        const bool right = content.turned ? operand.op + op == op_t : operand.op == op;
        if (!right)
            throw RuleBroken(name + " is " + name_of_op(operand.op) + ", the problem says " + name_of_op(op) +
                             (content.turned ? ", and it is stored transposed" : ""));
        const Rect rect = content.turned ? operand.rect.transposed() : operand.rect;
        const Interval rows{rect.top + content.row, rect.bottom + content.row},
            cols{rect.left + content.col, rect.right + content.col};
        return op == not_transposed ? Extents{rows, cols} : Extents{cols, rows};
    }

    // Finds what a region holds, after checking that whatever wrote it is over.
    void read(const Operand &operand) {
        ++reads_;
        if (std::vector<Input> &inputs = inputs_[operand.buffer]; !inputs.empty()) {
            tiles_.clear();
            std::int64_t elements = 0;
            // Of those in the order in which they begin, some in a row may meet it.
            const auto first = std::ranges::upper_bound(inputs, operand.rect.left, {}, &Input::furthest);
            for (Input &input : std::ranges::subrange(first, inputs.end())) {
                if (input.rect.left >= operand.rect.right) break;
                const Rect common = operand.rect.common(input.rect);
                if (common.empty()) continue;
                tiles_.push_back({common, &input.fragment});
                elements += common.rows() * common.cols();
            }
            if (!operand.rect.empty() && elements != operand.rect.rows() * operand.rect.cols())
                refuse_unwritten(operand);
            keep(operand, tiles_, content_of_tile);
            return;
        }
        memories_[operand.buffer].find(operand.rect, tiles_);
        const Event now = clocks_.now();
        for (const auto &[rect, fragment] : tiles_) {
            if (!clocks_.over(fragment->writer))
                throw RuleBroken("it reads " + text_of_place(operand) + " without awaiting what wrote it, " +
                                 task_text(fragment->writer.task));
            std::vector<Event> &readers = fragment->readers;
            const auto known = std::ranges::find(readers, now.lane, &Event::lane);
            if (known != readers.end()) {
                known->task = now.task;
            } else {
                readers.push_back(now);
            }
        }
        keep(operand, tiles_, content_of_tile);
    }

    // Overwrites a region by `parts_`, after checking that every task that wrote or read it before is over.
    void write(const Operand &operand) {
        ++writes_;
        if (!inputs_[operand.buffer].empty()) throw RuleBroken("it writes the caller's " + text_of_place(operand));
        Memory &memory = memories_[operand.buffer];
        memory.find(operand.rect, tiles_);
        for (const auto &[rect, fragment] : tiles_) {
            if (!clocks_.over(fragment->writer))
                throw RuleBroken("it overwrites " + text_of_place(operand) +
                                 " without awaiting the task that wrote it, " + task_text(fragment->writer.task));
            for (const Event &reader : fragment->readers)
                if (!clocks_.over(reader))
                    throw RuleBroken("it overwrites " + text_of_place(operand) +
                                     " without awaiting a task that reads it, " + task_text(reader.task));
        }
        const auto differs = [this](const Part &part) { return part.content != parts_[0].content; };
        if (!tiles_.empty() && std::ranges::none_of(parts_, differs)) {
            parts_.resize(1);
            parts_[0].rect = operand.rect;
        }
        keep(operand, parts_, [](const Part &part) -> const Content & { return part.content; });
        if (tiles_.size() == 1 && parts_.size() == 1) {
            Fragment &fragment = *tiles_[0].fragment;
            fragment.content = std::move(parts_[0].content);
            fragment.writer = clocks_.now();
            fragment.readers.clear();
        } else {
            for (Part &part : parts_) {
                memory.find(part.rect, tiles_);
                memory.overwrite(part.rect, std::move(part.content), clocks_.now());
            }
        }
        parts_.clear();
    }

    // What a content says of its place in a matrix; nothing where it says none, as zeros that are not the caller's C.
    const Content *placed(const Operand &operand, const Rect &rect, const Content &content) const {
        if (content.kind == Content::Kind::nothing) return nullptr;
        if (!content.is_zero()) return &content;
        const auto here = std::ranges::find_if(expected_, [&](const Expected &expected) {
            return expected.buffer == operand.buffer && contains(expected.rect, rect);
        });
        return here == expected_.end() ? nullptr : &here->content;
    }

    // Keeps what some rectangles hold that together are an operand: one where they lie in the matrix as they do here.
    template <typename Parts, typename ContentOf>
    void keep(const Operand &operand, const Parts &parts, ContentOf content_of) {
        if (!keeps_held_) return;
        const auto first = static_cast<std::ptrdiff_t>(held_.size());
        const Content *before = nullptr;
        bool same = true;
        const auto add = [&](const Rect &rect, const Content &at) {
            const Rect of = (at.turned ? rect.transposed() : rect).moved(-at.row, -at.col);
            const std::int64_t matrix = at.kind == Content::Kind::piece ? at.matrix : matrix_c;
            held_.push_back({clocks_.now().task, static_cast<std::int32_t>(&operand - operands_.data()), matrix, of.top,
                             of.left, of.rows(), of.cols()});
        };
        for (const auto &part : parts) {
            const Content *at = part.rect.empty() ? nullptr : placed(operand, part.rect, content_of(part));
            same &=
                at && (!before || (at->kind == before->kind && at->matrix == before->matrix &&
                                   at->turned == before->turned && at->row == before->row && at->col == before->col));
            if (at) add(part.rect, *at), before = at;
        }
        if (same && before && parts.size() > 1)
            held_.erase(held_.begin() + first, held_.end()), add(operand.rect, *before);
    }

    // Whether writing a sum to a region rounds it to the type of C; types other than that and the sums' are refused.
    bool rounds(const Operand &operand) const {
        const std::uint8_t dtype = buffers_[operand.buffer].dtype;
        const ElementType &multiplied = element_types.at(problem_.dtypes[matrix_a]), &found = element_types.at(dtype);
        if (dtype != problem_.dtypes[matrix_c] && dtype != multiplied.accumulator)
            throw RuleBroken(std::string("a sum of ") + multiplied.name + " products is kept as " + found.name +
                             " in " + text_of_place(operand));
        return dtype != multiplied.accumulator;
    }

    void require_apart(const Operand &source) const {
        demand(!operands_[0].overlaps(source), "the written region overlaps one that the same task reads");
    }

    std::string text_of_place(const Operand &operand) const {
        return buffer_text(operand.buffer) + " " + text_of(operand.rect);
    }

    [[noreturn]] void refuse_unwritten(const Operand &operand) const {
        throw RuleBroken(
            "it reads " + text_of_place(operand) +
            ", which holds nothing that may be read (never written, C with beta 0, or A and B of a problem "
            "without product)");
    }

    FollowedProblem problem_;
    struct Buffer {
        std::int32_t owner;  // rank; negative for memory that all ranks of its node reach
        std::int32_t node;
        bool in_host;
        std::uint8_t dtype;
        Rect all;
    };
    std::vector<Buffer> buffers_;
    // What the caller's A and B hold, of which no history is kept.
    struct Input {
        Rect rect;
        std::int64_t furthest;  // where the columns end of those that begin no later
        Fragment fragment;
    };
    std::vector<std::vector<Input>> inputs_;  // of each buffer, by where they begin
    std::vector<Memory> memories_;
    std::vector<Expected> expected_;
    LaneClocks clocks_;
    std::vector<LaneRecord> lanes_;
    std::vector<std::int32_t> node_of_rank_;
    std::int64_t reads_ = 0, writes_ = 0;
    bool keeps_held_ = false;
    std::vector<HeldRecord> held_;

    // Of the present task.
    std::vector<Operand> operands_;
    std::vector<Memory::Tile> tiles_, cells_;
    std::vector<Part> parts_;  // to be written
    // On its way from a node to another, from where it was: what the task before the present one sends.
    std::vector<Part> message_;
    Operand sent_{};
};

// All tasks, once. ValueError if a table points outside of another.
void follow(Follower &follower, const HeldTables &tables) {
    const ScheduleTables view = tables.view();
    nb::gil_scoped_release unlocked;
    follower.follow(view);
}

}  // namespace

void bind_follower(nb::module_ &m) {
    // In its text <task 3> and <buffer 3> stand for their descriptions.
    nb::exception<RuleBroken>(m, "RuleBroken");
    // It keeps about 250 bytes for each rectangle of memory with a writer or content of its own, and 12 for every task.
    // Each lane has a clock of 4 bytes per lane, and so has each task that a later one still awaits.
    nb::class_<Follower>(m, "Follower",
                         "What memory holds while tasks run, derived from them alone, and whether each task is ordered "
                         "after what it needs.")
        .def("__init__",
             [](Follower *self, const HeldTables &tables, std::uint8_t op_a, std::uint8_t op_b,
                const std::array<std::uint8_t, 3> &dtypes,
                std::int64_t diagonal) { new (self) Follower({op_a, op_b, dtypes, diagonal}, tables.view()); })
        .def("give", &Follower::give)
        .def("expect", &Follower::expect)
        // From then on what every operand holds is kept, of written ones after their tasks. The global order is trusted
        // then. HELD_DTYPE of planning/verify.py has what was kept since it was last taken.
        .def("keep_held", &Follower::keep_held)
        .def("take_held", [](Follower &self) { return as_bytes(self.take_held()); })
        .def("follow", &follow)
        // All that was expected is there, and all of the caller's C was spoken of.
        .def("finish", &Follower::finish, nb::call_guard<nb::gil_scoped_release>())
        // Operands so far.
        .def_prop_ro("reads", &Follower::reads)
        .def_prop_ro("writes", &Follower::writes);
}

}  // namespace uncut
