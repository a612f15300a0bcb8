/* Products of integers: quantized weights times activations in int8. See cpu.c and docs/exactness.md.
 *
 * Integer sums are exact in any order, so tiles, lanes and instructions decide nothing. What is rounded is one chain
 * over the groups of 32 (or 16) inner positions: the sum times both scales, then the least value times the sum of the
 * activations.
 */
#pragma once
#include "cpu_low.h"

/* rows of a tile: as many integer as float sums live in registers; up to half as many take two vectors of columns */
#if W == 16
#define INT_ROWS 12
#elif W == 8 || NEON
#define INT_ROWS 6
#else
#define INT_ROWS 2
#endif

typedef struct { /* 32 activations of a row */
    int8_t q[32];
    float scale, lead; /* lead: scale times all */
    int32_t all, first; /* sums of the numbers, and of the first 16 */
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

/* 32 numbers to whole ones: the greatest becomes 127, halves go to even. A group with what is no finite number has the
 * scale NaN, one of nothing but the smallest numbers is 0. Returns 127 over the greatest, or 0. */
INLINE float scale_of(uint32_t top, float *scale) {
    float most;
    memcpy(&most, &top, 4);
    const int finite = most <= 3.402823466e38f;
    const float up = finite && most > 0 ? 127.0f / most : 0;
    const int usable = up <= 3.402823466e38f;
    *scale = !finite ? NAN : usable ? most / 127.0f : 0;
    return finite && usable ? up : 0;
}

/* 16 floats of at most 127 to integers, halves to even, as bytes; their sum. */
INLINE int32_t whole_bytes(void *out, const V x[NL]) {
#if W == 16
    const __m512i whole = _mm512_cvtps_epi32((__m512)x[0]);
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(whole));
    return _mm512_reduce_add_epi32(whole);
#elif NEON
    int32x4_t whole[4];
    UNROLL for (int h = 0; h < 4; h++) whole[h] = vcvtnq_s32_f32((float32x4_t)x[h]);
    const int16x8_t low = vcombine_s16(vmovn_s32(whole[0]), vmovn_s32(whole[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(whole[2]), vmovn_s32(whole[3]));
    vst1q_s8(out, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    return vaddvq_s32(vpadalq_s16(vpaddlq_s16(low), high));
#else
    I whole[NL];
    int32_t each[16], sum = 0;
    UNROLL for (int h = 0; h < NL; h++) whole[h] = (I)as_u(x[h] + 12582912.0f) - 0x4b400000; /* 1.5 times 2^23 */
#if defined(__AVX2__) && W == 8
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)whole[0], (__m256i)whole[1]), 0xd8);
    _mm_storeu_si128((__m128i *)out, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    *(I *)each = whole[0] + whole[1];
    for (int i = 0; i < 8; i++) sum += each[i];
#else
    memcpy(each, whole, sizeof each);
    for (int i = 0; i < 16; i++) ((int8_t *)out)[i] = (int8_t)each[i], sum += each[i];
#endif
    return sum;
#endif
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

static void quantise_group(Group *out, const float *y) {
    V x[2][NL];
    I top[NL];
    UNROLL for (int h = 0; h < NL; h++) {
        x[0][h] = *(const Vm *)(y + h * W), x[1][h] = *(const Vm *)(y + 16 + h * W);
        top[h] = greatest_bits(greatest_bits((I){0}, x[0][h]), x[1][h]);
    }
    const float up = scale_of((uint32_t)most_lanes(top), &out->scale);
    UNROLL for (int s = 0; s < 2; s++) UNROLL for (int h = 0; h < NL; h++) x[s][h] = up > 0 ? x[s][h] * up : (V){0};
    out->first = whole_bytes(out->q, x[0]);
    out->all = out->first + whole_bytes(out->q + 16, x[1]);
    out->lead = out->scale * (float)out->all;
}

/* One row of K numbers as groups, `step` groups apart, the last filled up with 0. */
static void quantize(Group *out, long step, const float *x, long K) {
    for (; K >= 32; K -= 32, x += 32, out += step) quantise_group(out, x);
    if (!K) return;
    float rest[32] = {0};
    memcpy(rest, x, K * 4);
    quantise_group(out, rest);
}

/* ---- sums of products of four bytes, exact ------------------------------------------------------------------- */

/* whether products take numbers of 8 bits with their sign; otherwise they keep the offset of 128 */
#if (defined(__AVX512BW__) && !defined(__AVX512VNNI__) && W == 16) || (defined(__AVX2__) && !defined(__AVXVNNI__) && W == 8) || \
    NEON
#define SIGNED_DOT 1
#else
#define SIGNED_DOT 0
#endif

/* sum + products of u, four bytes below 128 without sign, and x with sign. */
INLINE I dot_few(I sum, U u, U x) {
#if defined(__AVX512VNNI__) && W == 16
    return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)x);
#elif defined(__AVX512BW__) && W == 16
    return (I)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)u, (__m512i)x), _mm512_set1_epi16(1)));
