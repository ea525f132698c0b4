#include "simulator.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <queue>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace uncut {
namespace {

enum Kind : std::uint8_t { copy_task = 0, gemm_task = 1, combine_task = 2 };
constexpr std::uint8_t in_host = 1;
constexpr std::array<std::int64_t, 4> element_bytes = {8, 4, 2, 2};
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr std::size_t most_lanes_squared = std::size_t{1} << 22;
constexpr std::size_t most_known = 1 << 16;

// A fixed well-mixed number per class of transfers (splitmix64); their sum names a set of transfers.
std::uint64_t mixed(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

// Transfers on one link with one limit get one rate whenever they run together.
struct Class {
    double limit = 0;  // bytes per second
    std::uint64_t mark = 0;
    std::vector<std::pair<std::size_t, double>> ports;  // (port, weight)
    std::vector<std::int32_t> flows;                    // that run
    double rate = 0;                                    // of each of them, now
    bool changed = false, gathered = false;
    bool grows = false;     // while rates are shared
    std::size_t place = 0;  // in what the change reaches
};

struct PortState {
    double capacity = 0;
    double demand = 0;                 // what its transfers would take at their limits
    std::vector<std::size_t> present;  // classes with transfers that run
    bool was_full = false;             // demand was above the capacity before what has changed
    bool gathered = false;
    // While rates are shared: what its frozen transfers leave, what the others take per unit of their
    // common rate, how many classes of these there are, and the rate at which nothing is left.
    double room = 0, use = 0;
    int growing = 0;
    double full_at = 0;
};

// A copy that moves bytes. Its rate was set at `since`.
struct Flow {
    std::int32_t task = -1;
    std::size_t of = 0;  // class
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

struct Body {
    double amount = 0;   // copy: bytes; kernel: seconds alone
    double latency = 0;  // before a copy moves its first byte
    double demand = 1;
    std::int32_t of = -1;  // copy: class
};

struct Event {
    double time;
    std::int32_t task;
    bool moves = false;  // a copy whose latency has passed
    bool operator>(const Event &other) const { return time != other.time ? time > other.time : task > other.task; }
};

// When each domain (a device, or a flow) next ends something: a heap in which a domain is once, and
// moves when its time does, since a change of rates moves many.
class Timetable {
  public:
    bool empty() const { return heap_.empty(); }
    double first_time() const { return heap_.front().time; }

    std::size_t take_first() {
        const std::size_t domain = heap_.front().domain;
        drop(domain);
        return domain;
    }

    void set(std::size_t domain, double time) {
        if (domain >= place_.size()) place_.resize(domain + 1, absent);
        if (place_[domain] == absent) {
            place_[domain] = heap_.size();
            heap_.push_back({time, domain});
        } else {
            heap_[place_[domain]].time = time;
        }
        settle(place_[domain]);
    }

    void drop(std::size_t domain) {
        if (domain >= place_.size() || place_[domain] == absent) return;
        const std::size_t at = place_[domain];
        place_[domain] = absent;
        const Entry last = heap_.back();
        heap_.pop_back();
        if (at == heap_.size()) return;
        heap_[at] = last;
        place_[last.domain] = at;
        settle(at);
    }

  private:
    static constexpr std::size_t absent = std::numeric_limits<std::size_t>::max();

    struct Entry {
        double time;
        std::size_t domain;
        bool operator<(const Entry &other) const {
            return time != other.time ? time < other.time : domain < other.domain;
        }
    };

    void put(std::size_t at, const Entry &entry) {
        heap_[at] = entry;
        place_[entry.domain] = at;
    }

    void settle(std::size_t at) {
        const Entry entry = heap_[at];
        for (; at > 0 && entry < heap_[(at - 1) / 2]; at = (at - 1) / 2)
            put(at, heap_[(at - 1) / 2]);
        for (std::size_t child = 2 * at + 1; child < heap_.size(); child = 2 * at + 1) {
            if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
            if (!(heap_[child] < entry)) break;
            put(at, heap_[child]);
            at = child;
        }
        put(at, entry);
    }

    std::vector<Entry> heap_;
    std::vector<std::size_t> place_;
};

class Simulator {
  public:
    Simulator(const SimulatedTables &tables, const SimulatedMachine &machine)
        : t_(tables), m_(machine), locations_(machine.num_ranks + 1), host_(machine.num_ranks) {
        make_ports();
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
                    finish_flow(static_cast<std::int32_t>(domain - devices_.size()));
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
            if (!changed_.empty()) share(now);
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

    void make_ports() {
        ports_of_.resize(static_cast<std::size_t>(locations_) * locations_);
        lane_of_link_.assign(ports_of_.size(), -1);
        ports_.resize(m_.port_capacity.size());
        for (std::size_t p = 0; p < ports_.size(); ++p) {
            ports_[p].capacity = m_.port_capacity[p];
            for (std::int64_t at = m_.port_first[p]; at < m_.port_first[p + 1]; ++at)
                ports_of_[static_cast<std::size_t>(m_.port_links[at])].emplace_back(p, m_.port_weights[at]);
        }
    }

    std::int32_t class_of(std::size_t link, double limit) {
        for (const std::int32_t c : classes_of_link_[link])
            if (classes_[c].limit == limit) return c;
        Class made;
        made.limit = limit;
        made.ports = ports_of_[link];
        made.mark = mixed(classes_.size() + 1);
        classes_.push_back(std::move(made));
        classes_of_link_[link].push_back(static_cast<std::int32_t>(classes_.size()) - 1);
        return classes_of_link_[link].back();
    }

    // Several lanes on one link, as from private host memory to other ranks' devices, share its bandwidth too.
    void share_link(std::size_t link, std::int32_t lane, std::size_t of) {
        std::int32_t &first = lane_of_link_[link];
        if (first == -1) first = lane;
        if (first == lane || first == -2) return;
        first = -2;
        ports_of_[link].emplace_back(ports_.size(), 1.0);
        ports_.emplace_back().capacity = m_.bandwidth[link];
        for (const std::int32_t c : classes_of_link_[link])
            classes_[c].ports = ports_of_[link];
        classes_[of].ports = ports_of_[link];
    }

    void make_bodies() {
        classes_of_link_.resize(static_cast<std::size_t>(locations_) * locations_);
        bodies_.resize(t_.tasks.size());
        devices_.resize(m_.num_ranks);
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
        double overhead = m_.row_device;
        if (from_at == host_ && to_at != host_) {
            overhead = m_.row_in;
            // Private host memory is behind its rank's link, and goes on from there.
            if (task.rank != to_at) limit = m_.bandwidth[link_of(task.rank, to_at)];
            to_at = task.rank;
        } else if (to_at == host_ && from_at != host_) {
            overhead = m_.row_out;
            if (task.rank != from_at) limit = m_.bandwidth[link_of(from_at, task.rank)];
            from_at = task.rank;
        }
        const std::size_t link = link_of(from_at, to_at);
        limit = std::min(limit, m_.bandwidth[link]);
        const bool contiguous = to.cols <= 1 || (to.rows == target.ld && from.rows == source.ld);
        if (!contiguous && to.rows > 0) {
            const double width = static_cast<double>(to.rows * item);
            limit *= width / (width + overhead);
        }
        body.latency = m_.latency[link];
        body.of = class_of(link, limit);
        share_link(link, task.lane, static_cast<std::size_t>(body.of));
        return body;
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
        const double depth = static_cast<double>(k) + m_.half_depth[dtype];
        const double rows = m_.block_rows[dtype], cols = m_.block_cols[dtype];
        double operations = 2.0 * static_cast<double>(c.rows) * static_cast<double>(c.cols) * depth;
        if (rows > 1 || cols > 1) {
            const double blocks =
                std::ceil(static_cast<double>(c.rows) / rows) * std::ceil(static_cast<double>(c.cols) / cols);
            const auto width = static_cast<double>(m_.multiprocessors[task.rank]);
            const double slots = std::ceil(blocks / width) * width;
            operations = 2.0 * slots * rows * cols * depth;
            body.demand = blocks / slots;
        }
        body.amount = m_.gemm_overhead[dtype] + operations / rate;
        return body;
    }

    Body combine_body(const TaskRecord &task) const {
        double bytes = 0;
        for (std::size_t o = 0; o < task.num_operands; ++o) {
            const RegionRecord &region = t_.regions[operand(task, o).region];
            bytes += static_cast<double>(region.rows * region.cols * element_bytes[t_.buffers[region.buffer].dtype]);
        }
        Body body;
        body.amount = bytes / m_.combine_rate[task.rank];
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
            satisfy(static_cast<std::int32_t>(i), at);
        }
    }

    // -- the run -----------------------------------------------------------------------------

    void satisfy(std::int32_t task, double time) {
        ready_[task] = std::max(ready_[task], time);
        if (--pending_[task] == 0) starts_.push({ready_[task] + before_[task], task});
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
        } else if (body.of >= 0) {
            if (body.latency > 0) {
                starts_.push({now + body.latency, task, true});
            } else {
                move(task, now);
            }
        } else {
            const std::int32_t rank = t_.tasks[task].rank;
            Device &device = devices_[rank];
            advance(device, now);
            device.kernels.push_back({task, body.amount, body.demand, 0, infinity});
            touch(static_cast<std::size_t>(rank));
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
        const auto of = static_cast<std::size_t>(bodies_[task].of);
        flows_[id] = {task, of, bodies_[task].amount, now, 0};
        count(of, id, true);
    }

    // Notes that a flow of a class begins or ends.
    void count(std::size_t of, std::int32_t id, bool begins) {
        Class &c = classes_[of];
        if (!c.changed) {
            c.changed = true;
            changed_.push_back(of);
        }
        if (begins) {
            c.flows.push_back(id);
        } else {
            std::erase(c.flows, id);
        }
        for (const auto &[number, weight] : c.ports) {
            PortState &port = ports_[number];
            port.was_full = port.was_full || port.demand > port.capacity;
            port.demand += (begins ? weight : -weight) * c.limit;
            if (begins && c.flows.size() == 1) port.present.push_back(of);
            if (!begins && c.flows.empty()) std::erase(port.present, of);
            if (port.present.empty()) port.demand = 0;  // what rounding has left
        }
    }

    void end(std::int32_t task, double now) {
        result_.end[task] = now;
        ++finished_;
        if (next_on_lane_[task] >= 0) satisfy(next_on_lane_[task], now + behind_[task]);
        const std::int32_t rank = t_.tasks[task].rank;
        for (std::int64_t at = first_after_[task]; at < first_after_[task + 1]; ++at) {
            const std::int32_t waiter = after_[at];
            satisfy(waiter, now + (t_.tasks[waiter].rank == rank ? m_.event_latency : m_.flag_latency));
        }
    }

    static void advance(Device &device, double now) {
        const double passed = now - device.now;
        device.now = now;
        if (passed <= 0) return;
        for (Device::Kernel &kernel : device.kernels)
            kernel.left -= kernel.rate * passed;
    }

    void finish_flow(std::int32_t id) {
        done_.push_back(flows_[id].task);
        count(flows_[id].of, id, false);
        free_flows_.push_back(id);
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

    // Max-min fair rates (model/ports.py) of the flows that a change can reach: through ports that
    // are asked for more than they have, now or before. All others keep theirs.
    void share(double now) {
        for (const std::size_t c : changed_) {
            gather(c);
            for (const auto &[number, weight] : classes_[c].ports)
                if (ports_[number].was_full) gather_port(number);
        }
        for (std::size_t at = 0; at < reached_.size(); ++at)
            for (const auto &[number, weight] : classes_[reached_[at]].ports)
                if (ports_[number].demand > ports_[number].capacity) gather_port(number);
        std::sort(reached_.begin(), reached_.end());
        solve();
        for (std::size_t at = 0; at < reached_.size(); ++at) {
            Class &c = classes_[reached_[at]];
            const double rate = rates_[at];
            if (rate != c.rate || c.changed)
                for (const std::int32_t id : c.flows)
                    set_rate(id, rate, now);
            c.rate = rate;
            c.gathered = false;
        }
        for (const std::size_t c : changed_) {
            classes_[c].changed = classes_[c].gathered = false;
            for (const auto &[number, weight] : classes_[c].ports)
                ports_[number].was_full = false;
        }
        for (const std::size_t number : reached_ports_)
            ports_[number].gathered = false;
        changed_.clear();
        reached_.clear();
        reached_ports_.clear();
    }

    void gather(std::size_t c) {
        if (classes_[c].gathered || classes_[c].flows.empty()) return;
        classes_[c].gathered = true;
        reached_.push_back(c);
    }

    void gather_port(std::size_t number) {
        PortState &port = ports_[number];
        if (port.gathered) return;
        port.gathered = true;
        reached_ports_.push_back(number);
        for (const std::size_t c : port.present)
            gather(c);
    }

    void set_rate(std::int32_t id, double rate, double now) {
        Flow &flow = flows_[id];
        flow.left = std::max(0.0, flow.left - flow.rate * (now - flow.since));
        flow.since = now;
        flow.rate = rate;
        due_.set(devices_.size() + static_cast<std::size_t>(id), now + flow.left / rate);
    }

    // Fills rates_ for the classes in reached_; sets that come again are remembered.
    void solve() {
        rates_.assign(reached_.size(), 0);
        std::uint64_t mark = 0;
        for (const std::size_t c : reached_)
            mark += classes_[c].mark * classes_[c].flows.size();
        const auto known = known_.find(mark);
        if (known != known_.end() && known->second.size() == rates_.size()) {
            rates_ = known->second;
            return;
        }
        fill();
        if (known_.size() < most_known) known_.emplace(mark, rates_);
    }

    // Progressive filling. All that still grow have one rate, so a port is full at what its frozen
    // transfers leave, divided among the others; only the ports of what freezes need new sums.
    void fill() {
        for (const std::size_t number : reached_ports_) {
            PortState &port = ports_[number];
            port.room = port.capacity;
            port.use = 0;
            port.growing = 0;
        }
        growing_.clear();
        for (std::size_t at = 0; at < reached_.size(); ++at) {
            Class &c = classes_[reached_[at]];
            c.grows = false;
            for (const auto &[number, weight] : c.ports) {
                PortState &port = ports_[number];
                if (port.demand <= port.capacity) continue;
                port.use += weight * static_cast<double>(c.flows.size());
                ++port.growing;
                c.grows = true;
            }
            c.place = at;
            if (c.grows) {
                growing_.push_back(reached_[at]);
            } else {
                rates_[at] = c.limit;
            }
        }
        std::stable_sort(growing_.begin(), growing_.end(), [&](std::size_t one, std::size_t other) {
            return classes_[one].limit < classes_[other].limit;
        });
        open_.clear();
        for (const std::size_t number : reached_ports_)
            if (ports_[number].growing > 0) open_.push_back(number);
        constexpr double near = 1 + 1e-12;
        double rate = 0;
        for (std::size_t next = 0;;) {
            while (next < growing_.size() && !classes_[growing_[next]].grows)
                ++next;
            if (next == growing_.size()) return;
            double least = classes_[growing_[next]].limit;
            for (const std::size_t number : open_) {
                PortState &port = ports_[number];
                port.full_at = port.room / port.use;
                least = std::min(least, port.full_at);
            }
            rate = std::max(rate, least);  // rounding may leave a port less than it has given
            for (std::size_t at = next; at < growing_.size() && classes_[growing_[at]].limit <= rate * near; ++at)
                freeze(classes_[growing_[at]], classes_[growing_[at]].limit);
            for (const std::size_t number : open_)
                if (ports_[number].full_at <= rate * near)
                    for (const std::size_t c : ports_[number].present)
                        freeze(classes_[c], rate);
            std::erase_if(open_, [&](std::size_t number) { return ports_[number].growing == 0; });
        }
    }

    void freeze(Class &c, double rate) {
        if (!c.grows) return;
        c.grows = false;
        rates_[c.place] = rate;
        const auto flows = static_cast<double>(c.flows.size());
        for (const auto &[number, weight] : c.ports) {
            PortState &port = ports_[number];
            if (port.demand <= port.capacity) continue;
            port.room -= weight * flows * rate;
            port.use -= weight * flows;
            --port.growing;
        }
    }

    const SimulatedTables &t_;
    const SimulatedMachine &m_;
    const int locations_, host_;

    std::vector<std::vector<std::pair<std::size_t, double>>> ports_of_;  // per link
    std::vector<std::int32_t> lane_of_link_;                             // -1: none, -2: several
    std::vector<std::vector<std::int32_t>> classes_of_link_;
    std::vector<Class> classes_;
    std::vector<PortState> ports_;
    std::vector<Flow> flows_;
    std::vector<std::int32_t> free_flows_;
    std::unordered_map<std::uint64_t, std::vector<double>> known_;
    std::vector<Device> devices_;

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

    // What a change reaches.
    std::vector<std::size_t> changed_, reached_, reached_ports_, growing_, open_;
    std::vector<double> rates_;
};

}  // namespace

Simulated simulate(const SimulatedTables &tables, const SimulatedMachine &machine) {
    return Simulator(tables, machine).run();
}

}  // namespace uncut
