// Makes an executor's copies: each alone, several within a device as one kernel, or several between memories as one.
#include <algorithm>
#include <array>
#include <optional>

#include "cuda_executor_build.hpp"

namespace uncut::cuda {
namespace {

constexpr unsigned packing_blocks_per_multiprocessor = 8;

// Whether two sets of lines may have a byte in common; those of different distances are taken to if their ends do.
bool meet(Address x, std::int64_t x_apart, const PackedCopy &of_x, Address y, std::int64_t y_apart,
          const PackedCopy &of_y) {
    const auto end = [](Address at, std::int64_t apart, const PackedCopy &copy) {
        return at + static_cast<Address>(apart * (copy.lines - 1) + copy.width);
    };
    if (end(x, x_apart, of_x) <= y || end(y, y_apart, of_y) <= x) return false;
    if (x_apart != y_apart || x_apart == 0) return true;
    const auto apart = static_cast<Address>(x_apart), from_x = (y % apart + apart - x % apart) % apart;
    return from_x < static_cast<Address>(of_x.width) || (apart - from_x) % apart < static_cast<Address>(of_y.width);
}

}  // namespace

Executor::Copy Executor::copy_of(const Program &program, const Operation &operation) {
    const Operand &to = program.operands[operation.first_operand];
    const Operand &from = program.operands[operation.first_operand + 1];
    const bool turns = transposes(program, operation);
    const std::int64_t size = bytes_of(to.dtype);
    Copy copy{};
    copy.bytes = static_cast<std::size_t>(to.rows * to.cols * size);
    copy.contiguous = !turns && (to.cols <= 1 || (to.ld == to.rows && from.ld == from.rows));
    Memcpy2D &shape = copy.shape;
    shape.width_bytes = static_cast<std::size_t>(to.rows * size);
    shape.height = static_cast<std::size_t>(to.cols);
    shape.src_pitch = static_cast<std::size_t>(from.ld * size);
    shape.dst_pitch = static_cast<std::size_t>(to.ld * size);
    shape.src_memory_type = program.in_host[from.buffer] != 0 ? memory_type_host : memory_type_device;
    shape.dst_memory_type = program.in_host[to.buffer] != 0 ? memory_type_host : memory_type_device;
    shape.src_device = address_of(program, from);
    shape.src_host = reinterpret_cast<const void *>(shape.src_device);
    shape.dst_device = address_of(program, to);
    shape.dst_host = reinterpret_cast<void *>(shape.dst_device);
    return copy;
}

void Executor::add_copy(const Program &program, const Operation &operation) {
    copies_.push_back(copy_of(program, operation));
    const Memcpy2D &shape = copies_.back().shape;
    const auto pitch = static_cast<std::int64_t>(std::max(shape.src_pitch, shape.dst_pitch));
    if (!copies_.back().contiguous && pitch > device_->max_pitch_bytes())
        refuse(operation, "a leading dimension of " + std::to_string(pitch) +
                              " bytes exceeds the device's largest pitch of " +
                              std::to_string(device_->max_pitch_bytes()) + " bytes");
}

// The step of the copy that was added last is the next one.
void Executor::pack(const Program &program, const Operation &operation) {
    const LaneRecord &ends = program.lanes[operation.lane];
    Lane &lane = lanes_[operation.lane];
    Pack &pack = lane.packed.pack;
    Copy &copy = copies_.back();
    const auto bytes = static_cast<std::int64_t>(copy.bytes);
    const Operand *operands = &program.operands[operation.first_operand];
    const Operand &to = operands[0];
    const PackedCopy one = packed_copy(copy.shape.dst_device, copy.shape.src_device, to.rows, to.cols, to.ld,
                                       operands[1].ld, bytes_of(to.dtype));
    if (goes_between(ends)) {
        if (bytes > 0) add_to_series(lane, one, operands);
        return;
    }
    if (!Pack::may_have(ends, bytes)) {
        end_pack(program, lane);
        return;
    }
    // In a kernel they have no order: none may write what another one reads or writes.
    const auto beside = [&](const PackedCopy &other) {
        return !meet(one.to, one.to_apart, one, other.to, other.to_apart, other) &&
               !meet(one.to, one.to_apart, one, other.from, other.from_apart, other) &&
               !meet(one.from, one.from_apart, one, other.to, other.to_apart, other);
    };
    if (pack.takes(bytes) && std::ranges::all_of(lane.packed.all, beside)) {
        pack.add(bytes);
        copy.packed = true;
    } else {
        end_pack(program, lane);
        pack.begin(steps_.size(), bytes);
        lane.packed.first_payload = static_cast<std::uint32_t>(copies_.size() - 1);
    }
    lane.packed.all.push_back(one);
}

void Executor::end_pack(const Program &program, Lane &lane) {
    PackedCopies &packed = lane.packed;
    if (packed.pack.count > 1) {
        Combine made{};
        made.function = kernel_of(program, packing);
        made.copy_bytes = copies_[packed.first_payload].bytes;
        made.arguments.destination = packed_.size() * sizeof(PackedCopy);
        made.arguments.rows = static_cast<std::int64_t>(packed.all.size());
        made.arguments.cols = 1;
        made.block_x = threads_per_block;
        made.block_y = 1;
        const auto blocks = static_cast<unsigned>(packing_blocks_per_multiprocessor * device_->multiprocessors());
        made.grid_y = static_cast<unsigned>(packed.all.size());
        made.grid_x = std::max(1U, blocks / made.grid_y);
        packed_.insert(packed_.end(), packed.all.begin(), packed.all.end());
        combines_.push_back(made);
        packs_.push_back(static_cast<std::uint32_t>(combines_.size() - 1));
        Step &first = steps_[packed.pack.first];
        first.code = code_combine;
        first.payload = packs_.back();
    }
    packed = {};
}

// Between devices, and between one and the host: copy engines make them, each at the full rate.
void Executor::add_to_series(Lane &lane, const PackedCopy &one, const Operand *ends) {
    const std::array<Address, 2> allocations{allocation_of(ends[0].buffer, one.to),
                                             allocation_of(ends[1].buffer, one.from)};
    const std::optional<Series> longer = lane.series.with(one, device_->max_pitch_bytes());
    // In one allocation a later one could read what an earlier one writes.
    if (longer && allocations == lane.allocations && allocations[0] != allocations[1]) {
        lane.series = *longer;
        lane.others.push_back(copies_.size() - 1);
        return;
    }
    end_series(lane);
    lane.series.begin(copies_.size() - 1, one);
    lane.allocations = allocations;
}

// Parts of a matrix are buffers of their own, and a driver may refuse a copy that leaves an allocation.
Address Executor::allocation_of(std::int32_t buffer, Address within) {
    const auto [known, is_new] = allocations_.try_emplace(buffer, 0);
    if (is_new) known->second = device_->allocation_of(within);
    return known->second;
}

void Executor::end_series(Lane &lane) {
    const Series &series = lane.series;
    if (series.pays()) {
        for (const std::size_t other : lane.others)
            copies_[other].packed = true;
        Copy &first = copies_[series.first];
        Memcpy3D made{};
        made.src_memory_type = first.shape.src_memory_type;
        made.src_host = first.shape.src_host;
        made.src_device = first.shape.src_device;
        made.src_pitch = static_cast<std::size_t>(series.from().pitch);
        made.src_height = static_cast<std::size_t>(series.from().height);
        made.dst_memory_type = first.shape.dst_memory_type;
        made.dst_host = first.shape.dst_host;
        made.dst_device = first.shape.dst_device;
        made.dst_pitch = static_cast<std::size_t>(series.to().pitch);
        made.dst_height = static_cast<std::size_t>(series.to().height);
        made.width_bytes = static_cast<std::size_t>(series.one.width);
        made.height = static_cast<std::size_t>(series.height());
        made.depth = static_cast<std::size_t>(series.depth());
        first.series = static_cast<std::int32_t>(series_.size());
        series_.push_back(made);
    }
    lane.series.end();
    lane.others.clear();
}

void Executor::upload_packs() {
    if (packed_.empty()) return;
    table_ = device_->keep(packed_.data(), packed_.size() * sizeof(PackedCopy));
    for (const std::uint32_t one : packs_)
        combines_[one].arguments.destination += reinterpret_cast<Address>(table_.get());
}

}  // namespace uncut::cuda
