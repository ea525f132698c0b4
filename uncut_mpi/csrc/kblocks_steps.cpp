// The order in which a rank fetches and multiplies, by planning/blocking.py, which says what the orders are for.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "kblocks_request.hpp"

namespace uncut {
namespace {

// Elements of the block behind `stop`, before the largest ones: so that it ends `growth` times as far.
std::int64_t next_size(std::int64_t growth, std::int64_t stop, std::int64_t most) {
    std::int64_t size = 0;
    return __builtin_mul_overflow(growth - 1, stop, &size) ? most : std::min(most, size);
}

// Blocks of k: each ends `growth` times as far as the one before it, and has `most` elements at most. With 2 the first
// comes twice, then each is twice as long as the one before it. With more, fewer and larger products read and write C
// less often. For that a product has to take longer than the next block takes to arrive. A last block shorter than half
// of the one before it is joined to that. With `at_multiples` the largest ones end at multiples of their length.
std::vector<Extent> k_blocks(std::int64_t extent, std::int64_t first, std::int64_t most, std::int64_t growth,
                             bool at_multiples, std::int64_t held) {
    if (extent < 0 || first < 1 || most < 1 || growth < 2)
        throw std::invalid_argument("blocks have at least one element, and grow");
    most = std::max<std::int64_t>(1, std::min(most, extent));
    std::vector<std::int64_t> stops{0};
    if (held > 0) stops.push_back(std::min(held, extent));
    for (std::int64_t size = held > 0 ? next_size(growth, stops.back(), most) : std::min(first, most);
         stops.back() < extent; size = next_size(growth, stops.back(), most)) {
        std::int64_t stop = stops.back() + size;
        if (at_multiples && size == most) {
            stop = stop / most * most;
            if (2 * (stop - stops.back()) < most) stop += most;  // not a short one between long ones
        }
        stops.push_back(std::min(extent, stop));
    }
    const std::size_t count = stops.size();
    if (count > 2 && 2 * (stops[count - 1] - stops[count - 2]) < stops[count - 2] - stops[count - 3])
        stops.erase(stops.end() - 2);
    std::vector<Extent> found;
    found.reserve(stops.size() - 1);
    for (std::size_t at = 0; at + 1 < stops.size(); ++at)
        found.push_back({stops[at], stops[at + 1]});
    return found;
}

// What is done with fetches, and how many of them it needs.
struct Work {
    std::size_t needs;
    KStep step;
};

// Fetches in the order in which they are issued, and what is done with them.
class Maker {
  public:
    Maker(const KBlocking &how, std::int64_t extent)
        : how_(how),
          extent_(extent),
          columns_(count_blocks(how.columns)),
          rows_(count_blocks(how.rows)),
          ramp_(k_blocks(extent, how.first, how.block, how.growth, how.far_apart, how.held)) {}

    std::vector<KStep> run() {
        if (how_.order == by_k || how_.order == by_k_and_columns)
            make_by_k();
        else if (how_.order == by_columns)
            make_by_columns();
        else
            make_from_corner();
        return merged();
    }

  private:
    KStep fetch_b_of(std::int64_t first_k, std::int64_t last_k, int at) const {
        return {.kind = fetch_b, .first_k = first_k, .last_k = last_k, .first = at, .last = at + 1};
    }
    // Something about one column block and all of k.
    KStep of_block(int kind, int at, bool early) const {
        return {.kind = kind, .last_k = extent_, .first = at, .last = at + 1, .early = early};
    }
    void fetch_a_and_b(const Extent &k) {
        for (const int kind : {fetch_a, fetch_b})
            fetches_.push_back({.kind = kind, .first_k = k.first, .last_k = k.last, .last = columns_});
    }
    void work(const KStep &step) { work_.push_back({fetches_.size(), step}); }

