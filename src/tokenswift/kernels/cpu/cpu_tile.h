/* Vectors, number types and the one tile that products and attention share. See cpu.c. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define W 16 /* floats in a vector */
#define MR 12 /* rows of a tile: MR * NV accumulators live in registers */
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define W 8
#define MR 3
#elif defined(__ARM_NEON)
#define W 4
#define MR 3
#else
#error "the kernels need AVX2 with FMA, or arm64"
#endif
#define NEON (W == 4)
#define NR 32 /* columns of a tile, and of a panel of packed weights */
#define NV (NR / W)
#define NL (16 / W) /* vectors of 16 lanes: sums have 16 partial ones, whatever a vector holds */
#define CHUNK 256 /* keys of an attention chunk */
#define FEW 12 /* up to this many rows, attention is shared out by chunks of keys, beyond by rows */

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t U16 __attribute__((vector_size(2 * W)));
typedef float Vm __attribute__((vector_size(4 * W), aligned(1), may_alias)); /* in memory */
typedef uint32_t Um __attribute__((vector_size(4 * W), aligned(1), may_alias));
typedef uint16_t U16m __attribute__((vector_size(2 * W), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
/* a function that may be a part of the library by itself: with TS_PARTS they are compiled apart, several at once */
#if defined(TS_PARTS)
#define PARTED __attribute__((noinline, visibility("hidden")))
#else
#define PARTED static __attribute__((noinline))
#endif
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* I8: of keys and values, and of activations (groups of 32 with a scale); I16: of keys of 16 bits, whose values are I8 */
enum { F32 = 0, BF16 = 1, F16 = 2, I8 = 3, I16 = 4 };
/* how a tile reads its right side */
enum { ROWS_F32 = 0, ROWS_BF16 = 1, ROWS_F16 = 2, PAIRS = 3 };

/* ---- numbers ------------------------------------------------------------------------------------- */

INLINE size_t bytes_of(int type) { return type == F32 ? 4 : 2; }
INLINE V splat(float x) { return x - (V){0}; }

/* x * y + z, rounded once. Whether an expression is rounded once or twice is never left to the compiler, which
 * decides by its tuning for a processor: the sources are compiled without contraction, and this is the one place
 * where a fused step is made. */
INLINE V fused(V x, V y, V z) {
#if W == 16
    return (V)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif W == 8
    return (V)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
    return (V)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#endif
}
INLINE V as_v(U x) { V y; memcpy(&y, &x, sizeof y); return y; }
INLINE U as_u(V x) { U y; memcpy(&y, &x, sizeof y); return y; }
INLINE V pick(I mask, V yes, V no) {
#if W == 16
    return (V)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)no, (__m512)yes);
#else
    return as_v(((U)mask & as_u(yes)) | (~(U)mask & as_u(no)));
#endif
}

INLINE V higher(V x, V y) { /* y where x is not greater */
#if W == 16
    return (V)_mm512_max_ps((__m512)x, (__m512)y);
#elif W == 8
    return (V)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return pick(x > y, x, y);
#endif
}

INLINE V from_bf16(const char *p) { /* W numbers; GCC's own conversion of such vectors is slow */
#if W == 16
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif W == 8
    return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return as_v(__builtin_convertvector(*(const U16m *)p, U) << 16);
#endif
}

INLINE U16 to_bf16(V x) { /* round to nearest even; NaN stays NaN */
    U bits = as_u(x), nan = (U)(x != x);
    U rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), U16);
}

INLINE V from_f16(const uint16_t *p) { /* W numbers */
#if W == 16
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif W == 8
    return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    return (V)vcvt_f32_f16((float16x4_t)*(const U16m *)p);
#endif
}

INLINE void to_f16(uint16_t *p, V x) { /* round to nearest even; NaN stays NaN */
#if W == 16
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif W == 8
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    *(U16m *)p = (U16)vcvt_f16_f32((float32x4_t)x);
#endif
}

/* W numbers of a type as float32 */
INLINE V load(int type, const char *p) {
    if (type == F32) return *(const Vm *)p;
    if (type == BF16) return from_bf16(p);
    return from_f16((const uint16_t *)p);
}

INLINE void store(int type, char *p, V x) {
    if (type == F32) *(Vm *)p = x;
    else if (type == BF16) *(U16m *)p = to_bf16(x);
    else to_f16((uint16_t *)p, x);
}

/* the same for as many of them as are left; the others are 0 */
INLINE V load_left(int type, const char *p, long left) {
    char padded[4 * W] = {0};
    if (left >= W) return load(type, p);
    memcpy(padded, p, left * bytes_of(type));
    return load(type, padded);
}

INLINE void store_left(int type, char *p, V x, long left) {
    char padded[4 * W];
    if (left >= W) {
        store(type, p, x);
        return;
    }
    store(type, padded, x);
    memcpy(p, padded, left * bytes_of(type));
}

