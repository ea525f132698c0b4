// Shares of a process grid's rows and columns that let its ranks finish together; planning/shares.py says for what.
#pragma once

#include <cstddef>
#include <vector>

namespace uncut {

struct FittedShares {
    std::vector<double> rows, cols;  // r_i c_j is at most the speed at (i, j), in the unit of the speeds
    double reached;                  // the sum of all r_i c_j
};

// `speeds` row by row, all positive.
FittedShares fit_shares(const std::vector<double> &speeds, std::size_t rows);

}  // namespace uncut
