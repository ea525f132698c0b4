#include "host_worker.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace uncut {
namespace {

constexpr std::size_t bytes_per_turn = std::size_t{4} << 20;  // then other lanes have theirs
// While all lanes wait: look, then let others have the processor, then sleep.
constexpr int looks = 2000, yields = 2000;
constexpr std::chrono::microseconds pause{20};

// What is transposed at once: columns of one cache line in f64, and so many that rows of the source are long. Of what
// was tried (8 to 128 each) this made 6 GB/s in f64, 3 in f32 and 2 in f16 where memcpy makes 17 to 20 (AMD EPYC).
constexpr std::size_t block_rows = 16, block_columns = 128;

template <std::size_t item>
void transpose(std::byte *to, std::size_t to_pitch, const std::byte *from, std::size_t from_pitch, std::size_t rows,
               std::size_t columns) {
    for (std::size_t column = 0; column < columns; ++column)
        for (std::size_t row = 0; row < rows; ++row)
            std::memcpy(to + column * to_pitch + row * item, from + row * from_pitch + column * item, item);
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

HostWorker::HostWorker() : thread_(&HostWorker::loop, this) {}

HostWorker::~HostWorker() {
    stop();
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    begun_.notify_one();
    thread_.join();
}

void HostWorker::start(const Work &work) {
    {
        const std::lock_guard lock(mutex_);
        work_ = work;
        result_ = {};
        lanes_ = std::vector<Lane>(work.lanes->size());
        stopping_ = false;
        busy_ = true;
    }
    begun_.notify_one();
}

HostWorker::Result HostWorker::stop() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    ended_.wait(lock, [this] { return !busy_; });
    return std::exchange(result_, {});
}

void HostWorker::loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
        begun_.wait(lock, [this] { return busy_ || closing_; });
        if (closing_) return;
        lock.unlock();
        run();
        lock.lock();
        busy_ = false;
        ended_.notify_all();
    }
}

void HostWorker::run() {
    for (int idle = 0; !stopping_;) {
        constexpr std::uint64_t any_reason = ~(std::uint64_t{1} << 63);
        const std::uint64_t failed = std::atomic_ref(*work_.abort).load(std::memory_order_acquire);
        bool moved = false, through = true;
        for (std::size_t l = 0; l < lanes_.size(); ++l) {
            if (lanes_[l].at == (*work_.lanes)[l].steps.size()) continue;
            through = false;
            moved = advance(l, (failed & any_reason) == work_.call) || moved;
        }
        if (through) return;
        idle = moved ? 0 : idle + 1;
        if (idle > looks + yields) {
            std::this_thread::sleep_for(pause);
        } else if (idle > looks) {
            sched_yield();
        }
    }
}

// One turn of a lane; whether it got on.
bool HostWorker::advance(std::size_t number, bool signals_only) {
    const HostLane &of = (*work_.lanes)[number];
    Lane &lane = lanes_[number];
    bool moved = false;
    for (bool copied = false; lane.at < of.steps.size();) {
        const HostStep &step = of.steps[lane.at];
        bool over = true;
        if (step.code == code_signal) {
            std::atomic_ref(*step.flag).store(work_.epoch + step.value, std::memory_order_release);
        } else if (signals_only) {
            result_.aborted = result_.aborted || step.code == code_copy;
        } else if (step.code == code_wait_flag) {
            const std::uint32_t flag = std::atomic_ref(*step.flag).load(std::memory_order_acquire);
            if (static_cast<std::int32_t>(flag - (work_.epoch + step.value)) < 0) return moved;
        } else {
            if (std::exchange(copied, true)) return true;
            over = copy(lane, step);
        }
        std::atomic_ref(work_.progress[of.number]).fetch_add(1, std::memory_order_relaxed);
        if (!over) return true;
        ++lane.at;
        moved = true;
    }
    return moved;
}

// Go on with a copy for a turn; whether it is made.
bool HostWorker::copy(Lane &lane, const HostStep &step) {
    if (lane.column == 0 && lane.row == 0) lane.began_s = now_s();
    const std::size_t item = step.transposed_bytes;
    for (std::size_t left = bytes_per_turn; left > 0 && lane.column < step.columns;) {
        std::byte *const to = step.destination + lane.column * step.to_pitch + lane.row;
        std::size_t bytes = std::min(left, step.width - lane.row), columns = 1;
        if (item == 0) {
            std::memcpy(to, step.source + lane.column * step.from_pitch + lane.row, bytes);
        } else {
            bytes = std::min(block_rows * item, step.width - lane.row);
            columns = std::min(block_columns, step.columns - lane.column);
            const std::byte *const from = step.source + lane.row / item * step.from_pitch + lane.column * item;
            const auto make = item == 16  ? transpose<16>
                              : item == 8 ? transpose<8>
                              : item == 4 ? transpose<4>
                                          : transpose<2>;
            make(to, step.to_pitch, from, step.from_pitch, bytes / item, columns);
        }
        left -= std::min(left, bytes * columns);
        lane.row += bytes;
        if (lane.row == step.width) lane.column += columns, lane.row = 0;
    }
    if (lane.column < step.columns) return false;
    lane.column = 0;
    ++result_.tasks;
    result_.copy_bytes += static_cast<std::int64_t>(step.width * step.columns);
    if (work_.traced) result_.times.push_back({step.operation, lane.began_s, now_s()});
    return true;
}

}  // namespace uncut