#elif defined(__AVXVNNI__) && W == 8
    return (I)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)u, (__m256i)x);
#elif defined(__AVX2__) && W == 8
    return (I)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)u, (__m256i)x), _mm256_set1_epi16(1)));
#elif defined(__SSE2__) && W == 4
    const __m128i zero = _mm_setzero_si128(), signs = _mm_cmpgt_epi8(zero, (__m128i)x);
    const __m128i low = _mm_madd_epi16(_mm_unpacklo_epi8((__m128i)u, zero), _mm_unpacklo_epi8((__m128i)x, signs));
    const __m128i high = _mm_madd_epi16(_mm_unpackhi_epi8((__m128i)u, zero), _mm_unpackhi_epi8((__m128i)x, signs));
    const __m128 even = _mm_shuffle_ps(_mm_castsi128_ps(low), _mm_castsi128_ps(high), 0x88);
    const __m128 odd = _mm_shuffle_ps(_mm_castsi128_ps(low), _mm_castsi128_ps(high), 0xdd);
    return sum + (I)_mm_add_epi32(_mm_castps_si128(even), _mm_castps_si128(odd));
#elif NEON && defined(__ARM_FEATURE_DOTPROD)
    return (I)vdotq_s32((int32x4_t)sum, (int8x16_t)u, (int8x16_t)x);
#elif NEON
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)u), vget_low_s8((int8x16_t)x));
    const int16x8_t high = vmull_high_s8((int8x16_t)u, (int8x16_t)x);
    return sum + (I)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#else
    UNROLL for (int b = 0; b < 4; b++) sum += (I)(u >> 8 * b & 255) * ((I)(x << (24 - 8 * b)) >> 24);
    return sum;
#endif
}

/* The same for u of 8 bits, numbers with an offset of 128; with SIGNED_DOT the offset is taken off. x is above -128. */
INLINE I dot_all(I sum, U u, U x) {
#if SIGNED_DOT && W == 16
    const __m512i w = _mm512_xor_si512((__m512i)u, _mm512_set1_epi8(-128));
    const __m512i y = _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), (__m512i)x);
    return dot_few(sum, (U)_mm512_abs_epi8(w), (U)y); /* 128 times 127, twice, is still below 2^15 */
#elif NEON
    return dot_few(sum, u ^ 0x80808080u, x); /* both sides have signs */
#elif SIGNED_DOT
    const __m256i w = _mm256_xor_si256((__m256i)u, _mm256_set1_epi8(-128));
    return dot_few(sum, (U)_mm256_abs_epi8(w), (U)_mm256_sign_epi8((__m256i)x, w));
#else
    return dot_few(sum, u, x);
#endif
}

/* Without a dot product, products of two bytes are summed in 16 bits first: so many of u < 2^bits that none is cut off. */
#if SIGNED_DOT && !NEON
INLINE int dots_of_16_bits(const int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 0; }
INLINE U pairs_of(U u, U x) {
#if W == 16
    return (U)_mm512_maddubs_epi16((__m512i)u, (__m512i)x);
#else
    return (U)_mm256_maddubs_epi16((__m256i)u, (__m256i)x);
#endif
}
INLINE U plus_pairs(U a, U b) {
#if W == 16
    return (U)_mm512_add_epi16((__m512i)a, (__m512i)b);
#else
    return (U)_mm256_add_epi16((__m256i)a, (__m256i)b);
#endif
}
INLINE I plus_both(I sum, U pairs) {
#if W == 16
    return sum + (I)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#else
    return sum + (I)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#endif
}
#else
INLINE int dots_of_16_bits(const int bits) { return 0; }
INLINE U pairs_of(U u, U x) { return u; }
INLINE U plus_pairs(U a, U b) { return a; }
INLINE I plus_both(I sum, U pairs) { return sum; }
#endif

