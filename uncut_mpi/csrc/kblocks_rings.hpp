// Panels of which the contents change: which k-block is in which slot, and who reads it.
#pragma once

#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "kblocks_store.hpp"

namespace uncut::kblocks {

// Panels that are used again and again. Of A and B a slot has one k-block after the other; a panel of C has one block
// after the other. What overwrites something awaits all that read it.
class Rings final : public Store {
  public:
    explicit Rings(const KLayout &layout)
        : Store(layout),
          slots_(layout.workers.size()),
          together_(layout.workers.size()),
          known_(layout.buffers.size()) {
        const KRequest &asked = layout.request;
        first_k_ = asked.k_starts.front();
        depth_ = asked.depth_of_slots();
        for (const int matrix : {matrix_a, matrix_b})
            if (asked.stacks_across(matrix)) width_[matrix] = matrix == matrix_a ? asked.how.c_rows : asked.how.c_cols;
        for (std::size_t worker = 0; worker < layout.workers.size(); ++worker)
            for (const int matrix : {matrix_a, matrix_b}) {
                slots_[worker][static_cast<std::size_t>(matrix)].resize(
                    static_cast<std::size_t>(asked.how.slots[static_cast<std::size_t>(matrix)]));
                const int buffer = layout.workers[worker].ring[static_cast<std::size_t>(matrix)];
                if (buffer >= 0) known_[static_cast<std::size_t>(buffer)].ring = static_cast<int>(2 * worker) + matrix;
            }
        if (!asked.how.together) return;
        std::vector<std::vector<std::size_t>> of_node(static_cast<std::size_t>(problem_.locations.num_nodes()));
        const auto node = [&](std::size_t worker) -> std::vector<std::size_t> & {
            const int rank = asked.places[worker / asked.splits()][worker % asked.splits()];
            return of_node[static_cast<std::size_t>(problem_.node_of(rank))];
        };
        for (std::size_t worker = 0; worker < layout.workers.size(); ++worker)
            node(worker).push_back(worker);
        for (std::size_t worker = 0; worker < layout.workers.size(); ++worker) {
            together_[worker] = node(worker);
            std::erase(together_[worker], worker);
        }
    }

    Region at(const KBlock &block, const KPart &part, int panel, Extent rows, Extent cols) const override {
        if (part.panel[panel] < 0 || panel > matrix_b) return Store::at(block, part, panel, rows, cols);
        const bool of_a = panel == matrix_a;
        const Rectangle what{panel, of_a ? rows : cols, of_a ? cols : rows};
        const Slot *slot = slot_of(part.worker, what);
        if (!slot) throw std::logic_error("what is read of A and B is in no slot");
        const auto number = slot - slots_[part.worker][static_cast<std::size_t>(panel)].data();
        const std::int64_t width = width_[panel];
        const Extent across = what.across.shifted(number * width - slot->has.across.first),
                     k = what.k.shifted((width > 0 ? 0 : number * depth_) - slot->has.k.first);
        return stored(part.panel[panel], of_a ? across : k, of_a ? k : across, problem_.transposed(panel));
    }

    Tasks take_note(std::int32_t task, std::int32_t lane, const Region &overwritten,
                    std::span<const Operand> read) override {
        awaited_.clear();
        const auto ring_slot = [&](const Known &known, const Region &region) -> Slot & {
            return slots_[static_cast<std::size_t>(known.ring / 2)][static_cast<std::size_t>(known.ring % 2)]
                         [slot_at(known.ring, region)];
        };
        const auto is_own = [&](const Region &region) {
            return static_cast<std::size_t>(region.buffer) >= problem_.users.size();
        };
        for (const Operand &operand : read) {
            const Region &region = operand.region;
            if (!is_own(region) || region.empty()) continue;
            Known &known = known_[static_cast<std::size_t>(region.buffer)];
            if (known.ring >= 0) {
                ring_slot(known, region).readers.add(lane, task);
            } else if (region.buffer != overwritten.buffer) {  // what adds to a sum stands before what reads the sum
                const Use use{round_, region.col, region.col + region.cols, lane, task};
                // Who awaits the last one of a lane awaits those before it.
                std::erase_if(known.uses, [&](const Use &other) {
                    return other.lane == lane && use.first <= other.first && other.last <= use.last;
                });
                known.uses.push_back(use);
            }
        }
        if (!is_own(overwritten)) return {};
        Known &known = known_[static_cast<std::size_t>(overwritten.buffer)];
        if (known.ring >= 0) {
            awaited_ = ring_slot(known, overwritten).before.tasks();
        } else {
            for (const Use &use : known.uses)
                if (use.round < round_ && use.first < overwritten.col + overwritten.cols && overwritten.col < use.last)
                    awaited_.push_back(use.task);
        }
        return awaited_;
    }

    void begin(int round) override { round_ = round; }

