/* Kernels of the native decoder for CPUs: products with packed weights, attention, and the small operations
 * of a layer between them. One shared library, no dependency but threads; see docs/exactness.md.
 *
 * The rule of this file: the bits of a row depend on that row's own context alone. A product is one chain
 * of fused multiply-adds over its inner dimension, attention takes keys in chunks that end at multiples
 * of CHUNK positions and merges the chunks in their order. How many rows a pass has, how they are cut into
 * tiles, and how many threads share the work decides only who computes an element, never in which order.
 * Nor does a compiler decide what is rounded: see `fused`.
 *
 * Types of keys and values: float32, bfloat16, float16; of weights these and the formats of cpu_low.h. What
 * enters a product is float32, bfloat16 or groups of int8; sums, scores and the residual stream are float32.
 */
#include "cpu_choose.h"
#include "cpu_linear.h"
#include "cpu_merge.h"
#include "cpu_pack.h"

#ifndef TS_BUILD
#define TS_BUILD ""
#endif
/* what made this library */
const char ts_build[] = TS_BUILD ", version " __VERSION__;

/* ---- norms, rotary embedding, gates ------------------------------------------------------------------- */

/* One row: x times 1 / √(mean square + eps), times the weight (NULL: none); with eps < 0 x as it is. */
INLINE void norm_row(char *out, int type, const float *x, const float *weight, long width, float eps) {
    V total[NL] = {{0}};
    for (long c = 0; c < width; c += W) {
        V y = load_left(F32, (const char *)(x + c), width - c);
        total[c / W % NL] = fused(y, y, total[c / W % NL]);
    }
    const float factor = eps < 0 ? 1.0f : 1.0f / sqrtf(sum_lanes(total) / width + eps);
    for (long c = 0; c < width; c += W) {
        V y = load_left(F32, (const char *)(x + c), width - c) * factor;
        if (weight) y *= load_left(F32, (const char *)(weight + c), width - c);
        store_left(type, out + c * bytes_of(type), y, width - c);
    }
}

typedef struct {
    char *out;
    const float *x, *weight;
    long n, width;
    float eps;
    int type;
} Norm;

static void some_norms(void *context, long from, long to, int thread) {
    const Norm *m = context;
    (void)thread;
    for (long i = from; i < to; i++) {
        const float *x = m->x + i * m->width;
        float normed[m->type == I8 && m->eps >= 0 ? m->width : 1];
        if (m->type != I8) {
            norm_row(m->out + i * m->width * bytes_of(m->type), m->type, x, m->weight, m->width, m->eps);
            continue;
        }
        if (m->eps >= 0) norm_row((char *)normed, F32, x, m->weight, m->width, m->eps);
        quantize(group_of(m->out, m->n, m->width, i), block_of_rows(m->n), m->eps < 0 ? x : normed, m->width);
    }
}

/* out (n, width) of the type = RMS norm of x (n, width) float32. */
static void norm(void *out, const float *x, const float *weight, long n, long width, float eps, int type, int threads) {
    Norm m = {out, x, weight, n, width, eps, type};
    run(threads, n, (double)n * width * 8, some_norms, &m);
}

/* work: for active I8, room for x as groups, whose rows are float32 then. */
void ts_linear(float *out, const void *x, const Weight *w, long n, long N, long K, int active, char *work, int threads) {
    threads = take_team((double)n * N * K < SMALL ? 1 : threads);
    if (active == I8) norm(work, x, NULL, n, K, -1, I8, threads);
    linear(out, N, active == I8 ? work : x, K * (active == BF16 ? 2 : 4), w, n, N, K, active, 0, threads);
    leave_team(threads);
}

void ts_norm(void *out, const float *x, const float *weight, long n, long width, float eps, int type, int threads) {
    threads = take_team((double)n * width * 8 < SMALL ? 1 : threads);
    norm(out, x, weight, n, width, eps, type, threads);
    leave_team(threads);
}

typedef struct {
    float *states;
    const float *x, *weight;
    long width;
    float eps, factor;
} Addend;

