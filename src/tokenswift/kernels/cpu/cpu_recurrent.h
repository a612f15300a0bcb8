/* Recurrent layers: gated short convolutions (LFM2), and the gated delta rule behind a convolution (Qwen3.5).
 *
 * A row's numbers go from its parent's state to its own by one chain of float32 operations, the same for a prompt, a
 * token, a tree of drafts and a replay: nothing is taken together in matrices, so a text's bits do not depend on how it
 * was cut into passes. A layer's state is the last inputs of its convolution, the oldest first, and for each head a
 * matrix (key_width, value_width). A pass leaves the states of committed rows as they are: it writes what follows a
 * chain beside them, and what each row feeds into a log, from which ts_replay moves the states along an accepted path.
 *
 * A row of the log is (inputs of the convolution, channels), and for the delta rule keys (key_heads, key_width) of
 * length 1, values (value_heads, value_width), decays and strengths (value_heads).
 */

typedef struct { /* sizes of recurrent layers; of short convolutions the heads are 0, without taps there are none */
    long taps, channels, key_heads, value_heads, key_width, value_width, tiled;
} Recurrence;

/* The head of keys of a head of values. */
INLINE long key_head_of(const Recurrence *m, long head) {
    return m->tiled ? head % m->key_heads : head / (m->value_heads / m->key_heads);
}

typedef struct { /* weights of a recurrent layer; without taps it is none */
    Weight gates;      /* (2 value_heads, hidden) float32: of strengths, of decays; its first projection is the layer's qkv */
    const float *taps; /* (taps, channels), the oldest first */
    const float *rate, *shift; /* of decays (value_heads): they are exp(rate · log(1 + exp(x + shift))) */
    const float *norm; /* of a head's output, (value_width) */
} Recurrent;

/* Numbers of a state and of a row of the log; those that enter a layer's input, and leave it. */
INLINE long matrix_size(const Recurrence *m) { return m->key_width * m->value_width; }
INLINE long inputs_size(const Recurrence *m) { return (m->taps - 1) * m->channels; }
INLINE long state_size(const Recurrence *m) { return inputs_size(m) + m->value_heads * matrix_size(m); }
INLINE long keys_size(const Recurrence *m) { return m->key_heads * m->key_width; }
INLINE long outputs_size(const Recurrence *m) { return m->value_heads ? m->value_heads * m->value_width : m->channels; }
INLINE long projected_size(const Recurrence *m) { return m->value_heads ? m->channels + outputs_size(m) : 3 * m->channels; }
INLINE long log_size(const Recurrence *m) {
    return m->channels + (m->value_heads ? keys_size(m) + outputs_size(m) + 2 * m->value_heads : 0);
}

typedef struct { /* a text's rows in one layer */
    long n;
    const int32_t *parents; /* as in Rows */
    const float *now;       /* the state of the committed rows */
    float *next;            /* that after the last row of a chain; NULL: it is not wanted */
    float *log;             /* (n, log_size) */
    const int32_t *slots;   /* (n): where a row's matrix is held for a later child; -1: nowhere */
    int chain;
} Trail;

typedef struct {
    const Recurrence *m;
    const Recurrent *w;
    const Trail *trails;
    long count;
    const float *projected; /* (n, projected_size) */
    float *normed, *gates;  /* of the delta rule: (n, hidden); (n, 2 value_heads): of strengths, of decays */
    float *queries;         /* (n, keys_size) */
    float *matrices;        /* of each thread: the current one, and the slots */
    long room;              /* numbers of each thread's matrices */
    float *spare;           /* a log for texts that keep none */
    char *out;              /* (n, outputs_size) of a type */
    int type;
    float eps;
} Recur;

/* The text of a row of a pass, whose number in the text is left in *row. */
INLINE const Trail *trail_of(const Recur *r, long *row) {
    const Trail *t = r->trails;
    while (*row >= t->n) *row -= t++->n;
    return t;
}

