// Makes schedules of a batch: planning/batch.py says how products are dealt to ranks and go through them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "table_bytes.hpp"
#include "tables.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

constexpr std::int64_t most_tasks = std::numeric_limits<std::int32_t>::max();

std::int64_t rounded_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

// The constants of planning/batch.py.
struct BatchLimits {
    std::int64_t groups = 0, least_group_bytes = 0, least_piece_bytes = 0, at_once_bytes = 0, slots = 0, few = 0,
                 step = 0;
    double cut_s = 0;
};

struct ProductShape3 {
    std::int64_t m = 0, n = 0, k = 0;
};

// A rectangle of a matrix, as it is stored.
struct Block {
    Extent rows, cols;
    bool operator==(const Block &) const = default;
    bool empty() const { return rows.size() <= 0 || cols.size() <= 0; }
    std::int64_t elements() const { return rows.size() * cols.size(); }
    Block common(const Block &other) const { return {rows.common(other.rows), cols.common(other.cols)}; }
};

// A panel that a rank's groups fill, in the order in which they are to be made: rank, matrix, rows and columns.
using BatchPanel = std::tuple<int, int, std::int64_t, std::int64_t>;

class Batch {
  public:
    // `problem` says where matrices lie; its pieces are not asked for. `rates` and `room` (bytes) are of all ranks.
    Batch(PlacedProblem problem, std::span<const PieceRecord> pieces, std::span<const ProductShape3> products,
          std::vector<int> devices, std::vector<double> rates, std::vector<std::int64_t> room,
          const BatchLimits &limits)
        : problem_(std::move(problem)),
          products_(products.begin(), products.end()),
          devices_(std::move(devices)),
          rates_(std::move(rates)),
          room_(std::move(room)),
          limits_(limits) {
        Extent m, n, k;
        for (const auto &[rows, cols, inner] : products_) {
            m = {m.last, m.last + rows}, n = {n.last, n.last + cols}, k = {k.last, k.last + inner};
            along_[0].push_back(m), along_[1].push_back(n), along_[2].push_back(k);
        }
        for (const PieceRecord &piece : pieces) {
            require(piece.turned == 0, "a piece is stored as its matrix is");
            require(piece.buffer >= 0 && static_cast<std::size_t>(piece.buffer) < problem_.users.size(),
                    "there is no such buffer");
            const BufferRecord &buffer = problem_.users[static_cast<std::size_t>(piece.buffer)];
            require(buffer.matrix <= matrix_c, "a buffer is of A, B or C");
            if (piece.rows == 0 || piece.cols == 0) continue;
            const int matrix = buffer.matrix;
            const std::vector<Extent> &down =
                along_[matrix == matrix_b ? (problem_.op_b == op_n ? 2 : 1)
                                          : (matrix == matrix_a && problem_.op_a != op_n ? 2 : 0)];
            const auto behind = std::ranges::upper_bound(down, piece.top, {}, &Extent::first);
            require(behind != down.begin(), "a piece lies in a block");
            held_[matrix].push_back({{{piece.top, piece.top + piece.rows}, {piece.left, piece.left + piece.cols}},
                                     piece.buffer,
                                     static_cast<std::int32_t>(behind - down.begin() - 1),
                                     piece.row,
                                     piece.col,
                                     buffer.location});
        }
        for (int matrix = 0; matrix < 3; ++matrix) {
            std::ranges::stable_sort(held_[matrix], {}, &Held::product);
            std::vector<std::int32_t> &first = first_held_[matrix];
            first.assign(products_.size() + 1, 0);
            for (const Held &one : held_[matrix])
                ++first[static_cast<std::size_t>(one.product) + 1];
            std::partial_sum(first.begin(), first.end(), first.begin());
        }
        homes_.resize(products_.size(), nobody);
        for (std::size_t product = 0; product < products_.size(); ++product)
            homes_[product] = home_of(static_cast<std::int32_t>(product));
    }

    // Operations of the products that stay with each rank.
    std::vector<double> work_of_homes() const {
        std::vector<double> found(static_cast<std::size_t>(problem_.num_ranks), 0.0);
        for (std::size_t product = 0; product < products_.size(); ++product)
            if (homes_[product] != nobody)
                found[static_cast<std::size_t>(homes_[product])] += work(static_cast<std::int32_t>(product));
        return found;
    }

