// A device's worker: threads that make the copies of lanes of the host, which no stream makes alone. They call neither
// CUDA nor MPI and wait for nothing but words and files, so that nothing that was begun depends on anybody's thread.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "host_files.hpp"
#include "records.hpp"

namespace uncut {

// A wait, a copy or a signal of a list, with what it needs.
struct HostStep {
    std::uint8_t code;
    std::uint32_t operation;  // index in the list
    std::uint32_t *flag;      // of a wait or signal
    std::uint32_t value;      // after the epoch
    // Of a copy: so many columns of so many bytes, one if they follow one another on both sides. If it transposes, they
    // are rows of the source, of elements of so many bytes; else these are 0.
    CopyEnd to, from;
    std::size_t width, columns, transposed_bytes;

    bool has_file() const { return to.file != nullptr || from.file != nullptr; }
};

struct HostLane {
    std::int32_t number;  // among the lanes of its rank
    std::vector<HostStep> steps;
};

// Which operation a copy was, when it began and when it ended, in seconds of the system's monotonic clock.
using HostTime = std::tuple<std::uint32_t, double, double>;

// In the abort word beside a number of a call, which is below it: a rank that has failed writes no flags.
inline constexpr std::uint64_t context_lost = std::uint64_t{1} << 63;

inline bool has_failed(std::uint64_t word, std::uint64_t call) { return (word & ~context_lost) == call; }

// Say in the abort word that a call has failed here, and keep what another rank has said of it.
void tell_others(std::uint64_t *word, std::uint64_t call, bool lost);

class HostWorker {
  public:
    struct Work {
        const std::vector<HostLane> *lanes;
        std::uint32_t epoch;
        std::uint64_t *abort;  // the abort word; once it says `call`, signals alone are left to do
        std::uint64_t call;
        std::uint32_t *progress;  // by the number of a lane: how often it got on
        bool traced;
    };
    struct Result {
        std::int64_t tasks = 0, copy_bytes = 0;
        bool aborted = false;         // some were left out because another rank, or another task here, had failed
        std::int64_t operation = -1;  // that failed; -1 if it is not known which
        int file_error = 0;           // what it is where a file could not be read or written, as of `CopyResult`
        int descriptor = -1;          // of that file
        // Of a traced run, in the order in which copies ended.
        std::vector<HostTime> host_times;

        // The first error of a file counts.
        void add(const Result &more);
    };

    HostWorker();
    ~HostWorker();
    HostWorker(const HostWorker &) = delete;
    HostWorker &operator=(const HostWorker &) = delete;

    // Have as many threads as lanes can use, or as there are to be had: none is made while a list runs.
    void reserve(const std::vector<HostLane> &lanes);
    // What `work` points to has to live until `stop` has returned.
    void start(const Work &work);
    // Whether this process made it: a fork has no such thread, and can only forget it.
    bool is_ours() const { return getpid() == process_; }
    bool is_done() const { return busy_.load(std::memory_order_acquire) == 0; }
    // Leave what is left, and return when nothing is touched any more.
    Result stop();

  private:
    struct Lane {
        std::atomic<std::size_t> at{0};   // step
        std::size_t column = 0, row = 0;  // of the copy at hand: where it goes on, bytes
        std::size_t announced = 0;        // bytes of it that the system was told to read
        bool failed = false;
        double began_s = 0;
    };

    void loop(std::size_t thread);
    void run(std::size_t thread);
    bool advance(std::size_t number, bool signals_only, Result &result);
    bool copy(Lane &lane, const HostStep &step, Result &result);

    Work work_{};
    Result result_;
    std::vector<Lane> lanes_;
    std::mutex mutex_;
    std::condition_variable begun_, ended_;
    std::atomic<std::size_t> busy_{0};  // threads
    std::atomic<bool> stopping_{false};
    std::size_t sharing_ = 0;  // threads that share the lanes of this run
    std::uint64_t number_of_run_ = 0;
    bool closing_ = false;
    const pid_t process_ = getpid();
    std::vector<std::thread> threads_;
};

}  // namespace uncut
