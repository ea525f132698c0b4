// Who has which blocks, and where: workers with their panels of A, B and C, and who adds up.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kblocks_scheduler.hpp"

namespace uncut {
namespace kblocks {
namespace {

// Fewer of them in a block, and equal blocks would be too unequal.
constexpr std::int64_t least_multiples = 4;

// Sums of two do not fit 64 bits any more, which is room for none.
constexpr std::int64_t no_room = std::numeric_limits<std::int64_t>::max() / 2;

constexpr std::int64_t up_to(std::int64_t size, std::int64_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
}

class Layout {
  public:
    explicit Layout(KInput &in) : in_(in) { in_.rank_bytes.assign(static_cast<std::size_t>(in_.num_ranks), 0); }

    void run() {
        in_.blocks.clear();
        in_.blocks.reserve(in_.places.size());
        for (const KPlace &place : in_.places) {
            KBlock &block = in_.blocks.emplace_back();
            block.members.reserve(place.ranks.size());
            for (std::size_t split = 0; split < place.ranks.size(); ++split)
                block.members.push_back(worker(place, split));
        }
        for (KBlock &block : in_.blocks)
            add_adders(block);
    }

  private:
    bool at_home(int matrix, int rank) const { return !in_.origin[matrix].on_host && in_.origin[matrix].rank == rank; }
    bool whole() const { return in_.k_starts.size() == 2; }

    // Of two extents, in whole units of the alignment; what no memory has room for, too.
    std::int64_t bytes(std::int64_t one, std::int64_t other) const {
        std::int64_t product = 0;
        if (__builtin_mul_overflow(one, other, &product) || product > no_room) return no_room;
        return up_to(product, in_.buffer_alignment);
    }

    // As `Layout.add` of planning/layout.py, which places those of the other schedulers.
    int panel(int rank, std::int64_t rows, std::int64_t cols, int matrix, bool sums, Role role) {
        const std::int64_t itemsize = sums ? in_.accumulator_itemsize : in_.itemsize;
        const std::int64_t ld = up_to(rows, in_.column_alignment / itemsize);
        std::int64_t &taken = in_.rank_bytes[static_cast<std::size_t>(rank)];
        BufferRecord record;
        record.location = rank;
        record.role = role;
        record.matrix = static_cast<std::uint8_t>(matrix);
        record.dtype = sums ? in_.accumulator : in_.dtype;
        record.rows = rows, record.cols = cols, record.ld = ld, record.offset = taken;
        in_.buffers.push_back(record);
        taken = std::min(no_room, taken + bytes(ld, cols * itemsize));
        return static_cast<int>(in_.buffers.size()) - 1;
    }
    int operand(int rank, int matrix, std::int64_t rows, std::int64_t cols, bool turned, bool copied) {
        if (!copied && at_home(matrix, rank)) return -1;
        if (turned) std::swap(rows, cols);
        return panel(rank, rows, cols, matrix, false, panel_role);
    }

    KWorker worker(const KPlace &place, std::size_t split) {
        KWorker w;
        const KAlignment &alignment = place.alignment[split];
        w.rank = place.ranks[split];
        w.first_row = place.rows.first, w.last_row = place.rows.last;
        w.first_col = place.cols.first, w.last_col = place.cols.last;
        w.first_k = in_.k_starts[split], w.last_k = in_.k_starts[split + 1];
        w.k_step = alignment.k_step;
        const std::int64_t height = w.last_row - w.first_row, width = w.last_col - w.first_col;
        const std::int64_t inner = w.last_k - w.first_k;
        w.heights = block_edges(height, in_.row_blocks, in_.step, in_.multiple, in_.halvings);
        w.starts = block_edges(width, in_.column_blocks, in_.step, in_.multiple, in_.halvings);

        // One product of all k, which is rounded once.
        const bool copies = alignment.copies[matrix_a] || alignment.copies[matrix_b];
        const bool resident = at_home(matrix_a, w.rank) && at_home(matrix_b, w.rank) && !copies;
        const bool once = inner % w.k_step == 0, c_is_here = at_home(matrix_c, w.rank);
        const bool in_place = c_is_here && whole() && !alignment.apart && (!in_.half || (resident && once));
        const KDirect &direct = in_.direct[c_is_here];
        w.is_direct = direct.any && !alignment.apart && (once || !in_.half);
        w.panel[matrix_a] = operand(w.rank, matrix_a, height, inner, in_.trans_a, alignment.copies[matrix_a]);
        w.panel[matrix_b] = operand(w.rank, matrix_b, inner, width, in_.trans_b, alignment.copies[matrix_b]);
        if (in_place) return w;
        std::int64_t down = height, along = width;  // of what is summed apart
        if (in_.half && w.is_direct) {
            down = w.heights[static_cast<std::size_t>(direct.down)];
            along = w.starts[static_cast<std::size_t>(direct.along)];
            w.direct_left = w.starts[static_cast<std::size_t>(direct.first)];
            if (!c_is_here && w.direct_left < width)
                w.panel[panel_direct] = panel(w.rank, height, width - w.direct_left, matrix_c, false, panel_role);
        }
        if (down > 0 && along > 0) w.panel[matrix_c] = panel(w.rank, down, along, matrix_c, true, panel_role);
        if (!in_.half) w.panel[panel_direct] = w.panel[matrix_c];
        return w;
    }

