// The contract between Python and the core: the records and codes of planning/schedule.py and planning/lower.py, byte
// for byte, element types, and limits. Each fact stands here once; contract.cpp tells Python, and a test compares all.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace uncut {

enum Kind : std::uint8_t {
    copy_task = 0,
    gemm_task = 1,
    combine_task = 2,
    join_task = 3,
    send_task = 8,
    receive_task = 9
};
enum Factor : std::uint8_t { zero = 0, one = 1, alpha = 2, beta = 3 };
enum OpCode : std::uint8_t { op_n = 0, op_t = 1, op_c = 2 };
inline constexpr int matrix_a = 0, matrix_b = 1, matrix_c = 2, no_matrix = 255;
enum Role : std::uint8_t { user_role = 0, panel_role = 1, cache_role = 2, staging_role = 3 };
enum LaneKind : std::int32_t { compute_lane = 0, copy_lane = 1, result_lane = 2, host_lane = 3, net_lane = 4 };
// Who makes the tasks of a lane: a stream of the device, or the host, whose waits are for words in its memory.
constexpr bool is_of_host(std::int32_t kind) { return kind == host_lane || kind == net_lane; }

// Element types: model/dtypes.py.
enum DTypeCode : std::uint8_t {
    dtype_f64 = 0,
    dtype_f32 = 1,
    dtype_f16 = 2,
    dtype_bf16 = 3,
    dtype_tf32 = 4,
    dtype_c64 = 5,
    dtype_c128 = 6,
    dtype_i8 = 7,
    dtype_i32 = 8,
    dtype_e4m3 = 9,
    dtype_e5m2 = 10
};
struct ElementType {
    const char *name;
    std::int64_t bytes;
    DTypeCode accumulator;  // in which products are summed
};
inline constexpr std::array<ElementType, 11> element_types = {{
    {"f64", 8, dtype_f64},
    {"f32", 4, dtype_f32},
    {"f16", 2, dtype_f32},
    {"bf16", 2, dtype_f32},
    {"tf32", 4, dtype_tf32},
    {"c64", 8, dtype_c64},
    {"c128", 16, dtype_c128},
    {"i8", 1, dtype_i32},
    {"i32", 4, dtype_i32},
    {"e4m3", 1, dtype_f32},
    {"e5m2", 1, dtype_f32},
}};
constexpr std::int64_t bytes_of(int dtype) { return element_types[static_cast<std::size_t>(dtype)].bytes; }
constexpr DTypeCode accumulator_of(int dtype) { return element_types[static_cast<std::size_t>(dtype)].accumulator; }
constexpr bool sums_wider(int dtype) { return accumulator_of(dtype) != dtype; }
constexpr bool is_complex(int dtype) { return dtype == dtype_c64 || dtype == dtype_c128; }

inline constexpr std::size_t max_summands = 8;       // regions that one COMBINE reads
inline constexpr std::size_t max_lanes = 256;        // of one rank
inline constexpr std::int64_t alignment_bytes = 16;  // of columns, for tensor cores to be fed fast
inline constexpr std::int64_t buffer_alignment = 256, column_alignment = 64;  // bytes, of panels and of their columns

// Ends of lanes that are no memory: none (of a compute or host lane), all devices but the lane's own.
inline constexpr std::int32_t no_source = -2, any_device = -3;

enum Space : std::int32_t { device_space = 0, host_space = 1 };
inline constexpr std::int32_t nobody = -1;  // rank of a memory that belongs to a node

struct TaskRecord {
    std::uint8_t kind = 0, pad = 0;
    std::uint16_t num_operands = 0;
    std::int32_t rank = 0, lane = 0, group = -1, first_operand = 0, first_await = 0, num_awaits = 0;
};
struct PieceRecord {
    std::int32_t buffer = 0, turned = 0;
    std::int64_t row = 0, col = 0, rows = 0, cols = 0, top = 0, left = 0;
};
struct OperandRecord {
    std::int32_t region = 0;
    std::uint8_t factor = 0, op = 0;
    std::uint16_t pad = 0;
};
struct RegionRecord {
    std::int32_t buffer = 0, pad = 0;
    std::int64_t row = 0, col = 0, rows = 0, cols = 0;
};
struct LocationRecord {
    std::int32_t space = 0, rank = 0, node = 0, end = 0;
};
struct LaneRecord {
    std::int32_t rank = 0, kind = 0, source = 0, destination = 0;
};
struct BufferRecord {
    std::int32_t location = 0;
    std::uint8_t role = 0, matrix = 0, dtype = 0, medium = 0;
    std::int64_t rows = 0, cols = 0, ld = 0, offset = 0;
};

// Of an operation list: planning/lower.py.
enum OperationCode : std::uint8_t {
    code_copy = 0,
    code_gemm = 1,
    code_combine = 2,
    code_wait_flag = 4,
    code_wait_event = 5,
    code_record = 6,
    code_signal = 7,
    code_send = 8,
    code_receive = 9,
};
struct OperationRecord {
    std::uint8_t code = 0, in_host = 0;
    std::uint16_t num_operands = 0;
    std::int32_t lane = 0, task = 0, slot = -1;
    std::uint32_t value = 0;
    std::int32_t peer = -1, first_operand = -1;
};
struct BoundOperandRecord {
    std::int32_t buffer = 0;
    std::uint8_t dtype = 0, factor = 0, op = 0;
    std::uint8_t spare_rows = 0;  // rows behind the region that belong to nobody
    std::int64_t offset = 0, rows = 0, cols = 0, ld = 0;
};
static_assert(sizeof(TaskRecord) == 28 && sizeof(OperandRecord) == 8 && sizeof(RegionRecord) == 40 &&
              sizeof(LaneRecord) == 16 && sizeof(LocationRecord) == 16 && sizeof(BufferRecord) == 40 &&
              sizeof(OperationRecord) == 28 && sizeof(BoundOperandRecord) == 40 && sizeof(PieceRecord) == 56);

// Some tasks that follow one another, and the tables that they point into.
struct TaskTables {
    std::span<const TaskRecord> tasks;
    std::span<const OperandRecord> operands;
    std::span<const RegionRecord> regions;
    std::span<const std::int32_t> awaits;  // tasks, by their place in the global order
};

// Rows of a panel's padding behind a region, which belong to nobody: a product may compute so many more. At most 255.
inline std::uint8_t spare_rows(const RegionRecord &region, const BufferRecord &buffer) {
    const bool at_end = buffer.role != user_role && region.row + region.rows == buffer.rows;
    return at_end ? static_cast<std::uint8_t>(std::clamp<std::int64_t>(buffer.ld - buffer.rows, 0, 255)) : 0;
}

}  // namespace uncut
