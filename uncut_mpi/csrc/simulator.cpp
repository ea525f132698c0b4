#include "simulator_state.hpp"

#include <algorithm>
#include <functional>
#include <stdexcept>

namespace uncut {

void Simulator::run(const ScheduleTables &tables, Simulated &result) {
    const std::size_t count = tables.tasks.size();
    if (tables.locations->num_ends() != m_.num_ends)
        throw std::invalid_argument("the schedule's lanes have other ends than the machine's links");
    t_ = tables;
    clear();
    result.start.assign(count, 0);
    result.end.assign(count, 0);
    result.throttled.clear();
    start_ = result.start.data();
    end_ = result.end.data();
    make_bodies();
    count_waits();
    pack_copies();
    bundle_products();
    link_tasks();
    issue();
    while (finished_ < count) {
        const double start_time = starts_.empty() ? infinity : starts_.front().time;
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
        while (!starts_.empty() && starts_.front().time <= now) {
            const Event event = starts_.front();
            std::pop_heap(starts_.begin(), starts_.end(), std::greater<>{});
            starts_.pop_back();
            if (event.moves) {
                move(event.task, now);
            } else {
                begin(event.task, now);
            }
        }
        for (const std::size_t device : touched_)
            share_out(devices_[device], device);
        touched_.clear();
        if (rates_.stale())
            for (const auto &[flow, rate] : rates_.update())
                set_rate(flow, rate, now);
    }
    const double seconds = result.seconds();
    for (const Multiplied &of : multiplied_)
        result.throttled.push_back(std::max(0.0, of.longer_s - m_.rest_gain * std::max(0.0, seconds - of.alone_s)));
}

// What the simulation before has left, if it was given up too.
void Simulator::clear() {
    rates_.clear();
    flows_.clear();
    free_flows_.clear();
    for (Device &device : devices_) {
        device.kernels.clear();
        device.copies = 0;
        device.now = 0;
        device.changed = false;
    }
    for (Engine &engine : engines_) {
        engine.waiting.clear();
        engine.next = 0;
        engine.busy = false;
    }
    tasks_.assign(t_.tasks.size() + 1, {});
    multiplied_.assign(static_cast<std::size_t>(m_.num_ranks), {});
    starts_.clear();
    due_.clear();
    touched_.clear();
    done_.clear();
    finished_ = 0;
}

// -- who waits for whom ---------------------------------------------------------------------------

void Simulator::link_tasks() {
    const std::size_t count = t_.tasks.size();
    last_on_lane_.assign(t_.lanes.size(), -1);
    for (std::size_t i = 0; i < count; ++i) {
        const TaskRecord &task = t_.tasks[i];
        std::int32_t &last = last_on_lane_[task.lane];
        if (last >= 0) {
            tasks_[last].next_on_lane = static_cast<std::int32_t>(i);
            ++tasks_[i].pending;
        }
        last = static_cast<std::int32_t>(i);
        for (std::int32_t a = 0; a < task.num_awaits; ++a) {
            const std::int32_t awaited = t_.awaits[task.first_await + a];
            if (t_.tasks[awaited].lane == task.lane) continue;
            ++tasks_[i].pending;
            ++tasks_[awaited].first_after;
        }
    }
    // Where each one's waiters end; from the last waiter on it comes down to where they begin.
    for (std::size_t i = 0; i < count; ++i)
        tasks_[i + 1].first_after += tasks_[i].first_after;
    after_.resize(static_cast<std::size_t>(tasks_[count].first_after));
    for (std::size_t i = count; i-- > 0;) {
        const TaskRecord &task = t_.tasks[i];
        for (std::int32_t a = 0; a < task.num_awaits; ++a) {
            const std::int32_t awaited = t_.awaits[task.first_await + a];
            if (t_.tasks[awaited].lane != task.lane)
                after_[--tasks_[awaited].first_after] = static_cast<std::int32_t>(i);
        }
    }
}

// -- issuing --------------------------------------------------------------------------------------

void Simulator::count_waits() {
    const std::size_t count = t_.tasks.size();
    kept_.clear(t_.lanes.size());
    issues_.assign(count, {});
    awaits_flags_.assign(static_cast<std::size_t>(m_.num_ranks), 0);
    for (std::size_t i = 0; i < count; ++i) {
        const TaskRecord &task = t_.tasks[i];
        kept_.each(t_, task, [&](std::int32_t awaited) {
            const bool local = is_local(tasks_[awaited], tasks_[i]);
            if (!local) awaits_flags_[static_cast<std::size_t>(task.rank)] = 1;
            issues_[i].own += local ? m_.event_s : m_.wait_s;
            issues_[i].waits = true;
            if (!local) tasks_[i].before = m_.wait_lane_s;
            const std::uint64_t bit = std::uint64_t{1} << (local ? 0 : 1 + task.rank % 63);
            if (issues_[awaited].told & bit) return;
            issues_[awaited].told |= bit;
            issues_[awaited].extra += local ? m_.event_s : m_.signal_s;
            if (!local) tasks_[awaited].behind += m_.signal_lane_s;
        });
    }
}

void Simulator::issue() {
    const std::size_t count = t_.tasks.size();
    for (std::size_t i = 0; i < count; ++i)
        if (!tasks_[i].packed)
            issues_[i].own += t_.tasks[i].kind == gemm_task   ? m_.gemm_s
                              : tasks_[i].is_kernel           ? m_.combine_s
                              : t_.tasks[i].kind == copy_task ? m_.copy_s
                                                              : 0.0;
    const int threads = m_.issuing_threads > 0 ? m_.issuing_threads : m_.num_ranks;
    clock_.assign(static_cast<std::size_t>(threads), m_.call_s);
    for (std::size_t i = 0; i < count; ++i) {
        if (tasks_[i].of_host) {  // a worker has its list from the start
            satisfy(static_cast<std::int32_t>(i), m_.call_s);
            continue;
        }
        double &now = clock_[static_cast<std::size_t>(tasks_[i].rank % threads)];
        const double at = now + issues_[i].own;
        now = at + issues_[i].extra;
        satisfy(static_cast<std::int32_t>(i), at + tasks_[i].before);
    }
}

// -- the run --------------------------------------------------------------------------------------

void Simulator::satisfy(std::int32_t task, double time) {
    Task &of = tasks_[task];
    of.ready = std::max(of.ready, time);
    if (--of.pending == 0) start_at({of.ready, task});
}

void Simulator::start_at(const Event &event) {
    starts_.push_back(event);
    std::push_heap(starts_.begin(), starts_.end(), std::greater<>{});
}

void Simulator::touch(std::size_t device) {
    if (devices_[device].changed) return;
    devices_[device].changed = true;
    touched_.push_back(device);
}

void Simulator::begin(std::int32_t task, double now) {
    const Body &body = tasks_[task].body;
    start_[task] = now;
    if (body.amount <= 0) {
        end(task, now);
    } else if (body.engine >= 0 && engines_[body.engine].busy) {
        engines_[body.engine].waiting.push_back({task, false});
    } else if (body.of >= 0) {
        if (body.engine >= 0) engines_[body.engine].busy = true;
        send(task, now);
    } else {
        const std::int32_t rank = tasks_[task].rank;
        Device &device = devices_[rank];
        advance(device, now);
        Device::Kernel made{task, body.amount, body.demand, body.copy_share, body.is_product, body.sum_wait, now, -1};
        const auto product = std::ranges::find_if(device.kernels, &Device::Kernel::is_product);
        const auto sums = [now](const Device::Kernel &one) { return !one.is_product && one.ready <= now; };
        if (!made.is_product && product != device.kernels.end() && std::ranges::none_of(device.kernels, sums)) {
            made.behind = product->task;
            made.ready = now + product->sum_wait;
        }
        device.kernels.push_back(made);
        touch(static_cast<std::size_t>(rank));
    }
}

void Simulator::send(std::int32_t task, double now) {
    start_[task] = now;
    const double latency = tasks_[task].body.latency;
    if (latency > 0) {
        start_at({now + latency, task, true});
    } else {
        move(task, now);
    }
}

void Simulator::move(std::int32_t task, double now) {
    std::int32_t id;
    if (free_flows_.empty()) {
        id = static_cast<std::int32_t>(flows_.size());
        flows_.emplace_back();
    } else {
        id = free_flows_.back();
        free_flows_.pop_back();
    }
    const Body &body = tasks_[task].body;
    flows_[id] = {task, body.of, body.amount, now, 0};
    rates_.begin(id, body.of);
    if (body.local_device >= 0) count_copy(body.local_device, 1, now);
}

double Simulator::local_latency(const Task &before, const Task &after) const {
    const int kernels = before.is_kernel + after.is_kernel;
    return kernels == 0 ? m_.event_latency_s : kernels == 1 ? m_.engine_latency_s : m_.kernel_latency_s;
}

void Simulator::end(std::int32_t task, double now) {
    end_[task] = now;
    ++finished_;
    const Task &of = tasks_[task];
    if (of.next_on_lane >= 0) satisfy(of.next_on_lane, now + of.behind + tasks_[of.next_on_lane].before);
    const std::int32_t last = tasks_[task + 1].first_after;
    for (std::int32_t at = of.first_after; at < last; ++at) {
        const std::int32_t waiter = after_[at];
        const Task &other = tasks_[waiter];
        satisfy(waiter, now + (is_local(of, other) ? local_latency(of, other) : m_.flag_latency_s));
    }
}

void Simulator::advance(Device &device, double now) {
    const double passed = now - device.now;
    device.now = now;
    if (passed <= 0) return;
    for (Device::Kernel &kernel : device.kernels)
        kernel.left -= kernel.rate * passed;
}

// A copy within a device begins or ends: its kernel has multiprocessors that products would have.
void Simulator::count_copy(std::int32_t location, int change, double now) {
    Device &device = devices_[location];
    advance(device, now);
    device.copies += change;
    touch(static_cast<std::size_t>(location));
}

void Simulator::finish_flow(std::int32_t id, double now) {
    const std::int32_t task = flows_[id].task;
    rates_.end(id, flows_[id].of);
    if (tasks_[task].body.local_device >= 0) count_copy(tasks_[task].body.local_device, -1, now);
    free_flows_.push_back(id);
    const std::int32_t served_by = tasks_[task].body.engine;
    if (served_by < 0) {
        done_.push_back(task);
        return;
    }
    Engine &engine = engines_[served_by];
    engine.waiting.push_back({task, true});
    serve(engine, now);
}

void Simulator::serve(Engine &engine, double now) {
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

void Simulator::finish_kernels(std::size_t number, double now) {
    Device &device = devices_[number];
    advance(device, now);
    for (const Device::Kernel &product : device.kernels)
        for (Device::Kernel &sum : device.kernels)
            if (product.finish <= now && sum.behind == product.task) sum.ready = std::min(sum.ready, now);
    std::erase_if(device.kernels, [&](const Device::Kernel &kernel) {
        if (kernel.finish > now) return false;
        done_.push_back(kernel.task);
        return true;
    });
    touch(number);
}

// New rates of a device's kernels after a change, and when the next of them ends.
void Simulator::share_out(Device &device, std::size_t number) {
    device.changed = false;
    double left = 1, next = infinity;
    for (const bool products : {false, true})
        for (Device::Kernel &kernel : device.kernels) {
            if (kernel.is_product != products) continue;
            const bool waits = !products && kernel.ready > device.now;
            const double part = waits ? 0 : std::min(left, kernel.demand);
            kernel.rate = part > 1e-9 ? part / kernel.demand : 0;
            if (device.copies > 0) kernel.rate *= 1 - kernel.copy_share;
            left -= part;
            kernel.finish = kernel.rate > 0 ? device.now + std::max(0.0, kernel.left) / kernel.rate : infinity;
            next = std::min(next, waits ? kernel.ready : kernel.finish);
        }
    if (next < infinity) {
        due_.set(number, next);
    } else {
        due_.drop(number);
    }
}

void Simulator::set_rate(std::int32_t id, double rate, double now) {
    Flow &flow = flows_[id];
    flow.left = std::max(0.0, flow.left - flow.rate * (now - flow.since));
    flow.since = now;
    flow.rate = rate;
    due_.set(devices_.size() + static_cast<std::size_t>(id), now + flow.left / rate);
}

}  // namespace uncut
