// The interpreter of this process: the program's own, or one that is loaded and started when it is first needed.
#pragma once

#include <dlfcn.h>
#include <unistd.h>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace uncut::blas {

// Where this process's matrices are, A, B and C or those of them that there are, and their leading dimensions.
struct Where {
    const void *arrays[3];
    std::int64_t leading[3];
};

// Whether this process has Python with this package, and MPI can be used; what is missing is said.
bool can_begin();
// Hand a call to uncut_mpi.blas.calls, of this process alone or of its grid; return whether it was computed. Where
// there is no Python it is not, which is said once. An error that it raises ends the process: nobody knows then what
// its result holds.
bool ask(bool of_grid, const void *facts, std::size_t nbytes, const Where &where, const double (&alpha)[2],
         const double (&beta)[2], void *next);
// Lock a mutex. Meanwhile another thread may have the interpreter, which the thread that holds the mutex can need.
void wait_for(std::mutex &mutex);
// Close what the grid of a context has, if anything was asked.
void forget(std::int64_t context);

}  // namespace uncut::blas
