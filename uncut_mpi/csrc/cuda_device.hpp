// One device of this process: its primary context and what all executors of a backend share.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "cuda_driver.hpp"
#include "cuda_products.hpp"
#include "host_worker.hpp"

namespace uncut::cuda {

// Streams, cuBLAS handles, events and progress words are made in `reserve`, kept until `close` and shared by every
// executor. So a run makes none and a second plan costs little.
class DeviceState {
  public:
    static constexpr std::size_t workspace_bytes = std::size_t{32} << 20;
    static constexpr std::size_t num_sets = 2;  // of progress words

    struct ComputeLane {
        Stream stream = nullptr;
        BlasHandle handle = nullptr;
        Address workspace = 0;
        Address copies = 0;  // of A and B; once they were asked for
    };

    DeviceState(std::shared_ptr<const Driver> driver, std::shared_ptr<const Blas> blas, int ordinal);
    ~DeviceState();
    DeviceState(const DeviceState &) = delete;
    DeviceState &operator=(const DeviceState &) = delete;

    const Driver &driver() const { return *driver_; }
    const Blas &blas() const { return *blas_; }
    Context context() const { return context_; }
    int multiprocessors() const { return multiprocessors_; }
    std::int64_t max_pitch_bytes() const { return max_pitch_; }
    unsigned wait_flags() const { return wait_flags_; }

    // Make this device's context current in the calling thread.
    void use() const;

    // The same for a scope: the thread has its own current context back afterwards.
    class Scope {
      public:
        explicit Scope(const DeviceState &device);
        ~Scope();
        Scope(const Scope &) = delete;
        Scope &operator=(const Scope &) = delete;
        void check() const;

      private:
        const Driver &driver_;
        Context before_ = nullptr, own_;
        Code code_;
    };

    // Have at least so many of each; nothing may be in flight. Out of memory is a Failure that
    // keeps what was made.
    void reserve(std::size_t compute_lanes, std::size_t copy_lanes, std::size_t events);
    // The same for events that take the time, which traced runs alone use.
    void reserve_timing(std::size_t events);

    const ComputeLane &compute_lane(std::size_t number) const { return compute_lanes_.at(number); }
    // Memory for copies of what a lane's products read, which all executors share; nothing may be in flight. Who can do
    // without gets 0 where there is no room.
    Address copies_of(Stream lane, bool can_do_without = false);
    std::size_t copies_bytes = std::size_t{256} << 20;  // of it; not to be changed once there is some
    Address compute_stream(std::size_t number) const { return reinterpret_cast<Address>(compute_lane(number).stream); }
    Stream copy_stream(std::size_t number) const { return copy_streams_.at(number); }
    Event event(std::size_t number) const { return events_.at(number); }
    Event timing_event(std::size_t number) const { return timing_events_[number]; }
    std::size_t num_timing_events() const { return timing_events_.size(); }
    // Words in pinned host memory, of which runs that overlap use one set each.
    std::uint32_t *progress(std::size_t set) const { return progress_ + set * max_lanes; }
    Address progress_address(std::size_t lane, std::size_t set) const {
        return progress_device_ + 4 * (set * max_lanes + lane);
    }
    // Behind them a word of each set, in which a chained run writes that it has ended.
    std::uint32_t *end_word(std::size_t set) const { return progress(num_sets) + set; }
    Address end_address(std::size_t set) const { return progress_address(set, num_sets); }
    // What puts one run behind another: a stream, and events for it, what waits for a run of each set, and lanes.
    Stream chain_stream() const { return chain_stream_; }
    // On which what a caller's stream waits for is awaited.
    Stream preceding_stream() const { return preceding_stream_; }
    Event chain_event(std::size_t number) const { return chain_events_.at(number); }

