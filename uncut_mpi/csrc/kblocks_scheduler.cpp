// The order of tasks, products, and how C leaves them.
#include "kblocks_scheduler.hpp"

#include "kblocks_state.hpp"

namespace uncut {
namespace kblocks {

Scheduler::Scheduler(const KInput &in, KTables &out)
    : in_(in),
      out_(out),
      blocks_of_row_(blocks_in(true)),
      blocks_of_col_(blocks_in(false)),
      sums_(static_cast<std::size_t>(in.num_ranks), 0),
      sent_(static_cast<std::size_t>(in.num_ranks), 0),
      lanes_(static_cast<std::size_t>(in.num_ranks)),
      sends_until_(static_cast<std::size_t>(in.num_ranks), 0),
      receives_until_(static_cast<std::size_t>(in.num_ranks), 0) {
    std::size_t most = 0, all = 0;
    for (const std::vector<KMove> &moves : in_.moves) {
        most = std::max(most, moves.size());
        all += moves.size();
    }
    moves_.reserve(all);
    for (std::size_t at = 0; at < most; ++at)
        for (const std::vector<KMove> &moves : in_.moves)
            if (at < moves.size()) moves_.push_back(moves[at]);
    for (const KMove &move : moves_)
        any_direct_ = any_direct_ || move.direct;
    for (const KBlock &block : in_.blocks) {
        states_.emplace_back(block.members.size());
        c_in_.emplace_back(block.adders.size());
        const std::size_t count = (block.members.front().heights.size() - 1) * columns_in(block.members.front());
        for (WorkerState &state : states_.back()) {
            state.blocks.resize(count);
            state.arriving.reserve(usual_pieces);
        }
        for (auto &tasks : c_in_.back())
            tasks.assign(count, -1);
        finished_.emplace_back(count, 0);
    }
    if (in_stretches()) {
        count_alone();
        count_sent();
    }
}

void Scheduler::run() {
    for (std::size_t at = 0; at < moves_.size(); ++at) {
        const KMove &move = moves_[at];
        if (!is_fetch(move)) {
            for (std::size_t block = 0; block < in_.blocks.size(); ++block)
                take(block, move);
        } else if (in_stretches()) {
            const std::size_t end = end_of_stretch(at);
            for (const bool shared : {true, false})
                for (std::size_t which = at; which < end; ++which)
                    fetch_groups(moves_[which], shared);
            deliver();
            at = end - 1;
        } else {
            fetch_groups(move, std::nullopt);
        }
    }
}

void Scheduler::begin_residents() {
    if (out_.tasks.empty() || std::exchange(residents_begun_, true)) return;
    for (std::size_t block = 0; block < in_.blocks.size(); ++block)
        for (std::size_t split = 0; split < in_.blocks[block].members.size(); ++split)
            if (resident(in_.blocks[block].members[split]))
                multiply_here(in_.blocks[block].members[split], states_[block][split], static_cast<int>(split), 1);
}

void Scheduler::take(std::size_t block, const KMove &move) {
    const KBlock &of = in_.blocks[block];
    const KWorker &w = of.members[move.split];
    if (columns_of(w, move.first, move.last).size() == 0 || rows_of(w, move.top, move.bottom).size() == 0) return;
    if (move.step == multiply) {
        multiply_block(w, states_[block][move.split], move);
    } else if (move.step == fetch_c) {
        fetch_block(block, w, states_[block][move.split], move);
    } else if (++finished_[block][index(w, move.top, move.first)] == static_cast<int>(of.members.size())) {
        finish_block(block, move);
    }
}

void Scheduler::fetch_block(std::size_t block, const KWorker &w, WorkerState &state, const KMove &move) {
    if (!in_.reads_c || at_home(matrix_c, w.rank)) return;
    const Extent rows = rows_of(w, move.top, move.bottom);
    if (is_direct(w, move)) {
        const Extent cols = columns_of(w, move.first, move.last);
        state.blocks[index(w, move.top, move.first)].c_there =
            copy_in(in_.origin[matrix_c], w.rank, held(w, panel_direct, rows, cols), user(matrix_c, rows, cols));
        return;
    }
    const std::vector<KAdder> &adders = in_.blocks[block].adders;
    for (std::size_t a = 0; a < adders.size(); ++a) {
        if (adders[a].rank != w.rank) continue;
        each_part(adders[a], move, [&](const Columns &part) {
            const Region beside = in_staging(adders[a].staging, w, rows, part);
            c_in_[block][a][index(w, move.top, part.block)] =
                copy_in(in_.origin[matrix_c], w.rank, beside, user(matrix_c, rows, part.cols));
        });
    }
}

void Scheduler::multiply_here(const KWorker &w, WorkerState &state, int split, int most) {
    const int rows = static_cast<int>(w.heights.size()) - 1, columns = static_cast<int>(columns_in(w));
    const int step = w.panel[matrix_c] < 0 ? columns : 1;
    for (int column = 0; column < columns && most > 0; column += step) {
        const KMove whole{multiply, split, 0, w.last_k - w.first_k, column, column + step, 0, rows};
        if (state.blocks[index(w, 0, column)].begun || columns_of(w, whole.first, whole.last).size() == 0) continue;
        multiply_piece(w, state, whole);
        --most;
    }
}

void Scheduler::multiply_block(const KWorker &w, WorkerState &state, const KMove &move) {
    if (resident(w)) {
        multiply_here(w, state, move.split, static_cast<int>(columns_in(w)));
    } else if (!has_operands(w)) {
        multiply_piece(w, state, move);
    } else if (!state.blocks[index(w, move.top, move.first)].begun) {
        KMove whole = move;
        whole.first_k = 0, whole.last_k = w.last_k - w.first_k;
        multiply_piece(w, state, whole);
    }
}

void Scheduler::multiply_piece(const KWorker &w, WorkerState &state, const KMove &move) {
    const Extent rows = rows_of(w, move.top, move.bottom), cols = columns_of(w, move.first, move.last);
    const Extent all = Extent{move.first_k, move.last_k}.shifted(w.first_k);
    const std::int64_t left = all.size() > w.k_step ? all.size() % w.k_step : 0;
    const Extent inner{all.first, all.last - left};
    const Region target = held(w, panel_of_c(w, move), rows, cols);
    std::array<Operand, 3> reads;
    std::size_t num_reads = 2;
    const auto factors = [&](Extent of) {
        reads[0] = {held(w, matrix_a, rows, of), alpha, in_.trans_a};
        reads[1] = {held(w, matrix_b, of, cols), one, in_.trans_b};
    };
    factors(inner);
    awaits_.clear();
    const std::size_t corner = index(w, move.top, move.first);
    if (state.blocks[corner].begun) {
        reads[num_reads++] = {target, one};
    } else if (in_place(w, move) && in_.reads_c) {
        reads[num_reads++] = {target, beta};
    } else if (state.blocks[corner].c_there >= 0) {
        reads[num_reads++] = {target, beta};
        awaits_.push_back(state.blocks[corner].c_there);
    }
    each_block(w, move, [&](std::size_t at) { state.blocks[at].begun = true; });
    const bool goes_on = state.last.first == move.first && state.last.last == move.last && state.last.top == move.top &&
                         state.last.bottom == move.bottom;
    if (state.last.step == multiply && !goes_on)
        state.lane = (state.lane + 1) % static_cast<std::size_t>(in_.product_lanes);
    state.last = move;
    ByLane before = on_no_lane;  // what this block's sums so far were made by
    each_block(w, move, [&](std::size_t at) {
        for (std::size_t lane = 0; lane < before.size(); ++lane)
            before[lane] = std::max(before[lane], state.blocks[at].products[lane]);
    });
    awaits_.insert(awaits_.end(), before.begin(), before.end());
    // A lane is in order: what one product awaits the next ones need not, nor those that await it.
    const auto next = static_cast<std::int32_t>(out_.tasks.size());
    const auto is_done_with = [&](Piece &piece) {
        if (!meet(piece, move, rows.shifted(-w.first_row)) || piece.awaited_by[state.lane] >= 0) return false;
        bool awaited = false;
        for (std::size_t lane = 0; lane < before.size(); ++lane)
            awaited = awaited || (piece.awaited_by[lane] >= 0 && piece.awaited_by[lane] <= before[lane]);
        if (!awaited) awaits_.push_back(piece.task);
        piece.awaited_by[state.lane] = next;
        return std::count_if(piece.awaited_by.begin(), piece.awaited_by.end(),
                             [](std::int32_t by) { return by >= 0; }) == in_.product_lanes;
    };
    std::vector<Piece> &pieces = state.arriving;
    std::size_t kept = state.awaited_until[state.lane];
    auto until = state.awaited_until;
    for (std::size_t at = kept; at < pieces.size(); ++at) {
        if (is_done_with(pieces[at])) {
            for (std::size_t lane = 0; lane < until.size(); ++lane)
                until[lane] -= at < state.awaited_until[lane];
        } else {
            if (kept != at) pieces[kept] = pieces[at];
            ++kept;
        }
    }
    pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(kept), pieces.end());
    state.awaited_until = until;
    std::size_t &first = state.awaited_until[state.lane];
    while (first < pieces.size() && pieces[first].awaited_by[state.lane] >= 0)
        ++first;
    const std::int32_t on = compute(w.rank, product_lanes[state.lane]);
    std::int32_t made = task(gemm_task, on, target, {reads.data(), num_reads}, awaits_);
    if (left > 0) {
        factors({inner.last, all.last});
        reads[2] = {target, one};
        made = task(gemm_task, on, target, reads, {});
    }
    each_block(w, move, [&](std::size_t at) {
        state.blocks[at].products = on_no_lane;
        state.blocks[at].products[state.lane] = made;
    });
}

void Scheduler::finish_block(std::size_t block, const KMove &move) {
    const KBlock &of = in_.blocks[block];
    const KWorker &front = of.members.front();
    if (in_place(front, move)) return;
    const Extent rows = rows_of(front, move.top, move.bottom);
    const bool sums = in_.combines && !is_direct(front, move);
    for (std::size_t a = 0; a < of.adders.size(); ++a) {
        const KAdder &adder = of.adders[a];
        each_part(adder, move, [&](const Columns &part) {
            const Region target = user(matrix_c, rows, part.cols);
            std::vector<Summand> &summands = summands_;
            summands.clear();
            for (std::size_t m = 0; m < of.members.size(); ++m) {
                const KWorker &member = of.members[m];
                const Region own = held(member, panel_of_c(member, move), rows, part.cols);
                ByLane last = on_no_lane;
                each_block(member, move, [&](std::size_t at) {
                    for (std::size_t lane = 0; lane < last.size(); ++lane)
                        last[lane] = std::max(last[lane], states_[block][m].blocks[at].products[lane]);
                });
                if (member.rank == adder.rank) {
                    summands.push_back({own, last});
                    continue;
                }
                const Region there = sums ? in_staging(adder.partial[m], member, rows, part) : target;
                summands.push_back({there, {push_result(member.rank, adder.rank, there, own, last), -1}});
            }
            Summand out = summands.front();
            if (sums) out = combine(block, a, move, part, summands, target);
            if (!at_home(matrix_c, adder.rank))
                copy_out(adder.rank, in_.origin[matrix_c], target, out.region, out.made_by);
        });
    }
}

Summand Scheduler::combine(std::size_t block, std::size_t a, const KMove &move, const Columns &part,
                           std::vector<Summand> &summands, const Region &target) {
    const KAdder &adder = in_.blocks[block].adders[a];
    const KWorker &front = in_.blocks[block].members.front();
    const std::int32_t on = compute(adder.rank, sum_lane + sums_[static_cast<std::size_t>(adder.rank)]++ % sum_lanes);
    const auto most = static_cast<std::size_t>(in_.most_summands), room = most - (in_.reads_c ? 1 : 0);
    auto sum_up = [&](std::size_t count, const Region &into, bool with_c, const Region &c, std::int32_t c_task) {
        summed_.clear();
        awaits_.clear();
        for (std::size_t s = 0; s < count; ++s) {
            summed_.push_back({summands[s].region});
            awaits_.insert(awaits_.end(), summands[s].made_by.begin(), summands[s].made_by.end());
        }
        if (with_c) {
            summed_.push_back({c, beta});
            awaits_.push_back(c_task);
        }
        return task(combine_task, on, into, summed_, awaits_);
    };
    while (summands.size() > room) {
        const Region into = summands.front().region;
        const std::size_t count = std::min(most, summands.size());
        const std::int32_t sum = sum_up(count, into, false, into, -1);
        summands.erase(summands.begin() + 1, summands.begin() + static_cast<std::ptrdiff_t>(count));
        summands.front() = {into, {sum, -1}};
    }
    const bool home = at_home(matrix_c, adder.rank);
    const Region beside = in_staging(adder.staging, front, rows_of(front, move.top, move.bottom), part);
    const Region out = home ? target : in_.half ? beside : summands.front().region;
    return {out,
            {sum_up(summands.size(), out, in_.reads_c, home ? target : beside,
                    c_in_[block][a][index(front, move.top, part.block)]),
             -1}};
}

}  // namespace kblocks

void schedule_kblocks(const KInput &input, KTables &tables) {
    tables.clear();
    kblocks::Scheduler(input, tables).run();
}

}  // namespace uncut
