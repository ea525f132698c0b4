// Who gets a piece from whom when: list scheduling over the ports of devices.
#include "kblocks_scheduler.hpp"

#include <algorithm>

namespace uncut::kblocks {

// What goes over other ranks goes in so many chunks at least, so that its links work at one time.
static constexpr std::int64_t least_chunks = 8;

// But shorter ones take longer to begin than to copy.
static constexpr std::int64_t least_bytes_of_chunk = std::int64_t{1} << 20;

// Of all copies of a node that could be next the one that can begin first is, again and again. What ports do besides
// (C) is not counted: products decide when.
void Scheduler::deliver() {
    for (std::vector<Delivery> &of_node : deliveries_)
        for (NextCopy next = next_copy(of_node); next.piece; next = next_copy(of_node)) {
            Delivery &of = *next.piece;
            pass(of, next.from, *next.to);
            next.to->there = occupy(sender(next), rank_of(next.to->block, of.step), next.begins, of.bytes);
            if (--of.left == 0) of_node.erase(of_node.begin() + (next.piece - of_node.data()));
            begin_residents();
        }
}

void Scheduler::pass(const Delivery &what, const Delivery::Taker *from, Delivery::Taker &to) {
    const auto some = [&](const Region &run) { return what.columns.size() > 0 ? run.columns(what.columns) : run; };
    const int by = rank_of(to.block, what.step);
    for (const Run &run : what.runs) {
        const Region there = some(here(to.block, what.step, run.what));
        to.task = from ? push(rank_of(from->block, what.step), by, there, some(here(from->block, what.step, run.what)),
                              from->task)
                       : copy_in(what.origin, by, there, some(source_of(run)));
        arrives(to.block, what.step, run.what, to.task);
    }
    if (from) sent_[static_cast<std::size_t>(rank_of(from->block, what.step))] += what.elements;
}

int Scheduler::sender(const NextCopy &copy) const {
    return copy.from ? rank_of(copy.from->block, copy.piece->step) : copy.piece->origin.rank;
}

double Scheduler::could_begin(int from, int to, double there, double bytes) const {
    double at = std::max(there, sends_until_[static_cast<std::size_t>(from)]);
    if (to < 0) return at;
    const KWays &ways = problem_.ways;
    ways.each_leg(from, to, [&](int a, int b) { at = std::max(at, link_until_[ways.at(a, b)]); });
    return at + (ways.cost(from, to) - 1) * bytes;
}

double Scheduler::occupy(int from, int to, double begins, double bytes) {
    const KWays &ways = problem_.ways;
    const auto by = static_cast<std::size_t>(from), at = static_cast<std::size_t>(to);
    if (ways.even()) return sends_until_[by] = receives_until_[at] = begins + bytes;
    ways.each_leg(from, to, [&](int a, int b) {
        link_until_[ways.at(a, b)] = begins + bytes * ways.links[ways.at(a, b)];
        double &sends = sends_until_[static_cast<std::size_t>(a)],
               &receives = receives_until_[static_cast<std::size_t>(b)];
        sends = std::max(sends, begins) + bytes * ways.sends[static_cast<std::size_t>(a)];
        receives = std::max(receives, begins) + bytes * ways.receives[static_cast<std::size_t>(b)];
    });
    return begins + bytes * ways.cost(from, to);
}

// Of equals what most others still wait for is first, then what was asked for first. It goes to one of those that get
// most from the origin alone, and of these to one that sends least. What is handed on goes to the others' ports, so
// that the origin's next copy finds its target's port free. Where links differ, of copies that could be next the one
// that ends first is. What it takes longer than on the fastest link counts as if it began later.
Scheduler::NextCopy Scheduler::next_copy(std::vector<Delivery> &deliveries) {
    const bool even = problem_.ways.even();
    NextCopy best;
    std::tuple<double, std::int64_t, std::size_t, std::int64_t, std::int64_t> least;
    for (std::size_t number = 0; number < deliveries.size(); ++number) {
        Delivery &of = deliveries[number];
        NextCopy copy{&of};
        double ready = 0;
        const auto choose_sender = [&](int to) {
            copy.from = nullptr;
            // Every byte leaves its origin once where links are alike.
            bool any = of.origin_sends;
            if (any) ready = could_begin(of.origin.rank, to, 0, of.bytes);
            for (Delivery::Taker &holder : of.takers) {
                if (!holder.has_it()) continue;
                const int rank = rank_of(holder.block, of.step);
                const double from = could_begin(rank, to, holder.there, of.bytes);
                const bool replaces = copy.from || !even;
                if (any && replaces && std::tie(ready, sent_[sender(copy)]) <= std::tie(from, sent_[rank])) continue;
                any = true;
                copy.from = &holder;
                ready = from;
            }
        };
        if (even) choose_sender(-1);
        for (Delivery::Taker &taker : of.takers) {
            if (taker.has_it()) continue;
            const int rank = rank_of(taker.block, of.step);
            if (!even) choose_sender(rank);
            copy.to = &taker;
            copy.begins = std::max(ready, receives_until_[rank]);
            const bool shared = !copy.from && of.left > 1;
            const std::int64_t alone = shared ? needed_alone(of.origin, taker.block, of.step.split) : 0;
            const auto key = std::make_tuple(copy.begins, -static_cast<std::int64_t>(of.left), number, -alone,
                                             shared ? sent_[rank] : 0);
            if (best.piece && !(key < least)) continue;
            best = copy;
            least = key;
        }
    }
    if (best.piece) {  // what it takes longer is no part of when it begins
        const int by = sender(best), to = rank_of(best.to->block, best.piece->step);
        best.begins -= (problem_.ways.cost(by, to) - 1) * best.piece->bytes;
    }
    return best;
}

std::int32_t Scheduler::relay(LaneKind kind, int rank, int to, const Region &there, const Region &source,
                              Tasks awaits) {
    const std::uint8_t dtype = layout_.buffers[static_cast<std::size_t>(source.buffer)].dtype;
    const std::vector<KRelay> &relays = layout_.relays[dtype];
    const std::array<int, most_relays_of_a_way> over = problem_.ways.ways[problem_.ways.at(rank, to)].relay;
    const std::int64_t most = relays[static_cast<std::size_t>(over[0])].columns;
    const std::int64_t least = least_bytes_of_chunk / std::max<std::int64_t>(1, source.rows * bytes_of(dtype));
    const std::int64_t chunk =
        std::min(most, std::max<std::int64_t>({1, least, (source.cols + least_chunks - 1) / least_chunks}));
    const std::vector<std::int32_t> first(awaits.begin(), awaits.end());  // which may live in what tasks change
    std::int32_t came = -1;
    for (std::int64_t at = 0; at < source.cols; at += chunk) {
        const std::int64_t end = std::min(source.cols, at + chunk);
        Region held = source.columns({at, end});
        std::vector<std::int32_t> waits = first;
        int from = rank;
        std::int32_t *read_by = nullptr;
        for (const int over_rank : over) {
            if (over_rank < 0) continue;
            const auto index = static_cast<std::size_t>(over_rank);
            Slots &slots = slots_[dtype][index];
            const std::size_t slot = slots.next++ % relay_slots;
            const Region kept{relays[index].buffer, 0, static_cast<std::int64_t>(slot) * most, held.rows, held.cols};
            waits.push_back(slots.read_by[slot]);
            came = copy(lane_to(from, kind, over_rank), kept, held, waits);
            if (read_by) *read_by = came;
            read_by = &slots.read_by[slot];
            waits.assign(1, came);
            held = kept, from = over_rank;
        }
        came = copy(lane_to(from, kind, to), there.columns({at, end}), held, waits);
        *read_by = came;
    }
    return came;
}

}  // namespace uncut::kblocks
