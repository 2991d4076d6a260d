/* SPDX-License-Identifier: GPL-2.0-only */
/* Why a thread is blocked, from the system call it is in and the file it waits for, and the event that
 * its tracker gets. */
#ifndef SCHED_BLOCK_REASON_BPF_H
#define SCHED_BLOCK_REASON_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "process.h"
#include "sched/state.bpf.h"
#include "task_state.h"
#include "thread.h"
#include "tracker_event.h"

#define NOT_A_SYSCALL (~0UL)

enum {
	S_IFMT = 0170000,
	S_IFSOCK = 0140000,
	S_IFREG = 0100000,
	S_IFBLK = 0060000,
	S_IFDIR = 0040000,
	S_IFCHR = 0020000,
};

enum {
	AF_UNIX = 1,
	AF_INET = 2,
	AF_INET6 = 10,
};

/* Whether a system call blocks on the file that its first argument names. The numbers of system
 * calls are those of x86-64. */
static __always_inline bool blocks_on_file(unsigned long call)
{
	switch (call) {
	case 0: /* read */
	case 1: /* write */
	case 17: /* pread64 */
	case 18: /* pwrite64 */
	case 19: /* readv */
	case 20: /* writev */
	case 40: /* sendfile */
	case 42: /* connect */
	case 43: /* accept */
	case 44: /* sendto */
	case 45: /* recvfrom */
	case 46: /* sendmsg */
	case 47: /* recvmsg */
	case 275: /* splice */
	case 288: /* accept4 */
	case 295: /* preadv */
	case 296: /* pwritev */
	case 299: /* recvmmsg */
	case 307: /* sendmmsg */
	case 327: /* preadv2 */
	case 328: /* pwritev2 */
		return true;
	default:
		return false;
	}
}

/* Why the caller of a system call is blocked; for calls that block on a file, see
 * block_reason_of_file(). */
static __always_inline __u8 block_reason_of_call(unsigned long call)
{
	switch (call) {
	case 2: /* open */
	case 4: /* stat */
	case 5: /* fstat */
	case 6: /* lstat */
	case 21: /* access */
	case 26: /* msync */
	case 74: /* fsync */
	case 75: /* fdatasync */
	case 208: /* io_getevents */
	case 217: /* getdents64 */
	case 257: /* openat */
	case 262: /* newfstatat */
	case 269: /* faccessat */
	case 277: /* sync_file_range */
	case 326: /* copy_file_range */
	case 332: /* statx */
	case 333: /* io_pgetevents */
	case 426: /* io_uring_enter */
	case 437: /* openat2 */
	case 439: /* faccessat2 */
		return SCHED_BLOCKED_IO;
	case 202: /* futex */
	case 449: /* futex_waitv */
	case 455: /* futex_wait */
		return SCHED_BLOCKED_FUTEX;
	case 7: /* poll */
	case 23: /* select */
	case 232: /* epoll_wait */
	case 270: /* pselect6 */
	case 271: /* ppoll */
	case 281: /* epoll_pwait */
	case 441: /* epoll_pwait2 */
		return SCHED_BLOCKED_POLL;
	case NOT_A_SYSCALL:
		return SCHED_BLOCKED_FAULT;
	default:
		return SCHED_BLOCKED_OTHER;
	}
}

/* Why a thread is blocked on the file of a descriptor. */
static __noinline __u8 block_reason_of_file(struct task_struct *task, unsigned int number)
{
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files, *file = NULL;
	struct socket *socket;
	__u16 family;

	if (!table || number >= BPF_CORE_READ(table, max_fds))
		return SCHED_BLOCKED_OTHER;
	files = BPF_CORE_READ(table, fd);
	bpf_probe_read_kernel(&file, sizeof(file), files + number);
	if (!file)
		return SCHED_BLOCKED_OTHER;
	switch (BPF_CORE_READ(file, f_inode, i_mode) & S_IFMT) {
	case S_IFREG:
	case S_IFBLK:
	case S_IFDIR:
		return SCHED_BLOCKED_IO;
	case S_IFCHR:
		return SCHED_BLOCKED_OTHER;
	case S_IFSOCK:
		socket = BPF_CORE_READ(file, private_data);
		family = BPF_CORE_READ(socket, sk, __sk_common.skc_family);
		return family == AF_INET || family == AF_INET6 ? SCHED_BLOCKED_NETWORK :
								 SCHED_BLOCKED_IPC;
	default: /* a pipe, or a file without a name, such as an eventfd */
		return SCHED_BLOCKED_IPC;
	}
}

/*
 * Why a loader polls. A download usually waits for its socket with a timeout, by polling that
 * socket alone. Trainers poll all kinds of sockets, without end, so this is used for loaders only.
 */
static __noinline __u8 block_reason_of_poll(struct task_struct *task)
{
	struct pt_regs *registers = (struct pt_regs *)bpf_task_pt_regs(task);
	unsigned long call = registers->orig_rax;
	int number = -1;

	if ((call != 7 && call != 271) || registers->rsi != 1)
		return SCHED_BLOCKED_POLL;
	bpf_probe_read_user(&number, sizeof(number), (void *)registers->rdi);
	return block_reason_of_file(task, number) == SCHED_BLOCKED_NETWORK ? SCHED_BLOCKED_NETWORK :
									     SCHED_BLOCKED_POLL;
}

/* Why the current task, which is being switched out, is blocked. */
static __always_inline __u8 block_reason(struct task_struct *task)
{
	struct pt_regs *registers;

	if (BPF_CORE_READ_BITFIELD(task, in_iowait))
		return SCHED_BLOCKED_IO;
	registers = (struct pt_regs *)bpf_task_pt_regs(task);
	if (blocks_on_file(registers->orig_rax))
		return block_reason_of_file(task, registers->rdi);
	return block_reason_of_call(registers->orig_rax);
}

