/* A level of conditioned draft heads (spec/heads/conditioned.py) in one call. Included by cpu.c, whose products it uses. */
#pragma once

typedef struct { /* inputs (n, 3 D): the states, the base state (1, D) and embeddings, each normed */
    Weight first, outer;      /* (D + inner, 3 D) with a bias, and (D, inner) without one; outer.parts may be NULL */
    const float *norms[3];    /* (D) each */
    const Weight *heads;      /* (count) with D columns each: rows of the LM head */
    const long *sizes;        /* (count) rows of each */
    long count, width, inner; /* width: D */
    float eps;
    int active;               /* F32 or I8 */
} DraftStep;

/* out = x (n, K) times a weight; groups: room for x in int8. */
static void draft_product(const DraftStep *s, float *out, long ldo, const float *x, const Weight *w, long n, long N, long K,
                          int add, char *groups, int threads) {
    if (s->active == I8) quantized(groups, x, n, K, threads);
    linear(out, ldo, s->active == I8 ? (const void *)groups : x, K * 4, w, n, N, K, s->active, add, threads);
}

/* Next states (n, D) and their logits (n, all rows of the heads). Returns 0, or the bytes of work that it needs. */
long ts_draft(float *out, float *logits, const float *states, const float *base, const float *embeds, const DraftStep *s,
              long n, char *work, long work_bytes, int threads) {
    const long D = s->width, K = 3 * D, N = D + s->inner, most = K > s->inner ? K : s->inner;
    const size_t inputs = up(n * most * 4, 64), made = up(n * N * 4, 64);
    const size_t need = 64 + inputs + made + up(groups_bytes(n, most), 64);
    if ((size_t)work_bytes < need) return (long)need;
    work += (64 - (uintptr_t)work % 64) % 64;
    float *x = (float *)work, *y = (float *)(work + inputs);
    char *groups = work + inputs + made;
    long columns = 0;
    threads = take_team(threads);
    for (long i = 0; i < n; i++) {
        norm_row((char *)(x + i * K), F32, states + i * D, s->norms[0], D, s->eps);
        norm_row((char *)(x + i * K + D), F32, base, s->norms[1], D, s->eps);
        norm_row((char *)(x + i * K + 2 * D), F32, embeds + i * D, s->norms[2], D, s->eps);
    }
    draft_product(s, y, N, x, &s->first, n, N, K, 0, groups, threads);
    for (long i = 0; i < n; i++) {
        memcpy(out + i * D, y + i * N, D * 4);
        for (long j = 0; j < s->inner; j++) x[i * s->inner + j] = y[i * N + D + j] > 0 ? y[i * N + D + j] : 0;
    }
    if (s->outer.parts) draft_product(s, out, D, x, &s->outer, n, D, s->inner, 1, groups, threads);
    for (long h = 0; h < s->count; h++) columns += s->sizes[h];
    for (long h = 0, at = 0; h < s->count; at += s->sizes[h++])
        draft_product(s, logits + at, columns, out, s->heads + h, n, s->sizes[h], D, 0, groups, threads);
    leave_team(threads);
    return 0;
}
