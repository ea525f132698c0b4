// Every algorithm that cublasLt proposes for a product, beside what the cuBLAS call of the executor takes.
//
//     nvcc -O2 -std=c++17 -arch=native -o algorithms algorithms.cu -lcublas -lcublasLt -lcurand
//     ./algorithms OUT.jsonl "f64 4096 4096 1024" "f16 8192 2048 8192 wide" ...
//
// With --all before the problems it tries every configuration of the algorithms that are proposed, not these alone; with
// --every it keeps the times of all proposals. @FILE stands for the problems in its lines.
// TYPE M N K, whether C of half types is float32 (wide: products that add up k-blocks) or of the type, and which of A and
// B are transposed (ta, tb). Column-major, C := alpha op(A) op(B) + C, full-mantissa values. Each algorithm is timed in
// turns with the call (medians of nine, of five with --every); those that are within a tenth of the best in a first pass
// are timed again.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#define CHECK(call)                                                                         \
    do {                                                                                    \
        const auto code = (call);                                                           \
        if (static_cast<int>(code) != 0) {                                                  \
            std::fprintf(stderr, "%s:%d: %s gave %d\n", __FILE__, __LINE__, #call, (int)code); \
            std::exit(1);                                                                   \
        }                                                                                   \
    } while (0)

namespace {

constexpr std::size_t workspace_bytes = std::size_t{64} << 20;
constexpr int most = 200;

struct Problem {
    std::string type;
    std::int64_t m = 0, n = 0, k = 0;
    bool wide = false, ta = false, tb = false;
    bool half() const { return type == "f16" || type == "bf16"; }
    cudaDataType_t in() const {
        return type == "f64" ? CUDA_R_64F : type == "f16" ? CUDA_R_16F : type == "bf16" ? CUDA_R_16BF : CUDA_R_32F;
    }
    cudaDataType_t out() const { return half() && wide ? CUDA_R_32F : in(); }
    cublasComputeType_t compute() const {
        return type == "f64" ? CUBLAS_COMPUTE_64F : type == "tf32" ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    }
    cudaDataType_t scale() const { return type == "f64" ? CUDA_R_64F : CUDA_R_32F; }
};

std::size_t width(cudaDataType_t type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }

__global__ void fill(void *out, std::size_t count, int kind, unsigned seed) {
    for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < count; i += std::size_t(gridDim.x) * blockDim.x) {
        unsigned long long x = (i + 1) * 0x9e3779b97f4a7c15ULL + seed;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
        x ^= x >> 31;
        const double value = double(x >> 11) * 0x1p-53 - 0.5;
        if (kind == CUDA_R_64F) static_cast<double *>(out)[i] = value;
        if (kind == CUDA_R_32F) static_cast<float *>(out)[i] = float(value);
        if (kind == CUDA_R_16F) static_cast<__half *>(out)[i] = __float2half(float(value));
        if (kind == CUDA_R_16BF) static_cast<__nv_bfloat16 *>(out)[i] = __float2bfloat16(float(value));
    }
}

void *filled(std::size_t count, cudaDataType_t kind, unsigned seed) {
    void *data = nullptr;
    CHECK(cudaMalloc(&data, count * width(kind)));
    fill<<<1024, 256>>>(data, count, kind, seed);
    return data;
}

template <typename Work> double seconds(cudaStream_t stream, cudaEvent_t from, cudaEvent_t to, Work work) {
    CHECK(cudaEventRecord(from, stream));
    work();
    CHECK(cudaEventRecord(to, stream));
    CHECK(cudaEventSynchronize(to));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, from, to));
    return ms * 1e-3;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

std::string config(const cublasLtMatmulAlgo_t &algo) {
    std::ostringstream text;
    const std::pair<cublasLtMatmulAlgoConfigAttributes_t, const char *> attributes[] = {
        {CUBLASLT_ALGO_CONFIG_ID, "id"},           {CUBLASLT_ALGO_CONFIG_TILE_ID, "tile"},
        {CUBLASLT_ALGO_CONFIG_STAGES_ID, "stages"}, {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, "splitk"},
        {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, "reduction"}, {CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, "swizzle"},
        {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, "custom"},
        {CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, "inner"}, {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, "cluster"}};
    for (const auto &[attribute, name] : attributes) {
        int value = -1;
        std::size_t written = 0;
        const bool narrow = attribute == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID || attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID;
        std::uint16_t small = 0;
        if (narrow) {
            if (cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, &small, sizeof small, &written) == 0) value = small;
        } else {
            cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, &value, sizeof value, &written);
        }
        text << name << ' ' << value << ' ';
    }
    return text.str();
}