static void some_addends(void *context, long from, long to, int thread) {
    const Addend *m = context;
    float y[m->width];
    (void)thread;
    for (long i = from; i < to; i++) {
        float *state = m->states + i * m->width;
        norm_row((char *)y, F32, m->x + i * m->width, m->weight, m->width, m->weight ? m->eps : -1);
        for (long c = 0; c < m->width; c += W) {
            V z = load_left(F32, (char *)(y + c), m->width - c), old = load_left(F32, (char *)(state + c), m->width - c);
            store_left(F32, (char *)(state + c), fused(z, splat(m->factor), old), m->width - c);
        }
    }
}

/* states (n, width) += factor times the norm of x (weight NULL: x as it is). */
static void add_normed(float *states, const float *x, const float *weight, long n, long width, float eps, float factor, int threads) {
    Addend m = {states, x, weight, width, eps, factor};
    run(threads, n, (double)n * width * 16, some_addends, &m);
}

static void some_centred(void *context, long from, long to, int thread) {
    const Addend *m = context;
    (void)thread;
    for (long i = from; i < to; i++) {
        char *row = (char *)(m->states + i * m->width);
        V total[NL] = {{0}};
        for (long c = 0; c < m->width; c += W) total[c / W % NL] += load_left(F32, row + c * 4, m->width - c);
        const V mean = splat(sum_lanes(total) / m->width);
        for (long c = 0; c < m->width; c += W)
            store_left(F32, row + c * 4, load_left(F32, row + c * 4, m->width - c) - mean, m->width - c);
    }
}

/* states (n, width) without their means, so that their RMS norm is a LayerNorm. */
static void centre(float *states, long n, long width, int threads) {
    Addend m = {states, NULL, NULL, width, 0, 0};
    run(threads, n, (double)n * width * 8, some_centred, &m);
}

/* A head's vector x (width) float32, normalised if weight, turned by its position's angles if cos, scaled, to out. */
INLINE void turn(char *out, int type, const float *x, const float *weight, float eps, const float *cos,
                 const float *sin, float scale, long width) {
    const long half = width / 2;
    float y[width], z[width];
    if (weight) norm_row((char *)y, F32, x, weight, width, eps);
    else memcpy(y, x, width * 4);
    if (cos)
        for (long j = 0; j < half; j++) {
            z[j] = y[j] * cos[j] - y[j + half] * sin[j]; /* four roundings and two, by every compiler */
            z[j + half] = y[j + half] * cos[j] + y[j] * sin[j];
        }
    else memcpy(z, y, width * 4);
    if (scale != 1)
        for (long j = 0; j < width; j++) z[j] *= scale;
    for (long c = 0; c < width; c += W)
        store_left(type, out + c * bytes_of(type), load_left(F32, (char *)(z + c), width - c), width - c);
}

typedef struct {
    const Segment *segments;
    float *qkv;
    const float *cos, *sin, *qnorm, *knorm; /* no cos: nothing is turned */
    const float *query_scale; /* (n), or NULL: 1 */
    float eps;
    int over_heads; /* whether the norms are over all heads together */
} Append;

