// ?gemm_ and p?gemm_ as a program calls them: handed to uncut_mpi.blas in Python, or on to the library behind this one.
#include "blas/python.hpp"
#include "blas/uncut_mpi_blas.h"

#include <link.h>
#include <strings.h>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>

namespace {

using uncut::blas::Where;

// For less Python is not even started. On two H200 17 Gflop through page-locked memory took 15 ms, on the 32 cores
// beside them 140 ms; of an eighth of that, the copies are a quarter.
constexpr double default_gflop = 2.0;

bool is_one_of(const char *text, std::initializer_list<const char *> words) {
    return std::any_of(words.begin(), words.end(), [text](const char *word) { return strcasecmp(text, word) == 0; });
}

double least_gflop() {
    static const double least = [] {
        const char *text = std::getenv("UNCUT_MPI_BLAS_MIN_GFLOP");
        if (text == nullptr || *text == 0) return default_gflop;
        char *end = nullptr;
        const double given = std::strtod(text, &end);
        if (*end == 0 && given >= 0 && std::isfinite(given)) return given;
        std::fprintf(stderr, "uncut_mpi: UNCUT_MPI_BLAS_MIN_GFLOP = '%s' is no number of Gflop, so %g is taken\n", text,
                     default_gflop);
        return default_gflop;
    }();
    return least;
}

// -- the library behind this one -----------------------------------------------------------------

struct Search {
    const char *name;
    void *found;
};

int look(dl_phdr_info *info, std::size_t, void *given) {
    auto *search = static_cast<Search *>(given);
    if (info->dlpi_name == nullptr || *info->dlpi_name == 0) return 0;
    void *handle = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) return 0;
    void *symbol = dlsym(handle, search->name);
    dlclose(handle);
    Dl_info theirs{}, ours{};
    if (symbol != nullptr && dladdr(symbol, &theirs) != 0 &&
        dladdr(reinterpret_cast<void *>(&least_gflop), &ours) != 0 && theirs.dli_fbase != ours.dli_fbase)
        search->found = symbol;
    return search->found != nullptr;
}

// Return the routine of a name that the program would call without this library. Python loads extensions and what they
// link so that RTLD_NEXT does not see them: then it is that of the first library that has one.
void *behind(const char *name) {
    if (void *next = dlsym(RTLD_NEXT, name)) return next;
    Search search{name, nullptr};
    dl_iterate_phdr(look, &search);
    return search.found;
}

// -- counting ------------------------------------------------------------------------------------

// Of one routine: how many calls there were, and how many of them the devices have computed, with their flop.
struct Count {
    std::atomic<long> calls{0}, taken{0};
    std::atomic<double> flop{0}, flop_taken{0};
};

constexpr const char letters[] = "sdcz";
Count counts[2][4];

int letter_at(char letter) { return static_cast<int>(std::strchr(letters, letter) - letters); }

void add(std::atomic<double> &sum, double value) {
    double now = sum.load();
    while (!sum.compare_exchange_weak(now, now + value)) {
    }
}

struct Report {
    ~Report() {
        const char *text = std::getenv("UNCUT_MPI_BLAS_LOG");
        if (text == nullptr || is_one_of(text, {"", "0", "false", "no", "off"})) return;
        bool any = false;
        for (int p = 0; p < 2; ++p)
            for (int at = 0; at < 4; ++at) {
                const Count &one = counts[p][at];
                if (one.calls == 0) continue;
                any = true;
                const double share = one.flop > 0 ? 100 * one.flop_taken / one.flop : 0;
                std::fprintf(stderr,
                             "uncut_mpi: %s%cgemm_: %ld of %ld calls on devices, %.2f %% of %.4g Gflop (process %d)\n",
                             p == 1 ? "p" : "", letters[at], one.taken.load(), one.calls.load(), share, one.flop * 1e-9,
                             static_cast<int>(getpid()));
            }
        if (!any)
            std::fprintf(stderr, "uncut_mpi: no ?gemm_ and no p?gemm_ was called (process %d)\n",
                         static_cast<int>(getpid()));
    }
} report;