    // Deals those that have no home, or all, and finds room for what ranks take at a time. Gives a rank that has too
    // little, and what it needs at least (bytes).
    std::optional<std::pair<int, std::int64_t>> arrange(bool all) {
        ranks_.assign(static_cast<std::size_t>(problem_.num_ranks), {});
        panels_.clear();
        std::vector<std::int32_t> dealt;
        for (std::size_t product = 0; product < products_.size(); ++product)
            if (work(static_cast<std::int32_t>(product)) > 0 && (all || homes_[product] == nobody))
                dealt.push_back(static_cast<std::int32_t>(product));
        deal(dealt);
        for (std::size_t product = 0; product < products_.size(); ++product)
            if (!all && homes_[product] != nobody && work(static_cast<std::int32_t>(product)) > 0)
                ranks_[homes_[product]].units.push_back(whole(static_cast<std::int32_t>(product)));
        for (int rank = 0; rank < problem_.num_ranks; ++rank) {
            if (ranks_[rank].units.empty()) continue;
            cut_into_pieces(rank);
            const std::int64_t room = room_[rank], usual = usual_bytes(ranks_[rank]);
            const auto slots = static_cast<std::size_t>(limits_.slots);
            // Pieces of a unit use what the first one has brought, which stays then.
            const bool stays = std::ranges::any_of(ranks_[rank].jobs, [](const Job &job) { return job.first >= 0; });
            const bool at_once = stays || usual * limits_.groups <= limits_.at_once_bytes;
            const Way first{usual, at_once ? ranks_[rank].jobs.size() : slots};
            if (arrange(rank, {&first, 1})) continue;
            const std::array<Way, 3> ways{{{room / limits_.slots, slots}, {room / (2 * limits_.slots), slots}, {0, 2}}};
            std::int64_t share = room, needed = 0;
            do {
                share /= 2;
                if (!cut_to_fit(rank, share, needed)) return std::pair{rank, std::max(needed, room + 1)};
            } while (!arrange(rank, ways));
        }
        return {};
    }

    // What `arrange` has found: of the last one.
    const std::vector<BatchPanel> &panels() const { return panels_; }

    int num_sharing() const {
        return static_cast<int>(std::ranges::count_if(ranks_, [](const OfRank &one) { return !one.units.empty(); }));
    }

    void emit(Tables &out) {
        TableWriter writer(&out, problem_.num_ranks, most_tasks);
        std::size_t jobs = 0, most_groups = 0;
        for (const OfRank &own : ranks_)
            jobs += own.jobs.size(), most_groups = std::max(most_groups, own.groups.size());
        writer.reserve(4 * jobs, 10 * jobs, 6 * jobs, jobs);
        for (std::size_t at = 0; at < most_groups; ++at)
            for (int rank = 0; rank < problem_.num_ranks; ++rank)
                if (OfRank &own = ranks_[rank]; at < own.groups.size()) emit(rank, own, own.groups[at], writer);
    }

  private:
    // What one holder has of a product's matrix.
    struct Held {
        Block block;
        std::int32_t buffer, product;
        std::int64_t row, col;  // where it begins there
        int location;
        Region region(const Block &of) const {
            return {buffer, row + of.rows.first - block.rows.first, col + of.cols.first - block.cols.first,
                    of.rows.size(), of.cols.size()};
        }
    };
    // Some rows and columns of the C of a product.
    struct Unit {
        std::int32_t product = 0;
        Extent rows, cols;
        bool by_rows() const { return rows.size() > cols.size(); }
        Extent longer() const { return by_rows() ? rows : cols; }
        Unit between(std::int64_t start, std::int64_t stop) const {
            Unit some = *this;
            (by_rows() ? some.rows : some.cols) = {start, stop};
            return some;
        }
    };
    // What a unit needs of a matrix: where its device has it, if it does.
    struct Need {
        Block block;
        bool in_place = false, again = false;  // an earlier piece of the same unit has brought it
        std::int32_t held_in = -1;             // the buffer in which it is in place
        Region place{};
        bool brought() const { return !in_place && !again; }
    };
    struct Job {
        Unit unit;
        std::array<Need, 3> needs;
        std::int32_t first = -1;  // the job that brings what it needs again

        std::array<std::int64_t, 6> shapes() const {
            std::array<std::int64_t, 6> found{};
            for (std::size_t matrix = 0; matrix < 3; ++matrix)
                found[2 * matrix] = needs[matrix].block.rows.size(),
                          found[2 * matrix + 1] = needs[matrix].block.cols.size();
            return found;
        }
    };
    // Panels of a matrix by about how high they are: columns of the highest one are at most twice as long.
    static constexpr int heights = 64, kinds = 3 * heights;

