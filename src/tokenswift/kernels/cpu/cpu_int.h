/* Products of integers: quantized weights times activations in int8. See cpu.c and docs/exactness.md.
 *
 * Integer sums are exact in any order, so tiles, lanes and instructions decide nothing. What is rounded is one chain
 * over the groups of 32 (or 16) inner positions: the sum times both scales, then the least value times the sum of the
 * activations.
 */
#pragma once
#include "cpu_low.h"

/* whether products take numbers of 8 bits with their sign; otherwise they keep the offset of 128 */
#if W == 8 && !defined(__AVXVNNI__)
#define DOT_16_BITS 1 /* products of two bytes are summed in 16 bits first */
#else
#define DOT_16_BITS 0
#endif
#define SIGNED_DOT (DOT_16_BITS || NEON)

/* INT_ROWS: rows that share one reading of a panel. INT_TALL: rows of a tile, whose sums live in registers, beside
 * at most INT_COLS vectors of columns. */
#if W == 16
#define INT_ROWS 12
#define INT_TALL 12
#define INT_COLS 2
#elif W == 8
#define INT_ROWS 12
#define INT_TALL 6
#define INT_COLS 4
#else
#define INT_ROWS 6
#define INT_TALL INT_ROWS
#define INT_COLS 2
#endif
#define SPAN 256 /* positions after which tiles take turns, so that the first cache holds them: no block is longer */

INLINE int cols_of(const int rows) {
    if (W == 8) return rows <= 2 ? 4 : rows <= 4 ? 2 : 1;
    return rows <= INT_TALL / 2 ? 2 : 1;
}

#if DOT_16_BITS
typedef int16_t Sum[2]; /* of even and of odd pairs */
typedef uint16_t Lanes __attribute__((vector_size(4 * W)));
#else
typedef int32_t Sum;
typedef U Lanes;
#endif

typedef struct { /* 32 activations of a row */
    int8_t q[32];
    float scale, lead; /* lead: scale times the sum of the numbers */
    Sum sums[2];       /* of the first 16 numbers, and of the others */
} Group;

/* Rows of groups stand in blocks of INT_ROWS rows (or n, if there are fewer): (blocks, K / 32, rows of a block). */
INLINE long block_of_rows(long n) { return n < INT_ROWS ? n : INT_ROWS; }
INLINE size_t groups_bytes(long n, long K) {
    const long block = block_of_rows(n);
    return (size_t)(n + block - 1) / block * block * ((K + 31) / 32) * sizeof(Group);
}
INLINE Group *group_of(void *at, long n, long K, long row) {
    const long block = block_of_rows(n);
    return (Group *)at + row / block * block * ((K + 31) / 32) + row % block;
}

/* Numbers to whole ones: the greatest becomes `levels`, halves go to even. A row with what is no finite number has the
 * scale NaN, one of nothing but the smallest numbers is 0. Returns `levels` over the greatest, or 0. */
INLINE float scale_of(uint32_t top, float levels, float *scale) {
    float most;
    memcpy(&most, &top, 4);
    const int finite = most <= 3.402823466e38f;
    const float up = finite && most > 0 ? levels / most : 0;
    const int usable = up <= 3.402823466e38f;
    *scale = !finite ? NAN : usable ? most / levels : 0;
    return finite && usable ? up : 0;
}

/* Floats of less than 2^22 to integers, halves to even. */
INLINE I whole_numbers(V x) {
#if W == 16
    return (I)_mm512_cvtps_epi32((__m512)x);
#elif W == 8
    return (I)as_u(x + 12582912.0f) - 0x4b400000; /* 1.5 times 2^23 */
#else
    return (I)vcvtnq_s32_f32((float32x4_t)x);
#endif
}

