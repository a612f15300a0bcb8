/* Attention of a pass over cached keys, by the specification in docs/exactness.md. See cpu.c. */
#pragma once
#include "cpu_team.h"
#include "cpu_tile.h"

/* Keys stand in the cache at their positions; the pass's own n stand behind the `before` committed ones. A
 * row sees the committed keys and its own path: in a chain (parents NULL) the rows before it, in a tree its
 * ancestors. A row at depth e has position before + e, and the keys of its path are taken in the order of
 * their positions, as if they stood in the cache already. */
typedef struct {
    long n, before, capacity;
    const int32_t *parents, *depth; /* (n) each, or NULL for a chain */
    long heads, kv_heads, width, window; /* window: newest keys that a row sees; 0 is all */
    int type, active;  /* of keys and values, and of what comes out */
    float scale;
    const char *q;     /* (heads, n, width), bfloat16 for bfloat16 keys, else float32 */
    const char *k, *v; /* (kv_heads, capacity, width) */
    char *out;         /* (n, heads, width) */
} Attend;

typedef struct { /* of one thread */
    char *q, *panel;
    float *s, *node, *acc, *max, *sum, *total;
} Scratch;

INLINE long clampl(long x, long low, long high) { return x < low ? low : x > high ? high : x; }
INLINE long up(long x, long to) { return (x + to - 1) / to * to; }

/* rows of a tile of rows for one KV head: about 96 queries */
INLINE long tile_of(const Attend *a) {
    const long group = a->heads / a->kv_heads, some = 96 / group > 1 ? 96 / group : 1;
    return a->n <= FEW ? FEW : a->n <= 64 && some > 8 ? 8 : some;
}

static size_t scratch_bytes(const Attend *a) {
    const long rows = tile_of(a) * (a->heads / a->kv_heads), width = a->width;
    const long node = a->parents ? up(a->n, NR) : 0;
    return (size_t)up((rows * (width + CHUNK + node + 2 * width + 4) + NR * width) * 4 + 8 * 64, 64);
}

