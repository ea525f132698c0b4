#include "simulator.hpp"

#include "shared_rates.hpp"
#include "timetable.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <queue>
#include <stdexcept>
#include <string>

namespace uncut {
namespace {

constexpr std::uint8_t in_host = 1;
constexpr std::array<std::int64_t, 5> element_bytes = {8, 4, 2, 2, 4};
constexpr std::array<std::int64_t, 5> accumulator_bytes = {8, 4, 4, 4, 4};
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t even_extent = 256;     // GemmShape.uneven of model/costs.py
constexpr std::int64_t alignment_bytes = 16;  // GemmShape.misaligned
constexpr std::size_t most_lanes_squared = std::size_t{1} << 22;

// A copy that moves bytes. Its rate was set at `since`.
struct Flow {
    std::int32_t task = -1;
    std::int32_t of = 0;  // class of shared rates
    double left = 0, since = 0, rate = 0;
};

// A device's kernels, first come, first served: a later one gets what the earlier ones leave free.
struct Device {
    struct Kernel {
        std::int32_t task;
        double left;    // seconds alone
        double demand;  // part of the device that it can keep busy
        double rate;
        double finish;
    };
    std::vector<Kernel> kernels;
    double now = 0;
    bool changed = false;
};

// What moves a device's copies one way: to other devices, from the host or to it. It serves the lanes in turn, and
// what follows a copy on its lane, the news of its end included, has to wait for the lane's next turn.
struct Engine {
    struct Turn {
        std::int32_t task;
        bool over;  // its copy has been made
    };
    std::vector<Turn> waiting;  // those from `next` on
    std::size_t next = 0;
    bool busy = false;
};
constexpr std::int32_t ways = 3;

struct Body {
    double amount = 0;   // copy: bytes; kernel: seconds alone
    double latency = 0;  // before a copy moves its first byte
    double demand = 1;
    std::int32_t of = -1;      // copy: class of shared rates
    std::int32_t engine = -1;  // copy: that serves it, if copies are served one after another
};

struct Event {
    double time;
    std::int32_t task;
    bool moves = false;  // a copy whose latency has passed
    bool operator>(const Event &other) const { return time != other.time ? time > other.time : task > other.task; }
};

// What a copy of rows so many bytes wide gets of the bandwidth: RowRates of model/costs.py.
double row_share(const std::vector<std::pair<double, double>> &table, double width) {
    if (table.empty()) return 1;
    if (width <= table.front().first) return table.front().second * width / table.front().first;
    for (std::size_t i = 1; i < table.size(); ++i) {
        const auto &[below, low] = table[i - 1];
        const auto &[above, high] = table[i];
        if (width <= above) return low + (high - low) * std::log(width / below) / std::log(above / below);
    }
    return table.back().second;
}

// How much of host memory a device learns the pages of at once: what lies in several such lines is several rows.
constexpr std::int64_t page_line = 65536;

// What a row that begins so many bytes behind the start of a line takes, as a multiple of what its bytes take alone.
double row_cost(const std::vector<std::pair<double, double>> &table, std::int64_t width, std::int64_t offset) {
    const std::int64_t head = std::min(width, (page_line - offset) % page_line);
    const std::int64_t whole = (width - head) / page_line * page_line;
    double cost = 0;
    for (const std::int64_t part : {head, whole, width - head - whole})
        if (part > 0) cost += static_cast<double>(part) / row_share(table, static_cast<double>(part));
    return cost / static_cast<double>(width);
}

// The tables are of rows far apart, which begin at a line each. Rows twice their width apart cost nothing, and between
// the two what they cost grows with the distance. Where rows far apart do not all begin at the same place of a line,
// the mean over all places counts (docs/performance.md, 2026-11-21 and 2026-11-25).
double host_row_share(const std::vector<std::pair<double, double>> &table, std::int64_t width, std::int64_t distance,
                      std::int64_t offset) {
    if (table.empty()) return 1;
    const std::int64_t near = 2 * width;
    if (distance < page_line) {
        const double share = row_share(table, static_cast<double>(width));
        if (near >= page_line) return share;
        const auto beyond = static_cast<double>(distance - near), most = static_cast<double>(page_line - near);
        return 1 - (1 - share) * std::max(0.0, beyond / most);
    }
    if (distance % page_line == 0) return 1 / row_cost(table, width, offset % page_line);
    constexpr std::int64_t places = 8;
    double cost = 0;
    for (std::int64_t at = 0; at < places; ++at)
        cost += row_cost(table, width, at * page_line / places);
    return places / cost;
}

class Simulator {
  public:
    Simulator(const SimulatedTables &tables, const SimulatedMachine &machine)
        : t_(tables), m_(machine), rates_(machine), locations_(machine.num_ranks + 1), host_(machine.num_ranks) {
        make_bodies();
        link_tasks();
    }