    // The owner of C, or each member a slice of every column block; or both.
    void add_adders(KBlock &block) {
        std::vector<int> workers;
        workers.reserve(block.members.size());
        for (const KWorker &w : block.members)
            workers.push_back(w.rank);
        const int count = static_cast<int>(block.members.front().starts.size()) - 1;
        if (!in_.at_owner) {
            add_adders(block, workers, 0, count);
            return;
        }
        add_adders(block, {in_.origin[matrix_c].rank}, 0, in_.first_away);
        if (in_.first_away < count) add_adders(block, workers, in_.first_away, count);
    }

    // An adder for each rank: of column blocks from `begin` to `end` each has a part of the columns, of the others
    // none.
    void add_adders(KBlock &block, const std::vector<int> &ranks, int begin, int end) {
        const KWorker &one = block.members.front();
        const int count = static_cast<int>(one.starts.size()) - 1;
        block.adders.reserve(block.adders.size() + ranks.size());
        for (std::size_t part = 0; part < ranks.size(); ++part) {
            KAdder adder;
            adder.rank = ranks[part];
            adder.parts.reserve(static_cast<std::size_t>(count) + 1);
            std::int64_t place = 0;
            for (int at = 0; at < count; ++at) {
                const std::int64_t start = one.first_col + one.starts[static_cast<std::size_t>(at)];
                Extent cols{start, one.first_col + one.starts[static_cast<std::size_t>(at) + 1]};
                if (at < begin || at >= end) {
                    cols.last = start;
                } else {
                    cols =
                        part_of(cols.size(), static_cast<std::int64_t>(ranks.size()), static_cast<std::int64_t>(part))
                            .shifted(start);
                }
                adder.parts.push_back({cols, place});
                place += cols.size();
            }
            adder.parts.push_back({{}, place});
            place_sums(block, adder);
            block.adders.push_back(std::move(adder));
        }
    }

    // Of what is formed directly there are no sums.
    void place_sums(const KBlock &block, KAdder &adder) {
        const KWorker &one = block.members.front();
        std::size_t down = one.heights.size() - 1, along = one.starts.size() - 1;
        if (one.is_direct) {
            const KDirect &direct = in_.direct[at_home(matrix_c, one.rank)];
            down = static_cast<std::size_t>(direct.down), along = static_cast<std::size_t>(direct.along);
        }
        const std::int64_t height = one.heights[down], width = adder.parts[along].place;
        adder.partial.assign(block.members.size(), -1);
        if (!in_.combines || height == 0 || width == 0) return;
        for (std::size_t m = 0; m < block.members.size(); ++m)
            if (block.members[m].rank != adder.rank)
                adder.partial[m] = panel(adder.rank, height, width, matrix_c, true, staging_role);
        const bool beside = in_.reads_c || in_.half;
        if (beside && !at_home(matrix_c, adder.rank))
            adder.staging = panel(adder.rank, height, width, matrix_c, false, staging_role);
    }