    static int kind_of(int matrix, std::int64_t rows) {
        return matrix * heights + std::bit_width(static_cast<std::uint64_t>(rows));
    }

    using OfKinds = std::vector<std::int64_t>;
    struct Slot {
        std::vector<std::int32_t> panels;  // buffers, by kind; -1 for none
        std::vector<std::int32_t> product, results;
    };
    struct Group {
        std::size_t slot = 0;
        std::vector<std::int32_t> jobs;
    };
    struct OfRank {
        std::vector<Unit> units;
        std::vector<Job> jobs;
        std::vector<Group> groups;
        std::vector<Slot> slots;
    };
    // Tasks that the first one of some on each lane awaits, and so the others on that lane do.
    struct Once {
        Tasks tasks;
        std::vector<std::int32_t> lanes{};

        Tasks awaited_on(std::int32_t lane) {
            if (std::ranges::find(lanes, lane) != lanes.end()) return {};
            lanes.push_back(lane);
            return tasks;
        }
    };
    // Copies of a group. Those of a lane whose columns follow one another at both ends are one.
    class Copies {
      public:
        explicit Copies(TableWriter &out) : out_(&out) {}

        void add(std::int32_t lane, const Region &to, const Region &from, Once &awaited) {
            const auto known = std::ranges::find(lanes_, lane, &OfLane::lane);
            OfLane &one = known == lanes_.end() ? lanes_.emplace_back(OfLane{lane}) : *known;
            const auto follows = [](const Region &before, const Region &next) {
                return next.buffer == before.buffer && next.row == before.row && next.rows == before.rows &&
                       next.col == before.col + before.cols;
            };
            if (!one.to.empty() && follows(one.to, to) && follows(one.from, from)) {
                one.to.cols += to.cols, one.from.cols += from.cols;
                return;
            }
            make(one);
            one.to = to, one.from = from, one.awaits = awaited.awaited_on(lane);
        }

        // The last one on each lane, once all are made.
        std::vector<std::int32_t> last_of_lanes() {
            end();
            std::vector<std::int32_t> found;
            for (const OfLane &one : lanes_)
                found.push_back(one.last);
            return found;
        }

        void end() {
            std::ranges::for_each(lanes_, [this](OfLane &one) { make(one); });
        }

      private:
        struct OfLane {
            std::int32_t lane, last = -1;
            Region to{}, from{};  // of the next one
            Tasks awaits{};
        };

        void make(OfLane &one) {
            if (one.to.empty()) return;
            const std::array<Operand, 2> operands{{{one.to}, {one.from}}};
            one.last = out_->task(copy_task, one.lane, operands, one.awaits);
            one.to = {};
        }

        TableWriter *out_;
        std::vector<OfLane> lanes_;
    };
    // How many bytes groups have, and slots at most.
    struct Way {
        std::int64_t bytes;
        std::size_t slots;
    };

    std::span<const Held> held(int matrix, std::int32_t product) const {
        const std::vector<std::int32_t> &first = first_held_[matrix];
        return std::span(held_[matrix]).subspan(first[product], first[product + 1] - first[product]);
    }

    Block block(int matrix, std::int32_t product) const {
        const Extent m = along_[0][product], n = along_[1][product], k = along_[2][product];
        if (matrix == matrix_c) return {m, n};
        Block found = matrix == matrix_a ? Block{m, k} : Block{k, n};
        if (problem_.transposed(matrix)) std::swap(found.rows, found.cols);
        return found;
    }

    double work(std::int32_t product) const {
        const auto &[m, n, k] = products_[product];
        return static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(std::max<std::int64_t>(k, 1));
    }

    // The computing rank that alone has C, or else the larger operand.
    int home_of(std::int32_t product) const {
        const bool b_is_larger = block(matrix_b, product).elements() > block(matrix_a, product).elements();
        for (const int matrix : {matrix_c, b_is_larger ? matrix_b : matrix_a, b_is_larger ? matrix_a : matrix_b}) {
            const std::span<const Held> holders = held(matrix, product);
            if (holders.empty()) continue;
            const int rank = problem_.locations.rank(holders[0].location);
            const auto elsewhere = [&](const Held &one) { return problem_.locations.rank(one.location) != rank; };
            if (std::ranges::find(devices_, rank) != devices_.end() && std::ranges::none_of(holders, elsewhere))
                return rank;
        }
        return nobody;
    }

