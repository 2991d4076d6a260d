// SPDX-License-Identifier: GPL-2.0-only
/*
 * Preloaded into QEMU for a deterministic run: QEMU's main thread runs only while the vCPU thread sleeps.
 *
 * Both threads run the timers of virtual time that are due. Whichever is first decides which vCPU is executed
 * next, and that depends on the host. The vCPU thread wakes the main thread at every such timer, but needs it
 * only when all vCPUs are idle, to advance virtual time. It then sleeps on a condition variable until the main
 * thread wakes it.
 *
 * The main thread also waits for files while it holds QEMU's lock, when the guest ends. The vCPU thread cannot
 * fall asleep without that lock, so the main thread must not wait for it then. Nor does it wait after the guest has
 * switched itself off: a vCPU then waits in a loop for the power to end, which is for the main thread to do.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Created in the working directory by the vCPU thread: the library is in effect. */
#define EVIDENCE "qemu_threads.used"

static pthread_t main_thread;
/* The first thread beside it that waits for a condition: QEMU starts it before all others that do. */
static pthread_t vcpu_thread;
static int has_vcpu_thread;

/* What the vCPU thread sleeps on, null while it runs. Before it exists, it counts as asleep. */
static _Atomic(pthread_cond_t *) sleeps_on = (pthread_cond_t *)-1;

/* QEMU's lock: the one that the vCPU thread gives away while it sleeps. */
static _Atomic(pthread_mutex_t *) qemu_lock;

/* How often the vCPU thread fell asleep. The main thread waits for a change. */
static atomic_int sleeps;

/* Whether the guest has switched itself off. */
static atomic_int is_off;