static Scratch scratch_at(const Attend *a, char *at) {
    const long rows = tile_of(a) * (a->heads / a->kv_heads), width = a->width;
    Scratch w;
#define TAKE(field, count) w.field = (void *)at, at += up((count) * 4, 64)
    TAKE(q, rows * width);
    TAKE(panel, NR * width);
    TAKE(s, rows * CHUNK);
    TAKE(node, a->parents ? rows * up(a->n, NR) : 0);
    TAKE(acc, rows * width);
    TAKE(max, rows);
    TAKE(sum, rows);
    TAKE(total, rows * (width + 2));
#undef TAKE
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

/* count <= NR keys (rows of width numbers) → a panel: float32 (width, NR), bfloat16 (width / 2, NR, 2). What
 * stands in the columns behind them does not matter. */
static void panel_of(int type, const char *k, long width, int count, char *panel) {
    const long words = type == BF16 ? width / 2 : width;
    const size_t row = width * bytes_of(type);
    if (words % W) {
        for (long word = 0; word < words; word++)
            for (int key = 0; key < NR; key++) {
                char *to = panel + (word * NR + key) * 4;
                float x = 0;
                if (key < count && type == F16) x = half_float(((const uint16_t *)(k + key * row))[word]);
                else if (key < count) memcpy(&x, k + key * row + word * 4, 4);
                memcpy(to, &x, 4);
            }
        return;
    }
    for (int key = 0; key < count; key += W)
        for (long word = 0; word < words; word += W) {
            const char *from = k + key * row + word * (type == F16 ? 2 : 4);
            const int last = count - key - 1; /* beyond it the last key is repeated: nobody looks there */
            V x[W];
            if (type == F16) {
                UNROLL for (int i = 0; i < W; i++)
                    x[i] = from_f16((const uint16_t *)(from + (i < last ? i : last) * row));
            } else if (last < W - 1) {
                UNROLL for (int i = 0; i < W; i++) x[i] = *(const Vm *)(from + (i < last ? i : last) * row);
            } else {
                UNROLL for (int i = 0; i < W; i++) x[i] = *(const Vm *)(from + i * row);
            }
            transpose(x);
            UNROLL for (int i = 0; i < W; i++) *(Vm *)(panel + ((word + i) * NR + key) * 4) = x[i];
        }
}

/* Ask for NR rows, in the order of their addresses, which is what a processor's own prefetching follows; into the
 * second cache, as the first has no room for the values of a whole chunk. */
INLINE void soon(const char *rows, size_t row) {
    for (size_t at = 0; at < NR * row; at += 64) __builtin_prefetch(rows + at, 0, 2);
}

/* ---- one chunk ------------------------------------------------------------------------------------- */

/* acc[from:width] += e[j] * v[slot of j], j = 0 … count - 1 in this order; slots: NULL for 0, 1, 2, … */
static void along(int type, float *acc, const float *e, const char *v, const int32_t *slots, long count, long from,
                  long width) {
    for (long c = from; c < width; c += W) {
        const int part = width - c < W ? (int)(width - c) : 0;
        V x = part ? load_part(F32, (char *)(acc + c), part) : load(F32, (char *)(acc + c));
        for (long j = 0; j < count; j++) {
            const char *row = v + ((slots ? slots[j] : j) * width + c) * bytes_of(type);
            x = fused(splat(e[j]), part ? load_part(type, row, part) : load(type, row), x);
        }
        if (part) store_part(F32, (char *)(acc + c), x, part);
        else *(Vm *)(acc + c) = x;
    }
}

/* scale, max, exponentials (in place) and sum of a row's scores */
INLINE void soften(float *s, long used, float scale, float *max, float *sum) {
    V top = splat(-INFINITY), total = {0};
    float lane[W], best = -INFINITY;
    for (long j = 0; j < used; j += W) {
        V x = load(F32, (char *)(s + j));
        top = pick(x > top, x, top);
    }
    memcpy(lane, &top, sizeof top);
    for (int i = 0; i < W; i++) best = lane[i] > best ? lane[i] : best;
    best *= scale;
    *max = best;
    *sum = 0;
    if (best == -INFINITY) return;
    for (long j = 0; j < used; j += W) {
        V e = vexp(fused(load(F32, (char *)(s + j)), splat(scale), splat(-best)));
        *(Vm *)(s + j) = e;
        total += e;
    }
    *sum = sum_lanes(total);
}

/* w->max, sum, acc of the queries of rows first … first + count - 1 of a KV head over chunk c.
 * Query r of the head is row first + r / group, and w->q holds them in this order. */
static void chunk_of(const Attend *a, long c, long head, long first, long count, const Scratch *w) {
    const long group = a->heads / a->kv_heads, queries = count * group, width = a->width, start = c * CHUNK;
    const long limit = a->parents ? a->before : a->before + a->n, shared = clampl(limit - start, 0, CHUNK);
    const size_t item = bytes_of(a->type), qrow = width * (a->type == BF16 ? 2 : 4);
    const char *k = a->k + head * a->capacity * width * item, *v = a->v + head * a->capacity * width * item;
    const int how = a->type == BF16 ? PAIRS : ROWS_F32;
    const int values = a->type == BF16 ? ROWS_BF16 : a->type == F16 ? ROWS_F16 : ROWS_F32;
    long low[96], high[96], end[96], longest = 0, least = CHUNK, most = 0, seen = 0;
    for (long i = 0; i < count; i++) { /* of this chunk's keys, a row sees low … end; to high they are shared */
        const long place = a->before + (a->parents ? a->depth[first + i] : first + i) + 1 - start;
        end[i] = clampl(place, 0, CHUNK);
        high[i] = a->parents ? shared : end[i];
        low[i] = a->window ? clampl(place - a->window, 0, CHUNK) : 0;
        longest = end[i] > longest ? end[i] : longest;
        least = low[i] < least ? low[i] : least;
        most = high[i] > most ? high[i] : most;
        seen |= low[i] < end[i];
    }
    for (long r = 0; r < queries; r++) w->max[r] = -INFINITY, w->sum[r] = 0;
    if (!seen) return;

    for (long key = least / NR * NR; key < most; key += NR) {
        soon(k + (start + key + NR) * width * item, width * item);
        soon(v + (start + key) * width * item, width * item);
        panel_of(a->type, k + (start + key) * width * item, width,
                 shared - key < NR ? (int)(shared - key) : NR, w->panel);
        for (long r = 0; r < queries; r += MR) {
            const long rows = queries - r < MR ? queries - r : MR;
            if (high[(r + rows - 1) / group] <= key) continue;
            any_tile(how, (int)rows, w->q + r * qrow, qrow, w->panel, NR * 4, w->panel, width, w->s + r * CHUNK + key, CHUNK, 0);
        }
    }
    const long nodes = first + count, stride = up(a->n, NR);
    const int paths = a->parents && longest > shared;
    if (paths) /* all nodes' keys; each row picks those of its path */
        for (long node = 0; node < nodes; node += NR) {
            panel_of(a->type, k + (a->before + node) * width * item, width,
                     nodes - node < NR ? (int)(nodes - node) : NR, w->panel);
            for (long r = 0; r < queries; r += MR) {
                any_tile(how, queries - r < MR ? (int)(queries - r) : MR, w->q + r * qrow, qrow, w->panel,
                         NR * 4, w->panel, width, w->node + r * stride + node, (size_t)stride, 0);
            }
        }
    for (long r = 0; r < queries; r++) {
        const long i = r / group, used = up(end[i], W);
        float *s = w->s + r * CHUNK;
        for (long j = 0; j < low[i]; j++) s[j] = -INFINITY;
        for (long j = high[i]; j < used; j++) s[j] = -INFINITY;
        if (paths)
            for (long node = first + i; node >= 0; node = a->parents[node]) {
                const long j = a->before + a->depth[node] - start;
                if (j < low[i]) break;
                if (j < CHUNK) s[j] = w->node[r * stride + node];
            }
        soften(s, used, a->scale, w->max + r, w->sum + r);
    }
    for (long r = 0; r < queries; r += MR) {
        const long rows = queries - r < MR ? queries - r : MR, i0 = r / group, i1 = (r + rows - 1) / group;
        long from = CHUNK, to = CHUNK, column = 0; /* keys that all rows of the tile have in common */
        for (long i = i0; i <= i1; i++) {
            from = low[i] < from ? low[i] : from;
            to = high[i] < to ? high[i] : to;
        }
        from = from < to ? from : to;
        for (; column + NR <= width; column += NR) {
            any_tile(values, (int)rows, (char *)(w->s + r * CHUNK + from), CHUNK * 4,
                     v + ((start + from) * width + column) * item, width * item,
                     k + ((start + CHUNK + from) * width + column) * item, to - from,
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
            along(a->type, acc, e + to, v + (start + to) * width * item, 0, high[i] - to, 0, width);
            if (paths) {
                int32_t slots[CHUNK];
                const long begin = clampl(a->before - start, low[i], CHUNK);
                for (long node = first + i; node >= 0; node = a->parents[node]) {
                    const long j = a->before + a->depth[node] - start;
                    if (j < begin) break;
                    if (j < CHUNK) slots[j - begin] = (int32_t)(a->before + node);
                }
                along(a->type, acc, e + begin, v, slots, end[i] - begin, 0, width);
            }
        }
    }
}

/* ---- the chunks of a row, merged in their order ------------------------------------------------------ */

/* total: weighted values, max, sum of all chunks so far (max -inf: none). The one place where it is done. */
static __attribute__((noinline)) void merge(float *total, const float *acc, float max, float sum, long width) {
    float *top = total + width, *whole = total + width + 1;
    if (max == -INFINITY) return;
    if (*top == -INFINITY) {
        memcpy(total, acc, width * 4);
        *top = max;
        *whole = sum;
        return;
    }
    const float best = max > *top ? max : *top;
    V factors = {0};
    factors[0] = *top - best, factors[1] = max - best;
    factors = vexp(factors);
    const float old = factors[0], new = factors[1];
    for (long c = 0; c < width; c += W) {
        const int part = width - c < W ? (int)(width - c) : 0;
        char *to = (char *)(total + c), *from = (char *)(acc + c);
        V x = part ? load_part(F32, to, part) : load(F32, to), y = part ? load_part(F32, from, part) : load(F32, from);
        x = fused(y, splat(new), x * old);
        if (part) store_part(F32, to, x, part);
        else store(F32, to, x);
    }
    *top = best;
    *whole = fused(splat(sum), splat(new), splat(*whole * old))[0];
}

static void finish(const Attend *a, const float *total, long row, long head) {
    const long width = a->width;
    const int type = a->active;
    char *to = a->out + (row * a->heads + head) * width * bytes_of(type);
    for (long c = 0; c < width; c += W) {
        const int part = width - c < W ? (int)(width - c) : 0;
        V x = part ? load_part(F32, (char *)(total + c), part) : load(F32, (char *)(total + c));
        x /= total[width + 1];
        if (part) store_part(type, to + c * bytes_of(type), x, part);
        else store(type, to + c * bytes_of(type), x);
    }
}

static void queries_of(const Attend *a, long head, long first, long count, char *to) {
    const long group = a->heads / a->kv_heads;
    const size_t row = a->width * (a->type == BF16 ? 2 : 4);
    for (long r = 0; r < count * group; r++, to += row)
        memcpy(to, a->q + ((head * group + r % group) * a->n + first + r / group) * row, row);
}

INLINE long chunks_of(const Attend *a, long depth) { return (a->before + depth) / CHUNK + 1; }

/* Whether the chunks of a row are tasks of their own, merged by a second stage. */
INLINE int is_split(const Attend *a) { return a->n <= FEW; }

static size_t partial_bytes(const Attend *a, long deepest) {
    return is_split(a) ? up(chunks_of(a, deepest) * a->heads * a->n * (a->width + 2) * 4, 64) : 0;
}

typedef struct { /* the attention of one segment: rows of one text over its own cache */
    Attend a;
    long deepest;   /* depth of its deepest row */
    float *partial; /* (heads, n, chunks, width + 2), by KV head; if split */
    long chunks, tiles, step, tasks, merges;
} Segment;

typedef struct { /* what the stages of an attention share */
    const Segment *segments;
    long count;
    char *work;
    size_t each; /* bytes of a thread's scratch */
} Sharing;

static void some_chunks(const Segment *s, long from, long to, char *scratch) {
    const Attend *a = &s->a;
    const long width = a->width, cell = width + 2, queries = a->n * (a->heads / a->kv_heads);
    const Scratch w = scratch_at(a, scratch);
    long held = -1;
    for (long task = from; task < to; task++) {
        const long head = task / s->chunks, c = task % s->chunks;
        if (held != head) queries_of(a, held = head, 0, a->n, w.q);
        chunk_of(a, c, head, 0, a->n, &w);
        for (long r = 0; r < queries; r++) {
            float *at = s->partial + ((head * queries + r) * s->chunks + c) * cell;
            memcpy(at, w.acc + r * width, width * 4);
            at[width] = w.max[r], at[width + 1] = w.sum[r];
        }
    }
}

static void some_rows(const Segment *s, long from, long to, char *scratch) {
    const Attend *a = &s->a;
    const long width = a->width, cell = width + 2, group = a->heads / a->kv_heads;
    const Scratch w = scratch_at(a, scratch);
    for (long task = from; task < to; task++) {
        const long head = task % a->kv_heads, first = (s->tiles - 1 - task / a->kv_heads) * s->step;
        const long count = a->n - first < s->step ? a->n - first : s->step;
        queries_of(a, head, first, count, w.q);
        for (long r = 0; r < count * group; r++) w.total[r * cell + width] = -INFINITY, w.total[r * cell + width + 1] = 0;
        for (long c = 0; c < s->chunks; c++) {
            chunk_of(a, c, head, first, count, &w);
            for (long r = 0; r < count * group; r++)
                merge(w.total + r * cell, w.acc + r * width, w.max[r], w.sum[r], width);
        }
        for (long r = 0; r < count * group; r++)
            finish(a, w.total + r * cell, first + r / group, head * group + r % group);
    }
}

/* Tasks from … to - 1 of all segments, which stand one after the other. */
static void some_tasks(void *context, long from, long to, int thread) {
    const Sharing *all = context;
    char *scratch = all->work + thread * all->each;
    for (const Segment *s = all->segments; from < to; from = from > s->tasks ? from - s->tasks : 0, to -= s->tasks, s++)
        if (from < s->tasks) (is_split(&s->a) ? some_chunks : some_rows)(s, from, to < s->tasks ? to : s->tasks, scratch);
}

static void some_merges(void *context, long from, long to, int thread) {
    const Sharing *all = context;
    (void)thread;
    for (const Segment *s = all->segments; from < to; from = from > s->merges ? from - s->merges : 0, to -= s->merges, s++) {
        const Attend *a = &s->a;
        const long width = a->width, cell = width + 2, group = a->heads / a->kv_heads, queries = a->n * group;
        for (long r = from; r < to && r < s->merges; r++) {
            float *total = s->partial + r * s->chunks * cell;
            for (long c = 1; c < s->chunks; c++) {
                const float *next = total + c * cell;
                merge(total, next, next[width], next[width + 1], width);
            }
            finish(a, total, r % queries / group, r / queries * group + r % group);
        }
    }
}

/* Bytes of work for segments whose `a` and `deepest` are there. */
static size_t attention_bytes(const Segment *segments, long count, int threads) {
    size_t each = 0, partial = 0;
    for (const Segment *s = segments; s < segments + count; s++) {
        const size_t mine = scratch_bytes(&s->a);
        each = mine > each ? mine : each;
        partial += partial_bytes(&s->a, s->deepest);
    }
    return threads * each + partial;
}

/* Attention of all segments, whose `a` and `deepest` are there. Returns as run does. */
static int64_t attention(Segment *segments, long count, char *work, int threads) {
    Sharing all = {segments, count, work, 0};
    double worth = 0, merging = 0;
    long tasks = 0, merges = 0;
    for (Segment *s = segments; s < segments + count; s++) {
        const Attend *a = &s->a;
        const size_t mine = scratch_bytes(a);
        all.each = mine > all.each ? mine : all.each;
        s->step = tile_of(a);
        s->chunks = chunks_of(a, s->deepest), s->tiles = (a->n + s->step - 1) / s->step;
        s->tasks = (is_split(a) ? s->chunks : s->tiles) * a->kv_heads;
        s->merges = is_split(a) ? a->n * a->heads : 0;
        tasks += s->tasks, merges += s->merges;
        worth += (double)a->n * (a->before + a->n) * a->heads * a->width;
        merging += (double)s->merges * s->chunks * a->width;
    }
    char *partial = work + threads * all.each;
    for (Segment *s = segments; s < segments + count; s++) {
        s->partial = (float *)partial;
        partial += partial_bytes(&s->a, s->deepest);
    }
    const int64_t waited = run(threads, tasks, worth, some_tasks, &all);
    return waited + run(threads, merges, merging, some_merges, &all);
}
