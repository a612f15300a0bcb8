/* Attention of a pass over cached keys, by the specification in docs/exactness.md. See cpu.c. */
#pragma once
#include "cpu_team.h"
#include "cpu_tile.h"

#define PAGE 16 /* tokens that stand together, of keys and values in int8 */

/* Keys stand in the cache at their positions; the pass's own n stand behind the `before` committed ones. A
 * row sees the committed keys and its own path: in a chain (parents NULL) the rows before it, in a tree its
 * ancestors. A row at depth e has position before + e, and the keys of its path are taken in the order of
 * their positions, as if they stood in the cache already. */
typedef struct {
    long n, before, capacity;
    const int32_t *parents, *depth; /* (n) each, or NULL for a chain */
    long heads, kv_heads, width, window; /* window: newest keys that a row sees; 0 is all */
    int type, active;  /* of keys and values, and of what comes out */
    float scale, cap;  /* of scores; cap 0: none */
    const char *q;     /* (heads, n, width), bfloat16 for bfloat16 keys, else float32 */
    const char *k, *v; /* (kv_heads, capacity, width) */
    char *out;         /* (n, heads, width) */
    const float *sinks; /* (heads) scores of what takes part in the sum and has no value, or NULL */
} Attend;

typedef struct { /* of one thread; p, node_p, shift and scale: of keys in int8, whose queries are integers, too */
    char *q, *panel;
    uint8_t *p, *node_p;
    int32_t *shift;
    float *scale, *s, *node, *acc, *max, *sum, *total;
    size_t bytes;
} Scratch;

/* Whether keys and values are whole numbers, in pages. */
INLINE int keeps_whole(int type) { return type >= I8; }

INLINE long clampl(long x, long low, long high) { return x < low ? low : x > high ? high : x; }
INLINE long up(long x, long to) { return (x + to - 1) / to * to; }

/* rows of a tile of rows for one KV head: about 96 queries */
INLINE long tile_of(const Attend *a) {
    const long group = a->heads / a->kv_heads, some = 96 / group > 1 ? 96 / group : 1;
    return a->n <= FEW ? FEW : a->n <= 64 && some > 8 ? 8 : some;
}

/* room for the scores of a row with all nodes of the pass, from the page of the first on */
INLINE long node_slots(const Attend *a) { return a->parents ? up(a->n, NR) + PAGE : 0; }

static Scratch scratch_at(const Attend *a, char *at) {
    const long rows = tile_of(a) * (a->heads / a->kv_heads), width = a->width, in_pages = keeps_whole(a->type);
    const char *begin = at;
    Scratch w;
#define TAKE(field, count) w.field = (void *)at, at += up(count, 64)
    TAKE(q, rows * width * 4);
    TAKE(panel, NR * up(width, W) * 4);
    TAKE(p, in_pages * rows * 2 * CHUNK);
    TAKE(node_p, in_pages * rows * 2 * node_slots(a));
    TAKE(shift, rows * 4);
    TAKE(scale, rows * 4);
    TAKE(s, rows * CHUNK * 4);
    TAKE(node, rows * node_slots(a) * 4);
    TAKE(acc, rows * width * 4);
    TAKE(max, rows * 4);
    TAKE(sum, rows * 4);
    TAKE(total, rows * (width + 2) * 4);
#undef TAKE
    w.bytes = at - begin;
    return w;
}

/* ---- a panel of keys: their transpose, as a tile reads its right side ------------------------------- */

#if W == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif W == 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define INTERLEAVED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define INTERLEAVED(a, b, ...) __builtin_shuffle(a, b, (I){__VA_ARGS__})
#endif

INLINE void transpose(V x[W]) { /* interleave halves log2(W) times */
    V y[W];
    UNROLL for (int step = 1; step < W; step *= 2) {
        UNROLL for (int i = 0; i < W / 2; i++) {
            y[2 * i] = INTERLEAVED(x[i], x[i + W / 2], LOW);
            y[2 * i + 1] = INTERLEAVED(x[i], x[i + W / 2], HIGH);
        }
        UNROLL for (int i = 0; i < W; i++) x[i] = y[i];
    }
}

/* count <= NR keys (rows of width numbers) → a panel: float32 (width, NR), bfloat16 (width / 2, NR, 2), filled up to
 * whole vectors. What stands in the columns behind them does not matter: the last key is repeated. */
