/* The choice rule on rows of logits that penalties have changed: temperature, filters, noise, the best few.
 *
 * Same order and same meaning as sampling/choice.py: every filter is a threshold on the score. Scores are float32;
 * masses are summed in double. Noise is made only where it can matter: a token whose score lies below the
 * K-th best so far by d needs noise above d, hence w < exp(-d) (sampling/choice.py has the formulas).
 */
#include "cpu_tile.h"
#include <stdlib.h>

typedef struct {
    long size;                 /* candidates a row */
    const int32_t *ids;        /* token of each candidate; NULL: the candidate's number */
    float temperature;         /* 1: off */
    long top_k;                /* 0: off */
    double top_p, eta;         /* 1 and 0: off */
    float min_p;               /* logarithm; -inf: off */
} Rule;

typedef struct {
    uint64_t key;              /* of the position's noise (noise.position_key) */
    int coupled, width;        /* add noise; candidates wanted */
    const uint32_t *mask;      /* a bit for each token that may come; NULL: any */
} Row;

/* A row's logits, -inf where its mask does not allow the token, except where it allows none of the candidates. */
static void take(const Rule *r, const Row *row, const float *logits, float *scores) {
    enum { BITS = 32 };
    if (row->mask && r->ids) {
        uint32_t any = 0;
        for (long i = 0; i < r->size; i++) {
            const uint32_t bit = row->mask[r->ids[i] / BITS] >> r->ids[i] % BITS & 1;
            scores[i] = bit ? logits[i] : -INFINITY;
            any |= bit;
        }
        if (any) return;
    } else if (row->mask) {
        long i = 0;
        for (; i + BITS <= r->size; i += BITS)
            for (int j = 0; j < BITS; j++)
                scores[i + j] = row->mask[i / BITS] & (uint32_t)1 << j ? logits[i + j] : -INFINITY;
        for (; i < r->size; i++) scores[i] = row->mask[i / BITS] & (uint32_t)1 << i % BITS ? logits[i] : -INFINITY;
        return;
    }
    memcpy(scores, logits, (size_t)r->size * 4);
}

static inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

static inline float gumbel(uint64_t bits) { /* -log(-log(1 - w)) */
    const double w = ((double)(bits >> 11) + 0.5) * 0x1p-53;
    return (float)-natural_log(-(w < 0.29 ? atanh2(-w / (2 - w)) : natural_log(1 - w)));
}

/* The largest score; NaN where any is NaN. */
static float largest(const float *scores, long size) {
    V best[NL];
    I bad = {0};
    UNROLL for (int h = 0; h < NL; h++) best[h] = splat(-INFINITY);
    for (long i = 0; i < size; i += W) {
        V x = splat(-INFINITY);
        if (size - i < W) memcpy(&x, scores + i, (size - i) * 4);
        else x = load(F32, (const char *)(scores + i));
        bad |= x != x;
        best[i / W % NL] = higher(x, best[i / W % NL]);
    }
    for (int j = 0; j < W; j++)
        if (bad[j]) return NAN;
    return highest_lane(best);
}

/* The candidates whose score is at least cut, in their order. */
static long survivors(const float *scores, long size, float cut, int32_t *kept) {
    enum { LANES = 32 };
    long count = 0, i = 0;
    for (; i + LANES <= size; i += LANES) {
        int any = 0;
        for (int j = 0; j < LANES; j++) any |= scores[i + j] >= cut;
        if (any)
            for (int j = 0; j < LANES; j++) {
                kept[count] = (int32_t)(i + j);
                count += scores[i + j] >= cut;
            }
    }
    for (; i < size; i++)
        if (scores[i] >= cut) kept[count++] = (int32_t)i;
    return count;
}

static int descending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

static double mass_of(const float *scores, const int32_t *kept, long count, float peak) {
    double total = 0;
    for (long i = 0; i < count; i++) total += natural_exp((double)(scores[kept[i]] - peak));
    return total;
}

/* The candidates whose score is at least cut, sorted; how many. */
static long best_from(const float *scores, long size, float cut, int32_t *kept, float *sorted) {
    const long count = survivors(scores, size, cut, kept);
    for (long i = 0; i < count; i++) sorted[i] = scores[kept[i]];
    qsort(sorted, (size_t)count, sizeof(float), descending);
    return count;
}

/* The k-th largest score (ties stay), k < size; none is NaN. Mostly it is near the peak. Where many blocks have their
 * largest score at a cut, so many scores are there at least: it is looked for among those of blocks, if there are more. */
static float cut_top_k(const float *scores, long size, long k, float peak, int32_t *near, float *sorted) {
    enum { BLOCK = 64 };
    float depth = 2;
    const long blocks = size / BLOCK;
    for (long i = 0; i < blocks; i++) sorted[i] = largest(scores + i * BLOCK, BLOCK);
    const float *from = blocks > 4 * k ? sorted : scores;
    while (survivors(from, from == sorted ? blocks : size, peak - depth, near) < k) depth = depth < 1e4f ? depth * 1.5f : INFINITY;
    best_from(scores, size, peak - depth, near, sorted);
    return sorted[k - 1];
}

