// Simulations beside other work: one thread makes them in order, and who waits for one that it has not begun makes it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "simulator.hpp"

namespace uncut {

class Simulations {
  public:
    explicit Simulations(const SimulatedMachine &machine) : machine_(machine) {}
    ~Simulations() { close(); }
    Simulations(const Simulations &) = delete;
    Simulations &operator=(const Simulations &) = delete;

    // What the tables point at has to live until `wait` or `close` has returned; if this throws, nothing has begun.
    void begin(std::int64_t ticket, const SimulatedTables &tables);

    // Throws what the simulation threw, and std::out_of_range for a ticket that is not there, or no more.
    Simulated wait(std::int64_t ticket);

    // Ends the thread after the simulation at hand; the others are dropped.
    void close();

  private:
    struct Job {
        enum State { waiting, running, ended };
        std::int64_t ticket;
        SimulatedTables tables;
        State state = waiting;
        Simulated result{};
        std::exception_ptr error{};
    };

    void work();
    void run(Job &job) const noexcept;

    const SimulatedMachine machine_;
    std::mutex mutex_;
    std::condition_variable to_do_, done_;
    std::deque<std::shared_ptr<Job>> jobs_;
    bool closed_ = false;
    std::thread thread_;  // from the first simulation on
};

}  // namespace uncut
