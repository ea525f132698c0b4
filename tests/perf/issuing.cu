// What issuing operations takes without a library around it, one by one and as a CUDA graph, on one GPU. Host times of
// a call, and of a program of 32 × (copy, flag, wait for the flag, product) on two streams, its end included.
//
//   nvcc -O2 -std=c++17 -o issuing tests/perf/issuing.cu -lcuda -lcublas && ./issuing
//
// With a file of operations (issuing.py writes it), what issuing those in a plain loop takes, and nothing else.
#include <cublas_v2.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "streams.cuh"

constexpr int repeats = 200, pieces = 32;

static CUstream copies, products;
static CUdeviceptr flags, memory, host_flags;
static cublasHandle_t blas;
static CUevent fork_event, join_event;
static unsigned epoch = 0;
static int size = 256;

static void copy() {
    CUDA_MEMCPY2D shape{};
    shape.srcMemoryType = shape.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    shape.srcDevice = memory;
    shape.dstDevice = memory + (64 << 20);
    shape.srcPitch = shape.dstPitch = 4096;
    shape.WidthInBytes = 2048;
    shape.Height = 32;
    CHECK(cuMemcpy2DAsync(&shape, copies));
}

static void product() {
    const double alpha = 1.2345, beta = 1.1154;
    const auto *a = reinterpret_cast<const double *>(memory);
    CHECK(cublasDgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, size, size, size, &alpha, a, size, a, size, &beta,
                      reinterpret_cast<double *>(memory + (128 << 20)), size));
}

static void waits(int flag) {
    CUstreamBatchMemOpParams ops[3] = {write_op(host_flags, 1), wait_op(flags + 4 * flag, epoch),
                                       write_op(host_flags, 2)};
    CHECK(cuStreamBatchMemOp(products, 3, ops, 0));
}

static void program() {
    for (int i = 0; i < pieces; ++i) {
        copy();
        CHECK(cuStreamWriteValue32(copies, flags + 4 * i, epoch, 0));
        waits(i);
        product();
    }
}

static void finish() {
    CHECK(cuStreamSynchronize(copies));
    CHECK(cuStreamSynchronize(products));
}

static void time_call(const char *name, const std::function<void()> &call) {
    std::vector<double> times;
    for (int r = 0; r < repeats; ++r) {
        finish();
        const auto start = Clock::now();
        for (int i = 0; i < pieces; ++i)
            call();
        times.push_back(seconds_since(start) / pieces);
    }
    finish();
    std::printf("%-28s %7.2f us\n", name, 1e6 * median(times));
}

// -- a list of operations, issued in a plain loop -----------------------------------------------------------

struct Operation {
    char what;  // c: copy of bytes, d: two-dimensional copy, g: product, r: record, w: wait
    int lane, event = 0;
    long m = 0, n = 0, k = 0, lda = 0, ldb = 0, ldc = 0;
    CUDA_MEMCPY2D shape{};
};

static std::vector<Operation> operations_of(const char *path, CUdeviceptr on_host) {
    std::vector<Operation> operations;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        Operation one{};
        words >> one.what >> one.lane;
        if (one.what == 'g') {
            words >> one.m >> one.n >> one.k >> one.lda >> one.ldb >> one.ldc;
        } else if (one.what == 'r' || one.what == 'w') {
            words >> one.event;
        } else {
            char from, to;
            long rows, cols, from_ld, to_ld;
            words >> from >> to >> rows >> cols >> from_ld >> to_ld;
            CUDA_MEMCPY2D &shape = one.shape;
            shape.srcMemoryType = from == 'h' ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            shape.dstMemoryType = to == 'h' ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            shape.srcDevice = from == 'h' ? on_host : memory;
            shape.dstDevice = to == 'h' ? on_host : memory + (64 << 20);
            shape.srcHost = reinterpret_cast<const void *>(shape.srcDevice);
            shape.dstHost = reinterpret_cast<void *>(shape.dstDevice);
            shape.WidthInBytes = 8 * rows;
            shape.Height = cols;
            shape.srcPitch = 8 * from_ld;
            shape.dstPitch = 8 * to_ld;
        }
        operations.push_back(one);
    }
    return operations;
}

