// Copies of the caller's matrices for those who cannot use them where they are: planning/staging.py.
//
// A schedule goes by task by task. What a task uses of a matrix that has a stand-in is copied there before it, and
// copied back when others need its place, or at the end. The copies are tasks like any others.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "crossing.hpp"
#include "last_tasks.hpp"
#include "locations.hpp"
#include "table_bytes.hpp"
#include "tables.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

Region from_record(const RegionRecord &r) { return {r.buffer, r.row, r.col, r.rows, r.cols}; }

bool overlap(const Region &one, const Region &other) {
    return Extent{one.row, one.row + one.rows}.meets({other.row, other.row + other.rows}) &&
           Extent{one.col, one.col + one.cols}.meets({other.col, other.col + other.cols});
}

// A buffer of the caller's, and the one of ours that others use in its place.
struct StandIn {
    std::int32_t user = 0, ours = 0;
    std::int64_t columns = 0;  // a ring of so many, which have one region after the other; 0: all have their places
    LaneRecord in, out;        // of the copies
};

class Staging {
  public:
    // Of parts that are stored the other way round, by buffer, the schedule has the regions as if they were not.
    Staging(const ScheduleTables &from, std::span<const std::uint8_t> turned, bool reads_c)
        : from_(from),
          turned_(turned.begin(), turned.end()),
          used_by_others_(from.buffers.size(), 0),
          reads_c_(reads_c),
          rows_(from.buffers.size(), 1),
          cols_(from.buffers.size(), 1),
          width_(from.buffers.size(), std::numeric_limits<std::int64_t>::max()),
          of_buffer_(from.buffers.size(), -1) {
        for (const TaskRecord &task : from_.tasks)
            for (const OperandRecord &operand : operands_of(task)) {
                const RegionRecord &region = region_of(operand);
                const auto at = static_cast<std::size_t>(region.buffer);
                used_by_others_[at] |= !in_place(task, region.buffer);
                rows_[at] = std::max(rows_[at], region.rows);
                cols_[at] = std::max(cols_[at], region.cols);
            }
    }

    // Of each buffer whether anybody cannot use it where it is. In place are the owner's device, or in host memory the
    // owner's worker within its node; and nobody where it is stored the other way round.
    const std::vector<std::uint8_t> &used_by_others() const { return used_by_others_; }
    // Of each buffer the most rows and columns of a region.
    const std::vector<std::int64_t> &rows() const { return rows_; }
    const std::vector<std::int64_t> &cols() const { return cols_; }

    // Has copies from and to buffers made in pieces, along their columns, of so many elements at most (0: as they are).
    // Returns how many tasks there are then.
    std::int64_t divide(std::span<const std::int64_t> most_elements) {
        for (std::size_t at = 0; at < most_elements.size(); ++at)
            if (most_elements[at] > 0) {
                width_[at] = std::max<std::int64_t>(1, most_elements[at] / rows_[at]);
                cols_[at] = std::min(cols_[at], width_[at]);
            }
        std::int64_t total = 0;
        for (const TaskRecord &task : from_.tasks)
            total += pieces_of(task);
        return total;
    }

    // Once.
    void run(int num_ranks, std::span<const StandIn> stand_ins, Tables &out) {
        TableWriter writer(&out, num_ranks, std::numeric_limits<std::int32_t>::max());
        out_ = &writer;
        for (const LaneRecord &lane : from_.lanes)
            writer.lane(lane.rank, static_cast<LaneKind>(lane.kind), lane.source, lane.destination);
        for (const StandIn &one : stand_ins) {
            of_buffer_[static_cast<std::size_t>(one.user)] = static_cast<std::int32_t>(held_.size());
            held_.emplace_back(one);
        }
        look_through();
        number_.reserve(from_.tasks.size());
        for (const TaskRecord &task : from_.tasks) {
            const std::int64_t pieces = pieces_of(task);
            std::int32_t last = -1;
            for (std::int64_t piece = 0; piece < pieces; ++piece)
                last = emit(task, piece, pieces);
            number_.push_back(last);
        }
        // What is complete first goes first.
        std::vector<std::tuple<std::int32_t, Held *, std::int64_t>> written;
        for (Held &held : held_)
            for (const auto &[first, slot] : held.slots)
                if (!slot.writers.tasks().empty())
                    written.push_back({std::ranges::max(slot.writers.tasks()), &held, first});
        std::ranges::sort(written);
        for (const auto &[last, held, first] : written)
            leave(*held, first, held->slots.at(first));
    }

