// The extension module: inner loops of planning, the CUDA executor and where ranks meet. No policy, no global state.
#include <nanobind/nanobind.h>

#include "tables.hpp"

namespace nb = nanobind;

namespace uncut {
void bind_contract(nb::module_ &m);
void bind_uncut_scheduler(nb::module_ &m);
void bind_kblocks_scheduler(nb::module_ &m);
void bind_batch(nb::module_ &m);
void bind_lowering(nb::module_ &m);
void bind_list_proof(nb::module_ &m);
void bind_staging(nb::module_ &m);
void bind_shares(nb::module_ &m);
void bind_simulator(nb::module_ &m);
void bind_follower(nb::module_ &m);
void bind_cuda(nb::module_ &m);
void bind_host_files(nb::module_ &m);
void bind_meeting(nb::module_ &m);
void bind_capsule(nb::module_ &m);
void bind_signals(nb::module_ &m);
}  // namespace uncut

NB_MODULE(_native, m) {
    m.doc() =
        "Inner loops of uncut_mpi: the schedulers, lowering, the simulator, the CUDA executor, meetings of ranks.";
    // A program that ends inside a session has objects of ours to its end, which nanobind would report as leaks.
    nb::set_leak_warnings(false);
    uncut::bind_contract(m);
    nb::exception<uncut::TooManyTasks>(m, "TooManyTasksError", PyExc_RuntimeError);
    uncut::bind_uncut_scheduler(m);
    uncut::bind_kblocks_scheduler(m);
    uncut::bind_batch(m);
    uncut::bind_staging(m);
    uncut::bind_lowering(m);
    uncut::bind_list_proof(m);
    uncut::bind_shares(m);
    uncut::bind_simulator(m);
    uncut::bind_follower(m);
    uncut::bind_cuda(m);
    uncut::bind_host_files(m);
    uncut::bind_meeting(m);
    uncut::bind_capsule(m);
    uncut::bind_signals(m);
}
