/* Runs the kernels over numbers that it makes itself and prints a hash of what comes out, a line a case: the same lines
 * for every processor that the kernels are compiled for, but where bfloat16 enters products. What comes out is also
 * written to a file that the first argument names. Rows of products are run alone, too: other bits end it with 4.
 * Without Python, so that another machine's code can be emulated. */
#include "cpu.c"
#include <stdio.h>

static FILE *dump;
static uint64_t state;
static uint64_t draw(void) { return mix64(state += 0x9E3779B97F4A7C15ULL); }
static long below(long n) { return (long)(draw() >> 11) % n; }
static float random_number(void) { /* about normal; every sum is one IEEE operation */
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)((int32_t)(draw() >> 40) - (1 << 23)) * 0x1p-23f;
    return sum;
}

static void *room(size_t bytes) {
    void *at = NULL;
    if (posix_memalign(&at, 64, bytes + 64)) exit(3);
    memset(at, 0, bytes + 64);
    return at;
}
static float *floats(long n, float size) {
    float *at = room(n * 4);
    for (long i = 0; i < n; i++) at[i] = random_number() * size;
    return at;
}
static char *converted(const float *x, long n, int type) { /* n is a multiple of 16 */
    char *at = room(n * bytes_of(type));
    for (long i = 0; i < n; i += W) store(type, at + i * bytes_of(type), load(F32, (const char *)(x + i)));
    return at;
}

static void say(const char *what, int a, int b, long c, long d, const void *found, size_t bytes) {
    const unsigned char *at = found;
    uint64_t hash = 0xcbf29ce484222325ULL;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ at[i]) * 0x100000001b3ULL;
    if (dump && fwrite(found, 1, bytes, dump) != bytes) exit(3);
    printf("%s %d %d %ld %ld %zu %016llx\n", what, a, b, c, d, bytes, (unsigned long long)hash);
}

static char *panels(int format, long N, long K) {
    const long count = (N + NR - 1) / NR;
    const size_t bytes = count * panel_bytes(format, K);
    if (format <= F16) {
        float *x = floats(count * NR * K, 0.1f);
        char *made = converted(x, count * NR * K, format);
        free(x);
        return made;
    }
    const Low m = low_format(format);
    char *made = room(bytes);
    for (size_t i = 0; i < bytes; i++) made[i] = (char)draw();
    for (char *block = made; block < made + bytes; block += block_bytes(m))
        for (int i = 0; i < NR * (1 + m.least); i++) ((uint16_t *)block)[i] = float_half(random_number() * 0.01f);
    return made;
}

static Weight weight_of(int format, long N, long K) {
    Part *part = room(sizeof(Part));
    part->data = panels(format, N, K), part->rows = N, part->format = format;
    Weight w = {part, 0};
    return w;
}

static void products(int format, int active) {
    static const long counts[] = {1, 2, 3, 5, 8, 12, 13, 40};
    const long K = 512, N = 72;
    const Weight w = weight_of(format, N, K);
    for (int i = 0; i < 8; i++) {
        const long n = counts[i];
        float *x = floats(n * K, 3.0f), *out = room(n * N * 4);
        char *rows = active == BF16 ? converted(x, n * K, BF16) : (char *)x, *work = room(groups_bytes(n, K));
        ts_linear(out, rows, &w, n, N, K, active, work, 1 + i % 2);
        say("product", format, active, n, K, out, n * N * 4);
        for (long r = 0; r < n; r++) {
            float alone[72];
            ts_linear(alone, rows + r * K * (active == BF16 ? 2 : 4), &w, 1, N, K, active, work, 1);
            if (memcmp(alone, out + r * N, N * 4)) exit(4);
        }
    }
}

static void attends(int keys, long width, long before, long n, int tree) {
    const long heads = 6, kv_heads = 2, capacity = up(before + n, PAGE), all = kv_heads * capacity * width;
    Shape m = {1, 0, 0, heads, kv_heads, width, keys, keys == BF16 ? BF16 : F32, 0, 0.125f, n == 13 ? 8 : 0};
    char *k, *v;
    if (keys == I8) {
        k = v = room(kv_heads * (capacity / PAGE) * page_bytes(width));
        float row[256];
        for (long h = 0; h < kv_heads; h++)
            for (long t = 0; t < before + n; t++)
                for (int value = 0; value < 2; value++) {
                    for (long j = 0; j < width; j++) row[j] = random_number();
                    put_entry(k + h * (capacity / PAGE) * page_bytes(width), t, value, row, width);
                }
    } else {
        k = converted(floats(all, 1), all, keys), v = converted(floats(all, 1), all, keys);
    }
    const long size = up(heads * n * width, 16);
    float *x = floats(size, 2);
    char *q = keys == BF16 ? converted(x, size, BF16) : (char *)x, *out = room(size * 4);
    int32_t parents[64];
    for (long i = 0; i < n; i++) parents[i] = i && below(4) ? (int32_t)below(i) : (int32_t)i - 1;
    const Rows r = {n, before, capacity, tree ? parents : NULL, NULL, NULL, 1};
    const long window = below(3) ? 0 : 1 + below(before + n);
    const long need = ts_attend(&m, &r, window, q, k, v, out, room(64), 0, 2);
    long more = ts_attend(&m, &r, window, q, k, v, out, room(need), need, 2);
    while (more > 0) more = ts_attend(&m, &r, window, q, k, v, out, room(more), more, 2);
    say(tree ? "tree" : "chain", keys, (int)width, before, n, out, heads * n * width * (keys == BF16 ? 2 : 4));
}

