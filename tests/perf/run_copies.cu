// Ways to copy runs of a matrix that is dealt in turn into every other place of another one: a copy for each run, one
// in three dimensions for all, and as many bytes without gaps. To the other GPU, then within one. One process.
//
//   nvcc -O2 -std=c++17 -arch=sm_90 -o run_copies tests/perf/run_copies.cu -lcuda && ./run_copies
#include <cuda_runtime.h>

#include <functional>
#include <string>

#include "streams.cuh"

constexpr size_t lines = 8192, columns = 4096;  // of what is copied
static char *source, *target;
static cudaStream_t stream;

// Width in bytes, lines and layers, and what is from one to the next at both ends.
static void copy(size_t to, size_t to_pitch, size_t to_height, size_t from, size_t from_pitch, size_t from_height,
                 size_t width, size_t height, size_t depth) {
    CUDA_MEMCPY3D all{};
    all.srcMemoryType = all.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    all.srcDevice = reinterpret_cast<CUdeviceptr>(source + from);
    all.dstDevice = reinterpret_cast<CUdeviceptr>(target + to);
    all.srcPitch = from_pitch, all.srcHeight = from_height;
    all.dstPitch = to_pitch, all.dstHeight = to_height;
    all.WidthInBytes = width, all.Height = height, all.Depth = depth;
    CHECK(cuMemcpy3DAsync(&all, stream));
}

static void show(const std::string &name, size_t bytes, const std::function<void()> &issue) {
    std::vector<double> all, issued;
    for (int round = 0; round < 12; ++round) {
        CHECK(cudaStreamSynchronize(stream));
        const auto begun = Clock::now();
        issue();
        const double now = seconds_since(begun);
        CHECK(cudaStreamSynchronize(stream));
        if (round < 2) continue;
        issued.push_back(now);
        all.push_back(seconds_since(begun));
    }
    std::sort(all.begin(), all.end());
    std::sort(issued.begin(), issued.end());
    const double median = all[all.size() / 2];
    std::printf("  %-44s %8.1f us, issued in %7.1f, %6.1f GB/s\n", name.c_str(), 1e6 * median,
                1e6 * issued[issued.size() / 2], 1e-9 * static_cast<double>(bytes) / median);
}

static void measure(size_t item, size_t run) {
    const size_t ld = lines * item, runs = columns / run, bytes = ld * columns;
    std::printf(" elements of %zu bytes, %zu runs of %zu\n", item, runs, run);
    show("whole columns, no gaps", bytes, [&] { copy(0, bytes, 1, 0, bytes, 1, bytes, 1, 1); });
    show("whole columns, a copy for each run", bytes, [&] {
        for (size_t r = 0; r < runs; ++r)
            copy(2 * r * run * ld, run * ld, 1, r * run * ld, run * ld, 1, run * ld, 1, 1);
    });
    show("whole columns, one copy", bytes, [&] { copy(0, 2 * run * ld, runs, 0, run * ld, runs, run * ld, runs, 1); });
    for (const size_t parts : {size_t{4}, size_t{8}}) {
        const size_t width = ld / parts;
        const std::string name = "rows in " + std::to_string(parts) + ", ";
        show(name + "no gaps", bytes, [&] {
            for (size_t p = 0; p < parts; ++p)
                copy(p * width, ld, columns, p * width, ld, columns, width, columns, 1);
        });
        show(name + "a copy for each run", bytes, [&] {
            for (size_t p = 0; p < parts; ++p)
                for (size_t r = 0; r < runs; ++r)
                    copy(2 * r * run * ld + p * width, ld, run, r * run * ld + p * width, ld, run, width, run, 1);
        });
        show(name + "one copy each", bytes, [&] {
            for (size_t p = 0; p < parts; ++p)
                copy(p * width, ld, 2 * run, p * width, ld, run, width, run, runs);
        });
    }
    // Here the runs are rows: 4096 of them, in 8192 columns.
    const size_t width = run * item, from_ld = columns * item, to_ld = 2 * from_ld;
    show("runs of rows, a copy for each run", bytes, [&] {
        for (size_t r = 0; r < runs; ++r)
            copy(2 * r * width, to_ld, lines, r * width, from_ld, lines, width, lines, 1);
    });
    show("runs of rows, one copy", bytes,
         [&] { copy(0, 2 * width, to_ld / (2 * width), 0, width, runs, width, runs, lines); });
}

int main() {
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    CHECK(cudaMalloc(&source, size_t{1} << 29));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int other = count > 1 ? 1 : 0; other >= 0; --other) {
        if (other != 0) CHECK(cudaDeviceEnablePeerAccess(other, 0));
        CHECK(cudaSetDevice(other));
        CHECK(cudaMalloc(&target, size_t{1} << 30));
        CHECK(cudaSetDevice(0));
        std::printf("%s\n", other != 0 ? "to the other device" : "within the device");
        for (const size_t item : {size_t{2}, size_t{8}})
            for (const size_t run : {size_t{64}, size_t{256}})
                measure(item, run);
    }
}
