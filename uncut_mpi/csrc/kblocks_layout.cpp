#include "kblocks_layout.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace uncut {
namespace kblocks {
namespace {

// Sums of two do not fit 64 bits any more, which is room for none.
constexpr std::int64_t no_room = std::numeric_limits<std::int64_t>::max() / 2;

constexpr std::int64_t up_to(std::int64_t size, std::int64_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
}

// Parts of a block of C that need no sums apart from the products.
struct Direct {
    bool any = false;
    int first = 0;            // the first column block among them
    int down = 0, along = 0;  // up to which row block and which column block there are other ones
};

// Whether there is a part of C that two steps are about.
bool meet(const KStep &one, const KStep &other) {
    return one.first < other.last && other.first < one.last && one.top < other.bottom && other.top < one.bottom;
}

// Marks the steps about parts of C that can be formed directly, by a test of the step that hands a part on.
template <typename Test>
Direct mark(std::vector<KStep> &steps, bool KStep::*flag, const Test &test) {
    Direct found;
    std::set<std::pair<int, int>> begins;
    for (const KStep &part : steps) {
        if (part.kind != finish) continue;
        if (!test(part)) {
            found.down = std::max(found.down, part.bottom);
            found.along = std::max(found.along, part.last);
            continue;
        }
        found.first = found.any ? std::min(found.first, part.first) : part.first;
        found.any = true;
        begins.emplace(part.top, part.first);
    }
    for (KStep &step : steps)
        if (found.any && begins.contains({step.top, step.first})) step.*flag = true;
    return found;
}

class Maker {
  public:
    Maker(const KRequest &asked, KLayout &made)
        : asked_(asked), how_(asked.how), problem_(asked.problem), made_(made) {}

    void run() {
        set_steps();
        made_.workers.reserve(asked_.places.size() * asked_.splits());
        for (std::size_t place = 0; place < asked_.places.size(); ++place)
            for (std::size_t split = 0; split < asked_.splits(); ++split)
                made_.workers.push_back({split, {}});
        made_.buffers.assign(problem_.users.begin(), problem_.users.end());
        made_.rank_bytes.assign(static_cast<std::size_t>(problem_.num_ranks), 0);
        made_.blocks.reserve(asked_.blocks.size());
        for (std::size_t round = 0; round < asked_.rounds.size(); ++round)
            for (std::size_t at = asked_.rounds[round].first; at < asked_.rounds[round].last; ++at)
                add_block(asked_.blocks[at], static_cast<int>(round));
        for (KBlock &block : made_.blocks)
            add_adders(block);
        add_relays();
    }

  private:
    bool unsplit() const { return asked_.splits() == 1; }

    // Steps of all parts of k in turn, of one round after the other.
    void set_steps() {
        if (how_.in_rings()) {
            made_.steps = mark_in_rings(asked_.steps.front());
            return;
        }
        std::vector<KStep> marked;
        if (unsplit()) marked = mark_direct(asked_.steps.front());  // else all are sums of what several ranks have
        std::size_t most = 0, all = 0;
        for (const std::vector<KStep> &steps : asked_.steps) {
            most = std::max(most, steps.size());
            all += steps.size();
        }
        made_.steps.reserve(all * asked_.rounds.size());
        for (std::size_t round = 0; round < asked_.rounds.size(); ++round)
            for (std::size_t at = 0; at < most; ++at)
                for (const std::vector<KStep> &steps : asked_.steps) {
                    if (at >= steps.size()) continue;
                    made_.steps.push_back(unsplit() ? marked[at] : steps[at]);
                    made_.steps.back().round = static_cast<int>(round);
                }
    }

    // A triangle is what COMBINE writes, and no product; and so is C with an epilogue, but where these are fused.
    bool may_be_direct() const { return problem_.ending == op_n || problem_.fuses; }

    // All parts of C alike: in rings C is fetched before its products, and all of these have all of k or none has.
    std::vector<KStep> mark_in_rings(std::vector<KStep> steps) {
        const bool at_once = may_be_direct() && how_.block >= asked_.k_starts[1] - asked_.k_starts[0];
        direct_[0].any = problem_.sums_apart() ? at_once : problem_.reads_c;
        direct_[1].any = problem_.rounds_c() && at_once;
        for (KStep &step : steps)
            step.direct = direct_[0].any, step.direct_at_home = direct_[1].any;
        made_.any_direct = direct_[0].any;
        return steps;
    }

