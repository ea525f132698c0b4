// What one buffer holds: disjoint fragments that together are all of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "follower_clocks.hpp"
#include "follower_contents.hpp"

namespace uncut {

// Rows [top, bottom) and columns [left, right).
struct Rect {
    std::int64_t top = 0, left = 0, bottom = 0, right = 0;

    bool operator==(const Rect &) const = default;
    bool empty() const { return top >= bottom || left >= right; }
    std::int64_t rows() const { return bottom - top; }
    std::int64_t cols() const { return right - left; }
    bool overlaps(const Rect &other) const { return !common(other).empty(); }
    Rect common(const Rect &other) const {
        return {std::max(top, other.top), std::max(left, other.left), std::min(bottom, other.bottom),
                std::min(right, other.right)};
    }
    Rect transposed() const { return {left, top, right, bottom}; }
    // With its origin so many rows and columns before.
    Rect moved(std::int64_t by_rows, std::int64_t by_cols) const {
        return {top - by_rows, left - by_cols, bottom - by_rows, right - by_cols};
    }
};

inline std::string text_of(const Rect &rect) {
    return "[" + std::to_string(rect.top) + ":" + std::to_string(rect.bottom) + ", " + std::to_string(rect.left) + ":" +
           std::to_string(rect.right) + "]";
}

// One content, its last writer and the last reader of each lane since.
struct Fragment {
    Content content;
    Event writer;
    std::vector<Event> readers;
};

// A tree: a rectangle is a fragment, or cut into slabs of columns or of rows, which are cut the other way if at all. So
// finding what a rectangle overlaps takes the logarithm of the number of cuts, for each fragment found. A fragment
// takes about 250 bytes.
class Memory {
  public:
    struct Tile {
        Rect rect;
        Fragment *fragment;
    };

    Memory(const Rect &all, const Content &content) : all_(all) { add({content, {}, {}}); }

    // Finds the fragments that together are exactly `rect`, cutting those that reach over its edges. They stay where
    // they are until they are cut or overwritten.
    void find(const Rect &rect, std::vector<Tile> &tiles) {
        tiles.clear();
        if (rect.empty()) return;
        visits_.assign(1, {0, all_, rect});
        while (!visits_.empty()) {
            const Visit visit = visits_.back();
            const auto &[at, box, wanted] = visit;
            visits_.pop_back();
            Node &node = nodes_[at];
            if (node.slabs.empty()) {
                if (wanted == box) {
                    tiles.push_back({box, &node.fragment});
                    continue;
                }
                node.of_rows = wanted.left == box.left && wanted.right == box.right;
                node.slabs.emplace(node.of_rows ? box.top : box.left, add(std::exchange(node.fragment, {})));
            }
            cut(node, node.of_rows ? wanted.top : wanted.left);
            if (node.of_rows ? wanted.bottom < box.bottom : wanted.right < box.right)
                cut(node, node.of_rows ? wanted.bottom : wanted.right);
            const auto first = static_cast<std::ptrdiff_t>(visits_.size());
            for_slabs(visit, [this](Slab, const Visit &part) { visits_.push_back(part); });
            std::reverse(visits_.begin() + first, visits_.end());
        }
    }

    // Makes what `find` has cut out one fragment.
    void overwrite(const Rect &rect, Content content, Event writer) {
        if (rect.empty()) return;
        visits_.assign(1, {0, all_, rect});
        while (!visits_.empty()) {
            const Visit visit = visits_.back();
            visits_.pop_back();
            if (visit.wanted == visit.box) {
                clear(visit.node);
                nodes_[visit.node].fragment = {content, writer, {}};
                continue;
            }
            // A slab that is all overwritten goes to the one before, of which all that touches it is overwritten too.
            bool first = true;
            for_slabs(visit, [&](Slab slab, const Visit &part) {
                if (std::exchange(first, false) || part.wanted != part.box) {
                    visits_.push_back(part);
                    return;
                }
                clear(part.node);
                nodes_[part.node].fragment = {};
                free_.push_back(part.node);
                nodes_[visit.node].slabs.erase(slab);
            });
        }
    }

  private:
    struct Node {
        Fragment fragment;                  // where there are no slabs
        std::map<std::int64_t, int> slabs;  // by where each begins
        bool of_rows = false;
    };
    using Slab = std::map<std::int64_t, int>::iterator;
    // What is wanted of a node, and where it lies.
    struct Visit {
        int node;
        Rect box, wanted;
    };

    int add(Fragment &&fragment) {
        if (free_.empty()) {
            nodes_.push_back({std::move(fragment), {}});
            return static_cast<int>(nodes_.size()) - 1;
        }
        const int node = free_.back();
        free_.pop_back();
        nodes_[node].fragment = std::move(fragment);
        return node;
    }

    // Takes the slabs out of a node.
    void clear(int node) {
        dead_.assign(1, node);
        while (!dead_.empty()) {
            Node &of = nodes_[dead_.back()];
            if (dead_.back() != node) free_.push_back(dead_.back()), of.fragment = {};
            dead_.pop_back();
            for (const auto &[start, slab] : of.slabs)
                dead_.push_back(slab);
            of.slabs.clear();
        }
    }

    // Lets a slab begin here, if one that is a fragment reaches over it; one that has slabs itself is left to them.
    void cut(Node &node, std::int64_t at) {
        const Slab next = node.slabs.upper_bound(at), slab = std::prev(next);
        if (slab->first == at || !nodes_[slab->second].slabs.empty()) return;
        node.slabs.emplace_hint(next, at, add(Fragment(nodes_[slab->second].fragment)));
    }

    // Calls work(slab, its part of the visit) for those that overlap what is wanted; it may erase the slab.
    template <typename Work>
    void for_slabs(const Visit &visit, Work work) {
        Node &node = nodes_[visit.node];
        const auto &[start, stop] = node.of_rows ? std::pair{visit.wanted.top, visit.wanted.bottom}
                                                 : std::pair{visit.wanted.left, visit.wanted.right};
        for (Slab slab = std::prev(node.slabs.upper_bound(start)); slab != node.slabs.end() && slab->first < stop;) {
            const Slab here = slab++;
            Rect box = visit.box;
            (node.of_rows ? box.top : box.left) = here->first;
            if (slab != node.slabs.end()) (node.of_rows ? box.bottom : box.right) = slab->first;
            work(here, Visit{here->second, box, visit.wanted.common(box)});
        }
    }

    Rect all_;
    std::deque<Node> nodes_;  // the first is all of it
    std::vector<int> free_, dead_;
    std::vector<Visit> visits_;
};

}  // namespace uncut
