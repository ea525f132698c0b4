// The contract between Python and the core: records and codes of schedules and operation lists, element types, and
// limits. Each fact stands here once; contract.cpp tells Python, and a test compares what has to stand there again.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace uncut {

// What a task does. Operand 0 is the region that it writes; the others are those that it reads.
//
// COPY reads one region of the same shape. With op T it reads one stored the other way round, within host memory or
// within the issuing rank's device. GEMM reads op(A), op(B) and, if it accumulates, the region it writes: write :=
// f_A op(A) op(B) + f_C C. There f_A is the factor of operand 1, operand 2 carries `one` and f_C is the factor of
// operand 3 (absent: the written region is not read). COMBINE writes the sum of factor × region over its reads,
// converted to the written buffer's type and rounded once; without reads it writes zeros. If op of operand 0 is a
// triangle of C, it leaves what is beyond that as it was. An operand whose factor is 0 at run time is not read, so NaN
// stays out; with an epilogue it writes f(scale × the sum without beta C + bias + beta C). JOIN has no operands: it
// awaits many and is awaited by many. SEND and RECV are the halves of a copy between nodes, one behind the other. SEND
// has the region that it reads, RECV the one of equal shape that it writes, and awaits its SEND. No other await is from
// node to node.
enum Kind : std::uint8_t {
    copy_task = 0,
    gemm_task = 1,
    combine_task = 2,
    join_task = 3,
    send_task = 8,
    receive_task = 9
};
// A scalar factor as a symbol, so that new values of alpha and beta need no new schedule.
enum Factor : std::uint8_t { zero = 0, one = 1, alpha = 2, beta = 3 };
// Whether an operand is used as stored, transposed, or conjugated too (C: factors of complex products alone). Of what
// is written, whether all of it is, or a triangle of C with the diagonal, without imaginary parts there if it is real.
// Or all of it is with an epilogue, whose vectors have an element for each row, or column, of C.
enum OpCode : std::uint8_t {
    op_n = 0,
    op_t,
    op_c,
    op_lower,
    op_upper,
    op_lower_real,
    op_upper_real,
    op_epilogue_rows,
    op_epilogue_cols
};
constexpr bool is_triangle(int op) { return op >= op_lower && op <= op_upper_real; }
constexpr bool is_epilogue(int op) { return op == op_epilogue_rows || op == op_epilogue_cols; }
// The function of an epilogue (model/epilogue.py).
enum Activation : std::int64_t { no_activation = 0, relu = 1, gelu = 2 };
// Of a region that is written with such an op, what its `diagonal` says; `diagonal`: that of C.
constexpr std::int64_t place_of(int op, std::int64_t row, std::int64_t col, std::int64_t diagonal) {
    return op == op_n ? 0 : op == op_epilogue_rows ? row : op == op_epilogue_cols ? col : diagonal + row - col;
}
constexpr bool has_real_diagonal(int op) { return op == op_lower_real || op == op_upper_real; }
// Above the op of a square A or B of a GEMM, in an operation list: which triangle is read, as it is stored. A diagonal
// of ones is not read. The kind says what is beyond it (model/form.py).
inline constexpr int op_bits = 7, form_upper = 8, form_unit = 16, form_kind = 32;
enum FormKind { no_form = 0, symmetric = 1, hermitian = 2, triangular = 3, inverse = 4 };
constexpr int kind_of_form(int op) { return op / form_kind; }
// Whether a triangle has an element so many rows below the diagonal.
constexpr bool is_in_triangle(int op, std::int64_t below) {
    return op == op_lower || op == op_lower_real ? below >= 0 : below <= 0;
}
inline constexpr int matrix_a = 0, matrix_b = 1, matrix_c = 2, no_matrix = 255;
// What a buffer is for: a matrix of the caller, one block of a matrix in a SoftBuf, copies kept for later readers, what
// is passed through.
enum Role : std::uint8_t { user_role = 0, panel_role = 1, cache_role = 2, staging_role = 3 };
// A lane becomes one stream of the device, one of the host a queue of the rank's worker.
//
// Compute lanes carry GEMM and COMBINE, copy lanes copies. Result lanes carry copies between devices of what was
// computed, so that those which await products hold up no fetch over the same link. Where a device serves its copies
// one after another (`Machine.serial_copies`), those to all other devices share a lane of either kind. Host lanes carry
// the copies within host memory, which no stream makes without a thread of the host. Net lanes carry what one rank
// sends to one other, or receives from it.
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
    std::int32_t rank = 0, lane = 0;  // `lane`: index into lanes
    std::int32_t group = -1;          // ties the parts and hops of one fetch; -1 for none
    std::int32_t first_operand = 0, first_await = 0, num_awaits = 0;
};
// What a caller's matrix has where: holds at the start, and of C what must be there at the end.
struct PieceRecord {
    std::int32_t buffer = 0;                            // one of a caller's matrix
    std::int32_t turned = 0;                            // 1: the buffer has the transposed rectangle
    std::int64_t row = 0, col = 0, rows = 0, cols = 0;  // the rectangle of the buffer
    std::int64_t top = 0, left = 0;                     // row and column of the matrix that its first element has
};
struct OperandRecord {
    std::int32_t region = 0;
    std::uint8_t factor = 0, op = 0;
    std::uint16_t pad = 0;
    // Of a triangle: how far the region's first element is below the diagonal of C. With an epilogue: its row, or its
    // column, in C.
    std::int64_t diagonal = 0;
};
struct RegionRecord {
    std::int32_t buffer = 0, pad = 0;
    std::int64_t row = 0, col = 0, rows = 0, cols = 0;
};
struct LocationRecord {
    std::int32_t space = 0, rank = 0, node = 0, end = 0;
};
struct LaneRecord {
    std::int32_t rank = 0, kind = 0;  // whose device issues it
    // Copy, result: locations, of host memory the node's, or to `any_device`; net: the ranks that send and receive.
    // Compute, host: `no_source`, and the number of the lane on its rank.
    std::int32_t source = 0, destination = 0;
};
struct BufferRecord {
    std::int32_t location = 0;  // index into locations
    std::uint8_t role = 0, matrix = 0, dtype = 0;
    std::uint8_t medium = 0;                  // 1 for a matrix of the caller in a file, 0 for memory
    std::int64_t rows = 0, cols = 0, ld = 0;  // elements
    std::int64_t offset = 0;  // bytes from the start of the owner's SoftBuf in that memory; -1 for the caller's
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
    std::int64_t offset = 0, rows = 0, cols = 0, ld = 0, diagonal = 0;
};
static_assert(sizeof(TaskRecord) == 28 && sizeof(OperandRecord) == 16 && sizeof(RegionRecord) == 40 &&
              sizeof(LaneRecord) == 16 && sizeof(LocationRecord) == 16 && sizeof(BufferRecord) == 40 &&
              sizeof(OperationRecord) == 28 && sizeof(BoundOperandRecord) == 48 && sizeof(PieceRecord) == 56);

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