typedef float V4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

INLINE float sum_lanes(const V x[NL]) { /* of 16 lanes, a tree of a fixed shape */
    V4 y[4];
    memcpy(y, x, sizeof y);
    y[0] = (y[0] + y[2]) + (y[1] + y[3]);
    return (y[0][0] + y[0][2]) + (y[0][1] + y[0][3]);
}

INLINE int32_t most_lanes(const I x[NL]) { /* of 16 lanes */
    I4 y[4], mask;
    memcpy(y, x, sizeof y);
#define GREATER(a, b) (mask = (a) > (b), ((a) & mask) | ((b) & ~mask))
    y[0] = GREATER(y[0], y[2]), y[1] = GREATER(y[1], y[3]), y[0] = GREATER(y[0], y[1]);
#undef GREATER
    const int32_t even = y[0][0] > y[0][2] ? y[0][0] : y[0][2], odd = y[0][1] > y[0][3] ? y[0][1] : y[0][3];
    return even > odd ? even : odd;
}

INLINE float highest_lane(const V x[NL]) { /* of 16 lanes, none of them NaN */
    float lane[16];
    V y = x[0];
    UNROLL for (int h = 1; h < NL; h++) y = higher(y, x[h]);
    memcpy(lane, &y, sizeof y);
    UNROLL for (int step = W / 2; step; step /= 2) for (int i = 0; i < step; i++) lane[i] = lane[i] > lane[i + step] ? lane[i] : lane[i + step];
    return lane[0];
}

INLINE V vexp(V x) { /* relative error below 3e-7; 0 far below 0, infinite far above, NaN stays NaN */
#if W == 16
    const V y = (V)_mm512_min_ps(_mm512_set1_ps(100.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x));
    const V turns = (V)_mm512_roundscale_ps((__m512)(y * 1.44269504f), _MM_FROUND_TO_NEAREST_INT);
#else
    const V y = pick(x > 100.0f, splat(100.0f), pick(x < -104.0f, splat(-104.0f), x));
    const V turns = (y * 1.44269504f + 12582912.0f) - 12582912.0f;
#endif
    V r = fused(-turns, splat(0.693145752f), y);
    r = fused(-turns, splat(1.42860677e-6f), r);
    V p = fused(r, splat(1.38731625e-3f), splat(8.36889912e-3f));
    p = fused(p, r, splat(4.16657962e-2f));
    p = fused(p, r, splat(1.66664794e-1f));
    p = fused(p, r, splat(0.5f));
    p = fused(p, r, splat(1.0f));
    p = fused(p, r, splat(1.0f));
#if W == 16
    return (V)_mm512_scalef_ps((__m512)p, (__m512)turns);
#else
    const I power = __builtin_convertvector(turns, I), half = power >> 1; /* in two steps, as far below 1 is rounded once */
    return p * as_v((U)(half + 127) << 23) * as_v((U)(power - half + 127) << 23);
#endif
}

/* Logarithms and exponentials of our own: a system's own differ among processors in the last bit, and so would texts. */

static double atanh2(double s) { /* log((1 + s) / (1 - s)), |s| < 0.172: the series to 1e-17 */
    const double z = s * s;
    double sum = 1.0 / 25;
    for (int n = 23; n > 1; n -= 2) sum = sum * z + 1.0 / n;
    return 2 * s + 2 * s * (z * sum);
}

static double natural_log(double x) { /* of what is positive and not below 2^-1000; 0: -inf */
    int power;
    if (!(x > 0)) return x == 0 ? -INFINITY : NAN;
    double m = frexp(x, &power);
    if (m < 0.70710678118654752) m *= 2, power--;
    return power * 6.93147180369123816490e-01 + (power * 1.90821492927058770002e-10 + atanh2((m - 1) / (m + 1)));
}

static double natural_exp(double x) { /* of what is not above 700 */
    if (!(x > -745)) return x != x ? x : 0;
    const double turns = floor(x * 1.4426950408889634 + 0.5);
    const double r = (x - turns * 6.93147180369123816490e-01) - turns * 1.90821492927058770002e-10;
    double sum = 1;
    for (int n = 14; n > 0; n--) sum = sum * r / n + 1;
    return ldexp(sum, (int)turns);
}

/* ---- one tile of a product: acc[r][:] += sum over k of a[r][k] * b[k][:] --------------------------- */

/* acc[:] += both of x times both of each column's w: two numbers of bfloat16 side by side, the first product first. */
INLINE void pair_step(V acc[NV], uint32_t x, const U w[NV]) {
#if defined(__AVX512BF16__)
    const __m512i both = _mm512_set1_epi32((int32_t)x);
    UNROLL for (int c = 0; c < NV; c++)
        acc[c] = (V)_mm512_dpbf16_ps((__m512)acc[c], (__m512bh)both, (__m512bh)w[c]);
#else
    uint32_t bits[2] = {x << 16, x & 0xffff0000u};
    float first, second;
    memcpy(&first, bits, 4), memcpy(&second, bits + 1, 4);
    UNROLL for (int c = 0; c < NV; c++) {
        acc[c] = fused(splat(first), as_v(w[c] << 16), acc[c]);
        acc[c] = fused(splat(second), as_v(w[c] & 0xffff0000u), acc[c]);
    }
#endif
}

