#include "uncut_scheduler.hpp"

#include "uncut_order.hpp"

namespace uncut {

UncutTables schedule_uncut(const Input &in) {
    const Tiling tiling(in);
    Links links(in);
    Records records(in, tiling);
    Router router(in, tiling, links, records);
    Result result(in, tiling, links, records);
    Order order(in, tiling, links, router, result);
    for (bool working = true; working;) {
        working = false;
        for (const Worker &w : tiling.workers) {
            if (!order.left(w)) continue;
            working = true;
            const Subproblem s = order.next(w);
            const std::array tiles{tiling.tile(w, side_a, s.i, s.p), tiling.tile(w, side_b, s.j, s.p)};
            for (const Tile &t : tiles)
                for (const int number : router.fetch(w, t))
                    order.arrived(tiling.workers[number], t);
            if (result.open(w, s.i, s.j)) order.opened(w, s.i, s.j);
            const Router::Source a = router.source(w, tiles[side_a]), b = router.source(w, tiles[side_b]);
            const Result::Done product = result.add(w, s, a, b);
            for (const Tile &t : tiles)
                router.was_read(w, t, product.task, product.end);
            order.advanced(w, s.i, s.j);
        }
    }
    UncutTables made = records.take();
    made.end = links.end();
    return made;
}

}  // namespace uncut
