// What tests ask the scheduler of kblocks and its stores, whose sources are compiled into this library.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "kblocks_alignment.cpp"
#include "kblocks_delivery.cpp"
#include "kblocks_fetch.cpp"
#include "kblocks_layout.cpp"
#include "kblocks_request.cpp"

#include "kblocks_scheduler.cpp"
#include "kblocks_steps.cpp"

namespace {
uncut::Tables tables;
uncut::kblocks::Arrivals arrivals;
std::size_t calls = 0;

uncut::KProblem problem_on_device(int m, int n, int k) {
    using namespace uncut;
    KProblem problem;
    problem.num_ranks = 3, problem.reads_c = true;
    const std::vector<LocationRecord> places{
        {device_space, 0, 0, 0}, {device_space, 1, 0, 1}, {device_space, 2, 0, 2}, {host_space, -1, 0, 3}};
    problem.locations = Locations(places);
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

// How many calls of functions it takes to make a schedule of so many k-blocks by ranks 1 and 2, and its tasks. With
// slots there are four blocks of C for each rank.
extern "C" std::size_t calls_for(int k_blocks, int order, int slots, std::size_t *tasks) {
    using namespace uncut;
    const int extent = 64, k = 8 * k_blocks;
    KBlocking how;
    how.first = how.block = 8, how.columns = 3, how.rows = order == from_corner ? 2 : 1;
    how.order = order, how.lanes = 2, how.at_owner = slots == 0, how.away = count_blocks(how.columns) - 1;
    how.slots = {slots, slots}, how.c_rows = slots > 0 ? extent / 2 : 0, how.c_cols = slots > 0 ? extent / 4 : 0;
    const KPlaces whole{{{{0, extent}, {0, extent / 2}}, {{0, extent}, {extent / 2, extent}}}};
    const KProblem problem = problem_on_device(extent, extent, k);
    const KRequest request(problem, how, {0, k}, {1, 2}, {&whole}, nullptr);
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
