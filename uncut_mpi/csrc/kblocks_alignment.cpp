// What a rank does about columns that are not aligned.
//
// On some machines products take longer then (`misaligned` of ProductCost). There every extent along columns of A, B
// and C has to be a multiple of 16 bytes, and so has each distance of columns. Panels have such distances, and padding
// for a few more rows of A and C, which the executor adds. The rest is decided here, all of it or nothing, since one
// misaligned part makes a product as slow as three. What it costs (copies, sums, products more, each with its fixed
// time) is held against what it brings. An n along columns, of a transposed B, stays as it is. So products with the
// last column block stay as slow.
#include <cmath>

#include "kblocks_request.hpp"
#include "simulator.hpp"

namespace uncut {
namespace {

// What of the cost is seen: the rest passes beside copies, or another product. Of 2,100 simulated problems on 4 H200 it
// matters for 642. These take 1.007 times as long as with the better choice. With all of the cost it is 1.015, with two
// fifths 1.009, and with 0.55 it is 1.006. But then products of 2001×2001×2001 in f16 take a tenth longer (measured: a
// quarter).
constexpr double seen = 0.61;

constexpr double real(std::int64_t value) { return static_cast<double>(value); }

// The products of a rank, and what else follows from its steps alone.
struct Products {
    std::int64_t count = 0, formed = 0, depth = 0;  // how many, all their blocks of C, and all their k
    std::int64_t last = 0, last_k = 0;              // those with the end of k, and k of all blocks that they form
    std::int64_t handed_on = 0, blocks = 0;         // how often blocks of C are handed on, and how many there are
    std::array<std::int64_t, 2> fetches{};          // of A and B
    bool at_once = true;                            // whether each product has all of k
    double with_last_columns = 0;                   // the part of the products that have the last column block

