// How A and B reach those who need them: who gets a piece from its origin, and who hands it on.
#include <map>

#include "kblocks_scheduler.hpp"

namespace uncut::kblocks {

// Shorter ones take longer to begin than to copy; longer ones are handed on while the next ones come.
static constexpr std::int64_t most_bytes_of_run = std::int64_t{2} << 20;

// What goes from node to node goes in legs of so many of the smallest slices: shorter messages begin too often.
static constexpr std::int64_t slices_of_leg = 32;

std::size_t Scheduler::end_of_stretch(std::size_t at) const {
    const std::vector<KStep> &steps = layout_.steps;
    const KStep &first = steps[at];
    while (++at < steps.size() && is_fetch(steps[at]) && steps[at].first_k == first.first_k &&
           steps[at].last_k == first.last_k && steps[at].round == first.round) {
    }
    return at;
}

void Scheduler::fetch_groups(const KStep &step, std::optional<bool> shared) {
    const int matrix = step.kind == fetch_a ? matrix_a : matrix_b;
    const KRequest::Round &round = round_of(step);
    const std::vector<Blocks> &groups = matrix == matrix_a ? round.of_row : round.of_col;
    for (std::size_t group = 0; group < groups.size(); ++group) {
        if (shared && *shared != is_shared(matrix, groups[group], step.split)) continue;
        fetch(matrix, matrix == matrix_a ? round.strips[group] : Extent{}, groups[group], step);
        begin_residents();
    }
    go_round();
    begin_residents();
}

bool Scheduler::is_shared(int matrix, const Blocks &blocks, int split) const {
    int takers = 0;
    for (const std::size_t block : blocks)
        takers += takes(matrix, member(block, split));
    return takers > 1;
}

void Scheduler::count() {
    const std::size_t splits = layout_.request.splits();
    for (auto &of : alone_)
        of.assign(layout_.blocks.size(), std::vector<std::int64_t>(splits, 0));
    const auto send_all = [&](int matrix, Extent rows, Extent cols) {
        problem_.each_piece(matrix, rows, cols, [&](const KPiece &from, Extent of_rows, Extent of_cols) {
            if (from.origin.on_host) return;
            sent_[static_cast<std::size_t>(from.origin.rank)] += of_rows.size() * of_cols.size();
        });
    };
    // Of blocks that share rows of A or columns of B, which each takes: `across` says which of them a block has.
    const auto count_group = [&](int matrix, const Blocks &blocks, const auto &across) {
        for (std::size_t split = 0; split < splits; ++split) {
            const auto takes_it = [&](std::size_t block) { return takes(matrix, block_of(block).parts[split]); };
            const auto first = std::ranges::find_if(blocks, takes_it);
            if (first == blocks.end()) continue;
            const Rectangle what{matrix, across(block_of(*first)), block_of(*first).parts[split].k};
            send_all(matrix, rows_of(what), cols_of(what));
            if (std::none_of(first + 1, blocks.end(), takes_it))
                alone_[matrix][*first][split] += what.across.size() * what.k.size();
        }
    };
    for (const KRequest::Round &round : layout_.request.rounds) {
        for (std::size_t row = 0; row < round.of_row.size(); ++row)
            count_group(matrix_a, round.of_row[row], [&](const KBlock &) { return round.strips[row]; });
        for (const Blocks &blocks : round.of_col)
            count_group(matrix_b, blocks, [](const KBlock &block) { return block.cols; });
    }
    for (const KBlock &block : layout_.blocks)
        for (const KPart &part : block.parts) {
            if (part.home[matrix_c]) continue;
            sent_[part.rank] += block.rows.size() * block.cols.size();
            for (const KAdder &adder : block.adders)
                for (const KAdder::Slice &slice : adder.slices)
                    if (adder.rank == part.rank && problem_.reads_c) send_all(matrix_c, adder.rows, slice.cols);
        }
}

std::int64_t Scheduler::needed_alone(const KOrigin &origin, std::size_t block, int split) const {
    std::int64_t elements = 0;
    for (const int other : {matrix_a, matrix_b})
        if (problem_.on_device(other, origin.rank)) elements += alone_[other][block][static_cast<std::size_t>(split)];
    return elements;
}

std::size_t Scheduler::first_taker(const KOrigin &origin, int split) const {
    std::int64_t most = 0;
    for (const std::size_t taker : takers_)
        most = std::max(most, needed_alone(origin, taker, split));
    const auto sent = [&](std::size_t at) { return sent_[static_cast<std::size_t>(member(takers_[at], split).rank)]; };
    std::size_t best = takers_.size();
    for (std::size_t at = 0; at < takers_.size(); ++at)
        if (needed_alone(origin, takers_[at], split) == most && (best == takers_.size() || sent(at) < sent(best)))
            best = at;
    return best;
}

void Scheduler::fetch(int matrix, Extent strip, const Blocks &blocks, const KStep &step) {
    if (!how_.from_held) {
        if (!blocks.empty()) fetch_same_k(matrix, strip, blocks, step);
        return;
    }
    // Those that begin at one place have the same at one time.
    std::map<std::array<std::int64_t, 4>, Blocks> by_begin;
    for (const std::size_t block : blocks) {
        const KBlock &one = block_of(block);
        const auto edges = static_cast<std::int64_t>(matrix == matrix_b ? one.alike : 0);
        by_begin[{member(block, step.split).begins, one.begin_row, one.begin_col, edges}].push_back(block);
    }
    for (const auto &[begin, together] : by_begin)
        each_extent(member(together.front(), step.split), step, [&](Extent k) {
            KStep natural = step;
            natural.first_k = k.first, natural.last_k = k.last;
            fetch_same_k(matrix, strip, together, natural);
        });
}

void Scheduler::fetch_same_k(int matrix, Extent strip, const Blocks &blocks, const KStep &step) {
    if (matrix == matrix_b) {
        fetch_rows(matrix, blocks, step, {});
        return;
    }
    std::vector<std::int64_t> &edges = edges_;
    edges.assign({strip.first, strip.last});
    for (const std::size_t number : blocks) {
        const KBlock &block = block_of(number);
        for (const std::int64_t height : block.heights) {
            const std::int64_t edge = block.rows.first + (height + block.begin_row) % block.rows.size();
            if (edge > strip.first && edge < strip.last) edges.push_back(edge);
        }
    }
    std::sort(edges.begin(), edges.end());
    edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
    // What is needed between some edges in a row goes together.
    for (std::size_t first = 0, at = 0; at < edges.size(); ++at) {
        if (at + 1 < edges.size() && is_needed(blocks, step, edges[at])) continue;
        if (at > first) fetch_rows(matrix, blocks, step, {edges[first], edges[at]});
        first = at + 1;
    }
}

bool Scheduler::is_needed(const Blocks &blocks, const KStep &step, std::int64_t row) const {
    int least = -1;
    for (const std::size_t number : blocks) {
        const KBlock &block = block_of(number);
        if (member(number, step.split).panel[matrix_a] < 0) continue;
        const std::int64_t size = block.rows.size(), place = (row - block.rows.first + size - block.begin_row) % size;
        const auto above = std::upper_bound(block.heights.begin(), block.heights.end(), place);
        const int at = static_cast<int>(above - block.heights.begin()) - 1;
        least = least < 0 ? at : std::min(least, at);
    }
    return step.top <= least && least < step.bottom;
}

void Scheduler::fetch_rows(int matrix, const Blocks &blocks, const KStep &step, Extent of_a) {
    const Rectangle what = piece(matrix, blocks.front(), step, of_a);
    const bool of_rows = matrix == matrix_a;
    runs_.clear();
    problem_.each_piece(matrix, rows_of(what), cols_of(what), [&](const KPiece &first, Extent rows, Extent cols) {
        // Of several holders they take turns.
        const std::span<const KPiece> holders(&first, first.holders);
        const KPiece &from = holders[static_cast<std::size_t>(step.first_k / how_.first) % holders.size()];
        const Run run{{matrix, of_rows ? rows : cols, of_rows ? cols : rows}, &from, holders};
        if (!runs_.empty() && !go_together(runs_.back(), run)) hand_out(step);
        find_takers(run, blocks, step, found_);
        if (!runs_.empty() && found_ != takers_) hand_out(step);
        takers_.swap(found_);
        if (!takers_.empty()) runs_.push_back(run);
    });
    if (!runs_.empty()) hand_out(step);
}

bool Scheduler::go_together(const Run &one, const Run &other) const {
    if (how_.in_rings() || one.from->origin.on_host || one.from->origin != other.from->origin) return false;
    const auto is_short = [&](const Run &run) {
        return run.what.across.size() * run.what.k.size() * problem_.itemsize(run.what.matrix) <= most_bytes_of_run;
    };
    return (problem_.serial_copies || how_.earliest) && is_short(one) && is_short(other);
}

void Scheduler::find_takers(const Run &run, const Blocks &blocks, const KStep &step, Blocks &takers) {
    const Rectangle &what = run.what;
    takers.clear();
    if (source_of(run).empty()) return;
    for (const std::size_t block : blocks) {
        const KPart &part = member(block, step.split);
        if (part.panel[what.matrix] < 0) continue;
        const auto own =
            std::ranges::find_if(run.holders, [&](const KPiece &one) { return one.origin.on_device_of(part.rank); });
        if (!store_.brings(block_of(block), part, what)) continue;
        if (own == run.holders.end()) {
            takers.push_back(block);
        } else if (!part.reads_in_place(what.matrix, what.across, what.k)) {
            const Region held = store_.users(what.matrix, *own, rows_of(what), cols_of(what));
            arrives(block, step, what, push(part.rank, part.rank, here(block, step, what), held, -1));
        }
    }
}

void Scheduler::hand_out(const KStep &step) {
    const KOrigin &origin = runs_.front().from->origin;
    const bool from_device = !origin.on_host;
    const auto goes_on = [&](std::size_t taker) { return problem_.node_of(rank_of(taker, step)) != node_of(origin); };
    if (std::ranges::any_of(takers_, goes_on)) {
        hand_out_over_nodes(step);
    } else if (how_.earliest && from_device) {
        deliveries_[static_cast<std::size_t>(node_of(origin))].push_back(to_deliver(runs_, {}, step));
    } else if (problem_.serial_copies && from_device) {
        hand_out_whole(step);
    } else {
        hand_out_in_slices(runs_.front(), step);  // no others go with it
    }
    runs_.clear();
}

Delivery Scheduler::to_deliver(std::span<const Run> runs, Extent columns, const KStep &step) const {
    std::int64_t elements = 0;
    for (const Run &run : runs) {
        const Region source = source_of(run);
        elements += source.rows * (columns.size() > 0 ? columns.size() : source.cols);
    }
    const std::int64_t bytes = elements * problem_.itemsize(runs.front().what.matrix);
    const KOrigin &origin = runs.front().from->origin;
    Delivery one{{runs.begin(), runs.end()}, step,     origin, !origin.on_host, columns,
                 static_cast<double>(bytes), elements, {},     takers_.size()};
    one.takers.reserve(takers_.size());
    for (const std::size_t taker : takers_)
        one.takers.push_back({taker});
    return one;
}

// A device that serves its copies one after another sends few, long ones. Each taker gets some of the runs from there,
// and hands them on when all of them are there. So no copy waits between those that follow one another on a lane, and
// these are one (packing.hpp).
void Scheduler::hand_out_whole(const KStep &step) {
    const KOrigin origin = runs_.front().from->origin;
    const std::size_t count = takers_.size(), parts = std::min(count, runs_.size());
    for (std::size_t part = 0; part < parts; ++part) {
        const std::span<const Run> some = std::span(runs_).subspan(
            runs_.size() * part / parts, runs_.size() * (part + 1) / parts - runs_.size() * part / parts);
        const std::size_t chosen = first_taker(origin, step.split);
        const std::size_t first = takers_[chosen];
        const int by = rank_of(first, step);
        std::int32_t came = -1;
        for (const Run &run : some) {
            const Region held = here(first, step, run.what);
            came = copy_in(origin, by, held, source_of(run));
            arrives(first, step, run.what, came);
            sent_[by] += static_cast<std::int64_t>(count - 1) * held.rows * held.cols;
        }
        // The one that the origin sends to next comes last: its port is busy meanwhile.
        for (std::size_t next = 1; next < count; ++next) {
            const std::size_t other = takers_[(chosen + count - next) % count];
            for (const Run &run : some)
                arrives(other, step, run.what,
                        push(by, rank_of(other, step), here(other, step, run.what), here(first, step, run.what), came));
        }
    }
}

// Each taker gets a slice, and hands it on.
void Scheduler::hand_out_in_slices(const Run &run, const KStep &step) {
    const Rectangle &what = run.what;
    const KOrigin &origin = run.from->origin;
    const Region source = source_of(run);
    const auto count = static_cast<std::int64_t>(takers_.size());
    const std::int64_t parts = count_slices(run, count);
    const std::int64_t turn = step.first_k / how_.first + (what.matrix == matrix_a ? step.top : 0);
    for (std::int64_t part = 0; part < parts; ++part) {
        const Extent slice = part_of(source.cols, parts, part);
        const auto chosen = static_cast<std::size_t>((part + turn) % count);
        const std::size_t first = takers_[chosen];
        const int by = rank_of(first, step);
        const Region held = here(first, step, what).columns(slice);
        const std::int32_t came = copy_in(origin, by, held, source.columns(slice));
        arrives(first, step, what, came);
        if (how_.earliest && !problem_.ways.even()) {
            Delivery one = to_deliver({&run, 1}, slice, step);
            const auto at = static_cast<std::size_t>(by);
            one.takers[chosen].task = came;
            one.takers[chosen].there = host_until_[at] += one.bytes * problem_.ways.from_host[at];
            if (--one.left > 0) deliveries_[static_cast<std::size_t>(problem_.node_of(by))].push_back(std::move(one));
            continue;
        }
        for (const std::size_t other : takers_)
            if (other != first)
                arrives(other, step, what,
                        push(by, rank_of(other, step), here(other, step, what).columns(slice), held, came));
    }
}

std::int64_t Scheduler::count_slices(const Run &run, std::int64_t most) const {
    const Region source = source_of(run);
    const std::int64_t size = source.elements() * problem_.itemsize(run.what.matrix);
    return std::max<std::int64_t>(1, std::min({most, source.cols, size / problem_.min_slice_bytes}));
}

void Scheduler::hand_out_over_nodes(const KStep &step) {
    const Run &front = runs_.front();
    const int nodes = problem_.locations.num_nodes(), home = node_of(front.from->origin);
    const auto rounds = [&](std::size_t taker) {  // how far round from the origin
        const int rank = rank_of(taker, step);
        return std::pair{(problem_.node_of(rank) - home + nodes) % nodes, rank};
    };
    std::ranges::sort(takers_, {}, rounds);
    std::vector<std::size_t> ends;  // of the takers of each node
    std::size_t most = 1;
    for (std::size_t at = 1; at <= takers_.size(); ++at)
        if (at == takers_.size() || rounds(takers_[at]).first != rounds(takers_[at - 1]).first) {
            most = std::max(most, at - (ends.empty() ? 0 : ends.back()));
            ends.push_back(at);
        }
    const std::size_t count = runs_.size();
    const auto parts = count > 1 ? static_cast<std::int64_t>(std::min(most, count))
                                 : count_slices(front, static_cast<std::int64_t>(most));
    const std::int64_t turn = step.first_k / how_.first + (front.what.matrix == matrix_a ? step.top : 0);
    for (std::int64_t part = 0; part < parts; ++part) {
        const Extent some = part_of(static_cast<std::int64_t>(count), count > 1 ? parts : 1, count > 1 ? part : 0);
        const Extent columns = count > 1 || parts == 1 ? Extent{} : part_of(source_of(front).cols, parts, part);
        const auto first = static_cast<std::size_t>(some.first), size = static_cast<std::size_t>(some.size());
        rounds_.push_back({to_deliver(std::span(runs_).subspan(first, size), columns, step), ends, part + turn});
    }
}

// All go on by one node before any goes on by two. Slices of several nodes then go round at one time: a node that first
// sent on what another one has would wait for it with its own.
void Scheduler::go_round() {
    bool any = !rounds_.empty();
    for (std::size_t at = 0; any; ++at) {
        any = false;
        for (RoundNodes &one : rounds_) {
            if (at < one.ends.size()) go_on(one, at);
            any |= at + 1 < one.ends.size();
        }
    }
    rounds_.clear();
}

void Scheduler::go_on(RoundNodes &one, std::size_t at) {
    Delivery &slice = one.slice;
    const std::size_t begin = at == 0 ? 0 : one.ends[at - 1];
    const auto here = std::span(slice.takers).subspan(begin, one.ends[at] - begin);
    const int node = node_of(here.front(), slice.step), home = node_of(slice.origin);
    const KPiece &near = problem_.nearest(slice.runs.front().holders.front(), node);
    if (node != home && slice.runs.size() == 1 && node_of(near.origin) == node) {  // which has it
        Delivery own = slice;
        own.runs.front().from = &near, own.origin = near.origin;
        Delivery::Taker *first = first_of_node(here, own, one.turn);
        if (first) pass(own, nullptr, *first);
        hand_on(own, here, first);
        return;
    }
    Delivery::Taker *first = first_of_node(here, slice, one.turn);
    if (first && node != home) pass_in_legs(slice, one.from, *first, one.came);
    if (first && node == home) pass(slice, one.from, *first), one.came.assign(1, first->task);
    if (first) one.from = first;
    hand_on(slice, here, first);
}

void Scheduler::pass_in_legs(const Delivery &slice, const Delivery::Taker *from, Delivery::Taker &to,
                             std::vector<std::int32_t> &came) {
    if (slice.runs.size() > 1) {
        pass(slice, from, to);
        came.assign(1, to.task);
        return;
    }
    const Run &run = slice.runs.front();
    const int by = from ? rank_of(from->block, slice.step) : -1, rank = rank_of(to.block, slice.step);
    const auto of_slice = [&](const Region &all) {
        return slice.columns.size() > 0 ? all.columns(slice.columns) : all;
    };
    const Region source = of_slice(from ? here(from->block, slice.step, run.what) : source_of(run)),
                 there = of_slice(here(to.block, slice.step, run.what));
    const auto legs = std::max<std::int64_t>(
        1, std::min({most_legs, source.cols,
                     static_cast<std::int64_t>(slice.bytes) / (slices_of_leg * problem_.min_slice_bytes)}));
    std::vector<std::int32_t> gone;
    for (std::int64_t leg = 0; leg < legs; ++leg) {
        const Extent some = part_of(source.cols, legs, leg);
        // As many came as go on, or all at once.
        const std::int32_t awaited = came.empty() ? -1 : came[came.size() == 1 ? 0 : static_cast<std::size_t>(leg)];
        gone.push_back(from ? push(by, rank, there.columns(some), source.columns(some), awaited)
                            : copy_in(slice.origin, rank, there.columns(some), source.columns(some)));
    }
    to.task = gone.back();
    came.swap(gone);
    arrives(to.block, slice.step, run.what, to.task);
    if (from) sent_[static_cast<std::size_t>(by)] += slice.elements;
}

Delivery::Taker *Scheduler::first_of_node(std::span<Delivery::Taker> takers, const Delivery &slice,
                                          std::int64_t turn) const {
    const KOrigin &origin = slice.origin;
    const auto count = static_cast<std::int64_t>(takers.size());
    if (origin.on_host || node_of(origin) != node_of(takers.front(), slice.step))
        return &takers[static_cast<std::size_t>(turn % count)];
    // The origin has its place among them.
    const auto before = std::ranges::count_if(
        takers, [&](const Delivery::Taker &one) { return rank_of(one.block, slice.step) < origin.rank; });
    const std::int64_t at = turn % (count + 1);
    return at == before ? nullptr : &takers[static_cast<std::size_t>(at - (at > before))];
}

void Scheduler::hand_on(const Delivery &slice, std::span<Delivery::Taker> takers, const Delivery::Taker *from) {
    if (how_.earliest) {
        Delivery one = slice;
        one.origin_sends = !from;
        one.takers.assign(takers.begin(), takers.end());
        one.left = takers.size() - (from ? 1 : 0);
        if (one.left > 0) deliveries_[static_cast<std::size_t>(node_of(takers.front(), slice.step))].push_back(one);
        return;
    }
    for (Delivery::Taker &other : takers)
        if (&other != from) pass(slice, from, other);
}

}  // namespace uncut::kblocks
