/* Products with packed weights: float32, bfloat16 and float16 as panels, formats of cpu_low.h unpacked part by
 * part, and int8. See cpu.c. */
#pragma once
#include "cpu_int.h"
#include "cpu_team.h"

typedef struct { /* rows of a weight in one format: a type, or one of FORMATS */
    const char *data;
    long rows; /* of all parts but the last a multiple of NR */
    int format;
} Part;

typedef struct { /* (N, K), packed; bias (N) or NULL */
    const Part *parts;
    const float *bias;
} Weight;

typedef struct {
    float *out;
    long ldo;
    const char *x;
    size_t ldx;
    Weight w;
    long n, N, K;
    int active, add;
} Linear;

#define MANY 96 /* rows that share what is made of a panel */
#define AHEAD 2048 /* bytes that a product prefetches ahead of the panel that it reads */

/* Rows r .. r + rows of panel p: sums (rows, NR), plus bias, plus what out held if add. */
INLINE void put(const Linear *l, long p, long r, int rows, const float *sums) {
    const int cols = l->N - p * NR < NR ? (int)(l->N - p * NR) : NR;
    float *at = l->out + r * l->ldo + p * NR;
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < cols; c += W) {
            char *to = (char *)(at + i * l->ldo + c);
            V y = load(F32, (char *)(sums + i * NR + c));
            if (l->w.bias) y += load_left(F32, (const char *)(l->w.bias + p * NR + c), cols - c);
            if (l->add) y = load_left(F32, to, cols - c) + y;
            store_left(F32, to, y, cols - c);
        }
}

static void dense_panel(const Linear *l, long p, const char *panel, int format) {
    const int how = format == BF16 ? PAIRS : format == F16 ? ROWS_F16 : ROWS_F32;
    const size_t ldb = format == F16 ? NR * 2 : NR * 4;
    const int direct = l->N - p * NR >= NR && !l->w.bias && !l->add;
    for (long r = 0; r < l->n; r += MR) {
        const int rows = l->n - r < MR ? (int)(l->n - r) : MR;
        float sums[MR * NR];
        any_tile(how, rows, l->x + r * l->ldx, l->ldx, panel, ldb, panel + AHEAD, ldb, l->K,
                 direct ? l->out + r * l->ldo + p * NR : sums, direct ? (size_t)l->ldo : NR, 0);
        if (!direct) put(l, p, r, rows, sums);
    }
}

/* A panel of low format: integers as they are, floats unpacked part by part. */
static void low_panel(const Linear *l, long p, const char *panel, int format) {
    float sums[MANY * NR];
    if (l->active == I8) {
        const long block = block_of_rows(l->n);
        for (long r = 0; r < l->n; r += block) {
            const int rows = l->n - r < block ? (int)(l->n - r) : (int)block;
            int_rows(format, rows, group_of((void *)l->x, l->n, l->K, r), block, panel, l->K, sums);
            put(l, p, r, rows, sums);
        }
        return;
    }
    const int pairs = l->active == BF16;
    _Alignas(64) char decoded[PART * NR * 4];
    for (long first = 0; first < l->n; first += MANY) {
        const int rows = l->n - first < MANY ? (int)(l->n - first) : MANY;
        for (long k = 0; k < l->K; k += PART) {
            const long to = l->K - k < PART ? l->K : k + PART;
            decode_any(format, panel, k, to, pairs, decoded);
            for (int r = 0; r < rows; r += MR)
                any_tile(pairs ? PAIRS : ROWS_F32, rows - r < MR ? rows - r : MR,
                         l->x + (first + r) * l->ldx + k * (pairs ? 2 : 4), l->ldx, decoded, NR * 4, decoded, 0, to - k,
                         sums + r * NR, NR, k > 0);
        }
        put(l, p, first, rows, sums);
    }
}

static void some_panels(void *context, long from, long to, int thread) {
    const Linear *l = context;
    const Part *part = l->w.parts;
    long first = 0; /* the part's first panel */
    (void)thread;
    for (long p = from; p < to; p++) {
        while (p >= first + (part->rows + NR - 1) / NR) first += (part++->rows + NR - 1) / NR;
        const char *panel = part->data + (p - first) * panel_bytes(part->format, l->K);
        if (part->format <= F16 && (part->format == BF16) == (l->active == BF16)) dense_panel(l, p, panel, part->format);
        else low_panel(l, p, panel, part->format);
    }
}

/* out (n, N) float32, ldo floats apart = x (n, K) times the transpose of the weight (N, K), plus bias (N) or
 * nothing, plus what out held if add. Packed weights: panels of NR columns; inside, for float32 and float16
 * (K, NR), for bfloat16 (K / 2, NR, 2), for FORMATS as cpu_low.h says; columns beyond N are 0. x: ldx bytes apart,
 * of the type active: float32, bfloat16 or groups of int8 (I8: all parts are of FORMATS). K is even. */
static void linear(float *out, long ldo, const void *x, size_t ldx, const Weight *w, long n, long N, long K, int active,
                      int add, int threads) {
    Linear l = {out, ldo, x, ldx, *w, n, N, K, active, add};
    run(threads, (N + NR - 1) / NR, (double)n * N * K, some_panels, &l);
}

/* out (n, K) float32 = rows of a weight (N, K) of low formats. Returns the first id for which there is none, or -1. */
long ts_take(float *out, const Weight *w, const int64_t *ids, long n, long N, long K) {
    _Alignas(64) float decoded[PART * NR];
    for (long i = 0; i < n; i++) {
        const Part *part = w->parts;
        long row = ids[i];
        if (row < 0 || row >= N) return i;
        while (row >= part->rows) row -= part++->rows;
        const char *panel = part->data + row / NR * panel_bytes(part->format, K);
        for (long k = 0; k < K; k += PART) {
            const long to = K - k < PART ? K : k + PART;
            decode_any(part->format, panel, k, to, 0, (char *)decoded);
            for (long j = k; j < to; j++) out[i * K + j] = decoded[(j - k) * NR + row % NR];
        }
    }
    return -1;
}