    Unit whole(std::int32_t product) const { return {product, along_[0][product], along_[1][product]}; }

    // Deals products by their operations, a run of them to each computing rank; what is much of a run is cut.
    void deal(const std::vector<std::int32_t> &products) {
        if (products.empty()) return;
        double total = 0, sum = 0, least = std::numeric_limits<double>::infinity();
        for (const std::int32_t product : products)
            total += work(product);
        std::vector<double> ends;
        for (const int rank : devices_) {
            sum += rates_[rank], least = std::min(least, rates_[rank]);
            ends.push_back(sum);
        }
        for (double &end : ends)
            end *= total / sum;
        const double much = std::max(total / static_cast<double>(ends.size()) / static_cast<double>(limits_.few),
                                     limits_.cut_s * least / 2);
        std::size_t at = 0;
        double done = 0;
        for (const std::int32_t product : products) {
            const Unit unit = whole(product);
            const double its = work(product);
            const auto [first, last] = unit.longer();
            std::int64_t start = first;
            for (; at + 1 < ends.size() && ends[at] < done + its; ++at) {
                const double part = (ends[at] - done) / its, extent = static_cast<double>(last - first);
                std::int64_t middle = std::nearbyint(part) != 0 ? last : first;
                if (its > much)
                    middle = first + static_cast<std::int64_t>(
                                         std::nearbyint(extent * part / static_cast<double>(limits_.step))) *
                                         limits_.step;
                middle = std::min(middle, last);
                if (start >= middle) continue;
                ranks_[devices_[at]].units.push_back(unit.between(start, middle));
                start = middle;
            }
            if (start < last) ranks_[devices_[at]].units.push_back(unit.between(start, last));
            done += its;
        }
    }

    Job job_of(int rank, const Unit &unit) const {
        Block a = block(matrix_a, unit.product), b = block(matrix_b, unit.product);
        (problem_.transposed(matrix_a) ? a.cols : a.rows) = unit.rows;
        (problem_.transposed(matrix_b) ? b.rows : b.cols) = unit.cols;
        Job job{unit, {{{a}, {b}, {{unit.rows, unit.cols}}}}};
        for (int matrix = 0; matrix < 3; ++matrix) {
            Need &need = job.needs[matrix];
            for (const Held &one : held(matrix, unit.product)) {
                if (one.location != rank || need.block.empty() || one.block.common(need.block) != need.block) continue;
                need.in_place = true, need.held_in = one.buffer;
                need.place = one.region(need.block);
                break;
            }
        }
        return job;
    }

    std::int64_t panel_bytes(int matrix, std::int64_t rows, std::int64_t cols) const {
        const std::int64_t item = problem_.itemsize(matrix);
        return rounded_up(rows, column_alignment / item) * item * cols;
    }

    std::int64_t bytes_of(const Job &job, bool padded) const {
        std::int64_t bytes = 0;
        each_panel(job, [&](int matrix, std::int64_t rows, std::int64_t cols) {
            bytes += padded ? panel_bytes(matrix, rows, cols) : rows * cols * problem_.itemsize(matrix);
        });
        return bytes;
    }

    template <typename What>
    void each_panel(const Job &job, const What &what) const {
        for (int matrix = 0; matrix < 3; ++matrix)
            if (const Need &need = job.needs[matrix]; need.brought() && !need.block.empty())
                what(matrix, need.block.rows.size(), need.block.cols.size());
    }

    // Makes jobs of a rank's units; long ones in pieces, whose first one brings what all need.
    void cut_into_pieces(int rank) {
        OfRank &own = ranks_[rank];
        std::vector<Job> whole;
        std::vector<std::int64_t> sizes;
        for (const Unit &unit : own.units) {
            whole.push_back(job_of(rank, unit));
            sizes.push_back(bytes_of(whole.back(), false));
        }
        const std::int64_t total = std::reduce(sizes.begin(), sizes.end());
        const std::int64_t each = std::max(total / limits_.groups, limits_.least_piece_bytes);
        for (std::size_t at = 0; at < whole.size(); ++at) {
            const Unit &unit = own.units[at];
            const auto [start, stop] = unit.longer();
            const std::int64_t parts = std::max<std::int64_t>(1, sizes[at] / each);
            const std::int64_t step = rounded_up((stop - start + parts - 1) / parts, limits_.step);
            if (sizes[at] < 2 * each || step >= stop - start) {
                own.jobs.push_back(whole[at]);
                continue;
            }
            const auto first_job = static_cast<std::int32_t>(own.jobs.size());
            for (std::int64_t first = start; first < stop; first += step) {
                Job job = job_of(rank, unit.between(first, std::min(first + step, stop)));
                job.first = first_job;
                job.needs[unit.by_rows() ? matrix_b : matrix_a].again = first > start;
                own.jobs.push_back(job);
            }
        }
    }

