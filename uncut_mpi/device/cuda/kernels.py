"""
The text of our kernels: COMBINE; COPY, transposing or packed; and what solves with a small triangle.

COMBINE is a weighted sum of regions, converted and rounded once, and may have an epilogue.
A signature holds 4 bits of the written type, then 4 bits (code + 1) per region read, lowest first. That of a kernel
that transposes is `TRANSPOSING` and the bytes of an element, whatever its type. `PACKING` makes many small copies. A
COMBINE whose result has an epilogue has `EPILOGUE` besides. That of a solver has `SOLVING` and a type.
Halves are converted by integer arithmetic and PTX, so that no CUDA header is needed to compile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.schedule import MAX_SUMMANDS

TRANSPOSING: Final = 1 << 4 * (MAX_SUMMANDS + 1)
PACKING: Final = 2 * TRANSPOSING
EPILOGUE: Final = 4 * TRANSPOSING
SOLVING: Final = 8 * TRANSPOSING

_TYPES: Final = {
    DType.f64: "double",
    DType.f32: "float",
    DType.f16: "half_bits",
    DType.bf16: "bfloat_bits",
    DType.tf32: "float",
    DType.c64: "complex<float>",
    DType.c128: "complex<double>",
    DType.i8: "signed char",
    DType.i32: "int",
    DType.e4m3: "e4m3_bits",
    DType.e5m2: "e5m2_bits",
}

# `arguments` is CombineArguments of csrc/cuda_executor.hpp, field by field.
_PRELUDE: Final = (
    f"#define MAX_SUMMANDS {MAX_SUMMANDS}\n"
    + """
struct arguments {
    unsigned long long destination;
    long long ld, rows, cols;
    unsigned long long source[MAX_SUMMANDS];
    long long source_ld[MAX_SUMMANDS];
    double factor[MAX_SUMMANDS], imaginary[MAX_SUMMANDS];
    long long ending, diagonal;
    unsigned long long scale, bias;
    long long activation, kept;
};
struct half_bits { unsigned short bits; };
struct bfloat_bits { unsigned short bits; };
struct e4m3_bits { unsigned char bits; };
struct e5m2_bits { unsigned char bits; };
template <typename T> struct alignas(2 * sizeof(T)) complex { T re, im; };

__device__ inline double widen(double x) { return x; }
__device__ inline float widen(float x) { return x; }
__device__ inline float widen(half_bits x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ inline float widen(bfloat_bits x) { return __uint_as_float((unsigned)x.bits << 16); }
// e5m2 is the upper half of a half. e4m3 shifted to its place is one whose exponent is 8 too small; it has no infinity.
__device__ inline float widen(e5m2_bits x) { return widen(half_bits{(unsigned short)(x.bits << 8)}); }
__device__ inline float widen(e4m3_bits x) {
    const unsigned size = x.bits & 0x7fu;
    if (size == 0x7fu) return __uint_as_float(0x7fc00000u);
    return 256.0f * widen(half_bits{(unsigned short)((x.bits & 0x80u) << 8 | size << 7)});
}
__device__ inline int widen(signed char x) { return x; }
__device__ inline int widen(int x) { return x; }
template <typename T> __device__ inline complex<T> widen(complex<T> x) { return x; }

template <typename T> __device__ inline void make_real(T &) {}
template <typename T> __device__ inline void make_real(complex<T> &x) { x.im = 0; }

// cupy compiles with -ftz=true, which would flush subnormal float32; PTX says what is meant.
__device__ inline double fused(double x, double y, double z) { return fma(x, y, z); }
__device__ inline float fused(float x, float y, float z) {
    float sum;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(x), "f"(y), "f"(z));
    return sum;
}
__device__ inline int fused(int x, int y, int z) { return (int)((unsigned)x * (unsigned)y + (unsigned)z); }
// A factor without imaginary part is a real number: an infinity times its 0 would be NaN.
template <typename T> __device__ inline complex<T> fused(complex<T> x, complex<T> y, complex<T> z) {
    z.re = fused(x.re, y.re, z.re);
    z.im = fused(x.re, y.im, z.im);
    if (x.im != 0) {
        z.re = fused(-x.im, y.im, z.re);
        z.im = fused(x.im, y.re, z.im);
    }
    return z;
}

