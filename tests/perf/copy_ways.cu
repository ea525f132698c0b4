// Ways to get many pieces from one GPU to its peers: copy engines one by one, in batches, and a kernel that pushes a
// whole list of pieces and writes a flag behind each. Alone and beside a product on the sending GPU. One process.
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -o copy_ways tests/perf/copy_ways.cu -lcuda -lcublas && ./copy_ways
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "streams.cuh"

constexpr int max_gpus = 4, max_pieces = 512;
constexpr size_t arena = size_t{512} << 20;

struct Piece {
    const uint4 *source;
    uint4 *target;
    size_t count;  // of 16 bytes
    unsigned *flag;
};

static char *memory[max_gpus];
static unsigned *flags[max_gpus], *counters;
static volatile unsigned *gate;
static CUdeviceptr gate_address;
static unsigned epoch = 0;
static int num_gpus;
static Piece *pieces;  // on GPU 0
static cudaStream_t streams[3], waiting[max_gpus];

template <int unroll>
__global__ void __launch_bounds__(512) push(const Piece *list, int count, unsigned *arrived, unsigned value) {
    const size_t lanes = size_t{gridDim.x} * blockDim.x, me = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (int i = 0; i < count; ++i) {
        const Piece piece = list[i];
        size_t at = me;
        for (; at + (unroll - 1) * lanes < piece.count; at += unroll * lanes) {
            uint4 held[unroll];
#pragma unroll
            for (int u = 0; u < unroll; ++u)
                held[u] = __ldcs(piece.source + at + u * lanes);
#pragma unroll
            for (int u = 0; u < unroll; ++u)
                __stcs(piece.target + at + u * lanes, held[u]);
        }
        for (; at < piece.count; at += lanes)
            piece.target[at] = piece.source[at];
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence_system();
            if (atomicAdd(arrived + i, 1) == gridDim.x - 1) {
                arrived[i] = 0;
                asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(piece.flag), "r"(value) : "memory");
            }
        }
    }
}

static void hold(cudaStream_t stream) {
    CHECK(cuStreamWaitValue32(stream, gate_address, epoch, CU_STREAM_WAIT_VALUE_GEQ));
}

static double open_and_finish(const std::function<void()> &finish) {
    const auto begun = Clock::now();
    *gate = epoch;
    finish();
    return seconds_since(begun);
}

static void finish_all() {
    for (auto one : streams)
        CHECK(cudaStreamSynchronize(one));
}

// GB/s out of GPU 0 of `issue`, which moves pieces of so many bytes, the whole of them 192 MiB.
static void moved(const std::string &name, const std::function<void(size_t, int)> &issue) {
    std::printf("%-58s", name.c_str());
    for (double megabytes : {0.5, 1.0, 2.0, 4.0, 8.0, 16.0}) {
        const size_t bytes = static_cast<size_t>(megabytes * (1 << 20));
        const int count = static_cast<int>(std::min<size_t>(max_pieces, (size_t{192} << 20) / bytes) / 3 * 3);
        std::vector<double> times;
        for (int r = 0; r < 7; ++r) {
            ++epoch;
            issue(bytes, count);
            times.push_back(open_and_finish(finish_all));
        }
        std::printf(" %6.1f", static_cast<double>(bytes) * count / median(times) / 1e9);
    }
    std::printf("\n");
}

static void make_list(size_t bytes, int count) {
    std::vector<Piece> list(count);
    for (int i = 0; i < count; ++i) {
        const int peer = i % (num_gpus - 1) + 1;
        const size_t at = (i * bytes) % (arena / 2);
        list[i] = {reinterpret_cast<const uint4 *>(memory[0] + at), reinterpret_cast<uint4 *>(memory[peer] + at),
                   bytes / 16, flags[peer] + i};
    }
    CHECK(cudaMemcpy(pieces, list.data(), count * sizeof(Piece), cudaMemcpyHostToDevice));
}

template <int unroll>
static void launch(int blocks, int count, cudaStream_t stream) {
    push<unroll><<<blocks, 512, 0, stream>>>(pieces, count, counters, epoch);
    CHECK(cudaGetLastError());
}

