// What each task is to the simulator: bytes on a link, or seconds of a device.
#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>

#include "simulator_state.hpp"

namespace uncut {
namespace {

constexpr std::int64_t most_pitch = 2147483647;  // of all devices so far

}  // namespace

void Simulator::make_bodies() {
    for (std::size_t i = 0; i < t_.tasks.size(); ++i) {
        const TaskRecord &task = t_.tasks[i];
        if (task.rank < 0 || task.rank >= m_.num_ranks)
            throw std::invalid_argument("task " + std::to_string(i) + " is on a rank that the machine lacks");
        Task &of = tasks_[i];
        of.rank = task.rank;
        of.of_host = is_of_host(t_.lanes[task.lane].kind);
        const bool transposes = task.kind == copy_task && !of.of_host && operand(task, 1).op != 0;
        of.is_kernel = task.kind == gemm_task || task.kind == combine_task || transposes;
        if (task.kind == copy_task) of.body = transposes ? transposing_body(task) : copy_body(task);
        if (task.kind == send_task) of.body = net_body(task, t_.tasks[i + 1]);
        if (task.kind == gemm_task) of.body = gemm_body(task);
        if (task.kind == combine_task) of.body = combine_body(task);
    }
}

// As executors pack them, by what is known before a list is lowered.
void Simulator::pack_copies() {
    packs_.assign(t_.lanes.size(), {});
    series_.resize(t_.lanes.size());
    const auto make = [&](Pack &pack) {
        if (pack.count > 1) {
            Task &first = tasks_[pack.first];
            first.is_kernel = true;
            first.body = {.amount = kernel_s(2 * static_cast<double>(pack.bytes), m_.combine_rate[first.rank])};
        }
        pack.end();
    };
    for (std::size_t i = 0; i < t_.tasks.size(); ++i) {
        const TaskRecord &task = t_.tasks[i];
        const LaneRecord &ends = t_.lanes[task.lane];
        if (goes_between(ends)) {
            add_to_series(i);
            continue;
        }
        Pack &pack = packs_[task.lane];
        if (task.kind != copy_task) {
            make(pack);
            continue;
        }
        const RegionRecord &to = t_.regions[operand(task, 0).region], &from = t_.regions[operand(task, 1).region];
        const std::int64_t bytes = to.rows * to.cols * bytes_of(t_.buffers[to.buffer].dtype);
        const bool is_users = t_.buffers[from.buffer].role == user_role;
        const bool brings = is_users != (t_.buffers[to.buffer].role == user_role);
        if (tasks_[i].is_kernel || !brings || !Pack::may_have(ends, bytes)) {
            make(pack);
        } else if (task.num_awaits == 0 && pack.takes(bytes)) {
            pack.add(bytes);
            tasks_[i].packed = tasks_[i].is_kernel = true;
            tasks_[i].body = {};
        } else {
            make(pack);
            pack.begin(i, bytes);
        }
    }
    for (Pack &pack : packs_)
        make(pack);
    for (Serial &serial : series_)
        end_series(serial);
}

// A copy between memories goes on with the series of its lane, or begins one, which ends where somebody is told.
void Simulator::add_to_series(std::size_t task) {
    const TaskRecord &record = t_.tasks[task];
    Serial &serial = series_[record.lane];
    Series &series = serial.series;
    const Body &body = tasks_[task].body;
    const bool is_flow = record.kind == copy_task && !tasks_[task].is_kernel && body.amount > 0 && !m_.on_disk;
    if (!is_flow) {
        const bool stands_between = issues_[task].waits || issues_[task].told != 0;
        if (record.kind != copy_task || body.amount > 0 || stands_between) end_series(serial);
        return;
    }
    const RegionRecord &to = t_.regions[operand(record, 0).region], &from = t_.regions[operand(record, 1).region];
    const BufferRecord &target = t_.buffers[to.buffer], &source = t_.buffers[from.buffer];
    const std::int64_t item = bytes_of(target.dtype);
    const auto place = [item](const RegionRecord &region, const BufferRecord &buffer) {
        return static_cast<std::uint64_t>((region.col * buffer.ld + region.row) * item);
    };
    PackedCopy one = packed_copy(place(to, target), place(from, source), to.rows, to.cols, target.ld, source.ld, item);
    bool goes_on = series.count > 0 && !issues_[task].waits;
    if (goes_on) {
        const bool to_same = to.buffer == serial.buffers[0], from_same = from.buffer == serial.buffers[1];
        goes_on = to_same || from_same;
        // Runs of a matrix that is dealt in turn are buffers of their own, which lie behind one another.
        const auto behind = [&](std::uint64_t first, std::int64_t step, std::int64_t apart, bool in_layers) {
            const std::int64_t own = one.lines > 1 && in_layers ? apart * one.lines : one.width;
            return first + series.count * static_cast<std::uint64_t>(series.count > 1 ? step : own);
        };
        if (goes_on && !from_same) {
            goes_on = are_beside(from.buffer, serial.buffers[1]);
            const bool in_layers = static_cast<std::int64_t>(one.to - series.one.to) >= one.to_apart;
            one.from = behind(series.one.from, series.from_step, one.from_apart, in_layers);
        }
        if (goes_on && !to_same) {
            goes_on = are_beside(to.buffer, serial.buffers[0]);
            const bool in_layers = static_cast<std::int64_t>(one.from - series.one.from) >= one.from_apart;
            one.to = behind(series.one.to, series.to_step, one.to_apart, in_layers);
        }
    }
    const std::optional<Series> longer = goes_on ? series.with(one, most_pitch) : std::nullopt;
    if (longer) {
        series = *longer;
        serial.others.push_back(task);
    } else {
        end_series(serial);
        one.to = place(to, target), one.from = place(from, source);
        series.begin(task, one);
    }
    serial.buffers = {to.buffer, from.buffer};
    if (issues_[task].told != 0) end_series(serial);
}

void Simulator::end_series(Serial &serial) {
    if (serial.series.pays()) {
        const std::size_t first = serial.series.first;
        for (const std::size_t other : serial.others) {
            tasks_[first].body.amount += tasks_[other].body.amount;
            tasks_[other].packed = true;
            tasks_[other].body = {};
        }
        issues_[first].own += serial.series.layers_s();
    }
    serial.series.end();
    serial.others.clear();
}

bool Simulator::are_beside(std::int32_t one, std::int32_t other) const {
    const BufferRecord &a = t_.buffers[one], &b = t_.buffers[other];
    return a.role == user_role && b.role == user_role && a.matrix == b.matrix && a.location == b.location &&
           a.ld == b.ld;
}

Simulator::Body Simulator::copy_body(const TaskRecord &task) {
    const RegionRecord &to = t_.regions[operand(task, 0).region], &from = t_.regions[operand(task, 1).region];
    const BufferRecord &target = t_.buffers[to.buffer], &source = t_.buffers[from.buffer];
    const std::int64_t item = bytes_of(target.dtype);
    Body body;
    body.amount = static_cast<double>(to.rows * to.cols * item);
    const Locations &memories = *t_.locations;
    const bool from_host = memories.in_host(source.location), to_host = memories.in_host(target.location);
    int from_at = memories.end(source.location), to_at = memories.end(target.location);
    double limit = infinity;
    const auto *rows = from_at == to_at && !m_.row_local.empty() ? &m_.row_local : &m_.row_device;
    const RegionRecord *there = nullptr;  // in host memory
    if (from_host && !to_host) {
        rows = &m_.row_in;
        there = &from;
        // Private host memory is behind its rank's link, and goes on from there.
        if (task.rank != to_at) limit = m_.bandwidth[link_of(task.rank, to_at)];
        to_at = task.rank;
    } else if (to_host && !from_host) {
        rows = &m_.row_out;
        there = &to;
        if (task.rank != from_at) limit = m_.bandwidth[link_of(from_at, task.rank)];
        from_at = task.rank;
    }
    if (m_.serial_copies && from_at != to_at) body.engine = task.rank * ways + (from_host ? 1 : to_host ? 2 : 0);
    if (from_host && to_host) {
        body.engine = task.rank * ways + 3;
        limit = m_.host_copy_rate;
        if (operand(task, 1).op != 0) limit = std::min(limit, m_.host_transposed_rate * static_cast<double>(item));
        if (source.medium != 0 || target.medium != 0) there = source.medium != 0 ? &from : &to;
    }
    const bool in_file = there != nullptr && (m_.on_disk || t_.buffers[there->buffer].medium != 0);
    if (in_file) {
        // Ranks take turns at each way of the disk. Columns that do not follow one another in the file are calls of
        // their own.
        const bool whole = there->rows == t_.buffers[there->buffer].ld, reads = there == &from;
        body.engine = m_.num_ranks * ways + (reads ? 0 : 1);
        limit = reads ? m_.file_read_rate : m_.file_write_rate;
        body.amount += limit * m_.file_call_s * static_cast<double>(whole ? 1 : to.cols);
    }
    const std::size_t link = link_of(from_at, to_at);
    limit = std::min(limit, m_.bandwidth[link]);
    const bool contiguous = in_file || packed_copy(0, 0, to.rows, to.cols, target.ld, source.ld, item).lines == 1;
    if (!contiguous && to.rows > 0 && there != nullptr) {
        // Memory of all ranks begins at a line (segments.py), a caller's own anywhere.
        const BufferRecord &memory = t_.buffers[there->buffer];
        const std::int64_t begins =
            memories.rank(memory.location) == nobody ? (there->row + there->col * memory.ld) * item : -1;
        limit *= host_row_share(*rows, to.rows * item, memory.ld * item, begins);
    } else if (!contiguous && to.rows > 0 && !from_host) {
        limit *= row_share(*rows, static_cast<double>(to.rows * item));
    }
    if (from_at == to_at && !from_host) body.local_device = from_at;
    body.latency = m_.latency[link];
    body.of = rates_.class_of(link, limit);
    rates_.share_link(link, task.lane);
    return body;
}

// What is sent is there when it has been received: the receiving half takes no time of its own.
Simulator::Body Simulator::net_body(const TaskRecord &sends, const TaskRecord &receives) {
    const RegionRecord &from = t_.regions[operand(sends, 0).region], &to = t_.regions[operand(receives, 0).region];
    const BufferRecord &source = t_.buffers[from.buffer];
    const std::size_t link =
        link_of(t_.locations->end(source.location), t_.locations->end(t_.buffers[to.buffer].location));
    Body body;
    body.amount = static_cast<double>(from.rows * from.cols * bytes_of(source.dtype));
    body.latency = m_.latency[link];
    body.of = rates_.class_of(link, m_.bandwidth[link]);
    rates_.share_link(link, sends.lane);
    return body;
}

// Whether all columns of a region begin at multiples of 16 bytes, if its buffer does.
bool Simulator::is_aligned(const RegionRecord &region) const {
    const BufferRecord &buffer = t_.buffers[region.buffer];
    const std::int64_t item = bytes_of(buffer.dtype);
    const bool begins = (region.row + region.col * buffer.ld) * item % alignment_bytes == 0;
    return begins && (region.cols <= 1 || buffer.ld * item % alignment_bytes == 0);
}

// Whether columns of A, B and C begin at multiples of 16 bytes and have whole multiples of them.
bool Simulator::is_aligned(const TaskRecord &task) const {
    const RegionRecord &c = t_.regions[operand(task, 0).region], &a = t_.regions[operand(task, 1).region],
                       &b = t_.regions[operand(task, 2).region];
    if (!is_aligned(a) || !is_aligned(b) || !is_aligned(c)) return false;
    const std::int64_t step = alignment_bytes / bytes_of(t_.buffers[a.buffer].dtype);
    const bool turned = operand(task, 1).op != 0;
    const std::int64_t missing = (step - c.rows % step) % step;
    const auto spare = [this](const RegionRecord &region) { return spare_rows(region, t_.buffers[region.buffer]); };
    if (missing > 0 && (turned || missing > spare(a) || missing > spare(c))) return false;
    return b.rows % step == 0 && (!turned || a.rows % step == 0);
}

// One call makes small products of one shape, as long as nobody waits or is told between them; none where a rank awaits
// flags, as in the CUDA executor.
void Simulator::bundle_products() {
    bundles_.resize(t_.lanes.size());
    for (Bundled &bundled : bundles_)  // a simulation that was given up may have left some
        bundled.open = false, bundled.others.clear();
    for (std::size_t i = 0; i < t_.tasks.size(); ++i) {
        Bundled &bundled = bundles_[t_.tasks[i].lane];
        if (t_.tasks[i].kind == gemm_task && awaits_flags_[static_cast<std::size_t>(t_.tasks[i].rank)] == 0) {
            add_to_bundle(i);
        } else if (bundled.open) {
            end_bundle(bundled);
        }
    }
    for (Bundled &bundled : bundles_)
        end_bundle(bundled);
}

void Simulator::add_to_bundle(std::size_t task) {
    const TaskRecord &record = t_.tasks[task];
    Bundled &bundled = bundles_[record.lane];
    const RegionRecord &c = t_.regions[operand(record, 0).region], &a = t_.regions[operand(record, 1).region];
    const BufferRecord &written = t_.buffers[c.buffer];
    const std::int64_t k = operand(record, 1).op != 0 ? a.rows : a.cols;
    const double operations = 2.0 * static_cast<double>(c.rows) * static_cast<double>(c.cols) * static_cast<double>(k);
    constexpr std::int64_t apart = std::int64_t{1} << 42;  // elements, from one buffer to the next
    const std::int64_t begin = c.buffer * apart + c.col * written.ld + c.row, end = begin + c.cols * written.ld;
    const bool joins = bundled.open && !issues_[task].waits && may_be_bundled(operations, bundled.operations) &&
                       (begin >= bundled.end || end <= bundled.begin) && same_call(t_.tasks[bundled.first], record);
    if (joins) {
        bundled.others.push_back(task);
        bundled.operations += operations;
        bundled.begin = std::min(bundled.begin, begin);
        bundled.end = std::max(bundled.end, end);
    } else {
        end_bundle(bundled);
        if (!may_be_bundled(operations)) return;
        bundled.open = true;
        bundled.first = task;
        bundled.operations = operations;
        bundled.begin = begin, bundled.end = end;
    }
    if (issues_[task].told != 0) end_bundle(bundled);
}

void Simulator::end_bundle(Bundled &bundled) {
    if (!bundled.others.empty()) {
        const auto count = static_cast<std::int64_t>(bundled.others.size() + 1);
        const TaskRecord &record = t_.tasks[bundled.first];
        Multiplied &all = multiplied_[static_cast<std::size_t>(record.rank)];
        const Body alone = tasks_[bundled.first].body;
        const int dtype = t_.buffers[t_.regions[operand(record, 1).region].buffer].dtype;
        const double longer = m_.products[static_cast<std::size_t>(dtype)].sustained - 1;
        all.alone_s -= static_cast<double>(count) * alone.amount;
        all.longer_s -= static_cast<double>(count) * longer * alone.amount;
        tasks_[bundled.first].body = gemm_body(record, count);
        for (const std::size_t other : bundled.others) {
            tasks_[other].packed = true;
            tasks_[other].body = {};
        }
        bundled.others.clear();
    }
    bundled.open = false;
}

bool Simulator::same_call(const TaskRecord &one, const TaskRecord &other) const {
    if (one.num_operands != other.num_operands) return false;
    for (std::size_t at = 0; at < one.num_operands; ++at) {
        const OperandRecord &x = operand(one, at), &y = operand(other, at);
        const RegionRecord &of_x = t_.regions[x.region], &of_y = t_.regions[y.region];
        if (x.factor != y.factor || x.op != y.op || of_x.rows != of_y.rows || of_x.cols != of_y.cols ||
            t_.buffers[of_x.buffer].ld != t_.buffers[of_y.buffer].ld ||
            t_.buffers[of_x.buffer].dtype != t_.buffers[of_y.buffer].dtype)
            return false;
    }
    return true;
}

Simulator::Body Simulator::gemm_body(const TaskRecord &task, std::int64_t count) {
    const OperandRecord &a = operand(task, 1);
    const RegionRecord &c = t_.regions[operand(task, 0).region], &left = t_.regions[a.region];
    const int dtype = t_.buffers[left.buffer].dtype;
    const double rate = m_.gemm_rate[static_cast<std::size_t>(dtype) * m_.num_ranks + task.rank];
    if (!(rate > 0)) throw std::invalid_argument("the machine has no GEMM rate for a product's type");
    const std::int64_t k = a.op != 0 ? left.rows : left.cols;
    Body body;
    if (c.rows == 0 || c.cols == 0 || k == 0) return body;
    const ProductCost &cost = m_.products[static_cast<std::size_t>(dtype)];
    const auto [operations, occupancy] =
        cost.work(c.rows, c.cols, k, m_.multiprocessors[task.rank], is_aligned(task), count);
    body.demand = 1 - cost.idle_use * (1 - occupancy);  // what another kernel cannot have
    body.copy_share = cost.copy_share;
    body.is_product = true;
    body.sum_wait = cost.sum_wait * cost.block_s(k, m_.multiprocessors[task.rank], rate);
    // C is written once in any case, which is part of `half_depth`.
    const std::int64_t item = bytes_of(t_.buffers[c.buffer].dtype);
    const std::int64_t moved = (task.num_operands > 3 ? 2 * item : item) - bytes_of(accumulator_of(dtype));
    const double extra_bytes =
        static_cast<double>(count * c.rows) * static_cast<double>(c.cols) * static_cast<double>(moved);
    body.amount = cost.seconds(operations, rate, extra_bytes, k);
    Multiplied &all = multiplied_[static_cast<std::size_t>(task.rank)];
    all.alone_s += body.amount;
    all.longer_s += (cost.sustained - 1) * body.amount;
    return body;
}

// A kernel within a device.
Simulator::Body Simulator::transposing_body(const TaskRecord &task) const {
    const RegionRecord &to = t_.regions[operand(task, 0).region];
    const auto bytes = static_cast<double>(to.rows * to.cols * bytes_of(t_.buffers[to.buffer].dtype));
    return {.amount = kernel_s(2 * bytes, m_.transposing_share * m_.combine_rate[task.rank])};
}

Simulator::Body Simulator::combine_body(const TaskRecord &task) const {
    double bytes = 0;
    for (std::size_t o = 0; o < task.num_operands; ++o) {
        const RegionRecord &region = t_.regions[operand(task, o).region];
        bytes += static_cast<double>(region.rows * region.cols * bytes_of(t_.buffers[region.buffer].dtype));
    }
    const int dtype = t_.buffers[t_.regions[operand(task, 0).region].buffer].dtype;
    return {.amount = kernel_s(bytes, (sums_wider(dtype) ? m_.half_combine_rate : m_.combine_rate)[task.rank])};
}

}  // namespace uncut
