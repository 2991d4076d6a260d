/* SPDX-License-Identifier: GPL-2.0-only */
/* State of the sched probe: run states of threads, and times of processes by run state. */
#ifndef SCHED_STATE_BPF_H
#define SCHED_STATE_BPF_H

#include "kernel.h"
#include "btf.h"

/* For about a minute after a probed call, a thread counts as making calls: sampling windows are closer together than
 * this. For as long after it ended a wait for data, it counts as loading data. */
#define SCHED_ROLE_TIMEOUT_NS (60ULL << 30)

enum sched_block_reason {
	SCHED_BLOCKED_IO, /* a disk or a file system */
	SCHED_BLOCKED_NETWORK,
	SCHED_BLOCKED_IPC, /* a pipe, a unix socket, an eventfd */
	SCHED_BLOCKED_FUTEX,
	SCHED_BLOCKED_POLL,
	SCHED_BLOCKED_FAULT, /* a page */
	SCHED_BLOCKED_OTHER,
	SCHED_BLOCK_REASONS, /* how many there are */
};
ZERNEL_IN_BTF(enum, sched_block_reason);

/* Sums over all threads of a process. */
struct sched_process {
	__u64 on_cpu_ns;
	__u64 run_delay_ns; /* runnable and not running */
	__u64 calling_on_cpu_ns; /* the same two for threads that make probed calls */
	__u64 calling_run_delay_ns;
	__u64 switches; /* off a CPU */
	__u64 caller_on_cpu; /* the last thread that was switched in and makes probed calls, or 0 */
	__u64 caller_left_ns; /* when a thread that makes probed calls last left its CPU */
	__u64 blocked_ns[SCHED_BLOCK_REASONS];
};

enum sched_run_state {
	SCHED_STATE_UNKNOWN,
	SCHED_ON_CPU,
	SCHED_RUNNABLE,
	SCHED_BLOCKED,
};

/* What the last block of a thread waited for. */
enum sched_awaited {
	SCHED_AWAITS_NOTHING,
	SCHED_AWAITS_DATA,
	SCHED_AWAITS_PEERS,
};

/* A thread that releases a lock hands over nothing. */
enum sched_lock {
	SCHED_NO_LOCK,
	SCHED_PYTHON_LOCK, /* CPython's global one */
	SCHED_MUTEX,
};

/* What the thread that ended a block does for the one that was blocked. */
enum sched_handed {
	SCHED_HANDED_NOTHING, /* it is not known */
	SCHED_HANDED_DATA, /* it loads data */
	SCHED_HANDED_COLLECTIVE, /* it was in a collective meanwhile */
};

struct sched_thread {
	__u64 since_ns; /* when it entered `run_state` */
	__u64 burst_ns; /* on a CPU since it last blocked, up to since_ns */
	__u64 run_delay_at_block_ns; /* sched_info.run_delay when it blocked */
	__u64 recent_since_ns; /* start of the second that is being measured */
	__u64 recent_io_ns;
	__u64 ended_data_wait_ns; /* when its wake-up last ended a wait for data of its process, or 0 */
	__u32 recent_futex_waits;
	__u32 counting_trainer; /* handle of the process whose loader_work counts it now, or 0 */
	__u8 run_state; /* enum sched_run_state */
	__u8 last_block_reason; /* enum sched_block_reason of the last block */
	__u8 has_blocked; /* it blocked and has not been seen on a CPU since */
	__u8 last_block_awaits; /* enum sched_awaited of the last block */
	__u8 last_block_lock; /* enum sched_lock: what the last block on a futex is for */
	__u8 handed_by_waker; /* enum sched_handed: what ended its last block; written when it is woken up */
	__u8 is_woken_by_trainer; /* its trainer woke it up */
	__u8 reserved;
};

#endif
