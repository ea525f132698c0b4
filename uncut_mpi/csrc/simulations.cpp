#include "simulations.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "relax.hpp"

namespace uncut {
namespace {

// To be woken takes as long as a simulation, and what a search does between two of them seldom longer than this
// (docs/performance.md, 2026-11-23).
constexpr std::chrono::microseconds looking{2000};
constexpr int looks = 32;  // some microseconds

}  // namespace

template <typename Condition>
void Simulations::wait_for(std::condition_variable &condition, const std::atomic<std::uint64_t> &count,
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

void Simulations::begin(std::int64_t ticket, Make make) {
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

Simulated Simulations::wait(std::int64_t ticket) {
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

void Simulations::close() {
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

void Simulations::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        std::shared_ptr<Job> job;
        wait_for(to_do_, begun_, lock, [this, &job] {
            const auto next =
                std::find_if(jobs_.begin(), jobs_.end(), [](const auto &one) { return one->state == Job::waiting; });
            if (next != jobs_.end()) job = *next;
            return closed_ || job;
        });
        if (closed_) return;
        run(*job, lock);
    }
}

void Simulations::run(Job &job, std::unique_lock<std::mutex> &lock) {
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

}  // namespace uncut