    void make_by_k() {
        std::size_t tail = ramp_.size();
        while (columns_ > 1 && tail > 0 && (extent_ - ramp_[tail - 1].first) * how_.tail_parts <= extent_)
            --tail;
        if (columns_ > 1 && tail == ramp_.size()) --tail;
        if (ramp_.size() == 1) tail = 0;
        const bool early = tail == 0;  // no product begins before all of A and B is there
        for (std::size_t at = 0; at < tail; ++at) {
            fetch_a_and_b(ramp_[at]);
            work({.kind = multiply, .first_k = ramp_[at].first, .last_k = ramp_[at].last, .last = columns_});
        }
        const std::int64_t first = tail < ramp_.size() ? ramp_[tail].first : extent_;  // of what goes by column blocks
        const bool arrives = how_.order == by_k_and_columns && !early && first < extent_;
        if (arrives) fetches_.push_back({.kind = fetch_a, .first_k = first, .last_k = extent_});
        const std::size_t before_b = fetches_.size();
        for (int at = 0; at < columns_ && arrives; ++at)
            fetches_.push_back(fetch_b_of(first, extent_, at));
        for (std::size_t at = tail; at < ramp_.size() && !arrives; ++at)
            fetch_a_and_b(ramp_[at]);
        const std::size_t all = fetches_.size();
        for (int at = 0; at < columns_; ++at) {
            fetches_.push_back(of_block(fetch_c, at, early));
            if (first < extent_) {
                KStep last = of_block(multiply, at, early);
                last.first_k = first;
                const std::size_t its_b = arrives ? before_b + static_cast<std::size_t>(at) + 1 : all;
                work_.push_back({early ? fetches_.size() : its_b, last});
            }
            work(of_block(finish, at, early));
        }
    }

    // All that the first column block, or its first row block, needs.
    void make_first_block(bool early) {
        if (how_.far_apart) fetches_.push_back(fetch_b_of(0, extent_, 0));
        if (early) fetches_.push_back(of_block(fetch_c, 0, true));
        for (const Extent &k : ramp_) {
            fetches_.push_back({.kind = fetch_a, .first_k = k.first, .last_k = k.last});
            if (!how_.far_apart) fetches_.push_back(fetch_b_of(k.first, k.last, 0));
            KStep product = of_block(multiply, 0, early);
            product.first_k = k.first, product.last_k = k.last;
            work(product);
        }
        if (!early) fetches_.push_back(of_block(fetch_c, 0, false));
        work(of_block(finish, 0, early));
    }

    void make_by_columns() {
        make_first_block(false);
        for (int at = 1; at < columns_; ++at) {
            fetches_.push_back(of_block(fetch_c, at, true));
            const bool at_once = how_.far_apart || at < how_.columns;
            for (const Extent &k :
                 at_once ? std::vector<Extent>{{0, extent_}} : k_blocks(extent_, how_.block, how_.block, 2, false, 0)) {
                fetches_.push_back(fetch_b_of(k.first, k.last, at));
                KStep product = of_block(multiply, at, true);
                product.first_k = k.first, product.last_k = k.last;
                work(product);
            }
            work(of_block(finish, at, true));
        }
    }

    void make_from_corner() {
        make_first_block(ramp_.size() == 1);
        int right = 1, bottom = 1;  // what is there of B and A
        while (right < columns_ || bottom < rows_) {
            // Whichever has less of its blocks there.
            KStep grown;
            if (bottom == rows_ || (right < columns_ && right * rows_ <= bottom * columns_)) {
                grown = of_block(fetch_c, right, true);
                grown.bottom = bottom;
                fetches_.push_back(grown);
                fetches_.push_back(fetch_b_of(0, extent_, right));
                ++right;
            } else {
                grown = of_block(fetch_c, 0, true);
                grown.last = right, grown.top = bottom, grown.bottom = bottom + 1;
                fetches_.push_back(grown);
                fetches_.push_back({.kind = fetch_a, .last_k = extent_, .top = bottom, .bottom = bottom + 1});
                ++bottom;
            }
            for (const int kind : {multiply, finish}) {
                grown.kind = kind;
                work(grown);
            }
        }
    }

    std::vector<KStep> merged() const {
        std::vector<KStep> made;
        made.reserve(fetches_.size() + work_.size());
        std::size_t issued = 0;
        for (std::size_t at = 0; at < work_.size(); ++at) {
            std::size_t until = 0;
            for (std::size_t later = at; later < std::min(work_.size(), at + lookahead + 1); ++later)
                until = std::max(until, work_[later].needs);
            for (; issued < until; ++issued)
                made.push_back(fetches_[issued]);
            made.push_back(work_[at].step);
        }
        return made;
    }