static void some_heads(void *context, long from, long to, int thread) {
    const Append *p = context;
    const Segment *segment = p->segments;
    long first = 0; /* the segment's first row */
    (void)thread;
    for (long row = from; row < to; row++) {
        while (row >= first + segment->a.n) first += segment++->a.n;
        const Attend *a = &segment->a;
        const long all = a->heads + 2 * a->kv_heads, width = a->width, i = row - first;
        const int qtype = a->type == BF16 ? BF16 : F32;
        const float *c = p->cos ? p->cos + row * (width / 2) : 0, *s = p->cos ? p->sin + row * (width / 2) : 0;
        const float *qnorm = p->over_heads ? 0 : p->qnorm, *knorm = p->over_heads ? 0 : p->knorm;
        const float scale = p->query_scale ? p->query_scale[row] : 1;
        if (p->over_heads) {
            float *q = p->qkv + row * all * width, *k = q + a->heads * width;
            norm_row((char *)q, F32, q, p->qnorm, a->heads * width, p->eps);
            norm_row((char *)k, F32, k, p->knorm, a->kv_heads * width, p->eps);
        }
        for (long h = 0; h < all; h++) {
            const int part = (h >= a->heads) + (h >= a->heads + a->kv_heads); /* queries, keys, values */
            const long head = h - (part > 0) * a->heads - (part > 1) * a->kv_heads, slot = a->before + i;
            const float *x = p->qkv + (row * all + h) * width, *weight = part == 0 ? qnorm : part == 1 ? knorm : 0;
            char *to = (char *)a->q + (h * a->n + i) * width * bytes_of(qtype);
            if (part && !keeps_whole(a->type)) to = (char *)(part == 1 ? a->k : a->v) + (head * a->capacity + slot) * width * bytes_of(a->type);
            float y[width];
            if (part && keeps_whole(a->type)) to = (char *)y;
            turn(to, !part ? qtype : keeps_whole(a->type) ? F32 : a->type, x, weight, p->eps, part < 2 ? c : 0, s, part ? 1 : scale, width);
            if (part && keeps_whole(a->type)) {
                char *pages = (char *)a->k + head * (a->capacity / PAGE) * page_bytes(a->type, width);
                (part == 1 ? put_key : put_value)(a->type, pages, slot, y, width);
            }
        }
    }
}

/* Projections (n, heads + 2 kv_heads, width) of all segments' rows → rotated queries (heads, n, width), keys and
 * values behind the committed ones, of each segment. */
static void append(const Segment *segments, long n, float *qkv, const float *cos, const float *sin,
                      const float *qnorm, const float *knorm, const float *query_scale, float eps, int over_heads, int threads) {
    const Attend *a = &segments->a;
    Append p = {segments, qkv, cos, sin, qnorm, knorm, query_scale, eps, over_heads};
    run(threads, n, (double)n * (a->heads + 2 * a->kv_heads) * a->width * 8, some_heads, &p);
}

/* GeLU by its tanh, or SiLU; with a limit, gates of at most that, up between it and minus it, and up + 1. */
typedef struct {
    int gelu;
    float limit, slope; /* 0: none; of the logistic function of a gate with a limit */
} Activation;

typedef struct {
    char *out;
    const float *x;
    long n, width;
    int type;
    Activation how;
} Gate;

/* One row; of I8, as groups that are `block` apart. */
INLINE void gate_row(char *out, const int type, Activation how, const float *both, long width, long block) {
    const int out_type = type == I8 ? F32 : type;
    float floats[type == I8 ? width : 1];
    char *at = type == I8 ? (char *)floats : out;
    for (long c = 0; c < width; c += W) {
        const char *gate = (const char *)(both + c), *lift = gate + width * 4;
        V x = load_left(F32, gate, width - c), u = load_left(F32, lift, width - c);
        V y = x; /* GeLU by its tanh is x times a logistic function, too: of 2 √(2 / π) (x + .044715 x³) */
        if (how.gelu) y = fused(x * x * x, splat(0.0713548163f), x * 1.59576912f);
        if (how.limit > 0) {
            x = pick(x > how.limit, splat(how.limit), x);
            u = pick(u > how.limit, splat(how.limit), pick(u < -how.limit, splat(-how.limit), u)) + 1.0f;
            y = x * how.slope;
        }
        store_left(out_type, at + c * bytes_of(out_type), x / (vexp(-y) + 1.0f) * u, width - c);
    }
    if (type == I8) quantize((Group *)out, block, floats, width);
}

/* Where a row of a product's input stands. */
INLINE char *row_at(char *rows, int type, long n, long width, long i) {
    return type == I8 ? (char *)group_of(rows, n, width, i) : rows + i * width * bytes_of(type);
}

