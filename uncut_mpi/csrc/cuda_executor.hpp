// The CUDA executor: one rank's operation list, bound to addresses, issued eagerly in list order.
//
// Protocol of a run. Every operation is issued at its place in the list, each to its lane's stream; nothing is created
// or allocated on the device. Flag waits go out in one batch, a progress word (2i+1 for the wait that is operation i)
// written before each, so that a stall can be explained. A lane without waits writes one (2i+2 after operation i) now
// and then. If a call fails, the first error is kept and the abort word set. From there, and once another rank has set
// it, only SIGNALs are issued, so that no peer waits for ever. Then all lanes are polled until they are empty, an error
// shows, or nothing has moved on any rank for the time allowed.
//
// Lanes of the host are the device's worker's: it has their lists from the start of a run, and the run is over when it
// is done too.
//
// A traced run records an event before and after each body, on its lane, and reads them when all
// lanes are empty. It is another instance of the issuing loop: a run that is not traced does not
// even ask.
#pragma once

#include <array>
#include <chrono>
#include <complex>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_device.hpp"
#include "cuda_products.hpp"
#include "packing.hpp"
#include "records.hpp"

namespace uncut::cuda {

using Operation = OperationRecord;
using Operand = BoundOperandRecord;

// The one argument of every COMBINE kernel; its text in device/cuda/kernels.py declares the same.
struct CombineArguments {
    Address destination;
    std::int64_t ld, rows, cols;
    Address source[max_summands];
    std::int64_t source_ld[max_summands];
    double factor[max_summands], imaginary[max_summands];  // parts of the factors; of real types the latter are 0
    std::int64_t ending, diagonal;                         // OpCode of what is written; all of it: op_n
    // Of an epilogue: its vectors from the first row, or column, on; 0 for one that there is not. Its function. Which
    // source is beta C; if none is, the number behind the last.
    Address scale, bias;
    std::int64_t activation, kept;
};
static_assert(sizeof(CombineArguments) == 336);

// Signatures tell kernels apart. That of a COMBINE has 4 bits for the written type, then 4 bits (code + 1) per source.
// That of a COPY that transposes on a device has this, and the bytes of an element. It takes the arguments of a COMBINE
// of one source, without factor.
inline constexpr std::uint64_t transposing = std::uint64_t{1} << (4 * (max_summands + 1));

// The kernel of packed copies: its destination is a table of `PackedCopy`, as many as it has rows.
inline constexpr std::uint64_t packing = 2 * transposing;

// That of a COMBINE with an epilogue has this besides.
inline constexpr std::uint64_t with_epilogue = 4 * transposing;

// That of `FormHelper::solve` has this, and the type.
inline constexpr std::uint64_t solving = 8 * transposing;

// For products of a compute lane. It solves with a triangle of a few rows (`block_of`), in place, by a kernel of ours.
// The library's takes 8 us for 32 rows one after another, on an H200 3 ms of the 5 that 4096 rows by 8192 columns take.
// Its arguments are those of a COMBINE: B in place, as many `rows` as the triangle has, the other extent as `cols`; A
// is the source, alpha its factor.
class LaneHelper : public FormHelper {
  public:
    LaneHelper(const Driver &driver, Function function, Stream stream, Address memory, std::int64_t bytes)
        : driver_(driver), function_(function), stream_(stream), memory_(memory), bytes_(bytes) {}
    Called solve(const ProductShape &shape, int form, bool right, const void *alpha, Address a,
                 Address b) const override;
    Address memory() const override { return memory_; }
    std::int64_t memory_bytes() const override { return bytes_; }
    Called copy(Address from, std::int64_t pitch, std::int64_t width, std::int64_t lines) const override;

