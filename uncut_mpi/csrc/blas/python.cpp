#include <Python.h>  // first, as it demands

#include "blas/python.hpp"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

namespace uncut::blas {

namespace {

std::atomic<Python *> the_one{nullptr};

void say(const std::string &what) {
    std::fprintf(stderr, "uncut_mpi: %s; BLAS calls go on as without it\n", what.c_str());
}

// The folder in which the package lies that this library is part of, as .../site-packages.
std::filesystem::path packages() {
    Dl_info about{};
    dladdr(reinterpret_cast<void *>(&packages), &about);
    std::error_code ignored;
    const auto here = std::filesystem::absolute(about.dli_fname, ignored);
    return here.parent_path().parent_path().parent_path();  // of uncut_mpi/lib/lib….so
}

// The interpreter by which the package was installed: it knows where all that it needs is.
std::string executable() {
    if (const char *named = std::getenv("UNCUT_MPI_PYTHON"); named != nullptr && *named != 0) return named;
    std::error_code ignored;
    for (auto folder = packages(); folder.has_relative_path(); folder = folder.parent_path())
        if (const auto found = folder / "bin" / "python3"; std::filesystem::exists(found, ignored))
            return found.string();
    return UNCUT_PYTHON_EXECUTABLE;
}

}  // namespace

// The functions that are used, found when there is an interpreter: this library is loaded by programs that have none.
#define UNCUT_PYTHON_FUNCTIONS(use)                                                                                    \
    use(Py_IsInitialized) use(PyConfig_InitPythonConfig) use(PyConfig_SetBytesString) use(PyConfig_Clear)              \
        use(Py_InitializeFromConfig) use(PyStatus_Exception) use(PyEval_SaveThread) use(PyGILState_Ensure)             \
            use(PyGILState_Release) use(PyImport_ImportModule) use(PyObject_GetAttrString) use(PyObject_CallFunction)  \
                use(PyObject_CallMethod) use(PyBytes_FromStringAndSize) use(PyLong_AsLong) use(PyErr_Print)            \
                    use(PyErr_Clear) use(Py_DecRef)

struct Python::Api {
#define UNCUT_MEMBER(name) decltype(&::name) name;
    UNCUT_PYTHON_FUNCTIONS(UNCUT_MEMBER)
#undef UNCUT_MEMBER
    bool find() {
        bool all = true;
#define UNCUT_FIND(name) all &= (name = reinterpret_cast<decltype(&::name)>(dlsym(RTLD_DEFAULT, #name))) != nullptr;
        UNCUT_PYTHON_FUNCTIONS(UNCUT_FIND)
#undef UNCUT_FIND
        return all;
    }
};

namespace {

Python::Api api;

bool load_library() {
    const std::filesystem::path folder = UNCUT_PYTHON_FOLDER, name = UNCUT_PYTHON_LIBRARY;
    for (const auto &one : {folder / name, name})
        if (dlopen(one.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr && api.find()) return true;
    say("there is no " + name.string() + " (in " + folder.string() + "), which a program that is not Python needs");
    return false;
}

bool start() {
    PyConfig config;
    api.PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 0;
    PyStatus status = api.PyConfig_SetBytesString(&config, &config.program_name, executable().c_str());
    if (!api.PyStatus_Exception(status)) status = api.Py_InitializeFromConfig(&config);
    api.PyConfig_Clear(&config);
    if (api.PyStatus_Exception(status)) {
        say(std::string("Python cannot be started (") + (status.err_msg == nullptr ? "" : status.err_msg) + ")");
        return false;
    }
    api.PyEval_SaveThread();  // each call takes the lock by itself
    return true;
}

}  // namespace

Python *make() {
    if (!api.find() && !load_library()) return nullptr;
    if (api.Py_IsInitialized() == 0 && !start()) return nullptr;
    auto *made = new Python(api);  // for the life of the process
    if (made->load()) return made;
    say("uncut_mpi.blas cannot be loaded");
    return nullptr;
}

Python *Python::started() {
    Python *one = the_one.load();
    return one != nullptr && api.Py_IsInitialized() != 0 ? one : nullptr;  // Python itself may have ended
}

Python *Python::get() {
    static Python *const one = [] {
        Python *made = make();
        the_one = made;
        return made;
    }();
    return one;
}

bool Python::load() {
    const PyGILState_STATE state = api_.PyGILState_Ensure();
    PyObject *module = api_.PyImport_ImportModule("uncut_mpi.blas.calls");
    if (module == nullptr) {  // an interpreter of the program's: it may lack this package, or have it
        api_.PyErr_Clear();
        PyObject *site = api_.PyImport_ImportModule("site");
        if (site != nullptr)
            if (PyObject *added = api_.PyObject_CallMethod(site, "addsitedir", "s", packages().c_str()))
                api_.Py_DecRef(added);
        module = api_.PyImport_ImportModule("uncut_mpi.blas.calls");
    }
    if (module != nullptr) {
        gemm_ = api_.PyObject_GetAttrString(module, "gemm");
        pgemm_ = api_.PyObject_GetAttrString(module, "pgemm");
        forget_ = api_.PyObject_GetAttrString(module, "forget");
    }
    const bool found = gemm_ != nullptr && pgemm_ != nullptr && forget_ != nullptr;
    if (!found) api_.PyErr_Print();
    api_.PyGILState_Release(state);
    return found;
}

Answer Python::ask(const char *function, const void *facts, std::size_t nbytes, const Where &where,
                   const double (&alpha)[2], const double (&beta)[2], void *next) {
    const PyGILState_STATE state = api_.PyGILState_Ensure();
    auto *called = static_cast<PyObject *>(*function == 'p' ? pgemm_ : gemm_);
    const auto number = [](const void *address) {
        return static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(address));
    };
    PyObject *bytes = api_.PyBytes_FromStringAndSize(static_cast<const char *>(facts),
                                                     static_cast<Py_ssize_t>(nbytes));  // "N" takes it
    const auto &[a, ld] = where;
    PyObject *answer =
        api_.PyObject_CallFunction(called, "N(KKKLLL)ddddK", bytes, number(a[0]), number(a[1]), number(a[2]), ld[0],
                                   ld[1], ld[2], alpha[0], alpha[1], beta[0], beta[1], number(next));
    if (answer == nullptr) {
        api_.PyErr_Print();
        std::fprintf(stderr, "uncut_mpi: a product failed, and what C holds is not known: the program ends\n");
        std::abort();
    }
    const long done = api_.PyLong_AsLong(answer);
    api_.Py_DecRef(answer);
    api_.PyGILState_Release(state);
    return done != 0 ? Answer::done : Answer::forward;
}

void Python::forget(std::int64_t context) {
    const PyGILState_STATE state = api_.PyGILState_Ensure();
    PyObject *answer =
        api_.PyObject_CallFunction(static_cast<PyObject *>(forget_), "L", static_cast<long long>(context));
    if (answer == nullptr)
        api_.PyErr_Print();
    else
        api_.Py_DecRef(answer);
    api_.PyGILState_Release(state);
}

}  // namespace uncut::blas