/* 16 integers as bytes. */
INLINE void put_bytes(void *out, const I x[NL]) {
#if W == 16
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)x[0]));
#elif W == 8
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]), 0xd8);
    _mm_storeu_si128((__m128i *)out, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    int16x4_t half[4];
    UNROLL for (int h = 0; h < 4; h++) half[h] = vmovn_s32((int32x4_t)x[h]);
    const int16x8_t low = vcombine_s16(half[0], half[1]), high = vcombine_s16(half[2], half[3]);
    vst1q_s8(out, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
#endif
}

/* 16 floats of at most 127 to integers, halves to even, as bytes. */
INLINE void whole_bytes(void *out, const V x[NL]) {
    I integers[NL];
    UNROLL for (int h = 0; h < NL; h++) integers[h] = whole_numbers(x[h]);
    put_bytes(out, integers);
}

/* 16 floats from 0 to 2^14 - 1 to integers, halves to even: the high and the low 7 bits, as bytes. */
INLINE void two_bytes(void *high, void *low, const V x[NL]) {
    I above[NL], below[NL];
    UNROLL for (int h = 0; h < NL; h++) {
        const I integers = whole_numbers(x[h]);
        above[h] = integers >> 7 & 127, below[h] = integers & 127;
    }
    put_bytes(high, above);
    put_bytes(low, below);
}

/* The greatest of what top holds and of the bits of x without their signs: NaN is the greatest. */
INLINE I greatest_bits(I top, V x) {
    const I bits = (I)(as_u(x) & 0x7fffffff);
#if W == 16
    return (I)_mm512_max_epi32((__m512i)bits, (__m512i)top);
#elif NEON
    return (I)vmaxq_s32((int32x4_t)bits, (int32x4_t)top);
#else
    const I mask = bits > top;
    return (bits & mask) | (top & ~mask);
#endif
}

/* The bits of the greatest of a row's numbers without their signs. rest: its last numbers, filled up to 16. */
INLINE uint32_t greatest_of_row(const float *x, long width, float rest[16]) {
    I top[NL] = {{0}};
    long j = 0;
    for (; j + 16 <= width; j += 16) UNROLL for (int h = 0; h < NL; h++) top[h] = greatest_bits(top[h], *(const Vm *)(x + j + h * W));
    memset(rest, 0, 16 * 4);
    memcpy(rest, x + j, (width - j) * 4);
    UNROLL for (int h = 0; h < NL; h++) top[h] = greatest_bits(top[h], *(const Vm *)(rest + h * W));
    return (uint32_t)most_lanes(top);
}

/* Numbers to whole ones of 16 bits with one scale; returns the scale. levels: at most 2^15 - 1. */
INLINE float whole_row16(int16_t *q, const float *x, long width, float levels) {
    float scale, rest[16];
    const float factor = scale_of(greatest_of_row(x, width, rest), levels, &scale);
    for (long j = 0; j < width; j += 16) {
        const float *from = j + 16 <= width ? x + j : rest;
        int32_t integers[16];
        UNROLL for (int h = 0; h < NL; h++) {
            const V y = factor > 0 ? (V)(*(const Vm *)(from + h * W) * factor) : (V){0};
            const I rounded = whole_numbers(y);
            memcpy(integers + h * W, &rounded, 4 * W);
        }
        for (int i = 0; i < 16 && j + i < width; i++) q[j + i] = (int16_t)integers[i];
    }
    return scale;
}

/* Numbers to whole ones with one scale; returns the scale. */
INLINE float whole_row(int8_t *q, const float *x, long width) {
    V y[NL];
    float scale, rest[16];
    const float factor = scale_of(greatest_of_row(x, width, rest), 127.0f, &scale);
    int8_t last[16];
    for (long j = 0; j < width; j += 16) {
        const float *from = j + 16 <= width ? x + j : rest;
        UNROLL for (int h = 0; h < NL; h++) y[h] = factor > 0 ? (V)(*(const Vm *)(from + h * W) * factor) : (V){0};
        whole_bytes(j + 16 <= width ? q + j : last, y);
    }
    if (width % 16) memcpy(q + width / 16 * 16, last, width % 16);
    return scale;
}

static void quantize_group(Group *out, const float *x) {
    int32_t total = 0;
    out->scale = whole_row(out->q, x, 32);
    UNROLL for (int s = 0; s < 2; s++) {
#if DOT_16_BITS
        const __m128i two = _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128((const __m128i *)out->q + s));
        const __m128i four = _mm_add_epi16(two, _mm_srli_si128(two, 8));
        const int32_t both = _mm_cvtsi128_si32(_mm_add_epi16(four, _mm_srli_si128(four, 4)));
        memcpy(out->sums[s], &both, 4);
        total += out->sums[s][0] + out->sums[s][1];
#else
        int32_t sum = 0;
        for (int i = 0; i < 16; i++) sum += out->q[16 * s + i];
        total += out->sums[s] = sum;
#endif
    }
    out->lead = out->scale * (float)total;
}

