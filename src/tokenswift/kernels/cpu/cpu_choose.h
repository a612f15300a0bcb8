/* The choice rule on rows of logits that penalties have changed: temperature, filters, noise, the best few.
 *
 * Same order and same meaning as sampling/filters.py and xtc.py: every filter is a threshold on the score. Scores are float32;
 * masses are summed in double. Noise is made only where it can matter: a token whose score lies below the
 * K-th best so far by d needs noise above d, hence w < exp(-d) (sampling/noise.py has the formulas).
 */
#include "cpu_tile.h"

typedef struct {
    long size;                 /* candidates a row */
    const int32_t *ids;        /* token of each candidate; NULL: the candidate's number */
    float temperature;         /* 1: off */
    long top_k;                /* 0: off */
    double top_p, eta;         /* 1 and 0: off */
    double xtc;                /* logarithm of its threshold */
    float min_p;               /* logarithm; -inf: off */
} Rule;

typedef struct {
    uint64_t key;              /* of the position's noise (noise.position_key) */
    float noise;               /* its weight; 1 for the target's own choice */
    int width;                 /* candidates wanted */
    int excludes;              /* whether XTC leaves the likeliest candidates out */
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
static long survivors(const float *scores, long size, float cut, int32_t *places) {
    enum { LANES = 32 };
    long count = 0, i = 0;
    for (; i + LANES <= size; i += LANES) {
        int any = 0;
        for (int j = 0; j < LANES; j++) any |= scores[i + j] >= cut;
        if (any)
            for (int j = 0; j < LANES; j++) {
                places[count] = (int32_t)(i + j);
                count += scores[i + j] >= cut;
            }
    }
    for (; i < size; i++)
        if (scores[i] >= cut) places[count++] = (int32_t)i;
    return count;
}

/* exp(score - peak), summed over the candidates whose score is at least `least`; its relative error is below 3e-7.
 * weights: each candidate's; NULL: not wanted. */
static double mass_from(const float *scores, long size, float least, float peak, float *weights) {
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
        if (weights) memcpy(weights + i, below, (size_t)(size - i < LANES ? size - i : LANES) * 4);
    }
    for (int j = 0; j < LANES; j++) total += sums[j];
    return total;
}

/* The largest score at which it and those above weigh `wanted`, or the smallest; scores and weights change places. The key
 * picks what they are parted at, so that no order of scores is slow for every seed and position. */
static float heaviest(float *scores, float *weights, long count, double wanted, uint64_t key) {
    for (;;) {
        const float middle = scores[mix64(key += (uint64_t)count) % (uint64_t)count];
        double above = 0, equal = 0;
        long high = 0, low = count; /* those above the middle go to the front, those below to the end */
        for (long i = 0; i < low;) {
            const float score = scores[i], weight = weights[i];
            const long to = score > middle ? high++ : score < middle ? --low : i;
            if (to < low) *(score > middle ? &above : &equal) += weight;
            scores[i] = scores[to], weights[i] = weights[to];
            scores[to] = score, weights[to] = weight;
            i += to <= i;
        }
        if (high && above >= wanted) {
            count = high;
        } else if (above + equal >= wanted || low == count) {
            return middle;
        } else {
            wanted -= above + equal;
            scores += low, weights += low, count -= low;
        }
    }
}

/* The k-th largest score (ties stay), k < size; none is NaN. Mostly it is near the peak. Where many blocks have their
 * largest score at a cut, so many scores are there at least: it is looked for among those of blocks, if there are more. */
static float cut_top_k(const float *scores, long size, long k, float peak, int32_t *places, float *near, float *weights, uint64_t key) {
    enum { BLOCK = 64 };
    float depth = 2;
    const long blocks = size / BLOCK;
    for (long i = 0; i < blocks; i++) near[i] = largest(scores + i * BLOCK, BLOCK);
    const float *from = blocks > 4 * k ? near : scores;
    while (survivors(from, from == near ? blocks : size, peak - depth, places) < k) depth = depth < 1e4f ? depth * 1.5f : INFINITY;
    const long count = survivors(scores, size, peak - depth, places);
    for (long i = 0; i < count; i++) near[i] = scores[places[i]], weights[i] = 1;
    return heaviest(near, weights, count, (double)k, key);
}

/* The score below which tokens are outside the smallest set of mass p, of those whose score is at least `least`. */
static float cut_top_p(const float *scores, long size, float least, double p, float peak, int32_t *places, float *near, float *weights, uint64_t key) {
    const double wanted = p * mass_from(scores, size, least, peak, NULL);
    for (float depth = 8; depth < 200; depth *= 4) { /* the nucleus is mostly near the peak: look at no more than that */
        const float from = peak - depth > least ? peak - depth : least;
        const long count = survivors(scores, size, from, places);
        for (long i = 0; i < count; i++) near[i] = scores[places[i]];
        if (mass_from(near, count, from, peak, weights) >= wanted) return heaviest(near, weights, count, wanted, key);
        if (from == least) break;
    }
    return least;
}

static float cut_eta(const float *scores, long size, float least, const int32_t *places, long count, double epsilon, float peak) {
    double entropy = 0;
    const double logarithm = natural_log(mass_from(scores, size, least, peak, NULL));
    for (long i = 0; i < count; i++) {
        const double s = scores[places[i]] - (double)peak - logarithm;
        if (s > -INFINITY) entropy -= natural_exp(s) * s;
    }
    const double cut = 0.5 * natural_log(epsilon) - entropy, most = natural_log(epsilon);
    const double at = peak + logarithm + (cut < most ? cut : most);
    return at < peak ? (float)at : peak;
}

