// Level 3 of BLAS and PBLAS as a program calls it: handed to uncut_mpi.blas in Python, or on to the library behind this
// one.
#include "blas/python.hpp"
#include "blas/uncut_mpi_blas.h"

#include <link.h>
#include <strings.h>
#include <algorithm>
#include <atomic>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

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

// -- the routines --------------------------------------------------------------------------------

// The arguments of a routine: its letters, M, N and K, alpha, matrices, and before the last of these beta.
struct Routine {
    const char *name;
    // What each letter is: Side, Uplo, Diag or an op: of all there are, of Symmetric or of Hermitian results.
    const char *letters;
    int extents, matrices;
    bool has_beta, real_alpha, real_beta;
    double share;  // of the operations of a product of as many rows and columns
};

// In the order of ROUTINES in routines.py.
constexpr Routine routines[] = {
    {"gemm", "OO", 3, 3, true, false, false, 1},      {"syrk", "US", 2, 2, true, false, false, 0.5},
    {"herk", "UH", 2, 2, true, true, true, 0.5},      {"syr2k", "US", 2, 3, true, false, false, 1},
    {"her2k", "UH", 2, 3, true, false, true, 1},      {"symm", "LU", 2, 3, true, false, false, 1},
    {"hemm", "LU", 2, 3, true, false, false, 1},      {"trmm", "LUOD", 2, 2, false, false, false, 0.5},
    {"trsm", "LUOD", 2, 2, false, false, false, 0.5},
};
constexpr int num_routines = sizeof routines / sizeof *routines;

constexpr int number_of(std::string_view name) {
    int at = 0;
    while (routines[at].name != name)
        ++at;
    return at;
}

bool is_complex(char letter) { return letter == 'c' || letter == 'z'; }

// Return a letter that a program passed, in upper case; 0 if there is none such.
int letter_of(char kind, bool complex, const void *given) {
    const char *known = kind == 'L'   ? "LR"
                        : kind == 'U' ? "UL"
                        : kind == 'D' ? "UN"
                        : kind == 'H' ? "NC"
                                      : (kind == 'S' && complex ? "NT" : "NTC");
    const int found = *static_cast<const char *>(given) & ~0x20;
    return found != 0 && std::strchr(known, found) != nullptr ? found : 0;
}

// What all processes of a grid pass alike.
struct Facts {
    std::int64_t routine, letter, integer_bytes, letters[4], extents[3], matrices[3][12];
};

// A call as its caller made it.
template <class Int>
struct Call {
    const Routine &routine;
    char letter;
    Facts facts{};
    Where where{};
    const void *alpha = nullptr, *beta = nullptr;
    int illegal = 0;  // number of the first argument that is
    bool fit = true;  // whether descriptors are of types that are known
    double flop = 0;

    Call(int number, char type, bool dealt, std::initializer_list<const void *> given)
        : routine(routines[number]), letter(type) {
        facts.routine = number, facts.letter = type, facts.integer_bytes = sizeof(Int);
        const auto *const all = given.begin();
        int at = 0;
        const auto require = [&](bool good) {
            if (!good && illegal == 0) illegal = at;
        };
        const auto next = [&] { return all[at++]; };
        const auto integers = [&] { return static_cast<const Int *>(next()); };
        for (int one = 0; routine.letters[one] != 0; ++one)
            require((facts.letters[one] = letter_of(routine.letters[one], is_complex(type), next())) != 0);
        for (int one = 0; one < routine.extents; ++one)
            require((facts.extents[one] = *integers()) >= 0);
        const auto [m, n, k] = facts.extents;
        const bool is_gemm = routine.extents == 3, is_sided = routine.letters[0] == 'L';
        const std::int64_t edge = is_gemm ? k : !is_sided || facts.letters[0] == 'L' ? m : n;
        flop = routine.share * (is_complex(type) ? 8 : 2) * static_cast<double>(m) * static_cast<double>(n) *
               static_cast<double>(edge);
        const auto either = [&](int op, std::int64_t plain, std::int64_t turned) {
            return facts.letters[op] == 'N' ? plain : turned;
        };
        const std::int64_t factor = either(1, m, n);  // rows of one whose product with itself, or another, is C
        const std::int64_t rows_of_a = is_gemm ? either(0, m, k) : is_sided ? edge : factor;
        const std::int64_t rows_of_b = is_gemm ? either(1, k, n) : is_sided ? m : factor;
        alpha = next();
        for (int one = 0; one < routine.matrices; ++one) {
            const bool is_last = one == routine.matrices - 1;
            if (is_last && routine.has_beta) beta = next();
            where.arrays[one] = next();
            if (dealt) {
                std::int64_t *to = facts.matrices[one];
                to[0] = *integers(), to[1] = *integers();
                const Int *const about = integers();
                const int last = descriptor(about, to + 2);
                fit = fit && last != 0;
                where.leading[one] = about[last];
            } else {
                where.leading[one] = *integers();
                require(where.leading[one] >= std::max<std::int64_t>(1, is_last    ? m
                                                                        : one == 0 ? rows_of_a
                                                                                   : rows_of_b));
            }
        }
    }

