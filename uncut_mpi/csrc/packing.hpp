// Copies or products of one lane that follow one another and are made together: where the first is issued, since the
// later ones wait for nothing that it does not. Issued one by one each takes some us (docs/performance.md, 2026-11-26
// and 2026-11-27).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "records.hpp"

namespace uncut {

// Where a copy reads and writes: bytes, in lines of so many that are so far apart.
struct PackedCopy {
    std::uint64_t to, from;
    std::int64_t to_apart, from_apart, lines, width;
};
static_assert(sizeof(PackedCopy) == 48);  // the kernel declares the same

// A region's place, and where it comes from: what is contiguous at both ends is one line.
inline PackedCopy packed_copy(std::uint64_t to, std::uint64_t from, std::int64_t rows, std::int64_t cols,
                              std::int64_t to_ld, std::int64_t from_ld, std::int64_t itemsize) {
    const bool contiguous = cols <= 1 || (rows == to_ld && rows == from_ld);
    return {to,
            from,
            to_ld * itemsize,
            from_ld * itemsize,
            contiguous ? 1 : cols,
            (contiguous ? rows * cols : rows) * itemsize};
}

// Whether a lane's copies may be in a series: they go from one memory to another.
inline bool goes_between(const LaneRecord &lane) {
    return (lane.kind == copy_lane || lane.kind == result_lane) && lane.source != lane.destination;
}

// One of more bytes is issued by itself. So many bytes in one kernel hold up no product for longer than some 0.1 ms.
constexpr std::int64_t most_bytes_of_one = std::int64_t{2} << 20, most_bytes_packed = std::int64_t{128} << 20;
constexpr std::size_t most_packed = 512;  // each is compared with all others

// Small ones within a device, which one kernel makes.
struct Pack {
    std::size_t first = 0;  // its task or step
    std::int64_t bytes = 0;
    std::size_t count = 0;

    // Whether a copy within a device may be in one.
    static bool may_have(const LaneRecord &lane, std::int64_t its) {
        return lane.kind == copy_lane && lane.source == lane.destination && its > 0 && its <= most_bytes_of_one;
    }
    bool takes(std::int64_t more) const {
        return count > 0 && count < most_packed && bytes + more <= most_bytes_packed;
    }
    void begin(std::size_t at, std::int64_t its) { *this = {at, its, 1}; }
    void add(std::int64_t more) { bytes += more, ++count; }
    void end() { count = 0; }
};

// What a driver takes for a layer of a copy in three dimensions, and so many in the time of a call (2026-11-27).
constexpr double layer_s = 4e-9;
constexpr std::int64_t layers_of_a_call = 400;

// Alike ones between two memories, each as far behind the one before it where it reads and where it writes: runs of a
// matrix that is dealt in turn. One copy in three dimensions makes them all, as fast as one without gaps.
struct Series {
    // What a copy in three dimensions has at one end: lines so far apart, and so many from one layer to the next.
    struct End {
        std::int64_t pitch = 0, height = 0;
    };

    std::size_t first = 0;  // its task or payload
    std::size_t count = 0;
    PackedCopy one{};  // the first
    std::int64_t to_step = 0, from_step = 0;

    void begin(std::size_t at, const PackedCopy &copy) { *this = {at, 1, copy, 0, 0}; }
    void end() { count = 0; }

    // The same and the next copy, if that can be one of them. All are to lie in one allocation at each end.
    std::optional<Series> with(const PackedCopy &next, std::int64_t most_pitch) const {
        if (count == 0 || next.width != one.width || next.lines != one.lines) return {};
        if (next.lines > 1 && (next.to_apart != one.to_apart || next.from_apart != one.from_apart)) return {};
        Series longer = *this;
        if (count == 1) {
            longer.to_step = static_cast<std::int64_t>(next.to - one.to);
            longer.from_step = static_cast<std::int64_t>(next.from - one.from);
        }
        if (next.to != one.to + count * static_cast<std::uint64_t>(longer.to_step) ||
            next.from != one.from + count * static_cast<std::uint64_t>(longer.from_step))
            return {};
        ++longer.count;
        if (!longer.fits(most_pitch)) return {};
        return longer;
    }

    // Whether it takes less to issue than its copies do one by one: a driver writes down each layer.
    bool pays() const {
        return count > 1 &&
               (of_lines() || of_layers() || one.lines <= layers_of_a_call * static_cast<std::int64_t>(count));
    }
    double layers_s() const { return layer_s * static_cast<double>(depth()); }

    // Each copy is one line, or a layer of lines, or one line of every layer.
    bool of_lines() const { return one.lines == 1; }
    bool of_layers() const { return !of_lines() && to_step >= one.to_apart; }
    std::int64_t height() const { return of_layers() ? one.lines : static_cast<std::int64_t>(count); }
    std::int64_t depth() const { return of_lines() ? 1 : of_layers() ? static_cast<std::int64_t>(count) : one.lines; }
    End to() const { return end_of(one.to_apart, to_step); }
    End from() const { return end_of(one.from_apart, from_step); }

  private:
    End end_of(std::int64_t apart, std::int64_t step) const {
        if (of_lines()) return {step, height()};
        return of_layers() ? End{apart, step / apart} : End{step, apart / step};
    }
    bool fits(std::int64_t most_pitch) const {
        const auto fits_at = [&](std::int64_t apart, std::int64_t step) {
            const End end = end_of(apart, step);
            return end.pitch >= one.width && end.pitch <= most_pitch && end.height >= height() &&
                   (of_lines() || (of_layers() ? step % apart : apart % step) == 0);
        };
        return to_step > 0 && from_step > 0 && fits_at(one.to_apart, to_step) && fits_at(one.from_apart, from_step);
    }
};

// Small products of one shape, each with a C of its own, which one call makes. A larger one fills a device alone. So
// many operations take some ms, after which others see that the lane gets on.
constexpr double most_operations_of_one = 2.2e9, most_operations_bundled = 1e11;

// Whether products of so many operations may be in a bundle that has so many already.
inline bool may_be_bundled(double operations, double so_far = 0) {
    return operations > 0 && operations <= most_operations_of_one && so_far + operations <= most_operations_bundled;
}

}  // namespace uncut
