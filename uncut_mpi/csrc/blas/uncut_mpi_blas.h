/* Level 3 of BLAS and PBLAS under their names: link libuncut_mpi_blas, or load it first (LD_PRELOAD).
 *
 * They compute what those of the BLAS and ScaLAPACK behind them in the order of libraries compute, on GPUs where that
 * is expected to take less time, else by these. Integers have 32 bits, those of names with _64_ and of
 * libuncut_mpi_blas_ilp64 64 bits. Complex numbers are two reals, real part first.
 */
#ifndef UNCUT_MPI_BLAS_H
#define UNCUT_MPI_BLAS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifdef UNCUT_MPI_ILP64
typedef int64_t uncut_mpi_int;
#else
typedef int32_t uncut_mpi_int;
#endif

/* Arguments, of which `text`, `number`, `scalar` and `matrix` say what they are: of the last one that it is written. */
#define UNCUT_MPI_OF_GEMM(text, number, scalar, matrix)                                                                \
    text(transa), text(transb), number(m), number(n), number(k), scalar(alpha), matrix(const, a), matrix(const, b),    \
        scalar(beta), matrix(, c)
#define UNCUT_MPI_OF_SYRK(text, number, scalar, matrix)                                                                \
    text(uplo), text(trans), number(n), number(k), scalar(alpha), matrix(const, a), scalar(beta), matrix(, c)
#define UNCUT_MPI_OF_SYR2K(text, number, scalar, matrix)                                                               \
    text(uplo), text(trans), number(n), number(k), scalar(alpha), matrix(const, a), matrix(const, b), scalar(beta),    \
        matrix(, c)
#define UNCUT_MPI_OF_SYMM(text, number, scalar, matrix)                                                                \
    text(side), text(uplo), number(m), number(n), scalar(alpha), matrix(const, a), matrix(const, b), scalar(beta),     \
        matrix(, c)
#define UNCUT_MPI_OF_TRMM(text, number, scalar, matrix)                                                                \
    text(side), text(uplo), text(trans), text(diag), number(m), number(n), scalar(alpha), matrix(const, a), matrix(, b)

/* All routines of a type: use(letter, name, arguments, suffix). */
#define UNCUT_MPI_REAL(use, letter, suffix)                                                                            \
    use(letter, gemm, UNCUT_MPI_OF_GEMM, suffix) use(letter, syrk, UNCUT_MPI_OF_SYRK, suffix)                          \
        use(letter, syr2k, UNCUT_MPI_OF_SYR2K, suffix) use(letter, symm, UNCUT_MPI_OF_SYMM, suffix)                    \
            use(letter, trmm, UNCUT_MPI_OF_TRMM, suffix) use(letter, trsm, UNCUT_MPI_OF_TRMM, suffix)
#define UNCUT_MPI_COMPLEX(use, letter, suffix)                                                                         \
    UNCUT_MPI_REAL(use, letter, suffix)                                                                                \
    use(letter, herk, UNCUT_MPI_OF_SYRK, suffix) use(letter, her2k, UNCUT_MPI_OF_SYR2K, suffix)                        \
        use(letter, hemm, UNCUT_MPI_OF_SYMM, suffix)
#define UNCUT_MPI_ALL(use, suffix)                                                                                     \
    UNCUT_MPI_REAL(use, s, suffix)                                                                                     \
    UNCUT_MPI_REAL(use, d, suffix) UNCUT_MPI_COMPLEX(use, c, suffix) UNCUT_MPI_COMPLEX(use, z, suffix)

#define UNCUT_MPI_TEXT(x) const char *x
#define UNCUT_MPI_SCALAR(x) const void *x
#define UNCUT_MPI_INT(x) const uncut_mpi_int *x
#define UNCUT_MPI_LOCAL(kind, x) kind void *x, const uncut_mpi_int *ld##x
#define UNCUT_MPI_DEALT(kind, x)                                                                                       \
    kind void *x, const uncut_mpi_int *i##x, const uncut_mpi_int *j##x, const uncut_mpi_int *desc##x
#define UNCUT_MPI_INT_64(x) const int64_t *x
#define UNCUT_MPI_LOCAL_64(kind, x) kind void *x, const int64_t *ld##x
#define UNCUT_MPI_DEALT_64(kind, x) kind void *x, const int64_t *i##x, const int64_t *j##x, const int64_t *desc##x

#define UNCUT_MPI_DECLARE(letter, name, of, suffix)                                                                    \
    void letter##name##suffix(of(UNCUT_MPI_TEXT, UNCUT_MPI_INT, UNCUT_MPI_SCALAR, UNCUT_MPI_LOCAL));                   \
    void p##letter##name##suffix(of(UNCUT_MPI_TEXT, UNCUT_MPI_INT, UNCUT_MPI_SCALAR, UNCUT_MPI_DEALT));
#define UNCUT_MPI_DECLARE_64(letter, name, of, suffix)                                                                 \
    void letter##name##suffix(of(UNCUT_MPI_TEXT, UNCUT_MPI_INT_64, UNCUT_MPI_SCALAR, UNCUT_MPI_LOCAL_64));             \
    void p##letter##name##suffix(of(UNCUT_MPI_TEXT, UNCUT_MPI_INT_64, UNCUT_MPI_SCALAR, UNCUT_MPI_DEALT_64));
UNCUT_MPI_ALL(UNCUT_MPI_DECLARE, _)
UNCUT_MPI_ALL(UNCUT_MPI_DECLARE_64, _64_)

#ifdef __cplusplus
}
#endif

#endif
