// A CUDA driver and a cuBLAS of host memory, for tests of the executor where no GPU is.
//
// Streams are queues: an operation runs when everything before it on its stream has run and, for a
// wait, its flag or event has come. Device addresses are host addresses. A kernel's handle is
// 2^48 + its signature. Every call can be made to fail, and what was issued is logged.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <complex>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_executor.hpp"

using namespace uncut;
using namespace uncut::cuda;

namespace {

struct FakeStream {
    int number;
    std::deque<std::function<bool()>> queue;
};
struct Record {
    bool passed = false;
    std::uint64_t at = 0;
};
struct FakeEvent {
    std::shared_ptr<Record> latest;  // what was waited for before it is not touched by another record
    bool timed = false;
};
struct FakeBlas {
    FakeStream *stream = nullptr;
    bool workspace = false;
};

std::mutex lock;
int lt_objects = 0;  // descriptions of cublasLt that are alive
std::vector<FakeStream *> streams;
std::vector<std::string> issued;
std::map<std::string, int> calls;
std::string failing_call;
int failing_from = 0, failing_to = 0;
Code failing_code = 0;
int allocations = 0, can_flush = 0;
constexpr int greatest_priority = -5;
thread_local Context current_context = nullptr;
std::size_t most_queued = 0;
std::pair<Address, Address> allocation;  // one of several buffers
std::uint64_t ticks = 0;              // the devices' common clock: operations that ran, and what products take besides:
std::uint64_t product_ticks[8] = {};  // by cublasLt's option; 0: by cuBLAS's choice

void advance() {
    for (bool moved = true; moved;) {
        moved = false;
        for (FakeStream *stream : streams)
            while (!stream->queue.empty() && stream->queue.front()()) {
                stream->queue.pop_front();
                ++ticks;
                moved = true;
            }
    }
}

Code entered(const char *name) {
    const int number = ++calls[name];
    return failing_call == name && number >= failing_from && number <= failing_to ? failing_code : success;
}

FakeStream *as_stream(Stream stream) { return reinterpret_cast<FakeStream *>(stream); }

Code enqueue(const char *name, Stream stream, const std::string &what, std::function<bool()> body) {
    const std::lock_guard<std::mutex> guard(lock);
    if (const Code code = entered(name); code != success) return code;
    FakeStream *target = as_stream(stream);
    issued.push_back("s" + std::to_string(target->number) + " " + what);
    target->queue.push_back(std::move(body));
    std::size_t queued = 0;
    for (const FakeStream *each : streams)
        queued += each->queue.size();
    most_queued = std::max(most_queued, queued);
    advance();
    return success;
}

template <typename Body>
Code at_once(const char *name, Body body) {
    const std::lock_guard<std::mutex> guard(lock);
    if (const Code code = entered(name); code != success) return code;
    body();
    return success;
}

std::string number(std::uint64_t value) { return std::to_string(value); }

std::atomic_ref<std::uint32_t> word_at(Address address) {
    return std::atomic_ref(*reinterpret_cast<std::uint32_t *>(address));
}

bool wait_is_over(const MemOp::Value &wait) {
    const std::uint32_t flag = word_at(wait.address).load(std::memory_order_acquire);
    return static_cast<std::int32_t>(flag - wait.value) >= 0;
}

using Number = std::complex<double>;

Number load(Address base, std::int64_t at, int dtype) {
    if (dtype == dtype_c128) return reinterpret_cast<const Number *>(base)[at];
    if (dtype == dtype_c64) return Number(reinterpret_cast<const std::complex<float> *>(base)[at]);
    if (dtype == dtype_f64) return reinterpret_cast<const double *>(base)[at];
    if (dtype == dtype_f32 || dtype == dtype_tf32) return reinterpret_cast<const float *>(base)[at];
    if (dtype == dtype_i32) return reinterpret_cast<const std::int32_t *>(base)[at];
    if (dtype == dtype_i8) return reinterpret_cast<const std::int8_t *>(base)[at];
    if (dtype == dtype_e4m3 || dtype == dtype_e5m2) {  // NaN and infinity are no matter here
        const int byte = reinterpret_cast<const std::uint8_t *>(base)[at], digits = dtype == dtype_e4m3 ? 3 : 2;
        const int exponent = (byte & 127) >> digits, bias = dtype == dtype_e4m3 ? 7 : 15, one = 1 << digits;
        const int whole = (byte & (one - 1)) + (exponent > 0 ? one : 0);
        return std::ldexp(byte < 128 ? whole : -whole, std::max(exponent, 1) - bias - digits);
    }
    const std::uint32_t bits = std::uint32_t{reinterpret_cast<const std::uint16_t *>(base)[at]} << 16;  // bf16
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

void store(Address base, std::int64_t at, int dtype, Number of) {
    const double value = of.real();
    if (dtype == dtype_c128) {
        reinterpret_cast<Number *>(base)[at] = of;
    } else if (dtype == dtype_c64) {
        reinterpret_cast<std::complex<float> *>(base)[at] = std::complex<float>(of);
    } else if (dtype == dtype_f64) {
        reinterpret_cast<double *>(base)[at] = value;
    } else if (dtype == dtype_f32 || dtype == dtype_tf32) {
        reinterpret_cast<float *>(base)[at] = static_cast<float>(value);
    } else if (dtype == dtype_i32) {
        reinterpret_cast<std::int32_t *>(base)[at] = static_cast<std::int32_t>(static_cast<std::int64_t>(value));
    } else if (dtype == dtype_i8) {
        reinterpret_cast<std::int8_t *>(base)[at] = static_cast<std::int8_t>(value);
    } else {
        const float narrow = static_cast<float>(value);
        std::uint32_t bits;
        std::memcpy(&bits, &narrow, 4);
        reinterpret_cast<std::uint16_t *>(base)[at] =
            static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
    }
}

Number used(Number value, int op) { return op == blas_op_c ? std::conj(value) : value; }

double epilogue_of(std::int64_t activation, double x) {
    if (activation == uncut::relu) return x < 0 ? 0 : x;
    if (activation == uncut::gelu) return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    return x;
}

// An epilogue of cublasLt, whose bias is of the type of C.
struct FakeEpilogue {
    int bits = 0;
    Address bias = 0;

    Number operator()(Number sum, std::int64_t row, int dtype_c) const {
        if ((bits & lt_epilogue_bias) != 0) sum += load(bias, row, dtype_c);
        if (bits == 0) return sum;
        return epilogue_of((bits & lt_epilogue_relu) != 0   ? uncut::relu
                           : (bits & lt_epilogue_gelu) != 0 ? uncut::gelu
                                                            : uncut::no_activation,
                           sum.real());
    }
};

void multiply(int ta, int tb, std::int64_t m, std::int64_t n, std::int64_t k, Number alpha, Address a, std::int64_t lda,
              Address b, std::int64_t ldb, Number beta, Address c, std::int64_t ldc, int dtype, int dtype_c,
              int dtype_b = -1, const FakeEpilogue &epilogue = {}) {
    if (dtype_b < 0) dtype_b = dtype;
    for (std::int64_t j = 0; j < n; ++j)
        for (std::int64_t i = 0; i < m; ++i) {
            Number sum = 0.0;
            for (std::int64_t p = 0; p < k; ++p)
                sum += used(load(a, ta != 0 ? i * lda + p : p * lda + i, dtype), ta) *
                       used(load(b, tb != 0 ? p * ldb + j : j * ldb + p, dtype_b), tb);
            sum = alpha * sum + (beta != 0.0 ? beta * load(c, j * ldc + i, dtype_c) : Number());
            store(c, j * ldc + i, dtype_c, epilogue(sum, i, dtype_c));
        }
}

Code gemm(const char *name, BlasHandle handle, int ta, int tb, std::int64_t m, std::int64_t n, std::int64_t k,
          Number alpha, Address a, std::int64_t lda, Address b, std::int64_t ldb, Number beta, Address c,
          std::int64_t ldc, int dtype, int dtype_c) {
    auto *blas = reinterpret_cast<FakeBlas *>(handle);
    if (!blas->workspace || lda < (ta != 0 ? k : m) || ldb < (tb != 0 ? n : k) || ldc < m) return 7;
    return enqueue(name, reinterpret_cast<Stream>(blas->stream),
                   "gemm " + number(m) + "x" + number(n) + "x" + number(k) + (beta != 0.0 ? " +C" : ""), [=] {
                       ticks += product_ticks[0];
                       multiply(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, dtype, dtype_c);
                       return true;
                   });
}

// The types of a bundle as our own, or -1.
int bundled_type(int type, int compute) {
    switch (type) {
        case type_r_64f: return compute == blas_compute_64f ? dtype_f64 : -1;
        case type_c_64f: return compute == blas_compute_64f ? dtype_c128 : -1;
        case type_c_32f: return compute == blas_compute_32f ? dtype_c64 : -1;
        case type_r_16bf: return compute == blas_compute_32f ? dtype_bf16 : -1;
        case type_r_32f:
            return compute == blas_compute_32f ? dtype_f32 : compute == blas_compute_32f_fast_tf32 ? dtype_tf32 : -1;
        default: return -1;
    }
}

Number factor_of(const void *factor, int dtype) {
    if (dtype == dtype_f64) return *static_cast<const double *>(factor);
    if (dtype == dtype_c128) return *static_cast<const Number *>(factor);
    if (dtype == dtype_c64) return Number(*static_cast<const std::complex<float> *>(factor));
    return *static_cast<const float *>(factor);
}

template <typename Places>
Code bundle(const char *name, BlasHandle handle, int ta, int tb, std::int64_t m, std::int64_t n, std::int64_t k,
            const void *alpha, int type, std::int64_t lda, std::int64_t ldb, const void *beta, int type_c,
            std::int64_t ldc, std::int64_t count, int compute, Places places) {
    auto *blas = reinterpret_cast<FakeBlas *>(handle);
    const int dtype = bundled_type(type, compute);
    if (dtype < 0 || (type_c != type && (dtype != dtype_bf16 || type_c != type_r_32f))) return 15;
    if (!blas->workspace || lda < (ta != 0 ? k : m) || ldb < (tb != 0 ? n : k) || ldc < m || count < 2) return 7;
    const int dtype_c = type_c == type ? dtype : dtype_f32;
    const Number of_a = factor_of(alpha, dtype), of_c = factor_of(beta, dtype);
    return enqueue(name, reinterpret_cast<Stream>(blas->stream),
                   number(count) + " of gemm " + number(m) + "x" + number(n) + "x" + number(k) +
                       (std::strstr(name, "Strided") != nullptr ? " in steps" : ""),
                   [=] {
                       for (std::int64_t i = 0; i < count; ++i) {
                           const auto [a, b, c] = places(i);
                           multiply(ta, tb, m, n, k, of_a, a, lda, b, ldb, of_c, c, ldc, dtype, dtype_c);
                       }
                       return true;
                   });
}

void combine(const CombineArguments &a, std::uint64_t signature) {
    for (std::int64_t j = 0; j < a.cols; ++j)
        for (std::int64_t i = 0; i < a.rows; ++i) {
            const int ending = static_cast<int>(a.ending), written = static_cast<int>(signature & 15);
            if (uncut::is_triangle(ending) && !uncut::is_in_triangle(ending, i - j + a.diagonal)) continue;
            Number sum = 0.0, kept = 0.0;
            int source = 0;
            for (std::uint64_t rest = (signature & (transposing - 1)) >> 4; rest != 0; rest >>= 4, ++source)
                if (const Number factor{a.factor[source], a.imaginary[source]}; factor != 0.0)
                    (uncut::is_epilogue(ending) && source == a.kept ? kept : sum) +=
                        factor * load(a.source[source], j * a.source_ld[source] + i, static_cast<int>(rest & 15) - 1);
            if (uncut::has_real_diagonal(ending) && i - j + a.diagonal == 0) sum.imag(0.0);
            if ((signature & with_epilogue) != 0) {
                const std::int64_t at = ending == uncut::op_epilogue_rows ? i : j;
                if (a.scale != 0) sum *= load(a.scale, at, written);
                if (a.bias != 0) sum += load(a.bias, at, written);
                sum = epilogue_of(a.activation, (sum + kept).real());
            }
            store(a.destination, j * a.ld + i, written, sum);
        }
}

void transpose(const CombineArguments &a, std::int64_t bytes) {
    for (std::int64_t j = 0; j < a.cols; ++j)
        for (std::int64_t i = 0; i < a.rows; ++i)
            std::memcpy(reinterpret_cast<char *>(a.destination) + (j * a.ld + i) * bytes,
                        reinterpret_cast<const char *>(a.source[0]) + (i * a.source_ld[0] + j) * bytes,
                        static_cast<std::size_t>(bytes));
}

// By vectors, in the order in which their elements are known; what is beyond the triangle is not read.
template <typename T>
void solve(const CombineArguments &a) {
    const auto conj = [&](T one) {
        if constexpr (requires { one.imag(); })
            return (a.ending & solves_conjugated) != 0 ? std::conj(one) : one;
        else
            return one;
    };
    const bool right = (a.ending & solves_right) != 0, back = (a.ending & solves_last_first) != 0;
    const auto stored = [&](std::int64_t i, std::int64_t j) {
        if ((a.ending & solves_transposed) != 0) std::swap(i, j);
        return conj(reinterpret_cast<const T *>(a.source[0])[j * a.source_ld[0] + i]);
    };
    T alpha;
    if constexpr (requires { alpha.imag(); })
        alpha = T(Number(a.factor[0], a.imaginary[0]));
    else
        alpha = static_cast<T>(a.factor[0]);
    for (std::int64_t which = 0; which < a.cols; ++which) {
        T *vector = reinterpret_cast<T *>(a.destination) + which * (right ? 1 : a.ld);
        const std::int64_t apart = right ? a.ld : 1;
        for (std::int64_t step = 0; step < a.rows; ++step) {
            const std::int64_t i = back ? a.rows - 1 - step : step;
            T sum = alpha * vector[i * apart];
            for (std::int64_t before = 0; before < step; ++before) {
                const std::int64_t j = back ? a.rows - 1 - before : before;
                sum -= stored(i, j) * vector[j * apart];
            }
            vector[i * apart] = (a.ending & solves_unit) != 0 ? sum : sum / stored(i, i);
        }
    }
}

template <typename T>
Code create(const char *name, T **out, T *fresh) {
    return at_once(name, [&] {
        *out = fresh;
        ++allocations;
    });
}

// Products of one triangle of a matrix: those of the real ones that were tried leave what is beyond it unread.
template <typename T>
Code of_form(const char *name, BlasHandle h, int kind, int side, int upper, int op, int unit, std::int64_t m,
             std::int64_t n, const void *alpha, const void *a, std::int64_t lda, const void *b, std::int64_t ldb,
             const void *beta, void *c, std::int64_t ldc) {
    const T scale = *static_cast<const T *>(alpha), keep = beta == nullptr ? T(0) : *static_cast<const T *>(beta);
    const auto *blas = reinterpret_cast<FakeBlas *>(h);
    return enqueue(name, reinterpret_cast<Stream>(blas->stream), "gemm of form " + number(m) + "x" + number(n), [=] {
        const auto conj = [](T one) {
            if constexpr (requires { one.imag(); })
                return std::conj(one);
            else
                return one;
        };
        const std::int64_t k = side ? n : m;
        const auto stored = [=](std::int64_t i, std::int64_t j) -> T {
            if (i == j && unit) return T(1);
            if (i == j && kind == hermitian) return T(std::real(static_cast<const T *>(a)[j * lda + i]));
            if (i == j || (i > j) != (upper != 0)) return static_cast<const T *>(a)[j * lda + i];
            if (kind >= triangular) return T(0);
            const T other = static_cast<const T *>(a)[i * lda + j];
            return kind == hermitian ? conj(other) : other;
        };
        const auto own = [=](std::int64_t i, std::int64_t j) {
            return op == 0 ? stored(i, j) : op == 1 ? stored(j, i) : conj(stored(j, i));
        };
        const auto *from = static_cast<const T *>(b);
        auto *to = static_cast<T *>(c);
        // Of the other operand and of C, what one row or column has, along k.
        const std::int64_t lines = side ? m : n, apart = side ? 1 : ldb, along = side ? ldb : 1;
        const std::int64_t to_apart = side ? 1 : ldc, to_along = side ? ldc : 1;
        for (std::int64_t line = 0; line < lines; ++line) {
            std::vector<T> found(static_cast<std::size_t>(k));
            for (std::int64_t step = 0; step < k; ++step) {
                T sum(0);
                for (std::int64_t j = 0; j < k; ++j)
                    sum += (side ? own(j, step) : own(step, j)) * from[line * apart + j * along];
                found[static_cast<std::size_t>(step)] = scale * sum;
            }
            for (std::int64_t i = 0; i < k; ++i) {
                T &one = to[line * to_apart + i * to_along];
                one = found[static_cast<std::size_t>(i)] + (keep == T(0) ? T(0) : keep * one);
            }
        }
        return true;
    });
}

}  // namespace

extern "C" {

Code f_cuInit(unsigned) { return success; }
Code f_cuGetErrorName(Code, const char **name) { return *name = "CUDA_ERROR_FAKE", success; }
Code f_cuGetErrorString(Code, const char **text) { return *text = "a planted error", success; }
Code f_cuDeviceGet(Device *device, int ordinal) { return *device = ordinal, success; }
Code f_cuDeviceGetUuid(Uuid *uuid, Device device) {
    // A zero in the middle, as one device in sixteen has.
    for (int i = 0; i < 16; ++i)
        uuid->bytes[i] = static_cast<char>(i == 5 ? 0 : 16 * device + i);
    return success;
}
Code f_cuDeviceGetAttribute(int *value, int attribute, Device) {
    *value = attribute == attribute_can_flush_remote_writes ? can_flush
             : attribute == attribute_max_pitch             ? 2147483647
                                                            : 4;
    return success;
}
Code f_cuDevicePrimaryCtxRetain(Context *context, Device) { return *context = reinterpret_cast<Context>(8), success; }
Code f_cuDevicePrimaryCtxRelease(Device) { return success; }
Code f_cuCtxGetCurrent(Context *context) { return *context = current_context, success; }
Code f_cuCtxSetCurrent(Context context) {
    return at_once("cuCtxSetCurrent", [=] { current_context = context; });
}
Code f_cuStreamCreate(Stream *stream, unsigned flags) {
    return at_once("cuStreamCreate", [&] {
        if (flags != stream_non_blocking) std::abort();
        streams.push_back(new FakeStream{static_cast<int>(streams.size()), {}});
        *stream = reinterpret_cast<Stream>(streams.back());
        ++allocations;
    });
}
Code f_cuStreamCreateWithPriority(Stream *stream, unsigned flags, int priority) {
    if (priority != greatest_priority) std::abort();
    return f_cuStreamCreate(stream, flags);
}
Code f_cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = greatest_priority;
    return success;
}
Code f_cuStreamDestroy(Stream) { return success; }
Code f_cuStreamQuery(Stream stream) {
    const std::lock_guard<std::mutex> guard(lock);
    if (const Code code = entered("cuStreamQuery"); code != success) return code;
    advance();
    return as_stream(stream)->queue.empty() ? success : error_not_ready;
}
Code f_cuStreamSynchronize(Stream stream) {
    while (f_cuStreamQuery(stream) == error_not_ready) {
    }
    return success;
}
Code f_cuStreamWaitEvent(Stream stream, Event event, unsigned) {
    const std::shared_ptr<Record> wanted = reinterpret_cast<FakeEvent *>(event)->latest;
    return enqueue("cuStreamWaitEvent", stream, "wait event", [=] { return wanted == nullptr || wanted->passed; });
}
Code f_cuStreamWriteValue32(Stream stream, Address address, std::uint32_t value, unsigned) {
    return enqueue("cuStreamWriteValue32", stream, "signal " + number(value), [=] {
        word_at(address).store(value, std::memory_order_release);
        return true;
    });
}
Code f_cuStreamBatchMemOp(Stream stream, unsigned count, MemOp *ops, unsigned) {
    std::string what = "batch";
    std::vector<MemOp::Value> todo;
    for (unsigned i = 0; i < count; ++i) {
        const MemOp::Value &op = ops[i].value;
        todo.push_back(op);
        what += op.operation == mem_op_wait_value_32 ? " wait " + number(op.value) + (op.flags != 0 ? "!" : "")
                                                     : " word " + number(op.value);
    }
    auto next = std::make_shared<std::size_t>(0);
    return enqueue("cuStreamBatchMemOp", stream, what, [=] {
        for (; *next < todo.size(); ++*next) {
            const MemOp::Value &op = todo[*next];
            if (op.operation == mem_op_wait_value_32 && !wait_is_over(op)) return false;
            if (op.operation == mem_op_write_value_32)
                word_at(op.address).store(static_cast<std::uint32_t>(op.value), std::memory_order_release);
        }
        return true;
    });
}
Code f_cuEventCreate(Event *event, unsigned flags) {
    auto *fresh = new FakeEvent;
    fresh->timed = (flags & event_disable_timing) == 0;
    return create("cuEventCreate", reinterpret_cast<FakeEvent **>(event), fresh);
}
Code f_cuEventDestroy(Event) { return success; }
Code f_cuEventRecord(Event event, Stream stream) {
    auto *target = reinterpret_cast<FakeEvent *>(event);
    const auto record = std::make_shared<Record>();
    const Code code = enqueue("cuEventRecord", stream, target->timed ? "time" : "record", [=] {
        *record = {true, ticks};
        return true;
    });
    if (code == success) target->latest = record;
    return code;
}
Code f_cuEventQuery(Event event) {
    const std::lock_guard<std::mutex> guard(lock);
    if (const Code code = entered("cuEventQuery"); code != success) return code;
    advance();
    const auto *target = reinterpret_cast<FakeEvent *>(event);
    return target->latest == nullptr || target->latest->passed ? success : error_not_ready;
}
Code f_cuEventSynchronize(Event event) {
    auto *target = reinterpret_cast<FakeEvent *>(event);
    do {
        if (const Code code = at_once("cuEventSynchronize", [] {}); code != success) return code;
    } while (target->latest != nullptr && !target->latest->passed);
    return success;
}
Code f_cuEventElapsedTime(float *milliseconds, Event first, Event second) {
    const auto *from = reinterpret_cast<FakeEvent *>(first), *to = reinterpret_cast<FakeEvent *>(second);
    if (!from->timed || !to->timed || from->latest == nullptr || to->latest == nullptr) return 400;
    if (!from->latest->passed || !to->latest->passed) return error_not_ready;
    return at_once("cuEventElapsedTime", [&] {
        *milliseconds = static_cast<float>(static_cast<std::int64_t>(to->latest->at - from->latest->at));
    });
}
Code f_cuMemAlloc(Address *address, std::size_t bytes) {
    return at_once("cuMemAlloc", [&] {
        *address = reinterpret_cast<Address>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
        ++allocations;
    });
}
Code f_cuMemFree(Address address) { return std::free(reinterpret_cast<void *>(address)), success; }
Code f_cuMemHostAlloc(void **pointer, std::size_t bytes, unsigned) {
    return at_once("cuMemHostAlloc", [&] { *pointer = std::malloc(bytes); });
}
Code f_cuMemFreeHost(void *pointer) { return std::free(pointer), success; }
Code f_cuMemHostGetDevicePointer(Address *address, void *pointer, unsigned) {
    return *address = reinterpret_cast<Address>(pointer), success;
}
Code f_cuMemsetD32Async(Address address, std::uint32_t value, std::size_t count, Stream stream) {
    return enqueue("cuMemsetD32Async", stream, "set", [=] {
        for (std::size_t i = 0; i < count; ++i)
            reinterpret_cast<std::uint32_t *>(address)[i] = value;
        return true;
    });
}
Code f_cuMemcpyAsync(Address to, Address from, std::size_t bytes, Stream stream) {
    return enqueue("cuMemcpyAsync", stream, "copy " + number(bytes), [=] {
        std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
        return true;
    });
}
Code f_cuMemcpy2DAsync(const Memcpy2D *given, Stream stream) {
    const Memcpy2D shape = *given;
    if (shape.width_bytes > shape.src_pitch || shape.width_bytes > shape.dst_pitch) return 1;
    const auto *from = shape.src_memory_type == memory_type_host ? static_cast<const char *>(shape.src_host)
                                                                 : reinterpret_cast<const char *>(shape.src_device);
    auto *to = shape.dst_memory_type == memory_type_host ? static_cast<char *>(shape.dst_host)
                                                         : reinterpret_cast<char *>(shape.dst_device);
    return enqueue("cuMemcpy2DAsync", stream, "copy2d " + number(shape.width_bytes) + "x" + number(shape.height), [=] {
        for (std::size_t i = 0; i < shape.height; ++i)
            std::memmove(to + i * shape.dst_pitch, from + i * shape.src_pitch, shape.width_bytes);
        return true;
    });
}
Code f_cuMemcpy3DAsync(const Memcpy3D *given, Stream stream) {
    const Memcpy3D shape = *given;
    if (shape.width_bytes > shape.src_pitch || shape.width_bytes > shape.dst_pitch) return 1;
    if (shape.height > shape.src_height || shape.height > shape.dst_height || shape.depth == 0) return 1;
    const auto *from = shape.src_memory_type == memory_type_host ? static_cast<const char *>(shape.src_host)
                                                                 : reinterpret_cast<const char *>(shape.src_device);
    auto *to = shape.dst_memory_type == memory_type_host ? static_cast<char *>(shape.dst_host)
                                                         : reinterpret_cast<char *>(shape.dst_device);
    const std::string extents = number(shape.width_bytes) + "x" + number(shape.height) + "x" + number(shape.depth);
    return enqueue("cuMemcpy3DAsync", stream, "copy3d " + extents, [=] {
        for (std::size_t z = shape.depth; z-- > 0;)
            for (std::size_t y = shape.height; y-- > 0;)
                std::memcpy(to + (z * shape.dst_height + y) * shape.dst_pitch,
                            from + (z * shape.src_height + y) * shape.src_pitch, shape.width_bytes);
        return true;
    });
}
Code f_cuPointerGetAttribute(void *value, int attribute, Address address) {
    const Address begin = address >= allocation.first && address < allocation.second ? allocation.first : address;
    return std::memset(value, 0, 8), *static_cast<Address *>(value) = attribute == 11 ? begin : 0, success;
}
Code f_cuLaunchKernel(Function function, unsigned gx, unsigned gy, unsigned, unsigned bx, unsigned by, unsigned,
                      unsigned, Stream stream, void **parameters, void **) {
    if (gx == 0 || gy == 0 || gy > 65535 || bx * by > 1024 || bx == 0 || by == 0) return 1;
    const std::uint64_t signature = reinterpret_cast<std::uint64_t>(function) - (std::uint64_t{1} << 48);
    const CombineArguments arguments = *static_cast<CombineArguments *>(parameters[0]);
    if (signature == packing)
        return enqueue("cuLaunchKernel", stream, "pack " + number(arguments.rows), [=] {
            // In no order, as the real one: the last first.
            for (std::int64_t one = arguments.rows; one-- > 0;) {
                const PackedCopy copy = reinterpret_cast<const PackedCopy *>(arguments.destination)[one];
                for (std::int64_t line = 0; line < copy.lines; ++line)
                    std::memcpy(reinterpret_cast<char *>(copy.to) + line * copy.to_apart,
                                reinterpret_cast<const char *>(copy.from) + line * copy.from_apart,
                                static_cast<std::size_t>(copy.width));
            }
            return true;
        });
    if ((signature & solving) != 0)
        return enqueue("cuLaunchKernel", stream, "solve " + number(arguments.rows) + "x" + number(arguments.cols), [=] {
            switch (signature ^ solving) {
                case dtype_f32: solve<float>(arguments); break;
                case dtype_f64: solve<double>(arguments); break;
                case dtype_c64: solve<std::complex<float>>(arguments); break;
                default: solve<Number>(arguments); break;
            }
            return true;
        });
    const bool transposes = (signature & transposing) != 0;
    const std::string extents = number(arguments.rows) + "x" + number(arguments.cols);
    return enqueue("cuLaunchKernel", stream, (transposes ? "transpose " : "combine ") + extents, [=] {
        if (transposes)
            transpose(arguments, static_cast<std::int64_t>(signature ^ transposing));
        else
            combine(arguments, signature);
        return true;
    });
}

Code cublasCreate_v2(BlasHandle *handle) {
    return create("cublasCreate_v2", reinterpret_cast<FakeBlas **>(handle), new FakeBlas);
}
Code cublasDestroy_v2(BlasHandle) { return success; }
const char *cublasGetStatusName(Code code) { return code == 7 ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS_FAKE"; }
Code cublasSetStream_v2(BlasHandle handle, Stream stream) {
    auto *blas = reinterpret_cast<FakeBlas *>(handle);
    blas->stream = as_stream(stream);
    blas->workspace = false;  // as the real one: the stream resets the workspace
    return success;
}
Code cublasSetWorkspace_v2(BlasHandle handle, void *, std::size_t bytes) {
    reinterpret_cast<FakeBlas *>(handle)->workspace = bytes >= (std::size_t{32} << 20);
    return success;
}
Code cublasSetPointerMode_v2(BlasHandle, int mode) { return mode; }
Code cublasSetMathMode(BlasHandle, int mode) { return mode == blas_exact_reductions ? success : 7; }
Code cublasDgemm_v2_64(BlasHandle h, int ta, int tb, std::int64_t m, std::int64_t n, std::int64_t k,
                       const double *alpha, const double *a, std::int64_t lda, const double *b, std::int64_t ldb,
                       const double *beta, double *c, std::int64_t ldc) {
    return gemm("cublasDgemm_v2_64", h, ta, tb, m, n, k, *alpha, reinterpret_cast<Address>(a), lda,
                reinterpret_cast<Address>(b), ldb, *beta, reinterpret_cast<Address>(c), ldc, dtype_f64, dtype_f64);
}
Code cublasSgemm_v2_64(BlasHandle h, int ta, int tb, std::int64_t m, std::int64_t n, std::int64_t k, const float *alpha,
                       const float *a, std::int64_t lda, const float *b, std::int64_t ldb, const float *beta, float *c,
                       std::int64_t ldc) {
    return gemm("cublasSgemm_v2_64", h, ta, tb, m, n, k, *alpha, reinterpret_cast<Address>(a), lda,
                reinterpret_cast<Address>(b), ldb, *beta, reinterpret_cast<Address>(c), ldc, dtype_f32, dtype_f32);
}
Code cublasGemmEx_64(BlasHandle h, int ta, int tb, std::int64_t m, std::int64_t n, std::int64_t k, const void *alpha,
                     const void *a, int type_a, std::int64_t lda, const void *b, int type_b, std::int64_t ldb,
                     const void *beta, void *c, int type_c, std::int64_t ldc, int compute, int) {
    // Some kernels of the real one read a complex factor as one whole and die where it lies elsewhere.
    const std::size_t size = type_a == type_c_64f ? 16 : type_a == type_c_32f ? 8 : 4;
    if (reinterpret_cast<Address>(alpha) % size != 0 || reinterpret_cast<Address>(beta) % size != 0) return 7;
    if (type_a == type_r_32f) {
        if (type_b != type_r_32f || type_c != type_r_32f || compute != blas_compute_32f_fast_tf32) return 15;
        return gemm("cublasGemmEx_64 in TF32", h, ta, tb, m, n, k, *static_cast<const float *>(alpha),
                    reinterpret_cast<Address>(a), lda, reinterpret_cast<Address>(b), ldb,
                    *static_cast<const float *>(beta), reinterpret_cast<Address>(c), ldc, dtype_f32, dtype_f32);
    }
    if (type_a == type_r_8i) {  // the places that the manual asks for, and what an H200 takes of any length
        const auto places = reinterpret_cast<Address>(a) | reinterpret_cast<Address>(b);
        if (type_b != type_a || type_c != type_r_32i || compute != blas_compute_32i) return 15;
        if (ta != 1 || tb != 0 || (places | static_cast<Address>(lda | ldb | k)) % 4 != 0) return 15;
        return gemm("cublasGemmEx_64", h, ta, tb, m, n, k, *static_cast<const std::int32_t *>(alpha),
                    reinterpret_cast<Address>(a), lda, reinterpret_cast<Address>(b), ldb,
                    *static_cast<const std::int32_t *>(beta), reinterpret_cast<Address>(c), ldc, dtype_i8, dtype_i32);
    }
    if (type_a == type_c_64f && type_b == type_a && type_c == type_a && compute == blas_compute_64f)
        return gemm("cublasGemmEx_64", h, ta, tb, m, n, k, *static_cast<const Number *>(alpha),
                    reinterpret_cast<Address>(a), lda, reinterpret_cast<Address>(b), ldb,
                    *static_cast<const Number *>(beta), reinterpret_cast<Address>(c), ldc, dtype_c128, dtype_c128);
    if (type_a == type_c_32f && type_b == type_a && type_c == type_a && compute == blas_compute_32f)
        return gemm("cublasGemmEx_64", h, ta, tb, m, n, k, Number(*static_cast<const std::complex<float> *>(alpha)),
                    reinterpret_cast<Address>(a), lda, reinterpret_cast<Address>(b), ldb,
                    Number(*static_cast<const std::complex<float> *>(beta)), reinterpret_cast<Address>(c), ldc,
                    dtype_c64, dtype_c64);
    if (type_a != type_r_16bf || type_b != type_r_16bf || compute != blas_compute_32f) return 15;
    return gemm("cublasGemmEx_64", h, ta, tb, m, n, k, *static_cast<const float *>(alpha), reinterpret_cast<Address>(a),
                lda, reinterpret_cast<Address>(b), ldb, *static_cast<const float *>(beta), reinterpret_cast<Address>(c),
                ldc, dtype_bf16, type_c == type_r_32f ? dtype_f32 : dtype_bf16);
}

#define FAKE_SYMM(NAME, T, KIND)                                                                                       \
    Code NAME(BlasHandle h, int side, int upper, std::int64_t m, std::int64_t n, const void *alpha, const void *a,     \
              std::int64_t lda, const void *b, std::int64_t ldb, const void *beta, void *c, std::int64_t ldc) {        \
        return of_form<T>(#NAME, h, KIND, side, upper, 0, 0, m, n, alpha, a, lda, b, ldb, beta, c, ldc);               \
    }
#define FAKE_FORMS(P, T)                                                                                               \
    FAKE_SYMM(cublas##P##symm_v2_64, T, symmetric)                                                                     \
    Code cublas##P##trmm_v2_64(BlasHandle h, int side, int upper, int op, int unit, std::int64_t m, std::int64_t n,    \
                               const void *alpha, const void *a, std::int64_t lda, const void *b, std::int64_t ldb,    \
                               void *c, std::int64_t ldc) {                                                            \
        return of_form<T>("trmm", h, triangular, side, upper, op, unit, m, n, alpha, a, lda, b, ldb, nullptr, c, ldc); \
    }
FAKE_FORMS(S, float)
FAKE_FORMS(D, double)
FAKE_FORMS(C, std::complex<float>)
FAKE_FORMS(Z, std::complex<double>)
FAKE_SYMM(cublasChemm_v2_64, std::complex<float>, hermitian)
FAKE_SYMM(cublasZhemm_v2_64, std::complex<double>, hermitian)

Code cublasGemmStridedBatchedEx_64(BlasHandle h, int ta, int tb, std::int64_t m, std::int64_t n, std::int64_t k,
                                   const void *alpha, const void *a, int type_a, std::int64_t lda, long long step_a,
                                   const void *b, int, std::int64_t ldb, long long step_b, const void *beta, void *c,
                                   int type_c, std::int64_t ldc, long long step_c, std::int64_t count, int compute,
                                   int) {
    const auto bytes = [](int type) {
        return type == type_c_64f ? 16 : type == type_r_64f || type == type_c_32f ? 8 : type == type_r_32f ? 4 : 2;
    };
    const auto at = [](const void *first, std::int64_t step, std::int64_t i) {
        return reinterpret_cast<Address>(first) + static_cast<Address>(i * step);
    };
    return bundle("cublasGemmStridedBatchedEx_64", h, ta, tb, m, n, k, alpha, type_a, lda, ldb, beta, type_c, ldc,
                  count, compute, [=, item = bytes(type_a), item_c = bytes(type_c)](std::int64_t i) {
                      return std::array{at(a, step_a * item, i), at(b, step_b * item, i), at(c, step_c * item_c, i)};
                  });
}
Code cublasGemmBatchedEx_64(BlasHandle h, int ta, int tb, std::int64_t m, std::int64_t n, std::int64_t k,
                            const void *alpha, const void *const *a, int type_a, std::int64_t lda, const void *const *b,
                            int, std::int64_t ldb, const void *beta, void *const *c, int type_c, std::int64_t ldc,
                            std::int64_t count, int compute, int) {
    return bundle("cublasGemmBatchedEx_64", h, ta, tb, m, n, k, alpha, type_a, lda, ldb, beta, type_c, ldc, count,
                  compute, [=](std::int64_t i) {
                      return std::array{reinterpret_cast<Address>(a[i]), reinterpret_cast<Address>(b[i]),
                                        reinterpret_cast<Address>(c[i])};
                  });
}

// cublasLt proposes options 7, 4, 7 once more, and 1; of a k of 1 it supports nothing. A product
// checks what was said of types, shapes, alignments and reductions.
struct FakeProduct {
    int compute;
    int ops[2] = {0, 0};
    FakeEpilogue epilogue;
};
struct FakeLayout {
    int type;
    std::uint64_t rows, cols;
    std::int64_t ld;
};
struct FakePreference {
    std::size_t workspace_bytes = 0;
    std::uint32_t alignment[4] = {0, 0, 0, 0};  // of A, B, C, D
    std::uint32_t reductions = 0;
};
Code cublasLtMatmulDescCreate(LtProduct *made, int compute, int scale) {
    if ((compute != blas_compute_32f && compute != blas_compute_32f_fast_tf32) || scale != type_r_32f) return 15;
    *made = reinterpret_cast<LtProduct>(new FakeProduct{compute});
    return ++lt_objects, success;
}
Code cublasLtMatmulDescDestroy(LtProduct product) {
    delete reinterpret_cast<FakeProduct *>(product);
    return --lt_objects, success;
}
Code cublasLtMatmulDescSetAttribute(LtProduct product, int attribute, const void *value, std::size_t size) {
    auto *known = reinterpret_cast<FakeProduct *>(product);
    const auto set = [&](void *field, std::size_t its) {
        if (size != its) return 7;
        std::memcpy(field, value, size);
        return 0;
    };
    if (attribute == lt_product_epilogue) return set(&known->epilogue.bits, sizeof(int));
    if (attribute == lt_product_bias) return set(&known->epilogue.bias, sizeof(Address));
    if (attribute != lt_product_op_a && attribute != lt_product_op_b) return 7;
    return set(&known->ops[attribute - lt_product_op_a], sizeof(int));
}
Code cublasLtMatrixLayoutCreate(LtLayout *made, int type, std::uint64_t rows, std::uint64_t cols, std::int64_t ld) {
    if (ld < static_cast<std::int64_t>(rows)) return 7;
    *made = reinterpret_cast<LtLayout>(new FakeLayout{type, rows, cols, ld});
    return ++lt_objects, success;
}
Code cublasLtMatrixLayoutDestroy(LtLayout layout) {
    delete reinterpret_cast<FakeLayout *>(layout);
    return --lt_objects, success;
}
Code cublasLtMatmulPreferenceCreate(LtPreference *made) {
    return at_once("cublasLtMatmulPreferenceCreate", [&] {
        *made = reinterpret_cast<LtPreference>(new FakePreference);
        ++lt_objects;
    });
}
Code cublasLtMatmulPreferenceDestroy(LtPreference preference) {
    delete reinterpret_cast<FakePreference *>(preference);
    return --lt_objects, success;
}
Code cublasLtMatmulPreferenceSetAttribute(LtPreference preference, int attribute, const void *value, std::size_t size) {
    auto *wishes = reinterpret_cast<FakePreference *>(preference);
    if (attribute == lt_wish_workspace_bytes) return std::memcpy(&wishes->workspace_bytes, value, size), success;
    if (attribute == lt_wish_reductions && size == sizeof wishes->reductions)
        return std::memcpy(&wishes->reductions, value, size), success;
    if (attribute < lt_wish_alignment_a || attribute > lt_wish_alignment_d || size != sizeof(std::uint32_t)) return 7;
    return std::memcpy(&wishes->alignment[attribute - lt_wish_alignment_a], value, size), success;
}
Code cublasLtMatmulAlgoGetHeuristic(BlasHandle, LtProduct product, LtLayout a, LtLayout, LtLayout, LtLayout,
                                    LtPreference preference, int most, LtProposal *found, int *count) {
    if (const Code code = at_once("cublasLtMatmulAlgoGetHeuristic", [] {}); code != success) return code;
    const auto *wishes = reinterpret_cast<FakePreference *>(preference);
    const auto *left = reinterpret_cast<FakeLayout *>(a);
    const bool turned = reinterpret_cast<FakeProduct *>(product)->ops[0] != 0;
    if ((turned ? left->rows : left->cols) == 1) return *count = 0, 15;
    *count = 0;
    for (const std::uint64_t option : {7, 4, 7, 1}) {
        if (*count == most) break;
        LtProposal &one = found[(*count)++];
        one = {};
        one.algorithm = {{66, option, wishes->alignment[0], wishes->alignment[1], wishes->alignment[2],
                          wishes->alignment[3], wishes->workspace_bytes, wishes->reductions}};
    }
    return success;
}
Code cublasLtMatmul(BlasHandle handle, LtProduct product, const void *alpha, const void *a, LtLayout layout_a,
                    const void *b, LtLayout layout_b, const void *beta, const void *c, LtLayout layout_c, void *d,
                    LtLayout layout_d, const LtAlgorithm *algorithm, void *workspace, std::size_t bytes,
                    Stream stream) {
    const auto *left = reinterpret_cast<FakeLayout *>(layout_a), *right = reinterpret_cast<FakeLayout *>(layout_b),
               *result = reinterpret_cast<FakeLayout *>(layout_c);
    const int *ops = reinterpret_cast<FakeProduct *>(product)->ops;
    const bool tf32 = reinterpret_cast<FakeProduct *>(product)->compute == blas_compute_32f_fast_tf32;
    const auto narrow_type = [](int type) {
        return type == type_r_8f_e4m3 ? dtype_e4m3 : type == type_r_8f_e5m2 ? dtype_e5m2 : dtype_f64;
    };
    const bool float8 = narrow_type(left->type) != dtype_f64;
    const int type = float8 ? left->type : left->type == type_r_32f ? type_r_32f : type_r_16bf;
    const bool wide = type == type_r_32f;  // f32 or tf32
    const auto m = ops[0] != 0 ? left->cols : left->rows, k = ops[0] != 0 ? left->rows : left->cols;
    const auto n = ops[1] != 0 ? right->rows : right->cols, k_of_b = ops[1] != 0 ? right->cols : right->rows;
    const bool narrow = result->type == type_r_16bf;
    if (left->type != type || (tf32 && !wide)) return 15;
    if (float8 ? narrow_type(right->type) == dtype_f64 : right->type != type) return 15;
    const auto in_16_bytes = [](auto extent) { return extent % 16 == 0; };
    if (float8 && (left->type == type_r_8f_e5m2 && right->type == left->type)) return 15;
    if (float8 && !(ops[0] == blas_op_t && ops[1] == blas_op_n && in_16_bytes(m) && in_16_bytes(k) &&
                    in_16_bytes(left->ld) && in_16_bytes(right->ld)))
        return 15;
    if (result->type != type_r_32f && (wide || !narrow)) return 15;
    if (algorithm->data[7] != (narrow ? lt_reduction_in_compute_type : lt_any_reduction)) return 7;
    if (k != k_of_b || m != result->rows || n != result->cols || c != d || layout_c != layout_d) return 7;
    if (workspace == nullptr || bytes != algorithm->data[6] || bytes < (std::size_t{32} << 20)) return 7;
    const Address places[] = {reinterpret_cast<Address>(a), reinterpret_cast<Address>(b), reinterpret_cast<Address>(c),
                              reinterpret_cast<Address>(d)};
    for (int i = 0; i < 4; ++i)
        if (algorithm->data[2 + i] == 0 || places[i] % algorithm->data[2 + i] != 0) return 7;
    const FakeEpilogue epilogue = reinterpret_cast<FakeProduct *>(product)->epilogue;
    if (epilogue.bits != 0 && (type != type_r_16bf || !narrow)) return 15;
    if ((epilogue.bits & lt_epilogue_bias) != 0 && (epilogue.bias == 0 || epilogue.bias % algorithm->data[5] != 0))
        return 7;
    if (reinterpret_cast<FakeBlas *>(handle)->stream != as_stream(stream)) return 7;
    return enqueue("cublasLtMatmul", stream,
                   "option " + number(algorithm->data[1]) + " " + number(m) + "x" + number(n) + "x" + number(k) +
                       (*static_cast<const float *>(beta) != 0.0F ? " +C" : "") +
                       (epilogue.bits != 0 ? " epilogue " + number(epilogue.bits) : ""),
                   [=, turned_a = ops[0], turned_b = ops[1], alpha = *static_cast<const float *>(alpha),
                    beta = *static_cast<const float *>(beta), lda = left->ld, ldb = right->ld, ldc = result->ld,
                    option = algorithm->data[1]] {
                       ticks += product_ticks[option];
                       multiply(turned_a, turned_b, static_cast<std::int64_t>(m), static_cast<std::int64_t>(n),
                                static_cast<std::int64_t>(k), alpha, places[0], lda, places[1], ldb, beta, places[2],
                                ldc,
                                float8 ? narrow_type(left->type)
                                : wide ? dtype_f32
                                       : dtype_bf16,
                                narrow ? dtype_bf16 : dtype_f32, float8 ? narrow_type(right->type) : -1, epilogue);
                       return true;
                   });
}

Code cuGetProcAddress_v2(const char *symbol, void **function, int version, std::uint64_t, int *status) {
    *function = nullptr;
    *status = 1;
    if (version != stated_version) return 1;
#define FAKE_ENTRY(name, ...)                                                                                          \
    if (std::strcmp(symbol, #name) == 0) *function = reinterpret_cast<void *>(&f_##name);
    UNCUT_DRIVER_FUNCTIONS(FAKE_ENTRY)
#undef FAKE_ENTRY
    if (*function == nullptr) return 500;
    *status = 0;
    return success;
}

// -- what tests ask and set -------------------------------------------------------------------------

// Fail the calls number `from` to `to` (counted from 1, from now on) of a function with `code`.
void fake_fail(const char *name, int from, int to, Code code) {
    const std::lock_guard<std::mutex> guard(lock);
    calls.clear();
    failing_call = name;
    failing_from = from;
    failing_to = to;
    failing_code = code;
}
void fake_can_flush(int value) { can_flush = value; }
void fake_allocation(Address first, Address last) { allocation = {first, last}; }
int fake_allocations() { return allocations; }
int fake_lt_objects() { return lt_objects; }
void fake_product_ticks(int option, std::uint64_t count) { product_ticks[option] = count; }
std::size_t fake_most_queued() { return most_queued; }
// Forget streams' work, the log and the counts.
void fake_reset() {
    const std::lock_guard<std::mutex> guard(lock);
    for (FakeStream *stream : streams)
        stream->queue.clear();
    issued.clear();
    most_queued = 0;
    failing_call.clear();
    can_flush = 0;
}
// Write the log, one line per operation, into `text`; returns the bytes it needs.
std::size_t fake_log(char *text, std::size_t capacity) {
    const std::lock_guard<std::mutex> guard(lock);
    std::string all;
    for (const std::string &line : issued)
        all += line + "\n";
    if (capacity > all.size()) std::memcpy(text, all.c_str(), all.size() + 1);
    return all.size() + 1;
}

}  // extern "C"
