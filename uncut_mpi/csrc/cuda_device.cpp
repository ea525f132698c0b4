#include "cuda_device.hpp"

#include <algorithm>
#include <bit>
#include <complex>
#include <cstring>
#include <limits>

namespace uncut::cuda {
namespace {

constexpr std::int64_t bundle_alignment = 256;  // of what the library looks at at most

// How kernels of products are timed.
// Longer ones run at the power limit, where kernels differ by 3 % and less, and take long to time.
constexpr std::size_t least_table_bytes = 4096;
constexpr double most_operations = 2e12, most_operations_f32 = 3e11;
constexpr double long_operations = 1e11;
constexpr double negligible = 0.05;  // part of a plan's operations that is left to the library
constexpr int timings_each = 3;
constexpr double far_behind = 1.06;  // of the best so far: it gets no other sample
constexpr double worth_it = 0.99;    // of the library's time
}  // namespace

DeviceState::DeviceState(std::shared_ptr<const Driver> driver, std::shared_ptr<const Blas> blas, int ordinal)
    : driver_(std::move(driver)), blas_(std::move(blas)) {
    const Driver &d = *driver_;
    d.check("cuInit", d.cuInit(0));
    d.check("cuDeviceGet", d.cuDeviceGet(&device_, ordinal));
    int can_flush = 0;
    d.check("cuDeviceGetAttribute", d.cuDeviceGetAttribute(&multiprocessors_, attribute_multiprocessor_count, device_));
    d.check("cuDeviceGetAttribute", d.cuDeviceGetAttribute(&max_pitch_, attribute_max_pitch, device_));
    d.check("cuDeviceGetAttribute", d.cuDeviceGetAttribute(&can_flush, attribute_can_flush_remote_writes, device_));
    if (can_flush != 0) wait_flags_ |= wait_value_flush;
    d.check("cuDevicePrimaryCtxRetain", d.cuDevicePrimaryCtxRetain(&context_, device_));
    try {
        use();
        int least_priority = 0;
        d.check("cuCtxGetStreamPriorityRange", d.cuCtxGetStreamPriorityRange(&least_priority, &greatest_priority_));
        void *words = nullptr;
        constexpr std::size_t bytes = (num_sets * max_lanes + num_sets) * sizeof(std::uint32_t);
        d.check("cuMemHostAlloc", d.cuMemHostAlloc(&words, bytes, host_alloc_portable | host_alloc_device_map));
        progress_ = static_cast<std::uint32_t *>(words);
        std::memset(words, 0, bytes);
        d.check("cuMemHostGetDevicePointer", d.cuMemHostGetDevicePointer(&progress_device_, words, 0));
    } catch (...) {
        close();
        throw;
    }
}

DeviceState::~DeviceState() { close(); }

void DeviceState::use() const { driver_->check("cuCtxSetCurrent", driver_->cuCtxSetCurrent(context_)); }

DeviceState::Scope::Scope(const DeviceState &device) : driver_(device.driver()), own_(device.context()) {
    code_ = driver_.cuCtxGetCurrent(&before_);
    if (code_ == success && before_ != own_) code_ = driver_.cuCtxSetCurrent(own_);
}

void DeviceState::Scope::check() const { driver_.check("cuCtxSetCurrent", code_); }

DeviceState::Scope::~Scope() {
    if (code_ == success && before_ != own_) driver_.cuCtxSetCurrent(before_);
}

void DeviceState::reserve(std::size_t compute_lanes, std::size_t copy_lanes, std::size_t events) {
    const Driver &d = *driver_;
    use();
    while (compute_lanes_.size() < compute_lanes) {
        const Blas &b = *blas_;
        ComputeLane lane{};
        try {
            d.check("cuStreamCreate", d.cuStreamCreate(&lane.stream, stream_non_blocking));
            d.check("cuMemAlloc", d.cuMemAlloc(&lane.workspace, workspace_bytes));
            b.check("cublasCreate_v2", b.cublasCreate_v2(&lane.handle));
            // The stream first: setting it gives the handle its default workspace back.
            b.check("cublasSetStream_v2", b.cublasSetStream_v2(lane.handle, lane.stream));
            b.check("cublasSetWorkspace_v2",
                    b.cublasSetWorkspace_v2(lane.handle, reinterpret_cast<void *>(lane.workspace), workspace_bytes));
            b.check("cublasSetPointerMode_v2", b.cublasSetPointerMode_v2(lane.handle, blas_pointer_mode_host));
            b.check("cublasSetMathMode", b.cublasSetMathMode(lane.handle, blas_exact_reductions));
        } catch (...) {
            if (lane.handle != nullptr) b.cublasDestroy_v2(lane.handle);
            if (lane.workspace != 0) d.cuMemFree(lane.workspace);
            if (lane.stream != nullptr) d.cuStreamDestroy(lane.stream);
            throw;
        }
        compute_lanes_.push_back(lane);
    }
    while (copy_streams_.size() < copy_lanes) {
        // A COMBINE that others wait for takes the multiprocessors that a product's blocks leave, before its next ones.
        Stream stream = nullptr;
        d.check("cuStreamCreateWithPriority",
                d.cuStreamCreateWithPriority(&stream, stream_non_blocking, greatest_priority_));
        copy_streams_.push_back(stream);
    }
    reserve_events(events_, events, event_disable_timing);
    for (Stream *one : {&chain_stream_, &preceding_stream_})
        if (*one == nullptr) d.check("cuStreamCreate", d.cuStreamCreate(one, stream_non_blocking));
    reserve_events(chain_events_, 1 + num_sets + compute_lanes_.size() + copy_streams_.size(), event_disable_timing);
}

Address DeviceState::copies_of(Stream stream, bool can_do_without) {
    const auto its = [stream](const ComputeLane &lane) { return lane.stream == stream; };
    ComputeLane &lane = *std::ranges::find_if(compute_lanes_, its);
    if (lane.copies != 0) return lane.copies;
    const Code made = driver_->cuMemAlloc(&lane.copies, copies_bytes);
    if (made != success) lane.copies = 0;
    if (!can_do_without) driver_->check("cuMemAlloc", made);
    return lane.copies;
}

void DeviceState::tune(const std::map<ProductShape, Wanted> &asked) {
    if (!timing_) return;
    double total = 0.0;
    std::size_t c_bytes = 0;
    const auto work = [](const Wanted &one) { return static_cast<double>(one.count) * one.shape.operations(); };
    std::vector<Wanted> wanted;
    for (const auto &[shape, one] : asked) {
        const double operations = shape.operations();
        const double most = shape.dtype == dtype_f32 ? most_operations_f32 : most_operations;
        if (operations >= least_operations_ && operations <= most && !tuned_products_.contains(shape))
            wanted.push_back(one);
    }
    std::sort(wanted.begin(), wanted.end(), [&](const Wanted &x, const Wanted &y) { return work(x) > work(y); });
    for (const Wanted &one : wanted)
        total += work(one);
    double left = total;
    std::erase_if(wanted, [&](const Wanted &one) {
        const bool matters = left > negligible * total;
        left -= work(one);
        return !matters;
    });
    for (const Wanted &one : wanted)
        c_bytes = std::max(c_bytes, one.shape.bytes_of_c() + 256);
    if (wanted.empty()) return;
    const Scope scope(*this);
    scope.check();
    reserve(1, 0, 0);
    reserve_timing(2);
    Address c = 0;
    if (driver_->cuMemAlloc(&c, c_bytes) != success) return;
    try {
        if (tuned_products_.size() + wanted.size() > most_tuned_)  // executors keep theirs
            std::erase_if(tuned_products_, [&](const auto &known) { return !asked.contains(known.first); });
        for (const Wanted &one : wanted)
            tuned_products_.emplace(one.shape, time(one, c + one.shape.alignment_c % 256));
    } catch (...) {
        driver_->cuMemFree(c);
        throw;
    }
    driver_->check("cuMemFree", driver_->cuMemFree(c));
}

DeviceState::Tuned DeviceState::time(const Wanted &wanted, Address c) {
    const ComputeLane &lane = compute_lane(0);
    const ProductShape &shape = wanted.shape;
    const float alpha = 1.0F, one = 1.0F, zero = 0.0F, neither = 0.5F;
    const auto product = std::make_shared<TunedProduct>(*blas_, lane.handle, shape, workspace_bytes);
    constexpr double never = std::numeric_limits<double>::infinity();
    // A long product's time to issue is hidden behind nothing, and is nothing.
    const int at_once = shape.operations() > long_operations ? 1 : 2;
    const auto sample = [&](std::size_t candidate, int times, const float &beta) {  // 0 is the library's choice
        const bool usual = candidate == 0 && shape.epilogue == 0;
        if (!usual) product->take(candidate - (candidate > 0));
        driver_->check("cuEventRecord", driver_->cuEventRecord(timing_event(0), lane.stream));
        for (int i = 0; i < times; ++i) {
            if (usual) {
                const Called called = usual_product(*blas_, lane.handle, shape, &alpha, wanted.a, wanted.b, &beta, c);
                blas_->check(called.name, called.code);
            } else if (product->run(lane.handle, &alpha, wanted.a, wanted.b, &beta, c, c, lane.workspace,
                                    lane.stream) != success) {
                return never;
            }
        }
        driver_->check("cuEventRecord", driver_->cuEventRecord(timing_event(1), lane.stream));
        driver_->check("cuEventSynchronize", driver_->cuEventSynchronize(timing_event(1)));
        float milliseconds = 0.0F;
        driver_->check("cuEventElapsedTime",
                       driver_->cuEventElapsedTime(&milliseconds, timing_event(0), timing_event(1)));
        return 1e-3 * static_cast<double>(milliseconds) / times;
    };
    std::vector<double> seconds(product->num_proposals() + 1, never);
    std::vector<bool> runs;
    for (std::size_t i = 0; i < seconds.size(); ++i)
        runs.push_back(sample(i, 1, one) < never);  // and its kernel is loaded
    double best = never;
    for (int timing = 0; timing < timings_each; ++timing)
        for (std::size_t i = 0; i < seconds.size(); ++i) {
            if (!runs[i] || (timing > 0 && seconds[i] > far_behind * best)) continue;
            seconds[i] = std::min(seconds[i], sample(i, at_once, one));
            best = std::min(best, seconds[i]);
        }
    const auto first = static_cast<std::size_t>(std::min_element(seconds.begin(), seconds.end()) - seconds.begin());
    if (first == 0 || seconds[first] > worth_it * seconds[0]) return {seconds[0], seconds[0], nullptr};
    // With another beta it may be another kernel, which has to be loaded as well before lanes wait for peers.
    if (!(sample(first, 1, zero) < never && sample(first, 1, neither) < never))
        return {seconds[0], seconds[0], nullptr};
    return {seconds[0], seconds[first], product};
}

std::shared_ptr<const TunedProduct> DeviceState::tuned_product(const ProductShape &shape) const {
    if (shape.operations() < least_operations_) return nullptr;
    const auto known = tuned_products_.find(shape);
    return known == tuned_products_.end() ? nullptr : known->second.product;
}

HostWorker &DeviceState::host_worker() {
    if (host_worker_ == nullptr) host_worker_ = std::make_unique<HostWorker>();
    return *host_worker_;
}

void DeviceState::reserve_timing(std::size_t events) {
    const Scope scope(*this);
    scope.check();
    reserve_events(timing_events_, events, event_default);
}

void DeviceState::reserve_events(std::vector<Event> &events, std::size_t count, unsigned flags) {
    while (events.size() < count) {
        Event event = nullptr;
        driver_->check("cuEventCreate", driver_->cuEventCreate(&event, flags));
        events.push_back(event);
    }
}

void DeviceState::mark_streams(const std::vector<Address> &streams) {
    check_open();
    const Scope scope(*this);
    scope.check();
    num_marked_ = 0;
    reserve_events(caller_events_, streams.size(), event_disable_timing);
    // An event of the legacy stream follows what blocking streams hold as well; asking that stream itself would not.
    for (const Address stream : streams)
        driver_->check("cuEventRecord",
                       driver_->cuEventRecord(caller_events_[num_marked_++], reinterpret_cast<Stream>(stream)));
}

void DeviceState::await_marks() {
    check_open();
    const Scope scope(*this);
    scope.check();
    for (std::size_t number = 0; number < num_marked_; ++number)
        driver_->check("cuEventSynchronize", driver_->cuEventSynchronize(caller_events_[number]));
}

void DeviceState::check_open() const {
    if (context_ == nullptr) throw Failure("a stream was to be awaited by a device that is closed");
}

Stream DeviceState::own_stream() {
    reserve(0, 1, 0);
    return copy_streams_.front();
}

void DeviceState::run_once(Function kernel, void *argument) {
    const Driver &d = *driver_;
    const Stream stream = own_stream();
    d.check("cuLaunchKernel", d.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, &argument, nullptr));
    d.check("cuStreamSynchronize", d.cuStreamSynchronize(stream));
}

