#include "cuda_driver.hpp"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <iterator>

namespace uncut::cuda {
namespace {

using GetProcAddress = Code(const char *, void **, int, std::uint64_t, int *);

std::string last_loader_error() {
    const char *text = dlerror();
    return text != nullptr ? text : "no reason given";
}

int find_loaded_blas(dl_phdr_info *info, std::size_t, void *data) {
    const std::string path = info->dlpi_name;
    const std::size_t slash = path.rfind('/');
    const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
    if (name.rfind("libcublas.so", 0) != 0) return 0;
    *static_cast<std::string *>(data) = path;
    return 1;
}

}  // namespace

Driver::Driver(const std::string &library) {
    void *handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr)
        throw Failure("no CUDA driver: " + last_loader_error() +
                      "; install an NVIDIA driver of CUDA 12.0 or later, or use the host backend");
    // The library stays loaded: unloading a driver under a live context is not supported.
    auto *get = reinterpret_cast<GetProcAddress *>(dlsym(handle, "cuGetProcAddress_v2"));
    if (get == nullptr)
        throw Failure(library + " has no cuGetProcAddress_v2: the NVIDIA driver is older than CUDA 12.0; update it");
    const auto load = [&](const char *name) {
        void *address = nullptr;
        int status = 0;
        const Code code = get(name, &address, stated_version, 0, &status);
        if (code != success || address == nullptr)
            throw Failure(library + " has no " + name + " of CUDA 12.0 (code " + std::to_string(code) + ", status " +
                              std::to_string(status) + "); update the NVIDIA driver",
                          code);
        return address;
    };
#define UNCUT_LOAD(name, ...) name = reinterpret_cast<signature::name##_t *>(load(#name));
    UNCUT_DRIVER_FUNCTIONS(UNCUT_LOAD)
#undef UNCUT_LOAD
}

std::string Driver::describe(const char *call, Code code) const {
    const char *name = nullptr, *text = nullptr;
    if (cuGetErrorName(code, &name) != success || name == nullptr) name = "unknown error";
    if (cuGetErrorString(code, &text) != success || text == nullptr) text = "no text";
    return std::string(call) + ": " + name + " (" + std::to_string(code) + "), " + text;
}

void Driver::check(const char *call, Code code) const {
    if (code != success) throw Failure(describe(call, code), code);
}

std::string Driver::uuid(int ordinal) const {
    Device device = 0;
    Uuid found{};
    check("cuInit", cuInit(0));
    check("cuDeviceGet", cuDeviceGet(&device, ordinal));
    check("cuDeviceGetUuid", cuDeviceGetUuid(&found, device));
    return {std::begin(found.bytes), std::end(found.bytes)};
}

Blas::Blas(const std::string &library) : path_(library) {
    if (path_.empty() && dl_iterate_phdr(find_loaded_blas, &path_) == 0)
        throw Failure("libcublas is not loaded in this process; install cupy with its libraries");
    void *handle = dlopen(path_.c_str(), RTLD_NOW | (library.empty() ? RTLD_NOLOAD : RTLD_LOCAL));
    if (handle == nullptr) throw Failure("cannot open cuBLAS: " + last_loader_error());
    const auto load = [&](const char *name) {
        void *address = dlsym(handle, name);
        if (address == nullptr) throw Failure(path_ + " has no " + name + ": cuBLAS 12.0 or later is needed");
        return address;
    };
#define UNCUT_LOAD(name, ...) name = reinterpret_cast<signature::name##_t *>(load(#name));
    UNCUT_BLAS_FUNCTIONS(UNCUT_LOAD)
#undef UNCUT_LOAD
}

std::string Blas::describe(const char *call, Code code) const {
    const char *name = cublasGetStatusName(code);
    return std::string(call) + ": " + (name != nullptr ? name : "unknown status") + " (" + std::to_string(code) + ")";
}

void Blas::check(const char *call, Code code) const {
    if (code != success) throw Failure(describe(call, code), code);
}

bool is_sticky(Code code) {
    // Codes after which cuda.h says that the process must be terminated, or the context is gone.
    static constexpr Code sticky[] = {4,   46,  201, 214, 220, 226, 700, 702, 709, 710, 714, 715,
                                      716, 717, 718, 719, 721, 802, 805, 806, 807, 810, 911, 999};
    return std::find(std::begin(sticky), std::end(sticky), code) != std::end(sticky);
}

}  // namespace uncut::cuda