__device__ inline void take(const arguments &a, int i, double &factor) { factor = a.factor[i]; }
__device__ inline void take(const arguments &a, int i, float &factor) { factor = (float)a.factor[i]; }
__device__ inline void take(const arguments &a, int i, int &factor) { factor = (int)a.factor[i]; }
template <typename T> __device__ inline void take(const arguments &a, int i, complex<T> &factor) {
    factor.re = (T)a.factor[i];
    factor.im = (T)a.imaginary[i];
}

__device__ inline void narrow(double x, double &y) { y = x; }
__device__ inline void narrow(float x, float &y) { y = x; }
__device__ inline void narrow(double x, float &y) { y = (float)x; }
__device__ inline void narrow(int x, int &y) { y = x; }
__device__ inline void narrow(int x, signed char &y) { y = (signed char)x; }
template <typename T> __device__ inline void narrow(complex<T> x, complex<T> &y) { y = x; }
__device__ inline void narrow(float x, half_bits &y) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}
__device__ inline void narrow(float x, bfloat_bits &y) {
    const unsigned bits = __float_as_uint(x);
    // To nearest, ties to even; a NaN stays a NaN instead of carrying over into infinity.
    y.bits = x != x ? 0x7fc0 : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Of an epilogue (model/epilogue.py).
__device__ inline double activated(long long which, double x) {
    if (which == 1) return x < 0 ? 0 : x;
    if (which == 2) return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    return x;
}
__device__ inline float activated(long long which, float x) {
    if (which == 1) return x < 0 ? 0 : x;
    if (which == 2) return 0.5f * x * (1 + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    return x;
}

template <typename T> struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) four { T x[4]; };

template <typename T> __device__ inline bool fits(unsigned long long address, long long ld) {
    return (address | (unsigned long long)ld * sizeof(T)) % sizeof(four<T>) == 0;
}
template <typename T, typename S>
__device__ inline void add(const T *in, long long apart, long long left, bool whole, S factor, S *sum) {
    four<T> part;
    if (whole) {
        part = *(const four<T> *)in;
    } else {
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i * apart < left) part.x[i] = in[i * apart];
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i * apart < left) sum[i] = fused(factor, widen(part.x[i]), sum[i]);
}
template <typename T, typename S>
__device__ inline void put(T *out, long long apart, long long left, bool whole, const S *sum) {
    four<T> part;
    #pragma unroll
    for (int i = 0; i < 4; ++i) narrow(sum[i], part.x[i]);
    if (whole) {
        *(four<T> *)out = part;
    } else {
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i * apart < left) out[i * apart] = part.x[i];
    }
}
"""
)

# Written is all of a region, or a triangle (OpCode of csrc/records.hpp): the rows from the diagonal on, or up to it.
_TRIANGLE: Final = {
    "may_be_aligned": "a.ending == 0",
    "first": "a.ending == 3 || a.ending == 5 ? max(0ll, col - a.diagonal) : 0",
    "last": "a.ending == 4 || a.ending == 6 ? min(a.rows, col - a.diagonal + 1) : a.rows",
    "end": """
            // The diagonal of a Hermitian C is real.
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                if (a.ending >= 5 && row + i * apart == col - a.diagonal) make_real(sum[i]);""",
}
# Or it has an epilogue; beta C is added last.
_WHOLE: Final = {
    "may_be_aligned": "true",
    "first": "0",
    "last": "a.rows",
    "end": """
            #pragma unroll
            for (int i = 0; i < 4; ++i) {{
                if (i * apart >= left) break;
                const long long at = a.ending == 7 ? row + i * apart : col;
                if (a.scale != 0)
                    sum[i] = fused(({sum})widen(((const {written} *)a.scale)[at]), sum[i], ({sum})0);
                if (a.bias != 0)
                    sum[i] = fused(({sum})1, ({sum})widen(((const {written} *)a.bias)[at]), sum[i]);
            }}
{kept}
            #pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = activated(a.activation, sum[i]);""",
}
_KERNEL: Final = """
extern "C" __global__ void {name}(const arguments a) {{
    const long long step = (long long)gridDim.x * blockDim.x;
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    // Four rows a thread: neighbours, moved at once, where every region allows it; else rows `step` apart.
    const bool aligned = {may_be_aligned} && fits<{written}>(a.destination, a.ld){aligned};
    const long long apart = aligned ? 1 : step;
    for (long long col = (long long)blockIdx.y * blockDim.y + threadIdx.y; col < a.cols;
         col += (long long)gridDim.y * blockDim.y) {{
        const long long first = {first};
        const long long last = {last};
        for (long long row = first + (aligned ? 4 * thread : thread); row < last; row += 4 * step) {{
            const long long left = last - row;
            const bool whole = aligned && left >= 4;
            {sum} sum[4] = {{}};
{reads}{end}
            put(({written} *)a.destination + col * a.ld + row, apart, left, whole, sum);
        }}
    }}
}}
"""