void DeviceState::fill_words(Address address, std::size_t count, std::uint32_t value) {
    const Driver &d = *driver_;
    const Stream stream = own_stream();
    d.check("cuMemsetD32Async", d.cuMemsetD32Async(address, value, count, stream));
    d.check("cuStreamSynchronize", d.cuStreamSynchronize(stream));
}

std::uint64_t DeviceState::pointer_attribute(int attribute, Address address) const {
    // The attributes in use are 4 or 8 bytes wide; a zeroed word holds either (little endian).
    std::uint64_t value = 0;
    use();
    driver_->check("cuPointerGetAttribute", driver_->cuPointerGetAttribute(&value, attribute, address));
    return value;
}

Address DeviceState::allocation_of(Address address) const {
    Address begin = 0;
    use();
    const Code code = driver_->cuPointerGetAttribute(&begin, attribute_range_start, address);
    return code == success && begin != 0 ? begin : address;
}

std::shared_ptr<void> DeviceState::keep(const void *table, std::size_t bytes) {
    const Driver &d = *driver_;
    const std::size_t size = std::bit_ceil(std::max(bytes, least_table_bytes));
    const Stream stream = own_stream();
    Address address = 0;
    {
        const std::lock_guard lock(tables_->mutex);
        const auto found = tables_->unused.find(size);
        if (found != tables_->unused.end()) {
            address = found->second;
            tables_->unused.erase(found);
        }
    }
    if (address == 0) {
        d.check("cuMemAlloc", d.cuMemAlloc(&address, size));
        const std::lock_guard lock(tables_->mutex);
        tables_->all.push_back(address);
    }
    // Who holds it may outlive this object.
    std::shared_ptr<void> kept(reinterpret_cast<void *>(address), [tables = tables_, size](void *at) {
        const std::lock_guard lock(tables->mutex);
        tables->unused.emplace(size, reinterpret_cast<Address>(at));
    });
    d.check("cuMemcpyAsync", d.cuMemcpyAsync(address, reinterpret_cast<Address>(table), bytes, stream));
    d.check("cuStreamSynchronize", d.cuStreamSynchronize(stream));
    return kept;
}

