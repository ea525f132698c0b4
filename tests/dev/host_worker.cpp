// Lanes of files on a worker that gets fewer threads than it asks for: prints how many have signalled at the end.
#include "host_worker.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

namespace {

int threads_to_be_had = 0;

}  // namespace

extern "C" int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*what)(void *), void *with) {
    using Create = int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
    return threads_to_be_had-- > 0 ? create(thread, how, what, with) : EAGAIN;
}

int main(int, char **arguments) {
    threads_to_be_had = std::stoi(arguments[1]);
    const uncut::HostFile file{};
    std::vector<std::uint32_t> flags(4), progress(flags.size());
    std::vector<uncut::HostLane> lanes;
    for (std::uint32_t &flag : flags) {
        uncut::HostStep copy{}, signal{};
        copy.code = uncut::code_copy, copy.to.file = &file;
        signal.code = uncut::code_signal, signal.flag = &flag, signal.value = 1;
        lanes.push_back({static_cast<std::int32_t>(lanes.size()), {copy, signal}});
    }
    std::uint64_t abort = 0;
    {
        uncut::HostWorker worker;
        worker.reserve(lanes);
        worker.start({&lanes, 0, &abort, 1, progress.data(), false});
        while (!worker.is_done())
            std::this_thread::yield();
        worker.stop();
    }
    std::printf("%zu\n", static_cast<std::size_t>(std::ranges::count(flags, 1U)));
}
