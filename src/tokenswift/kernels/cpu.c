/* Kernels of the lean decoder for CPUs: products with packed weights, attention, and the small operations
 * of a layer between them. One shared library, no dependency but OpenMP; see docs/exactness.md.
 *
 * The rule of this file: the bits of a row depend on that row's own context alone. A product is one chain
 * of fused multiply-adds over its inner dimension, attention takes keys in chunks that end at multiples
 * of CHUNK positions and merges the chunks in their order. How many rows a pass has, how they are cut into
 * tiles, and how many threads share the work decides only who computes an element, never in which order.
 *
 * Types of weights, keys and values: float32, bfloat16, float16. Activations that enter a product are
 * float32, or bfloat16 where the weights are; sums, scores and the residual stream are float32.
 */
#include "cpu_attention.h"
#include "cpu_choose.h"

/* ---- products with packed weights ---------------------------------------------------------------- */

/* out (n, N) float32, ldo floats apart = x (n, K) times the transpose of the weight (N, K), plus bias (N) or
 * nothing, plus what out held if add. Packed weights: panels of NR columns; inside, for float32 and float16
 * (K, NR), for bfloat16 (K / 2, NR, 2); columns beyond N are 0. x: ldx bytes apart; bfloat16 for bfloat16
 * weights, else float32. K is even. */
void ts_linear(float *out, long ldo, const void *x, long ldx, const void *packed, const float *bias, long n,
               long N, long K, int type, int add, int threads) {
    const int how = type == BF16 ? PAIRS : type == F16 ? ROWS_F16 : ROWS_F32;
    const size_t ldb = type == F16 ? NR * 2 : NR * 4, panel = (size_t)K * NR * bytes_of(type);
    const long panels = (N + NR - 1) / NR;
    if ((double)n * N * K < SMALL) threads = 1;
    const long share = n < 64 ? (panels + threads - 1) / threads : 1; /* long work follows the faster thread */
#pragma omp parallel for schedule(dynamic, share) num_threads(threads) if (threads > 1)
    for (long p = 0; p < panels; p++) {
        const int cols = N - p * NR < NR ? (int)(N - p * NR) : NR;
        for (long r = 0; r < n; r += MR) {
            const int rows = n - r < MR ? (int)(n - r) : MR, direct = cols == NR && !bias && !add;
            float sums[MR * NR], *to = out + r * ldo + p * NR;
            any_tile(how, rows, (const char *)x + r * ldx, (size_t)ldx, (const char *)packed + p * panel, ldb,
                     (const char *)packed + p * panel, K,
                     direct ? to : sums, direct ? (size_t)ldo : NR);
            if (direct) continue;
            for (int i = 0; i < rows; i++)
                for (int c = 0; c < cols; c += W) {
                    const int part = cols - c < W ? cols - c : 0;
                    const char *more = (const char *)(bias + p * NR + c);
                    char *at = (char *)(to + i * ldo + c);
                    V y = load(F32, (char *)(sums + i * NR + c));
                    if (bias) y += part ? load_part(F32, more, part) : load(F32, more);
                    if (add) y = (part ? load_part(F32, at, part) : load(F32, at)) + y;
                    if (part) store_part(F32, at, y, part);
                    else store(F32, at, y);
                }
        }
    }
}

/* ---- norms, rotary embedding, SwiGLU ----------------------------------------------------------------- */

/* One row: x times 1 / √(mean square + eps), times the weight (NULL: none). */
INLINE void norm_row(char *out, int type, const float *x, const float *weight, long width, float eps) {
    V total = {0};
    for (long c = 0; c < width; c += W) {
        V y = width - c < W ? load_part(F32, (const char *)(x + c), (int)(width - c)) : load(F32, (const char *)(x + c));
        total += y * y;
    }
    const float factor = 1.0f / sqrtf(sum_lanes(total) / width + eps);
    for (long c = 0; c < width; c += W) {
        const int part = width - c < W ? (int)(width - c) : 0;
        V y = part ? load_part(F32, (const char *)(x + c), part) : load(F32, (const char *)(x + c));
        y *= factor;
        if (weight) y *= part ? load_part(F32, (const char *)(weight + c), part) : load(F32, (const char *)(weight + c));
        if (part) store_part(type, out + c * bytes_of(type), y, part);
        else store(type, out + c * bytes_of(type), y);
    }
}

