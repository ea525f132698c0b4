// The order of tasks, products, and how C leaves them.
#include "kblocks_scheduler.hpp"

#include <algorithm>

#include "kblocks_rings.hpp"

namespace uncut {
namespace kblocks {

Scheduler::Scheduler(const KLayout &layout, Store &store, std::int64_t most_tasks, Tables *out)
    : layout_(layout),
      problem_(layout.request.problem),
      how_(layout.request.how),
      store_(store),
      out_(out, problem_.num_ranks, most_tasks),
      sums_(static_cast<std::size_t>(problem_.num_ranks), 0),
      sent_(static_cast<std::size_t>(problem_.num_ranks), 0),
      workers_(layout.workers.size()),
      deliveries_(static_cast<std::size_t>(problem_.locations.num_nodes())),
      sends_until_(static_cast<std::size_t>(problem_.num_ranks), 0),
      receives_until_(static_cast<std::size_t>(problem_.num_ranks), 0),
      link_until_(problem_.ways.links.size(), 0),
      host_until_(static_cast<std::size_t>(problem_.num_ranks), 0) {
    for (std::size_t dtype = 0; dtype < slots_.size(); ++dtype) {
        slots_[dtype].resize(layout.relays[dtype].size());
        for (Slots &slots : slots_[dtype])
            slots.read_by.fill(-1);
    }
    blocks_.reserve(layout.blocks.size());
    for (const KBlock &block : layout.blocks) {
        const std::size_t count = block.num_cells();
        BlockState &state = blocks_.emplace_back();
        state.cells.assign(block.parts.size(), std::vector<Cell>(count));
        state.c_in.assign(block.adders.size(), std::vector<TaskList>(count));
        state.finished.assign(count, 0);
    }
    if (in_stretches()) count();
}

void Scheduler::run() {
    const std::vector<KStep> &steps = layout_.steps;
    for (std::size_t at = 0; at < steps.size(); ++at) {
        const KStep &step = steps[at];
        store_.begin(step.round);
        if (!is_fetch(step)) {
            for (std::size_t block = round_of(step).first; block < round_of(step).last; ++block)
                take(block, step);
        } else if (in_stretches()) {
            const std::size_t end = end_of_stretch(at);
            for (const bool shared : {true, false})
                for (std::size_t which = at; which < end; ++which)
                    fetch_groups(steps[which], shared);
            deliver();
            at = end - 1;
        } else {
            fetch_groups(step, std::nullopt);
        }
    }
}

void Scheduler::begin_residents() {
    if (out_.count() == 0 || std::exchange(residents_begun_, true)) return;
    for (const KWorker &worker : layout_.workers) {
        if (worker.blocks.empty()) continue;
        const std::size_t first = worker.blocks.front();
        const auto split = static_cast<int>(worker.split);
        if (resident(member(first, split))) multiply_here(first, {.split = split, .round = block_of(first).round}, 1);
    }
}

void Scheduler::take(std::size_t number, const KStep &step) {
    const KBlock &block = block_of(number);
    if (block.cols_of(step).size() == 0 || block.rows_of(step).size() == 0) return;
    if (step.kind == multiply) {
        multiply_block(number, step);
    } else if (step.kind == fetch_c) {
        bring_c(number, step);
    } else if (++blocks_[number].finished[block.cell(step.top, step.first)] == static_cast<int>(block.parts.size())) {
        finish_part(number, step);
    }
}

void Scheduler::bring_c(std::size_t number, const KStep &step) {
    const KBlock &block = block_of(number);
    const KPart &part = member(number, step.split);
    if (!problem_.reads_c || part.home[matrix_c]) return;
    BlockState &state = blocks_[number];
    const Extent rows = block.rows_of(step);
    const std::size_t cell = block.cell(step.top, step.first);
    if (is_direct(part, step)) {
        state.cells[static_cast<std::size_t>(step.split)][cell].c_there = copy_c_in(
            part.rank, rows, block.cols_of(step),
            [&](Extent of_rows, Extent of_cols) { return store_.at(block, part, panel_direct, of_rows, of_cols); });
        return;
    }
    for (std::size_t a = 0; a < block.adders.size(); ++a) {
        const KAdder &adder = block.adders[a];
        const Extent own = rows.common(adder.rows);
        if (adder.rank != part.rank || adder.home || own.size() <= 0) continue;
        each_slice(adder, step, [&](const Columns &slice) {
            state.c_in[a][block.cell(step.top, slice.block)] =
                copy_c_in(part.rank, own, slice.cols, [&](Extent of_rows, Extent of_cols) {
                    return in_staging(adder.staging, adder, of_rows, slice.part(of_cols));
                });
        });
    }
}

template <typename There>
TaskList Scheduler::copy_c_in(int rank, Extent rows, Extent cols, const There &there) {
    TaskList copies{static_cast<std::int32_t>(c_copies_.size()), 0};
    problem_.each_piece(matrix_c, rows, cols, [&](const KPiece &first, Extent of_rows, Extent of_cols) {
        const KPiece &from = problem_.nearest(first, problem_.node_of(rank));
        const Region source = store_.users(matrix_c, from, of_rows, of_cols);
        c_copies_.push_back(copy_in(from.origin, rank, there(of_rows, of_cols), source));
        ++copies.count;
    });
    return copies;
}

template <typename From>
void Scheduler::copy_c_out(int rank, Extent rows, Extent cols, const KPiece *but, const From &from, Tasks awaits) {
    problem_.each_piece(matrix_c, rows, cols, [&](const KPiece &first, Extent of_rows, Extent of_cols) {
        for (const KPiece &to : std::span<const KPiece>(&first, first.holders)) {
            if (&to == but) continue;
            const Region there = store_.users(matrix_c, to, of_rows, of_cols), source = from(of_rows, of_cols);
            if (to.origin.on_host) {
                copy(host_lane(to.origin, rank, false), there, source, awaits);
            } else {
                push_result(rank, to.origin.rank, there, source, awaits);
            }
        }
    });
}

void Scheduler::multiply_here(std::size_t number, KStep step, int most) {
    const KBlock &block = block_of(number);
    const KPart &part = member(number, step.split);
    const std::vector<Cell> &cells = blocks_[number].cells[static_cast<std::size_t>(step.split)];
    const int columns = static_cast<int>(block.num_columns());
    const int count = part.panel[matrix_c] < 0 ? columns : 1;
    for (int column = 0; column < columns && most > 0; column += count) {
        const KStep product{.kind = multiply,
                            .split = step.split,
                            .last_k = part.k.size(),
                            .first = column,
                            .last = column + count,
                            .bottom = static_cast<int>(block.heights.size()) - 1,
                            .round = step.round};
        if (cells[block.cell(0, column)].begun || block.cols_of(product).size() == 0) continue;
        multiply_piece(number, product);
        --most;
    }
}

void Scheduler::multiply_block(std::size_t number, const KStep &step) {
    const KBlock &block = block_of(number);
    const KPart &part = member(number, step.split);
    if (resident(part)) {
        multiply_here(number, step, static_cast<int>(block.num_columns()));
    } else if (!has_operands(part)) {
        multiply_piece(number, step);
    } else if (!blocks_[number].cells[static_cast<std::size_t>(step.split)][block.cell(step.top, step.first)].begun) {
        KStep product = step;
        product.first_k = 0, product.last_k = part.k.size();
        multiply_piece(number, product);
    }
}

void Scheduler::multiply_piece(std::size_t number, const KStep &step) {
    const KBlock &block = block_of(number);
    const KPart &part = member(number, step.split);
    std::vector<Cell> &cells = blocks_[number].cells[static_cast<std::size_t>(step.split)];
    WorkerState &worker = workers_[part.worker];
    const Extent rows = block.rows_of(step), cols = block.cols_of(step);
    const Region target = store_.at(block, part, panel_of_c(part, step), rows, cols);
    std::array<Operand, 4> operands{{{target}}};
    if (problem_.fuses && (is_direct(part, step) || in_place(part, step))) {
        operands[0].op = problem_.ending;
        operands[0].diagonal = place_of(problem_.ending, rows.first, cols.first, 0);
    }
    std::size_t count = 3;  // without what is added to
    const auto factors = [&](Extent of) {
        const KPiece *a = part.reads_in_place(matrix_a, rows, of), *b = part.reads_in_place(matrix_b, cols, of);
        operands[1] = {a ? store_.users(matrix_a, *a, rows, of) : store_.at(block, part, matrix_a, rows, of), alpha,
                       problem_.op_a};
        operands[2] = {b ? store_.users(matrix_b, *b, of, cols) : store_.at(block, part, matrix_b, of, cols), one,
                       problem_.op_b};
    };
    awaits_.clear();
    const Cell &first = cells[block.cell(step.top, step.first)];
    if (first.begun) {
        operands[count++] = {target, one};
    } else if (in_place(part, step) && problem_.reads_c) {
        operands[count++] = {target, beta};
    } else if (first.c_there.count > 0) {
        operands[count++] = {target, beta};
        each_cell(block, step, [&](std::size_t at) { await_all(cells[at].c_there); });
    }
    ByLane before = on_no_lane;  // what this part's sums so far were made by
    each_cell(block, step, [&](std::size_t at) {
        cells[at].begun = true;
        for (std::size_t lane = 0; lane < before.size(); ++lane)
            before[lane] = std::max(before[lane], cells[at].products[lane]);
    });
    if (worker.last.kind == multiply && !worker.last.has_same_c(step))
        worker.lane = (worker.lane + 1) % static_cast<std::size_t>(how_.lanes);
    worker.last = step;
    awaits_.insert(awaits_.end(), before.begin(), before.end());
    const std::int32_t on = compute(part.rank, product_lanes[worker.lane]);
    std::int32_t made = -1;
    each_product(part, step, [&](Extent all) {
        const std::int64_t left = all.size() > part.k_step ? all.size() % part.k_step : 0;
        const Extent inner{all.first, all.last - left};
        if (made >= 0) {
            before[worker.lane] = made;
            awaits_.clear();
            operands[3] = {target, one}, count = 4;
        }
        factors(inner);
        store_.await(part.worker, {matrix_a, rows, all}, {matrix_b, cols, all}, worker.lane, before, out_.count(),
                     awaits_);
        made = task(gemm_task, on, {operands.data(), count}, awaits_);
        if (left > 0) {
            factors({inner.last, all.last});
            operands[3] = {target, one};
            made = task(gemm_task, on, operands, {});
        }
    });
    each_cell(block, step, [&](std::size_t at) {
        cells[at].products = on_no_lane;
        cells[at].products[worker.lane] = made;
    });
}

void Scheduler::finish_part(std::size_t number, const KStep &step) {
    const KBlock &block = block_of(number);
    const KPart &front = block.parts.front();
    const Extent all_rows = block.rows_of(step);
    const auto made_by = [&](std::size_t p) {
        ByLane last = on_no_lane;
        each_cell(block, step, [&](std::size_t at) {
            for (std::size_t lane = 0; lane < last.size(); ++lane)
                last[lane] = std::max(last[lane], blocks_[number].cells[p][at].products[lane]);
        });
        return last;
    };
    if (in_place(front, step)) {
        const KPiece &home = *front.home[matrix_c];
        if (problem_.has_replicas(matrix_c))
            copy_c_out(
                front.rank, all_rows, block.cols_of(step), &home,
                [&](Extent rows, Extent cols) { return store_.users(matrix_c, home, rows, cols); }, made_by(0));
        return;
    }
    const bool sums = layout_.request.combines && !is_direct(front, step);
    for (std::size_t a = 0; a < block.adders.size(); ++a) {
        const KAdder &adder = block.adders[a];
        const Extent rows = all_rows.common(adder.rows);
        if (rows.size() <= 0) continue;
        each_slice(adder, step, [&](const Columns &slice) {
            const auto target = [&](Extent cols) { return store_.users(matrix_c, *adder.home, rows, cols); };
            std::vector<Summand> &summands = summands_;
            summands.clear();
            for (std::size_t p = 0; p < block.parts.size(); ++p) {
                const KPart &part = block.parts[p];
                const Region own = store_.at(block, part, panel_of_c(part, step), rows, slice.cols);
                const ByLane last = made_by(p);
                const bool stays = part.rank == adder.rank && (sums || !adder.home);
                if (stays) {
                    summands.push_back({own, last});
                    continue;
                }
                const Region there = sums ? in_staging(adder.partial[p], adder, rows, slice) : target(slice.cols);
                summands.push_back({there, {push_result(part.rank, adder.rank, there, own, last), -1}});
            }
            Summand out = summands.front();
            if (sums) out = combine(number, a, step, slice, rows, summands);
            if (adder.home && !problem_.has_replicas(matrix_c)) return;
            const auto part_of_out = [&](Extent of_rows, Extent of_cols) {
                return Region{out.region.buffer, out.region.row + of_rows.first - rows.first,
                              out.region.col + of_cols.first - slice.cols.first, of_rows.size(), of_cols.size()};
            };
            copy_c_out(adder.rank, rows, slice.cols, adder.home, part_of_out, out.made_by);
        });
    }
}

Summand Scheduler::combine(std::size_t number, std::size_t a, const KStep &step, const Columns &slice, Extent rows,
                           std::vector<Summand> &summands) {
    const KBlock &block = block_of(number);
    const KAdder &adder = block.adders[a];
    const std::int32_t on = compute(adder.rank, sum_lane + sums_[static_cast<std::size_t>(adder.rank)]++ % sum_lanes);
    const std::size_t most = max_summands - (problem_.reads_c ? 1 : 0);
    auto sum_up = [&](std::size_t count, const Region &into, bool last, const Region *c, const TaskList &c_copies) {
        summed_.assign(1, {into});
        if (last) {
            summed_[0].op = problem_.ending;
            summed_[0].diagonal = place_of(problem_.ending, rows.first, slice.cols.first, problem_.diagonal);
        }
        awaits_.clear();
        for (std::size_t s = 0; s < count; ++s) {
            summed_.push_back({summands[s].region});
            awaits_.insert(awaits_.end(), summands[s].made_by.begin(), summands[s].made_by.end());
        }
        if (c) {
            summed_.push_back({*c, beta});
            await_all(c_copies);
        }
        return task(combine_task, on, summed_, awaits_);
    };
    while (summands.size() > most) {
        const Region into = summands.front().region;
        const std::size_t count = std::min(max_summands, summands.size());
        const std::int32_t sum = sum_up(count, into, false, nullptr, {});
        summands.erase(summands.begin() + 1, summands.begin() + static_cast<std::ptrdiff_t>(count));
        summands.front() = {into, {sum, -1}};
    }
    const Region c = adder.home ? store_.users(matrix_c, *adder.home, rows, slice.cols)
                                : in_staging(adder.staging, adder, rows, slice);
    const Region out = adder.home || problem_.sums_apart() ? c : summands.front().region;
    return {out,
            {sum_up(summands.size(), out, true, problem_.reads_c ? &c : nullptr,
                    blocks_[number].c_in[a][block.cell(step.top, slice.block)]),
             -1}};
}

}  // namespace kblocks

void schedule_kblocks(const KLayout &layout, std::int64_t most_tasks, Tables &tables) {
    tables.clear();
    const auto store = kblocks::store_of(layout);
    kblocks::Scheduler(layout, *store, most_tasks, &tables).run();
}

std::int64_t count_kblocks(const KLayout &layout, std::int64_t most_tasks) {
    const auto store = kblocks::store_of(layout);
    kblocks::Scheduler scheduler(layout, *store, most_tasks, nullptr);
    try {
        scheduler.run();
    } catch (const TooManyTasks &) {
        return most_tasks + 1;
    }
    return scheduler.num_tasks();
}

}  // namespace uncut
