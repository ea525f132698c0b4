// Which rates concurrent copies get: max-min fair shares of the ports that they cross (model/ports.py).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

#include "simulator.hpp"

namespace uncut {

class SharedRates {
  public:
    struct Change {
        std::int32_t flow;
        double rate;  // bytes per second, from now on
    };

    explicit SharedRates(const SimulatedMachine &machine)
        : m_(machine), links_(machine.bandwidth.size()), ports_(machine.port_capacity.size()) {
        for (std::size_t p = 0; p < ports_.size(); ++p)
            ports_[p].capacity = m_.port_capacity[p];
        num_ports_ = ports_.size();
        auto use = m_.port_uses.begin();
        for (std::size_t link = 0; link < links_.size(); ++link) {
            links_[link].first_use = static_cast<std::uint32_t>(uses_.size());
            for (; use != m_.port_uses.end() && std::get<0>(*use) == link; ++use, ++links_[link].num_uses)
                uses_.push_back({std::get<1>(*use), std::get<2>(*use)});
            uses_.push_back({0, 0});
        }
        if (use != m_.port_uses.end()) throw std::invalid_argument("ports are of links that there are, link by link");
    }

    // Nothing runs, there are no classes and no lane has used a link; memory is kept.
    void clear() {
        for (std::size_t c = 0; c < classes_.size(); ++c) {
            members_[c].flows.clear();
            members_[c].next_of_link = no_class;
        }
        for (std::size_t p = 0; p < num_ports_; ++p) {
            ports_[p].demand = 0;
            ports_[p].was_full = ports_[p].gathered = false;
            ports_[p].present.clear();
        }
        for (Link &of : links_) {
            if (of.own_port >= 0) --of.num_uses;
            of.lane = none_yet, of.own_port = -1, of.first_class = no_class;
        }
        classes_.clear();
        num_ports_ = m_.port_capacity.size();
        changed_.clear();
        reached_.clear();
        place_of_.clear();
    }

    // The class of the transfers on a link that move at most `limit` bytes per second.
    std::int32_t class_of(std::size_t link, double limit) {
        std::int32_t last = no_class;
        for (std::int32_t c = links_[link].first_class; c != no_class; c = members_[c].next_of_link) {
            if (classes_[c].limit == limit) return c;
            last = c;
        }
        const auto number = static_cast<std::int32_t>(classes_.size());
        Class &made = classes_.emplace_back();
        made.limit = limit;
        made.first_use = links_[link].first_use;
        made.num_uses = links_[link].num_uses;
        if (members_.size() < classes_.size()) members_.emplace_back();
        (last == no_class ? links_[link].first_class : members_[last].next_of_link) = number;
        return number;
    }

    // Several lanes on one link, as from private host memory to other ranks' devices, share its bandwidth too.
    void share_link(std::size_t link, std::int32_t lane) {
        Link &of = links_[link];
        if (of.lane == none_yet) of.lane = lane;
        if (of.lane == lane || of.own_port >= 0) return;
        of.own_port = static_cast<std::int32_t>(num_ports_);
        if (ports_.size() == num_ports_) ports_.emplace_back();
        ports_[num_ports_++].capacity = m_.bandwidth[link];
        uses_[of.first_use + of.num_uses++] = {static_cast<std::uint32_t>(of.own_port), 1.0};
        for (std::int32_t c = of.first_class; c != no_class; c = members_[c].next_of_link)
            classes_[c].num_uses = of.num_uses;
    }

    void begin(std::int32_t flow, std::int32_t of) { count(static_cast<std::uint32_t>(of), flow, true); }
    void end(std::int32_t flow, std::int32_t of) { count(static_cast<std::uint32_t>(of), flow, false); }

    bool stale() const { return !changed_.empty(); }

    // New rates of the flows that what began and ended since the last call changes. All others keep theirs.
    // First those that change, and those whom a port of theirs holds back, are given new rates beside all others. Who
    // is treated unfairly by that is given new rates too, until nobody is: max-min fair rates are unique.
    const std::vector<Change> &update() {
        news_.clear();
        for (const std::uint32_t c : changed_) {
            gather(c);
            for (const auto &[number, weight] : ports_of(classes_[c])) {
                const Port &port = ports_[number];
                if (!port.was_full && !is_overloaded(port)) continue;
                for (const auto &[other, w] : port.present)
                    if (classes_[other].held_by == static_cast<std::int32_t>(number)) gather(other);
            }
        }
        do {
            solve();
        } while (widen());
        for (const std::uint32_t number : reached_) {
            Class &c = classes_[number];
            if (c.new_rate != c.rate || c.changed)
                for (const std::int32_t id : members_[number].flows)
                    news_.push_back({id, c.new_rate});
            c.rate = c.new_rate;
            c.load = c.running * c.new_rate;
            c.held_by = c.new_held_by;
            c.gathered = false;
        }
        for (const std::uint32_t c : changed_) {
            classes_[c].changed = classes_[c].gathered = false;
            for (const auto &[number, weight] : ports_of(classes_[c]))
                ports_[number].was_full = false;
        }
        changed_.clear();
        reached_.clear();
        return news_;
    }

