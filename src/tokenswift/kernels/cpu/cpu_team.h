/* A team of threads for the stages of a pass. See cpu.c.
 *
 * A stage is a number of tasks and a function that does a range of them. The calling thread publishes it and
 * works on it like the others: each claims the next tasks from one counter. A stage is over when its tasks are
 * done, not when all threads have arrived, so a thread that the system has put aside holds up the tasks that
 * it claimed and nothing else. Who waits spins for a bounded while and then sleeps; on a busy machine the
 * core goes to someone who can use it.
 *
 * There is one team a process. A second pass at the same time (another thread of the program) finds it taken
 * and runs alone; bits do not depend on that. After a fork() the child has no team and runs alone.
 */
#pragma once
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define MOST_THREADS 1024
#define MOST_TASKS ((1 << 24) - 1)
#define SPIN 100000   /* nanoseconds that a thread spins before it sleeps: gaps between stages are shorter */
#define WORTH 3e5     /* multiplications below which nobody is woken for a stage */
#define SMALL 1e5     /* multiplications below which one thread is faster than two */

typedef void (*Stage)(void *context, long from, long to, int thread);

static struct {
    _Alignas(64) _Atomic uint64_t ticket; /* threads that may claim (16 bits), next task, tasks (24 bits each) */
    _Alignas(64) _Atomic uint32_t done;   /* tasks of the stage that are done */
    _Atomic uint32_t waiting;             /* the calling thread sleeps on done */
    _Alignas(64) _Atomic uint32_t bell;   /* rung for a stage; those without work sleep on it */
    _Atomic uint32_t sleepers;
    Stage stage; /* of the ticket: written before it is published, read by those that hold one of its tasks */
    void *context;
    _Atomic int taken, started, alone; /* by a pass; threads besides the caller; a forked child: no others */
    int watched;                    /* for a fork */
} team;

static inline int64_t clock_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep while the word holds the value (or return early), and wake all that sleep: after one was changed. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
} door = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER}; /* of all words: a sleeper looks at its own again */

static void sleep_on(_Atomic uint32_t *word, uint32_t value) {
    pthread_mutex_lock(&door.lock);
    if (atomic_load(word) == value) pthread_cond_wait(&door.changed, &door.lock);
    pthread_mutex_unlock(&door.lock);
}

static void wake(void) {
    pthread_mutex_lock(&door.lock);
    pthread_cond_broadcast(&door.changed);
    pthread_mutex_unlock(&door.lock);
}

/* Claims tasks of the published stage and does them, until none is left. A ticket tells all that a claim needs,
 * so one that changed meanwhile is only read again; what a task needs is read once it is held. */
static void work_on(int thread) {
    uint64_t seen = atomic_load_explicit(&team.ticket, memory_order_acquire);
    for (;;) {
        const int threads = (int)(seen >> 48);
        const long next = (long)(seen >> 24 & MOST_TASKS), tasks = (long)(seen & MOST_TASKS);
        if (thread >= threads || next >= tasks) return;
        const long take = (tasks - next + threads - 1) / threads; /* much at first, little at last */
        if (!atomic_compare_exchange_weak_explicit(&team.ticket, &seen, seen + ((uint64_t)take << 24),
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        team.stage(team.context, next, next + take, thread);
        atomic_fetch_add(&team.done, (uint32_t)take);
        if (thread && atomic_load(&team.waiting)) wake();
        seen = atomic_load_explicit(&team.ticket, memory_order_acquire);
    }
}

static int work_for(int thread) {
    const uint64_t seen = atomic_load(&team.ticket);
    return thread < (int)(seen >> 48) && (seen >> 24 & MOST_TASKS) < (seen & MOST_TASKS);
}

static void *member(void *number) {
    const int thread = (int)(intptr_t)number;
#if defined(__APPLE__) /* else it might run on slow cores, and every stage waits for its last task */
    pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0);
#endif
    for (;;) {
        const int64_t until = clock_now() + SPIN;
        for (int turn = 0; !work_for(thread);) {
            relax();
            if (++turn % 64 || clock_now() < until) continue;
            const uint32_t heard = atomic_load(&team.bell);
            atomic_fetch_add(&team.sleepers, 1);
            if (!work_for(thread)) sleep_on(&team.bell, heard);
            atomic_fetch_sub(&team.sleepers, 1);
        }
        work_on(thread);
    }
    return NULL;
}

static void left_alone(void) { /* in a forked child */
    atomic_store(&team.started, 0);
    atomic_store(&team.taken, 0);
    atomic_store(&team.alone, 1);
}

/* Takes the team for a pass: how many threads it has, the caller among them; 1 where it is not to be had. */
static int take_team(int threads) {
    if (threads < 2 || atomic_load(&team.alone) || atomic_exchange(&team.taken, 1)) return 1;
    if (!team.watched) team.watched = 1, pthread_atfork(NULL, NULL, left_alone);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the program */
    for (int started = atomic_load(&team.started); started < threads - 1; started++) {
        pthread_t id;
        if (pthread_create(&id, NULL, member, (void *)(intptr_t)(started + 1))) {
            threads = started + 1;
            break;
        }
        pthread_detach(id);
        atomic_store(&team.started, started + 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (threads == 1) atomic_store(&team.taken, 0);
    return threads;
}

static void leave_team(int threads) {
    if (threads > 1) atomic_store(&team.taken, 0);
}

/* One stage by up to `threads` of a team that the caller holds; worth: its multiplications. */
static void run(int threads, long tasks, double worth, Stage stage, void *context) {
    if (threads < 2 || tasks < 2 || tasks > MOST_TASKS || worth < SMALL) {
        stage(context, 0, tasks, 0);
        return;
    }
    team.stage = stage, team.context = context;
    atomic_store_explicit(&team.done, 0, memory_order_relaxed);
    atomic_store(&team.ticket, (uint64_t)threads << 48 | (uint64_t)tasks);
    if (worth >= WORTH && atomic_load(&team.sleepers)) {
        atomic_fetch_add(&team.bell, 1);
        wake();
    }
    work_on(0);
    const int64_t begun = clock_now();
    for (int turn = 0;;) {
        uint32_t done = atomic_load(&team.done);
        if (done == (uint32_t)tasks) return;
        relax();
        if (++turn % 64 || clock_now() < begun + SPIN) continue;
        atomic_store(&team.waiting, 1);
        done = atomic_load(&team.done);
        if (done != (uint32_t)tasks) sleep_on(&team.done, done);
        atomic_store(&team.waiting, 0);
    }
}