/* out (n, width) of the type = RMS norm of x (n, width) float32. */
void ts_norm(void *out, const float *x, const float *weight, long n, long width, float eps, int type, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n >= 16)
    for (long i = 0; i < n; i++)
        norm_row((char *)out + i * width * bytes_of(type), type, x + i * width, weight, width, eps);
}

/* A head's vector x (width) float32, normalised if weight, turned by its position's angles if cos, to out. */
INLINE void turn(char *out, int type, const float *x, const float *weight, float eps, const float *cos,
                 const float *sin, long width) {
    const long half = width / 2;
    float y[width], z[width];
    if (weight) norm_row((char *)y, F32, x, weight, width, eps);
    else memcpy(y, x, width * 4);
    if (cos)
        for (long j = 0; j < half; j++) {
            z[j] = y[j] * cos[j] - y[j + half] * sin[j];
            z[j + half] = y[j + half] * cos[j] + y[j] * sin[j];
        }
    else memcpy(z, y, width * 4);
    for (long c = 0; c < width; c += W) {
        if (width - c < W) store_part(type, out + c * bytes_of(type), load_part(F32, (char *)(z + c), (int)(width - c)), (int)(width - c));
        else store(type, out + c * bytes_of(type), load(F32, (char *)(z + c)));
    }
}

/* Projections (n, heads + 2 kv_heads, width) → rotated queries (heads, n, width), keys and values behind the
 * committed ones of the cache. */
static void append(const Attend *a, const float *qkv, const float *cos, const float *sin, const float *qnorm,
                   const float *knorm, float eps, int threads) {
    const long all = a->heads + 2 * a->kv_heads, width = a->width;
    const int qtype = a->type == BF16 ? BF16 : F32;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && a->n >= 8)
    for (long i = 0; i < a->n; i++)
        for (long h = 0; h < all; h++) {
            const float *x = qkv + (i * all + h) * width, *c = cos + i * (width / 2), *s = sin + i * (width / 2);
            const long kv = h < a->heads + a->kv_heads ? h - a->heads : h - a->heads - a->kv_heads;
            const size_t place = (kv * a->capacity + a->before + i) * width * bytes_of(a->type);
            if (h < a->heads)
                turn((char *)a->q + (h * a->n + i) * width * bytes_of(qtype), qtype, x, qnorm, eps, c, s, width);
            else if (h < a->heads + a->kv_heads)
                turn((char *)a->k + place, a->type, x, knorm, eps, c, s, width);
            else
                turn((char *)a->v + place, a->type, x, 0, eps, 0, 0, width);
        }
}

/* out (n, width) = silu(gate) * up, with both side by side in x (n, 2, width) */
static void swiglu(char *out, int type, const float *x, long n, long width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n >= 4)
    for (long i = 0; i < n; i++)
        for (long c = 0; c < width; c += W) {
            const int part = width - c < W ? (int)(width - c) : 0;
            const char *gate = (const char *)(x + i * 2 * width + c), *lift = gate + width * 4;
            char *to = out + (i * width + c) * bytes_of(type);
            V g = part ? load_part(F32, gate, part) : load(F32, gate), u = part ? load_part(F32, lift, part) : load(F32, lift);
            V y = g / (vexp(-g) + 1.0f) * u;
            if (part) store_part(type, to, y, part);
            else store(type, to, y);
        }
}

/* ---- the layers of a model ---------------------------------------------------------------------------- */

typedef struct { /* weights of a layer; biases, query and key norms may be NULL */
    const void *qkv, *out, *gate_up, *down; /* packed */
    const float *norm, *mlp_norm, *qkv_bias, *out_bias, *gate_up_bias, *down_bias, *query_norm, *key_norm;
    long window;
} Layer;

typedef struct {
    long layers, hidden, inner, heads, kv_heads, width;
    int type;
    float eps, scale;
} Shape;

typedef struct {
    long n, before, capacity;
    const int32_t *parents; /* (n), each below its own index, -1 for a root; NULL for a chain */
    const float *cos, *sin; /* (n, width / 2) */
    void *keys_values;      /* (2 layers, kv_heads, capacity, width) */
    void *queries;          /* out: (layers, heads, n, width), or without keep the last layer's */
    float *states;          /* (n, hidden): embeddings in, states before the final norm out */
    char *work;
    long work_bytes;
    int threads, keep, windows; /* windows: whether the layers' windows hold (cache rows stand at their positions) */
} Pass;