static int replay(const char *path, CUdeviceptr workspace) {
    void *host;
    CHECK(cuMemHostAlloc(&host, 256 << 20, CU_MEMHOSTALLOC_PORTABLE));
    const auto operations = operations_of(path, reinterpret_cast<CUdeviceptr>(host));
    int lanes = 0, events = 0;
    for (const Operation &one : operations) {
        lanes = std::max(lanes, one.lane + 1);
        events = std::max(events, one.event + 1);
    }
    std::vector<CUstream> streams(lanes);
    std::vector<cublasHandle_t> handles(lanes);
    std::vector<CUevent> made(events);
    for (int l = 0; l < lanes; ++l) {
        CHECK(cuStreamCreate(&streams[l], CU_STREAM_NON_BLOCKING));
        CHECK(cublasCreate(&handles[l]));
        CHECK(cublasSetStream(handles[l], streams[l]));
        CHECK(cublasSetWorkspace(handles[l], reinterpret_cast<void *>(workspace), 32 << 20));
    }
    for (CUevent &event : made)
        CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    const double alpha = 1.2345, beta = 1.1154;
    const auto *a = reinterpret_cast<const double *>(memory);
    auto *c = reinterpret_cast<double *>(memory + (128 << 20));
    std::vector<double> times;
    for (int r = 0; r < repeats; ++r) {
        const auto start = Clock::now();
        for (const Operation &one : operations) {
            const CUstream stream = streams[one.lane];
            const CUDA_MEMCPY2D &shape = one.shape;
            switch (one.what) {
                case 'c':
                    CHECK(cuMemcpyAsync(shape.dstDevice, shape.srcDevice, shape.WidthInBytes * shape.Height, stream));
                    break;
                case 'd': CHECK(cuMemcpy2DAsync(&shape, stream)); break;
                case 'g':
                    CHECK(cublasDgemm_64(handles[one.lane], CUBLAS_OP_N, CUBLAS_OP_N, one.m, one.n, one.k, &alpha, a,
                                         one.lda, a, one.ldb, &beta, c, one.ldc));
                    break;
                case 'r': CHECK(cuEventRecord(made[one.event], stream)); break;
                default: CHECK(cuStreamWaitEvent(stream, made[one.event], 0)); break;
            }
        }
        times.push_back(1e6 * seconds_since(start));
        for (CUstream stream : streams)
            CHECK(cuStreamSynchronize(stream));
    }
    std::printf("%.2f\n", median(times));
    return 0;
}