# A region whose factor is 0 is not read, so that NaN in it stays out.
_READ: Final = """            if ({which}(a.factor[{i}] != 0.0 || a.imaginary[{i}] != 0.0)) {{
                {sum} factor;
                take(a, {i}, factor);
                add((const {read} *)a.source[{i}] + col * a.source_ld[{i}] + row, apart, left, whole, factor, sum);
            }}"""
_ALIGNED: Final = " && fits<{read}>(a.source[{i}], a.source_ld[{i}])"


# Tiles go through shared memory, so that columns are read and written alike. A word more per column spreads them
# over the banks.
_TRANSPOSE: Final = """
#define TILE 32
extern "C" __global__ void {name}(const arguments a) {{
    __shared__ {word} tile[TILE][TILE + 1];
    const {word} *in = (const {word} *)a.source[0];
    {word} *out = ({word} *)a.destination;
    for (long long left = (long long)TILE * blockIdx.y; left < a.cols; left += (long long)TILE * gridDim.y)
        for (long long top = (long long)TILE * blockIdx.x; top < a.rows; top += (long long)TILE * gridDim.x) {{
            for (int part = threadIdx.y; part < TILE; part += blockDim.y)
                if (left + threadIdx.x < a.cols && top + part < a.rows)
                    tile[part][threadIdx.x] = in[(top + part) * a.source_ld[0] + left + threadIdx.x];
            __syncthreads();
            for (int part = threadIdx.y; part < TILE; part += blockDim.y)
                if (top + threadIdx.x < a.rows && left + part < a.cols)
                    out[(left + part) * a.ld + top + threadIdx.x] = tile[threadIdx.x][part];
            __syncthreads();
        }}
}}
"""
# The destination is a table of `rows` copies, PackedCopy of csrc/cuda_executor.hpp. Lines go by the widest words that
# all of them begin and end at.
_PACK: Final = """
struct packed {{ unsigned long long to, from; long long to_apart, from_apart, lines, width; }};
template <typename W> __device__ inline void copy_lines(const packed &a) {{
    // One copy has 2 MiB at most.
    const unsigned words = (unsigned)(a.width / (long long)sizeof(W)), all = words * (unsigned)a.lines;
    for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < all; at += gridDim.x * blockDim.x) {{
        const unsigned line = at / words, word = at - line * words;
        ((W *)(a.to + line * a.to_apart))[word] = ((const W *)(a.from + line * a.from_apart))[word];
    }}
}}
extern "C" __global__ void {name}(const arguments a) {{
    for (long long one = blockIdx.y; one < a.rows; one += gridDim.y) {{
        const packed copy = ((const packed *)a.destination)[one];
        const unsigned long long ends = copy.to | copy.from | copy.to_apart | copy.from_apart | copy.width;
        if (ends % 16 == 0) copy_lines<uint4>(copy);
        else if (ends % 8 == 0) copy_lines<unsigned long long>(copy);
        else if (ends % 4 == 0) copy_lines<unsigned int>(copy);
        else if (ends % 2 == 0) copy_lines<unsigned short>(copy);
        else copy_lines<unsigned char>(copy);
    }}
}}
"""
# Of KernelSolver in csrc/cuda_executor.hpp; `ending` has the bits of Solving. Eight threads have a column of B in their
# registers, on the right a row, each every eighth element: what they read together fills sectors. The triangle lies in
# shared memory as if it were lower and not transposed: turned by half a circle where the last elements come first.
_SOLVE: Final = """
#define BLOCK {block}
#define PARTS 8
#define THREADS 256
__device__ inline double of_part(double x, int part) {{ return __shfl_sync(0xffffffffu, x, part, PARTS); }}
__device__ inline float of_part(float x, int part) {{ return __shfl_sync(0xffffffffu, x, part, PARTS); }}
template <typename T> __device__ inline complex<T> of_part(complex<T> x, int part) {{
    return {{of_part(x.re, part), of_part(x.im, part)}};
}}
__device__ inline double over(double x) {{ return 1 / x; }}
__device__ inline float over(float x) {{ return 1 / x; }}
template <typename T> __device__ inline complex<T> over(complex<T> x) {{  // Smith 1962, which does not overflow
    if (x.re < 0 ? -x.re >= (x.im < 0 ? -x.im : x.im) : x.re >= (x.im < 0 ? -x.im : x.im)) {{
        const T ratio = x.im / x.re, below = x.re + x.im * ratio;
        return {{1 / below, -ratio / below}};
    }}
    const T ratio = x.re / x.im, below = x.re * ratio + x.im;
    return {{ratio / below, -1 / below}};
}}
__device__ inline void conjugate(double &) {{}}
__device__ inline void conjugate(float &) {{}}
template <typename T> __device__ inline void conjugate(complex<T> &x) {{ x.im = -x.im; }}
__device__ inline double product(double x, double y) {{ return x * y; }}
__device__ inline float product(float x, float y) {{ return fused(x, y, 0.0f); }}
template <typename T> __device__ inline complex<T> product(complex<T> x, complex<T> y) {{
    return {{fused(-x.im, y.im, fused(x.re, y.re, (T)0)), fused(x.im, y.re, fused(x.re, y.im, (T)0))}};
}}
__device__ inline double less(double sum, double x, double y) {{ return fused(-x, y, sum); }}
__device__ inline float less(float sum, float x, float y) {{ return fused(-x, y, sum); }}
template <typename T> __device__ inline complex<T> less(complex<T> sum, complex<T> x, complex<T> y) {{
    return {{fused(x.im, y.im, fused(-x.re, y.re, sum.re)), fused(-x.im, y.re, fused(-x.re, y.im, sum.im))}};
}}
extern "C" __global__ void {name}(const arguments a) {{
    __shared__ {type} triangle[BLOCK][BLOCK], inverse[BLOCK];  // triangle by columns
    const int rows = (int)a.rows, part = threadIdx.x % PARTS;
    const bool right = a.ending & 1, turned = a.ending & 2, transposed = a.ending & 4;
    const long long which = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / PARTS;
    const long long apart = right ? a.ld : 1, step = turned ? -apart : apart;
    {type} *vector = ({type} *)a.destination + (right ? which : which * a.ld) + (turned ? (rows - 1) * apart : 0);
    {type} alpha, x[BLOCK / PARTS];
    take(a, 0, alpha);
    #pragma unroll
    for (int at = 0; at < BLOCK / PARTS; ++at) {{
        const int row = PARTS * at + part;
        x[at] = row < rows && which < a.cols ? vector[row * step] : {type}{{}};
    }}
    const {type} *stored = (const {type} *)a.source[0];
    const long long down = transposed ? a.source_ld[0] : 1, along = transposed ? 1 : a.source_ld[0];
    #pragma unroll 8
    for (int at = threadIdx.x; at < BLOCK * BLOCK; at += THREADS) {{
        const int row = at % BLOCK, col = at / BLOCK;
        const bool there = row < rows && row + !(a.ending & 16) > col;
        {type} value = {{}};
        if (there) value = stored[(turned ? rows - 1 - row : row) * down + (turned ? rows - 1 - col : col) * along];
        if (a.ending & 8) conjugate(value);
        triangle[col][row] = value;
    }}
    __syncthreads();
    const int row = threadIdx.x;
    if (row < BLOCK)
        inverse[row] = row < rows && !(a.ending & 16) ? over(triangle[row][row]) : {type}{{1}};
    __syncthreads();
    #pragma unroll
    for (int at = 0; at < BLOCK / PARTS; ++at) x[at] = product(alpha, x[at]);
    #pragma unroll
    for (int col = 0; col < BLOCK; ++col) {{
        const {type} known = of_part(product(x[col / PARTS], inverse[col]), col % PARTS);
        if (part == col % PARTS) x[col / PARTS] = known;
        #pragma unroll
        for (int at = col / PARTS; at < BLOCK / PARTS; ++at)
            if (at > col / PARTS || part > col % PARTS)
                x[at] = less(x[at], triangle[col][PARTS * at + part], known);
    }}
    #pragma unroll
    for (int at = 0; at < BLOCK / PARTS; ++at) {{
        const int row = PARTS * at + part;
        if (row < rows && which < a.cols) vector[row * step] = x[at];
    }}
}}
"""
_WORDS: Final = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long", 16: "uint4"}


