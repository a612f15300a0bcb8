/* Quantized weights: how panels hold them, and tiles of products with them. See cpu.c and kernels/formats.py.
 *
 * A weight is scale * u + least, u an integer of a few bits. The product is exact in float32, so the fused
 * step gives the value of the unpacked checkpoint, which enters the same chain of additions as an unpacked weight does.
 *
 * A panel is a row of blocks, each: scale of NR columns (float16; of MXFP4, whose scales are powers of two, bfloat16), least of NR columns, then for every group
 * the fine scales (NR bytes) and fine leasts, then for every 32 inner positions the integers. Of 8 bits: 8
 * rows of NR words, each with 4 positions of its column. Of fewer: 4 rows of NR words, each with 8 positions (the
 * low halves of its bytes hold the first four, the high halves the others); the fifth bits are one more word (bit i of
 * byte b: position 4 i + b), the fifth and sixth two more (bits 2 i of byte b: position 4 i + b, and 16 more
 * in the second).
 */
#pragma once
#include "cpu_tile.h"

/* number formats beside the types: 16 + GGUF's number of the format */
#define FORMATS(X)                                                                              \
    X(Q4_0, 18) X(Q4_1, 19) X(Q5_0, 22) X(Q5_1, 23) X(Q8_0, 24) X(Q2_K, 26) X(Q3_K, 27)         \
    X(Q4_K, 28) X(Q5_K, 29) X(Q6_K, 30) X(IQ4_NL, 36) X(IQ4_XS, 39) X(MXFP4, 55)
#define NUMBER(name, number) name = number,
enum { FORMATS(NUMBER) };
#undef NUMBER

typedef struct { int block, group, bits, least, fine, offset, e2m1; } Low; /* e2m1: scales are bfloat16, places are of that table */

INLINE Low low_format(int format) {
    switch (format) {
    case Q4_0: return (Low){32, 32, 4, 0, 0, 8};
    case Q4_1: return (Low){32, 32, 4, 1, 0, 0};
    case Q5_0: return (Low){32, 32, 5, 0, 0, 16};
    case Q5_1: return (Low){32, 32, 5, 1, 0, 0};
    case Q8_0: return (Low){32, 32, 8, 0, 0, 128};
    case Q2_K: return (Low){256, 16, 4, 1, 1, 0};
    case Q3_K: return (Low){256, 16, 4, 0, 1, 4};
    case Q4_K: return (Low){256, 32, 4, 1, 1, 0};
    case Q5_K: return (Low){256, 32, 5, 1, 1, 0};
    case IQ4_NL: return (Low){32, 32, 4, 0, 0, 128};
    case IQ4_XS: return (Low){256, 32, 4, 0, 1, 128};
    case MXFP4: return (Low){32, 32, 4, 0, 0, 128, 1};
    default: return (Low){256, 16, 6, 0, 1, 32}; /* Q6_K */
    }
}

INLINE int wide(Low m) { return m.offset == 128; } /* numbers of 8 bits enter products; those of 4 bits are places in: */
static const uint8_t iq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
/* twice the numbers of a sign, two bits of exponent and one of mantissa */
static const uint8_t e2m1[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

INLINE size_t numbers_bytes(Low m) { /* of 32 inner positions */
    return NR * (m.bits == 8 ? 32 : m.bits == 6 ? 24 : m.bits == 5 ? 20 : 16);
}
INLINE size_t head_bytes(Low m) { return NR * 2 * (1 + m.least) + (m.fine ? m.block / m.group * NR * (1 + m.least) : 0); }
INLINE size_t block_bytes(Low m) { return head_bytes(m) + m.block / 32 * numbers_bytes(m); }
INLINE size_t panel_bytes(int format, long K) {
    if (format <= F16) return (size_t)K * NR * bytes_of(format);
    const Low m = low_format(format);
    return K / m.block * block_bytes(m);
}

typedef int8_t Bytes __attribute__((vector_size(W), aligned(1), may_alias));

INLINE V from_bytes(const char *p) { /* GCC's own conversion of such vectors goes lane by lane */
#if W == 16
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif W == 8
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    return __builtin_convertvector(*(const Bytes *)p, V);
#endif
}

/* Scale and least value of a block's group, of the c-th vector of columns. */
INLINE void scales(const Low m, const char *block, int group, int c, V *scale, V *least) {
    const char *fine = block + NR * 2 * (1 + m.least) + group * NR + c * W;
    *scale = m.e2m1 ? from_bf16(block + c * W * 2) : from_f16((const uint16_t *)block + c * W);
    if (m.fine) *scale *= from_bytes(fine);
    *least = m.least ? from_f16((const uint16_t *)block + NR + c * W) : *scale * (float)-m.offset;
    if (m.fine && m.least) *least *= from_bytes(fine + m.block / m.group * NR);
}

/* The words of W columns that hold 8 positions (4 of 8 bits): word row w of 32 positions, and the high bits. */
typedef struct { U low, high; } Words;
INLINE Words words(const Low m, const char *numbers, int w, int c) {
    Words x = {*(const Um *)(numbers + (w * NR + c * W) * 4), {0}};
    if (m.bits == 5) x.high = *(const Um *)(numbers + (4 * NR + c * W) * 4);
    if (m.bits == 6) x.high = *(const Um *)(numbers + ((4 + w / 2) * NR + c * W) * 4);
    return x;
}

/* What a table holds at places of 4 bits, byte by byte. */
INLINE U looked_up(const uint8_t table[16], U places) {
#if W == 16
    return (U)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), (__m512i)places);