/* Where the inputs are that a row's convolution sees, the newest last. */
INLINE void inputs_of(const float **inputs, const Recurrence *m, const Trail *t, long row) {
    const long width = log_size(m);
    for (long tap = m->taps - 1, at = row; tap >= 0; tap--) {
        inputs[tap] = at < 0 ? t->now + (m->taps - 1 + at) * m->channels : t->log + at * width;
        at = at < 0 || !t->parents ? at - 1 : t->parents[at];
    }
}

/* W numbers of the convolution from channel c on; left: how many channels there are. */
INLINE V convolved(const float **inputs, const float *taps, long count, long channels, long c, long left) {
    V sum = {0};
    for (long tap = 0; tap < count; tap++)
        sum = fused(load_left(F32, (const char *)(taps + tap * channels + c), left), load_left(F32, (const char *)(inputs[tap] + c), left), sum);
    return sum;
}

/* The convolution's inputs behind the last row of a chain. */
static void next_inputs(const Recurrence *m, const Trail *t) {
    const float *inputs[m->taps];
    inputs_of(inputs, m, t, t->n - 1);
    for (long tap = 1; tap < m->taps; tap++) memcpy(t->next + (tap - 1) * m->channels, inputs[tap], m->channels * 4);
}

/* Inputs of the convolution into the log. Of a short one these are products: a row is (B, C, x), and B x enters. */
static void some_logged(void *context, long from, long to, int thread) {
    const Recur *r = context;
    const Recurrence *m = r->m;
    (void)thread;
    for (long i = from; i < to; i++) {
        long row = i;
        const Trail *t = trail_of(r, &row);
        const float *x = r->projected + i * projected_size(m);
        float *log = t->log + row * log_size(m);
        for (long c = 0; c < m->channels; c += W) {
            V y = load_left(F32, (const char *)(x + c), m->channels - c);
            if (!m->value_heads) y *= load_left(F32, (const char *)(x + 2 * m->channels + c), m->channels - c);
            store_left(F32, (char *)(log + c), y, m->channels - c);
        }
    }
}

/* Short convolutions: C times what they make. */
static void some_short(void *context, long from, long to, int thread) {
    const Recur *r = context;
    const Recurrence *m = r->m;
    const float *inputs[m->taps];
    (void)thread;
    for (long i = from; i < to; i++) {
        long row = i;
        const Trail *t = trail_of(r, &row);
        const float *gate = r->projected + i * projected_size(m) + m->channels;
        inputs_of(inputs, m, t, row);
        for (long c = 0; c < m->channels; c += W) {
            const long left = m->channels - c;
            const V y = convolved(inputs, r->w->taps, m->taps, m->channels, c, left) * load_left(F32, (const char *)(gate + c), left);
            store_left(r->type, r->out + (i * m->channels + c) * bytes_of(r->type), y, left);
        }
    }
}

/* A head's vector of length 1, times a factor. */
INLINE void unit(float *out, const float *x, long width, float scale) {
    V total[NL] = {{0}};
    for (long c = 0; c < width; c += W) {
        V y = load_left(F32, (const char *)(x + c), width - c);
        total[c / W % NL] = fused(y, y, total[c / W % NL]);
    }
    const float factor = 1.0f / sqrtf(sum_lanes(total) + 1e-6f);
    for (long c = 0; c < width; c += W)
        store_left(F32, (char *)(out + c), load_left(F32, (const char *)(x + c), width - c) * factor * scale, width - c);
}

