// What a rectangle of memory holds, and the rules by which tasks make other contents of it.
//
// Contents are affine: element (r, c) of the buffer belongs to element (r + row, c + col) of its matrix, or to element
// (c + row, r + col) where it is turned. So a rectangle may be cut or copied without touching its content otherwise.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

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
    CIn c_in = CIn::absent;
    std::int64_t row = 0, col = 0;  // displacement into the matrix; 0 for zeros
    Intervals summed{};             // parts of k

    static Content zeros() { return {.kind = Kind::partial}; }
    static Content piece(std::uint8_t matrix) { return {.kind = Kind::piece, .matrix = matrix}; }

    bool operator==(const Content &) const = default;
    // The empty sum.
    bool is_zero() const { return kind == Kind::partial && summed.empty() && c_in == CIn::absent; }
    // Of a copy whose region starts so many rows and columns before its source's.
    Content moved(std::int64_t rows, std::int64_t cols) &&;
    // Of a copy whose rows are its source's columns, both from 0 on.
    Content transposed() const;
};

// `content` times a factor, as an addend of a sum. Throws RuleBroken where they do not belong together.
Content scaled(const Content &content, std::uint8_t factor);
// The sum of two partial results. Throws RuleBroken if some term would be in it twice, or with other factors.
Content sum(Content left, const Content &right);

std::string text_of(const Interval &interval);
std::string text_of(const Intervals &summed);
// Without its place.
std::string text_of(const Content &content);

}  // namespace uncut