/* exp(score - peak), summed over the candidates whose score is at least `least`; its relative error is below 3e-7. */
static double mass_from(const float *scores, long size, float least, float peak) {
    enum { LANES = 32 };
    double sums[LANES] = {0}, total = 0;
    float below[LANES];
    for (long i = 0; i < size; i += LANES) {
        for (int j = 0; j < LANES; j++)
            below[j] = i + j < size && scores[i + j] >= least ? scores[i + j] - peak : -INFINITY;
        for (int j = 0; j < LANES; j += W) {
            V e;
            memcpy(&e, below + j, sizeof e);
            e = vexp(e);
            memcpy(below + j, &e, sizeof e);
        }
        for (int j = 0; j < LANES; j++) sums[j] += below[j];
    }
    for (int j = 0; j < LANES; j++) total += sums[j];
    return total;
}

/* The score below which tokens are outside the smallest set of mass p, of those whose score is at least `least`. */
static float cut_top_p(const float *scores, long size, float least, double p, float peak, int32_t *near, float *sorted) {
    const double wanted = p * mass_from(scores, size, least, peak);
    for (float depth = 8; depth < 200; depth *= 4) { /* the nucleus is mostly near the peak: sort no more than that */
        const long count = best_from(scores, size, peak - depth > least ? peak - depth : least, near, sorted);
        double before = 0;
        for (long i = 0; i < count; i++) {
            before += natural_exp((double)(sorted[i] - peak));
            if (before >= wanted) return sorted[i];
        }
        if (peak - depth <= least) break;
    }
    return least;
}

static float cut_eta(const float *scores, const int32_t *kept, long count, double epsilon, float peak) {
    double entropy = 0;
    const double logarithm = natural_log(mass_of(scores, kept, count, peak));
    for (long i = 0; i < count; i++) {
        const double s = scores[kept[i]] - (double)peak - logarithm;
        if (s > -INFINITY) entropy -= natural_exp(s) * s;
    }
    const double cut = 0.5 * natural_log(epsilon) - entropy, most = natural_log(epsilon);
    const double at = peak + logarithm + (cut < most ? cut : most);
    return at < peak ? (float)at : peak;
}

/* Rank each row's candidates. Per row up to `most` of: tokens, values (score plus noise), shares (of the
 * processed law; NULL: not wanted). counts: how many there are. work: size × 12 bytes. Returns the first row whose
 * scores hold NaN or no finite maximum, or -1 for none. */
long ts_rank(const Rule *r, const float *logits, const Row *rows, long n, int most, int32_t *tokens,
             float *values, float *shares, int32_t *counts, float *work) {
    float *scores = work, *sorted = work + r->size;
    int32_t *kept = (int32_t *)(work + 2 * r->size);
    for (long x = 0; x < n; x++) {
        const Row *row = rows + x;
        take(r, row, logits + x * r->size, scores);
        if (r->temperature != 1)
            for (long i = 0; i < r->size; i++) scores[i] /= r->temperature;
        const float peak = largest(scores, r->size);
        if (!isfinite(peak)) return x;
        long count;
        float cut = row->width == 1 && !row->coupled && !shares ? peak : peak + r->min_p;
        if (r->top_k || r->top_p < 1) {
            float at = -INFINITY;
            if (r->top_k && r->top_k < r->size) at = cut_top_k(scores, r->size, r->top_k, peak, kept, sorted);
            if (r->top_p < 1) at = cut_top_p(scores, r->size, at, r->top_p, peak, kept, sorted);
            cut = at > cut ? at : cut;
        }
        count = survivors(scores, r->size, cut, kept);
        if (r->eta > 0) {
            const float at = cut_eta(scores, kept, count, r->eta, peak);
            if (at > cut) count = survivors(scores, r->size, at, kept);
        }
        int32_t *token = tokens + x * most, found = 0;
        float *value = values + x * most, *share = shares ? shares + x * most : NULL;
        const int width = row->width < most ? row->width : most;
        for (long i = 0; i < count && width > 0; i++) {
            const float score = scores[kept[i]];
            const int32_t id = r->ids ? r->ids[kept[i]] : kept[i];
            float y = score;
            if (row->coupled) {
                const uint64_t bits = mix64((uint64_t)id * 0x9E3779B97F4A7C15ULL + row->key);
                if (found == width) { /* w >= 2^-(z + 1) for z leading zeros */
                    const float behind = value[width - 1] - score;
                    if (behind > 0.6932f * (float)((bits ? __builtin_clzll(bits) : 64) + 1)) continue;
                }
                y += gumbel(bits);
            }
            if (y == -INFINITY || (found == width && !(y > value[width - 1]))) continue;
            int at = found < width ? found++ : width - 1;
            for (; at > 0 && value[at - 1] < y; at--) {
                value[at] = value[at - 1];
                token[at] = token[at - 1];
                if (share) share[at] = share[at - 1];
            }
            value[at] = y;
            token[at] = id;
            if (share) share[at] = score;
        }
        counts[x] = found;
        if (share) {
            double total = 0;
            for (long i = 0; i < count; i++) /* what lies further below is less than rounding */
                if (scores[kept[i]] > peak - 25 || scores[kept[i]] == peak) total += natural_exp((double)(scores[kept[i]] - peak));
            for (int i = 0; i < found; i++) share[i] = (float)(natural_exp((double)(share[i] - peak)) / total);
        }
    }
    return -1;
}
