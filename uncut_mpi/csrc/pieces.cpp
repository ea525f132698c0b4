#include "pieces.hpp"

#include <utility>

namespace uncut {

void PlacedProblem::place(std::span<const LocationRecord> memories, std::span<const BufferRecord> buffers,
                          std::span<const PieceRecord> records) {
    locations = Locations(memories);
    users.assign(buffers.begin(), buffers.end());
    pieces = {};
    for (const PieceRecord &one : records) {
        require(one.buffer >= 0 && static_cast<std::size_t>(one.buffer) < users.size(), "there is no such buffer");
        require(one.turned == 0, "a piece is stored as its matrix is");
        const BufferRecord &buffer = users[static_cast<std::size_t>(one.buffer)];
        require(buffer.matrix <= matrix_c, "a buffer is of A, B or C");
        const int at = buffer.location;
        require(locations.has(at), "a matrix is on a rank or the host");
        KPiece piece{
            {one.top, one.top + one.rows}, {one.left, one.left + one.cols}, one.buffer, one.row, one.col, {}, 1};
        if (transposed(buffer.matrix)) std::swap(piece.rows, piece.cols);
        piece.origin = {at, locations.rank(at), locations.end(at), locations.in_host(at)};
        std::vector<KPiece> &known = pieces[buffer.matrix];
        const auto same = std::ranges::find_if(
            known, [&](const KPiece &other) { return other.rows == piece.rows && other.cols == piece.cols; });
        if (same == known.end()) {
            known.push_back(piece);
            continue;
        }
        const auto behind = same + static_cast<std::ptrdiff_t>(same->holders++);
        known.insert(behind, piece);
    }
}

}  // namespace uncut
