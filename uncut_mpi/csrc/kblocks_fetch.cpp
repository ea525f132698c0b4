// How A and B reach those who need them: who gets a piece from its origin, and who hands it on.
#include "kblocks_state.hpp"

namespace uncut::kblocks {

std::size_t Scheduler::end_of_stretch(std::size_t at) const {
    const KMove &first = moves_[at];
    while (++at < moves_.size() && is_fetch(moves_[at]) && moves_[at].first_k == first.first_k &&
           moves_[at].last_k == first.last_k) {
    }
    return at;
}

void Scheduler::fetch_groups(const KMove &move, std::optional<bool> shared) {
    const int matrix = move.step == fetch_a ? matrix_a : matrix_b;
    const auto &groups = matrix == matrix_a ? blocks_of_row_ : blocks_of_col_;
    for (std::size_t group = 0; group < groups.size(); ++group) {
        if (shared && *shared != is_shared(matrix, groups[group], move.split)) continue;
        fetch(matrix, static_cast<int>(group), groups[group], move);
        begin_residents();
    }
}

bool Scheduler::is_shared(int matrix, const std::vector<std::size_t> &blocks, int split) const {
    int takers = 0;
    for (const std::size_t block : blocks)
        takers += takes(matrix, in_.blocks[block].members[static_cast<std::size_t>(split)]);
    return takers > 1;
}

void Scheduler::count_alone() {
    for (auto &of : alone_)
        for (const KBlock &block : in_.blocks)
            of.emplace_back(block.members.size(), 0);
    auto count = [&](int matrix, int group, const std::vector<std::size_t> &blocks) {
        if (blocks.empty()) return;
        for (std::size_t split = 0; split < in_.blocks[blocks.front()].members.size(); ++split) {
            takers_.clear();
            for (const std::size_t block : blocks)
                if (takes(matrix, in_.blocks[block].members[split])) takers_.push_back(block);
            if (takers_.size() != 1) continue;
            const KWorker &w = in_.blocks[takers_.front()].members[split];
            const std::int64_t across = matrix == matrix_a
                                            ? band(group).size()
                                            : columns_of(w, 0, static_cast<int>(w.starts.size()) - 1).size();
            alone_[matrix][takers_.front()][split] += across * (w.last_k - w.first_k);
        }
    };
    for (int row = 0; row < in_.rows; ++row)
        count(matrix_a, row, blocks_of_row_[static_cast<std::size_t>(row)]);
    for (int col = 0; col < in_.cols; ++col)
        count(matrix_b, col, blocks_of_col_[static_cast<std::size_t>(col)]);
}

void Scheduler::count_sent() {
    const auto send = [&](const KOrigin &origin, std::int64_t elements) {
        if (!origin.on_host) sent_[static_cast<std::size_t>(origin.rank)] += elements;
    };
    const auto panels = [&](int matrix, const std::vector<std::size_t> &blocks, const auto &across) {
        if (blocks.empty()) return;
        for (std::size_t split = 0; split < in_.blocks[blocks.front()].members.size(); ++split)
            for (const std::size_t block : blocks) {
                const KWorker &w = in_.blocks[block].members[split];
                if (!takes(matrix, w)) continue;
                send(in_.origin[matrix], across(w) * (w.last_k - w.first_k));
                break;
            }
    };
    for (int row = 0; row < in_.rows; ++row)
        panels(matrix_a, blocks_of_row_[static_cast<std::size_t>(row)],
               [&](const KWorker &) { return band(row).size(); });
    for (int col = 0; col < in_.cols; ++col)
        panels(matrix_b, blocks_of_col_[static_cast<std::size_t>(col)],
               [](const KWorker &w) { return w.last_col - w.first_col; });
    for (const KBlock &block : in_.blocks)
        for (const KWorker &w : block.members) {
            if (at_home(matrix_c, w.rank)) continue;
            const std::int64_t rows = w.last_row - w.first_row;
            sent_[w.rank] += rows * (w.last_col - w.first_col);
            for (const KAdder &adder : block.adders)
                for (const KAdder::Part &part : adder.parts)
                    if (adder.rank == w.rank && in_.reads_c) send(in_.origin[matrix_c], rows * part.cols.size());
        }
}

std::int64_t Scheduler::needed_alone(int matrix, std::size_t block, int split) const {
    std::int64_t elements = 0;
    for (const int other : {matrix_a, matrix_b})
        if (in_.origin[other].rank == in_.origin[matrix].rank && !in_.origin[other].on_host)
            elements += alone_[other][block][static_cast<std::size_t>(split)];
    return elements;
}

std::int64_t Scheduler::first_taker(int matrix, int split) const {
    std::int64_t most = 0;
    for (const std::size_t taker : takers_)
        most = std::max(most, needed_alone(matrix, taker, split));
    const auto sent = [&](std::size_t at) {
        return sent_[static_cast<std::size_t>(in_.blocks[takers_[at]].members[static_cast<std::size_t>(split)].rank)];
    };
    std::size_t best = takers_.size();
    for (std::size_t at = 0; at < takers_.size(); ++at)
        if (needed_alone(matrix, takers_[at], split) == most && (best == takers_.size() || sent(at) < sent(best)))
            best = at;
    return static_cast<std::int64_t>(best);
}

void Scheduler::fetch(int matrix, int group, const std::vector<std::size_t> &blocks, const KMove &move) {
    if (blocks.empty()) return;
    if (matrix == matrix_b) {
        fetch_rows(matrix, blocks, move, {});
        return;
    }
    std::vector<std::int64_t> &cuts = cuts_;
    cuts.assign({band(group).first, band(group).last});
    for (const std::size_t block : blocks) {
        const KWorker &w = worker(block, move);
        for (const std::int64_t height : w.heights)
            if (w.first_row + height > cuts[0] && w.first_row + height < cuts[1]) cuts.push_back(w.first_row + height);
    }
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    Extent rows{cuts.front(), cuts.front()};
    for (std::size_t at = 0; at + 1 < cuts.size(); ++at) {
        if (is_needed(blocks, move, cuts[at])) {
            rows = {rows.size() > 0 ? rows.first : cuts[at], cuts[at + 1]};
            continue;
        }
        if (rows.size() > 0) fetch_rows(matrix, blocks, move, rows);
        rows = {cuts[at + 1], cuts[at + 1]};
    }
    if (rows.size() > 0) fetch_rows(matrix, blocks, move, rows);
}

bool Scheduler::is_needed(const std::vector<std::size_t> &blocks, const KMove &move, std::int64_t row) const {
    int least = -1;
    for (const std::size_t block : blocks) {
        const KWorker &w = worker(block, move);
        if (w.panel[matrix_a] < 0) continue;
        const auto above = std::upper_bound(w.heights.begin(), w.heights.end(), row - w.first_row);
        const int at = static_cast<int>(above - w.heights.begin()) - 1;
        least = least < 0 ? at : std::min(least, at);
    }
    return move.top <= least && least < move.bottom;
}

void Scheduler::fetch_rows(int matrix, const std::vector<std::size_t> &blocks, const KMove &move, Extent of_a) {
    const Region source = piece(matrix, worker(blocks.front(), move), move, of_a, false);
    if (source.empty()) return;
    takers_.clear();
    for (const std::size_t block : blocks) {
        const KWorker &w = worker(block, move);
        if (takes(matrix, w)) {
            takers_.push_back(block);
        } else if (w.panel[matrix] >= 0) {
            arrives(block, move, of_a, push(w.rank, w.rank, piece(matrix, w, move, of_a, true), source, -1));
        }
    }
    if (takers_.empty()) return;
    const auto count = static_cast<std::int64_t>(takers_.size());
    const std::int64_t size = source.rows * source.cols * in_.itemsize;
    // A device that serves its copies one after another sends fewer, longer ones.
    const bool whole = in_.serial_copies && !in_.origin[matrix].on_host;
    if (in_.earliest && !in_.origin[matrix].on_host) {
        Delivery wanted{matrix, move, of_a, source, static_cast<double>(size), {}, takers_.size()};
        wanted.takers.reserve(takers_.size());
        for (const std::size_t taker : takers_)
            wanted.takers.push_back({taker});
        deliveries_.push_back(std::move(wanted));
        return;
    }
    const std::int64_t parts =
        whole ? 1 : std::max<std::int64_t>(1, std::min({count, source.cols, size / in_.min_slice_bytes}));
    const std::int64_t turn = move.first_k / in_.first_block + (matrix == matrix_a ? move.top : 0);
    for (std::int64_t part = 0; part < parts; ++part) {
        const Extent slice = part_of(source.cols, parts, part);
        const std::int64_t chosen = whole ? first_taker(matrix, move.split) : (part + turn) % count;
        const std::size_t first = takers_[static_cast<std::size_t>(chosen)];
        const int by = worker(first, move).rank;
        const Region here = piece(matrix, worker(first, move), move, of_a, true).columns(slice.first, slice.last);
        const std::int32_t came = copy_in(in_.origin[matrix], by, here, source.columns(slice.first, slice.last));
        arrives(first, move, of_a, came);
        if (whole) sent_[by] += (count - 1) * source.rows * source.cols;
        for (std::int64_t next = 1; next < count; ++next) {
            // The one that the origin sends to next comes last: its port is busy meanwhile.
            const std::int64_t at = whole ? chosen + count - next : next <= chosen ? next - 1 : next;
            const std::size_t other = takers_[static_cast<std::size_t>(at % count)];
            const KWorker &to = worker(other, move);
            const Region there = piece(matrix, to, move, of_a, true).columns(slice.first, slice.last);
            arrives(other, move, of_a, push(by, to.rank, there, here, came));
        }
    }
}

}  // namespace uncut::kblocks
