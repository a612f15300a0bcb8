/* What attention's chunks come to: shared out to threads, merged in their order. See cpu.c. */
#pragma once
#include "cpu_int_attention.h"

/* ---- the chunks of a row, merged in their order ------------------------------------------------------ */

/* total: weighted values, max, sum of all chunks so far (max -inf: none). The one place where it is done. */
static __attribute__((noinline)) void merge(float *total, const float *acc, float max, float sum, long width) {
    float *top = total + width, *total_sum = total + width + 1;
    if (max == -INFINITY) return;
    if (*top == -INFINITY) {
        memcpy(total, acc, width * 4);
        *top = max;
        *total_sum = sum;
        return;
    }
    const float best = max > *top ? max : *top;
    V factors = {0};
    factors[0] = *top - best, factors[1] = max - best;
    factors = vexp(factors);
    const float old = factors[0], new = factors[1];
    for (long c = 0; c < width; c += W) {
        V x = load_left(F32, (char *)(total + c), width - c), y = load_left(F32, (char *)(acc + c), width - c);
        store_left(F32, (char *)(total + c), fused(y, splat(new), x * old), width - c);
    }
    *top = best;
    *total_sum = fused(splat(sum), splat(new), splat(*total_sum * old))[0];
}

/* A head's sink comes last, as a chunk of one key whose value is 0. */
static void add_sink(const Attend *a, float *total, long head) {
    float none[a->sinks ? a->width : 1];
    if (!a->sinks) return;
    memset(none, 0, a->width * 4);
    merge(total, none, a->sinks[head], keeps_whole(a->type) ? WEIGHT_LEVELS : 1.0f, a->width);
}

static void finish(const Attend *a, float *total, long row, long head) {
    const long width = a->width;
    const int type = a->active;
    char *to = a->out + (row * a->heads + head) * width * bytes_of(type);
    add_sink(a, total, head);
    for (long c = 0; c < width; c += W)
        store_left(type, to + c * bytes_of(type), load_left(F32, (char *)(total + c), width - c) / total[width + 1], width - c);
}

/* The first chunk of which a row sees a key, and the chunks from there on. */
INLINE long first_of(const Attend *a, long row) {
    const long place = a->before + (a->parents ? 0 : row) + 1 - a->window;
    return a->window && place > 0 ? place / CHUNK : 0;
}
INLINE long chunks_of(const Attend *a, long depth) { return (a->before + depth) / CHUNK + 1 - first_of(a, 0); }

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
    size_t each, bytes; /* of a thread's scratch; of all work */
    long tasks, merges;
    double worth, merging;
} Sharing;

static void take_queries(const Attend *a, long head, long first, long count, const Scratch *w) {
    (keeps_whole(a->type) ? queries8_of : queries_of)(a, head, first, count, w);
}

static void take_chunk(const Attend *a, long c, long head, long first, long count, const Scratch *w) {
    (keeps_whole(a->type) ? chunk8_of : chunk_of)(a, c, head, first, count, w);
}

static void some_chunks(const Segment *s, long from, long to, char *scratch) {
    const Attend *a = &s->a;
    const long width = a->width, cell = width + 2, queries = a->n * (a->heads / a->kv_heads);
    const Scratch w = scratch_at(a, scratch);
    long held = -1;
    for (long task = from; task < to; task++) {
        const long head = task / s->chunks, c = task % s->chunks;
        if (held != head) take_queries(a, held = head, 0, a->n, &w);
        take_chunk(a, first_of(a, 0) + c, head, 0, a->n, &w);
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
        take_queries(a, head, first, count, &w);
        for (long r = 0; r < count * group; r++) w.total[r * cell + width] = -INFINITY, w.total[r * cell + width + 1] = 0;
        for (long c = first_of(a, first); c < first_of(a, 0) + s->chunks; c++) {
            take_chunk(a, c, head, first, count, &w);
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

/* How the attention of segments, whose `a` and `deepest` are there, is shared out. */
static Sharing shared_out(Segment *segments, long count, int threads) {
    Sharing all = {segments, count};
    for (Segment *s = segments; s < segments + count; s++) {
        const Attend *a = &s->a;
        const size_t mine = scratch_at(a, NULL).bytes;
        all.each = mine > all.each ? mine : all.each;
        s->step = tile_of(a);
        s->chunks = chunks_of(a, s->deepest), s->tiles = (a->n + s->step - 1) / s->step;
        s->tasks = (is_split(a) ? s->chunks : s->tiles) * a->kv_heads;
        s->merges = is_split(a) ? a->n * a->heads : 0;
        all.tasks += s->tasks, all.merges += s->merges;
        all.worth += (double)a->n * s->chunks * CHUNK * a->heads * a->width;
        all.merging += (double)s->merges * s->chunks * a->width;
        all.bytes += partial_bytes(a, s->deepest);
    }
    all.bytes += threads * all.each;
    return all;
}

static void attention(Segment *segments, long count, char *work, int threads) {
    Sharing all = shared_out(segments, count, threads);
    all.work = work;
    char *partial = work + threads * all.each;
    for (Segment *s = segments; s < segments + count; s++) {
        s->partial = (float *)partial;
        partial += partial_bytes(&s->a, s->deepest);
    }
    run(threads, all.tasks, all.worth, some_tasks, &all);
    run(threads, all.merges, all.merging, some_merges, &all);
}