void DeviceState::warm_up(const ComputeLane &lane, const ProductShape &shape, Bundle bundle, bool accumulates) {
    // The library may look at steps: where A has none, all may be one product.
    const std::array steps{bundle.step_a, bundle.step_b, bundle.step_c};
    if (!warm_bundles_.emplace(lane.handle, shape, bundle.count, bundle.strided, steps, accumulates).second) return;
    const Scope scope(*this);
    scope.check();
    std::size_t bytes = shape.bytes_of_c() + bundle_alignment;
    if (bundle.strided) bytes += static_cast<std::size_t>((bundle.count - 1) * bundle.step_c * bytes_of(shape.dtype_c));
    Address scratch = 0;
    driver_->check("cuMemAlloc", driver_->cuMemAlloc(&scratch, bytes));
    const auto free = [this](const Address *at) { driver_->cuMemFree(*at); };
    const std::unique_ptr<const Address, decltype(free)> freed(&scratch, free);
    std::shared_ptr<void> table;
    bundle.c = scratch + shape.alignment_c % bundle_alignment;
    if (!bundle.strided) {
        const std::vector<Address> everywhere(static_cast<std::size_t>(bundle.count), bundle.c);
        table = keep(everywhere.data(), everywhere.size() * sizeof(Address));
        bundle.c = reinterpret_cast<Address>(table.get());
    }
    alignas(16) const std::array<std::complex<double>, 2> wide{0.0, 1.0};
    alignas(16) const std::array<std::complex<float>, 2> narrow{0.0F, 1.0F};
    const bool in_doubles = shape.dtype == dtype_f64 || shape.dtype == dtype_c128;
    const auto factor = [&](std::size_t value) -> const void * {
        return in_doubles ? static_cast<const void *>(&wide[value]) : &narrow[value];
    };
    for (std::size_t beta = 0; beta <= (accumulates ? 1 : 0); ++beta) {
        const Called called = bundled_product(*blas_, lane.handle, shape, factor(1), factor(beta), bundle);
        blas_->check(called.name, called.code);
    }
    driver_->check("cuStreamSynchronize", driver_->cuStreamSynchronize(lane.stream));
}