  private:
    // Copy a descriptor without its LLD as one of type 2, which says how large the first blocks are; return where the
    // LLD is, 0 for one of another type.
    static int descriptor(const Int *given, std::int64_t *to) {
        if (*given != 1 && *given != 2) return 0;
        const int blocks = *given == 1 ? 4 : 6;
        std::copy_n(given, 6, to);
        std::copy_n(given + blocks, 4, to + 6);
        return blocks + 4;
    }
};

// -- counting ------------------------------------------------------------------------------------

// Of one routine: how many calls there were, and how many of them the devices have computed, with their flop.
struct Count {
    std::atomic<long> calls{0}, taken{0};
    std::atomic<double> flop{0}, flop_taken{0};
};

constexpr const char letters[] = "sdcz";
Count counts[2][num_routines][4];

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
        for (int at = 0; at < 2 * num_routines * 4; ++at) {
            const int p = at / 4 / num_routines, routine = at / 4 % num_routines, letter = at % 4;
            const Count &one = counts[p][routine][letter];
            if (one.calls == 0) continue;
            any = true;
            const double share = one.flop > 0 ? 100 * one.flop_taken / one.flop : 0;
            std::fprintf(stderr,
                         "uncut_mpi: %s%c%s_: %ld of %ld calls on devices, %.2f %% of %.4g Gflop (process %d)\n",
                         p == 1 ? "p" : "", letters[letter], routines[routine].name, one.taken.load(), one.calls.load(),
                         share, one.flop * 1e-9, static_cast<int>(getpid()));
        }
        if (!any)
            std::fprintf(stderr,
                         "uncut_mpi: no ?gemm_ and no p?gemm_ was called, nor another of level 3 (process %d)\n",
                         static_cast<int>(getpid()));
    }
} report;

// -- calls ---------------------------------------------------------------------------------------

// Only one call is under way in a process. A product of this process alone goes on to the library behind meanwhile: of
// another thread, or one that our own computing makes. That of a grid waits, since all its ranks have to do the same.
std::mutex one_at_a_time;

void read_scalar(char letter, bool is_real, const void *from, double (&to)[2]) {
    for (int part = 0; from != nullptr && part < (is_complex(letter) && !is_real ? 2 : 1); ++part)
        to[part] = letter == 's' || letter == 'c' ? static_cast<double>(static_cast<const float *>(from)[part])
                                                  : static_cast<const double *>(from)[part];
}

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