    std::vector<KStep> mark_direct(std::vector<KStep> steps) {
        const std::int64_t extent = asked_.k_starts[1] - asked_.k_starts[0];
        const int first = asked_.at_owner ? asked_.first_at_worker : 0;
        // Whether every product about a part of C has all of k.
        std::vector<KStep> partial;  // products of less, those of the same parts once
        for (const KStep &step : steps) {
            if (step.kind != multiply || step.last_k - step.first_k == extent) continue;
            if (partial.empty() || !partial.back().has_same_c(step)) partial.push_back(step);
        }
        const auto at_once = [&](const KStep &part) {
            return may_be_direct() &&
                   std::none_of(partial.begin(), partial.end(), [&](const KStep &step) { return meet(step, part); });
        };
        direct_[0] = mark(steps, &KStep::direct, [&](const KStep &part) {
            const bool there = part.early && part.first >= first;
            return problem_.sums_apart() ? (there || !problem_.reads_c) && at_once(part) : problem_.reads_c && there;
        });
        direct_[1] = mark(steps, &KStep::direct_at_home,
                          [&](const KStep &part) { return problem_.rounds_c() && at_once(part); });
        made_.any_direct = direct_[0].any;
        return steps;
    }

    // Of two extents, in whole units of the alignment; what no memory has room for, too.
    std::int64_t bytes(std::int64_t one, std::int64_t other) const {
        std::int64_t product = 0;
        if (__builtin_mul_overflow(one, other, &product) || product > no_room) return no_room;
        return up_to(product, buffer_alignment);
    }

    // As `Buffers.add` of planning/buffers.py, which places those of the other schedulers.
    int panel(int rank, std::int64_t rows, std::int64_t cols, int matrix, std::uint8_t dtype, Role role) {
        const std::int64_t itemsize = bytes_of(dtype);
        const std::int64_t ld = up_to(rows, column_alignment / itemsize);
        std::int64_t &taken = made_.rank_bytes[static_cast<std::size_t>(rank)];
        BufferRecord record;
        record.location = rank;
        record.role = role;
        record.matrix = static_cast<std::uint8_t>(matrix);
        record.dtype = dtype;
        record.rows = rows, record.cols = cols, record.ld = ld, record.offset = taken;
        made_.buffers.push_back(record);
        taken = std::min(no_room, taken + bytes(ld, cols * itemsize));
        return static_cast<int>(made_.buffers.size()) - 1;
    }
    int operand(const KPart &part, int matrix, std::int64_t rows, std::int64_t cols, bool copied) {
        if (!copied && part.home[matrix]) return -1;
        const auto which = static_cast<std::size_t>(matrix);
        int &ring = made_.workers[part.worker].ring[which];  // none unless there are any
        if (ring >= 0) return ring;
        if (how_.in_rings()) {
            std::int64_t along = asked_.depth_of_slots();
            std::int64_t across = matrix == matrix_a ? largest(part).rows : largest(part).cols;
            (asked_.stacks_across(matrix) ? across : along) *= how_.slots[which];
            rows = matrix == matrix_a ? across : along;
            cols = matrix == matrix_a ? along : across;
        }
        if (problem_.transposed(matrix)) std::swap(rows, cols);
        const int made = panel(part.rank, rows, cols, matrix, problem_.dtypes[which], panel_role);
        if (how_.in_rings()) ring = made;
        return made;
    }

    // The most rows and columns of a worker's blocks of C, which use the same panels in turn.
    struct Largest {
        std::int64_t rows = 0, cols = 0;
    };
    const Largest &largest(const KPart &part) { return largest(part.worker / asked_.splits()); }
    const Largest &largest(std::size_t place) {
        if (largest_.empty()) {
            largest_.resize(asked_.places.size());
            if (problem_.same_sums) std::ranges::fill(largest_, Largest{how_.c_rows, how_.c_cols});
            for (const KRequest::Block &block : asked_.blocks) {
                Largest &of = largest_[block.place];
                of.rows = std::max(of.rows, block.rows.size()), of.cols = std::max(of.cols, block.cols.size());
            }
        }
        return largest_[place];
    }