/* One row of K numbers as groups, `step` groups apart, the last filled up with 0. */
static void quantize(Group *out, long step, const float *x, long K) {
    for (; K >= 32; K -= 32, x += 32, out += step) quantize_group(out, x);
    if (!K) return;
    float rest[32] = {0};
    memcpy(rest, x, K * 4);
    quantize_group(out, rest);
}

/* ---- sums of products of four bytes, exact ------------------------------------------------------------------- */

/* sum + products of u, four bytes below 128 without sign, and x with sign. */
INLINE I dot_few(I sum, U u, U x) {
#if W == 16
    return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)x);
#elif W == 8 && !DOT_16_BITS
    return (I)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)u, (__m256i)x);
#elif W == 8
    return (I)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)u, (__m256i)x), _mm256_set1_epi16(1)));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (I)vdotq_s32((int32x4_t)sum, (int8x16_t)u, (int8x16_t)x);
#else
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)u), vget_low_s8((int8x16_t)x));
    const int16x8_t high = vmull_high_s8((int8x16_t)u, (int8x16_t)x);
    return sum + (I)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
}

/* The same for u of 8 bits, numbers with an offset of 128; with SIGNED_DOT the offset is taken off. x is above -128. */
INLINE I dot_all(I sum, U u, U x) {
#if NEON
    return dot_few(sum, u ^ 0x80808080u, x); /* both sides have signs */
#elif SIGNED_DOT
    const __m256i w = _mm256_xor_si256((__m256i)u, _mm256_set1_epi8(-128)); /* 128 times 127, twice, is below 2^15 */
    return dot_few(sum, (U)_mm256_abs_epi8(w), (U)_mm256_sign_epi8((__m256i)x, w));
#else
    return dot_few(sum, u, x);
#endif
}

/* sum + products of two numbers of 16 bits. */
INLINE I dot_pairs(I sum, U u, U x) {
#if W == 16
    return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)u, (__m512i)x);
#elif W == 8 && !DOT_16_BITS
    return (I)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)u, (__m256i)x);
#elif W == 8
    return (I)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)u, (__m256i)x));
#else
    const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)u), vget_low_s16((int16x8_t)x));
    const int32x4_t high = vmull_high_s16((int16x8_t)u, (int16x8_t)x);
    return sum + (I)vpaddq_s32(low, high);
#endif
}

INLINE U four_bytes(const void *q) { /* the same four in every lane */
    int32_t x;
    memcpy(&x, q, 4);
    return (U)(x - (I){0});
}

/* Without a dot product, products of two bytes are summed in 16 bits first: so many that none is cut off. Where an offset
 * is taken off in the same lanes they may wrap around, as the end is small: at most 16 * 127 * 16 for 5 bits. */
INLINE int dots_of_16_bits(const Low m) {
    if (!DOT_16_BITS || wide(m)) return 0;
    return m.group / 4 < 8 || m.offset || m.bits == 4 ? m.group / 4 : 4;
}

