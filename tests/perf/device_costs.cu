// What operations take on the device, once they are issued: in their streams, behind a gate that opens when everything
// is queued. One process, up to four GPUs that see each other.
//
//   nvcc -O2 -std=c++17 -o device_costs tests/perf/device_costs.cu -lcuda -lcublas && ./device_costs
#include <cublas_v2.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "streams.cuh"

constexpr int pieces = 64, max_gpus = 4, streams_each = 8;
constexpr size_t arena = size_t{512} << 20;

struct Gpu {
    CUcontext context;
    CUstream streams[streams_each];
    CUdeviceptr memory, flags;
    CUevent start, end;
};
static Gpu gpus[max_gpus];
static int num_gpus;
static volatile unsigned *gate_word, *words;
static CUdeviceptr gate_address, words_address;
static unsigned epoch = 0;
static cublasHandle_t blas;

static void use(int gpu) { CHECK(cuCtxSetCurrent(gpus[gpu].context)); }
static CUstream stream(int gpu, int number = 0) { return gpus[gpu].streams[number]; }

static void hold(int gpu, int number = 0) {
    use(gpu);
    CHECK(cuStreamWaitValue32(stream(gpu, number), gate_address, epoch, CU_STREAM_WAIT_VALUE_GEQ));
}

static double open_and_finish() {
    const auto begun = Clock::now();
    *gate_word = epoch;
    for (int g = 0; g < num_gpus; ++g) {
        use(g);
        for (int s = 0; s < streams_each; ++s)
            CHECK(cuStreamSynchronize(stream(g, s)));
    }
    return seconds_since(begun);
}

// Microseconds of one of `pieces` equal steps in stream 0 of GPU 0, between two events of that stream.
static void steps(const char *name, const std::function<void(int)> &step, int count = pieces) {
    std::vector<float> times;
    for (int r = 0; r < 9; ++r) {
        ++epoch;
        hold(0);
        CHECK(cuEventRecord(gpus[0].start, stream(0)));
        for (int i = 0; i < count; ++i)
            step(i);
        use(0);
        CHECK(cuEventRecord(gpus[0].end, stream(0)));
        open_and_finish();
        float ms;
        CHECK(cuEventElapsedTime(&ms, gpus[0].start, gpus[0].end));
        times.push_back(ms * 1e3F / count);
    }
    std::sort(times.begin(), times.end());
    std::printf("%-66s %7.2f us\n", name, times[times.size() / 2]);
}

static void product(int size, int number = 0) {
    static const double alpha = 1.2345, beta = 1.1154;
    CHECK(cublasSetStream(blas, stream(0, number)));
    const auto *a = reinterpret_cast<const double *>(gpus[0].memory);
    CHECK(cublasDgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, size, size, size, &alpha, a, size, a, size, &beta,
                      reinterpret_cast<double *>(gpus[0].memory + (128 << 20)), size));
}

static void copy(int gpu, int number, int to, int from, size_t offset, size_t bytes) {
    use(gpu);
    CHECK(cuMemcpyAsync(gpus[to].memory + offset, gpus[from].memory + offset, bytes, stream(gpu, number)));
}

// GB/s of copies of `megabytes` from GPU 0 to its peers, issued by `issue`; wall clock from the opened gate on.
static void moved(const std::string &name, const std::function<size_t(size_t)> &issue,
                  const std::vector<double> &sizes) {
    std::printf("%-66s", name.c_str());
    for (double megabytes : sizes) {
        double best = 0.0;
        for (int r = 0; r < 6; ++r) {
            ++epoch;
            const size_t bytes = issue(static_cast<size_t>(megabytes * (1 << 20)));
            best = std::max(best, static_cast<double>(bytes) / open_and_finish() / 1e9);
        }
        std::printf(" %6.1f", best);
    }
    std::printf("\n");
}

