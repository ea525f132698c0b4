// Shares of a process grid's rows and columns that let its ranks finish together; planning/shares.py says for what.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <vector>

namespace nb = nanobind;

namespace uncut {
namespace {

struct FittedShares {
    std::vector<double> rows, cols;  // r_i c_j is at most the speed at (i, j), in the unit of the speeds
    double reached;                  // the sum of all r_i c_j
};

using Row = std::vector<double>;

constexpr double norms[] = {2, 4, 8, 16, 32, 64, 128};
constexpr int steps_per_norm = 40;
// Below it a step changes no share by more than a rounding error makes of it.
constexpr double converged = 1e-13;

double sum(const Row &values) { return std::accumulate(values.begin(), values.end(), 0.0); }

// The logarithm of a sum, from the logarithms of what is added.
template <typename Term>
double log_sum(std::size_t count, Term term) {
    double most = -std::numeric_limits<double>::infinity(), total = 0;
    for (std::size_t at = 0; at < count; at++)
        most = std::max(most, term(at));
    for (std::size_t at = 0; at < count; at++)
        total += std::exp(term(at) - most);
    return most + std::log(total);
}

class Fit {
  public:
    // `speeds` row by row, all positive.
    Fit(const Row &speeds, std::size_t rows)
        : speeds_(speeds), logs_(speeds), rows_(rows), cols_(speeds.size() / rows) {
        for (double &value : logs_)
            value = std::log(value);
    }

    FittedShares best() {
        const Row mean = columns([&](std::size_t j) {
            double of = 0;
            for (std::size_t i = 0; i < rows_; i++)
                of += log(i, j) / static_cast<double>(rows_);
            return of;
        });
        try_columns(mean);
        try_columns(Row(cols_, 0.0));
        try_columns(columns([&](std::size_t j) { return log_sum(rows_, [&](std::size_t i) { return log(i, j); }); }));
        for (std::size_t i = 0; i < rows_; i++)
            try_columns(columns([&](std::size_t j) { return log(i, j); }));
        for (std::size_t at = 0; at < cols_; at++)
            try_columns(columns([&](std::size_t j) {
                double least = std::numeric_limits<double>::infinity();
                for (std::size_t i = 0; i < rows_; i++)
                    least = std::min(least, log(i, j) - log(i, at));
                return least;
            }));
        try_columns(smoothed(mean));
        return best_;
    }

  private:
    double speed(std::size_t i, std::size_t j) const { return speeds_[i * cols_ + j]; }
    double log(std::size_t i, std::size_t j) const { return logs_[i * cols_ + j]; }

    template <typename Value>
    Row columns(const Value &value) const {
        Row made(cols_);
        for (std::size_t j = 0; j < cols_; j++)
            made[j] = value(j);
        return made;
    }

    // Keeps the largest rows that these columns allow under r_i c_j ≤ s_ij, and the largest columns that those allow.
    void try_columns(const Row &log_cols) {
        const double most = *std::max_element(log_cols.begin(), log_cols.end());
        FittedShares fit{Row(rows_, std::numeric_limits<double>::infinity()),
                         Row(cols_, std::numeric_limits<double>::infinity()), 0.0};
        for (std::size_t j = 0; j < cols_; j++) {
            const double share = std::exp(log_cols[j] - most);
            for (std::size_t i = 0; i < rows_; i++)
                fit.rows[i] = std::min(fit.rows[i], speed(i, j) / share);
        }
        for (std::size_t i = 0; i < rows_; i++) {
            for (std::size_t j = 0; j < cols_; j++)
                fit.cols[j] = std::min(fit.cols[j], speed(i, j) / fit.rows[i]);
        }
        fit.reached = sum(fit.rows) * sum(fit.cols);
        if (fit.reached > best_.reached) best_ = std::move(fit);
    }

    // Columns that minimise the p-norm of r_i c_j / s_ij, in turns with the rows, for growing p. Where the sum of r is
    // fixed, r_i^(p-1) is inverse to the sum over j of (c_j / s_ij)^p; likewise c.
    Row smoothed(Row cols) const {
        Row rows(rows_), before;
        for (double norm : norms) {
            for (int step = 0; step < steps_per_norm; step++) {
                before = cols;
                for (std::size_t i = 0; i < rows_; i++) {
                    rows[i] = -log_sum(cols_, [&](std::size_t j) { return norm * (cols[j] - log(i, j)); }) / (norm - 1);
                }
                normalise(rows);
                for (std::size_t j = 0; j < cols_; j++) {
                    cols[j] = -log_sum(rows_, [&](std::size_t i) { return norm * (rows[i] - log(i, j)); }) / (norm - 1);
                }
                normalise(cols);
                double change = 0;
                for (std::size_t j = 0; j < cols_; j++)
                    change = std::max(change, std::abs(cols[j] - before[j]));
                if (change < converged) break;
            }
        }
        return cols;
    }

    static void normalise(Row &logs) {
        const double total = log_sum(logs.size(), [&](std::size_t at) { return logs[at]; });
        for (double &value : logs)
            value -= total;
    }

    const Row &speeds_;
    Row logs_;
    std::size_t rows_, cols_;
    FittedShares best_{{}, {}, -1.0};
};

auto fit(const std::vector<double> &speeds, std::size_t rows) {
    if (speeds.empty() || rows == 0 || speeds.size() % rows != 0) throw std::invalid_argument("speeds are not a grid");
    FittedShares fitted = Fit(speeds, rows).best();
    return std::make_tuple(std::move(fitted.rows), std::move(fitted.cols), fitted.reached);
}

}  // namespace

void bind_shares(nb::module_ &m) {
    m.def("fit_shares", &fit, nb::arg("speeds"), nb::arg("rows"),
          "Return (rows, columns, their products' sum) with the product at each place at most its speed.");
}

}  // namespace uncut