/* What the delta rule reads of each row: queries, and into the log keys, values, decays and strengths. */
static void some_delta_inputs(void *context, long from, long to, int thread) {
    const Recur *r = context;
    const Recurrence *m = r->m;
    const long keys = keys_size(m);
    const float *inputs[m->taps], scale = 1.0f / sqrtf(m->key_width);
    float y[m->channels];
    (void)thread;
    for (long i = from; i < to; i++) {
        long row = i;
        const Trail *t = trail_of(r, &row);
        float *k = t->log + row * log_size(m) + m->channels, *v = k + keys, *decay = v + outputs_size(m), *strength = decay + m->value_heads;
        inputs_of(inputs, m, t, row);
        for (long c = 0; c < m->channels; c += W) {
            const V x = convolved(inputs, r->w->taps, m->taps, m->channels, c, m->channels - c);
            store_left(F32, (char *)(y + c), x / (vexp(-x) + 1.0f), m->channels - c);
        }
        for (long h = 0; h < m->key_heads; h++) {
            unit(r->queries + i * keys + h * m->key_width, y + h * m->key_width, m->key_width, scale);
            unit(k + h * m->key_width, y + keys + h * m->key_width, m->key_width, 1);
        }
        memcpy(v, y + 2 * keys, outputs_size(m) * 4);
        const float *gates = r->gates + i * 2 * m->value_heads;
        for (long h = 0; h < m->value_heads; h++) {
            const double x = (double)gates[m->value_heads + h] + r->w->shift[h];
            const double softplus = x > 40 ? x : natural_log(1 + natural_exp(x));
            decay[h] = (float)natural_exp(r->w->rate[h] * softplus);
            strength[h] = (float)(1 / (1 + natural_exp(gates[h] < -700 ? 700 : -(double)gates[h])));
        }
    }
}

/* B · W columns of one step of a head's matrix (below). */
INLINE void delta_columns(const int B, float *to, const float *from, const float *k, const float *v, float decay, float strength,
                          const float *q, float *out, long rows, long width) {
    V seen[4] = {{0}}, read[4] = {{0}};
    for (long i = 0; i < rows; i++)
        UNROLL for (int b = 0; b < B; b++)
            seen[b] = fused(*(const Vm *)(from + i * width + b * W) * decay, splat(k[i]), seen[b]);
    UNROLL for (int b = 0; b < B; b++) seen[b] = (*(const Vm *)(v + b * W) - seen[b]) * strength;
    for (long i = 0; i < rows; i++)
        UNROLL for (int b = 0; b < B; b++) {
            const V s = fused(splat(k[i]), seen[b], *(const Vm *)(from + i * width + b * W) * decay);
            *(Vm *)(to + i * width + b * W) = s;
            if (q) read[b] = fused(s, splat(q[i]), read[b]);
        }
    if (q) UNROLL for (int b = 0; b < B; b++) *(Vm *)(out + b * W) = read[b];
}

/* One step of a head's matrix, from → to, which may be one: it decays, then moves towards v along k; with q, out is what
 * q reads of it. Each column is a chain of its own over the rows. */
INLINE void delta_step(float *to, const float *from, const float *k, const float *v, float decay, float strength,
                       const float *q, float *out, long rows, long width) {
    long c = 0;
    for (; c + 4 * W <= width; c += 4 * W) delta_columns(4, to + c, from + c, k, v + c, decay, strength, q, q ? out + c : out, rows, width);
    for (; c < width; c += W) delta_columns(1, to + c, from + c, k, v + c, decay, strength, q, q ? out + c : out, rows, width);
}

/* ---- chains: a head's matrix goes through all its rows a few columns at a time, which stay in the first cache. A row's
 * step decays the matrix for the next one, too, and sums what that one sees: it reads and writes the matrix once. ---- */

#define COLUMNS 32 /* numbers of a matrix's row that go through a chain together; fewer at its end, a multiple of 16 */
#define TILE 32    /* rows after which the other columns have their turn */

typedef struct { /* a row of a chain: its keys, values and queries; the last row has no next */
    const float *k, *v, *q, *next_k;
    float decay, strength, next_decay;
} Link;

