#include "simulations.hpp"

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace uncut {

void Simulations::begin(std::int64_t ticket, Make make) {
    {
        const std::lock_guard lock(mutex_);
        if (closed_) throw std::out_of_range("simulations are closed");
        jobs_.push_back(std::make_shared<Job>(Job{ticket, std::move(make)}));
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
            done_.wait(lock, [&job] { return job->state == Job::ended; });
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
        jobs_.clear();
        thread.swap(thread_);
        done_.wait(lock, [this] { return running_ == 0; });
    }
    to_do_.notify_one();
    if (thread.joinable()) thread.join();
}

void Simulations::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        std::shared_ptr<Job> job;
        to_do_.wait(lock, [this, &job] {
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
    lock.unlock();
    try {
        job.result = job.make(machine_);
    } catch (...) {
        job.error = std::current_exception();
    }
    lock.lock();
    job.state = Job::ended;
    --running_;
    done_.notify_all();
}

}  // namespace uncut
