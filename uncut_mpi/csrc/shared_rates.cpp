#include "shared_rates.hpp"

#include <algorithm>

namespace uncut {
namespace {

constexpr std::int32_t none_yet = -1, several = -2;
}  // namespace

SharedRates::SharedRates(const SimulatedMachine &machine)
    : m_(machine),
      ports_of_(machine.bandwidth.size()),
      lane_of_link_(machine.bandwidth.size(), none_yet),
      classes_of_link_(machine.bandwidth.size()),
      ports_(machine.port_capacity.size()) {
    for (std::size_t p = 0; p < ports_.size(); ++p) {
        ports_[p].capacity = m_.port_capacity[p];
        for (std::int64_t at = m_.port_first[p]; at < m_.port_first[p + 1]; ++at)
            ports_of_[static_cast<std::size_t>(m_.port_links[at])].emplace_back(p, m_.port_weights[at]);
    }
}

std::int32_t SharedRates::class_of(std::size_t link, double limit) {
    for (const std::int32_t c : classes_of_link_[link])
        if (classes_[c].limit == limit) return c;
    Class made;
    made.limit = limit;
    made.ports = ports_of_[link];
    classes_.push_back(std::move(made));
    classes_of_link_[link].push_back(static_cast<std::int32_t>(classes_.size()) - 1);
    return classes_of_link_[link].back();
}

void SharedRates::share_link(std::size_t link, std::int32_t lane, std::int32_t of) {
    std::int32_t &first = lane_of_link_[link];
    if (first == none_yet) first = lane;
    if (first == lane || first == several) return;
    first = several;
    ports_of_[link].emplace_back(ports_.size(), 1.0);
    ports_.emplace_back().capacity = m_.bandwidth[link];
    for (const std::int32_t c : classes_of_link_[link])
        classes_[c].ports = ports_of_[link];
    classes_[of].ports = ports_of_[link];
}

// Notes that a flow of a class begins or ends.
void SharedRates::count(std::size_t of, std::int32_t flow, bool begins) {
    Class &c = classes_[of];
    if (!c.changed) {
        c.changed = true;
        changed_.push_back(of);
    }
    if (begins) {
        c.flows.push_back(flow);
        if (c.flows.size() == 1) running_.insert(std::lower_bound(running_.begin(), running_.end(), of), of);
    } else {
        std::erase(c.flows, flow);
        if (c.flows.empty()) running_.erase(std::lower_bound(running_.begin(), running_.end(), of));
    }
    for (const auto &[number, weight] : c.ports) {
        Port &port = ports_[number];
        port.was_full = port.was_full || port.demand > port.capacity;
        port.demand += (begins ? weight : -weight) * c.limit;
        if (begins && c.flows.size() == 1) port.present.push_back(of);
        if (!begins && c.flows.empty()) std::erase(port.present, of);
        if (port.present.empty()) port.demand = 0;  // what rounding has left
    }
}

const std::vector<SharedRates::Change> &SharedRates::update() {
    news_.clear();
    for (const std::size_t c : changed_) {
        gather(c);
        for (const auto &[number, weight] : classes_[c].ports)
            if (ports_[number].was_full) gather_port(number);
    }
    for (std::size_t at = 0; at < reached_.size(); ++at)
        for (const auto &[number, weight] : classes_[reached_[at]].ports)
            if (ports_[number].demand > ports_[number].capacity) gather_port(number);
    // In order of their numbers: sorting them takes longer than all the rest.
    reached_.clear();
    for (const std::size_t c : running_)
        if (classes_[c].gathered) reached_.push_back(c);
    solve();
    for (std::size_t at = 0; at < reached_.size(); ++at) {
        Class &c = classes_[reached_[at]];
        const double rate = rates_[at];
        if (rate != c.rate || c.changed)
            for (const std::int32_t id : c.flows)
                news_.push_back({id, rate});
        c.rate = rate;
        c.gathered = false;
    }
    for (const std::size_t c : changed_) {
        classes_[c].changed = classes_[c].gathered = false;
        for (const auto &[number, weight] : classes_[c].ports)
            ports_[number].was_full = false;
    }
    for (const std::size_t number : reached_ports_)
        ports_[number].gathered = false;
    changed_.clear();
    reached_.clear();
    reached_ports_.clear();
    return news_;
}

void SharedRates::gather(std::size_t of) {
    if (classes_[of].gathered || classes_[of].flows.empty()) return;
    classes_[of].gathered = true;
    reached_.push_back(of);
}

void SharedRates::gather_port(std::size_t number) {
    Port &port = ports_[number];
    if (port.gathered) return;
    port.gathered = true;
    reached_ports_.push_back(number);
    for (const std::size_t c : port.present)
        gather(c);
}

// Fills rates_ for the classes in reached_, by progressive filling. All that still grow have one rate, so a port is
// full at what its frozen transfers leave, divided among the others; only the ports of what freezes need new sums.
void SharedRates::solve() {
    rates_.assign(reached_.size(), 0);
    for (const std::size_t number : reached_ports_) {
        Port &port = ports_[number];
        port.room = port.capacity;
        port.use = 0;
        port.growing = 0;
    }
    growing_.clear();
    for (std::size_t at = 0; at < reached_.size(); ++at) {
        Class &c = classes_[reached_[at]];
        c.grows = false;
        for (const auto &[number, weight] : c.ports) {
            Port &port = ports_[number];
            if (port.demand <= port.capacity) continue;
            port.use += weight * static_cast<double>(c.flows.size());
            ++port.growing;
            c.grows = true;
        }
        c.place = at;
        if (c.grows) {
            growing_.push_back(reached_[at]);
        } else {
            rates_[at] = c.limit;
        }
    }
    const auto lower = [&](std::size_t one, std::size_t other) {
        const double limit = classes_[one].limit, others = classes_[other].limit;
        return limit < others || (limit == others && one < other);
    };
    if (!std::is_sorted(growing_.begin(), growing_.end(), lower)) std::sort(growing_.begin(), growing_.end(), lower);
    open_.clear();
    for (const std::size_t number : reached_ports_)
        if (ports_[number].growing > 0) open_.push_back(number);
    constexpr double near = 1 + 1e-12;
    double rate = 0;
    for (std::size_t next = 0;;) {
        while (next < growing_.size() && !classes_[growing_[next]].grows)
            ++next;
        if (next == growing_.size()) return;
        double least = classes_[growing_[next]].limit;
        for (const std::size_t number : open_) {
            Port &port = ports_[number];
            port.full_at = port.room / port.use;
            least = std::min(least, port.full_at);
        }
        rate = std::max(rate, least);  // rounding may leave a port less than it has given
        for (std::size_t at = next; at < growing_.size() && classes_[growing_[at]].limit <= rate * near; ++at)
            freeze(classes_[growing_[at]], classes_[growing_[at]].limit);
        for (const std::size_t number : open_)
            if (ports_[number].full_at <= rate * near)
                for (const std::size_t c : ports_[number].present)
                    freeze(classes_[c], rate);
        std::erase_if(open_, [&](std::size_t number) { return ports_[number].growing == 0; });
    }
}

void SharedRates::freeze(Class &c, double rate) {
    if (!c.grows) return;
    c.grows = false;
    rates_[c.place] = rate;
    const auto flows = static_cast<double>(c.flows.size());
    for (const auto &[number, weight] : c.ports) {
        Port &port = ports_[number];
        if (port.demand <= port.capacity) continue;
        port.room -= weight * flows * rate;
        port.use -= weight * flows;
        --port.growing;
    }
}

}  // namespace uncut
