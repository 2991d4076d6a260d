/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Observed processes, in an array that userspace maps.
 *
 * A process gets an index with its first event and keeps it until userspace has read its exit.
 * Everything that belongs to a process (threads, loaders, entries of other maps) remembers its
 * handle: the index, and above it how often the index was used before. So neither a reused pid nor
 * an exec is mistaken for the process before it, and a late writer with the handle of an exited
 * process writes nowhere. Handle 0 means none.
 */
#ifndef ZERNEL_PROCESS_H
#define ZERNEL_PROCESS_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "btf.h"
#include "counter.h"
#include "duration_kind.h"
#include "limits.h"
#include "losses.h"
#include "mark.h"
#include "probe_parts.gen.h"
#include "task_state.h"
#include "tenant_of.h"
#include "tenants.h"

enum zernel_process_flags {
	ZERNEL_SAW_DRIVER_INIT = 1 << 0, /* its first call of the driver was seen */
	ZERNEL_IS_LOADER = 1 << 1, /* it was forked to load data */
	ZERNEL_USED_DRIVER = 1 << 2, /* it made a call that needs the driver initialised */
	ZERNEL_OPENED_SEVERAL_DEVICES = 1 << 3, /* it has opened more than one device */
	ZERNEL_ANNOUNCES_STEPS = 1 << 4, /* it announces its optimizer steps */
	ZERNEL_RUNS_MODELS = 1 << 5, /* PyTorch ran a layer of a model in it, or compiled a model */
};
ZERNEL_IN_BTF(enum, zernel_process_flags);

#define ZERNEL_COMM_BYTES 16

struct zernel_process {
	__u64 start_ns; /* when it started, since boot: identifies it together with the pid */
	__u64 first_event_ns; /* its first event */
	__u64 ended_ns; /* 0: it is alive */
	__u64 busiest_hits_per_second; /* probe hits per second of its busiest thread; userspace resets it */
	__u64 probe_hits;
	__u32 pid;
	__u32 flags; /* enum zernel_process_flags */
	__u32 device; /* CUDA's number of the first device it opened, or ZERNEL_NO_GPU */
	__u32 trainer_handle; /* handle of the process it loads data for, or 0 */
	__u32 process_handle; /* 0: the index is free */
	__u32 parent_pid; /* pid of its parent; this and the next two are those at its first event */
	__u32 uid; /* effective user */
	__u32 tenant; /* index of the tenant that its entries count for */
	__u32 step_announcer_tid; /* the thread that announces its steps, or 0 */
	__u32 reserved;
	__u64 is_uncounted; /* not 0: its calls are not counted; userspace sets it */
	__u64 is_sampled; /* not 0: its phases are those of the sampled rule; userspace sets it */
	__u64 misses_window; /* not 0: its sampled functions have no probes in the open sampling
			      * window; userspace sets it */
	__u64 gpu; /* number of its GPU plus 1, utilization in the upper half; userspace sets it */
	char comm[ZERNEL_COMM_BYTES]; /* name of its main thread */
	__u32 histograms[ZERNEL_DURATION_KINDS]; /* indices; 0: none yet */
	__u64 loader_count; /* how many processes load data for it */
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

/* Free handles, the one that was freed first at the head. Userspace frees a handle by adding that
 * of the next use of its index. */
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
} process_handles SEC(".maps");

/* The process with a handle; NULL if it has exited and its index was freed. */
static __always_inline struct zernel_process *zernel_process(__u32 handle)
{
	__u32 index = zernel_process_index(handle);
	struct zernel_process *process;

	if (!handle)
		return NULL;
	process = bpf_map_lookup_elem(&processes, &index);
	return process && process->process_handle == handle ? process : NULL;
}

/* Whether a process may get another entry of a table. Global, like the next one: inlined, it would
 * take stack of its callers. */
__noinline int zernel_process_may_add_entry(__u32 handle, __u32 table)
{
	struct zernel_process *process = zernel_process(handle);

	return process && zernel_may_add_entry(process->tenant, table);
}

/* Counts entries of a process that were added, or deleted with a negative change. */
__noinline int zernel_count_process_entries(__u32 handle, __u32 table, __s64 change)
{
	struct zernel_process *process = zernel_process(handle);

	if (process)
		zernel_count_entries(process->tenant, table, change);
	return 0;
}

/* Clears a record before its first use: a thread of the process before may have written to it after
 * userspace read it for the last time. */
static __always_inline struct zernel_process *zernel_clear_process_record(__u32 index)
{
	static const struct zernel_process no_process;
	static const struct zernel_counters no_counters;

	bpf_map_update_elem(&processes, &index, &no_process, BPF_ANY);
	bpf_map_update_elem(&counters, &index, &no_counters, BPF_ANY);
	return bpf_map_lookup_elem(&processes, &index);
}

/* Gives a process a handle; 0 if none is free for its tenant. Its first event is at `first_ns`. Global, so that the
 * verifier checks it once. */