    const KBlocking &how_;
    std::int64_t extent_;  // of k
    int columns_, rows_;
    std::vector<Extent> ramp_;
    std::vector<KStep> fetches_;
    std::vector<Work> work_;
};

// The same of several blocks of C in turn, with room for a few k-blocks of A and B: in each slot one comes after the
// other. The next block's first ones arrive while the last ones are multiplied. k goes there and back: of a matrix of
// which the next block needs the same rows or columns the last k-blocks need not come again.
class RingMaker {
  public:
    RingMaker(const KBlocking &how, std::vector<Extent> k_blocks, int rounds, bool reads_c)
        : how_(how), rounds_(rounds), columns_(count_blocks(how.columns)), k_blocks_(std::move(k_blocks)) {
        for (const Extent &one : k_blocks_)
            extent_ = std::max(extent_, one.last);
        const auto most =
            std::min<std::size_t>(static_cast<std::size_t>(std::ranges::min(how.slots)), k_blocks_.size());
        // By column blocks: the last k-blocks, where C is to leave soon, and the first, where it has to come or the one
        // before it to leave.
        const bool waits = how.c_slots == 1 && rounds > 1;
        tail_ = waits ? (most + 1) / 2 : 1;
        last_tail_ = most;
        head_ = waits ? std::max<std::size_t>(1, most - tail_) : 0;
        first_head_ = reads_c ? 1 : 0;
        finished_.assign(static_cast<std::size_t>(rounds), std::vector<std::ptrdiff_t>(columns_, nothing));
    }

    std::vector<KStep> run() {
        for (int round = 0; round < rounds_; ++round)
            add_round(round);
        return merged();
    }

  private:
    static constexpr std::ptrdiff_t nothing = -1;
    // Nothing is fetched into a slot before the last product is issued that reads what is there.
    struct Fetch {
        std::ptrdiff_t after;
        KStep step;
    };

    KStep step(int kind, Extent k, int first, int last) const {
        return {.kind = kind,
                .first_k = k.first,
                .last_k = k.last,
                .first = first,
                .last = last,
                .round = round_,
                .early = true};
    }
    std::ptrdiff_t last_work() const { return static_cast<std::ptrdiff_t>(work_.size()) - 1; }
    void work(const KStep &of) { work_.push_back({fetches_.size(), of}); }

    // Takes the next slots for a k-block, of which this may be a part.
    void claim() { last_use_.push_back(nothing); }
    void fetch(Extent k) {
        for (const int kind : {fetch_a, fetch_b}) {
            const auto before = static_cast<std::ptrdiff_t>(last_use_.size()) - 1 - how_.slots[kind == fetch_b];
            const std::ptrdiff_t after = before >= 0 ? last_use_[static_cast<std::size_t>(before)] : nothing;
            fetches_.push_back({after, step(kind, k, 0, columns_)});
        }
    }
    void fetch_c_of(int round, int column) {
        const int before = round - how_.c_slots;
        KStep c = step(fetch_c, {0, extent_}, column, column + 1);
        c.round = round;
        fetches_.push_back({before >= 0 ? finished_[static_cast<std::size_t>(before)][column] : nothing, c});
    }
    void use(std::size_t claims) {
        for (std::size_t back = 1; back <= claims; ++back)
            last_use_[last_use_.size() - back] = last_work();
    }

    void add_round(int round) {
        round_ = round;
        std::vector<Extent> taken = k_blocks_;
        if (how_.returns && round % 2) std::reverse(taken.begin(), taken.end());
        const bool is_first = round == 0, is_last = round + 1 == rounds_;
        const std::size_t tail = std::min(is_last ? last_tail_ : tail_, taken.size());
        const std::size_t head = std::min(is_first ? first_head_ : head_, taken.size() - tail);
        const bool at_once = tail == taken.size();  // C comes and leaves with the same products
        if (!at_once && head == 0 && is_first) fetch_all_of_c();
        if (head > 0) by_columns(taken, 0, head, true, false);
        for (std::size_t at = head; at < taken.size() - tail; ++at) {
            claim();
            // The first products wait for little.
            for (const Extent &k : is_first &&at == 0
                                       ? k_blocks(taken[0].size(), how_.first, how_.block, how_.growth, false, 0)
                                       : std::vector<Extent>{{0, taken[at].size()}}) {
                const Extent part = k.shifted(taken[at].first);
                fetch(part);
                work(step(multiply, part, 0, columns_));
            }
            use(1);
            if (!is_last && how_.c_slots > 1) fetch_next_c(at + 1 - head, taken.size() - tail - head + 1);
        }
        by_columns(taken, taken.size() - tail, taken.size(), at_once && (is_first || how_.c_slots == 1), true);
        if (!is_last && how_.c_slots > 1) fetch_next_c(1, 1);
        next_c_ = 0;
    }

    void fetch_all_of_c() {
        for (int column = 0; column < columns_; ++column)
            fetch_c_of(round_, column);
    }
    // C of the next block comes meanwhile, bit by bit.
    void fetch_next_c(std::size_t done, std::size_t all) {
        const auto upto = static_cast<int>(static_cast<std::size_t>(columns_) * done / all);
        for (; next_c_ < upto; ++next_c_)
            fetch_c_of(round_ + 1, next_c_);
    }