int main(int count, char **words_given) {
    CHECK(cuInit(0));
    CUdevice device;
    CUcontext context;
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&copies, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&products, CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&fork_event, CU_EVENT_DISABLE_TIMING));
    CHECK(cuEventCreate(&join_event, CU_EVENT_DISABLE_TIMING));
    CHECK(cuMemAlloc(&flags, 4096));
    CHECK(cuMemsetD32(flags, 0, 1024));
    CHECK(cuMemAlloc(&memory, std::size_t{1} << 30));
    CHECK(cuMemsetD32(memory, 0x3f000000, 64 << 20));
    void *words;
    CHECK(cuMemHostAlloc(&words, 4096, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE));
    CHECK(cuMemHostGetDevicePointer(&host_flags, words, 0));
    CUdeviceptr workspace;
    CHECK(cuMemAlloc(&workspace, 32 << 20));
    CHECK(cublasCreate(&blas));
    CHECK(cublasSetStream(blas, products));
    CHECK(cublasSetWorkspace(blas, reinterpret_cast<void *>(workspace), 32 << 20));
    if (count > 1) return replay(words_given[1], workspace);

    time_call("copy, two-dimensional", copy);
    time_call("copy, contiguous", [] { CHECK(cuMemcpyAsync(memory + (64 << 20), memory, 65536, copies)); });
    time_call("flag written", [] { CHECK(cuStreamWriteValue32(copies, flags, epoch, 0)); });
    time_call("flag awaited, with progress", [] { waits(0); });
    time_call("event recorded and awaited", [] {
        CHECK(cuEventRecord(join_event, copies));
        CHECK(cuStreamWaitEvent(products, join_event, 0));
    });
    for (int edge : {256, 2048}) {
        size = edge;
        time_call(edge == 256 ? "product of 256" : "product of 2048", product);
    }

    for (int edge : {64, 256}) {
        size = edge;
        std::vector<double> alone, after_idle;
        for (int r = 0; r < repeats; ++r) {
            for (auto *times : {&alone, &after_idle}) {
                if (times == &after_idle)
                    for (const auto idle = Clock::now(); seconds_since(idle) < 100e-6;) {
                    }
                const auto start = Clock::now();
                product();
                while (cuStreamQuery(products) == CUDA_ERROR_NOT_READY) {
                }
                times->push_back(seconds_since(start));
            }
        }
        std::printf("product of %4d and its end: %7.1f us, after 100 us of idleness %7.1f us\n", edge,
                    1e6 * median(alone), 1e6 * median(after_idle));
    }
    for (int edge : {64, 256, 1024}) {
        size = edge;
        std::vector<double> issue, whole;
        for (int r = 0; r < repeats; ++r) {
            ++epoch;
            const auto start = Clock::now();
            program();
            issue.push_back(seconds_since(start));
            finish();
            whole.push_back(seconds_since(start));
        }
        std::printf("program, products of %4d: issued in %7.1f us, done in %7.1f us\n", edge, 1e6 * median(issue),
                    1e6 * median(whole));

        ++epoch;
        CUgraph graph;
        CUgraphExec ready;
        CHECK(cuStreamBeginCapture(products, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        CHECK(cuEventRecord(fork_event, products));
        CHECK(cuStreamWaitEvent(copies, fork_event, 0));
        program();
        CHECK(cuEventRecord(join_event, copies));
        CHECK(cuStreamWaitEvent(products, join_event, 0));
        CHECK(cuStreamEndCapture(products, &graph));
        auto start = Clock::now();
        CHECK(cuGraphInstantiate(&ready, graph, 0));
        const double instantiate = seconds_since(start);
        size_t count = 0;
        CHECK(cuGraphGetNodes(graph, nullptr, &count));
        std::vector<CUgraphNode> nodes(count);
        CHECK(cuGraphGetNodes(graph, nodes.data(), &count));
        std::vector<std::pair<CUgraphNode, CUDA_BATCH_MEM_OP_NODE_PARAMS>> batches;
        for (CUgraphNode node : nodes) {
            CUgraphNodeType type;
            CHECK(cuGraphNodeGetType(node, &type));
            if (type != CU_GRAPH_NODE_TYPE_BATCH_MEM_OP) continue;
            CUDA_BATCH_MEM_OP_NODE_PARAMS parameters{};
            CHECK(cuGraphBatchMemOpNodeGetParams(node, &parameters));
            batches.emplace_back(node, parameters);
        }
        CHECK(cuGraphUpload(ready, products));
        finish();
        std::vector<double> update, launch, all;
        for (int r = 0; r < repeats; ++r) {
            ++epoch;
            start = Clock::now();
            for (auto &[node, parameters] : batches) {
                for (unsigned i = 0; i < parameters.count; ++i) {
                    CUstreamBatchMemOpParams &op = parameters.paramArray[i];
                    const CUdeviceptr address = op.waitValue.address;
                    if (address >= flags && address < flags + 4096) op.waitValue.value = epoch;
                }
                CHECK(cuGraphExecBatchMemOpNodeSetParams(ready, node, &parameters));
            }
            update.push_back(seconds_since(start));
            const auto begun = Clock::now();
            CHECK(cuGraphLaunch(ready, products));
            launch.push_back(seconds_since(begun));
            CHECK(cuStreamSynchronize(products));
            all.push_back(seconds_since(start));
        }
        std::printf(
            "   as a graph of %zu nodes, %zu with flags: instantiated in %.0f us, updated in %.1f us, launched in "
            "%.1f us, done in %.1f us\n",
            count, batches.size(), 1e6 * instantiate, 1e6 * median(update), 1e6 * median(launch), 1e6 * median(all));
        CHECK(cuGraphExecDestroy(ready));
        CHECK(cuGraphDestroy(graph));
    }
    return 0;
}
