/* What is added to a row's scores by what its text holds: biases, presence and frequency penalties, DRY, and
 * tokens that may not come. Same order and same bits as sampling/penalties.py, which says what each is.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int32_t *text;             /* the text so far, with room for the longest path behind it */
    long text_size;
    long vocabulary;           /* token numbers are below it; those of text are */
    const int32_t *biased;     /* tokens with a bias */
    const float *bias;
    long biases;
    long start, window;        /* the first new token's place; newest places that are counted */
    double presence, frequency; /* 0: off */
    const float *dry;          /* penalty of allowed, allowed + 1, … repeated tokens */
    long dry_size, allowed;    /* 0: off */
    long range;                /* newest tokens that DRY looks at; -1: all */
    const uint8_t *breakers;   /* of each token: whether DRY sees no repetition across it */
    const int32_t *words;      /* sequences that may not be written, one after the other */
    const int32_t *word_sizes;
    long word_count;
    const int32_t *ends;       /* tokens that may not come before position `least` */
    long end_count, least;
} Adjust;

typedef struct {
    const int32_t *place;      /* column of each token, -1 for none; NULL: the token's number */
    long size;
    int32_t *numbers;          /* work space, zero: one a column */
    int32_t *touched;          /* work space: one a column */
} Columns;

/* The column of a token, -1 for none. */
static inline long column(const Columns *c, int32_t token) {
    const long at = c->place ? c->place[token] : token;
    return at < c->size ? at : -1;
}

static void add_biases(const Adjust *a, const Columns *c, float *scores) {
    for (long i = 0; i < a->biases; i++) {
        const long at = column(c, a->biased[i]);
        if (at >= 0) scores[at] += a->bias[i];
    }
}

/* Presence and frequency penalties of the new tokens in the window that ends before a position. */
static void lose_counted(const Adjust *a, const Columns *c, long known, long position, float *scores) {
    long count = 0, from = position - a->window;
    if (from < a->start) from = a->start;
    for (long i = from > 0 ? from : 0; i < known; i++) {
        const long at = column(c, a->text[i]);
        if (at < 0) continue;
        if (!c->numbers[at]++) c->touched[count++] = (int32_t)at;
    }
    for (long i = 0; i < count; i++) {
        const long at = c->touched[i];
        scores[at] -= (float)(a->presence + a->frequency * c->numbers[at]);
        c->numbers[at] = 0;
    }
}

/* Tokens up to and with place i, no more than `limit` of them, that are those at the text's end. */
static inline long repeated(const int32_t *text, long begin, long known, long i, long limit) {
    enum { FEW = 8 };
    const long most = i + 1 - begin < limit ? i + 1 - begin : limit;
    long n = 1;
    while (n < most && n < FEW && text[i - n] == text[known - 1 - n]) n++;
    if (n == FEW && n < most && !memcmp(text + i + 1 - most, text + known - most, (size_t)most * 4)) return most;
    while (n < most && text[i - n] == text[known - 1 - n]) n++;
    return n;
}

/* DRY. */
static void lose_repeated(const Adjust *a, const Columns *c, long known, float *scores) {
    enum { LANES = 32 };
    const int32_t *text = a->text;
    const long begin = a->range >= 0 && known > a->range ? known - a->range : 0, last = known - 1;
    if (last <= begin || a->breakers[text[last]]) return;
    long limit = 1, count = 0;
    const long most = a->allowed + a->dry_size - 1;
    while (limit < most && last - limit >= begin && !a->breakers[text[last - limit]]) limit++;
    if (limit < a->allowed) return;
    for (long block = begin; block < last; block += LANES) {
        const long stop = block + LANES < last ? block + LANES : last;
        int any = 0;
        if (stop - block == LANES)
            for (long j = 0; j < LANES; j++) any |= text[block + j] == text[last];
        else
            any = 1;
        if (!any) continue;
        for (long i = block; i < stop; i++) {
            if (text[i] != text[last]) continue;
            const long n = repeated(text, begin, known, i, limit);
            const int32_t next = text[i + 1];
            if (n < a->allowed || a->breakers[next]) continue;
            const long at = column(c, next);
            if (at < 0) continue;
            if (!c->numbers[at]) c->touched[count++] = (int32_t)at;
            if (c->numbers[at] < n) c->numbers[at] = (int32_t)n;
        }
    }
    for (long i = 0; i < count; i++) {
        const long at = c->touched[i];
        scores[at] -= a->dry[c->numbers[at] - a->allowed];
        c->numbers[at] = 0;
    }
}

static inline void ban(const Columns *c, int32_t token, float *scores) {
    const long at = column(c, token);
    if (at >= 0) scores[at] = -INFINITY;
}

/* Everything but biases. path: known tokens after the text. Returns 1 for a token that has no place, else 0. */
static int adjust(const Adjust *a, const Columns *c, const int32_t *path, long path_size, long position,
                  float *scores) {
    const long known = a->text_size + path_size;
    for (long i = 0; i < path_size; i++) {
        if (path[i] < 0 || path[i] >= a->vocabulary) return 1;
        a->text[a->text_size + i] = path[i];
    }
    if (a->presence != 0 || a->frequency != 0) lose_counted(a, c, known, position, scores);
    if (a->dry_size && position == known) lose_repeated(a, c, known, scores);
    const int32_t *word = a->words;
    for (long w = 0; w < a->word_count; word += a->word_sizes[w++]) {
        const long begun = a->word_sizes[w] - 1;
        if (begun && (position != known || begun > known || memcmp(a->text + known - begun, word, (size_t)begun * 4)))
            continue;
        ban(c, word[begun], scores);
    }
    if (position < a->least)
        for (long i = 0; i < a->end_count; i++) ban(c, a->ends[i], scores);
    return 0;
}