  private:
    const Driver &driver_;
    Function function_;
    Stream stream_;
    Address memory_;
    std::int64_t bytes_;
};

// What an executor is built from; the tables live only during construction.
struct Program {
    std::span<const Operation> operations;
    std::span<const Operand> operands;
    std::span<const std::int64_t> addresses;  // per buffer
    std::span<const std::uint8_t> in_host;    // per buffer: 1 for host memory
    std::span<const LaneRecord> lanes;
    std::size_t num_events;
    std::uint32_t span;  // how far a run takes the epoch
    Address own_flags;   // before them a word of each rank, which writes the epoch behind a run that another may follow
    std::span<const std::int64_t> peer_flags;  // per rank
    std::uint32_t *host_flags;                 // a row of max_lanes words per rank, where lanes of the host are
    std::uint32_t *board;                      // num_ranks rows of max_lanes words and the abort word, host memory
    std::size_t rank;
    std::function<Address(std::uint64_t)> kernel;  // signature → function handle, of a kernel that has run before
    std::vector<HostFile> files;                   // whose bytes some addresses stand for
    bool same_sums = false;                        // whether each product is a call of its own, by the library's choice
    std::array<Address, 2> vectors{};              // of an epilogue: its scale and its bias
    std::int64_t activation = no_activation;       // and its function
};

// With what lanes of the host have done.
struct RunResult : HostWorker::Result {
    double issue_s = 0.0;
    double drain_s = 0.0;
    std::string error;   // empty if every call succeeded
    bool fatal = false;  // no flag could be written any more: the context is unusable, or the run never began
    bool stalled = false;
    // Of a traced run; after an error, a stall or an abort incomplete, of other runs empty.
    std::vector<double> times_s;  // start and end of each body of a stream, in list order, on the monotonic clock
};

// What an operation list has become, once for all runs: steps and what each needs, bound to streams and addresses.
class Executor {
  public:
    Executor(std::shared_ptr<DeviceState> device, const Program &program);

    // Make the events of a traced run; nothing may be in flight.
    void prepare_trace();

  private:
    friend class Run;

    struct Step {
        std::uint8_t code;
        std::uint8_t weight;  // as how many outstanding steps it counts
        std::int32_t lane;
        std::uint32_t operation;  // index in the list; of a batch, its first
        std::uint32_t payload;    // index in the vector of its kind, or event, or slot
    };
    struct Copy {
        Memcpy2D shape;
        std::size_t bytes;
        bool contiguous;
        bool packed = false;       // made with an earlier one
        std::int32_t series = -1;  // of which it is the first
    };
    // Copies that one kernel makes, where they read and write.
    struct PackedCopies {
        Pack pack;
        std::vector<PackedCopy> all;
        std::uint32_t first_payload = 0;
    };
    struct Gemm {
        ProductShape shape;
        Address a, b, c;
        std::uint8_t factor_product, factor_c;
        bool tunable;
        std::shared_ptr<const TunedProduct> tuned;    // null: by cuBLAS's own choice
        std::uint32_t scale;                          // index of the COMBINE that replaces it when the product is zero
        bool bundled = false;                         // made with an earlier one
        std::int32_t bundle = -1;                     // of which it is the first
        std::uint32_t first_part = 0, num_parts = 0;  // of one of copies
        Function solver = nullptr;                    // the kernel of an inverse
        int form = no_form;                           // of A, or of B
        bool right = false;                           // of B
        std::int32_t copy = -1;                       // the COMBINE that brings to C what an inverse is multiplied by
        Address memory = 0;                           // for copies of what a triangular matrix is multiplied by
        Address bias = 0;                             // of its epilogue
    };
    // Of a product for which the library gets copies of A and B, or which is summed beside C: as much as there is
    // memory for.
    struct Part {
        ProductShape shape;
        Address a, b, c;
        std::shared_ptr<const TunedProduct> tuned;  // as of a GEMM
        std::int32_t copy_a, copy_b;                // indices of the COMBINEs that make them; -1: it is there
        std::size_t cleared_words;                  // from A's copy on, ahead: k is padded with zeros
        std::int32_t combine = -1;                  // the COMBINE that writes C, of which this is a sum
        static constexpr Address bias = 0;
    };
    struct Combine {
        CombineArguments arguments;
        std::uint8_t factors[max_summands];
        std::size_t num_sources;  // with a factor
        std::size_t copy_bytes;   // of a COPY that transposes; else 0
        Function function;
        unsigned grid_x, grid_y, block_x, block_y;
    };
    struct Signal {
        Address address;
        std::uint32_t value;  // after the epoch
    };
    struct Batch {
        std::uint32_t first, count;  // in mem_ops_
    };
    struct Checkpoint {
        std::uint32_t operation;  // whose wait, or after which a progress word is written
        std::int64_t issued;      // weight of the lane's steps that precede it
    };
    // Of one that only copies there is the stream alone, and of one of the host none.
    struct Lane : DeviceState::ComputeLane {
        std::int64_t weight = 0;  // of its steps
        std::vector<Checkpoint> checkpoints;
        PackedCopies packed;  // those that the next copy may join
        Series series;
        std::vector<std::size_t> others;       // of the series, behind the first
        std::array<Address, 2> allocations{};  // that it writes and reads
        std::vector<std::uint32_t> bundle;     // products that the next one may join
        double bundled_operations = 0;
        std::map<Address, Address> bundled_c;  // where each of them writes, and where that ends
    };