// -- calls ---------------------------------------------------------------------------------------

// Only one call is under way in a process. A product of this process alone goes on to the library behind meanwhile: of
// another thread, or one that our own computing makes. That of a grid waits, since all its ranks have to do the same.
std::mutex one_at_a_time;

int op_of(const char *given) {
    const int op = *given & ~0x20;  // upper case
    return op == 'N' || op == 'T' || op == 'C' ? op : 0;
}

double flop_of(char letter, double m, double n, double k) {
    return (letter == 'c' || letter == 'z' ? 8 : 2) * m * n * k;
}

struct Scalars {
    double alpha[2]{}, beta[2]{};
    Scalars(char letter, const void *a, const void *b) {
        for (auto [to, from] : {std::pair{alpha, a}, std::pair{beta, b}})
            for (int part = 0; part < (letter == 'c' || letter == 'z' ? 2 : 1); ++part)
                to[part] = letter == 's' || letter == 'c' ? static_cast<double>(static_cast<const float *>(from)[part])
                                                          : static_cast<const double *>(from)[part];
    }
};

// What all processes of a grid have said to each other, by their own BLACS: else some would wait in a product that
// others leave to the library behind.
struct Grid {
    double least_flop = 0;  // from how many on a product may be computed here; of all who say it the most
    enum {
        unknown,
        yes,
        no
    } can = unknown;  // whether all have Python and MPI, which is asked when one first is so large
};
std::map<std::int64_t, Grid> grids;  // by context

// Whether a product of a context's grid may be computed here. Whoever is not in the grid has no part.
template <class Int>
bool may_compute(std::int64_t given, double flop) {
    using Info = void(Int, Int *, Int *, Int *, Int *);
    using Most = void(Int, const char *, const char *, Int, Int, Int *, Int, Int *, Int *, Int, Int, Int);
    static const auto info = reinterpret_cast<Info *>(behind("Cblacs_gridinfo"));
    static const auto most = reinterpret_cast<Most *>(behind("Cigamx2d"));
    if (info == nullptr || most == nullptr) return flop >= 1e9 * least_gflop();  // what is missing, Python says
    const Int context = static_cast<Int>(given);
    const auto most_of_all = [&](double value) {
        Int number = static_cast<Int>(std::min(value, 2147483647.0));
        most(context, "All", " ", 1, 1, &number, 1, nullptr, nullptr, -1, -1, 0);
        return number;
    };
    auto found = grids.find(given);
    if (found == grids.end()) {
        Int rows = 0, cols = 0, row = -1, col = -1;
        info(context, &rows, &cols, &row, &col);
        if (row < 0) return false;
        found = grids.emplace(given, Grid{1e6 * most_of_all(1e3 * least_gflop()), Grid::unknown}).first;
    }
    Grid &grid = found->second;
    if (flop < grid.least_flop) return false;
    if (grid.can == Grid::unknown) grid.can = most_of_all(uncut::blas::can_begin() ? 0 : 1) == 0 ? Grid::yes : Grid::no;
    return grid.can == Grid::yes;
}

void forget(std::int64_t context) {
    uncut::blas::forget(context);
    uncut::blas::wait_for(one_at_a_time);
    const std::lock_guard lock(one_at_a_time, std::adopt_lock);
    grids.erase(context);
}

// Hand a call to Python, if it may be worth it; return whether it was computed. `may` is asked of a grid's context.
template <std::size_t N>
bool taken(bool (*may)(std::int64_t, double), char letter, double flop, const std::int64_t (&facts)[N],
           const Where &where, const Scalars &scalars, void *next) {
    const bool p = may != nullptr;
    Count &count = counts[p][letter_at(letter)];
    count.calls += 1;
    add(count.flop, flop);
    thread_local bool is_inside = false;  // the library behind may call ?gemm in its turn
    if (is_inside || flop == 0 || (!p && flop < 1e9 * least_gflop())) return false;
    if (p)
        uncut::blas::wait_for(one_at_a_time);
    else if (!one_at_a_time.try_lock())
        return false;
    const std::lock_guard lock(one_at_a_time, std::adopt_lock);
    const struct Inside {
        bool &is;
        explicit Inside(bool &given) : is(given) { is = true; }
        ~Inside() { is = false; }
    } inside(is_inside);
    if (p && !may(facts[10], flop)) return false;
    if (!uncut::blas::ask(p, facts, sizeof facts, where, scalars.alpha, scalars.beta, next)) return false;
    count.taken += 1;
    add(count.flop_taken, flop);
    return true;
}

