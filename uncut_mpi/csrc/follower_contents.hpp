// What a rectangle of memory holds, and the rules by which tasks make other contents of it.
//
// Contents are affine: element (r, c) of the buffer belongs to element (r + row, c + col) of its matrix, or to element
// (c + row, r + col) where it is turned. So a rectangle may be cut or copied without touching its content otherwise.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "records.hpp"

namespace uncut {

// A rule of schedules is broken. In the text "<task 3>" and "<buffer 3>" stand for their descriptions, which Python
// has.
struct RuleBroken : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Interval {
    std::int64_t start = 0, stop = 0;
    bool operator==(const Interval &) const = default;
};
// Disjoint, ascending, none touching the next.
using Intervals = std::vector<Interval>;

// How the caller's C takes part in a partial result: not at all, as it was, or times beta. CIn of model/problem.py.
enum class CIn : std::uint8_t { absent = 0, raw = 1, scaled = 2 };

struct Content {
    // Nothing that may be read; a piece of A or B as stored; a partial result for a piece of C.
    enum class Kind : std::uint8_t { nothing, piece, partial };

    Kind kind = Kind::nothing;
    std::uint8_t matrix = 0;  // a piece's
    bool turned = false;      // rows of the buffer are columns of the matrix; false for zeros
    bool alpha = false;       // whether the sum carries the factor alpha
    bool rounded = false;     // computed and then rounded to the type of C: nothing may be added any more
    // Other than op_n: C as it is written at last, and nothing may be added any more. Beyond a triangle is C_in.
    std::uint8_t ending = op_n;
    CIn c_in = CIn::absent;
    std::int64_t row = 0, col = 0;  // displacement into the matrix; 0 for zeros
    Intervals summed{};             // parts of k

    static Content zeros() { return {.kind = Kind::partial}; }
    static Content piece(std::uint8_t matrix) { return {.kind = Kind::piece, .matrix = matrix}; }

    bool operator==(const Content &) const = default;
    // The empty sum.
    bool is_zero() const { return kind == Kind::partial && summed.empty() && c_in == CIn::absent; }

    // Of a copy whose region starts so many rows and columns before its source's.
    Content moved(std::int64_t rows, std::int64_t cols) && {
        if (turned) std::swap(rows, cols);
        if (!is_zero()) row += rows, col += cols;
        return std::move(*this);
    }

    // Of a copy whose rows are its source's columns, both from 0 on.
    Content transposed() const {
        Content result = *this;
        if (!is_zero()) result.turned = !turned;
        return result;
    }
};

inline std::string text_of(const Interval &interval) {
    return "[" + std::to_string(interval.start) + ", " + std::to_string(interval.stop) + ")";
}

inline std::string text_of(const Intervals &summed) {
    std::string text;
    for (const Interval &interval : summed)
        text += (text.empty() ? "" : " and ") + text_of(interval);
    return text.empty() ? "nothing" : text;
}

// Without its place.
inline std::string text_of(const Content &content) {
    if (content.kind == Content::Kind::nothing) return "memory that holds nothing which may be read";
    if (content.kind == Content::Kind::piece) return std::string("a piece of ") + "ABC"[content.matrix];
    if (content.is_zero()) return "zeros";
    std::string text;
    if (!content.summed.empty())
        text = (content.alpha ? "alpha times the sum over k " : "the sum over k ") + text_of(content.summed);
    if (content.c_in != CIn::absent)
        text += std::string(text.empty() ? "" : " plus ") + (content.c_in == CIn::scaled ? "beta C_in" : "C_in");
    return text;
}

inline void add_interval(Intervals &summed, const Interval &added) {
    auto next = std::lower_bound(summed.begin(), summed.end(), added.start,
                                 [](const Interval &a, std::int64_t start) { return a.stop <= start; });
    if (next != summed.end() && next->start < added.stop)
        throw RuleBroken("k " + text_of(added) + " is summed twice: " + text_of(summed) + " is there already");
    const bool touches_next = next != summed.end() && next->start == added.stop;
    if (next != summed.begin() && (next - 1)->stop == added.start) {
        (next - 1)->stop = touches_next ? next->stop : added.stop;
        if (touches_next) summed.erase(next);
    } else if (touches_next) {
        next->start = added.start;
    } else {
        summed.insert(next, added);
    }
}

// `content` times a factor, as an addend of a sum. Throws RuleBroken where they do not belong together.
inline Content scaled(const Content &content, std::uint8_t factor) {
    if (content.kind != Content::Kind::partial) throw RuleBroken(text_of(content) + " cannot be a term of C");
    if (factor == zero) return Content::zeros();
    if (is_triangle(content.ending)) throw RuleBroken("a triangle of C is summed again, with what is beyond it");
    if (content.ending != op_n) throw RuleBroken("what has had its epilogue is summed again");
    if (content.rounded)
        throw RuleBroken("a value that was rounded to the half type already is summed again: half types round once");
    Content result = content;
    if (factor == beta) {
        if (content.c_in == CIn::scaled) throw RuleBroken("beta is applied twice");
        if (content.c_in == CIn::absent || !content.summed.empty())
            throw RuleBroken("beta is applied to " + text_of(content) + "; it belongs to C_in alone");
        result.c_in = CIn::scaled;
    }
    if (factor == alpha) {
        if (content.alpha) throw RuleBroken("alpha is applied twice");
        if (content.c_in != CIn::absent || content.summed.empty())
            throw RuleBroken("alpha is applied to " + text_of(content) + "; it belongs to products alone");
        result.alpha = true;
    }
    return result;
}

// The sum of two partial results. Throws RuleBroken if some term would be in it twice, or with other factors.
inline Content sum(Content left, const Content &right) {
    if (left.is_zero()) return right;
    if (right.is_zero()) return left;
    if (left.turned != right.turned || left.row != right.row || left.col != right.col)
        throw RuleBroken("terms of different elements of C are summed");
    if (left.c_in != CIn::absent && right.c_in != CIn::absent) {
        const bool twice = left.c_in == CIn::scaled || right.c_in == CIn::scaled;
        throw RuleBroken(std::string("C_in is summed twice") + (twice ? ": beta is applied twice" : ""));
    }
    if (left.c_in == CIn::absent) left.c_in = right.c_in;
    if (left.c_in == CIn::raw) throw RuleBroken("C_in is summed without beta");
    if (!left.summed.empty() && !right.summed.empty() && left.alpha != right.alpha)
        throw RuleBroken("a sum carries alpha in only some of its terms");
    for (const Interval &interval : right.summed)
        add_interval(left.summed, interval);
    left.alpha = left.alpha || right.alpha;
    left.rounded = false;
    return left;
}

}  // namespace uncut
