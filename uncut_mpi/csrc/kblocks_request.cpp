#include "kblocks_request.hpp"

#include <array>
#include <map>
#include <utility>

#include "simulator.hpp"

namespace uncut {
namespace {

// Fewer of them in a block, and equal blocks would be too unequal.
constexpr std::int64_t kernel_elements = 256, least_multiples = 4;

constexpr std::int64_t most_rounds = 1 << 20;

void check(const KProblem &problem, const KBlocking &how) {
    const auto is_rank = [&](int rank) { return rank >= 0 && rank < problem.num_ranks; };
    const auto is_buffer = [&](int at) { return at >= 0 && static_cast<std::size_t>(at) < problem.users.size(); };
    for (const std::vector<KPiece> &pieces : problem.pieces) {
        std::size_t left = 0;
        for (const KPiece &one : pieces) {
            require(is_rank(one.origin.rank) || (one.origin.on_host && one.origin.rank == nobody),
                    "a matrix is on a rank or the host");
            require(is_buffer(one.buffer) && one.holders >= 1, "a piece is in a buffer");
            left = left > 0 ? left - 1 : one.holders - 1;
        }
        require(left == 0, "a piece has the holders that it says");
    }
    require(how.rows >= 1 && how.columns >= 1 && how.away >= 0 && problem.step >= 1,
            "there is at least one block of rows and of columns, and blocks have elements");
    for (const std::uint8_t dtype : problem.dtypes)
        require(dtype < element_types.size(), "there is no such element type");
    require(std::min({problem.min_slice_bytes, problem.relay_bytes, how.first}) >= 1, "slices and blocks have a size");
    require(how.lanes == 1 || how.lanes == 2, "there are one or two product lanes");
    require(how.c_rows >= 0 && how.c_cols >= 0 && (how.c_slots == 1 || how.c_slots == 2),
            "there is room for one or two blocks of C, and they have elements");
    require(how.in_rings() || (how.c_rows == 0 && how.c_cols == 0 && how.c_slots == 1),
            "there are rings where a rank has several blocks of C");
    require(std::ranges::all_of(how.slots, [&](int count) { return how.in_rings() ? count > 0 : count == 0; }),
            "there is room for a k-block of each matrix, or for all of both");
    require(!how.in_rings() || (how.order == by_k && how.rows == 1 && !how.from_held && how.block >= 1),
            "there are rings in the order by k, from the first of it");
    const KWays &ways = problem.ways;
    const auto ranks = static_cast<std::size_t>(problem.num_ranks);
    require(ways.even() || (ways.links.size() == ways.ways.size() &&
                            std::ranges::all_of(std::array{ways.first.size(), ways.place.size(), ways.sends.size(),
                                                           ways.receives.size(), ways.from_host.size()},
                                                [&](std::size_t size) { return size == ranks; })),
            "there are ways of all ranks or none");
    for (int from = 0; from < problem.num_ranks && !ways.even(); ++from)
        for (int to = 0; to < problem.num_ranks; ++to)
            require(problem.node_of(from) != problem.node_of(to) || ways.at(from, to) < ways.ways.size(),
                    "there are ways between all ranks of a node");
    require(std::ranges::all_of(ways.ways,
                                [&](const KWay &way) {
                                    return (way.relay[0] >= 0 || way.relay[1] < 0) &&
                                           std::ranges::all_of(way.relay,
                                                               [&](int one) { return one < 0 || is_rank(one); });
                                }),
            "there is a rank on the way that hands on, one before the other");
}

// How many blocks of C each place has down and along, where they are cut: equal ones.
std::array<int, 2> count_cuts(const KPlaces &places, const KBlocking &how) {
    std::int64_t down = 1, along = 1;
    for (const KPlaces::Block &block : places.blocks) {
        if (how.c_rows > 0) down = std::max(down, (block.rows.size() + how.c_rows - 1) / how.c_rows);
        if (how.c_cols > 0) along = std::max(along, (block.cols.size() + how.c_cols - 1) / how.c_cols);
    }
    require(down * along <= most_rounds, "there are not so many blocks of C that nobody could follow them");
    return {static_cast<int>(down), static_cast<int>(along)};
}

Extent cut_of(Extent all, int cuts, int number, std::int64_t step) {
    const std::vector<std::int64_t> edges = block_edges(all.size(), cuts, step, 0);
    const auto at = static_cast<std::size_t>(number);
    return Extent{edges[at], edges[at + 1]}.shifted(all.first);
}

// Cuts the blocks of all places, one block of each for a round. Two rounds in a row share rows or columns, as they go
// there and back. They mostly share those of the matrix that has larger k-blocks: what is there of it need not come
// again.
std::vector<KPlaces> cut_in_rounds(const KPlaces &places, const KProblem &problem, const KBlocking &how) {
    const auto [down, along] = count_cuts(places, how);
    if (down * along == 1) return {places};
    std::int64_t height = 0, width = 0;
    for (const KPlaces::Block &block : places.blocks)
        height = std::max(height, block.rows.last), width = std::max(width, block.cols.last);
    const bool keeps_columns = !how.returns || width * down >= height * along;
    const int inner = keeps_columns ? down : along, outer = keeps_columns ? along : down;
    std::vector<KPlaces> rounds;
    rounds.reserve(static_cast<std::size_t>(inner) * static_cast<std::size_t>(outer));
    for (int far = 0; far < outer; ++far)
        for (int step = 0; step < inner; ++step) {
            const int near = how.returns && far % 2 ? inner - 1 - step : step;
            KPlaces &round = rounds.emplace_back(places);
            for (KPlaces::Block &block : round.blocks) {
                block.rows = cut_of(block.rows, down, keeps_columns ? near : far, problem.step);
                block.cols = cut_of(block.cols, along, keeps_columns ? far : near, problem.step);
            }
        }
    return rounds;
}

// K-blocks whose A or B others hold, or lie behind another link, come in turn: so all links are busy at one time.
std::vector<Extent> k_blocks_in_turn(const KProblem &problem, const KBlocking &how, Extent k) {
    const std::vector<Extent> blocks = equal_k_blocks(how, k.size());
    if (problem.same_sums) return blocks;
    std::array<std::vector<std::pair<Extent, int>>, 2> holders;  // of the first rows of A and columns of B
    for (const int matrix : {matrix_a, matrix_b})
        for (const KPiece &one : problem.pieces[matrix])
            if (KProblem::across_of(matrix, one).first == 0)
                holders[static_cast<std::size_t>(matrix)].emplace_back(KProblem::k_of(matrix, one), one.origin.rank);
    std::map<std::array<int, 2>, std::vector<Extent>> by_origin;
    for (const Extent &block : blocks) {
        const std::int64_t begins = k.first + block.first;
        std::array<int, 2> origin{-1, -1};
        for (std::size_t matrix = 0; matrix < holders.size(); ++matrix)
            for (const auto &[its, rank] : holders[matrix])
                if (its.contains({begins, begins})) origin[matrix] = rank;
        by_origin[origin].push_back(block);
    }
    std::vector<Extent> found;
    for (std::size_t turn = 0; found.size() < blocks.size(); ++turn)
        for (const auto &[origin, its] : by_origin)
            if (turn < its.size()) found.push_back(its[turn]);
    return found;
}

// Finds which blocks of a round share rows, in order of their columns, and which share columns, in order of their rows.
void group(const std::vector<KRequest::Block> &blocks, KRequest::Round &round) {
    std::vector<std::size_t> in_order;
    std::vector<std::int64_t> edges;
    for (std::size_t at = round.first; at < round.last; ++at) {
        in_order.push_back(at);
        edges.insert(edges.end(), {blocks[at].rows.first, blocks[at].rows.last});
    }
    std::ranges::sort(in_order, {}, [&](std::size_t at) { return std::pair{blocks[at].cols, blocks[at].rows}; });
    std::ranges::sort(edges);
    edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
    for (std::size_t row = 0; row + 1 < edges.size(); ++row)
        round.strips.push_back({edges[row], edges[row + 1]});
    round.of_row.resize(round.strips.size());
    for (const std::size_t at : in_order) {
        const Extent rows = blocks[at].rows;
        if (round.of_col.empty() || blocks[round.of_col.back().front()].cols != blocks[at].cols)
            round.of_col.emplace_back();
        round.of_col.back().push_back(at);
        for (auto row = std::ranges::lower_bound(edges, rows.first) - edges.begin(); edges[row] < rows.last; ++row)
            round.of_row[row].push_back(at);
    }
}

// Adds the blocks of C that have elements, and the ranks of their places.
void add_round(KRequest &request, const KPlaces &places, const std::vector<int> &devices) {
    const std::size_t splits = request.splits(), count = places.blocks.size();
    require(devices.size() >= splits * count, "every place has a rank for each part of k");
    const std::size_t first = request.blocks.size();
    for (std::size_t place = 0; place < count; ++place) {
        const KPlaces::Block &block = places.blocks[place];
        require(block.rows.size() >= 0 && block.cols.size() >= 0, "there is no block that ends before it begins");
        if (block.rows.size() == 0 || block.cols.size() == 0) continue;
        request.blocks.push_back({place, block.rows, block.cols, std::vector<KAlignment>(splits)});
    }
    for (std::size_t place = request.places.size(); place < count; ++place) {
        std::vector<int> &ranks = request.places.emplace_back();
        ranks.reserve(splits);
        for (std::size_t split = 0; split < splits; ++split)
            ranks.push_back(devices[split * count + place]);
    }
    group(request.blocks, request.rounds.emplace_back(KRequest::Round{first, request.blocks.size(), {}, {}, {}}));
}

// Of k that ranks begin with because they hold it, the least; 0 if nobody holds any.
std::int64_t least_held(const KRequest &request) {
    std::int64_t least = 0;
    for (const KRequest::Block &block : request.blocks)
        for (std::size_t split = 0; split < request.splits(); ++split) {
            const Extent k{request.k_starts[split], request.k_starts[split + 1]};
            std::int64_t most = 0, its = 0;
            for (const int matrix : {matrix_a, matrix_b}) {
                const Extent across = matrix == matrix_a ? block.rows : block.cols;
                const KPiece *piece = request.problem.held(matrix, request.places[block.place][split], across, k);
                if (!piece) continue;
                const std::int64_t held = KProblem::k_of(matrix, *piece).common(k).size();
                if (held == k.size() || held * across.size() <= most) continue;
                most = held * across.size(), its = held;
            }
            if (its > 0) least = least > 0 ? std::min(least, its) : its;
        }
    return least;
}

}  // namespace

KRequest::KRequest(const KProblem &of, const KBlocking &blocking, std::vector<std::int64_t> starts,
                   const std::vector<int> &devices, const std::vector<const KPlaces *> &asked,
                   const SimulatedMachine *aligns_for)
    : problem(of), how(blocking), k_starts(std::move(starts)) {
    check(problem, how);
    require(k_starts.size() >= 2, "there is at least one part of k");
    require(!asked.empty(), "there is at least one round of blocks");
    require(std::ranges::all_of(devices, [&](int rank) { return rank >= 0 && rank < problem.num_ranks; }),
            "there is no such rank");
    combines = problem.reads_c || problem.sums_apart() || splits() > 1;
    first_at_worker = static_cast<int>(std::max<std::int64_t>(0, count_blocks(how.columns) - how.away));
    at_owner = how.at_owner && problem.on_device(matrix_c) && first_at_worker > 0;
    require(!how.in_rings() || (splits() == 1 && !at_owner),
            "there are rings where no ranks share k, and C is combined where it is computed");
    require(!problem.same_sums || (how.in_rings() && how.columns == 1 && !how.returns && how.first == how.block &&
                                   how.c_rows > 0 && how.c_cols > 0),
            "sums that are the same are of whole blocks of C, one k-block after the other");
    require(!aligns_for || aligns_for->num_ranks == problem.num_ranks,
            "there are as many ranks on the machine for which products are aligned");
    const std::size_t count = asked.front()->blocks.size();
    places.reserve(count);
    blocks.reserve(count * asked.size());
    for (const KPlaces *one : asked) {
        require(one->blocks.size() == count, "every round has the same places");
        for (const KPlaces &round : cut_in_rounds(*one, problem, how))
            add_round(*this, round, devices);
    }
    if (how.from_held && !problem.on_nodes()) how.held = least_held(*this);
    steps.reserve(splits());
    for (std::size_t part = 0; part < splits(); ++part) {
        const Extent k{k_starts[part], k_starts[part + 1]};
        steps.push_back(how.in_rings() ? make_steps_in_rings(how, k_blocks_in_turn(problem, how, k),
                                                             static_cast<int>(rounds.size()), problem.reads_c)
                                       : make_steps(how, k.size()));
        for (KStep &step : steps.back())
            step.split = static_cast<int>(part);
    }
    if (!aligns_for || how.in_rings()) return;
    for (Block &block : blocks)
        for (std::size_t part = 0; part < splits(); ++part)
            block.alignment[part] = choose_alignment(*this, *aligns_for, block, part);
}

std::int64_t KRequest::tasks_at_most() const {
    const auto parts = static_cast<std::int64_t>(splits());
    // A piece goes to each rank of a row or column in as many slices as a node has ranks of it, a result from each part
    // to each adder.
    const auto sliced = [&](const std::vector<std::vector<std::size_t>> &groups) {
        std::int64_t copies = 0;
        for (const std::vector<std::size_t> &group : groups) {
            std::map<int, std::int64_t> on_node;
            std::int64_t slices = 1;
            for (const std::size_t block : group)
                slices = std::max(slices, ++on_node[problem.node_of(places[blocks[block].place].front())]);
            copies += slices * static_cast<std::int64_t>(group.size());
            if (on_node.size() > 1) copies += slices * (most_legs - 1) * static_cast<std::int64_t>(on_node.size());
        }
        return copies;
    };
    std::vector<std::array<std::int64_t, 3>> of_round;  // copies of a piece of all rows of A, of B, and of results
    for (const Round &round : rounds)
        of_round.push_back({sliced(round.of_row), sliced(round.of_col),
                            (2 * parts + 4) * static_cast<std::int64_t>(round.of_row.size() * round.of_col.size())});
    std::int64_t most = 0;
    const auto add = [&](std::size_t round, const KStep &step) {
        most += of_round[round][step.kind == fetch_a ? 0 : step.kind == fetch_b ? 1 : 2];
    };
    for (const std::vector<KStep> &of_part : steps)
        for (const KStep &step : of_part) {
            if (how.in_rings()) {
                add(static_cast<std::size_t>(step.round), step);
                continue;
            }
            for (std::size_t round = 0; round < rounds.size(); ++round)
                add(round, step);
        }
    return most;
}

std::vector<std::int64_t> block_edges(std::int64_t extent, int blocks, std::int64_t step, int halved) {
    if (extent < 0 || blocks < 1 || step < 1)
        throw std::invalid_argument("there is at least one block, and its start has a multiple");
    std::int64_t multiple = kernel_elements;
    while (multiple > step && extent / blocks / multiple < least_multiples)
        multiple /= 2;
    if (multiple > step && multiple % step == 0) step = multiple;
    const int count = blocks > 1 ? blocks + halved : blocks;
    std::int64_t units = extent / step;
    if (units < count) step = 1, units = extent;
    std::vector<std::int64_t> starts;
    starts.reserve(static_cast<std::size_t>(count) + 1);
    for (int block = 0; block < blocks; ++block)
        starts.push_back(step * part_of(units, blocks, block).first);
    std::int64_t last = part_of(units, blocks, blocks - 1).first;
    for (int at = blocks; at < count; ++at) {
        last += (units - last + 1) / 2;
        starts.push_back(step * last);
    }
    starts.push_back(extent);
    return starts;
}

}  // namespace uncut
