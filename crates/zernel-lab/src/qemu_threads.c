// SPDX-License-Identifier: GPL-2.0-only
/*
 * Preloaded into QEMU for a deterministic run: QEMU's main thread runs only while the vCPU thread sleeps.
 *
 * Both threads run the timers of virtual time that are due. Whichever is first decides which vCPU is executed
 * next, and that depends on the host. The vCPU thread wakes the main thread at every such timer, but needs it
 * only when all vCPUs are idle, to advance virtual time. It then sleeps on a condition variable until the main
 * thread wakes it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
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

/* How often the vCPU thread fell asleep. The main thread waits for a change. */
static atomic_int sleeps;

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
	sleeps_on = condition;
	sleeps++;
	syscall(SYS_futex, &sleeps, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
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

/* The main thread's wait for events, in which it does not hold QEMU's lock. */
int ppoll(struct pollfd *files, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
{
	static int (*poll_files)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
	int ready;

	if (!poll_files)
		poll_files = original("ppoll", "GLIBC_2.4");
	ready = poll_files(files, count, timeout, mask);
	while (is_main_thread()) {
		int seen = sleeps;

		if (sleeps_on)
			break;
		syscall(SYS_futex, &sleeps, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
	}
	return ready;
}