  private:
    using Corners = std::array<std::int64_t, 4>;  // of a region
    // A place in a stand-in, and what it has.
    struct Slot {
        Region region;
        std::int64_t width = 0;             // columns
        LastTasks users, writers;           // writers of what is not copied back yet
        std::int32_t came = -1, left = -1;  // copies
    };
    struct Held : StandIn {
        explicit Held(const StandIn &one) : StandIn(one) {}
        bool as_one = false;                 // whether all of the matrix has one slot
        bool is_read = false;                // and whether it has to come then
        std::map<std::int64_t, Slot> slots;  // by their first columns; without a ring as they came
        std::map<Corners, std::int64_t> there;
        std::int64_t head = 0;  // of a ring
        bool is_written = false;
        // By where their columns begin, in steps of the ring's columns: no region has more.
        std::unordered_map<std::int64_t, std::vector<std::pair<Region, std::int32_t>>> left;
    };
    using Awaits = std::vector<std::int32_t>;

    // When regions are used by others (true) or in place: from when on they are written, or until when they are read.
    using Uses = std::map<std::pair<Corners, bool>, std::int64_t>;

    // Those further left are less.
    static Corners corners(const Region &region) { return {region.col, region.row, region.cols, region.rows}; }
    const RegionRecord &region_of(const OperandRecord &operand) const {
        return from_.regions[static_cast<std::size_t>(operand.region)];
    }
    std::span<const OperandRecord> operands_of(const TaskRecord &task) const {
        return from_.operands.subspan(static_cast<std::size_t>(task.first_operand), task.num_operands);
    }

    bool in_place(const TaskRecord &task, std::int32_t buffer) const {
        if (turned_[static_cast<std::size_t>(buffer)]) return false;
        const int location = from_.buffers[static_cast<std::size_t>(buffer)].location;
        const int owner = from_.locations->rank(location);
        const bool by_worker = from_.lanes[static_cast<std::size_t>(task.lane)].kind == host_lane;
        if (owner == nobody) return true;
        if (owner != task.rank || by_worker != from_.locations->in_host(location)) return false;
        // No message takes memory that a worker alone can read.
        return !by_worker || std::ranges::all_of(operands_of(task), [&](const OperandRecord &operand) {
            const auto end = static_cast<std::size_t>(region_of(operand).buffer);
            return from_.locations->node(from_.buffers[end].location) == from_.locations->node(location);
        });
    }

    std::int64_t pieces_of(const TaskRecord &task) const {
        const std::span<const OperandRecord> operands = operands_of(task);
        if (task.kind != copy_task) return 1;
        std::int64_t width = std::numeric_limits<std::int64_t>::max();
        for (const OperandRecord &operand : operands)
            width = std::min(width, width_[static_cast<std::size_t>(region_of(operand).buffer)]);
        const std::int64_t columns = region_of(operands[0]).cols;
        return std::max<std::int64_t>(1, columns / width + (columns % width != 0));
    }

    // Of buffers without rings: a slot has a region that others use. Where these overlap, or the owner writes in them
    // or reads what others wrote, all of the matrix has one, which the owner uses there too.
    void look_through() {
        std::vector<Uses> uses(held_.size());
        const auto never = static_cast<std::int64_t>(from_.tasks.size());
        for (std::int64_t number = 0; number < never; ++number) {
            const TaskRecord &task = from_.tasks[static_cast<std::size_t>(number)];
            for (bool writes = true; const OperandRecord &operand : operands_of(task)) {
                const bool written = std::exchange(writes, false);
                const RegionRecord &region = region_of(operand);
                const std::int32_t at = of_buffer_[static_cast<std::size_t>(region.buffer)];
                if (at < 0 || held_[static_cast<std::size_t>(at)].columns > 0) continue;
                const auto which = static_cast<std::size_t>(at);
                const bool of_c = from_.buffers[static_cast<std::size_t>(region.buffer)].matrix == matrix_c;
                held_[which].is_read |= !written && (reads_c_ || !of_c);
                const bool theirs = !in_place(task, region.buffer);
                std::int64_t &when =
                    uses[which].try_emplace({corners(from_record(region)), theirs}, theirs ? never : -1).first->second;
                when = theirs ? std::min(when, written ? number : never) : std::max(when, written ? never + 1 : number);
            }
        }
        for (std::size_t at = 0; at < held_.size(); ++at)
            held_[at].as_one = !are_apart(uses[at]);
    }

    static bool are_apart(const Uses &uses) {
        for (auto one = uses.begin(); one != uses.end(); ++one) {
            const auto &[region, is_theirs] = one->first;
            for (auto other = std::next(one); other != uses.end(); ++other) {
                const auto &[right, also_theirs] = other->first;
                if (right[0] >= region[0] + region[2]) break;
                if (right[1] >= region[1] + region[3] || region[1] >= right[1] + right[3]) continue;
                if (is_theirs && also_theirs) return false;
                if (is_theirs != also_theirs && (is_theirs ? other : one)->second >= (is_theirs ? one : other)->second)
                    return false;
            }
        }
        return true;
    }

