// Who gets a piece from whom when: list scheduling over the ports of devices.
#include "kblocks_scheduler.hpp"

#include <algorithm>

namespace uncut::kblocks {

// Of all copies that could be next the one that can begin first is, again and again. What ports do besides (C) is
// not counted: products decide when.
void Scheduler::deliver() {
    for (NextCopy next = next_copy(); next.piece; next = next_copy()) {
        Delivery &of = *next.piece;
        const Region there = here(next.to->block, of.move, of.what);
        const int by = sender(next), to = rank_of(next.to->block, of.move);
        if (next.from) {
            next.to->task = push(by, to, there, here(next.from->block, of.move, of.what), next.from->task);
            sent_[by] += of.source.rows * of.source.cols;
        } else {
            next.to->task = copy_in(of.origin, to, there, of.source);
        }
        next.to->there = sends_until_[by] = receives_until_[to] = next.begins + of.bytes;
        arrives(next.to->block, of.move, of.what, next.to->task);
        if (--of.left == 0) deliveries_.erase(deliveries_.begin() + (next.piece - deliveries_.data()));
        begin_residents();
    }
}

int Scheduler::sender(const NextCopy &copy) const {
    return copy.from ? rank_of(copy.from->block, copy.piece->move) : copy.piece->origin.rank;
}

// Of equals what most others still wait for is first, then what was asked for first; it goes to one of those that get
// most from the origin alone, and of these to one that sends least: what is handed on goes to the others' ports, so
// that the origin's next copy finds its target's port free.
Scheduler::NextCopy Scheduler::next_copy() {
    NextCopy best;
    std::tuple<double, std::int64_t, std::size_t, std::int64_t, std::int64_t> least;
    for (std::size_t number = 0; number < deliveries_.size(); ++number) {
        Delivery &of = deliveries_[number];
        NextCopy copy{&of};
        double ready = sends_until_[sender(copy)];
        for (Delivery::Taker &holder : of.takers) {
            if (!holder.has_it()) continue;
            const int rank = rank_of(holder.block, of.move);
            const double from = std::max(holder.there, sends_until_[rank]);
            // Every byte leaves its origin once.
            if (copy.from && std::tie(ready, sent_[sender(copy)]) <= std::tie(from, sent_[rank])) continue;
            copy.from = &holder;
            ready = from;
        }
        const bool shared = !copy.from && of.left > 1;
        for (Delivery::Taker &taker : of.takers) {
            if (taker.has_it()) continue;
            const int rank = rank_of(taker.block, of.move);
            copy.to = &taker;
            copy.begins = std::max(ready, receives_until_[rank]);
            const std::int64_t alone = shared ? needed_alone(of.origin, taker.block, of.move.split) : 0;
            const auto key = std::make_tuple(copy.begins, -static_cast<std::int64_t>(of.left), number, -alone,
                                             shared ? sent_[rank] : 0);
            if (best.piece && !(key < least)) continue;
            best = copy;
            least = key;
        }
    }
    return best;
}

}  // namespace uncut::kblocks
