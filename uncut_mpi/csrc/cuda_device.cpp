#include "cuda_device.hpp"

#include <cstring>

namespace uncut::cuda {
namespace {

constexpr std::size_t most_tuned_products = 1024;
}  // namespace

DeviceState::DeviceState(std::shared_ptr<const Driver> driver, std::shared_ptr<const Blas> blas, int ordinal)
    : driver_(std::move(driver)), blas_(std::move(blas)), ordinal_(ordinal) {
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
        d.check("cuMemHostAlloc", d.cuMemHostAlloc(&words, max_lanes * sizeof(std::uint32_t),
                                                   host_alloc_portable | host_alloc_device_map));
        progress_ = static_cast<std::uint32_t *>(words);
        std::memset(words, 0, max_lanes * sizeof(std::uint32_t));
        d.check("cuMemHostGetDevicePointer", d.cuMemHostGetDevicePointer(&progress_device_, words, 0));
        ++num_created_;
        reserve_events(caller_event_, 1, event_disable_timing);
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
            b.check("cublasSetMathMode", b.cublasSetMathMode(lane.handle, blas_default_math));
        } catch (...) {
            if (lane.handle != nullptr) b.cublasDestroy_v2(lane.handle);
            if (lane.workspace != 0) d.cuMemFree(lane.workspace);
            if (lane.stream != nullptr) d.cuStreamDestroy(lane.stream);
            throw;
        }
        compute_lanes_.push_back(lane);
        num_created_ += 3;
    }
    while (copy_streams_.size() < copy_lanes) {
        // A COMBINE that others wait for takes the multiprocessors that a product's blocks leave, before its next ones.
        Stream stream = nullptr;
        d.check("cuStreamCreateWithPriority",
                d.cuStreamCreateWithPriority(&stream, stream_non_blocking, greatest_priority_));
        copy_streams_.push_back(stream);
        ++num_created_;
    }
    reserve_events(events_, events, event_disable_timing);
}

void DeviceState::use_algorithms(std::map<int, Algorithm> algorithms) {
    algorithms_ = std::move(algorithms);
    tuned_products_.clear();
}

std::shared_ptr<const TunedProduct> DeviceState::tuned_product(const ProductShape &shape) {
    const auto wanted = algorithms_.find(shape.type);
    if (wanted == algorithms_.end()) return nullptr;
    const auto known = tuned_products_.find(shape);
    if (known != tuned_products_.end()) return known->second;
    auto made = std::make_shared<TunedProduct>(*blas_, compute_lane(0).handle, shape, workspace_bytes);
    if (!made->take(wanted->second)) made = nullptr;
    if (tuned_products_.size() >= most_tuned_products) tuned_products_.clear();  // executors keep their own
    return tuned_products_.emplace(shape, std::move(made)).first->second;
}

std::vector<Algorithm> DeviceState::proposed_algorithms(const ProductShape &shape) {
    reserve(1, 0, 0);
    return TunedProduct(*blas_, compute_lane(0).handle, shape, workspace_bytes).proposals();
}

void DeviceState::reserve_timing(std::size_t events) {
    const Scope scope(*this);
    driver_->check("cuCtxSetCurrent", scope.code());
    reserve_events(timing_events_, events, event_default);
}

void DeviceState::reserve_events(std::vector<Event> &events, std::size_t count, unsigned flags) {
    while (events.size() < count) {
        Event event = nullptr;
        driver_->check("cuEventCreate", driver_->cuEventCreate(&event, flags));
        events.push_back(event);
        ++num_created_;
    }
}

void DeviceState::await_stream(Stream stream) {
    const Driver &d = *driver_;
    if (caller_event_.empty()) throw Failure("a stream was to be awaited by a device that is closed", -1);
    const Scope scope(*this);
    d.check("cuCtxSetCurrent", scope.code());
    // An event of the legacy stream follows what blocking streams hold as well; asking that stream itself would not.
    d.check("cuEventRecord", d.cuEventRecord(caller_event_.front(), stream));
    d.check("cuEventSynchronize", d.cuEventSynchronize(caller_event_.front()));
}

void DeviceState::fill_words(Address address, std::size_t count, std::uint32_t value) {
    const Driver &d = *driver_;
    reserve(0, 1, 0);
    use();
    d.check("cuMemsetD32Async", d.cuMemsetD32Async(address, value, count, copy_streams_.front()));
    d.check("cuStreamSynchronize", d.cuStreamSynchronize(copy_streams_.front()));
}

std::uint64_t DeviceState::pointer_attribute(int attribute, Address address) const {
    // The attributes in use are 4 or 8 bytes wide; a zeroed word holds either (little endian).
    std::uint64_t value = 0;
    use();
    driver_->check("cuPointerGetAttribute", driver_->cuPointerGetAttribute(&value, attribute, address));
    return value;
}

void DeviceState::close() {
    if (context_ == nullptr) return;
    const Driver &d = *driver_;
    // Errors are not reported here: the process may be ending, or an error is travelling already.
    if (!abandoned_ && d.cuCtxSetCurrent(context_) == success) {
        for (const ComputeLane &lane : compute_lanes_) {
            blas_->cublasDestroy_v2(lane.handle);
            d.cuMemFree(lane.workspace);
            d.cuStreamDestroy(lane.stream);
        }
        for (Stream stream : copy_streams_)
            d.cuStreamDestroy(stream);
        for (const auto *events : {&events_, &timing_events_, &caller_event_})
            for (Event event : *events)
                d.cuEventDestroy(event);
        if (progress_ != nullptr) d.cuMemFreeHost(progress_);
        d.cuDevicePrimaryCtxRelease(device_);
    }
    tuned_products_.clear();
    compute_lanes_.clear();
    copy_streams_.clear();
    events_.clear();
    timing_events_.clear();
    caller_event_.clear();
    progress_ = nullptr;
    context_ = nullptr;
}

}  // namespace uncut::cuda
