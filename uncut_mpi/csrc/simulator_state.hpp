// The simulator; simulator_bodies.cpp says what each task is, simulator.cpp runs them.
#pragma once

#include <array>
#include <limits>
#include <vector>

#include "kept_waits.hpp"
#include "packing.hpp"
#include "shared_rates.hpp"
#include "simulator.hpp"
#include "timetable.hpp"

namespace uncut {

// Simulates one schedule after the other on a machine, which has to live as long. What memory it takes it keeps for the
// next one: to get it anew takes a quarter of a small simulation.
class Simulator {
  public:
    explicit Simulator(const SimulatedMachine &machine)
        : m_(machine),
          rates_(machine),
          devices_(static_cast<std::size_t>(machine.num_ranks)),
          engines_(static_cast<std::size_t>(machine.num_ranks * ways + 2)) {}  // of ranks, then the disk's two ways

    // Of a checked schedule; throws std::invalid_argument for ranks that the machine lacks or a type without a rate.
    void run(const ScheduleTables &tables, Simulated &result);

  private:
    static constexpr double infinity = std::numeric_limits<double>::infinity();
    static constexpr std::int32_t ways = 4;

    // A copy that moves bytes. Its rate was set at `since`.
    struct Flow {
        std::int32_t task = -1;
        std::int32_t of = 0;  // class of shared rates
        double left = 0, since = 0, rate = 0;
    };

    // A device's kernels, first come, first served: a later one gets what the earlier ones leave free. But sums go
    // before the blocks of products that have not begun.
    struct Device {
        struct Kernel {
            std::int32_t task;
            double left;        // seconds alone
            double demand;      // part of the device that it can keep busy
            double copy_share;  // part of it that copies within the device take while there are any
            bool is_product;    // else a sum, or a copy that transposes
            double sum_wait;
            double ready;         // of a sum: when blocks of the product behind which it came have ended
            std::int32_t behind;  // that product, or -1
            double rate = 0, finish = infinity;
        };
        std::vector<Kernel> kernels;
        int copies = 0;  // within the device, under way
        double now = 0;
        bool changed = false;
    };

    // What moves a device's copies one way: to other devices, from the host or to it; and a rank's worker. It serves
    // the lanes in turn, and what follows a copy on its lane, the news of its end included, has to wait for the lane's
    // next turn.
    struct Engine {
        struct Turn {
            std::int32_t task;
            bool over;  // its copy has been made
        };
        std::vector<Turn> waiting;  // those from `next` on
        std::size_t next = 0;
        bool busy = false;
    };

    struct Body {
        double amount = 0;   // copy: bytes; kernel: seconds alone
        double latency = 0;  // before a copy moves its first byte
        double demand = 1, copy_share = 0;
        bool is_product = false;
        double sum_wait = 0;             // of a product: until a sum beside it has multiprocessors
        std::int32_t of = -1;            // copy: class of shared rates
        std::int32_t local_device = -1;  // copy: the device that it does not leave
        std::int32_t engine = -1;        // copy: that serves it, if copies are served one after another
    };

    // All about one task: who needs some of it needs most of it soon.
    struct Task {
        Body body;
        double ready = 0;               // when all that it waited for so far is seen
        double before = 0, behind = 0;  // time of the lane for its waits and signals
        std::int32_t pending = 1;       // what it waits for; for being issued first
        std::int32_t next_on_lane = -1;
        std::int32_t first_after = 0;  // in after_, whose waiters end where the next task's begin
        std::int32_t rank = 0;
        bool is_kernel = false, of_host = false;  // on a lane of the host
        bool packed = false;                      // made with an earlier one
    };

    // Copies of a lane that one copy makes so far, and buffers that the last of them writes and reads.
    struct Serial {
        Series series;
        std::vector<std::size_t> others;  // tasks behind the first
        std::array<std::int32_t, 2> buffers{-1, -1};
    };

    // Products of a lane that one call makes so far, and from where to where they write: buffers follow one another.
    struct Bundled {
        std::size_t first = 0;
        std::vector<std::size_t> others;
        bool open = false;
        double operations = 0;
        std::int64_t begin = 0, end = 0;
    };