INLINE U four_bytes(const int8_t *q) { /* the same four in every lane */
    int32_t x;
    memcpy(&x, q, 4);
    return (U)(x - (I){0});
}

#if NEON && defined(__ARM_FEATURE_MATMUL_INT8)
#define INT_PAIRS 1

/* Sums of the s-th group of 32 positions, for vectors of columns from c0 on: products of two rows by two columns,
 * eight numbers deep. An odd row is taken alone. */
INLINE void pair_sums(const Low m, const char *numbers, const int rows, const int cols, int c0, int s, const Group *x,
                      I sum[INT_ROWS][2]) {
    UNROLL for (int at = s * m.group / 8; at < (s + 1) * m.group / 8; at++)
        UNROLL for (int c = 0; c < cols; c++) {
            const Words u = words(m, numbers, m.bits == 8 ? 2 * at : at, c0 + c);
            const U more = m.bits == 8 ? words(m, numbers, 2 * at + 1, c0 + c).low : four(m, u, at, 1), off = {0};
            const uint32x4_t first = (uint32x4_t)(four(m, u, at, 0) ^ (off + (m.bits == 8 ? 0x80808080u : 0)));
            const uint32x4_t second = (uint32x4_t)(more ^ (off + (m.bits == 8 ? 0x80808080u : 0)));
            const int8x16_t low = (int8x16_t)vzip1q_u32(first, second), high = (int8x16_t)vzip2q_u32(first, second);
            UNROLL for (int r = 0; r < rows; r += 2) {
                if (r + 1 == rows) {
                    sum[r][c] = dot_few(sum[r][c], (U)first, four_bytes(x[r].q + 8 * at));
                    sum[r][c] = dot_few(sum[r][c], (U)second, four_bytes(x[r].q + 8 * at + 4));
                    continue;
                }
                const int8x16_t both = vcombine_s8(vld1_s8(x[r].q + 8 * at), vld1_s8(x[r + 1].q + 8 * at));
                sum[r][c] = (I)vmmlaq_s32((int32x4_t)sum[r][c], both, low);
                sum[r + 1][c] = (I)vmmlaq_s32((int32x4_t)sum[r + 1][c], both, high);
            }
        }
    UNROLL for (int r = 0; r + 1 < rows; r += 2) UNROLL for (int c = 0; c < cols; c++) {
        const int64x2_t first = (int64x2_t)sum[r][c], second = (int64x2_t)sum[r + 1][c];
        sum[r][c] = (I)vtrn1q_s64(first, second), sum[r + 1][c] = (I)vtrn2q_s64(first, second);
    }
}
#else
#define INT_PAIRS 0
INLINE void pair_sums(const Low m, const char *numbers, const int rows, const int cols, int c0, int s, const Group *x,
                      I sum[INT_ROWS][2]) {}
#endif

/* ---- a tile -------------------------------------------------------------------------------------------------- */

/* out[r][c] = sum over groups of scale * scale of x * (sum over positions of u * x), plus least * sum of x, for `rows`
 * rows and `cols` vectors of columns from the c0-th on. x: groups of a row block, `step` groups from one to the next. */
