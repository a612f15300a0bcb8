/* Attention over keys and values in int8, by the specification in docs/exactness.md. See cpu_attention.h.
 *
 * Of each KV head, 16 tokens stand together in a page: 16 scales of keys, the logarithms (to base 2) of 16 scales of
 * values and the inverses of these (float32), then the keys as words of 4 dimensions (width / 4 words of 16 tokens each,
 * every byte with an offset of 128), then the values as words of 4 tokens (4 times the width's words, the width filled up
 * to a multiple of 16). So no pass transposes keys. Where keys have single channels of very large numbers they are of 16
 * bits (I16): words of 2 dimensions, with a sign, from -KEY_LEVELS to KEY_LEVELS.
 *
 * Scores are exact sums of integers times two scales, to base 2, and hold the logarithm of the value's scale. So in a chunk
 * one exponential a key gives the weight of the value's integers: the greatest is 2^14 - 1, and they are rounded. Their
 * high and low 7 bits stand apart, as if they were two rows, and their products with the values are exact sums again.
 */
#pragma once
#include "cpu_attention.h"
#include "cpu_int.h"

#define LEVELS (PAGE * 4) /* bytes from a page's scales of keys to the logarithms of those of values, and to the inverses */
#define SCALES (3 * LEVELS) /* where a page's keys begin */
#define CHUNK_PAGES (CHUNK / PAGE)
/* Greatest integers of keys and queries of 16 bits. Their product times MOST_WIDE dimensions is below 2^31. */
#define KEY_LEVELS 8191.0f
#define QUERY_LEVELS 511.0f
#define WEIGHT_LEVELS 16383.0f /* the greatest weight of a value */
#define MOST_WIDE 512
#define SCORE_ROWS (W == 16 ? 12 : NEON ? 6 : MR)
#define VALUE_ROWS (W == 16 || NEON ? 6 : 4) /* two for each row: of high and of low bits */
#define VALUE_COLS (W == 16 || NEON ? 4 : 2) /* vectors of dimensions */

INLINE long key_words(int type, long width) { return type == I16 ? width / 2 : width / 4; } /* of a token's key */
INLINE size_t values_at(int type, long width) { return SCALES + key_words(type, width) * 4 * PAGE; }
INLINE size_t page_bytes(int type, long width) { return values_at(type, width) + up(width, 16) * PAGE; }

/* Write a head's value of a slot. pages: the head's; type: of its keys. */
static void put_value(int type, char *pages, long slot, const float *x, long width) {
    char *page = pages + slot / PAGE * page_bytes(type, width);
    const long t = slot % PAGE;
    int8_t q[width];
    const float scale = whole_row(q, x, width);
    float *levels = (float *)(page + LEVELS) + t, *inverses = levels + PAGE;
    char *to = page + values_at(type, width) + t / 4 * up(width, 16) * 4 + t % 4;
    *levels = scale == 0 ? -64.0f : (float)(natural_log(scale) * 1.4426950408889634); /* of nothing but zeros: any scale will do */
    *inverses = scale == 0 ? 0x1p64f : 1.0f / scale;
    for (long j = 0; j < width; j++) to[4 * j] = q[j];
}

/* Write a head's key of a slot. */
static void put_key(int type, char *pages, long slot, const float *x, long width) {
    char *page = pages + slot / PAGE * page_bytes(type, width), *to = page + SCALES + slot % PAGE * 4;
    float *scale = (float *)page + slot % PAGE;
    if (type == I16) {
        int16_t q[width];
        *scale = whole_row16(q, x, width, KEY_LEVELS);
        for (long j = 0; j < width; j += 2) memcpy(to + j / 2 * PAGE * 4, q + j, 4);
        return;
    }
    int8_t q[width];
    *scale = whole_row(q, x, width);
    for (long j = 0; j < width; j += 4)
        for (int b = 0; b < 4; b++) to[j * PAGE + b] = (char)(q[j + b] + 128);
}

/* Copy one entry of a head. */
static void copy_entry(int type, char *to, long into, const char *from, long source, long width) {
    const size_t page = page_bytes(type, width), values = values_at(type, width), word = up(width, 16) * 4;
    const long t = into % PAGE, f = source % PAGE;
    char *x = to + into / PAGE * page;
    const char *y = from + source / PAGE * page;
    for (long w = 0; w < 3 + key_words(type, width); w++) memcpy(x + (w * PAGE + t) * 4, y + (w * PAGE + f) * 4, 4);
    x += values + t / 4 * word + t % 4;
    y += values + f / 4 * word + f % 4;
    for (long j = 0; j < width; j++) x[4 * j] = y[4 * j];
}

