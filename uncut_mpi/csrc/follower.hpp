// Follows the tasks of a schedule and derives what every rectangle of memory holds: the core of planning/verify.py.
//
// It starts from what the caller's matrices hold. Every read must be of what it should be and come after whatever wrote
// it; every write must come after whatever wrote or read there before.
#pragma once

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

namespace uncut {

// What the rules need to know of the problem.
struct FollowedProblem {
    std::uint8_t op_a = 0, op_b = 0;
    std::array<std::uint8_t, 3> dtypes{};  // of A, B and C
};

// What an operand's region holds, or a part of it: a rectangle of a matrix, as that is stored.
struct HeldRecord {
    std::int32_t task = 0, operand = 0;  // the operand's number in its task; 0 is written
    std::int64_t matrix = 0, row = 0, col = 0, rows = 0, cols = 0;
};

class Follower {
  public:
    Follower(const FollowedProblem &problem, const ScheduleTables &tables);

    // Says what a rectangle of the caller's A or B holds, which is only read, or not even that.
    void give(std::int32_t buffer, const Rect &rect, const Content &content);
    // Says what a rectangle of the caller's C must hold at the end; it holds C_in of the same elements at first, if
    // that takes part.
    void expect(std::int32_t buffer, const Rect &rect, const Content &content);
    // Keeps from now on what every operand holds, written ones after their tasks; zeros only where they are the
    // caller's C. Whether tasks are ordered by what they await is not looked at then.
    void keep_held() {
        keeps_held_ = true;
        clocks_.trust();
    }
    std::vector<HeldRecord> take_held() { return std::exchange(held_, {}); }
    // All tasks, once.
    void follow(const TaskTables &tables);
    // Checks what was expected.
    void finish();

    std::int64_t reads() const { return reads_; }
    std::int64_t writes() const { return writes_; }

  private:
    // An operand of the present task.
    struct Operand {
        std::int32_t buffer;
        Rect rect;
        std::uint8_t factor, op;
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

    void take_operands(const TaskTables &tables, const TaskRecord &task);
    void check_issuer(const TaskRecord &task) const;
    void check_awaits(const TaskTables &tables, const TaskRecord &task) const;
    void copy();
    void send();
    void receive();
    void gemm();
    void combine();
    Extents input(std::uint8_t matrix, const Operand &operand);
    void read(const Operand &operand);
    void write(const Operand &operand);
    const Content *placed(const Operand &operand, const Rect &rect, const Content &content) const;
    template <typename Parts, typename ContentOf>
    void keep(const Operand &operand, const Parts &parts, ContentOf content_of);
    bool rounds(const Operand &operand) const;
    void require_apart(const Operand &source) const;
    std::string text_of_place(const Operand &operand) const;
    [[noreturn]] void refuse_unwritten(const Operand &operand) const;

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

}  // namespace uncut
