// A signal that somebody in the process listens to: it comes even while all threads are in calls that never return.
#include <nanobind/nanobind.h>

#include <fcntl.h>
#include <unistd.h>
#include <csignal>

namespace nb = nanobind;

namespace uncut {
namespace {

int told = -1;        // where the handler writes
pid_t listening = 0;  // a fork has the handler too, and nobody who reads

void tell(int) {
    if (getpid() != listening) return;
    const char byte = 0;
    [[maybe_unused]] const auto written = write(told, &byte, 1);  // a pipe that is full has told enough
}

// Return a descriptor from which a byte can be read each time that the signal comes; -1 where the program handles or
// ignores the signal itself.
int listen_to(int number) {
    struct sigaction now{};
    if (sigaction(number, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return -1;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return -1;
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    told = ends[1], listening = getpid();
    now.sa_handler = tell;
    now.sa_flags = SA_RESTART;
    sigaction(number, &now, nullptr);
    return ends[0];
}

}  // namespace

void bind_signals(nb::module_ &m) {
    m.def("listen_to", &listen_to, nb::arg("number"),
          "Return a descriptor that gets a byte each time that a signal comes, or -1 where the program handles it.");
}

}  // namespace uncut