/* B · W columns: to = from · decay, seen = what k sees of it. */
INLINE void enter_chain(const int B, float *to, const float *from, long stride, float decay, const float *k, float *seen, long rows) {
    V sum[8] = {{0}};
    for (long i = 0; i < rows; i++) {
        __builtin_prefetch(from + i * stride + rows * stride); /* of the next head */
        __builtin_prefetch(from + i * stride + rows * stride + 16);
        UNROLL for (int b = 0; b < B; b++) {
            const V x = *(const Vm *)(from + i * stride + b * W) * decay;
            sum[b] = fused(x, splat(k[i]), sum[b]);
            *(Vm *)(to + i * B * W + b * W) = x;
        }
    }
    UNROLL for (int b = 0; b < B; b++) *(Vm *)(seen + b * W) = sum[b];
}

/* A store past the caches: nobody reads it before the next pass, by when it would have left them. */
INLINE void store_far(float *to, V x) {
#if W == 16
    _mm512_stream_ps(to, (__m512)x);
#elif W == 8
    _mm256_stream_ps(to, (__m256)x);
#else
    *(Vm *)to = x;
#endif
}

/* One row's step of B · W decayed columns; they end up in `to`, decayed for the next row where there is one. */
INLINE void chain_step(const int B, const int asked, const int goes_on, const int far, float *to, long stride, const float *from, const Link *l, float *seen, float *out, long rows) {
    V step[8], sum[8] = {{0}}, read[8] = {{0}};
    const V next_decay = splat(l->next_decay);
    UNROLL for (int b = 0; b < B; b++) step[b] = (*(const Vm *)(l->v + b * W) - *(const Vm *)(seen + b * W)) * l->strength;
    for (long i = 0; i < rows; i++)
        UNROLL for (int b = 0; b < B; b++) {
            V s = fused(splat(l->k[i]), step[b], *(const Vm *)(from + i * B * W + b * W));
            if (asked) read[b] = fused(s, splat(l->q[i]), read[b]);
            if (goes_on) {
                s *= next_decay;
                sum[b] = fused(s, splat(l->next_k[i]), sum[b]);
            }
            if (far) store_far(to + i * stride + b * W, s);
            else *(Vm *)(to + i * stride + b * W) = s;
        }
    UNROLL for (int b = 0; b < B; b++) {
        if (asked) *(Vm *)(out + b * W) = read[b];
        if (goes_on) *(Vm *)(seen + b * W) = sum[b];
    }
}

/* The same with constant flags. matrix: the columns; end: where they stand behind the chain's last row, or NULL: nowhere. */
INLINE void any_step(const int B, float *matrix, float *end, long width, const Link *l, float *seen, float *out, long rows) {
    float *to = l->next_k || !end ? matrix : end;
    const long stride = to == matrix ? B * W : width;
    const int far = to != matrix && l->q && (uintptr_t)to % 64 == 0; /* of a replay they stand in the caches */
    if (l->q && l->next_k) chain_step(B, 1, 1, 0, to, stride, matrix, l, seen, out, rows);
    else if (far) chain_step(B, 1, 0, 1, to, stride, matrix, l, seen, out, rows);
    else if (l->q) chain_step(B, 1, 0, 0, to, stride, matrix, l, seen, out, rows);
    else if (l->next_k) chain_step(B, 0, 1, 0, to, stride, matrix, l, seen, out, rows);
    else chain_step(B, 0, 0, 0, to, stride, matrix, l, seen, out, rows);
}

/* Columns from c on of a row's step; its values and outputs are those of the whole head. */
INLINE void step_columns(long c, float *matrix, float *end, long width, Link l, float *seen, float *out, long rows) {
    l.v += c;
    end = end ? end + c : NULL, out = out ? out + c : NULL;
    if (c + COLUMNS <= width) any_step(COLUMNS / W, matrix, end, width, &l, seen + c, out, rows);
    else any_step(16 / W, matrix, end, width, &l, seen + c, out, rows);
}