    // Makes jobs of a rank's units; in parts those for which it has not so much room. False if some of one element need
    // more.
    bool cut_to_fit(int rank, std::int64_t room, std::int64_t &needed) {
        OfRank &own = ranks_[rank];
        own.jobs.clear();
        std::vector<Unit> todo(own.units.rbegin(), own.units.rend());
        while (!todo.empty()) {
            const Unit unit = todo.back();
            todo.pop_back();
            const Job job = job_of(rank, unit);
            const std::int64_t size = bytes_of(job, true);
            const auto [start, stop] = unit.longer();
            if (size <= room) {
                own.jobs.push_back(job);
            } else if (const std::int64_t half = (stop - start) / 2; half > 0) {
                const std::int64_t in_steps = half / limits_.step * limits_.step;
                const std::int64_t middle = start + (in_steps > 0 ? in_steps : half);
                todo.push_back(unit.between(middle, stop));
                todo.push_back(unit.between(start, middle));
            } else {
                needed = 2 * size;
                return false;
            }
        }
        return true;
    }

    // Makes groups of a rank's jobs by the first way that it has room for.
    bool arrange(int rank, std::span<const Way> ways) {
        OfRank &own = ranks_[rank];
        OfKinds highest(kinds, 0), column(kinds, 0);
        for (const Job &job : own.jobs)
            each_panel(job, [&](int matrix, std::int64_t rows, std::int64_t) {
                std::int64_t &height = highest[kind_of(matrix, rows)];
                height = std::max(height, rows);
            });
        for (int kind = 0; kind < kinds; ++kind)
            column[kind] = panel_bytes(kind / heights, highest[kind], 1);
        std::vector<std::int64_t> sizes(own.jobs.size(), 0);
        for (std::size_t at = 0; at < sizes.size(); ++at)
            each_panel(own.jobs[at], [&](int matrix, std::int64_t rows, std::int64_t cols) {
                sizes[at] += column[kind_of(matrix, rows)] * cols;
            });
        for (const Way &way : ways) {
            std::int64_t filled = 0;
            own.groups.assign(1, {});
            for (std::size_t at = 0; at < sizes.size(); ++at) {
                if (!own.groups.back().jobs.empty() && filled + sizes[at] > way.bytes)
                    own.groups.emplace_back(), filled = 0;
                own.groups.back().jobs.push_back(static_cast<std::int32_t>(at));
                filled += sizes[at];
            }
            const std::size_t count = std::min(way.slots, own.groups.size());
            std::vector<OfKinds> of_slots;
            std::int64_t needed = 0;
            for (std::size_t slot = 0; slot < count; ++slot) {
                of_slots.push_back(widths(own, slot, count));
                for (int kind = 0; kind < kinds; ++kind)
                    if (of_slots.back()[kind]) needed += column[kind] * of_slots.back()[kind] + buffer_alignment;
            }
            if (needed > room_[rank] && needed > 0) continue;
            for (std::size_t at = 0; at < own.groups.size(); ++at) {
                Group &group = own.groups[at];
                group.slot = at % count;
                // So that products of one shape follow one another.
                std::ranges::stable_sort(group.jobs, {}, [&](std::int32_t job) { return own.jobs[job].shapes(); });
            }
            own.slots.clear();
            for (const OfKinds &its : of_slots) {
                Slot &slot = own.slots.emplace_back();
                slot.panels.assign(kinds, -1);
                for (int kind = 0; kind < kinds; ++kind) {
                    if (!its[kind]) continue;
                    slot.panels[kind] = static_cast<std::int32_t>(problem_.users.size() + panels_.size());
                    panels_.push_back({rank, kind / heights, highest[kind], its[kind]});
                }
            }
            return true;
        }
        return false;
    }