    Products(const std::vector<KStep> &steps, std::int64_t extent, const std::vector<std::int64_t> &edges) {
        std::int64_t all = 0, with_last = 0;
        for (const KStep &step : steps) {
            const std::int64_t k = step.last_k - step.first_k, down = step.bottom - step.top;
            const std::int64_t size = down * (step.last - step.first);
            if (step.kind == fetch_a || step.kind == fetch_b) ++fetches[step.kind == fetch_b];
            if (step.kind == finish) ++handed_on, blocks += size;
            if (step.kind != multiply) continue;
            ++count, formed += size, depth += k;
            at_once = at_once && k == extent;
            if (step.last_k == extent) ++last, last_k += k * size;
            const std::int64_t elements = k * down * (edges[step.last] - edges[step.first]);
            all += elements;
            if (step.last + 1 == static_cast<int>(edges.size())) with_last += elements;
        }
        with_last_columns = real(with_last) / real(all);
    }
};

}  // namespace

KAlignment choose_alignment(const KRequest &request, const SimulatedMachine &machine, const KRequest::Block &block,
                            std::size_t split) {
    const KProblem &problem = request.problem;
    const int rank = request.places[block.place][split];
    const Extent rows = block.rows, cols = block.cols, k{request.k_starts[split], request.k_starts[split + 1]};
    const bool a_turned = problem.transposed(matrix_a), b_turned = problem.transposed(matrix_b);
    const bool along_k = a_turned || !b_turned;
    const auto is_wrong = [&](std::int64_t extent) { return extent % problem.step != 0; };

    const std::array home{problem.home(matrix_a, rank, rows, k), problem.home(matrix_b, rank, k, cols),
                          problem.home(matrix_c, rank, rows, cols)};
    const std::array along_columns{a_turned ? k : rows, b_turned ? cols : k, rows};
    std::array<bool, 3> wrong{};
    for (const int matrix : {matrix_a, matrix_b, matrix_c}) {
        if (!home[matrix]) continue;
        const Extent its = problem.transposed(matrix) ? home[matrix]->cols : home[matrix]->rows;
        const bool has_rows = matrix == matrix_c || (matrix == matrix_a && !a_turned);
        wrong[matrix] = is_wrong(problem.users[home[matrix]->buffer].ld) ||
                        is_wrong(along_columns[matrix].first - its.first) || (has_rows && is_wrong(rows.size()));
    }
    const bool copies = wrong[matrix_a] || wrong[matrix_b], any_wrong = copies || wrong[matrix_c];
    const bool rest = along_k && is_wrong(k.size());
    const bool stays = (a_turned && is_wrong(rows.size())) || (wrong[matrix_c] && !request.combines);
    if (stays || !(any_wrong || rest)) return {};

    const std::uint8_t dtype = problem.dtypes[matrix_a];
    const ProductCost &shape = machine.products[dtype];
    const double rate = machine.gemm_rate[static_cast<std::size_t>(dtype * machine.num_ranks + rank)];
    const double per_k_s = 2 * real(rows.size()) * real(cols.size()) / rate;
    KBlocking how = request.how;
    how.held = 0;  // as if nobody began with what it holds
    const Products products(make_steps(how, k.size()), k.size(), block_edges(cols.size(), how.columns, problem.step));
    const bool resident = home[matrix_a] && home[matrix_b];
    const bool whole = (resident && !copies) || products.at_once;  // its products have all of k
    double gain_s = shape.misaligned * per_k_s *
                    (any_wrong || whole ? real(k.size()) : real(products.last_k) / real(products.blocks));
    if (b_turned && is_wrong(cols.size())) gain_s *= 1 - products.with_last_columns;

    double copies_s = 0, issue_s = 0;
    for (const int matrix : {matrix_a, matrix_b}) {
        if (!wrong[matrix]) continue;
        const std::int64_t itemsize = problem.itemsize(matrix);
        const std::int64_t bytes = itemsize * k.size() * (matrix == matrix_a ? rows : cols).size();
        const auto &table = machine.row_local.empty() ? machine.row_device : machine.row_local;
        const double within = machine.bandwidth[static_cast<std::size_t>(rank * machine.num_ends + rank)];
        copies_s += real(bytes) / (within * row_share(table, real(itemsize * along_columns[matrix].size())));
        issue_s += machine.copy_s * real(products.fetches[matrix]);
    }
    // All but the first product's are made while others are computed, which are slower meanwhile.
    double cost_s = std::max(copies_s / real(products.count), copies_s - per_k_s * real(k.size()));
    const double taken_s = shape.copy_share * (copies_s - cost_s);
    cost_s += issue_s;
    const std::int64_t c_bytes = bytes_of(problem.accumulator()) * rows.size() * cols.size();
    std::int64_t more = 0;  // products
    // Moves all of C more often, by products of so much of k.
    const auto pass = [&](double times, std::int64_t of_k) {
        cost_s += times * (per_k_s * shape.half_depth + shape.moving_s(real(c_bytes), of_k));
    };
    if (resident && copies) {
        const double times = real(products.formed) / real(products.blocks);
        more += products.count - 1;
        pass(times - 1, std::llrint(real(k.size()) / times));
        cost_s += 2 * shape.tail_elements * real(products.depth - k.size()) / rate;
    }
    if (rest) {
        more += whole ? products.handed_on : products.last;
        pass(1, k.size() % problem.step);
    }
    cost_s += real(more) * (shape.overhead_s + machine.engine_latency_s);
    if (home[matrix_c] && (wrong[matrix_c] || (problem.rounds_c() && (resident || products.at_once)))) {
        const std::int64_t read_and_written = 2 * problem.itemsize(matrix_c) * rows.size() * cols.size();
        cost_s += real(read_and_written + c_bytes) / machine.combine_rate[static_cast<std::size_t>(rank)];
        cost_s += real(products.handed_on) * (machine.combine_s + machine.combine_start_s);
    }
    if (!(gain_s > seen * cost_s + taken_s)) return {};
    return {{wrong[matrix_a], wrong[matrix_b]}, wrong[matrix_c], along_k ? problem.step : 1};
}

}  // namespace uncut
