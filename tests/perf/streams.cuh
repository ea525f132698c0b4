// What the programs of this folder share: checked calls and the two stream memory operations.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

using Clock = std::chrono::steady_clock;

inline void check(int code, const char *what) {
    if (code == 0) return;
    std::fprintf(stderr, "%s: %d\n", what, code);
    std::exit(1);
}
#define CHECK(call) check(static_cast<int>(call), #call)

inline double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

inline CUstreamBatchMemOpParams wait_op(CUdeviceptr address, unsigned value) {
    CUstreamBatchMemOpParams op{};
    op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    op.waitValue.address = address;
    op.waitValue.value = value;
    op.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    return op;
}

inline CUstreamBatchMemOpParams write_op(CUdeviceptr address, unsigned value) {
    CUstreamBatchMemOpParams op{};
    op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    op.writeValue.address = address;
    op.writeValue.value = value;
    return op;
}

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// Seconds from `begun` until each of `count` host words, which the device writes, is no longer 0.
inline std::vector<double> arrivals(const volatile unsigned *words, int count, Clock::time_point begun) {
    std::vector<double> at(count, 0.0);
    for (int left = count; left > 0;)
        for (int i = 0; i < count; ++i)
            if (at[i] == 0.0 && words[i] != 0) {
                at[i] = seconds_since(begun);
                --left;
            }
    return at;
}

// Prints the median of each of several repeated times, in microseconds.
inline void print_medians(const std::vector<std::vector<double>> &seen) {
    for (std::size_t i = 0; i < seen.front().size(); ++i) {
        std::vector<double> times;
        for (const auto &one : seen)
            times.push_back(one[i]);
        std::printf(" %5.0f", 1e6 * median(times));
    }
    std::printf("\n");
}
