// How fast two threads read memory: 1 GiB in huge pages, best of nine. Prints GB/s.
//
//     memory [KIB]
//
// With a number, in pieces of so many KiB that do not follow each other, as a pass reads experts.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { THREADS = 2, LINE = 64, AHEAD = 4096 };
static const size_t SIZE = 1ul << 30;
static const char *memory;
static size_t piece = (1ul << 30) / THREADS; // bytes that are read in a row

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *read_part(void *number) {
    const char *part = memory + (size_t)number * (SIZE / THREADS);
    const size_t pieces = SIZE / THREADS / piece;
    typedef long lanes __attribute__((vector_size(LINE)));
    lanes sum[4] = {0};
    for (size_t p = 0; p < pieces; p++) {
        const char *at = part + p * 7919 % pieces * piece, *end = at + piece; // 7919: a prime
        for (; at < end; at += 4 * LINE)
            for (int i = 0; i < 4; i++) {
                __builtin_prefetch(at + AHEAD + i * LINE, 0, 2);
                sum[i] ^= *(const lanes *)(at + i * LINE);
            }
    }
    sum[0] ^= sum[1] ^ sum[2] ^ sum[3];
    volatile long kept = sum[0][0];
    return (void)kept, NULL;
}

int main(int count, char **words) {
    if (count > 1) piece = strtoul(words[1], NULL, 10) << 10;
    if (!piece || piece > SIZE / THREADS) return 1;
    char *made = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return 1;
    madvise(made, SIZE, MADV_HUGEPAGE);
    memory = memset(made, 1, SIZE);
    double best = 1e9;
    for (int i = 0; i < 9; i++) {
        double begun = now();
        pthread_t other;
        if (pthread_create(&other, 0, read_part, (void *)1)) return 1;
        read_part(0);
        pthread_join(other, 0);
        double spent = now() - begun;
        best = spent < best ? spent : best;
    }
    printf("%.1f\n", SIZE / THREADS / piece * piece * THREADS / best / 1e9);
}