[[noreturn]] void lacks(const std::string &name) {
    std::fprintf(
        stderr,
        "uncut_mpi: %s was called, and no library behind libuncut_mpi_blas has it: link one too, with --no-as-needed\n",
        name.c_str());
    std::abort();
}

template <class Function>
Function *must(const std::string &name, void *found) {
    if (found == nullptr) lacks(name);
    return reinterpret_cast<Function *>(found);
}

using Illegal = void (*)(const char *, const void *, std::size_t);

// Tell the program of an illegal argument as BLAS does, where no routine behind this one will.
template <class Int>
void illegal(const std::string &name, Int number) {
    std::fprintf(stderr, "uncut_mpi: %s: argument %ld is illegal\n", name.c_str(), static_cast<long>(number));
    if (void *xerbla = dlsym(RTLD_DEFAULT, "xerbla_")) {
        std::string padded = name + std::string(name.size() < 6 ? 6 - name.size() : 0, ' ');
        reinterpret_cast<Illegal>(xerbla)(padded.c_str(), &number, padded.size());
        return;
    }
    std::abort();
}

template <class Int>
Int illegal_at(const char *ta, const char *tb, Int m, Int n, Int k, Int lda, Int ldb, Int ldc) {
    const int a = op_of(ta), b = op_of(tb);
    const auto least = [](Int rows) { return rows > 1 ? rows : Int{1}; };
    if (a == 0) return 1;
    if (b == 0) return 2;
    if (m < 0) return 3;
    if (n < 0) return 4;
    if (k < 0) return 5;
    if (lda < least(a == 'N' ? m : k)) return 8;
    if (ldb < least(b == 'N' ? k : n)) return 10;
    return ldc < least(m) ? 13 : 0;
}

template <char letter, class Int, class Routine>
void gemm(const std::string &name, void *next, const char *ta, const char *tb, const Int *m, const Int *n, const Int *k,
          const void *alpha, const void *a, const Int *lda, const void *b, const Int *ldb, const void *beta, void *c,
          const Int *ldc) {
    const Int wrong = illegal_at(ta, tb, *m, *n, *k, *lda, *ldb, *ldc);
    if (wrong == 0) {
        const std::int64_t facts[] = {letter, sizeof(Int), op_of(ta), op_of(tb), *m, *n, *k};
        if (taken(nullptr, letter, flop_of(letter, *m, *n, *k), facts, Where{{a, b, c}, {*lda, *ldb, *ldc}},
                  Scalars(letter, alpha, beta), next))
            return;
    }
    if (next != nullptr) return must<Routine>(name, next)(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, 1, 1);
    if (wrong == 0) lacks(name);
    illegal(name, wrong);
}

// A descriptor without its LLD as one of type 2, which says how large the first blocks are; 0 for another type, else
// where the LLD is.
template <class Int>
int descriptor(const Int *given, std::int64_t *facts) {
    if (*given != 1 && *given != 2) return 0;
    const int blocks = *given == 1 ? 4 : 6;
    std::copy_n(given, 6, facts);
    std::copy_n(given + blocks, 4, facts + 6);
    return blocks + 4;
}