static void some_gates(void *context, long from, long to, int thread) {
    const Gate *g = context;
    const long width = g->width;
    (void)thread;
    for (long i = from; i < to; i++)
        gate_row(row_at(g->out, g->type, g->n, width, i), g->type, g->how, g->x + i * 2 * width, width, block_of_rows(g->n));
}

/* out (n, width) = activation(gate) * up, with both side by side in x (n, 2, width). */
static void gated(char *out, int type, Activation how, const float *x, long n, long width, int threads) {
    Gate g = {out, x, n, width, type, how};
    run(threads, n, (double)n * width * 16, some_gates, &g);
}

static void some_outputs(void *context, long from, long to, int thread) {
    const Gate *g = context;
    (void)thread;
    for (long i = from; i < to; i++)
        for (long c = 0; c < g->width; c += W) {
            char *out = g->out + (i * g->width + c) * bytes_of(g->type);
            const V gate = load_left(F32, (const char *)(g->x + i * g->width + c), g->width - c);
            store_left(g->type, out, load_left(g->type, out, g->width - c) / (vexp(-gate) + 1.0f), g->width - c);
        }
}

/* out (n, width) times sigmoid(x). */
static void gate_outputs(char *out, int type, const float *x, long n, long width, int threads) {
    Gate g = {out, x, n, width, type, 0};
    run(threads, n, (double)n * width * 16, some_outputs, &g);
}

/* Bytes of rows that enter a product. */
INLINE size_t rows_bytes(int type, long n, long width) { return type == I8 ? groups_bytes(n, width) : n * width * bytes_of(type); }

#include "cpu_experts.h" /* its gates and norms are those above */
#include "cpu_recurrent.h"

/* ---- the layers of a model ---------------------------------------------------------------------------- */

typedef struct { /* weights of a layer; norms may be NULL */
    Weight qkv, out, gate_up, down;
    const float *norm, *mlp_norm, *out_norm, *down_norm, *query_norm, *key_norm;
    long window, rope;        /* rope: which set of angles turns queries and keys; -1: none */
    int wide;                 /* whether keys of whole numbers are of 16 bits */
    Weight second_qkv;        /* of a drafter's layer: what a pass's second input adds to qkv; else no parts */
    const float *second_norm;
    const Expert *experts;    /* of a mixture; gate_up and down are those of the expert of all rows, if there is one */
    Weight router;
    const float *router_bias; /* of the choice of experts; may be NULL */
    const float *sinks;       /* (heads) of attention; may be NULL */
    Recurrent recurrent;      /* with taps, in the place of attention: qkv is its first projection, out its last one */
    Weight gate;              /* its product's sigmoid multiplies what attention gives; without parts there is none */
} Layer;

typedef struct {
    long layers, hidden, inner, heads, kv_heads, width;
    int keys, active; /* types: of keys and values, of what enters a product */
    float eps, scale, cap, residual, limit, slope; /* the last two: of the activation */
    int gelu, norm_all_heads, parallel;
    Mixture mixture; /* of layers with experts; 0 experts: there are none */
    Recurrence recurrence; /* of recurrent layers; 0 taps: there are none */
} Shape;

typedef struct { /* rows of one text, over its own cache */
    long n, before, capacity;
    const int32_t *parents; /* (n), each below its own index, -1 for a root; NULL for a chain */
    void *keys_values;      /* (2 layers, kv_heads, capacity, width); with a tail without the layers that have windows */
    void *queries;          /* out: (layers, heads, n, width), or without keep the last layer's */
    int windows;            /* whether the layers' windows hold (cache rows stand at their positions) */
    void *tail;             /* the layers with windows, if they are apart: as keys_values, from a multiple of CHUNK on */
    long tail_before, tail_capacity;
    const float *now;       /* of recurrent layers: states of the committed rows, (layers, state_size) */
    float *next, *log;      /* out: those behind a chain (NULL: nowhere), and (layers, log_rows, log_size) */
    long log_rows;          /* n or more, or 0: the log is not kept */
} Rows;