    // What a task reads is there before there is room for what it writes.
    std::int32_t emit(const TaskRecord &task, std::int64_t piece, std::int64_t pieces) {
        const std::span<const OperandRecord> operands = operands_of(task);
        std::vector<OperandRecord> made(operands.begin(), operands.end());
        awaits_.clear();
        used_.clear();
        if (piece == 0)
            for (std::int32_t at = 0; at < task.num_awaits; ++at)
                awaits_.push_back(number_[static_cast<std::size_t>(from_.awaits[task.first_await + at])]);
        for (std::size_t turn = 1; turn <= operands.size(); ++turn) {
            const std::size_t at = turn % operands.size();
            Region region = from_record(region_of(operands[at]));
            if (pieces > 1) region = region.columns(part_of(region.cols, pieces, piece));
            const std::int32_t number = of_buffer_[static_cast<std::size_t>(region.buffer)];
            if (number >= 0) {
                Held &held = held_[static_cast<std::size_t>(number)];
                if (held.columns > 0 || held.as_one || !in_place(task, region.buffer))
                    region = use(held, region, at == 0);
            }
            made[at].region = out_->region(region);
        }
        const std::int32_t number = out_->task(static_cast<Kind>(task.kind), task.lane, task.group, made, awaits_);
        for (const auto &[slot, writes] : used_) {
            slot->users.add(task.lane, number);
            if (writes) slot->writers.add(task.lane, number);
        }
        return number;
    }

    Region use(Held &held, const Region &region, bool writes) {
        const BufferRecord &whole = from_.buffers[static_cast<std::size_t>(held.user)];
        const Region wanted = held.as_one ? Region{held.user, 0, 0, whole.rows, whole.cols} : region;
        const auto known = held.there.find(corners(wanted));
        const bool comes = held.as_one ? held.is_read : !writes;
        Slot &slot = known != held.there.end() ? held.slots.at(known->second) : begin(held, wanted, comes);
        if (slot.came >= 0) awaits_.push_back(slot.came);
        if (writes) {
            held.is_written = true;
            forget_others(held, wanted);
        }
        used_.push_back({&slot, writes});
        return placed(held, held.there.at(corners(wanted)), region);
    }

    Slot &begin(Held &held, const Region &region, bool comes) {
        Awaits before;
        const std::int64_t first =
            held.columns > 0 ? take(held, region.cols, before) : static_cast<std::int64_t>(held.slots.size());
        if (comes && held.columns > 0) {
            forget_others(held, region);
            const std::int64_t last = (region.col + region.cols - 1) / held.columns;
            for (std::int64_t at = region.col / held.columns - 1; at <= last; ++at) {
                const auto near = held.left.find(at);
                if (near == held.left.end()) continue;
                const auto over = std::find_if(near->second.rbegin(), near->second.rend(),
                                               [&](const auto &one) { return overlap(one.first, region); });
                if (over != near->second.rend()) before.push_back(over->second);  // those before it are on one lane
            }
        }
        Slot &slot = held.slots[first];
        slot.region = region, slot.width = region.cols;
        held.there[corners(region)] = first;
        if (comes) {
            slot.came = copy(held, first, slot, true, before);
        } else {
            awaits_.insert(awaits_.end(), before.begin(), before.end());
        }
        return slot;
    }

    // The next columns of a ring, and what is to be over before they are written.
    std::int64_t take(Held &held, std::int64_t width, Awaits &before) {
        const std::int64_t first = held.head + width <= held.columns ? held.head : 0, last = first + width;
        held.head = last;
        auto at = held.slots.upper_bound(first);
        if (at != held.slots.begin() && std::prev(at)->first + std::prev(at)->second.width > first) --at;
        std::vector<std::pair<std::int64_t, Slot>> rests;  // of slots: whoever writes there has to await the same
        while (at != held.slots.end() && at->first < last) {
            const std::int64_t begins = at->first, ends = begins + at->second.width;
            leave(held, begins, at->second);
            const auto there = held.there.find(corners(at->second.region));
            if (there != held.there.end() && there->second == begins) held.there.erase(there);
            Slot old = std::move(at->second);
            at = held.slots.erase(at);
            if (old.left >= 0) before.push_back(old.left);
            before.insert(before.end(), old.users.tasks().begin(), old.users.tasks().end());
            old.came = -1;
            for (const Extent &rest : {Extent{begins, first}, Extent{last, ends}})
                if (rest.size() > 0) {
                    old.width = rest.size();
                    rests.push_back({rest.first, old});
                }
        }
        held.slots.insert(rests.begin(), rests.end());
        return first;
    }

    // Copies back what was written in a slot.
    void leave(Held &held, std::int64_t first, Slot &slot) {
        if (slot.writers.tasks().empty()) return;
        slot.left = copy(held, first, slot, false, std::exchange(slot.writers, {}).tasks());
        if (held.columns > 0) held.left[slot.region.col / held.columns].push_back({slot.region, slot.left});
    }

