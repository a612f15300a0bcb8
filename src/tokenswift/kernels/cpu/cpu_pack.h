/* From blocks, as GGUF files hold them, to panels. See cpu_low.h, and kernels/formats.py for the same in torch. */
#pragma once
#include "cpu_linear.h"

typedef struct { /* a block; fine scales and leasts of its groups, if it has them */
    uint8_t u[256];
    uint16_t scale, least;
    uint8_t fine[16], fine_least[16];
} Block;

INLINE uint16_t half_at(const uint8_t *b) { return (uint16_t)(b[0] | b[1] << 8); }

/* 2 n numbers of 4 bits: low halves of all bytes, then high halves. */
INLINE void nibbles(uint8_t *u, const uint8_t *q, int n) {
    for (int i = 0; i < n; i++) u[i] = q[i] & 15, u[n + i] = q[i] >> 4;
}

/* More bits of n times 8 / bits numbers: the lowest of all bytes, then the next of all, to the place `at`. */
INLINE void more_bits(uint8_t *u, const uint8_t *q, int n, int bits, int at) {
    for (int place = 0; place < 8; place += bits, u += n)
        for (int i = 0; i < n; i++) u[i] |= (q[i] >> place & ((1 << bits) - 1)) << at;
}

/* Eight scales and eight leasts of 6 bits. */
INLINE void sixes(Block *x, const uint8_t *b) {
    for (int i = 0; i < 4; i++) {
        x->fine[i] = b[i] & 63, x->fine[4 + i] = (b[8 + i] & 15) | b[i] >> 6 << 4;
        x->fine_least[i] = b[4 + i] & 63, x->fine_least[4 + i] = b[8 + i] >> 4 | b[4 + i] >> 6 << 4;
    }
}

static void take_block(int format, const uint8_t *b, Block *x) {
    switch (format) {
    case Q4_0: case IQ4_NL: x->scale = half_at(b), nibbles(x->u, b + 2, 16); break;
    case MXFP4: /* twice the exponent's power is taken off: the numbers are twice what they stand for */
        x->scale = b[0] < 2 ? 0x20 << b[0] : (b[0] - 1) << 7;
        nibbles(x->u, b + 1, 16);
        break;
    case Q4_1: x->scale = half_at(b), x->least = half_at(b + 2), nibbles(x->u, b + 4, 16); break;
    case Q5_0: case Q5_1:
        x->scale = half_at(b);
        if (format == Q5_1) x->least = half_at(b + 2), b += 2;
        nibbles(x->u, b + 6, 16);
        for (int i = 0; i < 32; i++) x->u[i] |= (b[2 + i / 8] >> (i & 7) & 1) << 4;
        break;
    case Q8_0:
        x->scale = half_at(b);
        for (int i = 0; i < 32; i++) x->u[i] = b[2 + i] ^ 128;
        break;
    case Q2_K:
        for (int half = 0; half < 2; half++) more_bits(x->u + half * 128, b + 16 + half * 32, 32, 2, 0);
        for (int i = 0; i < 16; i++) x->fine[i] = b[i] & 15, x->fine_least[i] = b[i] >> 4;
        x->scale = half_at(b + 80), x->least = half_at(b + 82) ^ 0x8000;
        break;
    case Q3_K:
        for (int half = 0; half < 2; half++) more_bits(x->u + half * 128, b + 32 + half * 32, 32, 2, 0);
        more_bits(x->u, b, 32, 1, 2);
        nibbles(x->fine, b + 96, 8);
        more_bits(x->fine, b + 104, 4, 2, 4);
        for (int i = 0; i < 16; i++) x->fine[i] -= 32;
        x->scale = half_at(b + 108);
        break;
    case Q4_K: case Q5_K:
        x->scale = half_at(b), x->least = half_at(b + 2) ^ 0x8000;
        sixes(x, b + 4);
        for (int i = 0; i < 4; i++) nibbles(x->u + i * 64, b + (format == Q4_K ? 16 : 48) + i * 32, 32);
        if (format == Q5_K) more_bits(x->u, b + 16, 32, 1, 4);
        break;
    case Q6_K:
        for (int half = 0; half < 2; half++) {
            nibbles(x->u + half * 128, b + half * 64, 64);
            more_bits(x->u + half * 128, b + 128 + half * 32, 32, 2, 4);
        }
        memcpy(x->fine, b + 192, 16);
        x->scale = half_at(b + 208);
        break;
    default: /* IQ4_XS */
        x->scale = half_at(b);
        for (int i = 0; i < 8; i++) {
            nibbles(x->u + i * 32, b + 8 + i * 16, 16);
            x->fine[i] = (uint8_t)((b[4 + i / 2] >> 4 * (i & 1) & 15) | (half_at(b + 2) >> 2 * i & 3) << 4) - 32;
        }
    }
}