INLINE void enter_columns(long c, float *to, const float *from, long width, const Link *l, float *seen, long rows) {
    if (c + COLUMNS <= width) enter_chain(COLUMNS / W, to, from + c, width, l->decay, l->k, seen + c, rows);
    else enter_chain(16 / W, to, from + c, width, l->decay, l->k, seen + c, rows);
}

/* A head's part of a row of the log. next: that of the row behind it, or NULL. */
INLINE Link link_of(const Recurrence *m, const float *row, const float *next, long head, const float *queries) {
    const long key = m->channels + key_head_of(m, head) * m->key_width, values = m->channels + keys_size(m);
    const long decay = values + outputs_size(m) + head;
    return (Link){row + key, row + values + head * m->value_width, queries, next ? next + key : NULL,
                  row[decay], row[decay + m->value_heads], next ? next[decay] : 0};
}

/* A head's output of a row of the pass, normed and gated. */
static void put_head(const Recur *r, long row, long head, const float *out) {
    const Recurrence *m = r->m;
    const long width = m->value_width;
    float y[width];
    norm_row((char *)y, F32, out, r->w->norm, width, r->eps);
    const float *z = r->projected + row * projected_size(m) + m->channels + head * width;
    char *row_out = r->out + (row * outputs_size(m) + head * width) * bytes_of(r->type);
    for (long c = 0; c < width; c += W) {
        const V gate = *(const Vm *)(z + c);
        store(r->type, row_out + c * bytes_of(r->type), *(const Vm *)(y + c) * (gate / (vexp(-gate) + 1.0f)));
    }
}

/* A head of a text whose rows are a chain, the first of them row `first` of the pass. */
static void delta_chain(const Recur *r, const Trail *t, long head, long first, float *matrix) {
    const Recurrence *m = r->m;
    const long place = inputs_size(m) + head * matrix_size(m), width = m->value_width, logged = log_size(m);
    const long query = key_head_of(m, head) * m->key_width;
    float seen[width], out[TILE * width];
    for (long start = 0; start < t->n; start += TILE) {
        const long end = t->n - start < TILE ? t->n : start + TILE;
        for (long c = 0; c < width; c += COLUMNS) {
            float *columns = matrix + c * m->key_width;
            for (long row = start; row < end; row++) {
                const float *log = t->log + row * logged;
                const Link l = link_of(m, log, row + 1 < t->n ? log + logged : NULL, head, r->queries + (first + row) * keys_size(m) + query);
                if (!row) enter_columns(c, columns, t->now + place, width, &l, seen, m->key_width);
                step_columns(c, columns, t->next ? t->next + place : NULL, width, l, seen, out + (row - start) * width, m->key_width);
            }
        }
        for (long row = start; row < end; row++) put_head(r, first + row, head, out + (row - start) * width);
    }
}

/* A head of a text whose rows are a tree. */
static void delta_tree(const Recur *r, const Trail *t, long head, long first, float *current) {
    const Recurrence *m = r->m;
    const long size = matrix_size(m), query = key_head_of(m, head) * m->key_width;
    const float *now = t->now + inputs_size(m) + head * size;
    for (long row = 0; row < t->n; row++) {
        const long parent = t->parents[row];
        const float *source = parent < 0 ? now : t->slots[parent] >= 0 ? current + (1 + t->slots[parent]) * size : current;
        float *target = t->slots[row] >= 0 ? current + (1 + t->slots[row]) * size : current;
        const Link l = link_of(m, t->log + row * log_size(m), NULL, head, r->queries + (first + row) * keys_size(m) + query);
        float out[m->value_width];
        delta_step(target, source, l.k, l.v, l.decay, l.strength, l.q, out, m->key_width, m->value_width);
        put_head(r, first + row, head, out);
    }
}