    // What blocks of C use in turn, as many as there is room for at a time: made for the first that needs it.
    template <typename Make>
    int in_turn(const KBlock &block, std::size_t worker, int what, const Make &make) {
        if (!how_.in_rings()) return make();
        const auto [known, is_new] = turns_.try_emplace({worker, what, block.round % how_.c_slots}, -1);
        if (is_new) known->second = make();
        return known->second;
    }

    void add_block(const KRequest::Block &asked, int round) {
        const KBlocking &how = asked_.how;
        KBlock &block = made_.blocks.emplace_back();
        block.round = round, block.rows = asked.rows, block.cols = asked.cols;
        block.heights = block_edges(block.rows.size(), how.rows, problem_.step);
        block.starts = block_edges(block.cols.size(), how.columns, problem_.step);
        if (how_.in_rings()) {  // one column block comes to the place that the same one of the block before it leaves
            block.starts = block_edges(largest(asked.place).cols, how.columns, problem_.step);
            for (std::int64_t &start : block.starts)
                start = std::min(start, block.cols.size());
        }
        if (how_.from_held && unsplit()) turn(block, asked);
        if (how_.from_held && one_by_one() == matrix_b) {
            const auto is_alike = [&](const KBlock &other) {
                return other.cols == block.cols && other.starts == block.starts && other.begin_col == block.begin_col;
            };
            block.alike = static_cast<std::size_t>(std::ranges::find_if(made_.blocks, is_alike) - made_.blocks.begin());
        }
        block.parts.reserve(asked_.splits());
        for (std::size_t split = 0; split < asked_.splits(); ++split) {
            block.parts.push_back(part(asked, block, split));
            made_.workers[block.parts.back().worker].blocks.push_back(made_.blocks.size() - 1);
        }
    }

    // The matrix of which a block of C needs a part of the rows or columns for each of its own blocks, which come one
    // after the other. None if products are about several of them.
    int one_by_one() const {
        const int rows = count_blocks(how_.rows), columns = count_blocks(how_.columns);
        if (how_.order != by_columns && how_.order != from_corner) return no_matrix;
        if (columns > 1 && rows == 1) return matrix_b;
        return rows > 1 && columns == 1 ? matrix_a : no_matrix;
    }

    // Lets a rank begin with the rows or columns for which it holds A or B, so that its first products wait for
    // nothing. It does not where the sums of some blocks alone lie apart: these are counted from the first row and
    // column. That is so where C is rounded, and with rows of a C that is elsewhere.
    void turn(KBlock &block, const KRequest::Block &asked) {
        const int matrix = one_by_one();
        if (matrix == no_matrix || asked.alignment.front().copies[matrix] || problem_.on_nodes()) return;
        const bool some = std::ranges::any_of(
            direct_, [](const Direct &direct) { return direct.any && (direct.down > 0 || direct.along > 0); });
        const int rank = asked_.places[asked.place].front();
        const bool elsewhere = problem_.home(matrix_c, rank, block.rows, block.cols) == nullptr;
        const bool some_rows = direct_[0].any && direct_[0].down > 0;
        if (problem_.rounds_c() ? some : matrix == matrix_a && elsewhere && some_rows) return;
        const Extent across = matrix == matrix_a ? block.rows : block.cols;
        const Extent k{asked_.k_starts.front(), asked_.k_starts.back()};
        const KPiece *piece = problem_.held_across(matrix, rank, across, k);
        if (!piece) return;
        const Extent its = KProblem::across_of(matrix, *piece).common(across);
        const std::int64_t begin = up_to(its.first - across.first, problem_.step), end = its.last - across.first;
        if (its.size() == across.size() || begin >= end) return;
        (matrix == matrix_a ? block.begin_row : block.begin_col) = begin;
        std::vector<std::int64_t> &edges = matrix == matrix_a ? block.heights : block.starts;
        move_edge(edges, (end - begin) / problem_.step * problem_.step);
        if (begin > 0) move_edge(edges, across.size() - begin);  // the last row or column
    }