    KInput &in_;
};

}  // namespace
}  // namespace kblocks

std::vector<std::int64_t> block_edges(std::int64_t extent, int blocks, std::int64_t step, std::int64_t multiple,
                                      int halvings) {
    if (extent < 0 || blocks < 1 || step < 1 || multiple < 1 || halvings < 0)
        throw std::invalid_argument("there is at least one block, and its start has a multiple");
    while (multiple > step && extent / blocks / multiple < kblocks::least_multiples)
        multiple /= 2;
    if (multiple > step && multiple % step == 0) step = multiple;
    const int count = count_blocks(blocks, halvings);
    std::int64_t units = extent / step;
    if (units < count) step = 1, units = extent;
    std::vector<std::int64_t> starts;
    starts.reserve(static_cast<std::size_t>(count) + 1);
    for (int block = 0; block < blocks; ++block)
        starts.push_back(step * kblocks::part_of(units, blocks, block).first);
    std::int64_t last = kblocks::part_of(units, blocks, blocks - 1).first;
    for (int at = blocks; at < count; ++at) {
        last += (units - last + 1) / 2;
        starts.push_back(step * last);
    }
    starts.push_back(extent);
    return starts;
}

void set_places(KInput &input, const KPlaces &places, const std::vector<int> &devices) {
    const std::size_t splits = input.moves.size(), count = places.blocks.size();
    if (devices.size() < splits * count) throw std::invalid_argument("every place has a rank for each part of k");
    const std::size_t cols = places.place_of.empty() ? 0 : places.place_of.front().size();
    if (places.row_starts.size() != places.place_of.size() + 1 ||
        std::any_of(places.place_of.begin(), places.place_of.end(),
                    [&](const auto &row) { return row.size() != cols; }))
        throw std::invalid_argument("every band of rows has a place in each column of ranks");
    if (std::any_of(places.blocks.begin(), places.blocks.end(),
                    [](const auto &one) { return one.rows.size() < 0 || one.cols.size() < 0; }))
        throw std::invalid_argument("a block ends before it begins");
    std::vector<int> number(count, -1);
    input.places.clear();
    input.places.reserve(count);
    input.rank_bytes.clear();
    for (std::size_t place = 0; place < count; ++place) {
        const KPlaces::Block &block = places.blocks[place];
        if (block.rows.size() == 0 || block.cols.size() == 0) continue;
        number[place] = static_cast<int>(input.places.size());
        KPlace &filled = input.places.emplace_back(KPlace{block.rows, block.cols, {}, {}});
        filled.ranks.reserve(splits);
        for (std::size_t split = 0; split < splits; ++split)
            filled.ranks.push_back(devices[split * count + place]);
        filled.alignment.resize(splits);
    }
    input.row_starts = places.row_starts;
    input.rows = static_cast<int>(places.place_of.size());
    input.cols = static_cast<int>(cols);
    input.block_of.clear();
    input.block_of.reserve(places.place_of.size() * cols);
    for (const std::vector<int> &band : places.place_of)
        for (const int place : band)
            input.block_of.push_back(place < 0 ? -1 : number.at(static_cast<std::size_t>(place)));
}

void check_kblocks(const KInput &input) {
    const auto is_rank = [&](int rank) { return rank >= 0 && rank < input.num_ranks; };
    require(input.buffers.size() >= 3, "A, B and C are the first buffers");
    for (const KOrigin &origin : input.origin)
        require(is_rank(origin.rank) || (origin.on_host && origin.rank == -1), "a matrix is on a rank or the host");
    require(!input.at_owner || !input.origin[kblocks::matrix_c].on_host, "C has an owner where it is combined there");
    require(input.row_blocks >= 1 && input.column_blocks >= 1 && input.halvings >= 0 && input.step >= 1 &&
                input.multiple >= 1,
            "there is at least one block of rows and of columns, and blocks have elements");
    require(std::min({input.itemsize, input.accumulator_itemsize, input.min_slice_bytes, input.first_block,
                      input.buffer_alignment}) >= 1 &&
                input.column_alignment >= std::max(input.itemsize, input.accumulator_itemsize),
            "elements, slices, blocks and alignments have a size");
    require(input.product_lanes == 1 || input.product_lanes == 2, "there are one or two product lanes");
    require(input.most_summands >= 3, "a sum has at least three summands");
    require(input.k_starts.size() >= 2 && input.moves.size() == input.k_starts.size() - 1, "every part of k has steps");
    const int columns = count_blocks(input.column_blocks, input.halvings);
    const int rows = count_blocks(input.row_blocks, input.halvings);
    require(input.first_away >= 0 && input.first_away <= columns,
            "column blocks are combined away from one of them on");
    for (std::size_t part = 0; part < input.moves.size(); ++part)
        for (const KMove &move : input.moves[part])
            require(move.last_k <= input.k_starts[part + 1] - input.k_starts[part] && move.last <= columns &&
                        move.bottom <= rows,
                    "steps are about the blocks and the part of k that there are");
    for (const KPlace &place : input.places) {
        require(place.ranks.size() == input.moves.size(), "every place has a rank for each part of k");
        require(std::all_of(place.ranks.begin(), place.ranks.end(), is_rank), "there is no such rank");
    }
}

void clear_layout(KInput &input) {
    input.blocks = {};
    input.buffers.resize(3);
    input.rank_bytes = {};
}

void lay_out_kblocks(KInput &input) {
    mark_direct(input);
    kblocks::Layout(input).run();
}

}  // namespace uncut
