// SPDX-License-Identifier: GPL-2.0-only
/*
 * Preloaded into QEMU for a deterministic run: QEMU's main thread runs only while the vCPU thread sleeps.
 *
 * Both threads run the timers of virtual time that are due. Whichever thread is first decides which vCPU is
 * executed next, and that depends on the host. The vCPU thread wakes the main thread at every such timer, but
 * needs the main thread only when all vCPUs are idle, to advance virtual time. Then the vCPU thread sleeps on a
 * condition variable until the main thread wakes it.
 *
 * At the end of the guest, the main thread waits for files while it holds QEMU's lock. The vCPU thread cannot fall
 * asleep without that lock, so the main thread must not wait for the vCPU thread then. Nor does the main thread wait
 * after the guest has switched itself off: a vCPU then waits in a loop until the main thread ends the machine.
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

/* The vCPU thread creates this file in the working directory. It shows that the library is in effect. */
#define LOADED_FILE "qemu_threads.used"

static pthread_t main_thread;
/* The vCPU thread: of all threads but the main thread, the first one that waits for a condition. */
static pthread_t vcpu_thread;
static int has_vcpu_thread;

/* The condition that the vCPU thread sleeps on, null while the thread runs. A thread that does not exist yet counts
 * as asleep. */
static _Atomic(pthread_cond_t *) vcpu_sleep_condition = (pthread_cond_t *)-1;

/* QEMU's lock: the mutex that the vCPU thread releases while it sleeps. */
static _Atomic(pthread_mutex_t *) qemu_lock;

/* How often the vCPU thread fell asleep. The main thread waits until this number changes. */
static atomic_int vcpu_sleep_count;

/* Whether the guest has switched itself off. */
static atomic_int is_guest_off;