__noinline __u32 zernel_allocate_process_handle(__u64 start_ns, __u64 first_ns, __u32 pid, __u32 uid, __u32 tenant)
{
	struct zernel_process_key key = { .start_ns = start_ns, .pid = pid };
	__u32 handle = 0;
	struct zernel_process *process;

	if (!zernel_may_add_entry(tenant, ZERNEL_PROCESS_TABLE))
		return 0;
	if (bpf_map_pop_elem(&free_processes, &handle)) {
		ZERNEL_COUNT_LOST(processes);
		return 0;
	}
	process = zernel_clear_process_record(zernel_process_index(handle));
	if (!process)
		return 0;
	process->start_ns = start_ns;
	process->first_event_ns = first_ns;
	process->device = ZERNEL_NO_GPU;
	process->uid = uid;
	process->tenant = tenant;
	*(volatile __u32 *)&process->process_handle = handle;
	if (bpf_map_update_elem(&process_handles, &key, &handle, BPF_NOEXIST)) {
		__u32 *winner = bpf_map_lookup_elem(&process_handles, &key);

		process->process_handle = 0;
		bpf_map_push_elem(&free_processes, &handle, BPF_ANY);
		return winner ? *winner : 0;
	}
	zernel_count_entries(tenant, ZERNEL_PROCESS_TABLE, 1);
	return handle;
}

static __always_inline struct zernel_process_key zernel_process_key_of(struct task_struct *task)
{
	return (struct zernel_process_key){
		.start_ns = BPF_CORE_READ(task, group_leader, start_boottime),
		.pid = task->tgid,
	};
}

/* The handle of a task's process; 0 if it has none. */
static __always_inline __u32 zernel_find_process_handle(struct task_struct *task)
{
	struct zernel_process_key key = zernel_process_key_of(task);
	__u32 *handle = bpf_map_lookup_elem(&process_handles, &key);

	return handle ? *handle : 0;
}

/* Gives the process of a task, which has its first event at `now_ns`, a handle and its name. */
static __noinline __u32 zernel_register_process(struct task_struct *task, __u64 now_ns)
{
	struct zernel_process_key key = zernel_process_key_of(task);
	__u32 uid = BPF_CORE_READ(task, group_leader, cred, euid.val);
	__u32 tenant = zernel_tenant_of(task);
	__u32 handle = zernel_allocate_process_handle(key.start_ns, now_ns, key.pid, uid, tenant);
	struct zernel_process *process = zernel_process(handle);

	if (!process || process->pid)
		return handle;
	process->parent_pid = BPF_CORE_READ(task, group_leader, real_parent, tgid);
	BPF_CORE_READ_INTO(&process->comm, task, group_leader, comm);
	/* Last: userspace reads a record once it has a pid. */
	*(volatile __u32 *)&process->pid = key.pid;
	return handle;
}

/* The handle of a task's process, which gets one if it has none: it has an event at `now_ns`. */
static __always_inline __u32 zernel_get_or_create_handle(struct task_struct *task, __u64 now_ns)
{
	__u32 handle = zernel_find_process_handle(task);

	return handle ? handle : zernel_register_process(task, now_ns);
}

/* Whether a process uses a GPU. Which one is not known if it opened its device before its calls
 * were observed. */
static __always_inline bool zernel_uses_gpu(const struct zernel_process *process)
{
	return process->device != ZERNEL_NO_GPU || process->flags & ZERNEL_USED_DRIVER;
}

/* Removes a process from its trainer's count of loaders. */
static __always_inline void zernel_uncount_loader(struct zernel_process *process)
{
	struct zernel_process *trainer;

	if (!(process->flags & ZERNEL_IS_LOADER))
		return;
	trainer = zernel_process(process->trainer_handle);
	if (trainer && trainer->loader_count)
		__sync_fetch_and_add(&trainer->loader_count, -1ULL);
}

/* Turns a loader into a trainer: the process was forked, but not to load data. */
static __always_inline void zernel_turn_loader_into_trainer(struct zernel_process *process)
{
	zernel_uncount_loader(process);
	process->flags &= ~ZERNEL_IS_LOADER;
	process->trainer_handle = 0;
}

/* Whether the last thread of a task's process exits or has exited. */
static __always_inline bool zernel_has_exited(struct task_struct *task)
{
	return BPF_CORE_READ(task, signal, live.counter) == 0;
}

/* Marks the process of a task as ended; false if it has no handle. */
static __always_inline bool zernel_end_process(struct task_struct *task)
{
	struct zernel_process_key key = zernel_process_key_of(task);
	struct zernel_process *process = zernel_process(zernel_find_process_handle(task));

	/* When two threads exit at once, the one that deletes the key ends the process. */
	if (!process || bpf_map_delete_elem(&process_handles, &key))
		return false;
	zernel_uncount_loader(process);
	process->exit_code = (__u32)BPF_CORE_READ(task, exit_code);
	*(volatile __u64 *)&process->ended_ns = bpf_ktime_get_ns();
	return true;
}

#endif