static void layers(int format, int keys, long n) {
    const long hidden = 256, inner = 512, heads = 4, kv_heads = 2, width = 64, before = 270, capacity = up(before + n, PAGE);
    const int active = format > F16 ? I8 : format;
    const int other = n == 9; /* another block than Llama's */
    const Shape m = {2, hidden, inner, heads, kv_heads, width, keys, active, 1e-5f, 0.125f, other ? 8 : 0, other ? 0.5f : 1, other, 0};
    Layer l[2] = {{{0}}};
    for (int i = 0; i < 2; i++) {
        l[i].qkv = weight_of(format, (heads + 2 * kv_heads) * width, hidden);
        l[i].out = weight_of(format, hidden, heads * width);
        l[i].gate_up = weight_of(format, 2 * inner, hidden);
        l[i].down = weight_of(format, hidden, inner);
        l[i].norm = floats(hidden, 1), l[i].mlp_norm = floats(hidden, 1);
        l[i].query_norm = l[i].key_norm = i ? floats(width, 1) : NULL;
        if (other) l[i].out_norm = l[i].norm, l[i].down_norm = l[i].mlp_norm, l[i].rope = -i;
    }
    const size_t bytes = keys == I8 ? 2 * kv_heads * (capacity / PAGE) * page_bytes(width)
                                    : 4 * kv_heads * capacity * width * bytes_of(keys);
    char *cache = room(bytes);
    const int wide = active == BF16 ? 2 : 4;
    char *queries = room(2 * heads * 128 * width * wide);
    for (long done = 0; done < before + n;) { /* the context in passes of 100 rows, then the tree */
        const long rows = done < before ? (before - done < 100 ? before - done : 100) : n;
        int32_t parents[64] = {-1};
        for (long i = 1; done >= before && i < rows; i++) parents[i] = (int32_t)below(i);
        const Rows r = {rows, done, capacity, done < before ? NULL : parents, cache, queries, 1};
        float *cos = room(rows * width * 2), *sin = room(rows * width * 2), *states = floats(rows * hidden, 1);
        for (long i = 0; i < rows * width / 2; i++) cos[i] = random_number() * 0.25f, sin[i] = random_number() * 0.25f;
        Pass p = {rows, 1, &r, cos, sin, states, room(64), 64, 2, 1, 0, 0};
        for (long need; (need = ts_layers(&m, l, &p)) > 0;) p.work = room(need), p.work_bytes = need;
        if (rows == n && done >= before) say("layers", format, keys, n, before, states, n * hidden * 4);
        done += rows;
    }
}

static void ranks(void) {
    const long size = 3000, n = 4;
    static int32_t tail[50], tokens[32], counts[4];
    static float values[32], shares[32];
    for (int i = 0; i < 50; i++) tail[i] = (int32_t)below(size);
    float *logits = floats(n * size, 4);
    Row rows[4];
    for (int i = 0; i < n; i++) rows[i] = (Row){i, tail, 3, draw(), 1, 8};
    const Rule rules[] = {{size, size, 0, 0, tail, 50, 1.2f, 0.8f, 0, 1, 0, -2.3f, 0, size, 0},
                          {size, size, 0, 0, tail, 50, 1.1f, 1.3f, 40, 0.9, 0, -INFINITY, 0, size},
                          {size, size, 0, 0, tail, 50, 1, 1, 0, 1, 2e-4, -INFINITY, 0, size}};
    for (int i = 0; i < 3; i++) {
        ts_rank(rules + i, logits, rows, n, 8, tokens, values, shares, counts, room(size * 13));
        say("tokens", i, 0, n, size, tokens, sizeof tokens);
        say("values", i, 0, n, size, values, sizeof values);
        say("shares", i, 0, n, size, shares, sizeof shares);
    }
}

int main(int count, char **words) {
    if (count > 1 && !(dump = fopen(words[1], "wb"))) return 3;
#define PRODUCTS(name, number) products(name, I8), products(name, F32), products(name, BF16);
    FORMATS(PRODUCTS)
    products(F32, F32), products(F16, F32), products(BF16, BF16);
    static const int types[] = {F32, F16, I8, BF16};
    static const long widths[] = {64, 40, 128, 12};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            attends(types[i], widths[j], 255 + 100 * j, 1, 0);
            attends(types[i], widths[j], 520 + j, 13, 0);
            attends(types[i], widths[j], 600 - 40 * j, 23, 1);
        }
    layers(Q4_1, I8, 9), layers(Q8_0, I8, 1), layers(Q6_K, F32, 20), layers(F32, F32, 9), layers(BF16, BF16, 9);
    ranks();
    return dump && fclose(dump) ? 3 : 0;
}
