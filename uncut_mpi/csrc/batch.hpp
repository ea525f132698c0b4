// Makes schedules of a batch: planning/batch.py says how products are dealt to ranks and go through them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tables.hpp"

namespace uncut {

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

// A panel that a rank's groups fill, in the order in which they are to be made.
struct BatchPanel {
    int rank = 0, matrix = 0;
    std::int64_t rows = 0, cols = 0;
};

class Batch {
  public:
    // `problem` says where matrices lie; its pieces are not asked for. `rates` and `room` (bytes) are of all ranks.
    Batch(PlacedProblem problem, std::span<const PieceRecord> pieces, std::span<const ProductShape3> products,
          std::vector<int> devices, std::vector<double> rates, std::vector<std::int64_t> room,
          const BatchLimits &limits);

    // Operations of the products that stay with each rank.
    std::vector<double> work_of_homes() const;
    // Deals those that have no home, or all, and finds room for what ranks take at a time. Gives a rank that has too
    // little, and what it needs at least (bytes).
    std::optional<std::pair<int, std::int64_t>> arrange(bool all);
    // What `arrange` has found: of the last one.
    const std::vector<BatchPanel> &panels() const { return panels_; }
    int num_sharing() const;
    void emit(Tables &out);

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
        std::array<std::int64_t, 6> shapes() const;
    };
    // Panels of a matrix by about how high they are: columns of the highest one are at most twice as long.
    static constexpr int heights = 64, kinds = 3 * heights;
    static int kind_of(int matrix, std::int64_t rows);
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
        Tasks awaited_on(std::int32_t lane);
    };
    // Copies of a group. Those of a lane whose columns follow one another at both ends are one.
    class Copies {
      public:
        explicit Copies(TableWriter &out) : out_(&out) {}
        void add(std::int32_t lane, const Region &to, const Region &from, Once &awaited);
        // The last one on each lane, once all are made.
        std::vector<std::int32_t> last_of_lanes();
        void end();

      private:
        struct OfLane {
            std::int32_t lane, last = -1;
            Region to{}, from{};  // of the next one
            Tasks awaits{};
        };
        void make(OfLane &one);
        TableWriter *out_;
        std::vector<OfLane> lanes_;
    };
    // How many bytes groups have, and slots at most.
    struct Way {
        std::int64_t bytes;
        std::size_t slots;
    };

    std::span<const Held> held(int matrix, std::int32_t product) const;
    Block block(int matrix, std::int32_t product) const;
    double work(std::int32_t product) const;
    int home_of(std::int32_t product) const;
    Unit whole(std::int32_t product) const;
    void deal(const std::vector<std::int32_t> &products);
    Job job_of(int rank, const Unit &unit) const;
    std::int64_t panel_bytes(int matrix, std::int64_t rows, std::int64_t cols) const;
    std::int64_t bytes_of(const Job &job, bool padded) const;
    template <typename What>
    void each_panel(const Job &job, const What &what) const;
    void cut_into_pieces(int rank);
    bool cut_to_fit(int rank, std::int64_t room, std::int64_t &needed);
    bool arrange(int rank, std::span<const Way> ways);
    std::int64_t usual_bytes(const OfRank &own) const;
    OfKinds widths(const OfRank &own, std::size_t first, std::size_t step) const;
    void emit(int rank, OfRank &own, const Group &group, TableWriter &out);
    void find_places(OfRank &own, const Group &group, const Slot &slot, int matrix) const;
    void bring(int rank, const Unit &unit, const Need &need, int matrix, Once &free, Copies &came,
               TableWriter &out) const;
    void hand_out(int rank, const Unit &unit, const Need &need, Once &made, Copies &left, TableWriter &out) const;
    std::int32_t lane(TableWriter &out, LaneKind kind, int rank, int source, int destination) const;
    std::pair<int, int> reached(int rank, int location) const;

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

}  // namespace uncut