/* Copy entries of all layers, from slots to slots in their order; of each head of each layer its own slots (by_head), or the
 * same of all. wide: of each layer whether its keys are of 16 bits. */
void ts_copy(char *to, long to_capacity, const char *from, long from_capacity, long width, long layers, const uint8_t *wide,
             long heads, long n, const int32_t *into, const int32_t *source, int by_head) {
    for (long h = 0; h < layers * heads; h++, source += by_head ? n : 0) {
        const int type = wide[h / heads] ? I16 : I8;
        for (long i = 0; i < n; i++) copy_entry(type, to, into[i], from, source[i], width);
        to += to_capacity / PAGE * page_bytes(type, width);
        from += from_capacity / PAGE * page_bytes(type, width);
    }
}

static void queries8_of(const Attend *a, long head, long first, long count, const Scratch *w) {
    const long group = a->heads / a->kv_heads, width = a->width;
    for (long r = 0; r < count * group; r++) {
        const float *x = (const float *)a->q + ((head * group + r % group) * a->n + first + r / group) * width;
        if (a->type == I16) {
            w->scale[r] = whole_row16((int16_t *)w->q + r * width, x, width, QUERY_LEVELS) * (a->scale * 1.44269504f);
            w->shift[r] = 0;
            continue;
        }
        int8_t *q = (int8_t *)w->q + r * width;
        int32_t sum = 0;
        w->scale[r] = whole_row(q, x, width) * (a->scale * 1.44269504f);
        for (long j = 0; j < width; j++) sum += q[j];
        w->shift[r] = SIGNED_DOT ? 0 : -128 * sum;
    }
}

/* ---- scores ------------------------------------------------------------------------------------------ */

/* Scores of rows (words 4-byte words of each) with the tokens of `count` pages next to each other, to base 2, with the
 * logarithms of their values' scales, which come later where scores have a cap; s: rows lds floats apart. The keys `ahead`
 * bytes on are asked for. */
INLINE void score_tile(const int type, const int rows, const int count, const char *q, const float *scale, const int32_t *shift,
                       const char *pages, size_t page, size_t ahead, long words, float cap, float *s, long lds) {
    I sum[SCORE_ROWS][4 * NL];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < count * NL; p++) sum[r][p] = shift[r] - (I){0};
    for (long w = 0; w < words; w++) {
        U k[4 * NL];
        UNROLL for (int p = 0; p < count; p++) {
            const char *at = pages + p * page + w * PAGE * 4;
            __builtin_prefetch(at + SCALES + ahead, 0, 2);
            UNROLL for (int h = 0; h < NL; h++) k[p * NL + h] = *(const Um *)(at + SCALES + h * 4 * W);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const U x = four_bytes(q + (r * words + w) * 4);
            UNROLL for (int p = 0; p < count * NL; p++)
                sum[r][p] = type == I16 ? dot_pairs(sum[r][p], k[p], x) : dot_all(sum[r][p], k[p], x);
        }
    }
    UNROLL for (int p = 0; p < count; p++) UNROLL for (int h = 0; h < NL; h++) {
        const char *at = pages + p * page + h * 4 * W;
        if (!h) for (int line = 0; line < SCALES; line += 64) __builtin_prefetch(at + line + ahead, 0, 2);
        const V scales = *(const Vm *)at;
        V level = {0};
        if (!cap) level = *(const Vm *)(at + LEVELS);
        UNROLL for (int r = 0; r < rows; r++)
            *(Vm *)(s + r * lds + p * PAGE + h * W) =
                fused(__builtin_convertvector(sum[r][p * NL + h], V), scales * scale[r], level);
    }
}

#define SCORE_CASE(n)                                                                                             \
    case n:                                                                                                       \
        if (n <= SCORE_ROWS) {                                                                                    \
            const int many = W < 16 ? 1 : n <= 3 ? 4 : n <= 6 ? 2 : 1, one = n <= SCORE_ROWS ? n : 1;             \
            for (; pages >= many; pages -= many, at += many * page, s += many * PAGE)                             \
                score_tile(type, one, many, q, scale, shift, at, page, ahead, words, cap, s, lds);                        \
            for (; pages; pages--, at += page, s += PAGE)                                                         \
                score_tile(type, one, 1, q, scale, shift, at, page, ahead, words, cap, s, lds);                           \
        }                                                                                                         \
        break;