static void panel_of(int type, const char *k, long width, int count, char *panel) {
    const long words = type == BF16 ? width / 2 : width;
    const size_t row = width * bytes_of(type);
    for (int key = 0; key < count; key += W)
        for (long word = 0; word < words; word += W) {
            const char *from = k + key * row + word * (type == F16 ? 2 : 4);
            const int last = count - key - 1;
            V x[W];
            UNROLL for (int i = 0; i < W; i++)
                x[i] = load_left(type == F16 ? F16 : F32, from + (i < last ? i : last) * row, words - word);
            transpose(x);
            UNROLL for (int i = 0; i < W; i++) *(Vm *)(panel + ((word + i) * NR + key) * 4) = x[i];
        }
}

/* ---- one chunk ------------------------------------------------------------------------------------- */

/* acc[from:width] += e[j] * v[slot of j], j = 0 … count - 1 in this order; slots: NULL for 0, 1, 2, … */
static void along(int type, float *acc, const float *e, const char *v, const int32_t *slots, long count, long from,
                  long width) {
    for (long c = from; c < width; c += W) {
        V x = load_left(F32, (char *)(acc + c), width - c);
        for (long j = 0; j < count; j++) {
            const char *row = v + ((slots ? slots[j] : j) * width + c) * bytes_of(type);
            x = fused(splat(e[j]), load_left(type, row, width - c), x);
        }
        store_left(F32, (char *)(acc + c), x, width - c);
    }
}

/* cap * tanh(x / cap); an infinite x is masked and stays so */
static __attribute__((noinline)) V capped(V x, float cap) {
    const V y = splat(cap) - splat(2 * cap) / (vexp(x * (2 / cap)) + 1.0f);
    return pick(x == -INFINITY, x, y);
}

/* scale, cap, max, exponentials (in place) and sum of a row's scores */
INLINE void soften(float *s, long used, float scale, float cap, float *max, float *sum) {
    V top[NL], total[NL] = {{0}};
    if (cap) {
        for (long j = 0; j < used; j += W) *(Vm *)(s + j) = capped(load(F32, (char *)(s + j)) * scale, cap);
        scale = 1;
    }
    UNROLL for (int h = 0; h < NL; h++) top[h] = splat(-INFINITY);
    for (long j = 0; j < used; j += W) top[j / W % NL] = higher(load(F32, (char *)(s + j)), top[j / W % NL]);
    const float best = highest_lane(top) * scale;
    *max = best;
    *sum = 0;
    if (best == -INFINITY) return;
    for (long j = 0; j < used; j += W) {
        V e = vexp(fused(load(F32, (char *)(s + j)), splat(scale), splat(-best)));
        *(Vm *)(s + j) = e;
        total[j / W % NL] += e;
    }
    *sum = sum_lanes(total);
}

typedef struct { /* of a chunk's keys, row i sees low … end; to high they are shared */
    long low[96], high[96], end[96], shared, longest, least, most, seen;
} Spans;

static void spans_of(const Attend *a, long start, long first, long count, Spans *x) {
    const long limit = a->parents ? a->before : a->before + a->n;
    x->shared = clampl(limit - start, 0, CHUNK);
    x->longest = x->most = x->seen = 0, x->least = CHUNK;
    for (long i = 0; i < count; i++) {
        const long place = a->before + (a->parents ? a->depth[first + i] : first + i) + 1 - start;
        x->end[i] = clampl(place, 0, CHUNK);
        x->high[i] = a->parents ? x->shared : x->end[i];
        x->low[i] = a->window ? clampl(place - a->window, 0, CHUNK) : 0;
        x->longest = x->end[i] > x->longest ? x->end[i] : x->longest;
        x->least = x->low[i] < x->least ? x->low[i] : x->least;
        x->most = x->high[i] > x->most ? x->high[i] : x->most;
        x->seen |= x->low[i] < x->end[i];
    }
}

/* w->max, sum, acc of the queries of rows first … first + count - 1 of a KV head over chunk c.
 * Query r of the head is row first + r / group, and w->q holds them in this order. */
