// Another store of kblocks, behind the same calls as its panels: each rank has one panel of A, B and C for all of its
// blocks of C, those of A and B rings of a few k-blocks. The core's sources are compiled into this library.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "kblocks_delivery.cpp"
#include "kblocks_fetch.cpp"
#include "kblocks_layout.cpp"
#include "kblocks_request.cpp"
#include "kblocks_scheduler.cpp"
#include "kblocks_steps.cpp"

namespace uncut::kblocks {
namespace {

class Rings final : public Store {
  public:
    Rings(const KLayout &layout, std::int64_t depth, std::int64_t slots, bool forgets)
        : Store(layout), layout_(layout), panels_(layout), length_(depth * slots), forgets_(forgets) {}

    Region at(const KBlock &block, const KPart &part, int panel, Extent rows, Extent cols) const override {
        KPart first = part;
        first.panel = layout_.blocks[layout_.workers[part.worker].blocks.front()].parts.front().panel;
        if (panel <= matrix_b && first.panel[panel] >= 0) {
            Extent &k = panel == matrix_a ? cols : rows;
            const std::int64_t before = k.first - k.first % length_;
            k = k.shifted(-before);
        }
        return panels_.at(block, first, panel, rows, cols);
    }
    Region beside(const KAdder &adder, int buffer, Extent rows, std::int64_t place,
                  std::int64_t columns) const override {
        return panels_.beside(adder, buffer, rows, place, columns);
    }
    Tasks take_note(std::int32_t task, const Region &overwritten, std::span<const Operand> read) override {
        readers_.clear();
        for (const Reader &one : noted_)
            if (one.read.buffer == overwritten.buffer && overlap(one.read, overwritten)) readers_.push_back(one.task);
        for (const Operand &one : read)
            noted_.push_back({one.region, task});
        return forgets_ ? Tasks{} : Tasks{readers_};
    }

  private:
    struct Reader {
        Region read;
        std::int32_t task;
    };
    static bool overlap(const Region &one, const Region &other) {
        return Extent{one.row, one.row + one.rows}.meets({other.row, other.row + other.rows}) &&
               Extent{one.col, one.col + one.cols}.meets({other.col, other.col + other.cols});
    }

    const KLayout &layout_;
    Panels panels_;
    std::int64_t length_;
    bool forgets_;
    std::vector<Reader> noted_;
    std::vector<std::int32_t> readers_;
};

}  // namespace
}  // namespace uncut::kblocks

namespace {
uncut::KTables tables;
std::vector<uncut::BufferRecord> buffers;
uncut::kblocks::Arrivals arrivals;
std::size_t calls = 0;

uncut::KProblem problem_on_device(int m, int n, int k) {
    using namespace uncut;
    KProblem problem;
    problem.num_ranks = 3, problem.reads_c = true;
    const auto user = [](int matrix, int rows, int cols) {
        return BufferRecord{0, user_role, static_cast<std::uint8_t>(matrix), dtype_f64, 0, rows, cols, rows, -1};
    };
    problem.users = {user(0, m, k), user(1, k, n), user(2, m, n)};
    for (const BufferRecord &one : problem.users)
        problem.pieces[one.matrix] = {{{0, one.rows}, {0, one.cols}, one.matrix, 0, 0, {false, 0}, 1}};
    return problem;
}
}  // namespace

// Every call of a function of the core, as this library is compiled.
extern "C" __attribute__((no_instrument_function)) void __cyg_profile_func_enter(void *, void *) { ++calls; }
extern "C" __attribute__((no_instrument_function)) void __cyg_profile_func_exit(void *, void *) {}

// C (m by n) on rank 0's device, as A and B are, is computed by ranks 1 and 2 in two halves of its columns, by k-blocks
// of `depth` elements.
extern "C" void schedule_rings(int m, int n, int k, int depth, int slots, bool serial_copies, bool earliest,
                               bool forgets) {
    using namespace uncut;
    KProblem problem = problem_on_device(m, n, k);
    problem.serial_copies = serial_copies;
    KBlocking how;
    how.first = how.block = depth, how.earliest = earliest, how.lookahead = 2;
    std::vector<KPlaces> rounds;
    for (const std::int64_t left : {0, n / 2})
        rounds.push_back({{0, m}, {{0, 1}}, {{{0, m}, {left, left + n / 4}}, {{0, m}, {left + n / 4, left + n / 2}}}});
    const KRequest request = make_request(problem, how, {true, true, 1, {0, k}, {1, 2}, {&rounds[0], &rounds[1]}, {}});
    KLayout layout(request);
    for (BufferRecord &buffer : layout.buffers) {
        if (buffer.role != panel_role || buffer.matrix > matrix_b) continue;
        (buffer.matrix == matrix_a ? buffer.cols : buffer.rows) = depth * slots;
    }
    kblocks::Rings rings(layout, depth, slots, forgets);
    tables.clear();
    kblocks::Scheduler(layout, rings, 100000, &tables).run();
    buffers = layout.buffers;
}

// How many calls of functions it takes to make a schedule of so many k-blocks by ranks 1 and 2, and its tasks.
extern "C" std::size_t calls_for(int k_blocks, int order, std::size_t *tasks) {
    using namespace uncut;
    const int extent = 64, k = 8 * k_blocks;
    KBlocking how;
    how.first = how.block = 8, how.columns = 3, how.halvings = 2, how.rows = order == from_corner ? 2 : 1;
    how.order = order, how.lanes = 2, how.lookahead = 2;
    const KPlaces whole{{0, extent}, {{0, 1}}, {{{0, extent}, {0, extent / 2}}, {{0, extent}, {extent / 2, extent}}}};
    const KProblem problem = problem_on_device(extent, extent, k);
    const KRequest request = make_request(problem, how, {true, true, 1, {0, k}, {1, 2}, {&whole}, {}});
    const KLayout layout(request);
    tables.clear();
    const std::size_t before = calls;
    schedule_kblocks(layout, 1000000, tables);
    *tasks = tables.tasks.size();
    return calls - before;
}

// Pieces of one matrix: where they begin and end across and along k.
extern "C" void forget_arrivals() { arrivals = {}; }
extern "C" void add_arrival(const std::int64_t *piece, int task) {
    arrivals.add({uncut::matrix_b, {piece[0], piece[1]}, {piece[2], piece[3]}}, task);
}
extern "C" std::size_t await_arrivals(const std::int64_t *read, int lane, const int *before, int next, int *tasks) {
    std::vector<std::int32_t> awaits;
    arrivals.await({uncut::matrix_b, {read[0], read[1]}, {read[2], read[3]}}, static_cast<std::size_t>(lane),
                   {before[0], before[1]}, next, awaits);
    std::copy(awaits.begin(), awaits.end(), tasks);
    return awaits.size();
}

// The tables in the order in which Python has them, then the buffers.
extern "C" const void *table(int number, std::size_t *bytes) {
    const auto found = [bytes](const auto &records) -> const void * {
        *bytes = records.size() * sizeof(records[0]);
        return records.data();
    };
    switch (number) {
        case 0: return found(tables.tasks);
        case 1: return found(tables.operands);
        case 2: return found(tables.regions);
        case 3: return found(tables.awaits);
        case 4: return found(tables.lanes);
        default: return found(buffers);
    }
}