    // Moves the edge nearest to a place there, but for the first and last ones.
    static void move_edge(std::vector<std::int64_t> &edges, std::int64_t to) {
        const auto nearest = std::min_element(
            edges.begin() + 1, edges.end() - 1,
            [&](std::int64_t one, std::int64_t other) { return std::abs(one - to) < std::abs(other - to); });
        for (auto edge = edges.begin() + 1; edge != edges.end() - 1; ++edge)
            if (edge < nearest)
                *edge = std::min(*edge, to);
            else if (edge > nearest)
                *edge = std::max(*edge, to);
        *nearest = to;
    }

    KPart part(const KRequest::Block &asked, const KBlock &block, std::size_t split) {
        KPart made;
        const KAlignment &alignment = asked.alignment[split];
        made.rank = asked_.places[asked.place][split];
        made.worker = asked.place * asked_.splits() + split;
        made.k = {asked_.k_starts[split], asked_.k_starts[split + 1]};
        made.k_step = alignment.k_step;
        if (!problem_.same_sums)
            made.home = {problem_.home(matrix_a, made.rank, block.rows, made.k),
                         problem_.home(matrix_b, made.rank, made.k, block.cols),
                         problem_.home(matrix_c, made.rank, block.rows, block.cols)};
        if (how_.from_held) hold(made, block, alignment);
        const std::int64_t inner = made.k.size();
        made.panel[matrix_a] = operand(made, matrix_a, block.rows.size(), inner, alignment.copies[matrix_a]);
        made.panel[matrix_b] = operand(made, matrix_b, inner, block.cols.size(), alignment.copies[matrix_b]);
        // One product of all k is rounded once.
        const bool in_pieces = std::ranges::any_of(made.held, [&](Extent k) { return k.size() > 0 && k != made.k; });
        const bool once = inner % made.k_step == 0 && !in_pieces, c_is_here = made.home[matrix_c] != nullptr;
        made.is_direct = direct_[c_is_here].any && !alignment.apart && (once || !problem_.rounds_c());
        const bool resident = made.panel[matrix_a] < 0 && made.panel[matrix_b] < 0;
        const bool in_place = c_is_here && unsplit() && !alignment.apart;
        if (!in_place || (problem_.sums_apart() && !(resident && once && may_be_direct()))) add_sums(made, block);
        return made;
    }

    // Panels for what is summed apart from the caller's C, and for what is formed directly.
    void add_sums(KPart &part, const KBlock &block) {
        const auto [high, wide] = how_.in_rings() ? largest(part) : Largest{block.rows.size(), block.cols.size()};
        std::int64_t down = high, along = wide;
        if (problem_.rounds_c() && part.is_direct) {
            const bool c_is_here = part.home[matrix_c] != nullptr;
            const Direct &direct = direct_[c_is_here];
            down = block.heights[static_cast<std::size_t>(direct.down)];
            along = block.starts[static_cast<std::size_t>(direct.along)];
            part.direct_left = block.starts[static_cast<std::size_t>(direct.first)];
            if (!c_is_here && part.direct_left < block.cols.size())
                part.panel[panel_direct] = c_panel(part, block, panel_direct, high, wide - part.direct_left);
        }
        if (down > 0 && along > 0) part.panel[matrix_c] = c_panel(part, block, matrix_c, down, along);
        if (!problem_.rounds_c()) part.panel[panel_direct] = part.panel[matrix_c];
    }

    // Of sums or, for what is formed directly, in the type of C.
    int c_panel(const KPart &part, const KBlock &block, int what, std::int64_t rows, std::int64_t cols) {
        const std::uint8_t dtype = what == matrix_c ? problem_.accumulator() : problem_.dtypes[matrix_c];
        return in_turn(block, part.worker, what,
                       [&] { return panel(part.rank, rows, cols, matrix_c, dtype, panel_role); });
    }