int main() {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&num_gpus));
    num_gpus = std::min(num_gpus, max_gpus);
    for (int g = 0; g < num_gpus; ++g) {
        CUdevice device;
        CHECK(cuDeviceGet(&device, g));
        CHECK(cuDevicePrimaryCtxRetain(&gpus[g].context, device));
        use(g);
        for (auto &one : gpus[g].streams)
            CHECK(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
        CHECK(cuMemAlloc(&gpus[g].memory, arena));
        CHECK(cuMemsetD32(gpus[g].memory, 0x3f000000, arena / 4));
        CHECK(cuMemAlloc(&gpus[g].flags, 1 << 16));
        CHECK(cuMemsetD32(gpus[g].flags, 0, 1 << 14));
        CHECK(cuEventCreate(&gpus[g].start, CU_EVENT_DEFAULT));
        CHECK(cuEventCreate(&gpus[g].end, CU_EVENT_DEFAULT));
    }
    for (int g = 0; g < num_gpus; ++g)
        for (int other = 0; other < num_gpus; ++other)
            if (other != g) {
                use(g);
                CHECK(cuCtxEnablePeerAccess(gpus[other].context, 0));
            }
    use(0);
    void *memory;
    CHECK(cuMemHostAlloc(&memory, 1 << 16, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE));
    CHECK(cuMemHostGetDevicePointer(&words_address, memory, 0));
    words = static_cast<volatile unsigned *>(memory);
    gate_word = words + 4096;
    gate_address = words_address + 4 * 4096;
    *gate_word = 0;
    CUdeviceptr workspace;
    CHECK(cuMemAlloc(&workspace, 32 << 20));
    CHECK(cublasCreate(&blas));
    CHECK(cublasSetStream(blas, stream(0)));
    CHECK(cublasSetWorkspace(blas, reinterpret_cast<void *>(workspace), 32 << 20));
    product(256);

    const CUdeviceptr own = gpus[0].flags, peer = gpus[num_gpus > 1 ? 1 : 0].flags;
    auto batch = [](std::vector<CUstreamBatchMemOpParams> ops) {
        CHECK(cuStreamBatchMemOp(stream(0), static_cast<unsigned>(ops.size()), ops.data(), 0));
    };
    steps("nothing (two events)", [](int) {});
    steps("flag on this device awaited (set)", [&](int) { batch({wait_op(own, 0)}); });
    steps("four flags awaited in a batch (set)",
          [&](int) { batch({wait_op(own, 0), wait_op(own + 4, 0), wait_op(own + 8, 0), wait_op(own + 12, 0)}); });
    steps("flag awaited, host word written before and after",
          [&](int) { batch({write_op(words_address, 1), wait_op(own, 0), write_op(words_address, 2)}); });
    steps("the same with words on the device",
          [&](int) { batch({write_op(own + 64, 1), wait_op(own, 0), write_op(own + 64, 2)}); });
    steps("host word written, then flag awaited", [&](int) { batch({write_op(words_address, 1), wait_op(own, 0)}); });
    steps("host word written", [&](int) { CHECK(cuStreamWriteValue32(stream(0), words_address, 1, 0)); });
    steps("word on this device written", [&](int) { CHECK(cuStreamWriteValue32(stream(0), own + 64, 1, 0)); });
    steps("peer's word written", [&](int) { CHECK(cuStreamWriteValue32(stream(0), peer + 64, 1, 0)); });
    steps("event recorded", [&](int) { CHECK(cuEventRecord(gpus[0].end, stream(0))); });
    steps("copy of 4 KiB on this device", [&](int) { copy(0, 0, 0, 0, 0, 0 + 4096); });
    if (num_gpus > 1) steps("copy of 4 KiB to a peer", [&](int) { copy(0, 0, 1, 0, 0, 4096); });
    if (num_gpus > 1)
        steps("copy of 4 KiB to a peer and its flag", [&](int) {
            copy(0, 0, 1, 0, 0, 4096);
            CHECK(cuStreamWriteValue32(stream(0), peer + 64, 1, 0));
        });
    steps("product of 64", [&](int) { product(64); });
    steps("flag awaited as above, product of 64", [&](int) {
        batch({write_op(words_address, 1), wait_op(own, 0), write_op(words_address, 2)});
        product(64);
    });
    steps("flag awaited alone, product of 64", [&](int) {
        batch({wait_op(own, 0)});
        product(64);
    });
    // Round trips: what one crossing between streams takes.
    CUevent there, back;
    use(0);
    CHECK(cuEventCreate(&there, CU_EVENT_DISABLE_TIMING));
    CHECK(cuEventCreate(&back, CU_EVENT_DISABLE_TIMING));
    steps("there and back by events, products of 64 in both streams", [&](int) {
        product(64);
        CHECK(cuEventRecord(there, stream(0)));
        CHECK(cuStreamWaitEvent(stream(0, 1), there, 0));
        product(64, 1);
        CHECK(cuEventRecord(back, stream(0, 1)));
        CHECK(cuStreamWaitEvent(stream(0), back, 0));
    });
    if (num_gpus > 1) {
        for (bool progress : {false, true})
            steps((std::string("there and back by flags, two GPUs") + (progress ? ", host words" : "")).c_str(),
                  [&](int i) {
                      auto waits = [&](int g, unsigned value) {
                          std::vector<CUstreamBatchMemOpParams> ops;
                          if (progress) ops.push_back(write_op(words_address, 1));
                          ops.push_back(wait_op(gpus[g].flags + 1024, value));
                          if (progress) ops.push_back(write_op(words_address, 2));
                          CHECK(cuStreamBatchMemOp(stream(g), static_cast<unsigned>(ops.size()), ops.data(), 0));
                      };
                      const unsigned value = epoch * 4096 + static_cast<unsigned>(i);
                      use(0);
                      CHECK(cuStreamWriteValue32(stream(0), gpus[1].flags + 1024, value, 0));
                      use(1);
                      waits(1, value);
                      CHECK(cuStreamWriteValue32(stream(1), gpus[0].flags + 1024, value, 0));
                      use(0);
                      waits(0, value);
                  });
        // Not smaller: issuing into a full queue blocks, and the gate would never open.
        const std::vector<double> sizes{2, 4, 8, 16, 32};
        std::printf("%-66s", "GB/s out of GPU 0, copies of MiB");
        for (double size : sizes)
            std::printf(" %6.1f", size);
        std::printf("\n");
        const int peers = num_gpus - 1;
        const size_t each = size_t{128} << 20;
        auto push = [&](int lanes, bool signals) {
            return [=](size_t bytes) {
                for (int s = 0; s < lanes; ++s)
                    hold(0, s);
                int number = 0;
                for (size_t at = 0; at < each; at += bytes)
                    for (int p = 1; p <= peers; ++p, ++number) {
                        const int lane = lanes == peers ? p - 1 : number % lanes;
                        copy(0, lane, p, 0, at, bytes);
                        if (signals)
                            CHECK(cuStreamWriteValue32(stream(0, lane), gpus[p].flags + 4 * (number % 4096), 1, 0));
                    }
                return each * peers;
            };
        };
        moved("pushed, one stream", push(1, false), sizes);
        moved("pushed, one stream per peer", push(peers, false), sizes);
        moved("pushed, one stream per peer, flags", push(peers, true), sizes);
        auto pull = [&](int lanes, bool signals) {
            return [=](size_t bytes) {
                for (int p = 1; p <= peers; ++p)
                    for (int s = 0; s < lanes; ++s)
                        hold(p, s);
                int number = 0;
                for (size_t at = 0; at < each; at += bytes, ++number)
                    for (int p = 1; p <= peers; ++p) {
                        copy(p, number % lanes, p, 0, at, bytes);
                        if (signals)
                            CHECK(cuStreamWriteValue32(stream(p, number % lanes), gpus[p].flags + 4 * (number % 4096),
                                                       1, 0));
                    }
                return each * peers;
            };
        };
        moved("pulled by each peer, one stream", pull(1, false), sizes);
        moved("pulled by each peer, two streams", pull(2, false), sizes);
        moved("pulled by each peer, one stream, own flags", pull(1, true), sizes);
        auto both = [&](bool pulled) {
            return [=](size_t bytes) {
                hold(0), hold(1);
                for (size_t at = 0; at < each; at += bytes) {
                    copy(pulled ? 1 : 0, 0, 1, 0, at, bytes);
                    copy(pulled ? 0 : 1, 0, 0, 1, at + each, bytes);
                }
                return 2 * each;
            };
        };
        moved("one pair, both ways, pushed", both(false), sizes);
        moved("one pair, both ways, pulled", both(true), sizes);
        // A chain 0 → 1 → 2 → …: every chunk is handed on when it has arrived.
        auto chain = [&](bool pulled) {
            return [=](size_t bytes) {
                hold(0);
                if (pulled) hold(1);
                int number = 0;
                for (size_t at = 0; at < each; at += bytes, ++number) {
                    const unsigned value = epoch;
                    for (int hop = 0; hop < peers; ++hop) {
                        const int by = pulled ? hop + 1 : hop;
                        const CUdeviceptr mine = gpus[by].flags + 8192 + 4 * number,
                                          next = gpus[by + 1 < num_gpus ? by + 1 : 0].flags + 8192 + 4 * number;
                        use(by);
                        if (hop > 0) {
                            auto wait = wait_op(mine, value);
                            CHECK(cuStreamBatchMemOp(stream(by), 1, &wait, 0));
                        }
                        copy(by, 0, hop + 1, hop, at, bytes);
                        if (hop + 1 < peers) CHECK(cuStreamWriteValue32(stream(by), next, value, 0));
                    }
                }
                return each;
            };
        };
        if (peers > 1) {
            moved("chain over all, pushed, per link", chain(false), sizes);
            moved("chain over all, pulled, per link", chain(true), sizes);
        }
    }
    // When flags arrive: 8 MiB to each peer in turn, one flag after each, seen by a stream of the peer that waits for
    // it.
    for (int way = 0; num_gpus > 1 && way < 4; ++way) {
        const int peers = num_gpus - 1, rounds = 8;
        const char *names[] = {"one stream", "one stream per peer", "one stream per peer, flags from another stream",
                               "one stream per peer, event before the flag"};
        std::vector<std::vector<double>> seen;
        std::vector<CUevent> events(peers * rounds);
        use(0);
        for (CUevent &event : events)
            CHECK(cuEventCreate(&event, way == 3 ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING));
        for (int r = 0; r < 7; ++r) {
            ++epoch;
            for (int i = 0; i < peers * rounds; ++i)
                words[i] = 0;
            for (int s = 0; s < peers; ++s)
                hold(0, s);
            for (int i = 0; i < peers * rounds; ++i) {
                const int p = i % peers + 1, lane = way == 0 ? 0 : p - 1;
                copy(0, lane, p, 0, (i / peers) * (size_t{8} << 20), size_t{8} << 20);
                CUstream signaller = stream(0, lane);
                if (way == 2) {
                    CHECK(cuEventRecord(events[i], stream(0, lane)));
                    signaller = stream(0, 7);
                    CHECK(cuStreamWaitEvent(signaller, events[i], 0));
                }
                if (way == 3) CHECK(cuEventRecord(events[i], stream(0, lane)));
                CHECK(cuStreamWriteValue32(signaller, gpus[p].flags + 32768 + 4 * i, epoch, 0));
                use(p);
                auto wait = wait_op(gpus[p].flags + 32768 + 4 * i, epoch);
                CHECK(cuStreamBatchMemOp(stream(p), 1, &wait, 0));
                CHECK(cuStreamWriteValue32(stream(p), words_address + 4 * i, 1, 0));
            }
            const auto begun = Clock::now();
            *gate_word = epoch;
            seen.push_back(arrivals(words, peers * rounds, begun));
            open_and_finish();
        }
        std::printf("flags after 8 MiB each arrive, us, %s:\n  ", names[way]);
        print_medians(seen);
    }
    return 0;
}