/* Heads of texts: task i is head i % value_heads of text i / value_heads. */
static void some_delta_heads(void *context, long from, long to, int thread) {
    const Recur *r = context;
    const Recurrence *m = r->m;
    for (long task = from; task < to; task++) {
        const Trail *t = r->trails + task / m->value_heads;
        long first = 0; /* the text's first row */
        for (const Trail *before = r->trails; before < t; before++) first += before->n;
        (t->parents ? delta_tree : delta_chain)(r, t, task % m->value_heads, first, r->matrices + thread * r->room);
    }
#if !NEON
    _mm_sfence();
#endif
}

/* Which rows' matrices are held for later children; returns how many. A row's next row goes on from the current one. */
static long held_rows(int32_t *slots, const int32_t *parents, long n) {
    long held = 0;
    for (long i = 0; i < n; i++) slots[i] = -1;
    for (long i = 0; parents && i < n; i++)
        if (parents[i] >= 0 && parents[i] != i - 1 && slots[parents[i]] < 0) slots[parents[i]] = held++;
    return held;
}

/* What a layer makes of projected rows, into r->out. */
static void recurrent_rows(const Recur *r, long n, int threads) {
    const Recurrence *m = r->m;
    run(threads, n, (double)n * m->channels * 4, some_logged, (void *)r);
    if (!m->value_heads) run(threads, n, (double)n * m->channels * 4 * m->taps, some_short, (void *)r);
    else {
        run(threads, n, (double)n * m->channels * 4 * m->taps, some_delta_inputs, (void *)r);
        run(threads, r->count * m->value_heads, (double)n * m->value_heads * matrix_size(m) * 4, some_delta_heads, (void *)r);
    }
    for (const Trail *t = r->trails; t < r->trails + r->count; t++)
        if (t->chain && t->next) next_inputs(m, t);
}

typedef struct {
    const Recurrence *m;
    float *states;
    const float *log;
    const int64_t *nodes;
    long rows, count;
} Replay;

/* Heads of layers: task i is head i % (value_heads + 1) of layer i / (value_heads + 1); the last one are the inputs. */
static void some_replays(void *context, long from, long to, int thread) {
    const Replay *p = context;
    const Recurrence *m = p->m;
    const long width = log_size(m), tasks = m->value_heads + 1;
    (void)thread;
    for (long task = from; task < to; task++) {
        const long layer = task / tasks, head = task % tasks;
        const float *log = p->log + layer * p->rows * width;
        float *state = p->states + layer * state_size(m);
        for (long i = 0; head == m->value_heads && i < p->count; i++) { /* all inputs one place on */
            memmove(state, state + m->channels, (m->taps - 2) * m->channels * 4);
            memcpy(state + (m->taps - 2) * m->channels, log + p->nodes[i] * width, m->channels * 4);
        }
        if (head == m->value_heads) continue;
        float seen[m->value_width], columns[COLUMNS * m->key_width], *matrix = state + inputs_size(m) + head * matrix_size(m);
        for (long c = 0; c < m->value_width; c += COLUMNS)
            for (long i = 0; i < p->count; i++) {
                const float *row = log + p->nodes[i] * width;
                const Link l = link_of(m, row, i + 1 < p->count ? log + p->nodes[i + 1] * width : NULL, head, NULL);
                if (!i) enter_columns(c, columns, matrix, m->value_width, &l, seen, m->key_width);
                step_columns(c, columns, matrix, m->value_width, l, seen, NULL, m->key_width);
            }
    }
}

/* Move the states (layers, state_size) along rows `nodes` (count) of a log (layers, rows, log_size). */
void ts_replay(const Recurrence *m, float *states, const float *log, const int64_t *nodes, long layers, long rows, long count, int threads) {
    Replay p = {m, states, log, nodes, rows, count};
    const double worth = (double)layers * count * (m->value_heads * matrix_size(m) * 3 + m->channels);
    threads = take_team(worth < SMALL ? 1 : threads);
    run(threads, layers * (m->value_heads + 1), worth, some_replays, &p);
    leave_team(threads);
}