  private:
    static constexpr double near = 1 + 1e-12, rounding = 1e-10, infinity = std::numeric_limits<double>::infinity();
    static constexpr std::int32_t by_limit = -1, no_class = -1, none_yet = -1;

    // A port that the transfers of a link cross, or a class of transfers that cross a port.
    struct Use {
        std::uint32_t at;
        double weight;
    };

    // Transfers on one link with one limit get one rate whenever they run together. As large as a line of the cache.
    struct alignas(64) Class {
        double limit = 0;                 // bytes per second
        double running = 0;               // how many
        double rate = 0;                  // of each of them, now
        double load = 0;                  // of all of them
        double new_rate = 0;              // of those that a change reaches
        std::uint32_t first_use = 0;      // in uses_, its link's
        std::int32_t held_by = by_limit;  // the port that is full and keeps the rate from growing
        std::int32_t new_held_by = by_limit;
        std::uint32_t num_uses = 0;
        bool changed = false, gathered = false;
        bool grows = false;  // while rates are shared
    };
    struct Members {
        std::vector<std::int32_t> flows;  // that run
        std::int32_t next_of_link = no_class;
    };

    struct Link {
        std::int32_t lane = none_yet;  // the first that uses it
        std::int32_t own_port = -1;    // that several lanes share
        std::int32_t first_class = no_class;
        std::uint32_t first_use = 0, num_uses = 0;  // in uses_
    };

    struct Port {
        double capacity = 0;
        double demand = 0;  // what its transfers would take at their limits
        // While rates are shared: what its frozen transfers leave, and what the others take per unit of their common
        // rate. Then how many classes of these there are, and the rate at which nothing is left.
        double left = 0, use = 0;
        double full_at = 0;
        // Of those that keep their rates the highest, and the lowest of whom the port holds back; of those with new
        // rates too.
        double highest = 0, lowest_held = 0, highest_new = 0, lowest_held_new = 0;
        int growing = 0;
        bool was_full = false;  // demand was above the capacity before what has changed
        bool gathered = false;
        std::vector<Use> present;  // classes with transfers that run
    };

    // Notes that a flow of a class begins or ends.
    void count(std::uint32_t of, std::int32_t flow, bool begins) {
        Class &c = classes_[of];
        if (!c.changed) {
            c.changed = true;
            changed_.push_back(of);
        }
        std::vector<std::int32_t> &flows = members_[of].flows;
        if (begins) {
            flows.push_back(flow);
        } else {
            std::erase(flows, flow);
        }
        c.running = static_cast<double>(flows.size());
        for (const auto &[number, weight] : ports_of(c)) {
            Port &port = ports_[number];
            port.was_full = port.was_full || is_overloaded(port);
            port.demand += (begins ? weight : -weight) * c.limit;
            if (begins && flows.size() == 1) port.present.push_back({of, weight});
            if (!begins && flows.empty())
                std::erase_if(port.present, [of](const Use &entry) { return entry.at == of; });
            if (port.present.empty()) port.demand = 0;  // what rounding has left
        }
    }

    bool is_overloaded(const Port &port) const { return port.demand > port.capacity; }

    void gather(std::uint32_t of) {
        if (classes_[of].gathered || classes_[of].running == 0) return;
        classes_[of].gathered = true;
        reached_.push_back(of);
    }

    std::span<const Use> ports_of(const Class &c) const { return {uses_.data() + c.first_use, c.num_uses}; }

    // Gives new rates to the classes in reached_, by progressive filling. All that still grow have one rate, so a port
    // is full at what the others leave, divided among those; only the ports of what freezes need new sums.
    void solve() {
        growing_.clear();
        reached_ports_.clear();
        for (const std::uint32_t number : reached_) {
            Class &c = classes_[number];
            c.grows = false;
            c.new_rate = c.limit;
            c.new_held_by = by_limit;
            for (const auto &[p, weight] : ports_of(c)) {
                Port &port = ports_[p];
                if (!is_overloaded(port)) continue;
                if (!port.gathered) {
                    port.gathered = true;
                    port.use = 0;
                    port.growing = 0;
                    reached_ports_.push_back(p);
                }
                port.use += weight * c.running;
                ++port.growing;
                c.grows = true;
            }
            if (c.grows) growing_.push_back(number);
        }
        open_.clear();
        for (const std::uint32_t number : reached_ports_) {
            Port &port = ports_[number];
            port.gathered = false;
            double left = port.capacity, highest = 0, lowest_held = infinity;
            if (static_cast<std::size_t>(port.growing) < port.present.size()) {
                for (const auto &[c, weight] : port.present) {
                    const Class &other = classes_[c];
                    if (other.gathered) continue;
                    left -= weight * other.load;
                    highest = std::max(highest, other.rate);
                    if (other.held_by == static_cast<std::int32_t>(number))
                        lowest_held = std::min(lowest_held, other.rate);
                }
            }
            port.left = left, port.highest = highest, port.lowest_held = lowest_held;
            port.highest_new = 0;
            port.lowest_held_new = infinity;
            if (port.growing > 0) open_.push_back(number);
        }
        sort_growing();
        double rate = 0;
        for (std::size_t next = 0;;) {
            while (next < growing_.size() && !classes_[growing_[next]].grows)
                ++next;
            if (next == growing_.size()) return;
            double least = classes_[growing_[next]].limit;
            for (const std::uint32_t number : open_) {
                Port &port = ports_[number];
                port.full_at = port.left / port.use;
                least = std::min(least, port.full_at);
            }
            rate = std::max(rate, least);  // rounding may leave a port less than it has given
            for (std::size_t at = next; at < growing_.size() && classes_[growing_[at]].limit <= rate * near; ++at)
                freeze(classes_[growing_[at]], classes_[growing_[at]].limit, by_limit);
            for (const std::uint32_t number : open_)
                if (ports_[number].full_at <= rate * near)
                    for (const auto &[c, weight] : ports_[number].present)
                        freeze(classes_[c], rate, static_cast<std::int32_t>(number));
            std::erase_if(open_, [&](std::uint32_t number) { return ports_[number].growing == 0; });
        }
    }