    // Other regions of a ring that overlap one, where any is written, come again when they are used.
    void forget_others(Held &held, const Region &region) {
        if (!held.is_written || held.columns == 0) return;
        for (auto at = held.there.begin(); at != held.there.end();) {
            Slot &slot = held.slots.at(at->second);
            const bool stays = at->first == corners(region) || !overlap(slot.region, region);
            if (!stays) leave(held, at->second, slot);
            at = stays ? std::next(at) : held.there.erase(at);
        }
    }

    std::int32_t copy(const Held &held, std::int64_t first, const Slot &slot, bool in, const Awaits &awaits) {
        const bool turns = turned_[static_cast<std::size_t>(held.user)] != 0;
        const Region &r = slot.region;
        const Region theirs = turns ? Region{held.user, r.col, r.row, r.cols, r.rows} : r,
                     ours = placed(held, first, r);
        const LaneRecord &lane = in ? held.in : held.out;
        const std::array<Operand, 2> operands{
            {{in ? ours : theirs}, {in ? theirs : ours, one, static_cast<std::uint8_t>(turns ? op_t : op_n)}}};
        const std::int32_t on = out_->lane(lane.rank, static_cast<LaneKind>(lane.kind), lane.source, lane.destination);
        return out_->task(copy_task, on, operands, awaits);
    }

    static Region placed(const Held &held, std::int64_t first, const Region &region) {
        if (held.columns > 0) return {held.ours, 0, first, region.rows, region.cols};
        return {held.ours, region.row, region.col, region.rows, region.cols};
    }

    ScheduleTables from_;
    std::vector<std::uint8_t> turned_, used_by_others_;
    bool reads_c_;
    std::vector<std::int64_t> rows_, cols_, width_;  // of a piece, the most columns
    std::vector<Held> held_;
    std::vector<std::int32_t> of_buffer_;  // its number there, or -1
    TableWriter *out_ = nullptr;
    std::vector<std::int32_t> number_;  // of each task of the schedule, of its last piece
    Awaits awaits_;
    std::vector<std::pair<Slot *, bool>> used_;  // by the task at hand, and whether it writes there
};

using Lane = std::array<std::int32_t, 4>;
using Given = std::tuple<std::int32_t, std::int32_t, std::int64_t, Lane, Lane>;

LaneRecord lane_of(const Lane &one) { return {one[0], one[1], one[2], one[3]}; }

// Once. A stand-in is (the caller's buffer, the one in its place, columns of a ring or 0, lane in, lane out), a lane
// (rank, kind, source, destination).
auto run(Staging &staging, int num_ranks, const std::vector<Given> &given) {
    std::vector<StandIn> stand_ins;
    for (const auto &[user, ours, columns, in, out] : given)
        stand_ins.push_back({user, ours, columns, lane_of(in), lane_of(out)});
    Tables made;
    {
        nb::gil_scoped_release unlocked;
        staging.run(num_ranks, stand_ins, made);
    }
    return arrays_of(std::move(made));
}

// What is left of copies between nodes; nothing where there are none.
nb::object cross(const HeldTables &tables, int num_ranks) {
    Tables made;
    {
        nb::gil_scoped_release unlocked;
        Crossing crossing(tables.view(), num_ranks);
        if (crossing.any()) crossing.run(made);
    }
    return made.tasks.empty() ? nb::none() : nb::cast(arrays_of(std::move(made)));
}

}  // namespace

void bind_staging(nb::module_ &m) {
    m.def("cross", &cross, nb::arg("tables"), nb::arg("num_ranks"),
          "Make pairs, SEND and RECV, of copies between nodes.");
    // `turned`: of each buffer whether it is stored the other way round than the schedule has it.
    nb::class_<Staging>(
        m, "Staging", "A schedule in which some of the caller's buffers get stand-ins, which all but some owners use.")
        .def(
            "__init__",
            [](Staging *self, const HeldTables &tables, nb::handle turned, bool reads_c) {
                new (self) Staging(tables.view(), ArrayBytes(turned).records<std::uint8_t>(), reads_c);
            },
            nb::keep_alive<1, 2>())
        // Of each buffer whether anybody cannot use it where it is, and the most rows and columns that a task uses.
        .def_prop_ro("used_by_others", &Staging::used_by_others)
        .def_prop_ro("rows", &Staging::rows)
        .def_prop_ro("cols", &Staging::cols)
        // Copies from and to buffers are made in pieces of so many elements at most (0: as they are); gives the tasks.
        .def("divide", [](Staging &self, const std::vector<std::int64_t> &most) { return self.divide(most); })
        .def("run", &run);
}

}  // namespace uncut