typedef struct {
    long n, count;          /* rows of the pass, and the texts that they belong to, one after the other */
    const Rows *rows;       /* (count) */
    const float *cos, *sin; /* (sets, n, width / 2) */
    float *states;          /* (n, hidden): embeddings in, states before the final norm out */
    char *work;
    long work_bytes;
    int threads, keep;
    long feature_count;             /* layers (the number of all: what leaves the last) whose input states come out: */
    const int32_t *feature_layers;  /* (feature_count) */
    float *features;               /* (feature_count, n, hidden) */
    const float *second_input; /* (n, hidden), or NULL where no layer has such weights */
    const float *query_scale;  /* (n): what rotated queries are multiplied with, or NULL */
} Pass;

/* Keep the states that enter a layer, where its states are features. */
static void tap(const Pass *p, long layer, long hidden) {
    for (long i = 0; i < p->feature_count; i++)
        if (p->feature_layers[i] == layer) memcpy(p->features + i * p->n * hidden, p->states, p->n * hidden * 4);
}

/* Whether the rows of texts, n in all, cannot run: they do not fit their caches, or a parent is no earlier row. */
static int unfit(const Rows *rows, long count, long n) {
    for (const Rows *r = rows; r < rows + count; n -= r++->n) {
        if (r->n < 1 || r->before < 0 || r->before > r->capacity - r->n) return 1;
        if (r->tail && (r->tail_before < 0 || r->tail_before > r->tail_capacity - r->n)) return 1;
        for (long i = 0; r->parents && i < r->n; i++)
            if (r->parents[i] < -1 || r->parents[i] >= i) return 1;
    }
    return n != 0;
}

/* Whether rows are a chain. */
static int chained(const Rows *r) {
    long links = 0;
    while (r->parents && links < r->n && r->parents[links] == links - 1) links++;
    return !r->parents || links == r->n;
}

/* A segment over its own cache; depth: room for n numbers. A tree that is a chain is taken for one: the same bits. */
static Segment segment_of(const Shape *m, const Rows *r, long window, int32_t *depth) {
    const int32_t *parents = chained(r) ? NULL : r->parents;
    const long most = r->tail && r->tail_before > r->before ? r->tail_before : r->before;
    Segment s = {{r->n, most, r->capacity, parents, depth, m->heads, m->kv_heads, m->width,
                  r->windows ? window : 0, m->keys, m->active == I8 ? F32 : m->active, m->scale, m->cap, 0, 0, 0, 0, 0}, r->n - 1, 0, 0, 0, 0, 0, 0};
    if (!parents) return s;
    s.deepest = 0;
    for (long i = 0; i < r->n; i++) {
        depth[i] = parents[i] < 0 ? 0 : depth[parents[i]] + 1;
        s.deepest = depth[i] > s.deepest ? depth[i] : s.deepest;
    }
    return s;
}

INLINE char *aligned(char *at) { return at + (64 - (uintptr_t)at % 64) % 64; }

/* The type of a layer's keys. */
INLINE int keys_of(const Shape *m, const Layer *w) { return m->keys == I8 && w->wide ? I16 : m->keys; }

/* Bytes of a slot of a KV head in all layers before layer l that stand with it. apart: whether those with windows stand
 * elsewhere; tail: whether layer l is one of these. */
static size_t slots_bytes(const Shape *m, const Layer *layers, long l, int apart, int tail) {
    size_t bytes = 0;
    for (const Layer *w = layers; w < layers + l; w++)
        if (!w->recurrent.taps && (!apart || (w->window > 0) == tail))
            bytes += m->keys == I8 ? page_bytes(keys_of(m, w), m->width) / PAGE : 2 * m->width * bytes_of(m->keys);
    return bytes;
}

/* The experts' part of a layer: their outputs for the normed states into r->out. x, gate_up and gated: room for the rows
 * of the expert that all go through. */