    Simulated run() {
        const std::size_t count = t_.tasks.size();
        result_.start.assign(count, 0);
        result_.end.assign(count, 0);
        issue();
        while (finished_ < count) {
            const double start_time = starts_.empty() ? infinity : starts_.top().time;
            const double due_time = due_.empty() ? infinity : due_.first_time();
            const double now = std::min(start_time, due_time);
            if (now == infinity) throw std::invalid_argument("the schedule's tasks await each other in a circle");
            while (!due_.empty() && due_.first_time() <= now) {
                const std::size_t domain = due_.take_first();
                if (domain < devices_.size()) {
                    finish_kernels(domain, now);
                } else {
                    finish_flow(static_cast<std::int32_t>(domain - devices_.size()), now);
                }
            }
            std::sort(done_.begin(), done_.end());
            for (const std::int32_t task : done_)
                end(task, now);
            done_.clear();
            while (!starts_.empty() && starts_.top().time <= now) {
                const Event event = starts_.top();
                starts_.pop();
                if (event.moves) {
                    move(event.task, now);
                } else {
                    begin(event.task, now);
                }
            }
            for (const std::size_t device : touched_)
                settle(devices_[device], device);
            touched_.clear();
            if (rates_.stale())
                for (const auto &[flow, rate] : rates_.update())
                    set_rate(flow, rate, now);
        }
        return std::move(result_);
    }

  private:
    // -- what each task is -------------------------------------------------------------------

    std::size_t link_of(int source, int destination) const {
        return static_cast<std::size_t>(source) * locations_ + destination;
    }

    int location(const BufferRecord &buffer) const { return buffer.space == in_host ? host_ : buffer.owner; }

    const OperandRecord &operand(const TaskRecord &task, std::size_t which) const {
        return t_.operands[task.first_operand + which];
    }

    void make_bodies() {
        bodies_.resize(t_.tasks.size());
        devices_.resize(m_.num_ranks);
        engines_.resize(static_cast<std::size_t>(m_.num_ranks * ways));
        for (std::size_t i = 0; i < t_.tasks.size(); ++i) {
            const TaskRecord &task = t_.tasks[i];
            if (task.rank < 0 || task.rank >= m_.num_ranks)
                throw std::invalid_argument("task " + std::to_string(i) + " is on a rank that the machine lacks");
            if (task.kind == copy_task) bodies_[i] = copy_body(task);
            if (task.kind == gemm_task) bodies_[i] = gemm_body(task);
            if (task.kind == combine_task) bodies_[i] = combine_body(task);
        }
    }

