// Vectors of records as numpy arrays of bytes, taken over without a copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace uncut {

template <typename Record>
nanobind::ndarray<nanobind::numpy, std::uint8_t, nanobind::ndim<1>> as_bytes(std::vector<Record> &&records) {
    auto owned = std::make_unique<std::vector<Record>>(std::move(records));
    auto *bytes = reinterpret_cast<std::uint8_t *>(owned->data());
    const std::size_t count = owned->size() * sizeof(Record);
    nanobind::capsule owner(owned.release(), [](void *p) noexcept { delete static_cast<std::vector<Record> *>(p); });
    return nanobind::ndarray<nanobind::numpy, std::uint8_t, nanobind::ndim<1>>(bytes, {count}, owner);
}

}  // namespace uncut