/* The least score with at least a probability, among the candidates at some places, of which the least is `least`; INFINITY
 * where none has it. threshold: the probability's logarithm. */
static float least_likely(const float *scores, long size, float least, const int32_t *places, long count, double threshold, float peak) {
    const double cut = peak + natural_log(mass_from(scores, size, least, peak, NULL)) + threshold;
    float at = INFINITY;
    for (long i = 0; i < count; i++)
        if (scores[places[i]] >= (float)cut && scores[places[i]] < at) at = scores[places[i]];
    return at;
}

/* Rank each row's candidates. Per row up to `most` of: tokens, values (score plus noise), shares (of the
 * processed law; NULL: not wanted). counts: how many there are. work: size × 16 bytes. Returns the first row whose
 * scores hold NaN or no finite maximum, or -1 for none. */
long ts_rank(const Rule *r, const float *logits, const Row *rows, long n, int most, int32_t *tokens,
             float *values, float *shares, int32_t *counts, float *work) {
    float *scores = work, *near = work + r->size, *weights = work + 3 * r->size;
    int32_t *places = (int32_t *)(work + 2 * r->size);
    for (long x = 0; x < n; x++) {
        const Row *row = rows + x;
        take(r, row, logits + x * r->size, scores);
        if (r->temperature != 1)
            for (long i = 0; i < r->size; i++) scores[i] /= r->temperature;
        float peak = largest(scores, r->size);
        if (!isfinite(peak)) return x;
        long count;
        const int best_alone = row->width == 1 && row->noise == 0 && !shares && !row->excludes;
        float cut = best_alone ? peak : peak + r->min_p;
        if (r->top_k || r->top_p < 1) {
            float at = -INFINITY;
            if (r->top_k && r->top_k < r->size) at = cut_top_k(scores, r->size, r->top_k, peak, places, near, weights, row->key);
            if (r->top_p < 1) at = cut_top_p(scores, r->size, at, r->top_p, peak, places, near, weights, row->key);
            cut = at > cut ? at : cut;
        }
        count = survivors(scores, r->size, cut, places);
        if (r->eta > 0) {
            const float at = cut_eta(scores, r->size, cut, places, count, r->eta, peak);
            if (at > cut) count = survivors(scores, r->size, cut = at, places);
        }
        if (row->excludes) {
            const float most = least_likely(scores, r->size, cut, places, count, r->xtc, peak);
            long kept = 0;
            for (long i = 0; i < count; i++)
                if (scores[places[i]] <= most) places[kept++] = places[i];
            count = kept;
            peak = most < peak ? most : peak;
        }
        int32_t *token = tokens + x * most, ranked = 0;
        float *value = values + x * most, *share = shares ? shares + x * most : NULL;
        const int width = row->width < most ? row->width : most;
        for (long i = 0; i < count && width > 0; i++) {
            const float score = scores[places[i]];
            const int32_t id = r->ids ? r->ids[places[i]] : places[i];
            float y = score;
            if (row->noise != 0) {
                const uint64_t bits = mix64((uint64_t)id * 0x9E3779B97F4A7C15ULL + row->key);
                if (ranked == width) { /* w >= 2^-(z + 1) for z leading zeros */
                    const float behind = value[width - 1] - score;
                    if (behind > row->noise * 0.6932f * (float)((bits ? __builtin_clzll(bits) : 64) + 1)) continue;
                }
                y += row->noise * gumbel(bits);
            }
            if (y == -INFINITY || (ranked == width && !(y > value[width - 1]))) continue;
            int at = ranked < width ? ranked++ : width - 1;
            for (; at > 0 && value[at - 1] < y; at--) {
                value[at] = value[at - 1];
                token[at] = token[at - 1];
                if (share) share[at] = share[at - 1];
            }
            value[at] = y;
            token[at] = id;
            if (share) share[at] = score;
        }
        counts[x] = ranked;
        if (share) {
            double total = 0;
            for (long i = 0; i < count; i++) /* what lies further below is less than rounding */
                if (scores[places[i]] > peak - 25 || scores[places[i]] == peak) total += natural_exp((double)(scores[places[i]] - peak));
            for (int i = 0; i < ranked; i++) share[i] = (float)(natural_exp((double)(share[i] - peak)) / total);
        }
    }
    return -1;
}

/* Of each row of logits (n, size) the `most` largest, the largest first, and their places; NaN is none of them. Those that
 * are not there have the value -inf. */
void ts_best(const float *logits, long n, long size, int most, int32_t *places, float *values) {
    enum { BLOCK = 64 };
    for (; n > 0; n--, logits += size, places += most, values += most) {
        for (int at = 0; at < most; at++) values[at] = -INFINITY;
        for (long i = 0; i < size; i += BLOCK) {
            const long end = size - i < BLOCK ? size : i + BLOCK;
            if (largest(logits + i, end - i) <= values[most - 1]) continue;
            for (long j = i; j < end; j++)
                for (int at = most - 1; at >= 0 && logits[j] > values[at]; at--) {
                    if (at + 1 < most) values[at + 1] = values[at], places[at + 1] = places[at];
                    values[at] = logits[j], places[at] = (int32_t)j;
                }
        }
    }
}