// Hand a call to Python, if it may be worth it; return whether it was computed. `may` is asked of a grid's context,
// `gemm` is what tells how fast the library behind is.
template <class Int>
bool taken(bool (*may)(std::int64_t, double), const Call<Int> &call, void *gemm) {
    const bool p = may != nullptr;
    Count &count = counts[p][call.facts.routine][letter_at(call.letter)];
    count.calls += 1;
    add(count.flop, call.flop);
    thread_local bool is_inside = false;  // the library behind may call ?gemm in its turn
    if (is_inside || call.flop == 0 || (!p && call.flop < 1e9 * least_gflop())) return false;
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
    if (p && !may(call.facts.matrices[0][3], call.flop)) return false;
    double alpha[2]{}, beta[2]{};
    read_scalar(call.letter, call.routine.real_alpha, call.alpha, alpha);
    read_scalar(call.letter, call.routine.real_beta, call.beta, beta);
    if (!uncut::blas::ask(p, &call.facts, sizeof call.facts, call.where, alpha, beta, gemm)) return false;
    count.taken += 1;
    add(count.flop_taken, call.flop);
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

std::string upper(std::string name) {  // without the suffix
    name.resize(name.find('_'));
    for (char &one : name)
        one = static_cast<char>(std::toupper(one));
    return name;
}

template <int number, char letter, class Int, class... Args>
void compute(const char *name, void *next, void *gemm, Args... given) {
    const Call<Int> call(number, letter, false, {given...});
    if (call.illegal == 0 && taken<Int>(nullptr, call, gemm)) return;
    if (next != nullptr) {
        if constexpr (std::string_view(routines[number].letters).size() == 2)
            return must<void(Args..., std::size_t, std::size_t)>(name, next)(given..., 1, 1);
        else
            return must<void(Args..., std::size_t, std::size_t, std::size_t, std::size_t)>(name, next)(given..., 1, 1,
                                                                                                       1, 1);
    }
    if (call.illegal == 0) lacks(upper(name));
    illegal<Int>(upper(name), static_cast<Int>(call.illegal));
}

template <int number, char letter, class Int, class... Args>
void compute_on_grid(const char *name, void *next, void *gemm, Args... given) {
    const Call<Int> call(number, letter, true, {given...});
    // What does not fit is for the program's own library to tell: it knows how its callers want to hear of it.
    if (call.illegal == 0 && call.fit && call.flop > 0 && taken<Int>(may_compute<Int>, call, gemm)) return;
    must<void(Args...)>(upper(name), next)(given...);
}

}  // namespace

#define UNCUT_NAME(x) x
#define UNCUT_LOCAL(kind, x) x, ld##x
#define UNCUT_DEALT(kind, x) x, i##x, j##x, desc##x
#define UNCUT_DEFINE_OF(letter, name, of, suffix, Int, INT, LOCAL, DEALT)                                              \
    void letter##name##suffix(of(UNCUT_MPI_TEXT, INT, UNCUT_MPI_SCALAR, LOCAL)) {                                      \
        static void *const next = behind(#letter #name #suffix), *const gemm = behind(#letter "gemm" #suffix);         \
        compute<number_of(#name), #letter[0], Int>(#letter #name #suffix, next, gemm,                                  \
                                                   of(UNCUT_NAME, UNCUT_NAME, UNCUT_NAME, UNCUT_LOCAL));               \
    }                                                                                                                  \
    void p##letter##name##suffix(of(UNCUT_MPI_TEXT, INT, UNCUT_MPI_SCALAR, DEALT)) {                                   \
        static void *const next = behind("p" #letter #name #suffix), *const gemm = behind("p" #letter "gemm" #suffix); \
        compute_on_grid<number_of(#name), #letter[0], Int>("p" #letter #name #suffix, next, gemm,                      \
                                                           of(UNCUT_NAME, UNCUT_NAME, UNCUT_NAME, UNCUT_DEALT));       \
    }
#define UNCUT_DEFINE(letter, name, of, suffix)                                                                         \
    UNCUT_DEFINE_OF(letter, name, of, suffix, uncut_mpi_int, UNCUT_MPI_INT, UNCUT_MPI_LOCAL, UNCUT_MPI_DEALT)
#define UNCUT_DEFINE_64(letter, name, of, suffix)                                                                      \
    UNCUT_DEFINE_OF(letter, name, of, suffix, std::int64_t, UNCUT_MPI_INT_64, UNCUT_MPI_LOCAL_64, UNCUT_MPI_DEALT_64)

extern "C" {
UNCUT_MPI_ALL(UNCUT_DEFINE, _)
UNCUT_MPI_ALL(UNCUT_DEFINE_64, _64_)

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