// Every configuration of an algorithm that the library accepts for a problem.
std::vector<cublasLtMatmulAlgo_t> configurations(cublasLtHandle_t lt, const Problem &p, int id, cublasLtMatmulDesc_t desc,
                                                 cublasLtMatrixLayout_t la, cublasLtMatrixLayout_t lb,
                                                 cublasLtMatrixLayout_t lc) {
    cublasLtMatmulAlgo_t base;
    if (cublasLtMatmulAlgoInit(lt, p.compute(), p.scale(), p.in(), p.in(), p.out(), p.out(), id, &base) != 0) return {};
    const auto list = [&](cublasLtMatmulAlgoCapAttributes_t cap) {
        std::vector<std::uint32_t> values(1024);
        std::size_t written = 0;
        if (cublasLtMatmulAlgoCapGetAttribute(&base, cap, values.data(), values.size() * 4, &written) != 0) written = 0;
        values.resize(written / 4);
        if (values.empty()) values.push_back(0);
        return values;
    };
    int swizzles = 0, customs = 0;
    std::size_t written = 0;
    cublasLtMatmulAlgoCapGetAttribute(&base, CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT, &swizzles, sizeof swizzles, &written);
    cublasLtMatmulAlgoCapGetAttribute(&base, CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX, &customs, sizeof customs, &written);
    std::vector<cublasLtMatmulAlgo_t> found;
    for (const std::uint32_t tile : list(CUBLASLT_ALGO_CAP_TILE_IDS))
        for (const std::uint32_t stages : list(CUBLASLT_ALGO_CAP_STAGES_IDS))
            for (std::uint32_t swizzle = 0; swizzle <= std::uint32_t(swizzles); ++swizzle)
                for (std::uint32_t custom = 0; custom <= std::uint32_t(customs); ++custom)
                    for (std::uint16_t inner = 0; inner < 5; ++inner)
                        for (std::uint16_t cluster = 0; cluster < 12; ++cluster) {
                            cublasLtMatmulAlgo_t algo = base;
                            cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, 4);
                            cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, &stages, 4);
                            cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, &swizzle, 4);
                            cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, &custom, 4);
                            if (cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, &inner, 2) != 0 && inner) continue;
                            if (cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &cluster, 2) != 0 && cluster) continue;
                            cublasLtMatmulHeuristicResult_t result{};
                            if (cublasLtMatmulAlgoCheck(lt, desc, la, lb, lc, lc, &algo, &result) != 0) continue;
                            if (result.workspaceSize > workspace_bytes) continue;
                            found.push_back(algo);
                        }
    return found;
}

int id_of(const cublasLtMatmulAlgo_t &algo) {
    int id = -1;
    std::size_t written = 0;
    cublasLtMatmulAlgoConfigGetAttribute(&algo, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, &written);
    return id;
}

}  // namespace

