#include "host_worker.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

namespace uncut {
namespace {

constexpr std::size_t bytes_per_turn = std::size_t{4} << 20;  // then other lanes have theirs
constexpr std::size_t read_ahead = 8 * bytes_per_turn;        // of a file, so that its disk is not idle between turns
constexpr std::size_t most_threads = 6;                       // of files: A and B in, C in and out, and some to spare
// While all lanes wait: look, then let others have the processor, then sleep.
constexpr int looks = 2000, yields = 2000;
constexpr std::chrono::microseconds pause{20};

// Copies in memory take turns. Reads and writes of files wait for the disk, which is best at several at once.
std::size_t threads_for(const std::vector<HostLane> &lanes) {
    const auto uses_files = [](const HostLane &lane) { return std::ranges::any_of(lane.steps, &HostStep::has_file); };
    return std::clamp<std::size_t>(static_cast<std::size_t>(std::ranges::count_if(lanes, uses_files)), 1, most_threads);
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

void tell_others(std::uint64_t *word, std::uint64_t call, bool lost) {
    const std::uint64_t ours = call | (lost ? context_lost : 0);
    // Ranks may fail at the same time, and that one has lost its context must not be lost.
    for (std::uint64_t said = std::atomic_ref(*word);;)
        if (std::atomic_ref(*word).compare_exchange_weak(said, has_failed(said, call) ? said | ours : ours)) return;
}

HostWorker::HostWorker() { threads_.emplace_back(&HostWorker::loop, this, 0); }

HostWorker::~HostWorker() {
    stop();
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    begun_.notify_all();
    for (std::thread &thread : threads_)
        thread.join();
}

void HostWorker::reserve(const std::vector<HostLane> &lanes) {
    const std::lock_guard lock(mutex_);
    try {
        while (threads_.size() < threads_for(lanes))
            threads_.emplace_back(&HostWorker::loop, this, threads_.size());
    } catch (const std::system_error &) {
        // Fewer take longer.
    }
}

void HostWorker::start(const Work &work) {
    {
        const std::lock_guard lock(mutex_);
        work_ = work;
        result_ = {};
        lanes_ = std::vector<Lane>(work.lanes->size());
        stopping_ = false;
        sharing_ = std::min(threads_for(*work.lanes), threads_.size());
        busy_ = sharing_;
        ++number_of_run_;
    }
    begun_.notify_all();
}

HostWorker::Result HostWorker::stop() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    ended_.wait(lock, [this] { return busy_ == 0; });
    return std::exchange(result_, {});
}

void HostWorker::loop(std::size_t thread) {
    std::unique_lock lock(mutex_);
    for (std::uint64_t done = 0;;) {
        begun_.wait(lock, [&] { return closing_ || (number_of_run_ != done && thread < sharing_ && busy_ > 0); });
        if (closing_) return;
        done = number_of_run_;
        lock.unlock();
        run(thread);
        lock.lock();
        if (--busy_ == 0) ended_.notify_all();
    }
}

void HostWorker::run(std::size_t thread) {
    Result result;
    for (int idle = 0; !stopping_;) {
        const bool failed = has_failed(std::atomic_ref(*work_.abort).load(std::memory_order_acquire), work_.call);
        bool moved = false, through = true;
        for (std::size_t l = thread; l < lanes_.size(); l += sharing_) {
            if (lanes_[l].at == (*work_.lanes)[l].steps.size()) continue;
            through = false;
            moved = advance(l, failed, result) || moved;
        }
        if (through) break;
        idle = moved ? 0 : idle + 1;
        if (idle > looks + yields) {
            std::this_thread::sleep_for(pause);
        } else if (idle > looks) {
            sched_yield();
        }
    }
    const std::lock_guard lock(mutex_);
    result_.add(result);
}

void HostWorker::Result::add(const Result &more) {
    tasks += more.tasks;
    copy_bytes += more.copy_bytes;
    aborted = aborted || more.aborted;
    host_times.insert(host_times.end(), more.host_times.begin(), more.host_times.end());
    if (more.file_error == 0 || file_error != 0) return;
    file_error = more.file_error;
    descriptor = more.descriptor;
    operation = more.operation;
}

// One turn of a lane; whether it got on.
bool HostWorker::advance(std::size_t number, bool signals_only, Result &result) {
    const HostLane &of = (*work_.lanes)[number];
    Lane &lane = lanes_[number];
    bool moved = false;
    for (bool copied = false; lane.at < of.steps.size();) {
        const HostStep &step = of.steps[lane.at];
        bool over = true;
        if (step.code == code_signal) {
            std::atomic_ref(*step.flag).store(work_.epoch + step.value, std::memory_order_release);
        } else if (signals_only) {
            result.aborted = result.aborted || step.code == code_copy;
        } else if (step.code == code_wait_flag) {
            const std::uint32_t flag = std::atomic_ref(*step.flag).load(std::memory_order_acquire);
            if (static_cast<std::int32_t>(flag - (work_.epoch + step.value)) < 0) return moved;
        } else {
            if (std::exchange(copied, true)) return true;
            over = copy(lane, step, result);
            signals_only = lane.failed;
        }
        std::atomic_ref(work_.progress[of.number]).fetch_add(1, std::memory_order_relaxed);
        if (!over) return true;
        ++lane.at;
        moved = true;
    }
    return moved;
}

// Go on with a copy for a turn; whether it is made. If a file fails, all ranks leave out what is left.
bool HostWorker::copy(Lane &lane, const HostStep &step, Result &result) {
    if (lane.column == 0 && lane.row == 0) lane.began_s = now_s();
    if (lane.column < step.columns) {
        const std::size_t item = step.transposed_bytes;
        std::size_t columns = step.columns - lane.column, bytes = step.width - lane.row;
        if (item != 0) {
            if (!step.has_file()) columns = std::min(columns, block_columns);  // else whole runs of the source
            bytes = std::min(bytes, std::max<std::size_t>(1, bytes_per_turn / (columns * item)) * item);
        } else if (lane.row == 0 && step.width <= bytes_per_turn) {
            columns = std::min(columns, bytes_per_turn / step.width);
        } else {
            columns = 1;
            bytes = std::min(bytes, bytes_per_turn);
        }
        if (step.from.file != nullptr) {
            const std::size_t width = item == 0 ? step.width : step.columns * item;  // of columns as they are stored
            const std::size_t at = item == 0 ? lane.column * step.width + lane.row : lane.row / item * width;
            const std::size_t end = std::min(step.width * step.columns, at + bytes * columns + read_ahead);
            announce(step.from, width, lane.announced, end);
            lane.announced = end;
        }
        CopyEnd to = step.to, from = step.from;
        to.address += lane.column * to.pitch + lane.row;
        from.address +=
            item == 0 ? lane.column * from.pitch + lane.row : lane.row / item * from.pitch + lane.column * item;
        const CopyResult copied = copy_between(to, from, bytes, columns, item);
        if (copied.error != 0) {
            result.file_error = copied.error;
            result.descriptor = copied.descriptor;
            result.operation = step.operation;
            lane.failed = true;
            tell_others(work_.abort, work_.call, false);
            return true;
        }
        lane.row += bytes;
        if (lane.row == step.width) lane.column += columns, lane.row = 0;
        if (lane.column < step.columns) return false;
    }
    lane.column = lane.announced = 0;
    ++result.tasks;
    result.copy_bytes += static_cast<std::int64_t>(step.width * step.columns);
    if (work_.traced) result.host_times.push_back({step.operation, lane.began_s, now_s()});
    return true;
}

}  // namespace uncut