/* A block's numbers to column c of a panel's block. */
INLINE void put_block(const Low m, const Block *x, char *block, int c) {
    const int groups = m.block / m.group;
    ((uint16_t *)block)[c] = x->scale;
    if (m.least) ((uint16_t *)block)[NR + c] = x->least;
    char *at = block + NR * 2 * (1 + m.least) + c;
    for (int g = 0; m.fine && g < groups; g++, at += NR) *at = (char)x->fine[g];
    for (int g = 0; m.fine && m.least && g < groups; g++, at += NR) *at = (char)x->fine_least[g];
    uint32_t *word = (uint32_t *)(block + head_bytes(m)) + c;
    for (int g = 0; g < m.block / 32; g++) {
        uint32_t quad[8], high[2] = {0};
        memcpy(quad, x->u + g * 32, 32);
        for (int w = 0; w < (m.bits == 8 ? 8 : 4); w++, word += NR)
            *word = m.bits == 8 ? quad[w] : (quad[2 * w] & 0x0f0f0f0fu) | (quad[2 * w + 1] & 0x0f0f0f0fu) << 4;
        for (int i = 0; i < 8; i++) {
            if (m.bits == 5) high[0] |= (quad[i] >> 4 & 0x01010101u) << i;
            if (m.bits == 6) high[i / 4] |= (quad[i] >> 4 & 0x03030303u) << 2 * (i & 3);
        }
        for (int i = 0; i < (m.bits == 6 ? 2 : m.bits == 5); i++, word += NR) *word = high[i];
    }
}

typedef struct {
    char *panels;
    const uint8_t *blocks;
    long rows, row_bytes, K;
    int format;
} Pack;

INLINE void pack_panels(const Pack *p, const int format, long from, long to) {
    const Low m = low_format(format);
    const long count = p->K / m.block, bytes = p->row_bytes / count;
    char *block = p->panels + from * count * block_bytes(m);
    for (long panel = from; panel < to; panel++)
        for (long i = 0; i < count; i++, block += block_bytes(m))
            for (int c = 0; c < NR; c++) {
                Block x;
                const long row = panel * NR + c;
                if (row >= p->rows || format == Q2_K || format == Q3_K) memset(&x, 0, sizeof x);
                if (row < p->rows) take_block(format, p->blocks + row * p->row_bytes + i * bytes, &x);
                put_block(m, &x, block, c);
            }
}

static void some_packed(void *context, long from, long to, int thread) {
    const Pack *p = context;
    (void)thread;
    switch (p->format) {
#define CASE(name, number) \
    case name: pack_panels(p, name, from, to); break;
        FORMATS(CASE)
#undef CASE
    }
}

/* Panels of a weight (rows, K) of a low format from its rows of blocks, row_bytes each. */
void ts_pack(char *panels, int format, const uint8_t *blocks, long rows, long row_bytes, long K, int threads) {
    Pack p = {panels, blocks, rows, row_bytes, K, format};
    threads = take_team(threads);
    run(threads, (rows + NR - 1) / NR, (double)rows * K, some_packed, &p);
    leave_team(threads);
}