static long depths(const Pass *p, int32_t *depth) {
    long deepest = p->n - 1;
    if (!p->parents) return deepest;
    deepest = 0;
    for (long i = 0; i < p->n; i++) {
        depth[i] = p->parents[i] < 0 ? 0 : depth[p->parents[i]] + 1;
        deepest = depth[i] > deepest ? depth[i] : deepest;
    }
    return deepest;
}

static Attend attend_of(const Shape *m, const Pass *p, long window, const int32_t *depth) {
    return (Attend){p->n, p->before, p->capacity, p->parents, depth, m->heads, m->kv_heads, m->width,
                    p->windows ? window : 0, m->type, m->scale, 0, 0, 0};
}

/* Runs a pass through all layers. Returns 0, or the bytes of work that it needs if there are fewer. */
long ts_layers(const Shape *m, const Layer *layers, const Pass *p) {
    const int type = m->type == BF16 ? BF16 : F32;
    const long n = p->n, all = (m->heads + 2 * m->kv_heads) * m->width, whole = m->heads * m->width;
    const size_t act = bytes_of(type), kv = (size_t)m->kv_heads * p->capacity * m->width * bytes_of(m->type);
    const size_t sizes[] = {up(n * 4, 64), up(n * m->hidden * act, 64), up(n * all * 4, 64), up(n * whole * act, 64),
                            up(n * 2 * m->inner * 4, 64), up(n * m->inner * act, 64)};
    size_t need = 64;
    for (int i = 0; i < 6; i++) need += sizes[i];
    Attend a = attend_of(m, p, 0, 0);
    need += attention_bytes(&a, n - 1, p->threads);
    if ((size_t)p->work_bytes < need) return (long)need;
    char *at[7] = {p->work + (64 - (uintptr_t)p->work % 64) % 64};
    for (int i = 0; i < 6; i++) at[i + 1] = at[i] + sizes[i];
    int32_t *depth = (int32_t *)at[0];
    const long deepest = depths(p, depth);
    for (long l = 0; l < m->layers; l++) {
        const Layer *w = layers + l;
        a = attend_of(m, p, w->window, depth);
        a.q = (char *)p->queries + (p->keep ? l * n * whole * act : 0);
        a.k = (char *)p->keys_values + 2 * l * kv;
        a.v = a.k + kv;
        ts_norm(at[1], p->states, w->norm, n, m->hidden, m->eps, type, p->threads);
        ts_linear((float *)at[2], all, at[1], m->hidden * act, w->qkv, w->qkv_bias, n, all, m->hidden, m->type, 0, p->threads);
        append(&a, (float *)at[2], p->cos, p->sin, w->query_norm, w->key_norm, m->eps, p->threads);
        attention(&a, deepest, at[3], at[6], p->threads);
        ts_linear(p->states, m->hidden, at[3], whole * act, w->out, w->out_bias, n, m->hidden, whole, m->type, 1, p->threads);
        ts_norm(at[1], p->states, w->mlp_norm, n, m->hidden, m->eps, type, p->threads);
        ts_linear((float *)at[4], 2 * m->inner, at[1], m->hidden * act, w->gate_up, w->gate_up_bias, n, 2 * m->inner, m->hidden, m->type, 0, p->threads);
        swiglu(at[5], type, (float *)at[4], n, m->inner, p->threads);
        ts_linear(p->states, m->hidden, at[5], m->inner * act, w->down, w->down_bias, n, m->hidden, m->inner, m->type, 1, p->threads);
    }
    return 0;
}

/* One layer's attention over a cache that holds the pass's keys already. Returns as ts_layers does. */
long ts_attend(const Shape *m, const Pass *p, long window, const void *q, const void *k, const void *v, void *out) {
    int32_t *depth = (int32_t *)p->work;
    Attend a = attend_of(m, p, window, depth);
    const long first = up(p->n * 4, 64) + 64;
    const size_t need = first + attention_bytes(&a, p->n - 1, p->threads);
    if ((size_t)p->work_bytes < need) return (long)need;
    a.q = q, a.k = k, a.v = v;
    char *work = p->work + first;
    attention(&a, depths(p, depth), out, work - (uintptr_t)work % 64, p->threads);
    return 0;
}