/* What the sums of a group of activations begin with: minus the offset of the weights times these, or 0. */
INLINE Lanes less_offset(const Low m, const Group *x, int s) {
    Lanes start = {0};
    if (!m.offset || (wide(m) && SIGNED_DOT)) return start;
    UNROLL for (int half = m.group == 16 ? s : 0; half <= (m.group == 16 ? s : 1); half++)
        start -= (Lanes)four_bytes((const int8_t *)(x->sums + half)) << __builtin_ctz(m.offset);
    return start;
}

/* Scale times the sum of the numbers of a group. */
INLINE float lead_of(const Low m, const Group *x, int s) {
    if (m.group == 32) return x->lead;
#if DOT_16_BITS
    return x->scale * (float)(x->sums[s][0] + x->sums[s][1]);
#else
    return x->scale * (float)x->sums[s];
#endif
}

#if DOT_16_BITS
INLINE Lanes plus_pairs(Lanes sum, U u, U x) { return sum + (Lanes)_mm256_maddubs_epi16((__m256i)u, (__m256i)x); }
INLINE I plus_both(I sum, Lanes pairs) { return sum + (I)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
/* The compiler may not reorder a chain of sums: it would run out of registers. */
#define KEEP(v) __asm__("" : "+v"(v))
#else
INLINE Lanes plus_pairs(Lanes sum, U u, U x) { return sum; }
INLINE I plus_both(I sum, Lanes pairs) { return sum; }
#define KEEP(v)
#endif

typedef struct { const char *at; size_t share; } Soon; /* what a tile prefetches: so many bytes with 32 positions, or NULL */

/* With each four positions a part: a burst would hold up what the tile itself reads. */
INLINE void prefetch_part(Soon soon, const int four) {
    if (!soon.at) return;
    UNROLL for (size_t at = (soon.share * four / 8 + 63) / 64 * 64; at < soon.share * (four + 1) / 8; at += 64)
        __builtin_prefetch(soon.at + at, 0, 2);
}

/* ---- a tile -------------------------------------------------------------------------------------------------- */

/* Sums of integers of the s-th group of the 32 positions that begin at numbers, for vectors of columns from c0 on. */
INLINE void int_sums(const Low m, const char *numbers, Soon soon, const int rows, const int cols, int c0, int s, const Group *x,
                     I sum[INT_TALL][INT_COLS]) {
    const int per = m.bits == 8 ? 4 : 8, some = dots_of_16_bits(m);
    Lanes pairs[INT_TALL][INT_COLS];
    UNROLL for (int r = 0; r < rows; r++) {
        const Lanes start = less_offset(m, x + r, s);
        UNROLL for (int c = 0; c < cols; c++) sum[r][c] = some ? (I){0} : (I)start, pairs[r][c] = start;
    }
    UNROLL for (int dot = 0; dot < m.group / 4; dot++) {
        prefetch_part(soon, s * m.group / 4 + dot);
        const int w = (s * m.group + dot * 4) / per, other = dot % (per / 4);
        U bytes[INT_COLS];
        UNROLL for (int c = 0; c < cols; c++) bytes[c] = four(m, words(m, numbers, w, c0 + c), w, other);
        UNROLL for (int r = 0; r < rows; r++) {
            const U at = four_bytes(x[r].q + s * m.group + dot * 4);
            UNROLL for (int c = 0; c < cols; c++) {
                if (!some) {
                    sum[r][c] = wide(m) ? dot_all(sum[r][c], bytes[c], at) : dot_few(sum[r][c], bytes[c], at);
                    KEEP(sum[r][c]);
                    continue;
                }
                pairs[r][c] = plus_pairs(dot && dot % some == 0 ? (Lanes){0} : pairs[r][c], bytes[c], at);
                KEEP(pairs[r][c]);
                if (dot % some == some - 1) sum[r][c] = plus_both(sum[r][c], pairs[r][c]);
            }
        }
    }
}

/* out[r][c] += sum over groups of scale * scale of x * (sum over positions of u * x), plus least * sum of x, for `rows`
 * rows and `count` positions, at most SPAN, of a panel. x: groups of a row block, `step` groups from one to the next.
 * next: what to prefetch meanwhile, or NULL. */
INLINE void int_tile(const int format, const int rows, const Group *x, long step, const char *b, long count, const char *next,
                     float *out) {
    const Low m = low_format(format);
    const int cols = cols_of(rows);
    Soon soon = {next, block_bytes(m) * 32 / m.block * cols / NV};
    for (int c0 = 0; c0 < NV; c0 += cols) {
        const char *block = b;
        const Group *y = x;
        V acc[INT_TALL][INT_COLS];
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < cols; c++) acc[r][c] = *(Vm *)(out + r * NR + (c0 + c) * W);
        for (long i = 0; i < count; i += m.block, block += block_bytes(m)) {
            const char *numbers = block + head_bytes(m);
            for (int g = 0; g < m.block / 32; g++, numbers += numbers_bytes(m), y += step, soon.at += soon.at ? soon.share : 0) {
                UNROLL for (int s = 0; s < 32 / m.group; s++) {
                    I sum[INT_TALL][INT_COLS];
                    V scale[INT_COLS], least[INT_COLS];
                    int_sums(m, numbers, soon, rows, cols, c0, s, y, sum);
                    UNROLL for (int c = 0; c < cols; c++) scales(m, block, (g * 32 + s * m.group) / m.group, c0 + c, scale + c, least + c);
                    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < cols; c++) {
                        acc[r][c] = fused(scale[c] * y[r].scale, __builtin_convertvector(sum[r][c], V), acc[r][c]);
                        if (m.least) acc[r][c] = fused(least[c], splat(lead_of(m, y + r, s)), acc[r][c]);
                    }
                }
            }
        }
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < cols; c++) *(Vm *)(out + r * NR + (c0 + c) * W) = acc[r][c];
    }
}

