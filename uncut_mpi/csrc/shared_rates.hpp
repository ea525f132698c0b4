// Which rates concurrent copies get: max-min fair shares of the ports that they cross (model/ports.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "simulator.hpp"

namespace uncut {

class SharedRates {
  public:
    struct Change {
        std::int32_t flow;
        double rate;  // bytes per second, from now on
    };

    explicit SharedRates(const SimulatedMachine &machine);

    // The class of the transfers on a link that move at most `limit` bytes per second.
    std::int32_t class_of(std::size_t link, double limit);
    // Several lanes on one link, as from private host memory to other ranks' devices, share its bandwidth too.
    void share_link(std::size_t link, std::int32_t lane);

    void begin(std::int32_t flow, std::int32_t of) { count(static_cast<std::size_t>(of), flow, true); }
    void end(std::int32_t flow, std::int32_t of) { count(static_cast<std::size_t>(of), flow, false); }

    bool stale() const { return !changed_.empty(); }
    // New rates of the flows that what began and ended since the last call changes. All others keep theirs.
    const std::vector<Change> &update();

  private:
    static constexpr std::int32_t by_limit = -1, no_class = -1, none_yet = -1;

    // Transfers on one link with one limit get one rate whenever they run together.
    struct Class {
        double limit = 0;                                   // bytes per second
        std::vector<std::pair<std::size_t, double>> ports;  // (port, weight)
        std::vector<std::int32_t> flows;                    // that run
        double running = 0;                                 // how many
        double rate = 0;                                    // of each of them, now
        double load = 0;                                    // of all of them
        std::int32_t held_by = by_limit;                    // the port that is full and keeps the rate from growing
        bool changed = false, gathered = false;
        bool grows = false;                 // while rates are shared
        double new_rate = 0, new_load = 0;  // of those that a change reaches
        std::int32_t new_held_by = by_limit;
        std::int32_t next_of_link = no_class;
    };

    struct Link {
        std::int32_t lane = none_yet;  // the first that uses it
        std::int32_t own_port = -1;    // that several lanes share
        std::int32_t first_class = no_class;
    };

    struct Port {
        double capacity = 0;
        double demand = 0;                                    // what its transfers would take at their limits
        std::vector<std::pair<std::size_t, double>> present;  // (class with transfers that run, weight)
        bool was_full = false;                                // demand was above the capacity before what has changed
        bool gathered = false;
        // While rates are shared: what its frozen transfers leave, what the others take per unit of their
        // common rate, how many classes of these there are, and the rate at which nothing is left.
        double room = 0, use = 0;
        int growing = 0;
        double full_at = 0;
        // Of those that keep their rates the highest, and the lowest of whom the port holds back; of those with new
        // rates too.
        double highest = 0, lowest_held = 0, highest_new = 0, lowest_held_new = 0;
    };

    void count(std::size_t of, std::int32_t flow, bool begins);
    bool is_overloaded(const Port &port) const { return port.demand > port.capacity; }
    void gather(std::size_t of);
    void solve();
    void rank_classes();
    void sort_growing();
    void freeze(Class &c, double rate, std::int32_t by);
    bool widen();
    void find_unfair(std::size_t number);

    const SimulatedMachine &m_;
    std::vector<Link> links_;
    std::vector<Class> classes_;
    std::vector<Port> ports_;

    // What a change reaches.
    std::vector<std::size_t> changed_, reached_, reached_ports_, growing_, open_, unfair_;
    std::vector<Change> news_;

    // Places of all classes by rising limit, and the class at each; a bit for each place.
    std::vector<std::size_t> place_of_, at_place_;
    std::vector<std::uint64_t> bits_;
};

}  // namespace uncut
