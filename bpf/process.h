/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Observed processes, in an array that userspace maps.
 *
 * A process gets its index with its first event and keeps it until userspace has read its exit.
 * Threads remember the index, so neither a reused pid nor an exec is mistaken for the process
 * before it. Index 0 means none.
 */
#ifndef ZERNEL_PROCESS_H
#define ZERNEL_PROCESS_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "btf.h"
#include "family.h"
#include "limits.h"
#include "losses.h"
#include "mark.h"
#include "probe_parts.gen.h"
#include "task_state.h"

enum zernel_process_flags {
	ZERNEL_SAW_INIT = 1 << 0, /* its first call of the driver was seen */
	ZERNEL_IS_LOADER = 1 << 1, /* it was forked to load data */
	ZERNEL_USED_DRIVER = 1 << 2, /* it made a call that needs the driver initialised */
	ZERNEL_SEVERAL_DEVICES = 1 << 3, /* it has opened more than one device */
};
ZERNEL_IN_BTF(enum, zernel_process_flags);

struct zernel_process {
	__u64 start_ns; /* when it started, since boot: identifies it together with the pid */
	__u64 first_ns; /* its first event */
	__u64 ended_ns; /* 0: it is alive */
	__u64 busiest_hits; /* probe hits per second of its busiest thread; userspace resets it */
	__u64 hits; /* probe hits */
	__u32 pid;
	__u32 flags; /* enum zernel_process_flags */
	__u32 device; /* CUDA's number of the first device it opened, or ZERNEL_NO_GPU */
	__u32 trainer; /* index of the process it loads data for, or 0 */
	__u32 histograms[ZERNEL_FAMILIES]; /* indices; 0: none yet */
	__u64 loaders; /* how many processes load data for it */
	__u64 phase_ns[ZERNEL_PHASES]; /* of its training threads that have exited */
	__u64 exit_code; /* as its parent gets it, once it has ended */
	struct zernel_process_marks marks;
	ZERNEL_PROCESS_PARTS /* one struct for each probe that keeps state per process */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ZERNEL_PROCESSES);
	__type(key, __u32);
	__type(value, struct zernel_process);
} processes SEC(".maps");

/* Free indices. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, ZERNEL_PROCESSES);
	__type(value, __u32);
} free_processes SEC(".maps");

struct zernel_process_key {
	__u64 start_ns;
	__u32 pid;
	__u32 reserved;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ZERNEL_PROCESSES);
	__type(key, struct zernel_process_key);
	__type(value, __u32);
} process_indices SEC(".maps");

static __always_inline struct zernel_process *zernel_process(__u32 index)
{
	return index ? bpf_map_lookup_elem(&processes, &index) : NULL;
}

/* Gives a process an index; 0 if none is free. Global, so that the verifier checks it once. */
__noinline __u32 zernel_admit(__u64 start_ns, __u32 pid)
{
	struct zernel_process_key key = { .start_ns = start_ns, .pid = pid };
	struct zernel_process *process;
	__u32 index = 0;

	if (bpf_map_pop_elem(&free_processes, &index)) {
		ZERNEL_LOST(processes);
		return 0;
	}
	process = zernel_process(index);
	if (!process)
		return 0;
	process->start_ns = start_ns;
	process->first_ns = bpf_ktime_get_ns();
	process->device = ZERNEL_NO_GPU;
	/* Last: userspace takes an index for used once it has a pid. */
	*(volatile __u32 *)&process->pid = pid;
	if (bpf_map_update_elem(&process_indices, &key, &index, BPF_NOEXIST)) {
		__u32 *winner = bpf_map_lookup_elem(&process_indices, &key);

		process->pid = 0;
		bpf_map_push_elem(&free_processes, &index, BPF_ANY);
		return winner ? *winner : 0;
	}
	return index;
}

static __always_inline struct zernel_process_key zernel_key_of(struct task_struct *task)
{
	return (struct zernel_process_key){
		.start_ns = BPF_CORE_READ(task, group_leader, start_boottime),
		.pid = task->tgid,
	};
}

/* The index of a task's process; 0 if it has none. */
static __always_inline __u32 zernel_known_process(struct task_struct *task)
{
	struct zernel_process_key key = zernel_key_of(task);
	__u32 *index = bpf_map_lookup_elem(&process_indices, &key);

	return index ? *index : 0;
}

/* The index of a task's process, which gets one if it has none. */
static __always_inline __u32 zernel_process_index(struct task_struct *task)
{
	struct zernel_process_key key = zernel_key_of(task);
	__u32 *index = bpf_map_lookup_elem(&process_indices, &key);

	return index ? *index : zernel_admit(key.start_ns, key.pid);
}

/* Removes a process from its trainer's count of loaders. */
static __always_inline void zernel_retire_loader(struct zernel_process *process)
{
	struct zernel_process *trainer;

	if (!(process->flags & ZERNEL_IS_LOADER))
		return;
	trainer = zernel_process(process->trainer);
	if (trainer && trainer->loaders)
		__sync_fetch_and_add(&trainer->loaders, -1ULL);
}

/* Turns a loader into a trainer: the process was forked, but not to load data. */
static __always_inline void zernel_make_trainer(struct zernel_process *process)
{
	zernel_retire_loader(process);
	process->flags &= ~ZERNEL_IS_LOADER;
	process->trainer = 0;
}

/* Marks the process of a task as ended; false if it has no index. */
static __always_inline bool zernel_end_process(struct task_struct *task)
{
	struct zernel_process_key key = zernel_key_of(task);
	__u32 *index = bpf_map_lookup_elem(&process_indices, &key);
	struct zernel_process *process = index ? zernel_process(*index) : NULL;

	/* When two threads exit at once, the one that deletes the key ends the process. */
	if (!process || bpf_map_delete_elem(&process_indices, &key))
		return false;
	zernel_retire_loader(process);
	process->exit_code = (__u32)BPF_CORE_READ(task, exit_code);
	*(volatile __u64 *)&process->ended_ns = bpf_ktime_get_ns();
	return true;
}

#endif