    void bind_lanes(const Program &program);
    void bind_ends(const Program &program);
    void add_host_step(const Program &program, const Operation &operation, std::uint32_t index);
    static std::uint32_t *host_flag(const Program &program, const Operation &operation);
    Address flag_of(const Program &program, const Operation &operation) const;
    static Copy copy_of(const Program &program, const Operation &operation);
    void add_copy(const Program &program, const Operation &operation);
    void pack(const Program &program, const Operation &operation);
    void end_pack(const Program &program, Lane &lane);
    void add_to_series(Lane &lane, const PackedCopy &one, const Operand *ends);
    void end_series(Lane &lane);
    Address allocation_of(std::int32_t buffer, Address within);
    void upload_packs();
    void add_gemm(const Program &program, const Operation &operation);
    void add_narrow_gemm(const Program &program, const Operation &operation, Gemm &gemm);
    void add_sums(const Program &program, const Operation &operation, Gemm &gemm);
    void add_epilogue(const Program &program, const Operation &operation, Gemm &gemm);
    bool add_parts(const Program &program, const Operation &operation, Gemm &gemm, bool turned);
    std::shared_ptr<const TunedProduct> proposal(const ProductShape &shape, const Lane &lane);
    std::int32_t add_copy_of(const Program &program, Operand from, Address source, Address to, int dtype,
                             std::int64_t ld, bool turns);
    bool may_join(const Lane &lane, const Gemm &gemm) const;
    void add_to_bundle(Lane &lane);
    void end_bundle(Lane &lane);
    void upload_bundles();
    void tune_products();
    void add_combine(const Program &program, const Operation &operation);
    void add_transposition(const Program &program, const Operation &operation);
    Combine make_combine(const Program &program, const Operand *operands, std::size_t count);
    Combine make_transposition(const Program &program, const Operand &from, Address source, Address to,
                               std::int64_t ld);
    void set_grid(Combine &combine, std::int64_t rows, std::int64_t columns) const;
    Function kernel_of(const Program &program, std::uint64_t signature);
    void add_wait(const Program &program, const Operation &operation, std::uint32_t index);
    void add_step(const Operation &operation, std::uint32_t index, std::uint32_t payload);
    std::uint8_t weight_of(const Operation &operation, std::uint32_t payload) const;
    void add_checkpoint_if_due(const Operation &operation, std::uint32_t index);

    std::shared_ptr<DeviceState> device_;
    std::vector<Lane> lanes_;
    std::vector<HostLane> host_lanes_;
    std::vector<HostFile> files_;
    std::vector<Step> steps_;
    std::vector<Copy> copies_;
    std::vector<Memcpy3D> series_;
    std::vector<Gemm> gemms_;
    std::vector<Part> parts_;
    std::map<ProductShape, std::shared_ptr<const TunedProduct>> proposed_;  // of float8; null: nothing
    std::vector<Bundle> bundles_;
    std::vector<Address> pointers_;  // tables of bundles, as they stand in the device's memory
    std::vector<Combine> combines_;
    std::vector<Signal> signals_;
    std::vector<MemOp> mem_ops_;          // values of waits are those of the latest run
    std::vector<std::uint32_t> awaited_;  // value after the epoch of each of them that is a wait
    std::vector<Batch> batches_;
    std::unordered_map<std::int32_t, Address> allocations_;  // by buffer
    std::unordered_map<std::uint64_t, Function> kernels_;    // by signature
    std::vector<PackedCopy> packed_;                         // as they stand in the device's memory
    std::vector<std::uint32_t> packs_;
    std::shared_ptr<void> table_, pointer_table_;
    std::uint32_t *board_;
    std::size_t board_words_, rank_;
    std::size_t num_bodies_ = 0;
    std::vector<MemOp> told_, awaited_ends_;  // that a run has ended: to this device's host and to peers, and by them
    std::uint32_t span_ = 0;
};

// How a run is issued beside others (`Chain` of device/interface.py): the next one may be issued behind it, and it
// behind the one before.
inline constexpr int alone = 0, next_of_chain = 2;

// One run of a list. The device has one run in flight, whose progress words, streams and events are the device's. Two
// may be chained: once all of the first one is issued, the second is issued behind it. On the device it waits for
// the end of the first one, on all ranks, so it finds memory and flags as if it had begun then. In the order of all
// tasks a run's end comes before the run that follows.
// Every call is made without the interpreter lock. What cannot begin is over, with its error in the result; later calls
// raise for misuse alone (another thread is in a run).
class Run {
  public:
    // Issue what can be issued without waiting.
    Run(std::shared_ptr<Executor> executor, std::complex<double> alpha, std::complex<double> beta, std::uint32_t epoch,
        double timeout_s, bool traced, int chain = alone);
    ~Run();
    Run(const Run &) = delete;
    Run &operator=(const Run &) = delete;