    void rank_classes() {
        at_place_.resize(classes_.size());
        std::iota(at_place_.begin(), at_place_.end(), std::uint32_t{0});
        std::sort(at_place_.begin(), at_place_.end(), [this](std::uint32_t one, std::uint32_t other) {
            const double limit = classes_[one].limit, others = classes_[other].limit;
            return limit < others || (limit == others && one < other);
        });
        place_of_.resize(classes_.size());
        for (std::uint32_t place = 0; place < at_place_.size(); ++place)
            place_of_[at_place_[place]] = place;
        bits_.assign(classes_.size() / 64 + 1, 0);
    }

    // By rising limit. Classes have their places from the first time on, so that nothing is compared here.
    void sort_growing() {
        if (growing_.size() < 2) return;
        if (place_of_.size() != classes_.size()) rank_classes();
        std::size_t first = bits_.size(), last = 0;
        for (const std::uint32_t c : growing_) {
            const std::size_t place = place_of_[c], word = place / 64;
            bits_[word] |= std::uint64_t{1} << place % 64;
            first = std::min(first, word);
            last = std::max(last, word);
        }
        growing_.clear();
        for (std::size_t word = first; word <= last; ++word) {
            for (std::uint64_t left = bits_[word]; left != 0; left &= left - 1)
                growing_.push_back(at_place_[64 * word + static_cast<std::size_t>(std::countr_zero(left))]);
            bits_[word] = 0;
        }
    }

    void freeze(Class &c, double rate, std::int32_t by) {
        if (!c.grows) return;
        c.grows = false;
        c.new_rate = rate;
        c.new_held_by = by;
        const double load = c.running * rate;
        for (const auto &[number, weight] : ports_of(c)) {
            Port &port = ports_[number];
            if (!is_overloaded(port)) continue;
            port.left -= weight * load;
            port.use -= weight * c.running;
            port.highest_new = std::max(port.highest_new, rate);
            --port.growing;
        }
        if (by >= 0)
            ports_[static_cast<std::size_t>(by)].lowest_held_new =
                std::min(ports_[static_cast<std::size_t>(by)].lowest_held_new, rate);
    }

    // Reaches for those whom the new rates of others treat unfairly; false if there is nobody.
    bool widen() {
        unfair_.clear();
        for (const std::uint32_t number : reached_ports_)
            find_unfair(number);
        for (const std::uint32_t c : unfair_)
            gather(c);
        return !unfair_.empty();
    }

    // Those beside the reached ones at a port may keep their rates on two conditions. What the port holds back, while
    // it is full, has as much as anybody there. Nobody has more than a reached one that the port holds back.
    void find_unfair(std::uint32_t number) {
        const Port &port = ports_[number];
        const bool full = port.left <= port.capacity * rounding;
        // Of those that the port holds back none may have less, of all beside them none may have more.
        const double least = full ? port.highest_new : infinity, most = port.lowest_held_new * (1 + rounding);
        if (!(least > port.lowest_held * (1 + rounding)) && !(port.highest > most)) return;
        for (const auto &[c, weight] : port.present) {
            const Class &one = classes_[c];
            if (one.gathered) continue;
            const bool held = one.held_by == static_cast<std::int32_t>(number);
            if ((held && least > one.rate * (1 + rounding)) || one.rate > most) unfair_.push_back(c);
        }
    }

    const SimulatedMachine &m_;
    std::vector<Link> links_;
    std::vector<Use> uses_;  // ports of each link, and a place for its own one
    std::vector<Class> classes_;
    std::vector<Members> members_;  // of each class, and more
    std::vector<Port> ports_;       // num_ports_, and more
    std::size_t num_ports_ = 0;

    // What a change reaches.
    std::vector<std::uint32_t> changed_, reached_, reached_ports_, growing_, open_, unfair_;
    std::vector<Change> news_;

    // Places of all classes by rising limit, and the class at each; a bit for each place.
    std::vector<std::uint32_t> place_of_, at_place_;
    std::vector<std::uint64_t> bits_;
};

}  // namespace uncut