INLINE void score_pages(const int type, int rows, long pages, const char *q, const float *scale, const int32_t *shift,
                        const char *at, size_t ahead, long width, float cap, float *s, long lds) {
    const size_t page = page_bytes(type, width);
    const long all_pages = pages, words = key_words(type, width);
    const char *begin = at;
    float *first = s;
    switch (rows) {
        SCORE_CASE(1) SCORE_CASE(2) SCORE_CASE(3) SCORE_CASE(4) SCORE_CASE(5) SCORE_CASE(6)
        SCORE_CASE(7) SCORE_CASE(8) SCORE_CASE(9) SCORE_CASE(10) SCORE_CASE(11) SCORE_CASE(12)
    }
    if (!cap) return;
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < all_pages * PAGE; j += W) {
            float *x = first + r * lds + j;
            *(Vm *)x = capped(*(Vm *)x, cap) + *(const Vm *)(begin + j / PAGE * page + LEVELS + j % PAGE * 4);
        }
}
#undef SCORE_CASE

typedef void Score(int rows, long pages, const char *q, const float *scale, const int32_t *shift, const char *at, size_t ahead, long width,
                   float cap, float *s, long lds);

static __attribute__((noinline)) void score_pages8(int rows, long pages, const char *q, const float *scale, const int32_t *shift,
                                                   const char *at, size_t ahead, long width, float cap, float *s, long lds) {
    score_pages(I8, rows, pages, q, scale, shift, at, ahead, width, cap, s, lds);
}

static __attribute__((noinline)) void score_pages16(int rows, long pages, const char *q, const float *scale, const int32_t *shift,
                                                    const char *at, size_t ahead, long width, float cap, float *s, long lds) {
    score_pages(I16, rows, pages, q, scale, shift, at, ahead, width, cap, s, lds);
}

/* ---- probabilities ----------------------------------------------------------------------------------- */

/* (2^14 - 1) * 2^x for x up to 0; below -100 as for -100. The relative error is below 1.1e-4. NaN stays NaN. */
INLINE V exp2_14(V x) {
#if W == 16
    x = (V)_mm512_max_ps(_mm512_set1_ps(-100.0f), (__m512)x);
    const V turns = (V)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
    x = pick(x < -100.0f, splat(-100.0f), x);
    const V turned = x + 12582912.0f, turns = turned - 12582912.0f;
#endif
    const V r = x - turns;
    V p = fused(r, splat(901.210449f), splat(3968.14233f));
    p = fused(p, r, splat(11358.0547f));
    p = fused(p, r, splat(WEIGHT_LEVELS));
#if W == 16
    return (V)_mm512_scalef_ps((__m512)p, (__m512)turns);
#else
    return as_v(as_u(p) + ((as_u(turned) - 0x4b400000u) << 23)); /* NaN: of p, whatever is added */
#endif
}

/* A row's scores of positions low … end - 1 (a chunk's, from a multiple of 16 at or below low to one at or above end) →
 * the high and the low 7 bits of the values' weights (0 elsewhere), the maximum (to base e) and the sum of exponentials:
 * 2^14 - 1 times what they are to that maximum, 16 partial sums by position, added as a tree. inverse: of the values'
 * scales, 0 where masked. */
INLINE void soften8(const float *s, const float *inverse, long low, long end, uint8_t *p_high, uint8_t *p_low, float *max, float *sum) {
    const long used = up(end, 16), skipped = low / 16 * 16;
    V top[NL], total[NL];
    memset(p_high, 0, skipped);
    memset(p_low, 0, skipped);
    UNROLL for (int h = 0; h < NL; h++) top[h] = splat(-INFINITY), total[h] = (V){0};
    for (long j = skipped; j < used; j += 16) UNROLL for (int h = 0; h < NL; h++) top[h] = higher(*(const Vm *)(s + j + h * W), top[h]);
    const float best = highest_lane(top);
    if (best == -INFINITY) { /* nothing is seen here, or nothing that is a number */
        memset(p_high + skipped, 0, used - skipped);
        memset(p_low + skipped, 0, used - skipped);
        *max = low < end ? NAN : best, *sum = low < end ? NAN : 0;
        return;
    }
    *max = best * 0.693147182f;
    for (long j = skipped; j < used; j += 16) {
        V y[NL];
        UNROLL for (int h = 0; h < NL; h++) {
            y[h] = exp2_14(*(const Vm *)(s + j + h * W) - best);
            total[h] = fused(y[h], *(const Vm *)(inverse + j + h * W), total[h]);
        }
        two_bytes(p_high + j, p_low + j, y);
    }
    *sum = sum_lanes(total);
}

