/* Mixtures of experts. See cpu.c, docs/exactness.md, and kernels/mixture.py for the same in torch.
 *
 * The rows of a pass are grouped by expert, so that each expert's panels are read once for all its rows. A row's
 * outputs are added in the order of the experts' numbers. What an expert makes of a row has the bits of a product
 * over that row alone, so a row does not depend on who goes the same way.
 *
 * Rows on their way through an expert stand in slots. A long pass has more than fit the caches: experts are taken in
 * batches, in their order, of up to SLOTS rows (or those of one expert).
 */
#pragma once

#define SLOTS 512
#define SHARES 32 /* of a stage's work, a thread: few panels are left for the last to end */

typedef struct {
    long experts, used, inner, shared; /* experts, how many a row takes, their width, that of the one of all rows */
    int shared_gate, sigmoid, renormalised;
} Mixture;

typedef struct {
    Weight gate_up, down;
} Expert;

typedef struct { /* an expert's rows of a batch */
    long expert, first, rows;
    char *x, *inner; /* what enters its products */
} Portion;

typedef struct {
    const Mixture *m;
    const Expert *experts;
    const float *bias; /* of the choice, or NULL */
    long n, hidden, first, slots; /* of the batch: its first slot, and how many */
    int type;
    Activation how;
    float *normed, *logits, *weights, *gate_up, *products, *out;
    int32_t *chosen, *row_of, *slot_of, *portion_of; /* (n, used) experts; of a slot; (n, used) slots; of a batch's slot */
    long *counts;                                     /* rows of each expert, then its next slot */
    Portion *portions;
    Linear *linears;
    char *x, *inner;
} Routed;

/* The experts of a row, ascending, and their weights. Ties go to the lowest number. */
static void choose(const Routed *r, const float *logits, int32_t *chosen, float *weights) {
    const Mixture *m = r->m;
    const long count = m->experts;
    float worth[count], score[count], top = logits[0], total = 0;
    char taken[count];
    memset(taken, 0, count);
    for (long e = 0; e < count; e++) top = logits[e] > top ? logits[e] : top;
    for (long e = 0; e < count; e += W) {
        const V x = load_left(F32, (const char *)(logits + e), count - e);
        store_left(F32, (char *)(worth + e), m->sigmoid ? 1.0f / (vexp(-x) + 1.0f) : vexp(x - top), count - e);
    }
    for (long e = 0; e < count; e++) score[e] = (m->sigmoid ? worth[e] : logits[e]) + (r->bias ? r->bias[e] : 0);
    for (long i = 0; i < m->used; i++) {
        long best = -1;
        for (long e = 0; e < count; e++)
            if (!taken[e] && (best < 0 || score[e] > score[best])) best = e;
        taken[best] = 1;
    }
    for (long e = 0, i = 0; e < count; e++)
        if (taken[e]) chosen[i] = (int32_t)e, weights[i++] = worth[e];
    if (m->sigmoid && !m->renormalised) return;
    if (m->renormalised) for (long i = 0; i < m->used; i++) total += weights[i];
    else for (long e = 0; e < count; e++) total += worth[e];
    for (long i = 0; i < m->used; i++) weights[i] /= total;
}

static void some_choices(void *context, long from, long to, int thread) {
    const Routed *r = context;
    const long used = r->m->used, width = r->m->experts + r->m->shared_gate;
    (void)thread;
    for (long i = from; i < to; i++) choose(r, r->logits + i * width, r->chosen + i * used, r->weights + i * used);
}

/* Slots for all rows, expert by expert, an expert's rows in their order. */
static void give_slots(Routed *r) {
    const long experts = r->m->experts, used = r->m->used;
    memset(r->counts, 0, experts * sizeof(long));
    for (long i = 0; i < r->n * used; i++) r->counts[r->chosen[i]]++;
    for (long e = 0, slot = 0; e < experts; e++) {
        const long rows = r->counts[e];
        r->counts[e] = slot, slot += rows;
    }
    for (long i = 0; i < r->n * used; i++) {
        r->slot_of[i] = (int32_t)r->counts[r->chosen[i]]++; /* the count ends where the next expert begins */
        r->row_of[r->slot_of[i]] = (int32_t)(i / used);
    }
}

