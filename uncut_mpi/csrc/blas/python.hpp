// The interpreter of this process: the program's own, or one that is loaded and started when it is first needed.
#pragma once

#include <dlfcn.h>
#include <unistd.h>
#include <cstddef>
#include <cstdint>

namespace uncut::blas {

enum class Answer { done, forward };

// Where this process's A, B and C are, and their leading dimensions.
struct Where {
    const void *arrays[3];
    std::int64_t leading[3];
};

// Python and uncut_mpi.blas in it. Its methods take the interpreter's lock.
class Python {
  public:
    // Return it, started; null if that is not possible, which is said once.
    static Python *get();
    // Return it if it is started.
    static Python *started();

    // Hand a call to a function of uncut_mpi.blas.calls. An error that it raises ends the process: nobody knows then
    // what C holds.
    Answer ask(const char *function, const void *facts, std::size_t nbytes, const Where &where,
               const double (&alpha)[2], const double (&beta)[2], void *next);
    void forget(std::int64_t context);

    struct Api;

  private:
    explicit Python(const Api &api) : api_(api) {}
    const Api &api_;
    void *gemm_ = nullptr, *pgemm_ = nullptr, *forget_ = nullptr;
    bool load();
    friend Python *make();
};

}  // namespace uncut::blas
