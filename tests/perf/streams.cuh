// What the programs of this folder share: checked calls and the two stream memory operations.
#pragma once

#include <cuda.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

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