/* The next experts, from *expert on, into a batch. Returns how many have rows. */
static long next_batch(Routed *r, long *expert) {
    long count = 0;
    char *x = r->x, *inner = r->inner;
    r->first += r->slots, r->slots = 0;
    for (; *expert < r->m->experts; ++*expert) {
        const long rows = r->counts[*expert] - r->first - r->slots;
        if (!rows) continue;
        if (r->slots && r->slots + rows > SLOTS) break;
        r->portions[count] = (Portion){*expert, r->slots, rows, x, inner};
        for (long i = 0; i < rows; i++) r->portion_of[r->slots + i] = (int32_t)count;
        x += up(rows_bytes(r->type, rows, r->hidden), 64), inner += up(rows_bytes(r->type, rows, r->m->inner), 64);
        r->slots += rows, count++;
    }
    return count;
}

static void some_gathered(void *context, long from, long to, int thread) {
    const Routed *r = context;
    (void)thread;
    for (long s = from; s < to; s++) {
        const Portion *p = r->portions + r->portion_of[s];
        const float *x = r->normed + r->row_of[r->first + s] * r->hidden;
        char *to_row = row_at(p->x, r->type, p->rows, r->hidden, s - p->first);
        if (r->type == I8) quantize((Group *)to_row, block_of_rows(p->rows), x, r->hidden);
        else norm_row(to_row, r->type, x, NULL, r->hidden, -1);
    }
}

static void some_experts_gates(void *context, long from, long to, int thread) {
    const Routed *r = context;
    const long width = r->m->inner;
    (void)thread;
    for (long s = from; s < to; s++) {
        const Portion *p = r->portions + r->portion_of[s];
        char *out = row_at(p->inner, r->type, p->rows, width, s - p->first);
        gate_row(out, r->type, r->how, r->gate_up + s * 2 * width, width, block_of_rows(p->rows));
    }
}

/* Rows plus factor times x. */
INLINE void add_row(float *row, const float *x, float factor, long width) {
    for (long c = 0; c < width; c += W) {
        const V y = load_left(F32, (const char *)(x + c), width - c), old = load_left(F32, (char *)(row + c), width - c);
        store_left(F32, (char *)(row + c), fused(y, splat(factor), old), width - c);
    }
}

/* Adds a batch's outputs to the rows. */
static void some_sums(void *context, long from, long to, int thread) {
    const Routed *r = context;
    const long used = r->m->used;
    (void)thread;
    for (long i = from; i < to; i++)
        for (long k = i * used; k < (i + 1) * used; k++) {
            const long slot = r->slot_of[k] - r->first;
            if (slot < 0 || slot >= r->slots) continue;
            add_row(r->out + i * r->hidden, r->products + slot * r->hidden, r->weights[k], r->hidden);
        }
}

static void some_shared(void *context, long from, long to, int thread) {
    const Routed *r = context;
    const long width = r->m->experts + 1;
    (void)thread;
    for (long i = from; i < to; i++) {
        float factor = 1;
        if (r->m->shared_gate) {
            const V gate = 1.0f / (vexp(splat(-r->logits[i * width + r->m->experts])) + 1.0f);
            factor = gate[0];
        }
        add_row(r->out + i * r->hidden, r->products + i * r->hidden, factor, r->hidden);
    }
}

/* ---- products of several weights in one stage --------------------------------------------------------------- */

typedef struct {
    const Linear *list;
    long count, shares;
    double total;
} Several;

/* What a panel costs, about: the bytes that are read, and the multiplications. */
INLINE double panel_cost(const Linear *l) { return (double)panel_bytes(l->w.parts->format, l->K) + 4.0 * l->K * l->n; }
INLINE long panels_of(const Linear *l) { return (l->N + NR - 1) / NR; }

/* The first panel that begins at a place or after it. */
INLINE long panel_from(double place, double cost, long panels) {
    const double p = ceil(place / cost);
    return p <= 0 ? 0 : p >= panels ? panels : (long)p;
}