INLINE void prefetch(const char *at) { /* two cache lines, into the second cache */
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + 64, 0, 2);
}

/* a: rows of float32 (bfloat16 for PAIRS), lda bytes apart. b: k rows of NR columns, ldb bytes apart;
 * for PAIRS k / 2 rows of NR pairs (2 consecutive k of one column side by side). Each step prefetches two cache lines
 * at `soon`, which then moves on by `ahead` bytes: what the next loop reads. A burst of prefetches would stall. */
INLINE void tile(const int how, const int rows, const char *a, size_t lda, const char *b, size_t ldb, const char *soon,
                 size_t ahead, long k, V acc[MR][NV]) {
    const char *base[(MR + 3) / 4]; /* four rows share a pointer, so that addresses fit into registers */
    UNROLL for (int r = 0; r < rows; r += 4) base[r / 4] = a + r * lda;
    if (how == PAIRS) {
        for (long i = 0; i < k / 2; i++, b += ldb) {
            U w[NV];
            prefetch(soon + i * ahead);
            UNROLL for (int c = 0; c < NV; c++) w[c] = *(const Um *)(b + c * 4 * W);
            UNROLL for (int r = 0; r < rows; r++) {
                uint32_t x;
                memcpy(&x, base[r / 4] + (r % 4) * lda + i * 4, 4);
                pair_step(acc[r], x, w);
            }
        }
        return;
    }
    const int type = how == ROWS_F32 ? F32 : how == ROWS_BF16 ? BF16 : F16;
    for (long i = 0; i < k; i++, b += ldb) {
        V w[NV];
        prefetch(soon + i * ahead);
        UNROLL for (int c = 0; c < NV; c++) w[c] = load(type, b + c * W * bytes_of(type));
        UNROLL for (int r = 0; r < rows; r++) {
            float x;
            memcpy(&x, base[r / 4] + (r % 4) * lda + i * 4, 4);
            UNROLL for (int c = 0; c < NV; c++) acc[r][c] = fused(splat(x), w[c], acc[r][c]);
        }
    }
}

/* One function a kind of right side and a number of rows: out (rows, NR) floats, ldo floats apart; with more, they
 * go on from what out holds. */
#define CASE(n, how)                                                                                      \
    case n:                                                                                               \
        if (n <= MR) {                                                                                    \
            V acc[MR][NV] = {{{0}}};                                                                      \
            if (more)                                                                                     \
                UNROLL for (int r = 0; r < n && r < MR; r++) UNROLL for (int c = 0; c < NV; c++)          \
                    acc[r][c] = *(Vm *)(out + r * ldo + c * W);                                           \
            tile(how, n <= MR ? n : 1, a, lda, b, ldb, soon, ahead, k, acc);                              \
            UNROLL for (int r = 0; r < n && r < MR; r++) UNROLL for (int c = 0; c < NV; c++)              \
                *(Vm *)(out + r * ldo + c * W) = acc[r][c];                                               \
        }                                                                                                 \
        break;
#define TILE(name, how)                                                                                   \
    static __attribute__((noinline)) void name(int rows, const char *a, size_t lda, const char *b,        \
                                               size_t ldb, const char *soon, size_t ahead, long k, float *out,  \
                                               size_t ldo, int more) {                                     \
        switch (rows) {                                                                                   \
            CASE(1, how) CASE(2, how) CASE(3, how) CASE(4, how) CASE(5, how) CASE(6, how)                 \
            CASE(7, how) CASE(8, how) CASE(9, how) CASE(10, how) CASE(11, how) CASE(12, how)              \
        }                                                                                                 \
    }
TILE(tile_f32, ROWS_F32)
TILE(tile_bf16, ROWS_BF16)
TILE(tile_f16, ROWS_F16)
TILE(tile_pairs, PAIRS)
#undef CASE
#undef TILE

static void any_tile(int how, int rows, const char *a, size_t lda, const char *b, size_t ldb, const char *soon,
                     size_t ahead, long k, float *out, size_t ldo, int more) {
    if (how == ROWS_F32) tile_f32(rows, a, lda, b, ldb, soon, ahead, k, out, ldo, more);
    else if (how == ROWS_BF16) tile_bf16(rows, a, lda, b, ldb, soon, ahead, k, out, ldo, more);
    else if (how == ROWS_F16) tile_f16(rows, a, lda, b, ldb, soon, ahead, k, out, ldo, more);
    else tile_pairs(rows, a, lda, b, ldb, soon, ahead, k, out, ldo, more);
}
