#include <Python.h>  // first, as it demands

#include "blas/python.hpp"

#include <pthread.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

namespace uncut::blas {

namespace {

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

// The functions that are used, found when there is an interpreter: this library is loaded by programs that have none.
#define UNCUT_PYTHON_FUNCTIONS(use)                                                                                    \
    use(Py_IsInitialized) use(PyConfig_InitPythonConfig) use(PyConfig_SetBytesString) use(PyConfig_Clear)              \
        use(Py_InitializeFromConfig) use(PyStatus_Exception) use(PyEval_SaveThread) use(PyEval_RestoreThread)          \
            use(PyGILState_Check) use(PyGILState_Ensure) use(PyGILState_Release) use(PyImport_ImportModule)            \
                use(PyObject_CallMethod) use(PyObject_CallFunction) use(PyObject_GetAttrString)                        \
                    use(PyBytes_FromStringAndSize) use(PyLong_AsLong) use(PyErr_Print) use(PyErr_Clear) use(Py_DecRef)

struct Api {
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
} api{};

// The module uncut_mpi.blas.calls and what it has for calls of this process and of a grid, once it is loaded.
PyObject *calls = nullptr, *functions[2] = {};
std::atomic<bool> is_loaded{false};

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

// Import uncut_mpi.blas.calls; an interpreter of the program's may lack this package, or have it.
bool load() {
    const PyGILState_STATE state = api.PyGILState_Ensure();
    constexpr const char *name = "uncut_mpi.blas.calls";
    calls = api.PyImport_ImportModule(name);
    if (calls == nullptr) {
        api.PyErr_Clear();
        if (PyObject *site = api.PyImport_ImportModule("site"))
            if (PyObject *added = api.PyObject_CallMethod(site, "addsitedir", "s", packages().c_str()))
                api.Py_DecRef(added);
        calls = api.PyImport_ImportModule(name);
    }
    if (calls != nullptr) {
        functions[false] = api.PyObject_GetAttrString(calls, "compute");
        functions[true] = api.PyObject_GetAttrString(calls, "compute_on_grid");
    }
    const bool found = functions[false] != nullptr && functions[true] != nullptr;
    if (!found) api.PyErr_Print();
    api.PyGILState_Release(state);
    return found;
}

std::atomic<bool> is_fork{false};  // of a process whose sessions this one must not use

bool make() {
    pthread_atfork(nullptr, nullptr, [] { is_fork = true; });
    if (!api.find() && !load_library()) return false;
    if (api.Py_IsInitialized() == 0 && !start()) return false;
    is_loaded = load();
    if (!is_loaded) say("uncut_mpi.blas cannot be loaded");
    return is_loaded;
}

bool is_there() {
    static const bool made = make();
    return made && !is_fork;
}

}  // namespace

void wait_for(std::mutex &mutex) {
    const bool has_interpreter =
        api.PyGILState_Check != nullptr && api.Py_IsInitialized() != 0 && api.PyGILState_Check() != 0;
    PyThreadState *state = has_interpreter ? api.PyEval_SaveThread() : nullptr;
    mutex.lock();
    if (state != nullptr) api.PyEval_RestoreThread(state);
}

bool can_begin() {
    if (!is_there()) return false;
    const PyGILState_STATE state = api.PyGILState_Ensure();
    PyObject *answer = api.PyObject_CallMethod(calls, "begins", nullptr);
    if (answer == nullptr) api.PyErr_Print();
    const bool can = answer != nullptr && api.PyLong_AsLong(answer) != 0;
    if (answer != nullptr) api.Py_DecRef(answer);
    api.PyGILState_Release(state);
    return can;
}

bool ask(bool of_grid, const void *facts, std::size_t nbytes, const Where &where, const double (&alpha)[2],
         const double (&beta)[2], void *next) {
    if (!is_there()) return false;
    const PyGILState_STATE state = api.PyGILState_Ensure();
    const auto number = [](const void *address) {
        return static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(address));
    };
    PyObject *bytes = api.PyBytes_FromStringAndSize(static_cast<const char *>(facts),
                                                    static_cast<Py_ssize_t>(nbytes));  // "N" takes it
    const auto &[a, ld] = where;
    PyObject *answer =
        api.PyObject_CallFunction(functions[of_grid], "N(KKKLLL)ddddK", bytes, number(a[0]), number(a[1]), number(a[2]),
                                  ld[0], ld[1], ld[2], alpha[0], alpha[1], beta[0], beta[1], number(next));
    if (answer == nullptr) {
        api.PyErr_Print();
        std::fprintf(stderr, "uncut_mpi: a product failed, and what its result holds is not known: the program ends\n");
        std::abort();
    }
    const long done = api.PyLong_AsLong(answer);
    api.Py_DecRef(answer);
    api.PyGILState_Release(state);
    return done != 0;
}

void forget(std::int64_t context) {
    if (!is_loaded || is_fork || api.Py_IsInitialized() == 0) return;  // Python itself may have ended
    const PyGILState_STATE state = api.PyGILState_Ensure();
    if (PyObject *answer = api.PyObject_CallMethod(calls, "forget", "L", static_cast<long long>(context)))
        api.Py_DecRef(answer);
    else
        api.PyErr_Print();
    api.PyGILState_Release(state);
}

}  // namespace uncut::blas