    // Choose kernels by their time, of products of so many operations or more; infinity: the library chooses all.
    // Without `timing` what is known is used and nothing is timed. Of `most` products or so what was found is kept.
    void tune_products(double least_operations, bool timing, std::size_t most) {
        least_operations_ = least_operations;
        timing_ = timing;
        most_tuned_ = most;
    }
    // A product and where it reads, of which a plan has `count`.
    struct Wanted {
        ProductShape shape;
        Address a, b;
        std::size_t count;
    };
    // Time what is proposed for a plan's products, those that most of the operations are in; nothing may be in flight.
    // Without memory for a C that may be written the library chooses. Where too much is known, what is not the plan's
    // goes.
    void tune(const std::map<ProductShape, Wanted> &asked);
    // What was found faster than the library's choice for a product; null: nothing, or it is not to be tuned.
    std::shared_ptr<const TunedProduct> tuned_product(const ProductShape &shape) const;
    // What each product took by the library's choice and takes now, in seconds.
    struct Tuned {
        double usual_s, best_s;
        std::shared_ptr<const TunedProduct> product;  // null: by the library's choice
    };
    const std::map<ProductShape, Tuned> &tuned_products() const { return tuned_products_; }

    // Premise P1: held by the thread that issues.
    std::mutex &issuing() { return issuing_; }
    // The runs whose work the streams hold: at most two, the second behind the first.
    std::vector<const void *> &in_flight() { return in_flight_; }
    // Which set of words the next run has: not that of the one before.
    std::size_t next_set() { return set_ = 1 - set_; }

    // Call a bundle once, with results that nobody reads, if none like it was: what its first call loads may wait for
    // the whole device. `accumulates`: it may add to C.
    void warm_up(const ComputeLane &lane, const ProductShape &shape, Bundle bundle, bool accumulates);

    // For lanes of the host; made when it is first asked for.
    HostWorker &host_worker();

    // Note what work streams of the caller's hold now, and return when it is done: between the two the device gets on.
    // Call without the interpreter lock.
    void mark_streams(const std::vector<Address> &streams);
    void await_marks();
    // Launch one thread of a kernel and wait for it.
    void run_once(Function kernel, void *argument);
    // Set `count` 32-bit words at `address` and wait for it.
    void fill_words(Address address, std::size_t count, std::uint32_t value);
    std::uint64_t pointer_attribute(int attribute, Address address) const;
    // Where the allocation with an address begins: the address itself if the driver knows of none.
    Address allocation_of(Address address) const;
    // A copy of a table in the device's memory, which it keeps as long as it is asked to and is open.
    std::shared_ptr<void> keep(const void *table, std::size_t bytes);

    // Release everything; a second call does nothing. After a stall the streams still wait, and
    // freeing memory would wait with them: `abandon` then forgets everything instead.
    void close();
    void abandon() { abandoned_ = true; }
    bool abandoned() const { return abandoned_; }

  private:
    Tuned time(const Wanted &wanted, Address c);
    void reserve_events(std::vector<Event> &events, std::size_t count, unsigned flags);
    void check_open() const;
    Stream own_stream();

    std::shared_ptr<const Driver> driver_;
    std::shared_ptr<const Blas> blas_;
    Device device_ = 0;
    Context context_ = nullptr;
    int multiprocessors_ = 0;
    int max_pitch_ = 0;
    int greatest_priority_ = 0;
    unsigned wait_flags_ = wait_value_geq;
    std::vector<ComputeLane> compute_lanes_;
    // Tables of executors. Who lets go of one gives it back here: to free memory would wait for the whole device.
    struct Tables {
        std::mutex mutex;
        std::multimap<std::size_t, Address> unused;  // by bytes
        std::vector<Address> all;
    };
    std::shared_ptr<Tables> tables_ = std::make_shared<Tables>();
    // Bundles that were called, by which handle: shape and number, whether by steps, these, whether C was read.
    std::set<std::tuple<BlasHandle, ProductShape, std::int64_t, bool, std::array<std::int64_t, 3>, bool>> warm_bundles_;
    double least_operations_ = std::numeric_limits<double>::infinity();
    bool timing_ = false;
    std::size_t most_tuned_ = 0;
    std::map<ProductShape, Tuned> tuned_products_;
    std::vector<Stream> copy_streams_;
    std::vector<Event> events_, timing_events_, caller_events_, chain_events_;
    Stream chain_stream_ = nullptr, preceding_stream_ = nullptr;
    std::size_t num_marked_ = 0;  // of the caller's
    std::uint32_t *progress_ = nullptr;
    Address progress_device_ = 0;
    bool abandoned_ = false;
    std::unique_ptr<HostWorker> host_worker_;
    std::mutex issuing_;
    std::vector<const void *> in_flight_;
    std::size_t set_ = 0;
};

}  // namespace uncut::cuda
