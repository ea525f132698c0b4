// What one buffer holds: disjoint fragments that together are all of it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
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

std::string text_of(const Rect &rect);

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

    Memory(const Rect &all, const Content &content);

    // Finds the fragments that together are exactly `rect`, cutting those that reach over its edges. They stay where
    // they are until they are cut or overwritten.
    void find(const Rect &rect, std::vector<Tile> &tiles);
    // Makes what `find` has cut out one fragment.
    void overwrite(const Rect &rect, Content content, Event writer);

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

    int add(Fragment &&fragment);
    void clear(int node);
    void cut(Node &node, std::int64_t at);
    template <typename Work>
    void for_slabs(const Visit &visit, Work work);

    Rect all_;
    std::deque<Node> nodes_;  // the first is all of it
    std::vector<int> free_, dead_;
    std::vector<Visit> visits_;
};

}  // namespace uncut
