// Tells Python the contract as the core has it, so that a test can compare every value, and the rules that it has
// alone.
#include <nanobind/nanobind.h>

#include <cstddef>
#include <stdexcept>

#include "records.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

#define FIELD(record, field) nb::make_tuple(#field, offsetof(record, field), sizeof(record::field))

template <typename... Fields>
nb::tuple layout(std::size_t bytes, Fields... fields) {
    return nb::make_tuple(bytes, nb::make_tuple(fields...));
}

template <typename... Names>
nb::dict codes(Names... names) {
    nb::dict found;
    ((found[nb::str(names.first)] = nb::int_(static_cast<int>(names.second))), ...);
    return found;
}

nb::dict records() {
    nb::dict found;
    found["tasks"] =
        layout(sizeof(TaskRecord), FIELD(TaskRecord, kind), FIELD(TaskRecord, pad), FIELD(TaskRecord, num_operands),
               FIELD(TaskRecord, rank), FIELD(TaskRecord, lane), FIELD(TaskRecord, group),
               FIELD(TaskRecord, first_operand), FIELD(TaskRecord, first_await), FIELD(TaskRecord, num_awaits));
    found["operands"] = layout(sizeof(OperandRecord), FIELD(OperandRecord, region), FIELD(OperandRecord, factor),
                               FIELD(OperandRecord, op), FIELD(OperandRecord, pad));
    found["regions"] =
        layout(sizeof(RegionRecord), FIELD(RegionRecord, buffer), FIELD(RegionRecord, pad), FIELD(RegionRecord, row),
               FIELD(RegionRecord, col), FIELD(RegionRecord, rows), FIELD(RegionRecord, cols));
    found["locations"] = layout(sizeof(LocationRecord), FIELD(LocationRecord, space), FIELD(LocationRecord, rank),
                                FIELD(LocationRecord, node), FIELD(LocationRecord, end));
    found["lanes"] = layout(sizeof(LaneRecord), FIELD(LaneRecord, rank), FIELD(LaneRecord, kind),
                            FIELD(LaneRecord, source), FIELD(LaneRecord, destination));
    found["buffers"] = layout(sizeof(BufferRecord), FIELD(BufferRecord, location), FIELD(BufferRecord, role),
                              FIELD(BufferRecord, matrix), FIELD(BufferRecord, dtype), FIELD(BufferRecord, medium),
                              FIELD(BufferRecord, rows), FIELD(BufferRecord, cols), FIELD(BufferRecord, ld),
                              FIELD(BufferRecord, offset));
    found["pieces"] = layout(sizeof(PieceRecord), FIELD(PieceRecord, buffer), FIELD(PieceRecord, turned),
                             FIELD(PieceRecord, row), FIELD(PieceRecord, col), FIELD(PieceRecord, rows),
                             FIELD(PieceRecord, cols), FIELD(PieceRecord, top), FIELD(PieceRecord, left));
    found["operations"] =
        layout(sizeof(OperationRecord), FIELD(OperationRecord, code), FIELD(OperationRecord, in_host),
               FIELD(OperationRecord, num_operands), FIELD(OperationRecord, lane), FIELD(OperationRecord, task),
               FIELD(OperationRecord, slot), FIELD(OperationRecord, value), FIELD(OperationRecord, peer),
               FIELD(OperationRecord, first_operand));
    found["bound_operands"] =
        layout(sizeof(BoundOperandRecord), FIELD(BoundOperandRecord, buffer), FIELD(BoundOperandRecord, dtype),
               FIELD(BoundOperandRecord, factor), FIELD(BoundOperandRecord, op), FIELD(BoundOperandRecord, room),
               FIELD(BoundOperandRecord, offset), FIELD(BoundOperandRecord, rows), FIELD(BoundOperandRecord, cols),
               FIELD(BoundOperandRecord, ld));
    return found;
}

#undef FIELD

nb::dict enumerations() {
    using Name = std::pair<const char *, int>;
    nb::dict found;
    found["Kind"] = codes(Name{"COPY", copy_task}, Name{"GEMM", gemm_task}, Name{"COMBINE", combine_task},
                          Name{"JOIN", join_task}, Name{"SEND", send_task}, Name{"RECV", receive_task});
    found["Factor"] = codes(Name{"ZERO", zero}, Name{"ONE", one}, Name{"ALPHA", alpha}, Name{"BETA", beta});
    found["Op"] = codes(Name{"N", op_n}, Name{"T", op_t}, Name{"C", op_c});
    found["Matrix"] = codes(Name{"A", matrix_a}, Name{"B", matrix_b}, Name{"C", matrix_c}, Name{"NONE", no_matrix});
    found["Role"] = codes(Name{"USER", user_role}, Name{"PANEL", panel_role}, Name{"CACHE", cache_role},
                          Name{"STAGING", staging_role});
    found["Space"] = codes(Name{"DEVICE", device_space}, Name{"HOST", host_space});
    found["LaneKind"] = codes(Name{"COMPUTE", compute_lane}, Name{"COPY", copy_lane}, Name{"RESULT", result_lane},
                              Name{"HOST", host_lane});
    found["Code"] = codes(Name{"COPY", code_copy}, Name{"GEMM", code_gemm}, Name{"COMBINE", code_combine},
                          Name{"WAIT_FLAG", code_wait_flag}, Name{"WAIT_EVENT", code_wait_event},
                          Name{"RECORD", code_record}, Name{"SIGNAL", code_signal});
    return found;
}

nb::list types() {
    nb::list found;
    for (const ElementType &type : element_types)
        found.append(nb::make_tuple(type.name, type.bytes, element_types[type.accumulator].name));
    return found;
}

nb::dict limits() {
    nb::dict found;
    found["max_summands"] = max_summands;
    found["max_lanes"] = max_lanes;
    found["alignment_bytes"] = alignment_bytes;
    found["no_source"] = no_source;
    found["any_device"] = any_device;
    found["nobody"] = nobody;
    return found;
}

}  // namespace

void bind_contract(nb::module_ &m) {
    m.def(
        "contract",
        [] {
            nb::dict all;
            all["records"] = records();
            all["enumerations"] = enumerations();
            all["types"] = types();
            all["limits"] = limits();
            return all;
        },
        "Return records (bytes, (field, offset, bytes) of each), enumerations, element types and limits.");
}

}  // namespace uncut
