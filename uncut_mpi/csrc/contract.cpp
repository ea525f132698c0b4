// Tells Python the contract as the core has it, so that a test can compare every value, and the rules that it has
// alone.
#include <nanobind/nanobind.h>

#include <cstddef>
#include <stdexcept>

#include "for_each.hpp"
#include "kblocks_request.hpp"
#include "records.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

// Name, offset and bytes of each field, behind the bytes of a record.
#define FIELD(record, field) fields.append(nb::make_tuple(#field, offsetof(record, field), sizeof(record::field)));
#define LAYOUT(name, record, ...)                                                                                      \
    {                                                                                                                  \
        nb::list fields;                                                                                               \
        FOR_EACH(FIELD, record, __VA_ARGS__)                                                                           \
        found[name] = nb::make_tuple(sizeof(record), nb::tuple(fields));                                               \
    }

nb::dict records() {
    nb::dict found;
    LAYOUT("tasks", TaskRecord, kind, pad, num_operands, rank, lane, group, first_operand, first_await, num_awaits)
    LAYOUT("operands", OperandRecord, region, factor, op, pad)
    LAYOUT("regions", RegionRecord, buffer, pad, row, col, rows, cols)
    LAYOUT("locations", LocationRecord, space, rank, node, end)
    LAYOUT("lanes", LaneRecord, rank, kind, source, destination)
    LAYOUT("buffers", BufferRecord, location, role, matrix, dtype, medium, rows, cols, ld, offset)
    LAYOUT("pieces", PieceRecord, buffer, turned, row, col, rows, cols, top, left)
    LAYOUT("operations", OperationRecord, code, in_host, num_operands, lane, task, slot, value, peer, first_operand)
    LAYOUT("bound_operands", BoundOperandRecord, buffer, dtype, factor, op, spare_rows, offset, rows, cols, ld)
    return found;
}

#undef LAYOUT
#undef FIELD

template <typename... Names>
nb::dict codes(Names... names) {
    nb::dict found;
    ((found[nb::str(names.first)] = nb::int_(static_cast<int>(names.second))), ...);
    return found;
}

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
                              Name{"HOST", host_lane}, Name{"NET", net_lane});
    found["Code"] =
        codes(Name{"COPY", code_copy}, Name{"GEMM", code_gemm}, Name{"COMBINE", code_combine},
              Name{"WAIT_FLAG", code_wait_flag}, Name{"WAIT_EVENT", code_wait_event}, Name{"RECORD", code_record},
              Name{"SIGNAL", code_signal}, Name{"SEND", code_send}, Name{"RECV", code_receive});
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
    found["buffer_alignment"] = buffer_alignment;
    found["column_alignment"] = column_alignment;
    found["halvings"] = halvings;
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
