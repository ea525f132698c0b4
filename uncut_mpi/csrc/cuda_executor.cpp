// Runs what cuda_executor_build.cpp has made of an operation list.
#include "cuda_executor.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <utility>

namespace uncut::cuda {
namespace {

// A hardware queue holds 1,020 entries (measured on H200, whatever the operation) and issuing into a
// full one blocks inside the driver, where no deadline can be kept. Issuing therefore pauses and polls while more steps
// than this are outstanding on all lanes together; every issued step finishes without us (premise P2).
constexpr std::int64_t max_outstanding = 768;
// The same where each body brings two events with it.
constexpr std::int64_t max_outstanding_traced = max_outstanding / 3;
constexpr std::chrono::microseconds look_interval{1000};
constexpr std::size_t steps_per_poll = 32;  // a product takes 8 us to issue, the others 1 us
constexpr int polls_per_yield = 16;
constexpr std::int64_t more_per_checkpoint = 64;

// Words that devices or other processes write, or look at, meanwhile.
template <class Word>
Word seen(Word &word) {
    return std::atomic_ref(word).load(std::memory_order_acquire);
}
void show(std::uint32_t &word, std::uint32_t value) { std::atomic_ref(word).store(value, std::memory_order_release); }

}  // namespace

void Executor::prepare_trace() { device_->reserve_timing(1 + 2 * num_bodies_); }

Run::Run(std::shared_ptr<Executor> executor, std::complex<double> alpha, std::complex<double> beta, std::uint32_t epoch,
         double timeout_s, bool traced, int chain)
    : executor_(std::move(executor)),
      device_(*executor_->device_),
      traced_(traced),
      chained_(chain != alone),
      follows_(chain == next_of_chain),
      epoch_(epoch),
      call_(std::uint64_t{epoch} + 1),
      factors_{0.0, 1.0, alpha, beta},
      factors_f32_{0.0F, 1.0F, std::complex<float>(alpha), std::complex<float>(beta)},
      factors_i32_{0, 1, static_cast<std::int32_t>(std::lround(alpha.real())),
                   static_cast<std::int32_t>(std::lround(beta.real()))},
      most_outstanding_(traced ? max_outstanding_traced : max_outstanding),
      timeout_(timeout_s),
      began_(Clock::now()),
      issued_(began_),
      last_look_(began_),
      last_move_(began_),
      lanes_(executor_->lanes_.size()) {
    try {
        begin();
    } catch (const std::exception &error) {
        // The others must not wait for flags that this rank will not write.
        result_.error = error.what();
        result_.fatal = true;
        tell_others(abort_word(), call_, true);
        forget();
        over_ = true;
    }
}

void Run::begin() {
    const auto held = hold(true);
    if (device_.abandoned())
        throw Failure("an earlier run on this device backend stalled or lost its context; the job has to end");
    if (traced_ && device_.num_timing_events() < 1 + 2 * executor_->num_bodies_)
        throw Failure("a run was to be traced for which no events were made: prepare the trace first");
    // No lane of a run with these words is busy, so the host may write them.
    set_ = device_.next_set();
    std::memset(device_.progress(set_), 0, max_lanes * sizeof(std::uint32_t));
    *device_.end_word(set_) = epoch_;
    std::uint32_t *row = executor_->board_ + executor_->rank_ * max_lanes;
    for (std::size_t l = 0; l < max_lanes && !follows_; ++l)  // of lanes that an earlier list had, too
        if (seen(row[l]) != 0) show(row[l], 0);
    const DeviceState::Scope scope(device_);
    scope.check();
    device_.in_flight().push_back(this);
    begun_ = true;
    if (!executor_->host_lanes_.empty())
        device_.host_worker().start(
            {&executor_->host_lanes_, epoch_, abort_word(), call_, device_.progress(set_), traced_});
    if (follows_) follow();
    if (traced_) mark_reference();
    advance(executor_->steps_.size());
}

Run::~Run() { forget(); }

void Run::forget() {
    if (over_ || !begun_) return;
    const std::lock_guard held(device_.issuing());
    std::erase(device_.in_flight(), this);
    // Its work may go on for ever, and its peers wait.
    stop_worker();
    device_.abandon();
}

// Premise P1, and one run at a time, or one behind another.
std::unique_lock<std::mutex> Run::hold(bool beginning) const {
    std::unique_lock<std::mutex> held(device_.issuing(), std::try_to_lock);
    const auto may = [&, &others = device_.in_flight()] {
        if (!beginning) return std::ranges::find(others, this) != others.end();
        return others.empty() ||
               (follows_ && others.size() == 1 && static_cast<const Run *>(others.front())->may_be_followed());
    };
    if (!held.owns_lock() || !may())
        throw Failure(
            "two threads run operation lists on one device backend at once, or one began a run before its last one "
            "had ended; give each thread its own session");
    return held;
}

bool Run::poll(double spin_s) {
    if (!over_) {
        const auto held = hold();
        const DeviceState::Scope scope(device_);
        const auto until = Clock::now() + std::chrono::duration<double>(spin_s);
        for (advance(steps_per_poll); !over_ && Clock::now() < until; advance(steps_per_poll))
            sched_yield();
    }
    return over_;
}

bool Run::is_joined() const { return executor_->lanes_.size() == 1 && executor_->lanes_.front().stream != nullptr; }

Stream Run::joint() const { return is_joined() ? executor_->lanes_.front().stream : device_.chain_stream(); }

// Let no lane begin before the run before has ended on all ranks.
void Run::follow() {
    const Driver &d = device_.driver();
    const Stream before = static_cast<const Run *>(device_.in_flight().front())->joint();
    if (before != joint()) {
        fail("cuEventRecord", d.cuEventRecord(device_.chain_event(0), before));
        fail("cuStreamWaitEvent", d.cuStreamWaitEvent(joint(), device_.chain_event(0), 0));
    }
    await_ends(executor_->awaited_ends_, epoch_, joint());
    if (is_joined()) return;
    fail("cuEventRecord", d.cuEventRecord(device_.chain_event(0), joint()));
    for (const Executor::Lane &lane : executor_->lanes_)
        if (lane.stream != nullptr)
            fail("cuStreamWaitEvent", d.cuStreamWaitEvent(lane.stream, device_.chain_event(0), 0));
}

// Let a stream wait until what takes the epoch so far has ended.
void Run::await_ends(std::vector<MemOp> &ends, std::uint32_t epoch, Stream stream) {
    if (ends.empty()) return;
    for (MemOp &end : ends)
        end.value.value = epoch;
    fail("cuStreamBatchMemOp",
         device_.driver().cuStreamBatchMemOp(stream, static_cast<unsigned>(ends.size()), ends.data(), 0));
}

// By an event: a stream of the caller's may come to wait long after the words have served other runs, or are no more.
void Run::precede(const std::vector<Address> &streams) {
    if (std::exchange(over_, false)) device_.in_flight().push_back(this);  // it is over when others are too
    const auto held = hold();
    const DeviceState::Scope scope(device_);
    const Driver &d = device_.driver();
    const Event event = device_.chain_event(1 + set_);
    preceding_ = true;
    // On a stream of their own: behind the lanes there may be a run that follows.
    std::vector<MemOp> ends = executor_->awaited_ends_;
    ends.emplace_back();
    ends.back().value.operation = mem_op_wait_value_32;
    ends.back().value.address = device_.end_address(set_);
    ends.back().value.flags = device_.wait_flags();
    await_ends(ends, epoch_ + executor_->span_, device_.preceding_stream());
    fail("cuEventRecord", d.cuEventRecord(event, device_.preceding_stream()));
    for (const Address stream : streams)  // whose errors are the caller's, and no rank's product fails by them
        d.check("cuStreamWaitEvent", d.cuStreamWaitEvent(reinterpret_cast<Stream>(stream), event, 0));
}

// Say behind all lanes that this run has ended here, after an error too.
void Run::end_lanes() {
    const Driver &d = device_.driver();
    for (std::size_t l = 0; l < executor_->lanes_.size() && !is_joined(); ++l) {
        const Stream stream = executor_->lanes_[l].stream;
        if (stream == nullptr) continue;
        fail("cuEventRecord", d.cuEventRecord(device_.chain_event(3 + l), stream));
        fail("cuStreamWaitEvent", d.cuStreamWaitEvent(joint(), device_.chain_event(3 + l), 0));
    }
    std::vector<MemOp> &told = executor_->told_;
    for (MemOp &end : told)
        end.value.value = epoch_ + executor_->span_;
    told.back().value.address = device_.end_address(set_);
    fail("cuStreamBatchMemOp", d.cuStreamBatchMemOp(joint(), static_cast<unsigned>(told.size()), told.data(), 0));
    tail_issued_ = true;
}

const RunResult &Run::finish() {
    if (!over_) {
        const auto held = hold();
        const DeviceState::Scope scope(device_);
        for (int polls = 0; !over_; advance(executor_->steps_.size()))
            if (++polls % polls_per_yield == 0) sched_yield();
    }
    return result_;
}

void Run::advance(std::size_t most_steps) {
    const std::size_t all = executor_->steps_.size();
    const std::uint64_t failed = seen(*abort_word());
    // Of this call, or of the one before, which this one may follow.
    const auto since = static_cast<std::int32_t>(static_cast<std::uint32_t>(call_ - failed));
    if ((failed & context_lost) != 0 && since >= 0) {
        // That rank writes no flags, so what waits for them here waits for ever.
        result_.aborted = true;
        device_.abandon();
        return end();
    }
    signals_only_ = signals_only_ || failed == call_;
    if (next_step_ < all && (!full_ || may_issue())) {
        traced_ ? issue_steps<true>(most_steps) : issue_steps<false>(most_steps);
        if (next_step_ == all) issued_ = Clock::now();
    }
    if (chained_ && next_step_ == all && !tail_issued_ && !result_.fatal) end_lanes();
    if (result_.fatal || result_.stalled || (next_step_ == all && drain())) end();
}

void Run::end() {
    if (next_step_ < executor_->steps_.size()) issued_ = Clock::now();
    stop_worker();
    result_.aborted = result_.aborted && result_.error.empty();
    mirror();
    const auto ended = Clock::now();
    result_.issue_s = std::chrono::duration<double>(issued_ - began_).count();
    result_.drain_s = std::chrono::duration<double>(ended - issued_).count();
    if (traced_ && !result_.aborted) read_times();
    if (result_.stalled || result_.fatal) device_.abandon();
    std::erase(device_.in_flight(), this);
    over_ = true;
}

// It is done, or the run ends without that; then it touches nothing any more.
void Run::stop_worker() {
    if (executor_->host_lanes_.empty()) return;
    HostWorker::Result done = device_.host_worker().stop();
    if (!result_.error.empty()) done.file_error = 0;  // the first error counts
    result_.add(done);
    if (done.file_error != 0) result_.error = "its file";  // what there is to say of that, files' owner knows
}

template <bool traced>
void Run::issue_steps(std::size_t most_steps) {
    const std::vector<Step> &steps = executor_->steps_;
    for (const std::size_t stop = std::min(steps.size(), next_step_ + most_steps); next_step_ < stop && !full_;) {
        const Step &step = steps[next_step_++];
        // After an error only signals go out (poison): no peer may wait for ever.
        if (signals_only_ && step.code != code_signal) {
            result_.aborted = result_.aborted || step.code <= code_combine;
            continue;
        }
        const bool timed = traced && step.code <= code_combine;
        if (timed) take_time(step, next_event_++);
        issue(step);
        if (timed) take_time(step, next_event_++);
        if (timed && step.weight == 0) count_more(step);
        if (result_.fatal) return;
        lanes_[step.lane].issued += step.weight;
        outstanding_ += step.weight;
        full_ = outstanding_ > most_outstanding_;
    }
}

void Run::take_time(const Step &step, std::size_t number) {
    fail("cuEventRecord", device_.driver().cuEventRecord(device_.timing_event(number), stream_of(step)), &step);
}

// One event of this device and the moment it passed, by which the clocks of all devices are compared.
void Run::mark_reference() {
    const auto has_stream = [](const Executor::Lane &lane) { return lane.stream != nullptr; };
    const auto lane = std::find_if(executor_->lanes_.begin(), executor_->lanes_.end(), has_stream);
    if (lane == executor_->lanes_.end()) return;
    const Driver &d = device_.driver();
    const Stream stream = lane->stream;
    for (int attempt = 0; attempt < 2; ++attempt) {  // the first may find the device asleep
        const auto before = Clock::now();
        fail("cuEventRecord", d.cuEventRecord(device_.timing_event(0), stream));
        fail("cuStreamSynchronize", d.cuStreamSynchronize(stream));
        reference_ = before + (Clock::now() - before) / 2;
    }
}

void Run::read_times() {
    const Driver &d = device_.driver();
    const double reference_s = std::chrono::duration<double>(reference_.time_since_epoch()).count();
    for (std::size_t i = 1; i <= 2 * executor_->num_bodies_ && result_.error.empty() && !result_.stalled; ++i) {
        float milliseconds = 0.0F;
        fail("cuEventElapsedTime",
             d.cuEventElapsedTime(&milliseconds, device_.timing_event(0), device_.timing_event(i)));
        result_.times_s.push_back(reference_s + 1e-3 * static_cast<double>(milliseconds));
    }
}

void Run::issue(const Step &step) {
    const Driver &d = device_.driver();
    switch (step.code) {
        case code_copy: issue_copy(step); break;
        case code_gemm: issue_gemm(step); break;
        case code_combine: launch(executor_->combines_[step.payload], step); break;
        case code_wait_flag: issue_batch(step); break;
        case code_wait_event:
            fail("cuStreamWaitEvent", d.cuStreamWaitEvent(stream_of(step), device_.event(step.payload), 0), &step);
            break;
        case code_record:
            fail("cuEventRecord", d.cuEventRecord(device_.event(step.payload), stream_of(step)), &step);
            break;
        default: signal(step); break;
    }
    if (step.code <= code_combine && result_.error.empty()) ++result_.tasks;
}

void Run::issue_copy(const Step &step) {
    const Executor::Copy &copy = executor_->copies_[step.payload];
    if (copy.bytes == 0) return;
    const Driver &d = device_.driver();
    if (copy.packed) {
        // What makes it stands before it.
    } else if (copy.series >= 0) {
        fail("cuMemcpy3DAsync",
             d.cuMemcpy3DAsync(&executor_->series_[static_cast<std::size_t>(copy.series)], stream_of(step)), &step);
    } else if (copy.contiguous)
        fail("cuMemcpyAsync",
             d.cuMemcpyAsync(copy.shape.dst_device, copy.shape.src_device, copy.bytes, stream_of(step)), &step);
    else
        fail("cuMemcpy2DAsync", d.cuMemcpy2DAsync(&copy.shape, stream_of(step)), &step);
    if (result_.error.empty()) result_.copy_bytes += static_cast<std::int64_t>(copy.bytes);
}

void Run::issue_gemm(const Step &step) {
    const Executor::Gemm &g = executor_->gemms_[step.payload];
    if (g.shape.m == 0 || g.shape.n == 0) return;
    if (g.shape.k == 0 || factors_[g.factor_product] == 0.0) {
        // C alone: A and B are not read, whatever the library does with a factor of 0.
        if (factors_[g.factor_c] == 1.0 && g.shape.epilogue == 0) return;
        launch(executor_->combines_[g.scale], step);
        if (g.bundled) count_more(step);
        return;
    }
    if (g.bundled) return;  // what makes it stands before it
    if (g.num_parts > 0) return issue_parts(g, step);
    const Executor::Lane &lane = executor_->lanes_[step.lane];
    const void *alpha = factor(g.shape.dtype, g.factor_product), *beta = factor(g.shape.dtype, g.factor_c);
    if (g.form != no_form) {
        if (g.copy >= 0) launch(executor_->combines_[static_cast<std::size_t>(g.copy)], step);
        const std::size_t bytes = g.memory == 0 ? 0 : device_.copies_bytes;
        const LaneHelper helper(device_.driver(), g.solver, lane.stream, g.memory, static_cast<std::int64_t>(bytes));
        const Called called =
            product_of_form(device_.blas(), lane.handle, helper, g.shape, g.form, g.right, alpha, g.a, g.b, beta, g.c);
        fail(called.name, called.code, &step, called.blas);
    } else if (g.bundle >= 0) {
        const Bundle &bundle = executor_->bundles_[g.bundle];
        const Called called = bundled_product(device_.blas(), lane.handle, g.shape, alpha, beta, bundle);
        fail(called.name, called.code, &step, true);
        if (traced_ || !result_.error.empty()) return;
        next_step_ += bundle.behind;  // to look at each takes as long as a small product
        result_.tasks += bundle.behind;
    } else {
        multiply(lane, g, alpha, beta, step);
    }
}

// A GEMM, or a part of one.
void Run::multiply(const Executor::Lane &lane, const auto &g, const void *alpha, const void *beta, const Step &step) {
    if (g.tuned != nullptr) {
        fail("cublasLtMatmul",
             g.tuned->run(lane.handle, static_cast<const float *>(alpha), g.a, g.b, static_cast<const float *>(beta),
                          g.c, g.bias, lane.workspace, lane.stream),
             &step, true);
    } else {
        const Called usual = usual_product(device_.blas(), lane.handle, g.shape, alpha, g.a, g.b, beta, g.c);
        fail(usual.name, usual.code, &step, true);
    }
}

Called LaneHelper::copy(Address from, std::int64_t pitch, std::int64_t width, std::int64_t lines) const {
    Memcpy2D shape{};
    shape.src_memory_type = shape.dst_memory_type = memory_type_device;
    shape.src_device = from;
    shape.src_pitch = static_cast<std::size_t>(pitch);
    shape.dst_device = memory_;
    shape.dst_pitch = shape.width_bytes = static_cast<std::size_t>(width);
    shape.height = static_cast<std::size_t>(lines);
    return {"cuMemcpy2DAsync", driver_.cuMemcpy2DAsync(&shape, stream_), false};
}

Called LaneHelper::solve(const ProductShape &shape, int form, bool right, const void *alpha, Address a,
                         Address b) const {
    const int op = right ? shape.op_b : shape.op_a;
    const bool transposed = (op != blas_op_n) != right, upper = (form & form_upper) != 0;
    CombineArguments arguments{};
    arguments.destination = b;
    arguments.ld = shape.ldc;
    arguments.rows = right ? shape.n : shape.m;
    arguments.cols = right ? shape.m : shape.n;
    arguments.source[0] = a;
    arguments.source_ld[0] = right ? shape.ldb : shape.lda;
    arguments.ending = (right ? solves_right : 0) | (upper != transposed ? solves_last_first : 0) |
                       (transposed ? solves_transposed : 0) | (op == blas_op_c ? solves_conjugated : 0) |
                       ((form & form_unit) != 0 ? solves_unit : 0);
    const auto take = [&](auto number) {
        const std::complex<double> factor(*static_cast<const decltype(number) *>(alpha));
        arguments.factor[0] = factor.real(), arguments.imaginary[0] = factor.imag();
    };
    switch (shape.dtype) {
        case dtype_f32: take(float{}); break;
        case dtype_f64: take(double{}); break;
        case dtype_c64: take(std::complex<float>{}); break;
        default: take(std::complex<double>{}); break;
    }
    constexpr unsigned threads = 256, vectors = threads / 8;
    const auto blocks = static_cast<unsigned>((arguments.cols + vectors - 1) / vectors);
    void *parameters[] = {&arguments};
    if (blocks == 0) return {"", success};
    return {"cuLaunchKernel",
            driver_.cuLaunchKernel(function_, blocks, 1, 1, threads, 1, 1, 0, stream_, parameters, nullptr), false};
}

void Run::issue_parts(const Executor::Gemm &gemm, const Step &step) {
    const Executor::Lane &lane = executor_->lanes_[step.lane];
    const void *alpha = factor(gemm.shape.dtype, gemm.factor_product), *beta = factor(gemm.shape.dtype, gemm.factor_c);
    for (std::uint32_t at = 0; at < gemm.num_parts && result_.error.empty(); ++at) {
        const Executor::Part &part = executor_->parts_[gemm.first_part + at];
        if (part.cleared_words > 0)
            fail("cuMemsetD32Async", device_.driver().cuMemsetD32Async(part.a, 0, part.cleared_words, lane.stream),
                 &step);
        for (const std::int32_t copy : {part.copy_a, part.copy_b})
            if (copy >= 0) launch(executor_->combines_[copy], step);
        multiply(lane, part, alpha, part.combine < 0 ? beta : factor(gemm.shape.dtype, zero), step);
        if (part.combine >= 0) launch(executor_->combines_[static_cast<std::size_t>(part.combine)], step);
    }
}

// A factor in the type that sums: a complex number begins with its real part.
const void *Run::factor(int dtype, std::uint8_t number) const {
    if (dtype == dtype_f64 || dtype == dtype_c128) return &factors_[number];
    if (dtype == dtype_i8) return &factors_i32_[number];
    return &factors_f32_[number];
}

void Run::launch(const Executor::Combine &combine, const Step &step) {
    if (combine.arguments.rows == 0 || combine.arguments.cols == 0) return;
    CombineArguments arguments = combine.arguments;
    for (std::size_t i = 0; i < combine.num_sources; ++i) {
        arguments.factor[i] = factors_[combine.factors[i]].real();
        arguments.imaginary[i] = factors_[combine.factors[i]].imag();
    }
    void *parameters[] = {&arguments};
    fail("cuLaunchKernel",
         device_.driver().cuLaunchKernel(combine.function, combine.grid_x, combine.grid_y, 1, combine.block_x,
                                         combine.block_y, 1, 0, stream_of(step), parameters, nullptr),
         &step);
    if (result_.error.empty()) result_.copy_bytes += static_cast<std::int64_t>(combine.copy_bytes);
}

void Run::issue_batch(const Step &step) {
    const Executor::Batch &batch = executor_->batches_[step.payload];
    MemOp *ops = executor_->mem_ops_.data() + batch.first;
    for (std::uint32_t i = 0; i < batch.count; ++i)
        if (ops[i].value.operation == mem_op_wait_value_32)
            ops[i].value.value = epoch_ + executor_->awaited_[batch.first + i];
        else
            ops[i].value.address = device_.progress_address(static_cast<std::size_t>(step.lane), set_);
    if (Lane &lane = lanes_[step.lane]; lane.more > 0) lane.more_checkpoints.push_back({step.operation, lane.issued});
    fail("cuStreamBatchMemOp", device_.driver().cuStreamBatchMemOp(stream_of(step), batch.count, ops, 0), &step);
}

// A product of a bundle counts for nothing, but by itself, or with its events, it does: a long lane has to show how far
// it is (premise P2).
void Run::count_more(const Step &step) {
    Lane &lane = lanes_[step.lane];
    ++lane.issued, ++outstanding_;
    if (++lane.more % more_per_checkpoint != 0) return;
    lane.more_checkpoints.push_back({step.operation, lane.issued});
    const Address word = device_.progress_address(static_cast<std::size_t>(step.lane), set_);
    fail("cuStreamWriteValue32",
         device_.driver().cuStreamWriteValue32(stream_of(step), word, 2 * step.operation + 2, 0), &step);
}

// The only place that writes a peer's flag: the write follows the lane's earlier work, with a fence.
void Run::signal(const Step &step) {
    const Executor::Signal &it = executor_->signals_[step.payload];
    fail("cuStreamWriteValue32",
         device_.driver().cuStreamWriteValue32(stream_of(step), it.address, epoch_ + it.value, 0), &step);
}

void Run::fail(const char *call, Code code, const Step *step, bool blas) {
    if (code == success) return;
    // cuBLAS hides the driver's code: the stream tells whether the context still lives.
    const Code state = blas ? device_.driver().cuStreamQuery(stream_of(*step)) : code;
    const bool sticky = state != success && state != error_not_ready && (blas || is_sticky(state));
    result_.fatal = result_.fatal || sticky;
    signals_only_ = true;
    tell_others(abort_word(), call_, result_.fatal);
    if (!result_.error.empty()) return;
    result_.error = blas ? device_.blas().describe(call, code) : device_.driver().describe(call, code);
    if (step != nullptr) result_.operation = step->operation;
}

void Run::see_progress(std::size_t number) {
    Lane &lane = lanes_[number];
    const std::vector<Executor::Checkpoint> &checkpoints = executor_->lanes_[number].checkpoints;
    const std::uint32_t word = seen(device_.progress(set_)[number]);
    std::size_t &next = lane.next_checkpoint;
    for (; next < checkpoints.size() && word > 2 * checkpoints[next].operation; ++next)
        lane.completed = std::max(lane.completed, checkpoints[next].issued);
    for (const auto &more = lane.more_checkpoints;
         lane.next_more < more.size() && word > 2 * more[lane.next_more].operation; ++lane.next_more)
        lane.completed = std::max(lane.completed, more[lane.next_more].issued);
}

bool Run::is_empty(std::size_t number) {
    Lane &lane = lanes_[number];
    see_progress(number);
    if (lane.completed >= lane.issued) return true;
    const Code code = device_.driver().cuStreamQuery(executor_->lanes_[number].stream);
    if (code == error_not_ready) return false;
    if (code == success) {
        lane.completed = lane.issued;
        return true;
    }
    result_.fatal = true;
    fail("cuStreamQuery", code);
    return false;
}

bool Run::may_issue() {
    const std::int64_t before = outstanding_;
    outstanding_ = 0;
    for (std::size_t l = 0; l < lanes_.size(); ++l) {
        is_empty(l);
        outstanding_ += lanes_[l].issued - std::min(lanes_[l].completed, lanes_[l].issued);
    }
    full_ = outstanding_ > most_outstanding_ / 2;
    if (outstanding_ < before) last_move_ = Clock::now();
    if (full_ && !result_.fatal && !moved()) result_.stalled = true;
    return !full_ && !result_.fatal;
}

bool Run::drain() {
    if (chained_) {  // behind whose steps the streams may hold those of another
        if (!has_ended()) return result_.fatal || result_.stalled;
        next_lane_ = lanes_.size();
    }
    // Lane after lane: once one is empty the others mostly are, and each is asked once.
    for (; next_lane_ < lanes_.size(); ++next_lane_) {
        if (lanes_[next_lane_].issued > 0 && !is_empty(next_lane_)) {
            if (!result_.fatal && !moved()) result_.stalled = true;
            return result_.fatal || result_.stalled;
        }
        last_move_ = Clock::now();
    }
    if (executor_->host_lanes_.empty() || device_.host_worker().is_done()) return true;
    if (!moved()) result_.stalled = true;
    return result_.stalled;
}

// Mostly the word is looked at alone: to ask the driver keeps it from a thread that issues.
bool Run::has_ended() {
    if (seen(*device_.end_word(set_)) == epoch_ + executor_->span_ &&
        (!preceding_ || device_.driver().cuEventQuery(device_.chain_event(1 + set_)) == success))
        return true;
    const auto now = Clock::now();
    if (now - last_look_ < look_interval) return false;
    const Code code = device_.driver().cuStreamQuery(joint());
    result_.fatal = code != success && code != error_not_ready;
    if (result_.fatal) fail("cuStreamQuery", code);
    if (!moved()) result_.stalled = true;
    return false;
}

void Run::mirror() {
    std::uint32_t *words = device_.progress(set_), *row = executor_->board_ + executor_->rank_ * max_lanes;
    for (std::size_t l = 0; l < lanes_.size(); ++l)
        if (const std::uint32_t word = seen(words[l]); seen(row[l]) != word) show(row[l], word);
}

bool Run::moved() {
    const auto now = Clock::now();
    if (now - last_look_ < look_interval) return true;
    last_look_ = now;
    mirror();
    seen_.resize(executor_->board_words_);
    bool changed = false;
    for (std::size_t i = 0; i < executor_->board_words_; ++i) {
        const std::uint32_t word = seen(executor_->board_[i]);
        changed = changed || word != seen_[i];
        seen_[i] = word;
    }
    if (changed) last_move_ = now;
    return now - last_move_ < timeout_;
}

}  // namespace uncut::cuda