static void wake_main_thread(void)
{
	vcpu_sleep_count++;
	syscall(SYS_futex, &vcpu_sleep_count, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

__attribute__((constructor)) static void remember_main_thread(void)
{
	main_thread = pthread_self();
}

static int is_main_thread(void)
{
	return pthread_equal(pthread_self(), main_thread);
}

/* Whether the caller is the vCPU thread. The first thread that calls this is the vCPU thread; it holds QEMU's lock. */
static int is_vcpu_thread(void)
{
	if (!has_vcpu_thread) {
		vcpu_thread = pthread_self();
		has_vcpu_thread = 1;
		close(open(LOADED_FILE, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
	}
	return pthread_equal(pthread_self(), vcpu_thread);
}

/* The function of the C library that a function of this file replaces. */
static void *libc_function(const char *name, const char *version)
{
	void *function = dlvsym(RTLD_NEXT, name, version);
	return function ? function : dlsym(RTLD_NEXT, name);
}

int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)
{
	static int (*wait)(pthread_cond_t *, pthread_mutex_t *);
	int result;

	if (!wait)
		wait = libc_function("pthread_cond_wait", "GLIBC_2.3.2");
	if (is_main_thread() || !is_vcpu_thread())
		return wait(condition, mutex);
	qemu_lock = mutex;
	vcpu_sleep_condition = condition;
	wake_main_thread();
	result = wait(condition, mutex);
	vcpu_sleep_condition = NULL;
	return result;
}

/* Wakes the vCPU thread. It counts as running before the call: the thread may run before the call returns. */
int pthread_cond_broadcast(pthread_cond_t *condition)
{
	static int (*broadcast)(pthread_cond_t *);
	pthread_cond_t *expected = condition;

	if (!broadcast)
		broadcast = libc_function("pthread_cond_broadcast", "GLIBC_2.3.2");
	atomic_compare_exchange_strong(&vcpu_sleep_condition, &expected, NULL);
	return broadcast(condition);
}

/* Whether the caller holds QEMU's lock. glibc writes the holder's thread id into a mutex. */
static int holds_qemu_lock(void)
{
	pthread_mutex_t *lock = qemu_lock;

	return lock && lock->__data.__owner == gettid();
}

/* Waits for events of files. The main thread then also waits until the vCPU thread sleeps. */
int ppoll(struct pollfd *files, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
{
	static int (*poll_files)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
	int ready;

	if (!poll_files)
		poll_files = libc_function("ppoll", "GLIBC_2.4");
	ready = poll_files(files, count, timeout, mask);
	while (is_main_thread() && !holds_qemu_lock()) {
		int seen = vcpu_sleep_count;

		if (vcpu_sleep_condition || is_guest_off)
			break;
		syscall(SYS_futex, &vcpu_sleep_count, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
	}
	return ready;
}

/* Functions of the QEMU program. */
extern int qemu_shutdown_requested_get(void) __attribute__((weak));
extern void qemu_cpu_kick(void *cpu) __attribute__((weak));
extern void *qemu_get_cpu(int index) __attribute__((weak));
extern _Bool cpu_thread_is_idle(void *cpu) __attribute__((weak));
extern _Bool cpu_work_list_empty(void *cpu) __attribute__((weak));
extern int64_t qemu_clock_deadline_ns_all(int clock, int attributes) __attribute__((weak));
#define QEMU_VIRTUAL_CLOCK 1
#define ALL_TIMER_ATTRIBUTES (-1)
/* What a turn of a vCPU returns if it ended early or used all of its time. */
#define VCPU_TURN_ENDED 0x10000

/* Functions of QEMU's emulator. Functions of this file replace the first two. */
static void (*qemu_process_data)(void *cpu);
static int (*qemu_execute_turn)(void *cpu);
static void (*qemu_prepare_for_turn)(void *cpu);

/* Part of the name of QEMU's emulator, a module that QEMU loads itself. */
#define EMULATOR_MODULE_NAME_PART "/accel-tcg-"

static int open_emulator_module(struct dl_phdr_info *object, size_t size, void *handle)
{
	(void)size;
	if (!strstr(object->dlpi_name, EMULATOR_MODULE_NAME_PART))
		return 0;
	*(void **)handle = dlopen(object->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
	return 1;
}

static void find_emulator_functions(void)
{
	void *emulator = NULL;

	dl_iterate_phdr(open_emulator_module, &emulator);
	if (emulator) {
		qemu_process_data = dlsym(emulator, "icount_process_data");
		qemu_execute_turn = dlsym(emulator, "tcg_cpus_exec");
		qemu_prepare_for_turn = dlsym(emulator, "icount_prepare_for_run");
	}
	if (!qemu_process_data || !qemu_execute_turn || !qemu_prepare_for_turn || !qemu_shutdown_requested_get || !qemu_cpu_kick ||
	    !qemu_get_cpu || !cpu_thread_is_idle || !cpu_work_list_empty || !qemu_clock_deadline_ns_all)
		abort();
}

static int is_timer_due(void)
{
	return !qemu_clock_deadline_ns_all(QEMU_VIRTUAL_CLOCK, ALL_TIMER_ATTRIBUTES);
}

/*
 * The vCPU thread calls this after the turn of each vCPU.
 *
 * A turn lasts until the next timer. QEMU runs that timer in the turn of the next vCPU, which then executes
 * nothing. If the same vCPUs end their turns early each time, because they wait for a lock, the same vCPU is left
 * out for ever; it may be the vCPU that holds the lock. If a vCPU is asked to end its turn before the turn began,
 * QEMU runs the timers first, and the vCPU has a whole turn after that.
 */
void icount_process_data(void *cpu)
{
	if (!qemu_process_data)
		find_emulator_functions();
	qemu_process_data(cpu);
	if (!is_guest_off && qemu_shutdown_requested_get()) {
		is_guest_off = 1;
		wake_main_thread();
	}
	if (is_timer_due())
		qemu_cpu_kick(cpu);
}

/* Whether no other vCPU can execute anything. */
static int are_other_vcpus_idle(void *cpu)
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
 * A vCPU that waits with `pause` ends its turn. If all other vCPUs are idle, it has the next turn too. That turn
 * begins here, without QEMU's loop over all vCPUs. This saves time: a kernel that calibrates its timer waits with
 * `pause` for 0.2 s of virtual time.
 */
int tcg_cpus_exec(void *cpu)
{
	int result;

	if (!qemu_execute_turn)
		find_emulator_functions();
	result = qemu_execute_turn(cpu);
	while (result == VCPU_TURN_ENDED && !qemu_shutdown_requested_get() && cpu_work_list_empty(cpu) && are_other_vcpus_idle(cpu)) {
		/* Counts the instructions of this turn. QEMU calls it again, and then it counts none. */
		qemu_process_data(cpu);
		if (is_timer_due())
			break;
		qemu_prepare_for_turn(cpu);
		result = qemu_execute_turn(cpu);
	}
	return result;
}