static void experts_outputs(Routed *r, const Shape *m, const Layer *w, const float *states, char *x, float *gate_up, char *gated_rows, int threads) {
    const Mixture *mix = &m->mixture;
    const long n = r->n, router_rows = mix->experts + mix->shared_gate;
    const size_t item = r->type == I8 ? 0 : bytes_of(r->type);
    norm(r->normed, states, w->mlp_norm, n, m->hidden, w->mlp_norm ? m->eps : -1, F32, threads);
    linear(r->logits, router_rows, r->normed, m->hidden * 4, &w->router, n, router_rows, m->hidden, F32, 0, threads);
    r->experts = w->experts, r->bias = w->router_bias;
    routed(r, threads);
    if (!w->gate_up.parts) return;
    norm(x, r->normed, NULL, n, m->hidden, -1, r->type, threads);
    linear(gate_up, 2 * mix->shared, x, m->hidden * item, &w->gate_up, n, 2 * mix->shared, m->hidden, r->type, 0, threads);
    gated(gated_rows, r->type, r->how, gate_up, n, mix->shared, threads);
    linear(r->products, m->hidden, gated_rows, mix->shared * item, &w->down, n, m->hidden, mix->shared, r->type, 0, threads);
    run(threads, n, (double)n * m->hidden * 4, some_shared, r);
}

/* Room for recurrent layers from `at` on, or with NULL none; returns its bytes. */
static size_t recurrent_room(Recur *r, const Shape *m, const Pass *p, char *at) {
    const Recurrence *c = &m->recurrence;
    if (!c->taps) return 0;
    long logged = 0, held = 0;
    size_t bytes = 0;
#define ROOM(field, type, count) type *field = (type *)(at + bytes); bytes += up((count) * sizeof(type), 64)
    ROOM(trails, Trail, p->count);
    ROOM(slots, int32_t, p->n);
    ROOM(normed, float, c->value_heads ? p->n * m->hidden : 0);
    ROOM(gates, float, p->n * 2 * c->value_heads);
    ROOM(queries, float, p->n * keys_size(c));
    for (long i = 0, first = 0; i < p->count; first += p->rows[i++].n) {
        const Rows *rows = p->rows + i;
        const int32_t *parents = chained(rows) ? NULL : rows->parents;
        const long wanted = at ? held_rows(slots + first, parents, rows->n) : parents ? rows->n : 0;
        held = wanted > held ? wanted : held;
        if (at) trails[i] = (Trail){rows->n, parents, NULL, NULL, NULL, slots + first, !parents};
        if (!rows->log_rows) logged += rows->n;
    }
    ROOM(log, float, logged * log_size(c));
    const long room = (1 + held) * matrix_size(c);
    ROOM(matrices, float, p->threads * room);
#undef ROOM
    r->m = c, r->trails = trails, r->count = p->count, r->normed = normed, r->gates = gates, r->queries = queries;
    r->spare = log, r->matrices = matrices, r->room = room, r->eps = m->eps;
    return bytes;
}

/* The states of a recurrent layer, the l-th of them. */
static void recurrent_layer(Recur *r, const Shape *m, const Pass *p, const Recurrent *w, long l) {
    const Recurrence *c = &m->recurrence;
    float *spare = r->spare;
    for (long i = 0; i < p->count; i++) {
        const Rows *rows = p->rows + i;
        Trail *t = (Trail *)r->trails + i;
        t->now = rows->now + l * state_size(c);
        t->next = rows->next ? rows->next + l * state_size(c) : NULL;
        t->log = rows->log_rows ? rows->log + l * rows->log_rows * log_size(c) : spare;
        if (!rows->log_rows) spare += rows->n * log_size(c);
    }
    r->w = w;
}

/* Runs a pass through all layers. Returns 0, the bytes of work that it needs if there are fewer, or -1 for rows
 * that cannot run. */
