/* Products under the names of BLAS and PBLAS: link libuncut_mpi_blas, or load it first (LD_PRELOAD).
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

#define UNCUT_MPI_DECLARE(letter, suffix, integer)                                                                     \
    void letter##gemm##suffix(const char *transa, const char *transb, const integer *m, const integer *n,              \
                              const integer *k, const void *alpha, const void *a, const integer *lda, const void *b,   \
                              const integer *ldb, const void *beta, void *c, const integer *ldc);                      \
    void p##letter##gemm##suffix(const char *transa, const char *transb, const integer *m, const integer *n,           \
                                 const integer *k, const void *alpha, const void *a, const integer *ia,                \
                                 const integer *ja, const integer *desca, const void *b, const integer *ib,            \
                                 const integer *jb, const integer *descb, const void *beta, void *c,                   \
                                 const integer *ic, const integer *jc, const integer *descc);
UNCUT_MPI_DECLARE(s, _, uncut_mpi_int)
UNCUT_MPI_DECLARE(d, _, uncut_mpi_int)
UNCUT_MPI_DECLARE(c, _, uncut_mpi_int)
UNCUT_MPI_DECLARE(z, _, uncut_mpi_int)
UNCUT_MPI_DECLARE(s, _64_, int64_t)
UNCUT_MPI_DECLARE(d, _64_, int64_t)
UNCUT_MPI_DECLARE(c, _64_, int64_t)
UNCUT_MPI_DECLARE(z, _64_, int64_t)
#undef UNCUT_MPI_DECLARE

#ifdef __cplusplus
}
#endif

#endif