template <char letter, class Int, class Routine>
void pgemm(const std::string &name, void *next, const char *ta, const char *tb, const Int *m, const Int *n,
           const Int *k, const void *alpha, const void *a, const Int *ia, const Int *ja, const Int *desca,
           const void *b, const Int *ib, const Int *jb, const Int *descb, const void *beta, void *c, const Int *ic,
           const Int *jc, const Int *descc) {
    std::int64_t facts[7 + 3 * 12] = {letter, sizeof(Int), op_of(ta), op_of(tb), *m, *n, *k};
    const Int *const starts[] = {ia, ja, ib, jb, ic, jc}, *const descriptors[] = {desca, descb, descc};
    Where where{{a, b, c}, {}};
    bool fit = facts[2] != 0 && facts[3] != 0 && *m > 0 && *n > 0 && *k > 0;
    for (int at = 0; at < 3; ++at) {
        std::int64_t *to = facts + 7 + 12 * at;
        to[0] = *starts[2 * at], to[1] = *starts[2 * at + 1];
        const int last = descriptor(descriptors[at], to + 2);
        where.leading[at] = descriptors[at][last];
        fit = fit && last != 0;
    }
    // What does not fit is for the program's own library to tell: it knows how its callers want to hear of it.
    if (fit &&
        taken(may_compute<Int>, letter, flop_of(letter, *m, *n, *k), facts, where, Scalars(letter, alpha, beta), next))
        return;
    must<Routine>(name, next)(ta, tb, m, n, k, alpha, a, ia, ja, desca, b, ib, jb, descb, beta, c, ic, jc, descc);
}

template <class Int>
using Gemm = void(const char *, const char *, const Int *, const Int *, const Int *, const void *, const void *,
                  const Int *, const void *, const Int *, const void *, void *, const Int *, std::size_t, std::size_t);
template <class Int>
using Pgemm = void(const char *, const char *, const Int *, const Int *, const Int *, const void *, const void *,
                   const Int *, const Int *, const Int *, const void *, const Int *, const Int *, const Int *,
                   const void *, void *, const Int *, const Int *, const Int *);

}  // namespace

#define UNCUT_DEFINE(letter, suffix, Int, upper)                                                                       \
    void letter##gemm##suffix(const char *ta, const char *tb, const Int *m, const Int *n, const Int *k,                \
                              const void *alpha, const void *a, const Int *lda, const void *b, const Int *ldb,         \
                              const void *beta, void *c, const Int *ldc) {                                             \
        static void *const next = behind(#letter "gemm" #suffix);                                                      \
        gemm<#letter[0], Int, Gemm<Int>>(upper "GEMM", next, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);    \
    }                                                                                                                  \
    void p##letter##gemm##suffix(const char *ta, const char *tb, const Int *m, const Int *n, const Int *k,             \
                                 const void *alpha, const void *a, const Int *ia, const Int *ja, const Int *desca,     \
                                 const void *b, const Int *ib, const Int *jb, const Int *descb, const void *beta,      \
                                 void *c, const Int *ic, const Int *jc, const Int *descc) {                            \
        static void *const next = behind("p" #letter "gemm" #suffix);                                                  \
        pgemm<#letter[0], Int, Pgemm<Int>>("P" upper "GEMM", next, ta, tb, m, n, k, alpha, a, ia, ja, desca, b, ib,    \
                                           jb, descb, beta, c, ic, jc, descc);                                         \
    }
extern "C" {
UNCUT_DEFINE(s, _, uncut_mpi_int, "S")
UNCUT_DEFINE(d, _, uncut_mpi_int, "D")
UNCUT_DEFINE(c, _, uncut_mpi_int, "C")
UNCUT_DEFINE(z, _, uncut_mpi_int, "Z")
UNCUT_DEFINE(s, _64_, std::int64_t, "S")
UNCUT_DEFINE(d, _64_, std::int64_t, "D")
UNCUT_DEFINE(c, _64_, std::int64_t, "C")
UNCUT_DEFINE(z, _64_, std::int64_t, "Z")

// A context's number may be that of another grid after these.
void blacs_gridexit_(const uncut_mpi_int *context) {
    static void *const next = behind("blacs_gridexit_");
    forget(*context);
    must<void(const uncut_mpi_int *)>("blacs_gridexit_", next)(context);
}

void Cblacs_gridexit(uncut_mpi_int context) {
    static void *const next = behind("Cblacs_gridexit");
    forget(context);
    must<void(uncut_mpi_int)>("Cblacs_gridexit", next)(context);
}
}