#elif W == 8
    return (U)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), (__m256i)places);
#else
    return (U)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)places);
#endif
}

/* Integers of four positions as bytes: those of word row w, the first or the other four. */
INLINE U four(const Low m, Words x, int w, int other) {
    if (m.bits == 8) return x.low;
    U u = x.low >> 4 * other & 0x0f0f0f0fu;
    if (wide(m)) return looked_up(m.e2m1 ? e2m1 : iq4, u);
    const int quad = 2 * w + other;
    const int up = 4 - (m.bits == 5 ? quad : 2 * (quad & 3)); /* high bits to their place in one step */
    const U high = up >= 0 ? x.high << (up & 31) : x.high >> (-up & 31);
    if (m.bits == 5) u |= high & 0x10101010u;
    if (m.bits == 6) u |= high & 0x30303030u;
    return u;
}

/* The integers of position j of these words. */
INLINE V number(const Low m, Words x, int w, int j) {
#if W == 16
    if (m.bits == 4 && !wide(m)) {
        const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return (V)_mm512_permutexvar_ps((__m512i)(x.low >> (8 * (j & 3) + 4 * (j >> 2))), table);
    }
#endif
    return __builtin_convertvector((I)(four(m, x, w, j >> 2) >> 8 * (j & 3) & 255), V);
}

/* ---- products of floats: a part of a panel is unpacked, for all rows ----------------------------------- */

INLINE U rounded(V x) { return as_u(x) + 0x7fff + (as_u(x) >> 16 & 1); } /* its upper half is bfloat16 */

/* Two positions of a column side by side. */
INLINE U paired(V first, V second) {
#if defined(__AVX512BF16__)
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (U)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    return rounded(first) >> 16 | (rounded(second) & 0xffff0000u);
#endif
}

#define PART 128 /* inner positions made at a time: 16 KB */

/* 32 inner positions of a panel, the g-th of a block: (32, NR) float32, or pairs (16, NR) of bfloat16. */
INLINE void decode(const int format, const int pairs, const char *block, int g, char *out) {
    const Low m = low_format(format);
    const int per = m.bits == 8 ? 4 : 8;
    const char *numbers = block + head_bytes(m) + g * numbers_bytes(m);
    V scale[NV], least[NV];
    __builtin_prefetch(numbers + 4096);
    for (int w = 0; w < 32 / per; w++) {
        if (w * per % m.group == 0)
            UNROLL for (int c = 0; c < NV; c++) scales(m, block, (g * 32 + w * per) / m.group, c, scale + c, least + c);
        UNROLL for (int c = 0; c < NV; c++) {
            const Words u = words(m, numbers, w, c);
            UNROLL for (int j = 0; j < per; j += 2) {
                V first = fused(scale[c], number(m, u, w, j), least[c]);
                V second = fused(scale[c], number(m, u, w, j + 1), least[c]);
                char *at = out + ((w * per + j) * NR + c * W) * 4;
                if (pairs) *(Um *)(out + ((w * per + j) / 2 * NR + c * W) * 4) = paired(first, second);
                else *(Vm *)at = first, *(Vm *)(at + NR * 4) = second;
            }
        }
    }
}

#define DECODE(name, number)                                                                             \
    static __attribute__((noinline)) void decode_##name(const char *panel, long from, long to, int pairs, char *out) { \
        const Low m = low_format(name);                                                                  \
        for (long i = from; i < to; i += 32, out += pairs ? 16 * NR * 4 : 32 * NR * 4) {                  \
            const char *block = panel + i / m.block * block_bytes(m);                                    \
            if (pairs) decode(name, 1, block, (int)(i % m.block / 32), out);                              \
            else decode(name, 0, block, (int)(i % m.block / 32), out);                                    \
        }                                                                                                \
    }
FORMATS(DECODE)
#undef DECODE

/* Inner positions from .. to of a panel, both multiples of 32 or the end, as any_tile takes them. */
static void decode_any(int format, const char *panel, long from, long to, int pairs, char *out) {
    if (format == BF16) { /* dense pairs as float32 */
        for (long i = from; i < to; i += 2, out += 2 * NR * 4)
            UNROLL for (int c = 0; c < NV; c++) {
                const U w = *(const Um *)(panel + (i / 2 * NR + c * W) * 4);
                *(Vm *)(out + c * W * 4) = as_v(w << 16);
                *(Vm *)(out + (NR + c * W) * 4) = as_v(w & 0xffff0000u);
            }
        return;
    }
    switch (format) {
#define CASE(name, number) \
    case name: decode_##name(panel, from, to, pairs, out); break;
        FORMATS(CASE)
#undef CASE
    }
}