    bool brings(const KBlock &block, const KPart &part, const Rectangle &what) override {
        const Rectangle wanted{what.matrix, what.matrix == matrix_a ? block.rows : block.cols, k_block(what)};
        Slots &slots = slots_[part.worker][static_cast<std::size_t>(what.matrix)];
        Slot *slot = slot_of(part.worker, wanted);
        if (!slot) {  // the one that was asked for the longest time ago
            slot = &*std::ranges::min_element(slots, {}, &Slot::asked);
            slot->has = wanted;
            slot->before = std::exchange(slot->readers, {});
            ++slot->turns;
            slot->filled.clear();
            slot->arrivals.clear();
            await_others(part.worker, what.matrix, static_cast<std::size_t>(slot - slots.data()));
        }
        slot->asked = ++asked_;
        std::int64_t there = 0;
        for (const Rectangle &piece : slot->filled) {
            const std::int64_t across = piece.across.common(what.across).size(), k = piece.k.common(what.k).size();
            there += across > 0 && k > 0 ? across * k : 0;
        }
        if (there == what.across.size() * what.k.size()) return false;
        if (there > 0) throw std::logic_error("a part of a piece is there already");
        slot->filled.push_back(what);
        return true;
    }

    void arrives(std::size_t worker, const Rectangle &what, std::int32_t task) override {
        slot_of(worker, what)->arrivals.add(what, task);
    }

    void await(std::size_t worker, const Rectangle &a, const Rectangle &b, std::size_t lane, const ByLane &,
               std::int32_t next, std::vector<std::int32_t> &awaits) override {
        for (const Rectangle &read : {a, b})  // what is in no slot is read where the caller has it
            if (Slot *slot = slot_of(worker, read)) slot->arrivals.await(read, lane, on_no_lane, next, awaits);
    }

  private:
    struct Slot {
        Rectangle has{no_matrix, {}, {}};  // a k-block and the rows or columns for which it is there
        std::int64_t asked = 0;            // when it was last asked for
        std::vector<Rectangle> filled;     // what of it comes or is there
        Arrivals arrivals;
        LastTasks readers, before;  // of what it has, and of what it had
        std::int64_t turns = 0;     // how often it took another one
    };
    // A task that read some columns of what a round had in a panel of C.
    struct Use {
        int round;
        std::int64_t first, last;
        std::int32_t lane, task;
    };
    struct Known {
        int ring = -1;          // number of the ring that a buffer is
        std::vector<Use> uses;  // where it is none
    };

    using Slots = std::vector<Slot>;

    Slot *slot_of(std::size_t worker, const Rectangle &what) {
        for (Slot &slot : slots_[worker][static_cast<std::size_t>(what.matrix)])
            if (slot.has.matrix == what.matrix && slot.has.across.contains(what.across) && slot.has.k.contains(what.k))
                return &slot;
        return nullptr;
    }

    const Slot *slot_of(std::size_t worker, const Rectangle &what) const {
        return const_cast<Rings *>(this)->slot_of(worker, what);
    }

    Extent k_block(const Rectangle &what) const {
        const std::int64_t first = first_k_ + (what.k.first - first_k_) / depth_ * depth_;
        return {first, first + depth_};
    }

    // Adds those who read what the others of its node had in such a slot before the turn that it has now.
    void await_others(std::size_t worker, int matrix, std::size_t number) {
        Slot &own = slots_[worker][static_cast<std::size_t>(matrix)][number];
        for (const std::size_t other : together_[worker]) {
            const Slot &slot = slots_[other][static_cast<std::size_t>(matrix)][number];
            own.before.add(slot.turns < own.turns ? slot.readers : slot.before);
        }
    }

    std::size_t slot_at(int ring, const Region &region) const {
        const int matrix = ring % 2;
        if (width_[matrix] > 0) return static_cast<std::size_t>(region.col / width_[matrix]);
        const bool k_is_down = (matrix == matrix_b) != problem_.transposed(matrix);
        return static_cast<std::size_t>((k_is_down ? region.row : region.col) / depth_);
    }

    std::int64_t depth_;
    std::array<std::int64_t, 2> width_{};  // of slots of A and B that lie behind each other across k, else 0
    int round_ = 0;
    std::int64_t asked_ = 0, first_k_;
    std::vector<std::array<Slots, 2>> slots_;         // of each worker
    std::vector<std::vector<std::size_t>> together_;  // the workers whose slots are used again together, by worker
    std::vector<Known> known_;                        // by buffer
    std::vector<std::int32_t> awaited_;               // of one task
};

// What fits a layout.
inline std::unique_ptr<Store> store_of(const KLayout &layout) {
    if (layout.request.how.in_rings()) return std::make_unique<Rings>(layout);
    return std::make_unique<Store>(layout);
}

}  // namespace uncut::kblocks