    // A rank's products: their time if each is alone, and what they take longer on a device that never rests.
    struct Multiplied {
        double alone_s = 0, longer_s = 0;
    };

    // What it takes to issue a task.
    struct Issue {
        double own = 0, extra = 0;  // for itself, and for records and signals that its waiters ask of it
        bool waits = false;
        std::uint64_t told = 0;  // whom it tells of its end: bit 0 its own rank, others by rank (modulo 63)
    };

    struct Event {
        double time;
        std::int32_t task;
        bool moves = false;  // a copy whose latency has passed
        bool operator>(const Event &other) const { return time != other.time ? time > other.time : task > other.task; }
    };

    void clear();

    // -- what each task is: simulator_bodies.cpp ---------------------------------------------

    void make_bodies();
    Body copy_body(const TaskRecord &task);
    Body net_body(const TaskRecord &sends, const TaskRecord &receives);
    Body gemm_body(const TaskRecord &task, std::int64_t count = 1);
    void bundle_products();
    void add_to_bundle(std::size_t task);
    void end_bundle(Bundled &bundled);
    bool same_call(const TaskRecord &one, const TaskRecord &other) const;
    Body combine_body(const TaskRecord &task) const;
    Body transposing_body(const TaskRecord &task) const;
    void pack_copies();
    void add_to_series(std::size_t task);
    void end_series(Serial &serial);
    bool are_beside(std::int32_t one, std::int32_t other) const;  // parts of a matrix in one memory
    // Of one that reads and writes so many bytes.
    double kernel_s(double bytes, double rate) const { return bytes > 0 ? bytes / rate + m_.combine_start_s : 0; }
    bool is_aligned(const RegionRecord &region) const;
    bool is_aligned(const TaskRecord &task) const;

    std::size_t link_of(int source, int destination) const {
        return static_cast<std::size_t>(source) * m_.num_ends + destination;
    }
    const OperandRecord &operand(const TaskRecord &task, std::size_t which) const {
        return t_.operands[task.first_operand + which];
    }

    // -- who waits for whom, and the run -----------------------------------------------------

    void link_tasks();
    void count_waits();
    void issue();
    void satisfy(std::int32_t task, double time);
    void start_at(const Event &event);
    void touch(std::size_t device);
    void begin(std::int32_t task, double now);
    void send(std::int32_t task, double now);
    void move(std::int32_t task, double now);
    // Whether one awaits the other by an event.
    static bool is_local(const Task &before, const Task &after) {
        return before.rank == after.rank && !before.of_host && !after.of_host;
    }
    double local_latency(const Task &before, const Task &after) const;
    void end(std::int32_t task, double now);
    static void advance(Device &device, double now);
    void count_copy(std::int32_t location, int change, double now);
    void finish_flow(std::int32_t id, double now);
    void serve(Engine &engine, double now);
    void finish_kernels(std::size_t number, double now);
    void share_out(Device &device, std::size_t number);
    void set_rate(std::int32_t id, double rate, double now);

    ScheduleTables t_;
    const SimulatedMachine &m_;
    SharedRates rates_;

    std::vector<Flow> flows_;
    std::vector<std::int32_t> free_flows_;
    std::vector<Device> devices_;
    std::vector<Engine> engines_;

    std::vector<Task> tasks_;  // and one more behind the last
    std::vector<Multiplied> multiplied_;
    std::vector<std::int32_t> after_, last_on_lane_;
    std::vector<Issue> issues_;
    std::vector<Pack> packs_;  // by lane
    std::vector<Serial> series_;
    std::vector<Bundled> bundles_;
    std::vector<std::uint8_t> awaits_flags_;  // by rank
    KeptWaits kept_;
    std::vector<double> clock_;

    std::vector<Event> starts_;  // a heap, the first one on top
    Timetable due_;              // of devices, then of flows
    std::vector<std::size_t> touched_;
    std::vector<std::int32_t> done_;
    std::size_t finished_ = 0;
    double *start_ = nullptr, *end_ = nullptr;  // of the result
};

}  // namespace uncut