    Body copy_body(const TaskRecord &task) {
        const RegionRecord &to = t_.regions[operand(task, 0).region], &from = t_.regions[operand(task, 1).region];
        const BufferRecord &target = t_.buffers[to.buffer], &source = t_.buffers[from.buffer];
        const std::int64_t item = element_bytes[target.dtype];
        Body body;
        body.amount = static_cast<double>(to.rows * to.cols * item);
        int from_at = location(source), to_at = location(target);
        double limit = infinity;
        const auto *rows = from_at == to_at && !m_.row_local.empty() ? &m_.row_local : &m_.row_device;
        const RegionRecord *there = nullptr;  // in host memory
        if (from_at == host_ && to_at != host_) {
            rows = &m_.row_in;
            there = &from;
            // Private host memory is behind its rank's link, and goes on from there.
            if (task.rank != to_at) limit = m_.bandwidth[link_of(task.rank, to_at)];
            to_at = task.rank;
        } else if (to_at == host_ && from_at != host_) {
            rows = &m_.row_out;
            there = &to;
            if (task.rank != from_at) limit = m_.bandwidth[link_of(from_at, task.rank)];
            from_at = task.rank;
        }
        if (m_.serial_copies && from_at != to_at)
            body.engine = task.rank * ways + (from_at == host_ ? 1 : to_at == host_ ? 2 : 0);
        const std::size_t link = link_of(from_at, to_at);
        limit = std::min(limit, m_.bandwidth[link]);
        const bool contiguous = to.cols <= 1 || (to.rows == target.ld && from.rows == source.ld);
        if (!contiguous && to.rows > 0 && there != nullptr) {
            const std::int64_t ld = t_.buffers[there->buffer].ld;
            limit *= host_row_share(*rows, to.rows * item, ld * item, (there->row + there->col * ld) * item);
        } else if (!contiguous && to.rows > 0) {
            limit *= row_share(*rows, static_cast<double>(to.rows * item));
        }
        body.latency = m_.latency[link];
        body.of = rates_.class_of(link, limit);
        rates_.share_link(link, task.lane);
        return body;
    }

    // Whether all columns of a region begin at multiples of 16 bytes, if its buffer does.
    bool is_aligned(const RegionRecord &region) const {
        const BufferRecord &buffer = t_.buffers[region.buffer];
        const std::int64_t item = element_bytes[buffer.dtype];
        const bool begins = (region.row + region.col * buffer.ld) * item % alignment_bytes == 0;
        return begins && (region.cols <= 1 || buffer.ld * item % alignment_bytes == 0);
    }

    // Rows of a panel's padding behind a region: lower.py gives them to the executor.
    std::int64_t room(const RegionRecord &region) const {
        const BufferRecord &buffer = t_.buffers[region.buffer];
        const bool at_end = buffer.role != user_role && region.row + region.rows == buffer.rows;
        return at_end ? buffer.ld - buffer.rows : 0;
    }

    // Whether columns of A, B and C begin at multiples of 16 bytes and have whole multiples of them.
    bool is_aligned(const TaskRecord &task) const {
        const RegionRecord &c = t_.regions[operand(task, 0).region], &a = t_.regions[operand(task, 1).region],
                           &b = t_.regions[operand(task, 2).region];
        if (!is_aligned(a) || !is_aligned(b) || !is_aligned(c)) return false;
        const std::int64_t step = alignment_bytes / element_bytes[t_.buffers[a.buffer].dtype];
        const bool turned = operand(task, 1).op != 0;
        const std::int64_t missing = (step - c.rows % step) % step;
        if (missing > 0 && (turned || missing > room(a) || missing > room(c))) return false;
        return b.rows % step == 0 && (!turned || a.rows % step == 0);
    }