    // What a rank reads in place of what it holds in part, and where along k it begins: with what saves most. On
    // several nodes all begin with the first of k, so that what several ranks of a node need enters it once.
    void hold(KPart &part, const KBlock &block, const KAlignment &alignment) {
        std::int64_t most = 0;
        for (const int matrix : {matrix_a, matrix_b}) {
            const Extent across = matrix == matrix_a ? block.rows : block.cols;
            if (part.home[matrix] || alignment.copies[matrix]) continue;
            const KPiece *piece = problem_.held(matrix, part.rank, across, part.k);
            if (!piece) {
                if (matrix == one_by_one() && unsplit()) hold_across(part, block, matrix, across);
                continue;
            }
            const Extent k = KProblem::k_of(matrix, *piece).common(part.k);
            part.holds[matrix] = piece, part.held[matrix] = k, part.held_across[matrix] = across;
            if (k.size() * across.size() > most && !problem_.on_nodes()) {
                most = k.size() * across.size();
                part.begins = k.first - part.k.first;
            }
        }
    }

    // The blocks from the first on for which it holds all of k.
    void hold_across(KPart &part, const KBlock &block, int matrix, Extent across) {
        const KPiece *piece = problem_.held_across(matrix, part.rank, across, part.k);
        if (!piece) return;
        const Extent its = KProblem::across_of(matrix, *piece).common(across);
        const std::int64_t begin = matrix == matrix_a ? block.begin_row : block.begin_col;
        const std::vector<std::int64_t> &edges = matrix == matrix_a ? block.heights : block.starts;
        if (across.first + begin != its.first) return;
        const std::int64_t size = *std::prev(std::ranges::upper_bound(edges, its.size()));
        if (size == 0) return;
        part.holds[matrix] = piece, part.held[matrix] = part.k;
        part.held_across[matrix] = {its.first, its.first + size};
    }

    // The owners of C, or, also where a part of it is in host memory, each of its ranks a slice of every column block;
    // or both.
    void add_adders(KBlock &block) {
        std::vector<int> ranks;
        ranks.reserve(block.parts.size());
        for (const KPart &part : block.parts)
            ranks.push_back(part.rank);
        const int count = static_cast<int>(block.num_columns());
        bool has_owners = asked_.at_owner;
        problem_.each_piece(matrix_c, block.rows, block.cols,
                            [&](const KPiece &piece, Extent, Extent) { has_owners &= !piece.origin.on_host; });
        if (!has_owners) {
            add_adders(block, ranks, 0, count);
            return;
        }
        problem_.each_piece(matrix_c, block.rows, block.cols, [&](const KPiece &piece, Extent rows, Extent cols) {
            const KPiece &near = problem_.nearest(piece, problem_.node_of(ranks.front()));
            const KPiece &owner = near.origin.on_host ? piece : near;
            add_adder(block, owner.origin.rank, rows, 0, asked_.first_at_worker,
                      [&](Extent of) { return of.common(cols); });
        });
        if (asked_.first_at_worker < count) add_adders(block, ranks, asked_.first_at_worker, count);
    }

    // An adder for each rank, which has a part of the columns.
    void add_adders(KBlock &block, const std::vector<int> &ranks, int begin, int end) {
        const auto count = static_cast<std::int64_t>(ranks.size());
        for (std::int64_t number = 0; number < count; ++number)
            add_adder(block, ranks[static_cast<std::size_t>(number)], block.rows, begin, end,
                      [&](Extent of) { return part_of(of.size(), count, number).shifted(of.first); });
    }

    // An adder that has some rows, and of column blocks from `begin` to `end` the columns that `share` says, of the
    // others none.
    template <typename Share>
    void add_adder(KBlock &block, int rank, Extent rows, int begin, int end, const Share &share) {
        const int count = static_cast<int>(block.num_columns());
        KAdder adder;
        adder.rank = rank, adder.rows = rows;
        adder.slices.reserve(static_cast<std::size_t>(count) + 1);
        std::int64_t place = 0;
        Extent all;
        for (int at = 0; at < count; ++at) {
            Extent cols = block.cols_of({.first = at, .last = at + 1});
            const std::int64_t start = cols.first;
            cols = at < begin || at >= end ? Extent{start, start} : share(cols);
            if (cols.size() <= 0) {
                cols = {start, start};
            } else if (all.size() == 0) {
                all = cols;
            } else {
                all = {std::min(all.first, cols.first), std::max(all.last, cols.last)};
            }
            adder.slices.push_back({cols, place});
            place += cols.size();
        }
        adder.slices.push_back({{}, place});
        if (all.size() > 0) adder.home = problem_.home(matrix_c, rank, rows, all);
        place_sums(block, adder);
        block.adders.push_back(std::move(adder));
    }

