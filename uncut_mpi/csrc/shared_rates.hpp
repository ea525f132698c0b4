// Which rates concurrent copies get: max-min fair shares of the ports that they cross (model/ports.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
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

    // Nothing runs, there are no classes and no lane has used a link; memory is kept.
    void clear();

    // The class of the transfers on a link that move at most `limit` bytes per second.
    std::int32_t class_of(std::size_t link, double limit);
    // Several lanes on one link, as from private host memory to other ranks' devices, share its bandwidth too.
    void share_link(std::size_t link, std::int32_t lane);

    void begin(std::int32_t flow, std::int32_t of) { count(static_cast<std::uint32_t>(of), flow, true); }
    void end(std::int32_t flow, std::int32_t of) { count(static_cast<std::uint32_t>(of), flow, false); }

    bool stale() const { return !changed_.empty(); }
    // New rates of the flows that what began and ended since the last call changes. All others keep theirs.
    const std::vector<Change> &update();

  private:
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

    void count(std::uint32_t of, std::int32_t flow, bool begins);
    bool is_overloaded(const Port &port) const { return port.demand > port.capacity; }
    void gather(std::uint32_t of);
    std::span<const Use> ports_of(const Class &c) const { return {uses_.data() + c.first_use, c.num_uses}; }
    void solve();
    void rank_classes();
    void sort_growing();
    void freeze(Class &c, double rate, std::int32_t by);
    bool widen();
    void find_unfair(std::uint32_t number);

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