    // What a group has, where there is room for all.
    std::int64_t usual_bytes(const OfRank &own) const {
        std::int64_t bytes = 0;
        for (const Job &job : own.jobs)
            bytes += bytes_of(job, true);
        return std::max(bytes / limits_.groups, limits_.least_group_bytes);
    }

    // How many columns of panels of each kind some of a rank's groups take at most.
    OfKinds widths(const OfRank &own, std::size_t first, std::size_t step) const {
        OfKinds most(kinds, 0), its(kinds, 0);
        for (std::size_t group = first; group < own.groups.size(); group += step) {
            std::ranges::fill(its, 0);
            for (const std::int32_t job : own.groups[group].jobs)
                each_panel(own.jobs[job], [&](int matrix, std::int64_t rows, std::int64_t cols) {
                    its[kind_of(matrix, rows)] += cols;
                });
            for (int kind = 0; kind < kinds; ++kind)
                most[kind] = std::max(most[kind], its[kind]);
        }
        return most;
    }

    // Adds the tasks of a group: copies in, matrix after matrix, products, and copies out.
    void emit(int rank, OfRank &own, const Group &group, TableWriter &out) {
        Slot &slot = own.slots[group.slot];
        Copies came(out), left(out);
        Once read{slot.product}, gone{slot.results};
        for (int matrix = 0; matrix < 3; ++matrix) {
            find_places(own, group, slot, matrix);
            if (matrix == matrix_c && !problem_.reads_c) continue;
            for (const std::int32_t at : group.jobs)
                if (const Job &job = own.jobs[at]; job.needs[matrix].brought())
                    bring(rank, job.unit, job.needs[matrix], matrix, matrix == matrix_c ? gone : read, came, out);
        }
        const std::vector<std::int32_t> arrived = came.last_of_lanes();
        Tasks awaits = arrived, more = slot.results;
        const std::int32_t products = out.lane(rank, compute_lane, no_source, 0);
        std::int32_t last = -1;
        for (const std::int32_t at : group.jobs) {
            const Job &job = own.jobs[at];
            const Region &c = job.needs[matrix_c].place;
            const Operand written{c}, before{c, beta};
            if (products_[job.unit.product].k == 0) {
                const std::array<Operand, 2> operands{written, before};
                last =
                    out.task(combine_task, products, std::span(operands).first(problem_.reads_c ? 2 : 1), awaits, more);
            } else {
                const std::array<Operand, 4> operands{written,
                                                      {job.needs[matrix_a].place, alpha, problem_.op_a},
                                                      {job.needs[matrix_b].place, one, problem_.op_b},
                                                      before};
                last = out.task(gemm_task, products, std::span(operands).first(problem_.reads_c ? 4 : 3), awaits, more);
            }
            awaits = more = {};
        }
        slot.product.assign(1, last);
        Once made{slot.product};
        for (const std::int32_t at : group.jobs)
            hand_out(rank, own.jobs[at].unit, own.jobs[at].needs[matrix_c], made, left, out);
        slot.results = left.last_of_lanes();
    }

    // Finds where jobs have a matrix: in place, or in a panel, side by side.
    void find_places(OfRank &own, const Group &group, const Slot &slot, int matrix) const {
        std::array<std::int64_t, heights> filled{};
        for (const std::int32_t at : group.jobs) {
            Need &need = own.jobs[at].needs[matrix];
            if (!need.brought()) continue;
            const std::int64_t rows = need.block.rows.size(), cols = need.block.cols.size();
            const int kind = kind_of(matrix, rows);
            std::int64_t &columns = filled[static_cast<std::size_t>(kind % heights)];
            need.place = {slot.panels[kind], 0, columns, rows, cols};
            if (slot.panels[kind] >= 0) columns += cols;
        }
        for (const std::int32_t at : group.jobs)
            if (Need &need = own.jobs[at].needs[matrix]; need.again && !need.in_place)
                need.place = own.jobs[own.jobs[at].first].needs[matrix].place;
    }

