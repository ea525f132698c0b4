// Runs what cuda_executor_build.cpp has made of an operation list.
#include "cuda_executor.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>

namespace uncut::cuda {
namespace {

// A hardware queue holds 1,020 entries (measured on H200, whatever the operation) and issuing into a
// full one blocks inside the driver, where no deadline can be kept. Issuing therefore pauses and polls while more steps
// than this are outstanding on all lanes together; every issued step finishes without us (premise P2).
constexpr std::int64_t max_outstanding = 768;
// The same where each body brings two events with it.
constexpr std::int64_t max_outstanding_traced = max_outstanding / 3;
constexpr std::chrono::microseconds look_interval{1000};

}  // namespace

void Executor::prepare_trace() { device_->reserve_timing(1 + 2 * num_bodies_); }

RunResult Executor::run(double alpha, double beta, std::uint32_t epoch, double timeout_s, bool traced) {
    const std::unique_lock<std::mutex> only(device_->issuing(), std::try_to_lock);
    if (!only.owns_lock())
        throw Failure("two threads run operation lists on one device backend at once; give each thread its own session",
                      -1);
    if (device_->abandoned())
        throw Failure("an earlier run on this device backend stalled or lost its context; the job has to end", -1);
    if (traced && device_->num_timing_events() < 1 + 2 * num_bodies_)
        throw Failure("a run was to be traced for which no events were made: prepare the trace first", -1);
    const std::int64_t created = device_->num_created();
    const auto began = Clock::now();
    start(alpha, beta, epoch, timeout_s);
    const DeviceState::Scope scope(*device_);
    if (scope.code() != success) {
        fail("cuCtxSetCurrent", scope.code(), false, nullptr);
        result_.fatal = true;
    } else if (traced) {
        mark_reference();
        issue_all<true>();
    } else {
        issue_all<false>();
    }
    const auto issued = Clock::now();
    if (!result_.fatal && !result_.stalled) drain();
    mirror();
    const auto ended = Clock::now();
    result_.issue_s = std::chrono::duration<double>(issued - began).count();
    result_.drain_s = std::chrono::duration<double>(ended - issued).count();
    if (traced) read_times();
    result_.created = device_->num_created() - created;
    if (result_.stalled || result_.fatal) device_->abandon();
    return result_;
}

void Executor::start(double alpha, double beta, std::uint32_t epoch, double timeout_s) {
    result_.tasks = result_.copy_bytes = 0;
    result_.error.clear();
    result_.operation = -1;
    result_.fatal = result_.stalled = false;
    result_.stuck.clear();
    result_.times_s.clear();
    epoch_ = epoch;
    factors_f64_[factor_alpha] = alpha;
    factors_f64_[factor_beta] = beta;
    factors_f32_[factor_alpha] = static_cast<float>(alpha);
    factors_f32_[factor_beta] = static_cast<float>(beta);
    outstanding_ = 0;
    for (Lane &lane : lanes_) {
        lane.issued = lane.completed = 0;
        lane.next_checkpoint = 0;
    }
    // No lane of ours is busy between runs, so the host may write the words.
    std::memset(device_->progress(), 0, DeviceState::max_lanes * sizeof(std::uint32_t));
    timeout_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    last_look_ = last_move_ = Clock::now();
    volatile std::uint32_t *row = board_ + rank_ * DeviceState::max_lanes;
    for (std::size_t l = 0; l < DeviceState::max_lanes; ++l)  // of lanes that an earlier list had, too
        if (row[l] != 0) row[l] = 0;
}

template <bool traced>
void Executor::issue_all() {
    constexpr std::int64_t most = traced ? max_outstanding_traced : max_outstanding;
    std::size_t next_event = 1;  // the first is the reference
    for (const Step &step : steps_) {
        // After an error only signals go out (poison): no peer may wait for ever.
        if (!result_.error.empty() && step.code != code_signal) continue;
        const bool timed = traced && step.code <= code_combine;
        if (timed) take_time(step, next_event++);
        issue(step);
        if (timed) take_time(step, next_event++);
        if (result_.fatal) return;
        ++lanes_[step.lane].issued;
        if (++outstanding_ > most) settle(most);
        if (result_.fatal || result_.stalled) return;
    }
}

void Executor::take_time(const Step &step, std::size_t number) {
    fail("cuEventRecord", device_->driver().cuEventRecord(device_->timing_event(number), lanes_[step.lane].stream),
         false, &step);
}

// One event of this device and the moment it passed, by which the clocks of all devices are compared.
void Executor::mark_reference() {
    if (lanes_.empty()) return;
    const Driver &d = device_->driver();
    const Stream stream = lanes_.front().stream;
    for (int attempt = 0; attempt < 2; ++attempt) {  // the first may find the device asleep
        const auto before = Clock::now();
        fail("cuEventRecord", d.cuEventRecord(device_->timing_event(0), stream), false, nullptr);
        fail("cuStreamSynchronize", d.cuStreamSynchronize(stream), false, nullptr);
        const auto passed = before + (Clock::now() - before) / 2;
        result_.reference_s = std::chrono::duration<double>(passed.time_since_epoch()).count();
    }
}

void Executor::read_times() {
    const Driver &d = device_->driver();
    for (std::size_t i = 1; i <= 2 * num_bodies_ && result_.error.empty() && !result_.stalled; ++i) {
        float milliseconds = 0.0F;
        fail("cuEventElapsedTime",
             d.cuEventElapsedTime(&milliseconds, device_->timing_event(0), device_->timing_event(i)), false, nullptr);
        result_.times_s.push_back(1e-3 * static_cast<double>(milliseconds));
    }
}

void Executor::issue(const Step &step) {
    const Driver &d = device_->driver();
    const Stream stream = lanes_[step.lane].stream;
    switch (step.code) {
        case code_copy: issue_copy(step); break;
        case code_gemm: issue_gemm(step); break;
        case code_combine: launch(combines_[step.payload], stream, step); break;
        case code_wait_flag: issue_batch(step); break;
        case code_wait_event:
            fail("cuStreamWaitEvent", d.cuStreamWaitEvent(stream, device_->event(step.payload), 0), false, &step);
            break;
        case code_record:
            fail("cuEventRecord", d.cuEventRecord(device_->event(step.payload), stream), false, &step);
            break;
        default: signal(step); break;
    }
    if (step.code <= code_combine && result_.error.empty()) ++result_.tasks;
}

void Executor::issue_copy(const Step &step) {
    const Copy &copy = copies_[step.payload];
    if (copy.bytes == 0) return;
    const Driver &d = device_->driver();
    const Stream stream = lanes_[step.lane].stream;
    if (copy.contiguous)
        fail("cuMemcpyAsync", d.cuMemcpyAsync(copy.destination, copy.source, copy.bytes, stream), false, &step);
    else
        fail("cuMemcpy2DAsync", d.cuMemcpy2DAsync(&copy.shape, stream), false, &step);
    if (result_.error.empty()) result_.copy_bytes += static_cast<std::int64_t>(copy.bytes);
}

void Executor::issue_gemm(const Step &step) {
    const Gemm &g = gemms_[step.payload];
    if (g.m == 0 || g.n == 0) return;
    if (g.k == 0 || factors_f64_[g.factor_product] == 0.0) {
        // C alone: A and B are not read, whatever the library does with a factor of 0.
        if (factors_f64_[g.factor_c] != 1.0) launch(combines_[g.scale], lanes_[step.lane].stream, step);
        return;
    }
    const Blas &b = device_->blas();
    if (g.tuned != nullptr) {
        fail("cublasLtMatmul",
             g.tuned->run(g.handle, &factors_f32_[g.factor_product], g.a, g.b, &factors_f32_[g.factor_c], g.c,
                          g.workspace, lanes_[step.lane].stream),
             true, &step);
    } else if (g.dtype == dtype_f64) {
        fail("cublasDgemm_v2_64",
             b.cublasDgemm_v2_64(g.handle, g.op_a, g.op_b, g.m, g.n, g.k, &factors_f64_[g.factor_product],
                                 reinterpret_cast<const double *>(g.a), g.lda, reinterpret_cast<const double *>(g.b),
                                 g.ldb, &factors_f64_[g.factor_c], reinterpret_cast<double *>(g.c), g.ldc),
             true, &step);
    } else {
        fail(g.dtype == dtype_f32 ? "cublasSgemm_v2_64" : "cublasGemmEx_64",
             usual_product(b, g.handle, shape_of(g), &factors_f32_[g.factor_product], g.a, g.b,
                           &factors_f32_[g.factor_c], g.c),
             true, &step);
    }
}

void Executor::launch(const Combine &combine, Stream stream, const Step &step) {
    if (combine.arguments.rows == 0 || combine.arguments.cols == 0) return;
    CombineArguments arguments = combine.arguments;
    for (std::size_t i = 0; i < combine.num_sources; ++i)
        arguments.factor[i] = factors_f64_[combine.factors[i]];
    void *parameters[] = {&arguments};
    fail("cuLaunchKernel",
         device_->driver().cuLaunchKernel(combine.function, combine.grid_x, combine.grid_y, 1, combine.block_x,
                                          combine.block_y, 1, 0, stream, parameters, nullptr),
         false, &step);
}

void Executor::issue_batch(const Step &step) {
    const Batch &batch = batches_[step.payload];
    MemOp *ops = mem_ops_.data() + batch.first;
    for (std::uint32_t i = 0; i < batch.count; ++i)
        if (ops[i].value.operation == mem_op_wait_value_32) ops[i].value.value = epoch_;
    fail("cuStreamBatchMemOp", device_->driver().cuStreamBatchMemOp(lanes_[step.lane].stream, batch.count, ops, 0),
         false, &step);
}

// The only place that writes a peer's flag: the write follows the lane's earlier work, with a fence.
void Executor::signal(const Step &step) {
    fail("cuStreamWriteValue32",
         device_->driver().cuStreamWriteValue32(lanes_[step.lane].stream, signals_[step.payload].address, epoch_, 0),
         false, &step);
}

void Executor::fail(const char *call, Code code, bool blas, const Step *step) {
    if (code == success) return;
    // cuBLAS hides the driver's code: the stream tells whether the context still lives.
    const Code state = blas ? device_->driver().cuStreamQuery(lanes_[step->lane].stream) : code;
    const bool sticky = state != success && state != error_not_ready && (blas || is_sticky(state));
    result_.fatal = result_.fatal || sticky;
    if (!result_.error.empty()) return;
    result_.error = blas ? device_->blas().describe(call, code) : device_->driver().describe(call, code);
    if (step != nullptr) result_.operation = step->operation;
}

bool Executor::query(Lane &lane, std::size_t number) {
    const volatile std::uint32_t *words = device_->progress();
    const std::uint32_t word = words[number];
    while (lane.next_checkpoint < lane.checkpoints.size() &&
           word > 2 * lane.checkpoints[lane.next_checkpoint].operation)
        lane.completed = std::max(lane.completed, lane.checkpoints[lane.next_checkpoint++].issued);
    if (lane.completed >= lane.issued) return true;
    const Code code = device_->driver().cuStreamQuery(lane.stream);
    if (code == error_not_ready) return false;
    if (code == success) {
        lane.completed = lane.issued;
        return true;
    }
    fail("cuStreamQuery", code, false, nullptr);
    result_.fatal = true;
    return false;
}

void Executor::settle(std::int64_t most) {
    while (!result_.fatal && !result_.stalled) {
        const std::int64_t before = outstanding_;
        outstanding_ = 0;
        for (std::size_t l = 0; l < lanes_.size(); ++l) {
            query(lanes_[l], l);
            outstanding_ += lanes_[l].issued - std::min(lanes_[l].completed, lanes_[l].issued);
        }
        if (outstanding_ <= most / 2) return;
        if (outstanding_ < before) last_move_ = Clock::now();
        if (!moved()) give_up();
        sched_yield();
    }
}

void Executor::drain() {
    std::size_t next = 0;
    int idle = 0;
    while (next < lanes_.size()) {
        // Lane after lane: once one is empty the others mostly are, and each is asked once.
        if (lanes_[next].issued == 0 || query(lanes_[next], next)) {
            ++next;
            last_move_ = Clock::now();
            continue;
        }
        if (result_.fatal) return;
        if (++idle % 16 != 0) continue;
        if (!moved()) return give_up();
        sched_yield();
    }
}

void Executor::mirror() {
    const volatile std::uint32_t *words = device_->progress();
    volatile std::uint32_t *row = board_ + rank_ * DeviceState::max_lanes;
    for (std::size_t l = 0; l < lanes_.size(); ++l)
        if (row[l] != words[l]) row[l] = words[l];
}

bool Executor::moved() {
    const auto now = Clock::now();
    if (now - last_look_ < look_interval) return true;
    last_look_ = now;
    mirror();
    const volatile std::uint32_t *board = board_;
    bool changed = false;
    for (std::size_t i = 0; i < board_words_; ++i) {
        const std::uint32_t word = board[i];
        changed = changed || word != seen_[i];
        seen_[i] = word;
    }
    if (changed) last_move_ = now;
    return now - last_move_ < timeout_;
}

void Executor::give_up() {
    result_.stalled = true;
    const volatile std::uint32_t *words = device_->progress();
    for (std::size_t l = 0; l < lanes_.size(); ++l)
        if (lanes_[l].issued > 0 && !query(lanes_[l], l)) result_.stuck.push_back({static_cast<int>(l), words[l]});
}

}  // namespace uncut::cuda