    // Of what is formed directly there are no sums.
    void place_sums(const KBlock &block, KAdder &adder) {
        const KPart &one = block.parts.front();
        std::size_t down = block.heights.size() - 1, along = block.num_columns();
        if (one.is_direct) {
            const Direct &direct = direct_[one.home[matrix_c] != nullptr];
            down = static_cast<std::size_t>(direct.down), along = static_cast<std::size_t>(direct.along);
        }
        std::int64_t height = adder.rows.common(block.rows_to(down)).size();
        std::int64_t width = adder.slices[along].place;
        adder.partial.assign(block.parts.size(), -1);
        if (!asked_.combines || height <= 0 || width == 0) return;
        if (how_.in_rings()) height = largest(one).rows, width = largest(one).cols;
        for (std::size_t part = 0; part < block.parts.size(); ++part)
            if (block.parts[part].rank != adder.rank)
                adder.partial[part] = panel(adder.rank, height, width, matrix_c, problem_.accumulator(), staging_role);
        const bool beside = problem_.reads_c || problem_.sums_apart();
        if (beside && !adder.home)
            adder.staging = in_turn(block, one.worker, staging, [&] {
                return panel(adder.rank, height, width, matrix_c, problem_.dtypes[matrix_c], staging_role);
            });
    }

    // Room for what goes over a rank, in chunks that are as high as the highest of what can.
    void add_relays() {
        const KWays &ways = problem_.ways;
        std::set<int> between;
        for (const KWay &way : ways.ways)
            for (const int relay : way.relay)
                if (relay >= 0) between.insert(relay);
        if (between.empty()) return;
        std::int64_t most_k = 0, rows = 1, cols = 1;
        for (const KStep &step : made_.steps)
            most_k = std::max(most_k, step.last_k - step.first_k);
        for (const KBlock &block : made_.blocks) {
            rows = std::max({rows, block.rows.size(), problem_.transposed(matrix_b) ? block.cols.size() : most_k,
                             problem_.transposed(matrix_a) ? most_k : 0});
            cols = std::max({cols, block.cols.size(), problem_.transposed(matrix_a) ? block.rows.size() : most_k,
                             problem_.transposed(matrix_b) ? most_k : 0});
        }
        std::vector<std::uint8_t> types(problem_.dtypes.begin(), problem_.dtypes.end());
        if (asked_.combines) types.push_back(problem_.accumulator());
        for (const std::uint8_t dtype : types) {
            std::vector<KRelay> &relays = made_.relays[dtype];
            if (!relays.empty()) continue;
            const std::int64_t columns =
                std::clamp<std::int64_t>(problem_.relay_bytes / bytes_of(dtype) / rows, 1, cols);
            relays.resize(static_cast<std::size_t>(problem_.num_ranks));
            for (const int rank : between)
                relays[static_cast<std::size_t>(rank)] = {
                    panel(rank, rows, relay_slots * columns, no_matrix, dtype, staging_role), columns};
        }
    }

    const KRequest &asked_;
    const KBlocking &how_;
    const KProblem &problem_;
    KLayout &made_;
    std::array<Direct, 2> direct_;  // of a rank where C is not, and where it is
    static constexpr int staging = panel_direct + 1;
    std::map<std::tuple<std::size_t, int, int>, int> turns_;  // panels by worker, kind and turn
    std::vector<Largest> largest_;                            // of each place
};

}  // namespace
}  // namespace kblocks

KLayout::KLayout(const KRequest &asked) : request(asked) { kblocks::Maker(asked, *this).run(); }

}  // namespace uncut