INLINE void int_tile(const int format, const int rows, const int cols, int c0, const Group *x, long step, const char *b,
                     long k, float *out) {
    const Low m = low_format(format);
    const int per = m.bits == 8 ? 4 : 8;
    const int shift = m.bits == 8 && SIGNED_DOT ? -1 : m.offset == 8 ? 3 : m.offset == 32 ? 5 : m.offset == 128 ? 7 : -1;
    const int some = dots_of_16_bits(m.bits);
    const long ahead = rows < 4 ? 2048 : 8192; /* into the second cache: the first holds x */
    V acc[INT_ROWS][2] = {{{0}}};
    for (long i = 0; i < k; i += m.block, b += block_bytes(m)) {
        const char *numbers = b + head_bytes(m);
        for (int g = 0; g < m.block / 32; g++, numbers += numbers_bytes(m), x += step) {
            if (!c0) UNROLL for (size_t at = 0; at < numbers_bytes(m) + head_bytes(m); at += 64) __builtin_prefetch(numbers + ahead + at, 0, 2);
            UNROLL for (int s = 0; s < 32 / m.group; s++) {
                I sum[INT_ROWS][2] = {{{0}}};
                U pairs[INT_ROWS][2];
                if (INT_PAIRS && rows > 1) pair_sums(m, numbers, rows, cols, c0, s, x, sum);
                else UNROLL for (int w = s * m.group / per; w < (s + 1) * m.group / per; w++)
                    UNROLL for (int c = 0; c < cols; c++) {
                        const Words u = words(m, numbers, w, c0 + c);
                        UNROLL for (int other = 0; other < per / 4; other++) {
                            const U bytes = four(m, u, w, other);
                            UNROLL for (int r = 0; r < rows; r++) {
                                const U at = four_bytes(x[r].q + w * per + other * 4);
                                const int dot = (w - s * m.group / per) * (per / 4) + other;
                                if (!some) {
                                    sum[r][c] = m.bits == 8 ? dot_all(sum[r][c], bytes, at) : dot_few(sum[r][c], bytes, at);
                                    continue;
                                }
                                const U two = pairs_of(bytes, at);
                                pairs[r][c] = dot % some ? plus_pairs(pairs[r][c], two) : two;
                                if (dot % some == some - 1) sum[r][c] = plus_both(sum[r][c], pairs[r][c]);
                            }
                        }
                    }
                V scale[NV], least[NV];
                scales(m, b, (g * 32 + s * m.group) / m.group, scale, least);
                UNROLL for (int r = 0; r < rows; r++) {
                    const int32_t all = m.group == 32 ? x[r].all : s ? x[r].all - x[r].first : x[r].first;
                    UNROLL for (int c = 0; c < cols; c++) {
                        if (shift >= 0) sum[r][c] -= all * (1 << (shift & 15)) - (I){0};
                        acc[r][c] = fused(scale[c0 + c] * x[r].scale, __builtin_convertvector(sum[r][c], V), acc[r][c]);
                        if (m.least) acc[r][c] = fused(least[c0 + c], splat(x[r].lead), acc[r][c]);
                    }
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < cols; c++) *(Vm *)(out + r * NR + (c0 + c) * W) = acc[r][c];
}

/* One function a format: out (rows, NR) floats = rows of a block times a panel. */
#define INT_CASE(name, n)                                                                       \
    case n:                                                                                     \
        if (n <= INT_ROWS) {                                                                    \
            const int cols = n <= INT_ROWS / 2 ? 2 : 1;                                         \
            UNROLL for (int c = 0; c < NV; c += cols) int_tile(name, n <= INT_ROWS ? n : 1, cols, c, x, step, panel, k, out); \
        }                                                                                       \
        break;
#define INT_TILE(name, number)                                                                                          \
    static __attribute__((noinline)) void ints_##name(int rows, const Group *x, long step, const char *panel, long k, float *out) { \
        switch (rows) {                                                                                                 \
            INT_CASE(name, 1) INT_CASE(name, 2) INT_CASE(name, 3) INT_CASE(name, 4) INT_CASE(name, 5) INT_CASE(name, 6) \
            INT_CASE(name, 7) INT_CASE(name, 8) INT_CASE(name, 9) INT_CASE(name, 10) INT_CASE(name, 11) INT_CASE(name, 12) \
        }                                                                                                               \
    }
FORMATS(INT_TILE)
#undef INT_CASE
#undef INT_TILE

static void int_rows(int format, int rows, const Group *x, long step, const char *panel, long k, float *out) {
    switch (format) {
#define CASE(name, number) \
    case name: ints_##name(rows, x, step, panel, k, out); break;
        FORMATS(CASE)
#undef CASE
    }
}
