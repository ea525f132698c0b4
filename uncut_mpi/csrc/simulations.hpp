// Simulations beside other work: one thread makes them in order, and who waits for one makes those that it has not
// begun. What is simulated may have to be scheduled first, which is then done there too.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "simulator_state.hpp"
#include "tables.hpp"

namespace uncut {

// What one simulation after the other is made with.
struct Workplace {
    explicit Workplace(const SimulatedMachine &machine) : simulator(machine) {}
    Simulator simulator;
    Tables tables{};    // of a schedule that is made there and not kept,
    Tables halves{};    // of the same with its copies between nodes in halves,
    Simulated times{};  // and of its run
};

class Simulations {
  public:
    using Make = std::function<Simulated(Workplace &)>;

    explicit Simulations(const SimulatedMachine &machine) : machine_(machine) {}
    ~Simulations() { close(); }
    Simulations(const Simulations &) = delete;
    Simulations &operator=(const Simulations &) = delete;

    // What `make` refers to has to live until `wait` or `close` has returned; if this throws, nothing has begun.
    void begin(std::int64_t ticket, Make make);

    // Throws what `make` threw, and std::out_of_range for a ticket that is not there, or no more.
    Simulated wait(std::int64_t ticket);

    // Ends the thread after the simulations at hand; the others are dropped.
    void close();

  private:
    struct Job {
        enum State { waiting, running, ended };
        std::int64_t ticket;
        Make make;
        State state = waiting;
        Simulated result{};
        std::exception_ptr error{};
    };

    void work();
    // Waits until `is_so`, at first without giving the processor away for long: to be woken takes as long as a
    // simulation.
    template <typename Condition>
    static void wait_for(std::condition_variable &condition, const std::atomic<std::uint64_t> &count,
                         std::unique_lock<std::mutex> &lock, Condition is_so);
    // Without the lock meanwhile.
    void run(Job &job, std::unique_lock<std::mutex> &lock);

    const SimulatedMachine machine_;
    std::mutex mutex_;
    std::condition_variable to_do_, done_;
    std::deque<std::shared_ptr<Job>> jobs_;
    std::vector<std::unique_ptr<Workplace>> workplaces_;  // where nobody is: one for the thread, one for who waits
    int running_ = 0;
    bool closed_ = false;
    std::atomic<std::uint64_t> begun_{0}, ended_{0};  // how many, for who looks without the lock
    std::thread thread_;                              // from the first simulation on
};

}  // namespace uncut