    Body gemm_body(const TaskRecord &task) const {
        const OperandRecord &a = operand(task, 1);
        const RegionRecord &c = t_.regions[operand(task, 0).region], &left = t_.regions[a.region];
        const int dtype = t_.buffers[left.buffer].dtype;
        const double rate = m_.gemm_rate[static_cast<std::size_t>(dtype) * m_.num_ranks + task.rank];
        if (!(rate > 0)) throw std::invalid_argument("the machine has no GEMM rate for a product's type");
        const std::int64_t k = a.op != 0 ? left.rows : left.cols;
        Body body;
        if (c.rows == 0 || c.cols == 0 || k == 0) return body;
        const auto odd = [](std::int64_t extent) { return extent > even_extent && extent % even_extent != 0; };
        double factor = odd(c.rows) || odd(c.cols) ? 1 + m_.gemm_uneven[dtype] : 1;
        if (!is_aligned(task)) factor *= 1 + m_.gemm_misaligned[dtype];
        const double depth = factor * static_cast<double>(k) + m_.half_depth[dtype];
        const double rows = m_.block_rows[dtype], cols = m_.block_cols[dtype];
        const double wanted = static_cast<double>(c.rows) * static_cast<double>(c.cols);
        double elements = wanted;
        if (rows > 1 || cols > 1) {
            const double blocks =
                std::ceil(static_cast<double>(c.rows) / rows) * std::ceil(static_cast<double>(c.cols) / cols);
            const auto width = static_cast<double>(m_.multiprocessors[task.rank]);
            const double slots = m_.gemm_waves[dtype] ? std::ceil(blocks / width) * width : blocks;
            elements = slots * rows * cols;
            body.demand = blocks / slots;
        }
        const double tail = m_.gemm_tail[dtype];
        const double idle = 1 - body.demand * elements / (elements + tail);
        body.demand = 1 - m_.gemm_idle_use[dtype] * idle;  // what another kernel cannot have
        const double operations = 2.0 * (elements * depth + tail * static_cast<double>(k));
        // C is written once in any case, which is part of `half_depth`.
        const std::int64_t item = element_bytes[t_.buffers[c.buffer].dtype];
        const std::int64_t moved = (task.num_operands > 3 ? 2 * item : item) - accumulator_bytes[dtype];
        const double half = m_.c_half_depth[dtype], hidden = half > 0 ? 1 + static_cast<double>(k) / half : 1;
        const double moving_s = m_.c_s_per_byte[dtype] * wanted * static_cast<double>(moved) / hidden;
        body.amount = m_.gemm_overhead[dtype] + std::max(operations / rate + moving_s, 0.0);
        return body;
    }

    Body combine_body(const TaskRecord &task) const {
        double bytes = 0;
        for (std::size_t o = 0; o < task.num_operands; ++o) {
            const RegionRecord &region = t_.regions[operand(task, o).region];
            bytes += static_cast<double>(region.rows * region.cols * element_bytes[t_.buffers[region.buffer].dtype]);
        }
        Body body;
        const int dtype = t_.buffers[t_.regions[operand(task, 0).region].buffer].dtype;
        const bool half = element_bytes[dtype] < accumulator_bytes[dtype];
        body.amount = bytes / (half ? m_.half_combine_rate : m_.combine_rate)[task.rank];
        if (bytes > 0) body.amount += m_.combine_start;
        return body;
    }

    // -- who waits for whom ------------------------------------------------------------------

    void link_tasks() {
        const std::size_t count = t_.tasks.size();
        pending_.assign(count, 1);  // for being issued
        ready_.assign(count, 0);
        next_on_lane_.assign(count, -1);
        first_after_.assign(count + 1, 0);
        std::vector<std::int32_t> last_on_lane(t_.lanes.size(), -1);
        for (std::size_t i = 0; i < count; ++i) {
            const TaskRecord &task = t_.tasks[i];
            std::int32_t &last = last_on_lane[task.lane];
            if (last >= 0) {
                next_on_lane_[last] = static_cast<std::int32_t>(i);
                ++pending_[i];
            }
            last = static_cast<std::int32_t>(i);
            for (std::int32_t a = 0; a < task.num_awaits; ++a) {
                const std::int32_t awaited = t_.awaits[task.first_await + a];
                if (t_.tasks[awaited].lane == task.lane) continue;
                ++pending_[i];
                ++first_after_[awaited + 1];
            }
        }
        for (std::size_t i = 0; i < count; ++i)
            first_after_[i + 1] += first_after_[i];
        after_.resize(first_after_[count]);
        std::vector<std::int64_t> next(first_after_.begin(), first_after_.end() - 1);
        for (std::size_t i = 0; i < count; ++i) {
            const TaskRecord &task = t_.tasks[i];
            for (std::int32_t a = 0; a < task.num_awaits; ++a) {
                const std::int32_t awaited = t_.awaits[task.first_await + a];
                if (t_.tasks[awaited].lane != task.lane) after_[next[awaited]++] = static_cast<std::int32_t>(i);
            }
        }
    }

    // -- issuing -----------------------------------------------------------------------------