def _types_of(signature: int) -> tuple[DType, tuple[DType, ...]]:
    """Return the written type and the types of the regions read."""
    signature &= TRANSPOSING - 1
    reads = (signature >> shift & 15 for shift in range(4, signature.bit_length(), 4))
    return DType(signature & 15), tuple(DType(read - 1) for read in reads)


def kernel_name(signature: int) -> str:
    """Return the name of the kernel of a signature."""
    if signature == PACKING:
        return "pack"
    if signature & TRANSPOSING:
        return f"transpose_{signature ^ TRANSPOSING}"
    if signature & SOLVING:
        return f"solve_{DType(signature ^ SOLVING).name}"
    written, reads = _types_of(signature)
    kind = "epilogue" if signature & EPILOGUE else "combine"
    return "_".join((kind, written.name, *(read.name for read in reads)))


def kernel_source(signatures: Iterable[int]) -> str:
    """Return CUDA C++ text with one kernel per signature; no schedule mixes f64 with half types, or complex types."""
    return _PRELUDE + "".join(_one(signature) for signature in signatures)


def _one(signature: int) -> str:
    if signature == PACKING:
        return _PACK.format(name=kernel_name(signature))
    if signature & TRANSPOSING:
        return _TRANSPOSE.format(name=kernel_name(signature), word=_WORDS[signature ^ TRANSPOSING])
    if signature & SOLVING:
        dtype = DType(signature ^ SOLVING)
        block = 32 if dtype is DType.c128 else 64  # `most_solved` of csrc/cuda_products.hpp
        return _SOLVE.format(name=kernel_name(signature), type=_TYPES[dtype], block=block)
    written, reads = _types_of(signature)
    total = "double" if DType.f64 in (written, *reads) else "float"
    if written.is_complex or written.is_integer:
        total = "int" if written.is_integer else _TYPES[written]

    def each_read(which: str = "") -> str:
        texts = (
            _READ.format(i=i, sum=total, read=_TYPES[read], which=which.format(i=i)) for i, read in enumerate(reads)
        )
        return "\n".join(texts)

    has_epilogue = bool(signature & EPILOGUE)
    parts = dict(_WHOLE if has_epilogue else _TRIANGLE)
    parts["end"] = parts["end"].format(sum=total, written=_TYPES[written], kept=each_read("a.kept == {i} && "))
    return _KERNEL.format(
        name=kernel_name(signature),
        written=_TYPES[written],
        sum=total,
        aligned="".join(_ALIGNED.format(i=i, read=_TYPES[read]) for i, read in enumerate(reads)),
        reads=each_read("a.kept != {i} && " if has_epilogue else ""),
        **parts,
    )