void DeviceState::close() {
    if (context_ == nullptr) return;
    const Driver &d = *driver_;
    if (host_worker_ != nullptr && !host_worker_->is_ours()) static_cast<void>(host_worker_.release());
    host_worker_.reset();
    // Errors are not reported here: the process may be ending, or an error is travelling already.
    if (!abandoned_ && d.cuCtxSetCurrent(context_) == success) {
        for (const ComputeLane &lane : compute_lanes_) {
            blas_->cublasDestroy_v2(lane.handle);
            d.cuMemFree(lane.workspace);
            if (lane.copies != 0) d.cuMemFree(lane.copies);
            d.cuStreamDestroy(lane.stream);
        }
        for (Stream stream : copy_streams_)
            d.cuStreamDestroy(stream);
        for (const Stream one : {chain_stream_, preceding_stream_})
            if (one != nullptr) d.cuStreamDestroy(one);
        for (const auto *events : {&events_, &timing_events_, &caller_events_, &chain_events_})
            for (Event event : *events)
                d.cuEventDestroy(event);
        for (const Address table : tables_->all)
            d.cuMemFree(table);
        if (progress_ != nullptr) d.cuMemFreeHost(progress_);
        d.cuDevicePrimaryCtxRelease(device_);
    }
    tables_ = std::make_shared<Tables>();  // who still holds one gives it back to nobody
    tuned_products_.clear();
    warm_bundles_.clear();
    compute_lanes_.clear();
    copy_streams_.clear();
    events_.clear();
    timing_events_.clear();
    caller_events_.clear();
    chain_events_.clear();
    chain_stream_ = preceding_stream_ = nullptr;
    progress_ = nullptr;
    context_ = nullptr;
}

}  // namespace uncut::cuda