    // Waits as `lower` keeps them: one that an earlier wait of the lane on the same lane implies costs nothing.
    void issue() {
        const std::size_t count = t_.tasks.size(), lanes = t_.lanes.size();
        const bool exact = lanes * lanes <= most_lanes_squared;
        std::vector<std::int32_t> reach(exact ? lanes * lanes : 0, -1);
        std::vector<double> extra(count, 0);  // records and signals that a task's waiters ask of it
        std::vector<double> own(count, 0);
        before_.assign(count, 0);
        behind_.assign(count, 0);
        // Whom a task tells of its end: bit 0 its own rank, others by rank (modulo 63 on larger machines).
        std::vector<std::uint64_t> told(count, 0);
        for (std::size_t i = 0; i < count; ++i) {
            const TaskRecord &task = t_.tasks[i];
            own[i] = task.kind == copy_task      ? m_.copy_s
                     : task.kind == gemm_task    ? m_.gemm_s
                     : task.kind == combine_task ? m_.combine_s
                                                 : 0.0;
            for (std::int32_t a = task.num_awaits; a-- > 0;) {  // the furthest first
                const std::int32_t awaited = t_.awaits[task.first_await + a];
                const TaskRecord &before = t_.tasks[awaited];
                if (before.lane == task.lane) continue;
                if (exact) {
                    std::int32_t &far = reach[static_cast<std::size_t>(task.lane) * lanes + before.lane];
                    if (awaited <= far) continue;
                    far = awaited;
                }
                const bool local = before.rank == task.rank;
                own[i] += local ? m_.event_s : m_.wait_s;
                if (!local) before_[i] = m_.wait_lane;
                const std::uint64_t bit = std::uint64_t{1} << (local ? 0 : 1 + task.rank % 63);
                if (told[awaited] & bit) continue;
                told[awaited] |= bit;
                extra[awaited] += local ? m_.event_s : m_.signal_s;
                if (!local) behind_[awaited] += m_.signal_lane;
            }
        }
        const int threads = m_.issuing_threads > 0 ? m_.issuing_threads : m_.num_ranks;
        std::vector<double> clock(threads, m_.call_s);
        for (std::size_t i = 0; i < count; ++i) {
            double &now = clock[t_.tasks[i].rank % threads];
            const double at = now + own[i];
            now = at + extra[i];
            satisfy(static_cast<std::int32_t>(i), at + before_[i]);
        }
    }

    // -- the run -----------------------------------------------------------------------------

    void satisfy(std::int32_t task, double time) {
        ready_[task] = std::max(ready_[task], time);
        if (--pending_[task] == 0) starts_.push({ready_[task], task});
    }

    void touch(std::size_t device) {
        if (devices_[device].changed) return;
        devices_[device].changed = true;
        touched_.push_back(device);
    }

    void begin(std::int32_t task, double now) {
        const Body &body = bodies_[task];
        result_.start[task] = now;
        if (body.amount <= 0) {
            end(task, now);
        } else if (body.engine >= 0 && engines_[body.engine].busy) {
            engines_[body.engine].waiting.push_back({task, false});
        } else if (body.of >= 0) {
            if (body.engine >= 0) engines_[body.engine].busy = true;
            send(task, now);
        } else {
            const std::int32_t rank = t_.tasks[task].rank;
            Device &device = devices_[rank];
            advance(device, now);
            device.kernels.push_back({task, body.amount, body.demand, 0, infinity});
            touch(static_cast<std::size_t>(rank));
        }
    }

    void send(std::int32_t task, double now) {
        result_.start[task] = now;
        const double latency = bodies_[task].latency;
        if (latency > 0) {
            starts_.push({now + latency, task, true});
        } else {
            move(task, now);
        }
    }

    void move(std::int32_t task, double now) {
        std::int32_t id;
        if (free_flows_.empty()) {
            id = static_cast<std::int32_t>(flows_.size());
            flows_.emplace_back();
        } else {
            id = free_flows_.back();
            free_flows_.pop_back();
        }
        flows_[id] = {task, bodies_[task].of, bodies_[task].amount, now, 0};
        rates_.begin(id, bodies_[task].of);
    }

    bool is_kernel(std::int32_t task) const {
        return t_.tasks[task].kind == gemm_task || t_.tasks[task].kind == combine_task;
    }

