// What single operations cost: the formulas of model/costs.py, which calls these.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace uncut {

// Whether C has rows or columns above 256 that are no multiple of it.
inline bool is_uneven(std::int64_t m, std::int64_t n) {
    constexpr std::int64_t even = 256;
    const auto odd = [](std::int64_t extent) { return extent > even && extent % even != 0; };
    return odd(m) || odd(n);
}

// GemmShape of model/costs.py, field by field; its docstring has the formula.
struct ProductCost {
    double block_rows = 1, block_cols = 1, half_depth = 0, overhead_s = 0, tail_elements = 0, c_s_per_byte = 0,
           uneven = 0, misaligned = 0, idle_use = 1;
    bool waves = true;
    double c_half_depth = 0, copy_share = 0, sum_wait = 0, sustained = 1;

    struct Work {
        double operations, occupancy;
    };

    // Of so many products that one call makes.
    Work work(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t multiprocessors, bool aligned,
              std::int64_t count = 1) const {
        const auto number = static_cast<double>(count);
        const auto rows = static_cast<double>(m), cols = static_cast<double>(n), depth = static_cast<double>(k);
        double elements = number * rows * cols, occupancy = 1;
        if (block_rows > 1 || block_cols > 1) {
            const double blocks = number * std::ceil(rows / block_rows) * std::ceil(cols / block_cols);
            const auto width = static_cast<double>(multiprocessors);
            const double places = waves ? std::ceil(blocks / width) * width : blocks;
            elements = places * block_rows * block_cols;
            occupancy = places > 0 ? blocks / places : 1;
        }
        const double factor = (is_uneven(m, n) ? 1 + uneven : 1) * (aligned ? 1 : 1 + misaligned);
        const double operations = 2.0 * (elements * (factor * depth + half_depth) + tail_elements * depth);
        return {operations, occupancy * elements / std::max(elements + tail_elements, 1.0)};
    }

    double moving_s(double extra_bytes, std::int64_t k) const {
        const double hidden = c_half_depth > 0 ? 1 + static_cast<double>(k) / c_half_depth : 1;
        return c_s_per_byte * extra_bytes / hidden;
    }

    // Of one block on its multiprocessor.
    double block_s(std::int64_t k, std::int64_t multiprocessors, double flop_per_s) const {
        if (block_rows <= 1 && block_cols <= 1)
            return std::numeric_limits<double>::infinity();  // a product is one block
        return 2 * block_rows * block_cols * (static_cast<double>(k) + half_depth) *
               static_cast<double>(multiprocessors) / flop_per_s;
    }

    // Of a product with so much work.
    double seconds(double operations, double flop_per_s, double extra_bytes, std::int64_t k) const {
        return overhead_s + std::max(operations / flop_per_s + moving_s(extra_bytes, k), 0.0);
    }
};

// What a copy of rows so many bytes wide gets of the bandwidth: a table of RowRates.
inline double row_share(const std::vector<std::pair<double, double>> &table, double width) {
    if (table.empty()) return 1;
    if (width <= table.front().first) return table.front().second * width / table.front().first;
    for (std::size_t i = 1; i < table.size(); ++i) {
        const auto &[below, low] = table[i - 1];
        const auto &[above, high] = table[i];
        if (width <= above) return low + (high - low) * std::log(width / below) / std::log(above / below);
    }
    return table.back().second;
}

// How much of host memory a device learns the pages of at once: what lies in several such lines is several rows.
constexpr std::int64_t page_line = 65536;

// What a row that begins so many bytes behind the start of a line takes, as a multiple of what its bytes take alone.
inline double row_cost(const std::vector<std::pair<double, double>> &table, std::int64_t width, std::int64_t offset) {
    const std::int64_t head = std::min(width, (page_line - offset) % page_line);
    const std::int64_t whole = (width - head) / page_line * page_line;
    double cost = 0;
    for (const std::int64_t part : {head, whole, width - head - whole})
        if (part > 0) cost += static_cast<double>(part) / row_share(table, static_cast<double>(part));
    return cost / static_cast<double>(width);
}

// The tables are of rows far apart, which begin at a line each. Rows twice their width apart cost nothing, and between
// the two what they cost grows with the distance. Of rows far apart the first begins so many bytes behind the start of
// a line, or, below 0, nobody knows where. The mean over the places where they begin counts, or over places spread
// evenly if there are many (docs/performance.md, 2026-11-21 and 2026-11-25).
inline double host_row_share(const std::vector<std::pair<double, double>> &table, std::int64_t width,
                             std::int64_t distance, std::int64_t offset) {
    if (table.empty()) return 1;
    const std::int64_t near = 2 * width;
    if (distance < page_line) {
        const double share = row_share(table, static_cast<double>(width));
        if (near >= page_line) return share;
        const auto beyond = static_cast<double>(distance - near), most = static_cast<double>(page_line - near);
        return 1 - (1 - share) * std::max(0.0, beyond / most);
    }
    constexpr std::int64_t most_places = 16;
    const std::int64_t step = std::gcd(distance, page_line);
    const bool all = offset >= 0 && page_line / step <= most_places;
    const std::int64_t apart = all ? step : page_line / most_places, places = page_line / apart;
    double cost = 0;
    for (std::int64_t at = 0; at < places; ++at)
        cost += row_cost(table, width, (all ? offset + at * apart : at * apart + apart / 2) % page_line);
    return static_cast<double>(places) / cost;
}

}  // namespace uncut