    // Copies a rectangle to a place that is free when some tasks are over, and notes the last copy of each lane.
    void bring(int rank, const Unit &unit, const Need &need, int matrix, Once &free, Copies &came,
               TableWriter &out) const {
        std::vector<Block> done;
        for (const bool here : {true, false})
            for (const Held &one : held(matrix, unit.product)) {
                const Block shared = one.block.common(need.block);
                if ((one.location == rank) != here || shared.empty()) continue;
                if (std::ranges::find(done, one.block) != done.end()) continue;  // by another holder
                done.push_back(one.block);
                const auto [issuer, source] = reached(rank, one.location);
                const std::int32_t on = lane(out, copy_lane, issuer, source, rank);
                came.add(on,
                         {need.place.buffer, need.place.row + shared.rows.first - need.block.rows.first,
                          need.place.col + shared.cols.first - need.block.cols.first, shared.rows.size(),
                          shared.cols.size()},
                         one.region(shared), free);
            }
    }

    // Copies a part of C to all who hold it elsewhere, and notes the last copy of each lane.
    void hand_out(int rank, const Unit &unit, const Need &need, Once &made, Copies &left, TableWriter &out) const {
        for (const Held &one : held(matrix_c, unit.product)) {
            const Block shared = one.block.common(need.block);
            if (shared.empty() || one.buffer == need.held_in) continue;
            const auto [issuer, to] = reached(rank, one.location);
            const std::int32_t on =
                lane(out, problem_.locations.in_host(to) ? copy_lane : result_lane, issuer, rank, to);
            left.add(
                on, one.region(shared),
                {need.place.buffer, need.place.row + shared.rows.first - need.block.rows.first,
                 need.place.col + shared.cols.first - need.block.cols.first, shared.rows.size(), shared.cols.size()},
                made);
        }
    }

    std::int32_t lane(TableWriter &out, LaneKind kind, int rank, int source, int destination) const {
        const bool together =
            problem_.serial_copies && source == rank && destination != rank && !problem_.locations.in_host(destination);
        return out.lane(rank, kind, source, together ? any_device : destination);
    }

    // Who copies between a rank's device and a memory, and the lane's end there.
    std::pair<int, int> reached(int rank, int location) const {
        const Locations &memories = problem_.locations;
        const int owner = memories.rank(location);
        return {memories.in_host(location) && owner != nobody ? owner : rank, memories.end(location)};
    }

    PlacedProblem problem_;
    std::vector<ProductShape3> products_;
    std::array<std::vector<Extent>, 3> along_;  // m, n and k of each product
    std::array<std::vector<Held>, 3> held_;     // by product
    std::array<std::vector<std::int32_t>, 3> first_held_;
    std::vector<int> devices_, homes_;  // of each product its home, or -1
    std::vector<double> rates_;
    std::vector<std::int64_t> room_;
    BatchLimits limits_;
    std::vector<OfRank> ranks_;
    std::vector<BatchPanel> panels_;
};

}  // namespace

void bind_batch(nb::module_ &m) {
    // Buffers and pieces are those of A, B and C, locations `with_ends`, products m, n and k, all as records. Limits
    // are the constants of planning/batch.py in the order in which they stand there.
    nb::class_<Batch>(m, "Batch", "Schedules of a batch of products.")
        .def("__init__",
             [](Batch *self, int num_ranks, bool serial_copies, std::uint8_t op_a, std::uint8_t op_b, bool reads_c,
                const std::array<std::uint8_t, 3> &dtypes, nb::handle locations, nb::handle buffers, nb::handle pieces,
                nb::handle products, const std::vector<int> &devices, const std::vector<double> &rates,
                const std::vector<std::int64_t> &room, const std::array<std::int64_t, 7> &limits, double cut_s) {
                 PlacedProblem problem{num_ranks, serial_copies, op_a, op_b, reads_c, dtypes, {}, {}, {}};
                 const ArrayBytes users(buffers), held(pieces), shapes(products);
                 problem.locations = Locations(ArrayBytes(locations).records<LocationRecord>());
                 const auto records = users.records<BufferRecord>();
                 problem.users.assign(records.begin(), records.end());
                 new (self) Batch(std::move(problem), held.records<PieceRecord>(), shapes.records<ProductShape3>(),
                                  devices, rates, room,
                                  {limits[0], limits[1], limits[2], limits[3], limits[4], limits[5], limits[6], cut_s});
             })
        .def_prop_ro("work_of_homes", &Batch::work_of_homes)
        .def("arrange", nb::overload_cast<bool>(&Batch::arrange))
        .def_prop_ro("num_sharing", &Batch::num_sharing)
        .def_prop_ro("panels", &Batch::panels)
        .def("emit", [](Batch &self) {
            Tables made;
            self.emit(made);
            return arrays_of(std::move(made));
        });
}

}  // namespace uncut