/* One function a format: out (rows, NR) floats = rows of a block times a panel. */
#define INT_CASE(name, n)                                                                                               \
    case n:                                                                                                             \
        if (n <= INT_TALL)                                                                                              \
            int_tile(name, n <= INT_TALL ? n : 1, x + r, step, panel, count, r ? NULL : panel + ahead, out + r * NR);   \
        break;
#define INT_TILE(name, number)                                                                                          \
    PARTED void ints_##name(int rows, const Group *x, long step, const char *panel, long k, float *out) {               \
        const Low m = low_format(name);                                                                                 \
        const long ahead = rows < 3 ? 4096 : 8192; /* into the second cache: the first holds x */                       \
        memset(out, 0, rows * NR * 4);                                                                                  \
        for (long i = 0; i < k; i += SPAN, x += SPAN / 32 * step, panel += SPAN / m.block * block_bytes(m)) {           \
            const long count = k - i < SPAN ? k - i : SPAN;                                                             \
            for (int r = 0; r < rows; r += INT_TALL) switch (rows - r < INT_TALL ? rows - r : INT_TALL) {               \
                INT_CASE(name, 1) INT_CASE(name, 2) INT_CASE(name, 3) INT_CASE(name, 4) INT_CASE(name, 5) INT_CASE(name, 6) \
                INT_CASE(name, 7) INT_CASE(name, 8) INT_CASE(name, 9) INT_CASE(name, 10) INT_CASE(name, 11) INT_CASE(name, 12) \
            }                                                                                                           \
        }                                                                                                               \
    }
#if defined(TS_PARTS) /* a part for each format, see cpu_format.c */
#define INT_ELSEWHERE(name, number) PARTED void ints_##name(int rows, const Group *x, long step, const char *panel, long k, float *out);
FORMATS(INT_ELSEWHERE)
#else
FORMATS(INT_TILE)
#endif

static void int_rows(int format, int rows, const Group *x, long step, const char *panel, long k, float *out) {
    switch (format) {
#define CASE(name, number) \
    case name: ints_##name(rows, x, step, panel, k, out); break;
        FORMATS(CASE)
#undef CASE
    }
}