int main(int argc, char **argv) {
    std::FILE *out = std::fopen(argv[1], "w");
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaEvent_t from, to;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    cublasHandle_t blas;
    cublasLtHandle_t lt;
    CHECK(cublasCreate(&blas));
    CHECK(cublasLtCreate(&lt));
    CHECK(cublasSetStream(blas, stream));
    void *workspace = nullptr;
    CHECK(cudaMalloc(&workspace, workspace_bytes));
    CHECK(cublasSetWorkspace(blas, workspace, workspace_bytes));
    bool all = false, every = false;
    std::vector<std::string> asked;
    for (int at = 2; at < argc; ++at) {
        const std::string word = argv[at];
        if (word == "--all") all = true;
        else if (word == "--every") every = true;
        else if (word[0] == '@') {
            std::ifstream lines(word.substr(1));
            for (std::string line; std::getline(lines, line);) asked.push_back(line);
        } else asked.push_back(word);
    }
    for (const std::string &line : asked) {
        std::istringstream text(line);
        Problem p;
        text >> p.type >> p.m >> p.n >> p.k;
        for (std::string how; text >> how;) {
            p.wide |= how == "wide";
            p.ta |= how == "ta";
            p.tb |= how == "tb";
        }
        void *a = filled(p.m * p.k, p.in(), 1), *b = filled(p.k * p.n, p.in(), 2), *c = filled(p.m * p.n, p.out(), 3);
        CHECK(cudaDeviceSynchronize());
        const double alpha64 = 1.2345, beta64 = 1.0;
        const float alpha32 = 1.2345f, beta32 = 1.0f;
        const void *alpha = p.type == "f64" ? (const void *)&alpha64 : &alpha32;
        const void *beta = p.type == "f64" ? (const void *)&beta64 : &beta32;
        const cublasOperation_t op_a = p.ta ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = p.tb ? CUBLAS_OP_T : CUBLAS_OP_N;
        const std::int64_t lda = p.ta ? p.k : p.m, ldb = p.tb ? p.n : p.k;
        const auto usual = [&] {
            CHECK(cublasGemmEx_64(blas, op_a, op_b, p.m, p.n, p.k, alpha, a, p.in(), lda, b, p.in(), ldb, beta, c,
                                  p.out(), p.m, p.compute(), CUBLAS_GEMM_DEFAULT));
        };
        cublasLtMatmulDesc_t desc;
        CHECK(cublasLtMatmulDescCreate(&desc, p.compute(), p.scale()));
        CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
        CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
        cublasLtMatrixLayout_t la, lb, lc;
        CHECK(cublasLtMatrixLayoutCreate(&la, p.in(), lda, p.m * p.k / lda, lda));
        CHECK(cublasLtMatrixLayoutCreate(&lb, p.in(), ldb, p.k * p.n / ldb, ldb));
        CHECK(cublasLtMatrixLayoutCreate(&lc, p.out(), p.m, p.n, p.m));
        cublasLtMatmulPreference_t wish;
        CHECK(cublasLtMatmulPreferenceCreate(&wish));
        CHECK(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                                   sizeof workspace_bytes));
        std::vector<cublasLtMatmulHeuristicResult_t> found(most);
        int count = 0;
        CHECK(cublasLtMatmulAlgoGetHeuristic(lt, desc, la, lb, lc, lc, wish, most, found.data(), &count));
        found.resize(count);
        if (all) {
            std::vector<int> ids;
            for (const auto &one : found)
                if (std::find(ids.begin(), ids.end(), id_of(one.algo)) == ids.end()) ids.push_back(id_of(one.algo));
            for (const int id : ids)
                for (const auto &algo : configurations(lt, p, id, desc, la, lb, lc)) {
                    cublasLtMatmulHeuristicResult_t result{};
                    cublasLtMatmulAlgoCheck(lt, desc, la, lb, lc, lc, &algo, &result);
                    result.algo = algo;
                    found.push_back(result);
                }
            count = static_cast<int>(found.size());
        }
        const auto with = [&](int i) {
            return [&, i] {
                CHECK(cublasLtMatmul(lt, desc, alpha, a, la, b, lb, beta, c, lc, c, lc, &found[i].algo, workspace,
                                     workspace_bytes, stream));
            };
        };
        for (int i = 0; i < 3; ++i) seconds(stream, from, to, usual);
        std::vector<std::pair<double, int>> first;
        for (int i = 0; i < count; ++i) {
            if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
            seconds(stream, from, to, with(i));
            first.emplace_back(std::min(seconds(stream, from, to, with(i)), seconds(stream, from, to, with(i))), i);
        }
        std::sort(first.begin(), first.end());
        std::vector<int> good;
        for (const auto &[time, i] : first)
            if (every || (time < first.front().first * 1.1 && good.size() < 8)) good.push_back(i);
        std::vector<double> call;
        std::vector<std::vector<double>> times(good.size());
        for (int round = 0; round < (every ? 5 : 9); ++round) {
            call.push_back(seconds(stream, from, to, usual));
            for (std::size_t g = 0; g < good.size(); ++g) times[g].push_back(seconds(stream, from, to, with(good[g])));
        }
        const double work = 2.0 * p.m * p.n * p.k, base = median(call);
        std::printf("%-28s usual %8.1f us %6.1f TF (of %d)", line.c_str(), base * 1e6, work / base * 1e-12, count);
        std::fprintf(out, "{\"problem\": \"%s\", \"usual_s\": %.9g, \"algorithms\": [", line.c_str(), base);
        std::size_t best = 0;
        for (std::size_t g = 0; g < good.size(); ++g) {
            if (median(times[g]) < median(times[best])) best = g;
            std::fprintf(out, "%s{\"number\": %d, \"median_s\": %.9g, \"config\": \"%s\", \"waves\": %.3g}", g ? ", " : "", good[g],
                         median(times[g]), config(found[good[g]].algo).c_str(), found[good[g]].wavesCount);
        }
        std::fprintf(out, "]}\n");
        std::printf(" best #%d %8.1f us %6.1f TF %5.1f %% | %s\n", good[best], median(times[best]) * 1e6, work / median(times[best]) * 1e-12,
                    100 * (median(times[best]) / base - 1), config(found[good[best]].algo).c_str());
        std::fflush(stdout);
        for (void *data : {a, b, c}) CHECK(cudaFree(data));
        cublasLtMatmulDescDestroy(desc);
        cublasLtMatmulPreferenceDestroy(wish);
        for (auto layout : {la, lb, lc}) cublasLtMatrixLayoutDestroy(layout);
    }
    std::fclose(out);
}
