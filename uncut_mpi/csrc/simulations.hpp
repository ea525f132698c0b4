// Simulations beside other work: one thread makes them in order, and who waits for one makes those that it has not
// begun. What is simulated may have to be scheduled first, which is then done there too.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "relax.hpp"
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
    void begin(std::int64_t ticket, Make make) {
        {
            const std::lock_guard lock(mutex_);
            if (closed_) throw std::out_of_range("simulations are closed");
            jobs_.push_back(std::make_shared<Job>(Job{ticket, std::move(make)}));
            ++begun_;
            if (!thread_.joinable()) {
                try {
                    thread_ = std::thread(&Simulations::work, this);
                } catch (const std::system_error &) {
                    // No more threads are to be had: who waits makes them.
                }
            }
        }
        to_do_.notify_one();
    }

    // Throws what `make` threw, and std::out_of_range for a ticket that is not there, or no more.
    Simulated wait(std::int64_t ticket) {
        std::unique_lock lock(mutex_);
        const auto found =
            std::find_if(jobs_.begin(), jobs_.end(), [ticket](const auto &one) { return one->ticket == ticket; });
        if (found == jobs_.end()) {
            // What it refers to may go when this has returned.
            done_.wait(lock, [this] { return running_ == 0; });
            throw std::out_of_range("there is no such simulation");
        }
        const std::shared_ptr<Job> job = *found;
        jobs_.erase(found);
        if (job->state == Job::waiting) run(*job, lock);
        while (job->state != Job::ended) {
            // The thread is at it: meanwhile the last one to be begun, which the thread would come to last.
            const auto last =
                std::find_if(jobs_.rbegin(), jobs_.rend(), [](const auto &one) { return one->state == Job::waiting; });
            if (last == jobs_.rend()) {
                wait_for(done_, ended_, lock, [&job] { return job->state == Job::ended; });
            } else {
                const std::shared_ptr<Job> other = *last;
                run(*other, lock);
            }
        }
        if (job->error) std::rethrow_exception(job->error);
        return std::move(job->result);
    }

    // Ends the thread after the simulations at hand; the others are dropped.
    void close() {
        std::thread thread;
        {
            std::unique_lock lock(mutex_);
            closed_ = true;
            ++begun_;  // that the thread looks
            jobs_.clear();
            thread.swap(thread_);
            done_.wait(lock, [this] { return running_ == 0; });
            workplaces_.clear();
        }
        to_do_.notify_one();
        if (thread.joinable()) thread.join();
    }

  private:
    // To be woken takes as long as a simulation, and what a search does between two of them seldom longer than this
    // (docs/performance.md, 2026-11-23).
    static constexpr std::chrono::microseconds looking{2000};
    static constexpr int looks = 32;  // some microseconds

    struct Job {
        enum State { waiting, running, ended };
        std::int64_t ticket;
        Make make;
        State state = waiting;
        Simulated result{};
        std::exception_ptr error{};
    };

    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            std::shared_ptr<Job> job;
            wait_for(to_do_, begun_, lock, [this, &job] {
                const auto next = std::find_if(jobs_.begin(), jobs_.end(),
                                               [](const auto &one) { return one->state == Job::waiting; });
                if (next != jobs_.end()) job = *next;
                return closed_ || job;
            });
            if (closed_) return;
            run(*job, lock);
        }
    }

    // Waits until `is_so`, at first without giving the processor away for long: to be woken takes as long as a
    // simulation.
    template <typename Condition>
    static void wait_for(std::condition_variable &condition, const std::atomic<std::uint64_t> &count,
                         std::unique_lock<std::mutex> &lock, Condition is_so) {
        const auto until = std::chrono::steady_clock::now() + looking;
        while (!is_so()) {
            const std::uint64_t seen = count.load();
            lock.unlock();
            while (count.load() == seen && std::chrono::steady_clock::now() < until) {
                for (int look = 0; look < looks && count.load() == seen; ++look)
                    relax();
                std::this_thread::yield();  // to whom the processor is shared with
            }
            lock.lock();
            if (count.load() == seen) break;
        }
        condition.wait(lock, is_so);
    }

    // Without the lock meanwhile.
    void run(Job &job, std::unique_lock<std::mutex> &lock) {
        job.state = Job::running;
        ++running_;
        std::unique_ptr<Workplace> at;
        if (!workplaces_.empty()) {
            at = std::move(workplaces_.back());
            workplaces_.pop_back();
        }
        lock.unlock();
        try {
            if (!at) at = std::make_unique<Workplace>(machine_);
            job.result = job.make(*at);
        } catch (...) {
            job.error = std::current_exception();
        }
        lock.lock();
        if (at) workplaces_.push_back(std::move(at));
        job.state = Job::ended;
        --running_;
        ++ended_;
        done_.notify_all();
    }

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
