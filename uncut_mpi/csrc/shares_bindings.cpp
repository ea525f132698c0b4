// Python's view of the fit of shares.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "shares.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

auto fit(const std::vector<double> &speeds, std::size_t rows) {
    if (speeds.empty() || rows == 0 || speeds.size() % rows != 0) throw std::invalid_argument("speeds are not a grid");
    FittedShares fitted = fit_shares(speeds, rows);
    return std::make_tuple(std::move(fitted.rows), std::move(fitted.cols), fitted.reached);
}

}  // namespace

void bind_shares(nb::module_ &m) {
    m.def("fit_shares", &fit, nb::arg("speeds"), nb::arg("rows"),
          "Return (rows, columns, their products' sum) with the product at each place at most its speed.");
}

}  // namespace uncut