static void some_of_several(void *context, long from, long to, int thread) {
    const Several *s = context;
    const double begin = s->total * from / s->shares, end = s->total * to / s->shares;
    double at = 0;
    for (const Linear *l = s->list; l < s->list + s->count; l++) {
        const double cost = panel_cost(l);
        const long panels = panels_of(l), first = from ? panel_from(begin - at, cost, panels) : 0;
        const long last = to < s->shares ? panel_from(end - at, cost, panels) : panels;
        if (first < last) some_panels((void *)l, first, last, thread);
        at += cost * panels;
    }
}

static void several(const Linear *list, long count, int threads) {
    double total = 0, worth = 0;
    long panels = 0;
    for (const Linear *l = list; l < list + count; l++) {
        panels += panels_of(l), total += panel_cost(l) * panels_of(l), worth += (double)l->n * l->N * l->K;
    }
    Several s = {list, count, panels < (long)threads * SHARES ? panels : (long)threads * SHARES, total};
    run(threads, s.shares, worth, some_of_several, &s);
}

/* Products of all portions: out (slots, N). */
static void portions_products(const Routed *r, long count, int down, float *out, int threads) {
    const long N = down ? r->hidden : 2 * r->m->inner, K = down ? r->m->inner : r->hidden;
    for (long i = 0; i < count; i++) {
        const Portion *p = r->portions + i;
        const Expert *e = r->experts + p->expert;
        r->linears[i] = (Linear){out + p->first * N, N, down ? p->inner : p->x, K * (r->type == I8 ? 0 : bytes_of(r->type)),
                                 down ? e->down : e->gate_up, p->rows, N, K, r->type, 0};
    }
    several(r->linears, count, threads);
}

/* The sum of the experts' outputs into r->out; normed states and logits are there. */
static void routed(Routed *r, int threads) {
    const long used = r->m->used;
    run(threads, r->n, (double)r->n * r->m->experts * used * 4, some_choices, r);
    give_slots(r);
    memset(r->out, 0, r->n * r->hidden * 4);
    r->first = r->slots = 0;
    for (long expert = 0; expert < r->m->experts;) {
        const long count = next_batch(r, &expert);
        if (!count) break;
        run(threads, r->slots, (double)r->slots * r->hidden * 4, some_gathered, r);
        portions_products(r, count, 0, r->gate_up, threads);
        run(threads, r->slots, (double)r->slots * r->m->inner * 16, some_experts_gates, r);
        portions_products(r, count, 1, r->products, threads);
        run(threads, r->n, (double)r->slots * r->hidden * 4, some_sums, r);
    }
}

/* Room for a mixture from `at` on, or with NULL none; returns its bytes. */
static size_t experts_room(Routed *r, char *at) {
    const Mixture *m = r->m;
    const long pairs = r->n * m->used, most = r->n > SLOTS ? r->n : SLOTS, slots = pairs < most ? pairs : most;
    const long held = slots > r->n ? slots : r->n; /* products hold the shared expert's, too */
    const long portions = slots < m->experts ? slots : m->experts;
    const long filled = slots + INT_ROWS * (portions < slots / INT_ROWS ? portions : slots / INT_ROWS); /* blocks of rows */
    size_t bytes = 0;
#define ROOM(field, size) r->field = (void *)((uintptr_t)at + bytes), bytes += up(size, 64)
    ROOM(normed, r->n * r->hidden * 4);
    ROOM(logits, r->n * (m->experts + m->shared_gate) * 4);
    ROOM(weights, pairs * 4);
    ROOM(chosen, pairs * 4);
    ROOM(row_of, pairs * 4);
    ROOM(slot_of, pairs * 4);
    ROOM(portion_of, slots * 4);
    ROOM(counts, m->experts * sizeof(long));
    ROOM(portions, portions * sizeof(Portion));
    ROOM(linears, portions * sizeof(Linear));
    ROOM(gate_up, slots * 2 * m->inner * 4);
    ROOM(products, held * r->hidden * 4);
    ROOM(x, filled * rows_bytes(r->type, 1, r->hidden) + portions * 64);
    ROOM(inner, filled * rows_bytes(r->type, 1, m->inner) + portions * 64);
#undef ROOM
    return bytes;
}