int main() {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    CHECK(cuInit(0));
    CHECK(cudaGetDeviceCount(&num_gpus));
    num_gpus = std::min(num_gpus, max_gpus);
    for (int g = 0; g < num_gpus; ++g) {
        CHECK(cudaSetDevice(g));
        CHECK(cudaMalloc(&memory[g], arena));
        CHECK(cudaMemset(memory[g], 0x3f, arena));
        CHECK(cudaMalloc(&flags[g], 4 * max_pieces));
        CHECK(cudaMemset(flags[g], 0, 4 * max_pieces));
        CHECK(cudaStreamCreateWithFlags(&waiting[g], cudaStreamNonBlocking));
        for (int other = 0; other < num_gpus; ++other)
            if (other != g) CHECK(cudaDeviceEnablePeerAccess(other, 0));
    }
    CHECK(cudaSetDevice(0));
    CHECK(cudaMalloc(&counters, 4 * max_pieces));
    CHECK(cudaMemset(counters, 0, 4 * max_pieces));
    CHECK(cudaMalloc(&pieces, sizeof(Piece) * max_pieces));
    for (int i = 0; i < 3; ++i)
        CHECK(cudaStreamCreateWithPriority(&streams[i], cudaStreamNonBlocking, i == 0 ? -5 : 0));
    void *host;
    CHECK(cuMemHostAlloc(&host, 1 << 16, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE));
    CHECK(cuMemHostGetDevicePointer(&gate_address, host, 0));
    gate = static_cast<volatile unsigned *>(host);
    volatile unsigned *words = gate + 1024;
    CUdeviceptr words_address = gate_address + 4096;
    *gate = 0;

    // Loaded before anything waits: loading a kernel may wait for the device.
    make_list(4096, 3);
    launch<8>(2, 3, streams[0]);
    launch<16>(2, 3, streams[0]);
    CHECK(cudaDeviceSynchronize());

    std::printf("%-58s %6.1f %6.1f %6.1f %6.1f %6.1f %6.1f\n", "GB/s out of GPU 0 to its peers in turn, pieces of MiB",
                0.5, 1.0, 2.0, 4.0, 8.0, 16.0);
    auto engine = [&](bool flag) {
        return [=](size_t bytes, int count) {
            hold(streams[0]);
            for (int i = 0; i < count; ++i) {
                const int peer = i % (num_gpus - 1) + 1;
                const size_t at = (i * bytes) % (arena / 2);
                CHECK(cudaMemcpyAsync(memory[peer] + at, memory[0] + at, bytes, cudaMemcpyDefault, streams[0]));
                if (flag)
                    CHECK(cuStreamWriteValue32(streams[0], reinterpret_cast<CUdeviceptr>(flags[peer] + i), epoch, 0));
            }
        };
    };
    moved("copies one by one", engine(false));
    moved("copies one by one, flags", engine(true));
    for (int group : {3, 6, 12})
        for (unsigned hint : {0U, 1U})
            moved("batches of " + std::to_string(group) + (hint ? ", overlap with compute" : ""),
                  [=](size_t bytes, int count) {
                      hold(streams[0]);
                      for (int first = 0; first < count; first += group) {
                          std::vector<CUdeviceptr> to, from;
                          std::vector<size_t> sizes;
                          for (int i = first; i < std::min(count, first + group); ++i) {
                              const size_t at = (i * bytes) % (arena / 2);
                              to.push_back(reinterpret_cast<CUdeviceptr>(memory[i % (num_gpus - 1) + 1] + at));
                              from.push_back(reinterpret_cast<CUdeviceptr>(memory[0] + at));
                              sizes.push_back(bytes);
                          }
                          CUmemcpyAttributes attributes{};
                          attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
                          attributes.flags = hint;
                          size_t index = 0;
                          CHECK(cuMemcpyBatchAsync(to.data(), from.data(), sizes.data(), to.size(), &attributes, &index,
                                                   1, streams[0]));
                      }
                  });
    for (int blocks : {2, 4, 6, 8, 12, 16, 24, 32})
        moved("kernel of " + std::to_string(blocks) + " blocks, 8 in flight", [=](size_t bytes, int count) {
            make_list(bytes, count);
            hold(streams[0]);
            launch<8>(blocks, count, streams[0]);
        });
    for (int blocks : {4, 8, 16})
        moved("kernel of " + std::to_string(blocks) + " blocks, 16 in flight", [=](size_t bytes, int count) {
            make_list(bytes, count);
            hold(streams[0]);
            launch<16>(blocks, count, streams[0]);
        });

    // When flags behind pieces of 4 MiB arrive at a stream of the peer.
    for (int blocks : {0, 8, 16}) {
        const int count = 24;
        const size_t bytes = size_t{4} << 20;
        std::vector<std::vector<double>> seen;
        for (int r = 0; r < 7; ++r) {
            ++epoch;
            for (int i = 0; i < count; ++i)
                words[i] = 0;
            if (blocks) {
                make_list(bytes, count);
                hold(streams[0]);
                if (blocks == 8) launch<8>(8, count, streams[0]);
                if (blocks == 16) launch<8>(16, count, streams[0]);
            } else {
                engine(true)(bytes, count);
            }
            for (int i = 0; i < count; ++i) {
                const int peer = i % (num_gpus - 1) + 1;
                CHECK(cudaSetDevice(peer));
                CHECK(cuStreamWaitValue32(waiting[peer], reinterpret_cast<CUdeviceptr>(flags[peer] + i), epoch,
                                          CU_STREAM_WAIT_VALUE_GEQ));
                CHECK(cuStreamWriteValue32(waiting[peer], words_address + 4 * i, 1, 0));
            }
            CHECK(cudaSetDevice(0));
            const auto begun = Clock::now();
            *gate = epoch;
            seen.push_back(arrivals(words, count, begun));
            finish_all();
        }
        std::printf("flags after 4 MiB each, us, %s:\n  ", blocks ? (std::to_string(blocks) + " blocks").c_str() : "copies");
        print_medians(seen);
    }

    // Beside a product of GPU 0: how long both take, the copies begun first or 100 us later.
    cublasHandle_t blas;
    CHECK(cublasCreate(&blas));
    CHECK(cublasSetStream(blas, streams[1]));
    const double alpha = 1.2345, beta = 1.1154;
    auto product = [&](int m, int n, int k) {
        auto *base = reinterpret_cast<double *>(memory[0]);
        CHECK(cublasDgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &alpha, base, m, base + (8 << 20), k, &beta,
                          base + (40 << 20), m));
    };
    cudaEvent_t start, end[2];
    CHECK(cudaEventCreate(&start));
    for (auto &one : end)
        CHECK(cudaEventCreate(&one));
    product(2048, 2048, 4096);
    std::printf("us of a product 2048x2048x4096 in f64 and of 48 copies of 4 MiB beside it, medians\n");
    for (int way = -1; way <= 5; ++way) {
        const int blocks[] = {0, 4, 8, 12, 16, 24};
        for (bool late : {false, true}) {
            if (way < 0 && late) continue;
            std::vector<float> products, copies;
            for (int r = 0; r < 7; ++r) {
                ++epoch;
                make_list(size_t{4} << 20, 48);
                CHECK(cudaDeviceSynchronize());
                hold(streams[1]);
                CHECK(cudaEventRecord(start, streams[1]));
                CHECK(cudaStreamWaitEvent(streams[0], start, 0));
                auto copy = [&] {
                    if (way == 0)
                        for (int i = 0; i < 48; ++i) {
                            const size_t at = i * (size_t{4} << 20);
                            CHECK(cudaMemcpyAsync(memory[i % (num_gpus - 1) + 1] + at, memory[0] + at, size_t{4} << 20,
                                                  cudaMemcpyDefault, streams[0]));
                        }
                    if (way > 0) launch<8>(blocks[way], 48, streams[0]);
                };
                if (!late) copy();
                // Late copies wait for a shorter product before the one that they are beside.
                if (late) {
                    product(2048, 2048, 512);
                    cudaEvent_t middle = end[0];
                    CHECK(cudaEventRecord(middle, streams[1]));
                    CHECK(cudaStreamWaitEvent(streams[0], middle, 0));
                    product(2048, 2048, 4096);
                    copy();
                } else {
                    product(2048, 2048, 4096);
                }
                CHECK(cudaEventRecord(end[1], streams[1]));
                cudaEvent_t copied;
                CHECK(cudaEventCreate(&copied));
                CHECK(cudaEventRecord(copied, streams[0]));
                *gate = epoch;
                CHECK(cudaDeviceSynchronize());
                float one, other;
                CHECK(cudaEventElapsedTime(&one, start, end[1]));
                CHECK(cudaEventElapsedTime(&other, start, copied));
                products.push_back(1e3F * one), copies.push_back(1e3F * other);
                CHECK(cudaEventDestroy(copied));
            }
            std::sort(products.begin(), products.end()), std::sort(copies.begin(), copies.end());
            std::printf("  %-28s %s: %7.0f %7.0f\n",
                        way < 0 ? "no copies" : way == 0 ? "copy engine" : (std::to_string(blocks[way]) + " blocks").c_str(),
                        late ? "after a product" : "first", products[3], copies[3]);
        }
    }
    return 0;
}