long ts_layers(const Shape *m, const Layer *layers, Pass *p) {
    if (unfit(p->rows, p->count, p->n)) return -1;
    const int type = m->active;
    const long n = p->n, all = (m->heads + 2 * m->kv_heads) * m->width, all_heads = m->heads * m->width;
    const Recurrence *c = &m->recurrence;
    const long entering = c->taps && projected_size(c) > all ? projected_size(c) : all;
    const long leaving = c->taps && outputs_size(c) > all_heads ? outputs_size(c) : all_heads;
    const size_t item = type == I8 ? 0 : bytes_of(type); /* rows of groups have no distance of their own */
    const size_t hidden = m->hidden * item, inner = m->inner * item;
    const long widest = m->inner > m->mixture.shared ? m->inner : m->mixture.shared;
    const Activation how = {m->gelu, m->limit, m->slope};
    Recur recur = {0};
    Routed r = {.m = &m->mixture, .n = n, .hidden = m->hidden, .type = type, .how = how};
    const size_t attended = all_heads * bytes_of(type == I8 ? F32 : type), query = bytes_of(m->keys == BF16 ? BF16 : F32);
    const size_t sizes[] = {up(p->count * sizeof(Segment), 64), up(n * 4, 64), up(rows_bytes(type, n, m->hidden), 64), up(n * entering * 4, 64),
                            up(leaving * n * (attended / all_heads), 64), up(n * 2 * widest * 4, 64), up(rows_bytes(type, n, widest), 64),
                            type == I8 ? up(rows_bytes(type, n, leaving), 64) : 0, up(n * m->hidden * 4, 64),
                            m->mixture.experts ? experts_room(&r, NULL) : 0, recurrent_room(&recur, m, p, NULL)};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    size_t need = 64;
    for (int i = 0; i < SIZES; i++) need += sizes[i];
    if ((size_t)p->work_bytes < need) return (long)need; /* without what attention needs: it asks again */
    char *at[SIZES + 1] = {aligned(p->work)};
    for (int i = 0; i < SIZES; i++) at[i + 1] = at[i] + sizes[i];
    if (m->mixture.experts) experts_room(&r, at[9]);
    recurrent_room(&recur, m, p, at[10]);
    r.out = (float *)at[8];
    Segment *segments = (Segment *)at[0];
    int32_t *depth = (int32_t *)at[1];
    for (long i = 0, first = 0; i < p->count; first += p->rows[i++].n) segments[i] = segment_of(m, p->rows + i, 0, depth + first);
    need += shared_out(segments, p->count, p->threads).bytes;
    if ((size_t)p->work_bytes < need) return (long)need;
    const int threads = take_team(p->threads);
    for (long l = 0, attending = 0; l < m->layers; l++) {
        const Layer *w = layers + l;
        const int recurs = w->recurrent.taps != NULL;
        const long mixed = recurs ? outputs_size(c) : all_heads;
        for (long i = 0, first = 0; !recurs && i < p->count; first += p->rows[i++].n) {
            const Rows *r = p->rows + i;
            const int tail = r->tail && w->window;
            const long capacity = tail ? r->tail_capacity : r->capacity;
            Attend *a = &segments[i].a;
            a->type = keys_of(m, w), a->sinks = w->sinks;
            a->before = tail ? r->tail_before : r->before, a->capacity = capacity;
            a->window = r->windows || tail ? w->window : 0;
            a->q = (char *)r->queries + (p->keep ? attending * r->n * all_heads * query : 0);
            a->k = (char *)(tail ? r->tail : r->keys_values) + m->kv_heads * capacity * slots_bytes(m, layers, l, r->tail != 0, tail);
            a->v = a->k + m->kv_heads * capacity * m->width * bytes_of(m->keys); /* not read of whole numbers, whose pages hold both */
            a->out = at[4] + first * attended;
        }
        if (m->parallel) centre(p->states, n, m->hidden, threads);
        tap(p, l, m->hidden);
        norm(at[2], p->states, w->norm, n, m->hidden, w->norm ? m->eps : -1, type, threads);
        const long projected = recurs ? projected_size(c) : all;
        linear((float *)at[3], projected, at[2], hidden, &w->qkv, n, projected, m->hidden, type, 0, threads);
        if (recurs) {
            recurrent_layer(&recur, m, p, &w->recurrent, l - attending);
            if (c->value_heads) {
                norm(recur.normed, p->states, w->norm, n, m->hidden, w->norm ? m->eps : -1, F32, threads);
                linear(recur.gates, 2 * c->value_heads, recur.normed, m->hidden * 4, &w->recurrent.gates, n, 2 * c->value_heads, m->hidden, F32, 0, threads);
            }
            recur.projected = (float *)at[3], recur.out = at[4], recur.type = type == I8 ? F32 : type;
            recurrent_rows(&recur, n, threads);
        } else attending++;
        if (w->second_qkv.parts) {
            norm(at[2], p->second_input, w->second_norm, n, m->hidden, m->eps, type, threads);
            linear((float *)at[3], all, at[2], hidden, &w->second_qkv, n, all, m->hidden, type, 1, threads);
        }
        const long turn = w->rope > 0 ? w->rope * n * (m->width / 2) : 0; /* where the layer's angles begin */
        if (!recurs) append(segments, n, (float *)at[3], w->rope < 0 ? NULL : p->cos + turn, p->sin + turn, w->query_norm, w->key_norm, p->query_scale, m->eps, m->norm_all_heads, threads);
        if (!recurs) attention(segments, p->count, at[SIZES], threads);
        if (w->gate.parts) {
            linear((float *)at[3], all_heads, at[2], hidden, &w->gate, n, all_heads, m->hidden, type, 0, threads);
            gate_outputs(at[4], type == I8 ? F32 : type, (float *)at[3], n, all_heads, threads);
        }
        if (type == I8) norm(at[7], (float *)at[4], NULL, n, mixed, -1, I8, threads);
        const int apart = w->out_norm || w->down_norm || m->residual != 1; /* else products are added to the states */
        float *output = apart ? (float *)at[8] : p->states;
        linear(output, m->hidden, type == I8 ? at[7] : at[4], mixed * item, &w->out, n, m->hidden, mixed, type, !apart, threads);
        if (apart) add_normed(p->states, output, w->out_norm, n, m->hidden, m->eps, m->residual, threads);
        if (w->experts) {
            experts_outputs(&r, m, w, p->states, at[2], (float *)at[5], at[6], threads);
            add_normed(p->states, r.out, w->down_norm, n, m->hidden, m->eps, m->residual, threads);
            continue;
        }
        if (!m->parallel) norm(at[2], p->states, w->mlp_norm, n, m->hidden, w->mlp_norm ? m->eps : -1, type, threads);
        linear((float *)at[5], 2 * m->inner, at[2], hidden, &w->gate_up, n, 2 * m->inner, m->hidden, type, 0, threads);
        gated(at[6], type, how, (float *)at[5], n, m->inner, threads);
        linear(output, m->hidden, at[6], inner, &w->down, n, m->hidden, m->inner, type, !apart, threads);
        if (apart) add_normed(p->states, output, w->down_norm, n, m->hidden, m->eps, m->residual, threads);
    }
    if (m->parallel) centre(p->states, n, m->hidden, threads);
    tap(p, m->layers, m->hidden);
    leave_team(threads);
    return 0;
}

/* One layer's attention over a cache that holds the pass's keys already; layer's keys and values are k and v, the
 * rows' own pointers are not read. Returns as ts_layers does. */
long ts_attend(const Shape *m, const Rows *r, long window, const void *q, const void *k, const void *v,
               const float *sinks, void *out, char *work, long work_bytes, int threads) {
    if (unfit(r, 1, r->n)) return -1;
    const size_t first = up(r->n * 4, 64);
    size_t need = 64 + first;
    if ((size_t)work_bytes < need) return (long)need;
    work = aligned(work);
    Segment s = segment_of(m, r, window, (int32_t *)work);
    need += shared_out(&s, 1, threads).bytes;
    if ((size_t)work_bytes < need) return (long)need;
    s.a.q = q, s.a.k = k, s.a.v = v, s.a.sinks = sinks, s.a.out = out;
    threads = take_team(threads);
    attention(&s, 1, work + first, threads);
    leave_team(threads);
    return 0;
}
