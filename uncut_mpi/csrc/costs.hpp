// What single operations cost: the formulas of model/costs.py, which calls these.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace uncut {

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
              std::int64_t count = 1) const;
    double moving_s(double extra_bytes, std::int64_t k) const;
    // Of one block on its multiprocessor.
    double block_s(std::int64_t k, std::int64_t multiprocessors, double flop_per_s) const;
    // Of a product with so much work.
    double seconds(double operations, double flop_per_s, double extra_bytes, std::int64_t k) const;
};

// Whether C has rows or columns above 256 that are no multiple of it.
bool is_uneven(std::int64_t m, std::int64_t n);

// What a copy of rows so many bytes wide gets of the bandwidth: a table of RowRates.
double row_share(const std::vector<std::pair<double, double>> &table, double width);

// The tables are of rows far apart, which begin at a line each. Rows twice their width apart cost nothing, and between
// the two what they cost grows with the distance. Of rows far apart the first begins so many bytes behind the start of
// a line, or, below 0, nobody knows where. The mean over the places where they begin counts, or over places spread
// evenly if there are many (docs/performance.md, 2026-11-21 and 2026-11-25).
double host_row_share(const std::vector<std::pair<double, double>> &table, std::int64_t width, std::int64_t distance,
                      std::int64_t offset);

}  // namespace uncut