/* Whether the thread helps another thread that announces its steps. A helper may launch, sync and copy for that thread,
 * as the autograd thread does. */
static __always_inline bool helps_step_announcer(const struct zernel_process *process,
					    const struct zernel_task_state *state)
{
	const __u16 announces = ZERNEL_ANNOUNCES_DATA | ZERNEL_ANNOUNCES_UPDATES;

	return process->step_announcer_tid && !(state->tracker.flags & announces);
}

/* CPython's global lock changes hands at this interval, unless a program sets another one. */
#define PYTHON_LOCK_INTERVAL_NS 5000000ULL
#define FUTEX_CALL 202
#define FUTEX_OPERATION 127 /* without flags, such as that of the clock */
#define FUTEX_WAIT 0 /* mutexes of the C library, barriers of OpenMP */
#define FUTEX_CLOCK_REALTIME 256

/* The lock that a task blocks on, if the futex is of one. Waits for Python's lock end with that interval.
 * Semaphores and condition variables of the C library wait with another operation than mutexes. */
static __noinline __u8 lock_of_block(struct task_struct *task, __u64 now_ns)
{
	struct pt_regs *registers = (struct pt_regs *)bpf_task_pt_regs(task);
	unsigned long operation = registers->rsi;
	__u64 until[2] = {}, until_ns;

	if (registers->orig_rax != FUTEX_CALL)
		return SCHED_NO_LOCK;
	if ((operation & FUTEX_OPERATION) == FUTEX_WAIT)
		return SCHED_MUTEX;
	if (operation & FUTEX_CLOCK_REALTIME || !registers->r10 ||
	    bpf_probe_read_user(until, sizeof(until), (void *)registers->r10))
		return SCHED_NO_LOCK;
	until_ns = until[0] * 1000000000ULL + until[1];
	return until_ns - now_ns <= PYTHON_LOCK_INTERVAL_NS ? SCHED_PYTHON_LOCK : SCHED_NO_LOCK;
}

/* Whether the wake-up of a thread ended a wait for data of its process not long ago. */
static __always_inline bool has_handed_over_data(const struct sched_thread *run, __u64 now_ns)
{
	return run->ended_data_wait_ns && (__s64)(now_ns - run->ended_data_wait_ns) < (__s64)SCHED_ROLE_TIMEOUT_NS;
}

/* Whether a thread loads data: it belongs to a process that was forked for that, or its wake-up ended a
 * trainer's wait for data. A thread that announces optimizer steps does not. */
static __always_inline bool loads_data(const struct zernel_thread *thread,
				       const struct zernel_process *process,
				       const struct zernel_task_state *state, __u64 now_ns)
{
	return process->flags & ZERNEL_IS_LOADER ||
	       (has_handed_over_data(&thread->sched, now_ns) &&
		!(state->tracker.flags & ZERNEL_ANNOUNCES_UPDATES));
}

/* Whether the current task sleeps in a system call until a time is over. */
static __always_inline bool is_in_sleep_call(void)
{
	struct pt_regs *registers =
		(struct pt_regs *)bpf_task_pt_regs(bpf_get_current_task_btf());

	return registers->orig_rax == 35 /* nanosleep */ ||
	       registers->orig_rax == 230 /* clock_nanosleep */;
}

/* Whether a process only runs models, as far as was seen: PyTorch announces the batches, backward passes and
 * optimizer steps of training. Such a process waits for requests, also if processes that it forked make them. */
static __always_inline bool only_infers(const struct zernel_process *process)
{
	return process->flags & ZERNEL_RUNS_MODELS && !process->step_announcer_tid &&
	       !process->dist_sync.backward_since_ns;
}

/* The tracker's event. A trainer polls for data if it has loaders, else for requests, and a loader
 * polls for its next work. What a loader reads from a pipe is data, unless its trainer writes to it, and it
 * may sleep while it loads. A wait for Python's lock shows nothing: any thread of Python has such waits. */
static __always_inline __u8 event_of_block(const struct zernel_thread *thread,
					   const struct zernel_process *process,
					   const struct zernel_task_state *state,
					   __u64 now_ns)
{
	bool loads = loads_data(thread, process, state, now_ns);

	if (thread->sched.last_block_lock == SCHED_PYTHON_LOCK)
		return ZERNEL_BLOCK_OTHER;
	switch (thread->sched.last_block_reason) {
	case SCHED_BLOCKED_IO:
		return ZERNEL_BLOCK_IO;
	case SCHED_BLOCKED_NETWORK:
		return !loads && only_infers(process) ? ZERNEL_BLOCK_SLEEP : ZERNEL_BLOCK_IO;
	case SCHED_BLOCKED_FUTEX:
		return helps_step_announcer(process, state) ? ZERNEL_BLOCK_REQUEST :
							 ZERNEL_BLOCK_FUTEX;
	case SCHED_BLOCKED_POLL:
		if (loads || (process->loader_count && !only_infers(process)))
			return ZERNEL_BLOCK_POLL;
		return ZERNEL_BLOCK_SLEEP;
	case SCHED_BLOCKED_IPC:
		if (!loads)
			return only_infers(process) ? ZERNEL_BLOCK_SLEEP : ZERNEL_BLOCK_POLL;
		return thread->sched.is_woken_by_trainer ? ZERNEL_BLOCK_REQUEST : ZERNEL_BLOCK_IO;
	default:
		return !loads && is_in_sleep_call() ? ZERNEL_BLOCK_SLEEP : ZERNEL_BLOCK_OTHER;
	}
}

#endif