    // Get on for so long, or without waiting, for about 100 us; whether the run is over.
    bool poll(double spin_s = 0.0);
    // Whether another chained run may be issued behind it.
    bool may_be_followed() const {
        return chained_ && tail_issued_ && !result_.fatal && !result_.stalled && !executor_->host_lanes_.size();
    }
    // Let what these streams get from now on wait for the end of the run on all ranks; it may be followed, and is over
    // no sooner.
    void precede(const std::vector<Address> &streams);
    // Wait until the run is over.
    const RunResult &finish();

  private:
    using Clock = std::chrono::steady_clock;
    using Step = Executor::Step;

    struct Lane {
        std::int64_t issued = 0, completed = 0;  // weight of the steps
        std::size_t next_checkpoint = 0;
        // Steps that count only in this run, and checkpoints since the first of them, with all that was issued.
        std::int64_t more = 0;
        std::vector<Executor::Checkpoint> more_checkpoints;
        std::size_t next_more = 0;
    };

    void begin();
    void forget();
    std::unique_lock<std::mutex> hold(bool beginning = false) const;
    Stream joint() const;  // which follows all lanes, or goes before them
    bool is_joined() const;
    void follow();
    void end_lanes();
    void await_ends(std::vector<MemOp> &ends, std::uint32_t epoch, Stream stream);
    void advance(std::size_t most_steps);
    template <bool traced>
    void issue_steps(std::size_t most_steps);
    Stream stream_of(const Step &step) const { return executor_->lanes_[step.lane].stream; }
    void issue(const Step &step);
    void issue_copy(const Step &step);
    void issue_gemm(const Step &step);
    void issue_parts(const Executor::Gemm &gemm, const Step &step);
    void multiply(const Executor::Lane &lane, const auto &g, const void *alpha, const void *beta, const Step &step);
    const void *factor(int dtype, std::uint8_t number) const;
    void launch(const Executor::Combine &combine, const Step &step);
    void issue_batch(const Step &step);
    void count_more(const Step &step);
    void signal(const Step &step);
    bool may_issue();  // whether so little is outstanding that more may be issued
    bool drain();      // whether all lanes are empty
    bool has_ended();  // of a chained run: whether its word says so
    void mark_reference();
    void take_time(const Step &step, std::size_t number);
    void read_times();
    void see_progress(std::size_t number);  // what a lane has completed, by its word
    bool is_empty(std::size_t number);      // whether a lane is, by its word or else by its stream
    bool moved();                           // mirror our words, look at everyone's: has anything changed in time?
    void mirror();
    std::uint64_t *abort_word() const {
        return reinterpret_cast<std::uint64_t *>(executor_->board_ + executor_->board_words_);
    }
    void fail(const char *call, Code code, const Step *step = nullptr, bool blas = false);
    void end();
    void stop_worker();

    std::shared_ptr<Executor> executor_;
    DeviceState &device_;
    RunResult result_;
    const bool traced_, chained_, follows_;
    const std::uint32_t epoch_;
    const std::uint64_t call_;  // its value in the abort word
    // cuBLAS reads a complex factor as one of its own types, which lie at multiples of their size.
    alignas(16) const std::array<std::complex<double>, 4> factors_;
    alignas(8) const std::array<std::complex<float>, 4> factors_f32_;
    const std::array<std::int32_t, 4> factors_i32_;
    const std::int64_t most_outstanding_;
    const std::chrono::duration<double> timeout_;  // which may be longer than the clock counts
    const Clock::time_point began_;
    Clock::time_point issued_, last_look_, last_move_, reference_;
    std::vector<Lane> lanes_;
    std::size_t next_step_ = 0, next_event_ = 1;  // the first event is the reference
    std::int64_t outstanding_ = 0;
    bool full_ = false, signals_only_ = false;
    std::size_t next_lane_ = 0;  // those before it are empty
    std::vector<std::uint32_t> seen_;
    bool begun_ = false, over_ = false, tail_issued_ = false, preceding_ = false;
    std::size_t set_ = 0;  // of the words
};

}  // namespace uncut::cuda