    void by_columns(const std::vector<Extent> &taken, std::size_t first, std::size_t last, bool fetches,
                    bool finishes) {
        for (std::size_t at = first; at < last; ++at) {
            claim();
            fetch(taken[at]);
        }
        for (int column = 0; column < columns_; ++column) {
            if (fetches) fetch_c_of(round_, column);
            for (std::size_t at = first; at < last; ++at)
                work(step(multiply, taken[at], column, column + 1));
            if (!finishes) continue;
            work(step(finish, {0, extent_}, column, column + 1));
            finished_[static_cast<std::size_t>(round_)][column] = last_work();
        }
        use(last - first);
    }

    std::vector<KStep> merged() const {
        std::vector<KStep> made;
        made.reserve(fetches_.size() + work_.size());
        std::size_t issued = 0;
        for (std::size_t at = 0; at < work_.size(); ++at) {
            const auto may_go = [&](const Fetch &fetch) { return fetch.after < static_cast<std::ptrdiff_t>(at); };
            for (; issued < work_[at].needs; ++issued) {
                if (!may_go(fetches_[issued])) throw std::logic_error("a slot is needed before it is free");
                made.push_back(fetches_[issued].step);
            }
            for (; issued < fetches_.size() && may_go(fetches_[issued]); ++issued)
                made.push_back(fetches_[issued].step);
            made.push_back(work_[at].step);
        }
        return made;
    }

    const KBlocking &how_;
    std::int64_t extent_ = 0;
    int rounds_, columns_, round_ = 0;
    int next_c_ = 0;                // which of the next round's column blocks of C is to come
    std::vector<Extent> k_blocks_;  // the k-blocks
    std::size_t tail_, last_tail_, head_, first_head_;
    std::vector<Fetch> fetches_;
    std::vector<Work> work_;
    std::vector<std::ptrdiff_t> last_use_;               // of each claim the last product so far
    std::vector<std::vector<std::ptrdiff_t>> finished_;  // of each round and column block: the work that hands it on
};

}  // namespace

int count_blocks(int blocks) { return blocks > 1 ? blocks + halvings : blocks; }

std::int64_t count_k_blocks(const KBlocking &how, std::int64_t extent) {
    std::int64_t count = 0, stop = 0;
    for (std::int64_t size = std::min(how.first, how.block); stop < extent && size < how.block;) {
        stop += size, ++count;
        size = next_size(how.growth, stop, how.block);
    }
    const std::int64_t left = std::max<std::int64_t>(0, extent - stop);
    return count + left / how.block + (left % how.block > 0);
}

std::vector<KStep> make_steps(const KBlocking &how, std::int64_t extent) {
    if (extent < 1 || how.columns < 1 || how.rows < 1 || how.tail_parts < 1 || how.order < by_k ||
        how.order > by_k_and_columns)
        throw std::invalid_argument("there is something to multiply, in blocks and an order that there are");
    return Maker(how, extent).run();
}

std::vector<Extent> equal_k_blocks(const KBlocking &how, std::int64_t extent) {
    if (extent < 1 || how.block < 1) throw std::invalid_argument("k-blocks have at least one element");
    std::vector<Extent> found;
    for (std::int64_t at = 0; at < extent; at += how.block)
        found.push_back({at, std::min(extent, at + how.block)});
    return found;
}

std::vector<KStep> make_steps_in_rings(const KBlocking &how, std::vector<Extent> k_blocks, int rounds, bool reads_c) {
    return RingMaker(how, std::move(k_blocks), rounds, reads_c).run();
}

std::uint64_t digest_of_steps(const std::vector<std::vector<KStep>> &parts) {
    std::uint64_t digest = 0;
    const auto add = [&digest](std::int64_t value) {  // FNV-1a, a word at a time, with its low bits stirred
        digest = (digest ^ static_cast<std::uint64_t>(value)) * 0x100000001b3;
        digest ^= digest >> 29;
    };
    for (const std::vector<KStep> &of_part : parts) {
        add(static_cast<std::int64_t>(of_part.size()));
        for (const KStep &step : of_part)
            for (const std::int64_t value :
                 {std::int64_t{step.kind}, step.first_k, step.last_k, std::int64_t{step.first}, std::int64_t{step.last},
                  std::int64_t{step.top}, std::int64_t{step.bottom}, std::int64_t{step.round},
                  std::int64_t{step.early}})
                add(value);
    }
    return digest;
}

}  // namespace uncut
