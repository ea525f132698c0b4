// Tells Python the contract as the core has it: records and enumerations of schedules, and what a test compares.
#include <nanobind/nanobind.h>

#include <string>
#include <type_traits>

#include "for_each.hpp"
#include "kblocks_request.hpp"
#include "records.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

// Name and type of each field, as numpy takes them for a type without gaps.
#define FIELD(record, field) fields.append(nb::make_tuple(#field, format_of<decltype(record::field)>()));
#define BYTES(record, field) +sizeof(record::field)
#define LAYOUT(name, record, ...)                                                                                      \
    {                                                                                                                  \
        nb::list fields;                                                                                               \
        FOR_EACH(FIELD, record, __VA_ARGS__)                                                                           \
        static_assert(FOR_EACH(BYTES, record, __VA_ARGS__) == sizeof(record));                                         \
        found[name] = fields;                                                                                          \
    }

template <typename Integer>
nb::str format_of() {
    return nb::str(((std::is_signed_v<Integer> ? "<i" : "<u") + std::to_string(sizeof(Integer))).c_str());
}

nb::dict records() {
    nb::dict found;
    LAYOUT("tasks", TaskRecord, kind, pad, num_operands, rank, lane, group, first_operand, first_await, num_awaits)
    LAYOUT("operands", OperandRecord, region, factor, op, pad, diagonal)
    LAYOUT("regions", RegionRecord, buffer, pad, row, col, rows, cols)
    LAYOUT("locations", LocationRecord, space, rank, node, end)
    LAYOUT("lanes", LaneRecord, rank, kind, source, destination)
    LAYOUT("buffers", BufferRecord, location, role, matrix, dtype, medium, rows, cols, ld, offset)
    LAYOUT("pieces", PieceRecord, buffer, turned, row, col, rows, cols, top, left)
    LAYOUT("operations", OperationRecord, code, in_host, num_operands, lane, task, slot, value, peer, first_operand)
    LAYOUT("bound_operands", BoundOperandRecord, buffer, dtype, factor, op, spare_rows, offset, rows, cols, ld,
           diagonal)
    return found;
}

#undef LAYOUT
#undef BYTES
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
    found["Matrix"] = codes(Name{"A", matrix_a}, Name{"B", matrix_b}, Name{"C", matrix_c}, Name{"NONE", no_matrix});
    found["Space"] = codes(Name{"DEVICE", device_space}, Name{"HOST", host_space});
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
    found["op_bits"] = op_bits;
    found["forms"] = nb::make_tuple(form_upper, form_unit, form_kind);
    return found;
}

}  // namespace

void bind_contract(nb::module_ &m) {
    nb::enum_<Kind>(m, "Kind", nb::is_arithmetic(), "What a task does.")
        .value("COPY", copy_task)
        .value("GEMM", gemm_task)
        .value("COMBINE", combine_task)
        .value("JOIN", join_task)
        .value("SEND", send_task)
        .value("RECV", receive_task);
    nb::enum_<Factor>(m, "Factor", nb::is_arithmetic(), "A scalar factor as a symbol.")
        .value("ZERO", zero)
        .value("ONE", one)
        .value("ALPHA", alpha)
        .value("BETA", beta);
    nb::enum_<OpCode>(m, "Op", nb::is_arithmetic(),
                      "Whether an operand is used as stored, transposed, or conjugated too; of one that is written, "
                      "which triangle of C is, and whether with a real diagonal, or that it has an epilogue.")
        .value("N", op_n)
        .value("T", op_t)
        .value("C", op_c)
        .value("LOWER", op_lower)
        .value("UPPER", op_upper)
        .value("LOWER_REAL", op_lower_real)
        .value("UPPER_REAL", op_upper_real)
        .value("EPILOGUE_ROWS", op_epilogue_rows)
        .value("EPILOGUE_COLS", op_epilogue_cols);
    nb::enum_<Role>(m, "Role", nb::is_arithmetic(), "What a buffer is for.")
        .value("USER", user_role)
        .value("PANEL", panel_role)
        .value("CACHE", cache_role)
        .value("STAGING", staging_role);
    nb::enum_<LaneKind>(m, "LaneKind", nb::is_arithmetic(), "What a lane carries.")
        .value("COMPUTE", compute_lane)
        .value("COPY", copy_lane)
        .value("RESULT", result_lane)
        .value("HOST", host_lane)
        .value("NET", net_lane);
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
        "Return records ((field, type) of each), enumerations, element types and limits.");
}

}  // namespace uncut