static void chunk_of(const Attend *a, long c, long head, long first, long count, const Scratch *w) {
    const long group = a->heads / a->kv_heads, queries = count * group, width = a->width, start = c * CHUNK;
    const size_t item = bytes_of(a->type), qrow = width * (a->type == BF16 ? 2 : 4);
    const char *k = a->k + head * a->capacity * width * item, *v = a->v + head * a->capacity * width * item;
    const int how = a->type == BF16 ? PAIRS : ROWS_F32;
    const long tiles = (queries + MR - 1) / MR, steps = a->type == BF16 ? width / 2 : width;
    const size_t share = NR * width * item / tiles; /* what a tile of scores prefetches of the values */
    const int values = a->type == BF16 ? ROWS_BF16 : a->type == F16 ? ROWS_F16 : ROWS_F32;
    Spans x;
    spans_of(a, start, first, count, &x);
    for (long r = 0; r < queries; r++) w->max[r] = -INFINITY, w->sum[r] = 0;
    if (!x.seen) return;

    for (long key = x.least / NR * NR; key < x.most; key += NR) {
        panel_of(a->type, k + (start + key) * width * item, width,
                 x.shared - key < NR ? (int)(x.shared - key) : NR, w->panel);
        for (long r = 0; r < queries; r += MR) {
            const long rows = queries - r < MR ? queries - r : MR;
            if (x.high[(r + rows - 1) / group] <= key) continue;
            const char *soon = v + (start + key) * width * item + r / MR * share; /* values of the same keys */
            any_tile(how, (int)rows, w->q + r * qrow, qrow, w->panel, NR * 4, soon, share / steps, width,
                     w->s + r * CHUNK + key, CHUNK, 0);
        }
    }
    const long nodes = first + count, stride = node_slots(a);
    const int paths = a->parents && x.longest > x.shared;
    if (paths) /* all nodes' keys; each row picks those of its path */
        for (long node = 0; node < nodes; node += NR) {
            panel_of(a->type, k + (a->before + node) * width * item, width,
                     nodes - node < NR ? (int)(nodes - node) : NR, w->panel);
            for (long r = 0; r < queries; r += MR) {
                any_tile(how, queries - r < MR ? (int)(queries - r) : MR, w->q + r * qrow, qrow, w->panel,
                         NR * 4, w->panel, 0, width, w->node + r * stride + node, (size_t)stride, 0);
            }
        }
    for (long r = 0; r < queries; r++) {
        const long i = r / group, used = up(x.end[i], W);
        float *s = w->s + r * CHUNK;
        for (long j = 0; j < x.low[i]; j++) s[j] = -INFINITY;
        for (long j = x.high[i]; j < used; j++) s[j] = -INFINITY;
        if (paths)
            for (long node = first + i; node >= 0; node = a->parents[node]) {
                const long j = a->before + a->depth[node] - start;
                if (j < x.low[i]) break;
                if (j < CHUNK) s[j] = w->node[r * stride + node];
            }
        soften(s, used, a->scale, a->cap, w->max + r, w->sum + r);
    }
    for (long r = 0; r < queries; r += MR) {
        const long rows = queries - r < MR ? queries - r : MR, i0 = r / group, i1 = (r + rows - 1) / group;
        long from = CHUNK, to = CHUNK, column = 0; /* keys that all rows of the tile have in common */
        for (long i = i0; i <= i1; i++) {
            from = x.low[i] < from ? x.low[i] : from;
            to = x.high[i] < to ? x.high[i] : to;
        }
        from = from < to ? from : to;
        for (; column + NR <= width; column += NR) { /* the tiles share the prefetching of the next chunk's keys */
            const size_t part = NR * CHUNK * item / tiles;
            any_tile(values, (int)rows, (char *)(w->s + r * CHUNK + from), CHUNK * 4,
                     v + ((start + from) * width + column) * item, width * item,
                     k + (start + CHUNK) * width * item + (column / NR * tiles + r / MR) * part, part / CHUNK, to - from,
                     w->acc + r * width + column, width, 0);
        }
        for (long q = r; q < r + rows; q++) {
            const long i = q / group;
            const float *e = w->s + q * CHUNK;
            float *acc = w->acc + q * width;
            if (column < width) { /* columns that fill no tile */
                memset(acc + column, 0, (width - column) * 4);
                along(a->type, acc, e + from, v + (start + from) * width * item, 0, to - from, column, width);
            }
            along(a->type, acc, e + to, v + (start + to) * width * item, 0, x.high[i] - to, 0, width);
            if (paths) {
                int32_t slots[CHUNK];
                const long begin = clampl(a->before - start, x.low[i], CHUNK);
                for (long node = first + i; node >= 0; node = a->parents[node]) {
                    const long j = a->before + a->depth[node] - start;
                    if (j < begin) break;
                    if (j < CHUNK) slots[j - begin] = (int32_t)(a->before + node);
                }
                along(a->type, acc, e + begin, v, slots, x.end[i] - begin, 0, width);
            }
        }
    }
}

static void queries_of(const Attend *a, long head, long first, long count, const Scratch *w) {
    const long group = a->heads / a->kv_heads;
    const size_t row = a->width * (a->type == BF16 ? 2 : 4);
    for (long r = 0; r < count * group; r++)
        memcpy(w->q + r * row, a->q + ((head * group + r % group) * a->n + first + r / group) * row, row);
}