    double local_latency(std::int32_t before, std::int32_t after) const {
        const int kernels = is_kernel(before) + is_kernel(after);
        return kernels == 0 ? m_.event_latency : kernels == 1 ? m_.engine_latency : m_.kernel_latency;
    }

    void end(std::int32_t task, double now) {
        result_.end[task] = now;
        ++finished_;
        const std::int32_t next = next_on_lane_[task];
        if (next >= 0) satisfy(next, now + behind_[task] + before_[next]);
        const std::int32_t rank = t_.tasks[task].rank;
        for (std::int64_t at = first_after_[task]; at < first_after_[task + 1]; ++at) {
            const std::int32_t waiter = after_[at];
            satisfy(waiter, now + (t_.tasks[waiter].rank == rank ? local_latency(task, waiter) : m_.flag_latency));
        }
    }

    static void advance(Device &device, double now) {
        const double passed = now - device.now;
        device.now = now;
        if (passed <= 0) return;
        for (Device::Kernel &kernel : device.kernels)
            kernel.left -= kernel.rate * passed;
    }

    void finish_flow(std::int32_t id, double now) {
        const std::int32_t task = flows_[id].task;
        rates_.end(id, flows_[id].of);
        free_flows_.push_back(id);
        if (bodies_[task].engine < 0) {
            done_.push_back(task);
            return;
        }
        Engine &engine = engines_[bodies_[task].engine];
        engine.waiting.push_back({task, true});
        serve(engine, now);
    }

    void serve(Engine &engine, double now) {
        engine.busy = false;
        while (engine.next < engine.waiting.size() && !engine.busy) {
            const Engine::Turn turn = engine.waiting[engine.next++];
            if (turn.over) {
                done_.push_back(turn.task);
            } else {
                engine.busy = true;
                send(turn.task, now);
            }
        }
    }

    void finish_kernels(std::size_t number, double now) {
        Device &device = devices_[number];
        advance(device, now);
        std::erase_if(device.kernels, [&](const Device::Kernel &kernel) {
            if (kernel.finish > now) return false;
            done_.push_back(kernel.task);
            return true;
        });
        touch(number);
    }

    // New rates of a device's kernels after a change, and when the next of them ends.
    void settle(Device &device, std::size_t number) {
        device.changed = false;
        double room = 1, next = infinity;
        for (Device::Kernel &kernel : device.kernels) {
            const double part = std::min(room, kernel.demand);
            kernel.rate = part > 1e-9 ? part / kernel.demand : 0;
            room -= part;
            kernel.finish = kernel.rate > 0 ? device.now + std::max(0.0, kernel.left) / kernel.rate : infinity;
            next = std::min(next, kernel.finish);
        }
        if (next < infinity) {
            due_.set(number, next);
        } else {
            due_.drop(number);
        }
    }

    void set_rate(std::int32_t id, double rate, double now) {
        Flow &flow = flows_[id];
        flow.left = std::max(0.0, flow.left - flow.rate * (now - flow.since));
        flow.since = now;
        flow.rate = rate;
        due_.set(devices_.size() + static_cast<std::size_t>(id), now + flow.left / rate);
    }

    const SimulatedTables &t_;
    const SimulatedMachine &m_;
    SharedRates rates_;
    const int locations_, host_;

    std::vector<Flow> flows_;
    std::vector<std::int32_t> free_flows_;
    std::vector<Device> devices_;
    std::vector<Engine> engines_;

    std::vector<Body> bodies_;
    std::vector<std::int32_t> pending_, next_on_lane_, after_;
    std::vector<std::int64_t> first_after_;
    std::vector<double> ready_;
    std::vector<double> before_, behind_;  // time of the lane for a task's waits and signals

    std::priority_queue<Event, std::vector<Event>, std::greater<>> starts_;
    Timetable due_;  // of devices, then of flows
    std::vector<std::size_t> touched_;
    std::vector<std::int32_t> done_;
    std::size_t finished_ = 0;
    Simulated result_;
};

}  // namespace

Simulated simulate(const SimulatedTables &tables, const SimulatedMachine &machine) {
    return Simulator(tables, machine).run();
}

}  // namespace uncut
