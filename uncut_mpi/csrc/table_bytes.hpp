// Tables between numpy and here, without a copy: vectors as arrays, of bytes where they are records, and arrays of any
// type as spans.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "pieces.hpp"

namespace uncut {

template <typename Element, typename Record>
nanobind::ndarray<nanobind::numpy, Element, nanobind::ndim<1>> as_array(std::vector<Record> &&records) {
    auto owned = std::make_unique<std::vector<Record>>(std::move(records));
    auto *elements = reinterpret_cast<Element *>(owned->data());
    const std::size_t count = owned->size() * sizeof(Record) / sizeof(Element);
    nanobind::capsule owner(owned.release(), [](void *p) noexcept { delete static_cast<std::vector<Record> *>(p); });
    return nanobind::ndarray<nanobind::numpy, Element, nanobind::ndim<1>>(elements, {count}, owner);
}

template <typename Record>
auto as_bytes(std::vector<Record> &&records) {
    return as_array<std::uint8_t>(std::move(records));
}

// (tasks, operands, regions, awaits, lanes) of a schedule as bytes, and what else is returned with them.
template <typename Tables, typename... More>
auto arrays_of(Tables &&tables, More &&...more) {
    return std::make_tuple(as_bytes(std::move(tables.tasks)), as_bytes(std::move(tables.operands)),
                           as_bytes(std::move(tables.regions)), as_bytes(std::move(tables.awaits)),
                           as_bytes(std::move(tables.lanes)), std::forward<More>(more)...);
}

// (start, end) of every task of a simulated run, and by rank what products take longer at the power limit (s).
template <typename Times>
auto times_of(Times times) {
    return std::make_tuple(as_array<double>(std::move(times.start)), as_array<double>(std::move(times.end)),
                           as_array<double>(std::move(times.throttled)));
}

// What an array holds, contiguous, for as long as this lives.
class ArrayBytes {
  public:
    explicit ArrayBytes(nanobind::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nanobind::python_error();
    }
    ~ArrayBytes() { PyBuffer_Release(&view_); }
    ArrayBytes(const ArrayBytes &) = delete;
    ArrayBytes &operator=(const ArrayBytes &) = delete;

    template <typename Record>
    std::span<const Record> records() const {
        const auto size = static_cast<std::size_t>(view_.len);
        if (size % sizeof(Record) != 0) throw std::invalid_argument("a table ends inside a record");
        if (reinterpret_cast<std::uintptr_t>(view_.buf) % alignof(Record) != 0)
            throw std::invalid_argument("a table does not begin where its records may");
        return {static_cast<const Record *>(view_.buf), size / sizeof(Record)};
    }

  private:
    Py_buffer view_{};
};

// From arrays of records.
inline void place(PlacedProblem &problem, nanobind::handle locations, nanobind::handle buffers,
                  nanobind::handle pieces) {
    problem.place(ArrayBytes(locations).records<LocationRecord>(), ArrayBytes(buffers).records<BufferRecord>(),
                  ArrayBytes(pieces).records<PieceRecord>());
}

// A schedule's tables, held for as long as this lives.
class HeldTables {
  public:
    HeldTables(nanobind::handle tasks, nanobind::handle operands, nanobind::handle regions, nanobind::handle awaits,
               nanobind::handle buffers, nanobind::handle lanes, nanobind::handle locations)
        : tasks_(tasks),
          operands_(operands),
          regions_(regions),
          awaits_(awaits),
          buffers_(buffers),
          lanes_(lanes),
          locations_(ArrayBytes(locations).records<LocationRecord>()) {}

    ScheduleTables view() const {
        return {{tasks_.records<TaskRecord>(), operands_.records<OperandRecord>(), regions_.records<RegionRecord>(),
                 awaits_.records<std::int32_t>()},
                buffers_.records<BufferRecord>(),
                lanes_.records<LaneRecord>(),
                &locations_};
    }

  private:
    ArrayBytes tasks_, operands_, regions_, awaits_, buffers_, lanes_;
    Locations locations_;
};

}  // namespace uncut