static void wake_main_thread(void)
{
	sleeps++;
	syscall(SYS_futex, &sleeps, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

__attribute__((constructor)) static void remember_main_thread(void)
{
	main_thread = pthread_self();
}

static int is_main_thread(void)
{
	return pthread_equal(pthread_self(), main_thread);
}

/* Whether the caller is the vCPU thread. The first call decides; QEMU's lock is held in it. */
static int is_vcpu_thread(void)
{
	if (!has_vcpu_thread) {
		vcpu_thread = pthread_self();
		has_vcpu_thread = 1;
		close(open(EVIDENCE, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
	}
	return pthread_equal(pthread_self(), vcpu_thread);
}

/* The function of the C library that one of this file stands in for. */
static void *original(const char *name, const char *version)
{
	void *function = dlvsym(RTLD_NEXT, name, version);
	return function ? function : dlsym(RTLD_NEXT, name);
}

int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)
{
	static int (*wait)(pthread_cond_t *, pthread_mutex_t *);
	int result;

	if (!wait)
		wait = original("pthread_cond_wait", "GLIBC_2.3.2");
	if (is_main_thread() || !is_vcpu_thread())
		return wait(condition, mutex);
	qemu_lock = mutex;
	sleeps_on = condition;
	wake_main_thread();
	result = wait(condition, mutex);
	sleeps_on = NULL;
	return result;
}

/* From here on the vCPU thread counts as running: it may start before its own call returns. */
int pthread_cond_broadcast(pthread_cond_t *condition)
{
	static int (*broadcast)(pthread_cond_t *);
	pthread_cond_t *expected = condition;

	if (!broadcast)
		broadcast = original("pthread_cond_broadcast", "GLIBC_2.3.2");
	atomic_compare_exchange_strong(&sleeps_on, &expected, NULL);
	return broadcast(condition);
}

/* Whether the caller holds QEMU's lock. glibc writes the holder's thread id into a mutex. */
static int holds_qemu_lock(void)
{
	pthread_mutex_t *lock = qemu_lock;

	return lock && lock->__data.__owner == gettid();
}

/* The main thread's wait for events. */
int ppoll(struct pollfd *files, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
{
	static int (*poll_files)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
	int ready;

	if (!poll_files)
		poll_files = original("ppoll", "GLIBC_2.4");
	ready = poll_files(files, count, timeout, mask);
	while (is_main_thread() && !holds_qemu_lock()) {
		int seen = sleeps;

		if (sleeps_on || is_off)
			break;
		syscall(SYS_futex, &sleeps, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
	}
	return ready;
}

/* Of QEMU. */
extern int qemu_shutdown_requested_get(void) __attribute__((weak));
extern void qemu_cpu_kick(void *cpu) __attribute__((weak));
extern void *qemu_get_cpu(int index) __attribute__((weak));
extern _Bool cpu_thread_is_idle(void *cpu) __attribute__((weak));
extern _Bool cpu_work_list_empty(void *cpu) __attribute__((weak));
extern int64_t qemu_clock_deadline_ns_all(int clock, int attributes) __attribute__((weak));
#define VIRTUAL_CLOCK 1
#define ALL_TIMERS (-1)
/* The result of a turn that ended early, or with its time. */
#define TURN_ENDED 0x10000

/* Functions of QEMU's emulator. Those of this file stand in for the first two. */
static void (*process_data)(void *cpu);
static int (*execute)(void *cpu);
static void (*prepare_for_run)(void *cpu);

/* Part of the name of QEMU's emulator, a module that QEMU loads itself. */
#define EMULATOR "/accel-tcg-"

static int open_emulator(struct dl_phdr_info *object, size_t size, void *handle)
{
	(void)size;
	if (!strstr(object->dlpi_name, EMULATOR))
		return 0;
	*(void **)handle = dlopen(object->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
	return 1;
}

static void find_functions(void)
{
	void *emulator = NULL;

	dl_iterate_phdr(open_emulator, &emulator);
	if (emulator) {
		process_data = dlsym(emulator, "icount_process_data");
		execute = dlsym(emulator, "tcg_cpus_exec");
		prepare_for_run = dlsym(emulator, "icount_prepare_for_run");
	}
	if (!process_data || !execute || !prepare_for_run || !qemu_shutdown_requested_get || !qemu_cpu_kick ||
	    !qemu_get_cpu || !cpu_thread_is_idle || !cpu_work_list_empty || !qemu_clock_deadline_ns_all)
		abort();
}

static int is_timer_due(void)
{
	return !qemu_clock_deadline_ns_all(VIRTUAL_CLOCK, ALL_TIMERS);
}

/*
 * Called by the vCPU thread after the turn of each vCPU.
 *
 * A turn lasts until the next timer. QEMU runs that timer in the turn of the next vCPU, which then executes
 * nothing. If the same vCPUs end their turns early each time, because they wait for a lock, the same one is left
 * out for ever; it may be the one that they wait for. A vCPU that is asked to end its turn before it began makes
 * QEMU run the timers first, and has a whole turn after that.
 */
void icount_process_data(void *cpu)
{
	if (!process_data)
		find_functions();
	process_data(cpu);
	if (!is_off && qemu_shutdown_requested_get()) {
		is_off = 1;
		wake_main_thread();
	}
	if (is_timer_due())
		qemu_cpu_kick(cpu);
}

/* Whether no other vCPU can execute anything. */
static int is_alone(void *cpu)
{
	void *other;

	for (int index = 0; (other = qemu_get_cpu(index)); index++)
		if (other != cpu && !cpu_thread_is_idle(other))
			return 0;
	return 1;
}

/*
 * Executes the turn of a vCPU.
 *
 * A vCPU that waits with `pause` ends its turn. If all others are idle, the next turn is its own again. It begins
 * here, without QEMU's loop over all vCPUs: a kernel calibrates its timer so for 0.2 s of virtual time.
 */
int tcg_cpus_exec(void *cpu)
{
	int result;

	if (!execute)
		find_functions();
	result = execute(cpu);
	while (result == TURN_ENDED && !qemu_shutdown_requested_get() && cpu_work_list_empty(cpu) && is_alone(cpu)) {
		/* Counts the instructions. A second call, by QEMU, counts none. */
		process_data(cpu);
		if (is_timer_due())
			break;
		prepare_for_run(cpu);
		result = execute(cpu);
	}
	return result;
}