/* ---- values ------------------------------------------------------------------------------------------ */

typedef struct { /* words of 4 tokens, from … to - 1, and the numbers that they are multiplied with */
    const uint8_t *p;
    long ldp, from, to;
    const char *pages;
} Words4;

/* out[r][:] of rows and `cols` vectors of dimensions from byte `at` on: sums over two ranges of tokens, of weights whose high
 * 7 bits stand in row 2 r of p and whose low ones in row 2 r + 1; rows counts these. The values `ahead` bytes on are asked for. */
INLINE void value_tile(const int rows, const int cols, const Words4 range[2], size_t page, size_t ahead, long width, size_t at,
                       float *out, long column) {
    I sum[VALUE_ROWS][VALUE_COLS] = {{{0}}};
    const size_t word = up(width, 16) * 4;
    for (int part = 0; part < 2; part++) {
        const Words4 *x = range + part;
        for (long t = x->from; t < x->to; t++) {
            const char *v = x->pages + t / 4 * page + at + t % 4 * word;
            U y[VALUE_COLS];
            UNROLL for (int c = 0; c < cols; c++) y[c] = *(const Um *)(v + c * 4 * W);
            UNROLL for (int c = 0; c < cols; c += NL) __builtin_prefetch(v + ahead + c * 4 * W, 0, 2);
            UNROLL for (int r = 0; r < rows; r++) {
                const U p = four_bytes((const int8_t *)x->p + r * x->ldp + 4 * t);
                UNROLL for (int c = 0; c < cols; c++) sum[r][c] = dot_few(sum[r][c], p, y[c]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r += 2) UNROLL for (int c = 0; c < cols; c++) {
        const V above = __builtin_convertvector(sum[r][c], V), below = __builtin_convertvector(sum[r + 1][c], V); /* exact: below 2^24 */
        const V y = fused(above, splat(128.0f), below);
        char *to = (char *)(out + r / 2 * width + column + c * W);
        if (column + c * W < width) store_left(F32, to, y, width - column - c * W);
    }
}

#define VALUE_CASE(n)                                                                                            \
    case n:                                                                                                      \
        if (n <= VALUE_ROWS) {                                                                                   \
            const int one = n <= VALUE_ROWS ? n : 1;                                                             \
            long column = 0;                                                                                     \
            for (; column + VALUE_COLS * W <= up(width, 16); column += VALUE_COLS * W)                           \
                value_tile(one, VALUE_COLS, range, page, ahead, width, values + column * 4, out, column);        \
            for (; column < width; column += W)                                                                   \
                value_tile(one, 1, range, page, ahead, width, values + column * 4, out, column);                  \
        }                                                                                                        \
        break;
static __attribute__((noinline)) void value_rows(int type, int rows, const Words4 range[2], size_t ahead, long width, float *out) {
    const size_t page = page_bytes(type, width), values = values_at(type, width);
    switch (rows) {
        VALUE_CASE(2) VALUE_CASE(4) VALUE_CASE(6)
    }
}
#undef VALUE_CASE

/* ---- one chunk: as chunk_of, from w->q to w->max, sum, acc -------------------------------------------- */

static void chunk8_of(const Attend *a, long c, long head, long first, long count, const Scratch *w) {
    const long group = a->heads / a->kv_heads, queries = count * group, width = a->width, start = c * CHUNK;
    const size_t page = page_bytes(a->type, width), query = key_words(a->type, width) * 4;
    const char *pages = a->k + head * (a->capacity / PAGE) * page, *here = pages + start / PAGE * page;
    Score *const score = a->type == I16 ? score_pages16 : score_pages8;
    Spans x;
    spans_of(a, start, first, count, &x);
    for (long r = 0; r < queries; r++) w->max[r] = -INFINITY, w->sum[r] = 0;
    if (!x.seen) return;

    const float cap = a->cap * 1.44269504f; /* scores are to base 2 */
    const long from = x.least / PAGE;
    const size_t next = CHUNK_PAGES * page; /* asked for with the first tile */
    for (long r = 0; r < queries; r += SCORE_ROWS) {
        const long rows = queries - r < SCORE_ROWS ? queries - r : SCORE_ROWS, to = up(x.high[(r + rows - 1) / group], PAGE) / PAGE;
        if (to > from)
            score((int)rows, to - from, w->q + r * query, w->scale + r, w->shift + r, here + from * page, r ? 0 : next, width, cap,
                        w->s + r * CHUNK + from * PAGE, CHUNK);
    }
    const int paths = a->parents && x.longest > x.shared;
    const long near = a->before / PAGE * PAGE, nodes = first + count, slots = node_slots(a); /* where the page of the first node begins */
    if (paths) /* all nodes' keys; each row picks those of its path */
        for (long r = 0; r < queries; r += SCORE_ROWS)
            score(queries - r < SCORE_ROWS ? (int)(queries - r) : SCORE_ROWS, up(a->before + nodes - near, PAGE) / PAGE,
                  w->q + r * query, w->scale + r, w->shift + r, pages + near / PAGE * page, 0, width, cap, w->node + r * slots, slots);

    float inverse[CHUNK], row_inverse[CHUNK];
    for (long j = from * PAGE; j < up(x.most, PAGE); j += PAGE) memcpy(inverse + j, here + j / PAGE * page + 2 * LEVELS, PAGE * 4);
    for (long r = 0; r < queries; r++) {
        const long i = r / group, low = x.low[i], high = x.high[i], end = x.end[i];
        float *s = w->s + r * CHUNK;
        uint8_t *p = w->p + 2 * r * CHUNK, *q = w->node_p + 2 * r * slots;
        const int masked = low % 16 || end % 16 || paths;
        if (masked) {
            memcpy(row_inverse + from * PAGE, inverse + from * PAGE, (CHUNK - from * PAGE) * 4);
            for (long j = low / 16 * 16; j < low; j++) s[j] = -INFINITY, row_inverse[j] = 0;
            for (long j = high; j < up(end, 16); j++) s[j] = -INFINITY, row_inverse[j] = 0;
        }
        if (paths) {
            memset(q, 0, 2 * slots);
            for (long node = first + i; node >= 0; node = a->parents[node]) {
                const long j = a->before + a->depth[node] - start, slot = a->before + node;
                if (j < low) break;
                if (j >= CHUNK) continue;
                s[j] = w->node[r * slots + slot - near];
                memcpy(row_inverse + j, pages + slot / PAGE * page + 2 * LEVELS + slot % PAGE * 4, 4);
            }
        }
        soften8(s, masked ? row_inverse : inverse, low, end, p, p + CHUNK, w->max + r, w->sum + r);
        memset(p + up(end, 16), 0, CHUNK - up(end, 16));
        memset(p + CHUNK + up(end, 16), 0, CHUNK - up(end, 16));
        if (paths) {
            for (long node = first + i; node >= 0; node = a->parents[node]) {
                const long j = a->before + a->depth[node] - start;
                if (j < low) break;
                if (j >= CHUNK) continue;
                q[a->before + node - near] = p[j];
                q[slots + a->before + node - near] = p[CHUNK + j];
            }
            if (high < CHUNK) {
                memset(p + high, 0, CHUNK - high);
                memset(p + CHUNK + high, 0, CHUNK - high);
            }
        }
    }
    for (long r = 0; r < queries; r += VALUE_ROWS / 2) {
        const long rows = queries - r < VALUE_ROWS / 2 ? queries - r : VALUE_ROWS / 2;
        const Words4 range[2] = {
            {w->p + 2 * r * CHUNK, CHUNK, x.least / 4, up(x.high[(r + rows - 1) / group], 4) / 4, here},
            {w->node_p + 2 * r * slots, slots, 0, paths ? up(a->before + nodes - near, 4) / 4 : 0, pages + near / PAGE * page}};
        value_rows(a->type, 2 * (int)rows, range, r ? 0 : next, width, w->acc + r * width);
    }
}
