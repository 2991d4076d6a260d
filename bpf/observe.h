/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the probes write and userspace reads, and how a probe finds its place in it.
 *
 * Processes, their counters and their histograms are arrays that userspace maps. A process has an
 * index from its first event on; its threads remember it, so that a pid that is used again, or a
 * program that executes another, is never taken for what was there before.
 *
 * Functions that take numbers only are global, and so verified once and not on every path to them.
 */
#ifndef ZERNEL_OBSERVE_H
#define ZERNEL_OBSERVE_H

#include "histogram.h"
#include "phase_tracker.h"
#include "work.h"

#define ZERNEL_PROCESSES 2048
#define ZERNEL_SYMBOLS 96
#define ZERNEL_HISTOGRAMS 4096
#define ZERNEL_ARGUMENTS 4
#define ZERNEL_CALL_DEPTH 8
#define ZERNEL_CONTEXT_DEPTH 8
#define ZERNEL_NONE 0xff

/* What a probe keeps of durations, per process. */
enum zernel_family {
	ZERNEL_LAUNCH_CALL,
	ZERNEL_STREAM_WAIT,
	ZERNEL_EVENT_WAIT,
	ZERNEL_CONTEXT_WAIT,
	ZERNEL_COPY_WAIT,
	ZERNEL_DATALOAD,
	ZERNEL_DIST_SYNC,
	ZERNEL_RUN_DELAY,
	ZERNEL_COLLECTIVE_ENQUEUE, /* and one for each of the operations after it */
	ZERNEL_COLLECTIVE_UNTIL_SYNC = ZERNEL_COLLECTIVE_ENQUEUE + 12, /* likewise */
	ZERNEL_FAMILIES = ZERNEL_COLLECTIVE_UNTIL_SYNC + 12,
};

/* The probe that a function belongs to. */
enum zernel_probe {
	ZERNEL_CUDA_TRACE,
	ZERNEL_CUDA_CONTEXT,
	ZERNEL_GPU_MEM,
	ZERNEL_NCCL,
	ZERNEL_TORCH,
};

enum zernel_symbol_flags {
	ZERNEL_HAS_RESULT = 1 << 0, /* 0 is success */
	ZERNEL_SAMPLED = 1 << 1, /* counts only while a window is open */
	ZERNEL_LAUNCHES = 1 << 2, /* gives work to the GPU */
	ZERNEL_BEGINS_LAUNCHES = 1 << 7, /* a copy that is taken for it, while launches are sampled */
};

/* What is done about once a step. */
enum zernel_mark {
	ZERNEL_MARK_OPTIMIZER = 1,
	ZERNEL_MARK_BACKWARD,
	ZERNEL_MARK_REDUCE,
	ZERNEL_MARK_GRAPH,
	ZERNEL_MARK_COPY_IN,
	ZERNEL_MARK_COPY_OUT,
	ZERNEL_MARK_WAIT,
};

/* What only training does, and what else is done with a GPU. */
enum zernel_mark_sort {
	ZERNEL_MARKS_TRAINING,
	ZERNEL_MARKS_USE,
	ZERNEL_MARK_SORTS,
};

/* A function that is probed, as a row of userspace's table. */
struct zernel_symbol {
	__u8 probe; /* enum zernel_probe */
	__u8 role; /* what that probe takes it for */
	__u8 family; /* enum zernel_family of its duration, or ZERNEL_NONE */
	__u8 enter_event; /* enum zernel_event, or ZERNEL_NONE */
	__u8 leave_event;
	__u8 flags; /* enum zernel_symbol_flags */
	__u8 bytes; /* which of the arguments kept counts as bytes, from 1; 0: none */
	__u8 mark; /* enum zernel_mark, or 0 */
	__u8 arguments[ZERNEL_ARGUMENTS]; /* which are kept, from 1; 0: none */
};

struct zernel_settings {
	struct zernel_tracker_config tracker;
	__u32 window_open; /* whether sampled functions count */
	__u32 reserved;
	__u64 taken_off_ns; /* when probes were last taken off that someone may have been in */
	__u64 events_from_ns; /* since when it is known what CUDA's events follow, for a while at least */
	__u64 events_sampled; /* whether that is so in windows only */
};

struct zernel_counter {
	__u64 calls;
	__u64 failed;
	__u64 bytes; /* of those that did not fail */
};

struct zernel_counters {
	struct zernel_counter of[ZERNEL_SYMBOLS];
};

enum zernel_process_flags {
	ZERNEL_SAW_INIT = 1 << 0, /* its first call was seen */
	ZERNEL_IS_LOADER = 1 << 1,
	ZERNEL_USED_DRIVER = 1 << 2, /* a call was seen that needs the driver initialised */
	ZERNEL_SEVERAL_DEVICES = 1 << 3, /* it has opened more than one */
};

/* Why a thread is off its CPU. */
enum zernel_block_reason {
	ZERNEL_BLOCKED_IO, /* a disk, a file system */
	ZERNEL_BLOCKED_NETWORK,
	ZERNEL_BLOCKED_IPC, /* a pipe, a unix socket, an eventfd */
	ZERNEL_BLOCKED_FUTEX,
	ZERNEL_BLOCKED_POLL,
	ZERNEL_BLOCKED_FAULT,
	ZERNEL_BLOCKED_OTHER,
	ZERNEL_BLOCK_REASONS,
};

struct zernel_process {
	__u64 start_ns; /* when it started, since boot: with the pid, who it is */
	__u64 first_ns; /* its first event */
	__u64 ended_ns; /* 0: it lives */
	__u64 busiest_hits; /* probes per second of its busiest thread; the reader resets it */
	__u64 hits; /* probes hit */
	__u32 pid;
	__u32 flags; /* enum zernel_process_flags */
	__u32 device; /* CUDA's number of the first device it opened, or ZERNEL_NO_GPU */
	__u32 trainer; /* index of the process that it loads data for, or 0 */
	__u32 histograms[ZERNEL_FAMILIES]; /* where they are; 0: none yet */
	__u64 on_cpu_ns; /* of all its threads, as all that follows */
	__u64 run_delay_ns; /* could run, and did not */
	__u64 calling_on_cpu_ns; /* the same two of its threads that make calls which are watched */
	__u64 calling_run_delay_ns;
	__u64 switches; /* off a CPU */
	__u64 blocked_ns[ZERNEL_BLOCK_REASONS];
	__u64 dataload_ns[ZERNEL_WORKS + 1]; /* waits for data by what was done meanwhile; nothing */
	__u64 own_work[ZERNEL_WORKS]; /* of its threads, see work.h */
	__u64 loader_work[ZERNEL_WORKS]; /* of the threads of its loaders */
	__u64 loaders; /* how many processes load data for it */
	__u64 phase_ns[ZERNEL_PHASES]; /* of its threads that drove steps and are gone */
	__u32 launches; /* since the last mark of a step */
	__u32 last_mark; /* enum zernel_mark, or 0 */
	__u64 marks_since_ns; /* since when they are counted */
	__u32 marks[ZERNEL_MARK_SORTS]; /* of steps, since then */
	__u32 marks_missing; /* sorts of which one was not told since the last one that was, as bits */
	__u32 reserved;
	__u64 exit_code; /* as its parent gets it to know, once it has ended */
};

/* What could not be kept, by cause. */
struct zernel_losses {
	__u64 processes; /* events of processes beyond ZERNEL_PROCESSES */
	__u64 histograms; /* durations beyond ZERNEL_HISTOGRAMS */
	__u64 calls; /* calls nested too deep, or whose return never came */
	__u64 allocations; /* memory beyond the map of allocations */
	__u64 memory_accounts; /* memory of call sites beyond the map of accounts */
	__u64 communicators; /* collectives of communicators beyond their map */
	__u64 threads; /* events of threads that got no storage */
	__u64 switches; /* of ML threads, that the kernel did not tell of and its accounts do not show */
	__u64 contexts; /* CUDA contexts that lie too deep below the current one */
	__u64 collectives; /* whose end was not seen before there were too many others */
};

struct zernel_open_call {
	__u64 stack; /* the stack pointer when it was entered */
	__u64 since_ns;
	__u64 caller; /* the address it returns to */
	__u64 arguments[ZERNEL_ARGUMENTS];
	__u64 noted; /* what the probe noted when it was entered */
	__u64 noted_too;
	__u32 symbol;
	__u32 reserved;
};

enum zernel_run_state {
	ZERNEL_NOT_SEEN,
	ZERNEL_ON_CPU,
	ZERNEL_RUNNABLE,
	ZERNEL_BLOCKED,
};

/* Where a thread is, for the scheduler. */
struct zernel_run {
	__u64 since_ns; /* when it came to be there */
	__u64 burst_ns; /* on a CPU since it last blocked, up to since_ns */
	__u64 delayed_ns; /* sched_info.run_delay when it blocked */
	__u64 recent_since_ns; /* the second that counts as recent next */
	__u64 recent_io_ns;
	__u32 recent_futex_waits;
	__u32 trainer; /* whose loader_work it counts in now, or 0 */
	__u8 state; /* enum zernel_run_state */
	__u8 reason; /* enum zernel_block_reason, of the last block */
	__u8 has_blocked; /* and was not told to be on a CPU again */
	__u8 awaits; /* enum zernel_awaited, of the last block */
	__u8 steps; /* makes calls that only a training loop makes */
	__u8 reserved[3];
};

enum zernel_awaited {
	ZERNEL_AWAITS_NOTHING,
	ZERNEL_AWAITS_DATA,
	ZERNEL_AWAITS_PEERS,
};

/* A wait of several blocks with short bursts between them. */
struct zernel_wait {
	__u64 since_ns; /* 0: none */
	__u64 until_ns; /* the end of its last block */
	__u64 cpu_ns; /* on a CPU since then */
	__u64 armed_ns; /* when a call was entered whose blocks are part of it; 0: none */
	__u64 work_before[ZERNEL_WORKS];
	__u64 work_after[ZERNEL_WORKS]; /* at until_ns */
	__u8 is_tentative; /* only a copy to the device makes it one */
	__u8 is_by_loaders; /* whose work it is */
	__u8 reserved[6];
};

struct zernel_thread {
	__u64 window_ns; /* since when hits are counted; 0: it has made no call that is watched */
	__u64 hits;
	__u64 context; /* the CUDA context that is current */
	__u64 copied_ns; /* when a copy ended that is taken for the beginning of launches */
	__u64 went_backward_ns; /* when a backward pass began, while launches are not seen */
	__u64 copies_nothing; /* whether it went backward twice and copied nothing in between */
	__u64 contexts_below[ZERNEL_CONTEXT_DEPTH]; /* those that are current again when it is popped */
	__u32 contexts_pushed; /* how many lie below, even if not all are kept */
	__u32 process; /* index; 0: none yet */
	__u32 depth;
	__u32 reserved;
	struct zernel_open_call calls[ZERNEL_CALL_DEPTH];
	struct zernel_run run;
	struct zernel_wait data;
	struct zernel_wait peers;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct zernel_settings);
} settings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ZERNEL_SYMBOLS);
	__type(key, __u32);
	__type(value, struct zernel_symbol);
} symbols SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct zernel_losses);
} losses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ZERNEL_PROCESSES);
	__type(key, __u32);
	__type(value, struct zernel_process);
} processes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ZERNEL_PROCESSES);
	__type(key, __u32);
	__type(value, struct zernel_counters);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ZERNEL_HISTOGRAMS);
	__type(key, __u32);
	__type(value, struct zernel_histogram);
} histograms SEC(".maps");

/* Indices that nobody uses. Index 0 stands for none. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, ZERNEL_PROCESSES);
	__type(value, __u32);
} free_processes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, ZERNEL_HISTOGRAMS);
	__type(value, __u32);
} free_histograms SEC(".maps");

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

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct zernel_thread);
} threads SEC(".maps");

/* The state that a scheduler reads: by itself, so that it can outlive this object. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct zernel_task_state);
} zernel_tasks SEC(".maps");

/* A sign of life: who reads the state of tasks can tell whether anyone still writes it. */
struct zernel_heartbeat {
	__u64 beat_ns;
	__u32 owner;
	__u32 reserved;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct zernel_heartbeat);
} zernel_heartbeats SEC(".maps");

static __always_inline void zernel_lost(__u64 *cause)
{
	__sync_fetch_and_add(cause, 1);
}

#define ZERNEL_LOST(cause)                                                                         \
	({                                                                                         \
		__u32 zero = 0;                                                                    \
		struct zernel_losses *all = bpf_map_lookup_elem(&losses, &zero);                   \
		if (all)                                                                           \
			zernel_lost(&all->cause);                                                  \
	})

static __always_inline struct zernel_settings *zernel_settings(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&settings, &zero);
}

static __always_inline struct zernel_process *zernel_process(__u32 index)
{
	return index ? bpf_map_lookup_elem(&processes, &index) : NULL;
}

/* A place for a process that has none. */
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
	/* Userspace takes a place for used once it has a pid. */
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

/* The index of a task's process, or 0. */
static __always_inline __u32 zernel_known_process(struct task_struct *task)
{
	struct zernel_process_key key = zernel_key_of(task);
	__u32 *index = bpf_map_lookup_elem(&process_indices, &key);

	return index ? *index : 0;
}

static __always_inline __u32 zernel_process_index(struct task_struct *task)
{
	struct zernel_process_key key = zernel_key_of(task);
	__u32 *index = bpf_map_lookup_elem(&process_indices, &key);

	return index ? *index : zernel_admit(key.start_ns, key.pid);
}

/* Its trainer has one loader less. */
static __always_inline void zernel_retire_loader(struct zernel_process *process)
{
	struct zernel_process *trainer;

	if (!(process->flags & ZERNEL_IS_LOADER))
		return;
	trainer = zernel_process(process->trainer);
	if (trainer && trainer->loaders)
		__sync_fetch_and_add(&trainer->loaders, -1ULL);
}

/* It does what only a trainer does: it was forked, but not to load data. */
static __always_inline void zernel_is_trainer(struct zernel_process *process)
{
	zernel_retire_loader(process);
	process->flags &= ~ZERNEL_IS_LOADER;
	process->trainer = 0;
}

/* Marks the process of a task as ended; false if it is not a known one. */
static __always_inline bool zernel_end_process(struct task_struct *task)
{
	struct zernel_process_key key = zernel_key_of(task);
	__u32 *index = bpf_map_lookup_elem(&process_indices, &key);
	struct zernel_process *process = index ? zernel_process(*index) : NULL;

	/* Of two threads that end at once, one ends the process. */
	if (!process || bpf_map_delete_elem(&process_indices, &key))
		return false;
	zernel_retire_loader(process);
	process->exit_code = (__u32)BPF_CORE_READ(task, exit_code);
	*(volatile __u64 *)&process->ended_ns = bpf_ktime_get_ns();
	return true;
}

/* Since 6.10. */
extern void bpf_preempt_disable(void) __weak __ksym;
extern void bpf_preempt_enable(void) __weak __ksym;

/*
 * What a map keeps of a task, for programs that can be preempted: whoever is preempted within the lookup keeps
 * everybody else on its CPU from creating anything, up to 6.18 at least.
 */
#define zernel_kept_of(map, task, create)                                                     \
	({                                                                                    \
		void *kept;                                                                   \
		if (bpf_ksym_exists(bpf_preempt_disable))                                     \
			bpf_preempt_disable();                                                \
		kept = bpf_task_storage_get(map, task, 0,                                     \
					    (create) ? BPF_LOCAL_STORAGE_GET_F_CREATE : 0);   \
		if (bpf_ksym_exists(bpf_preempt_enable))                                      \
			bpf_preempt_enable();                                                 \
		kept;                                                                         \
	})

/* The state of a task that is known to belong to an ML process. */
static __always_inline struct zernel_task_state *zernel_task(struct task_struct *task, __u64 now_ns)
{
	struct zernel_task_state *state = zernel_kept_of(&zernel_tasks, task, true);

	if (state && !state->phase_word) {
		state->pid = task->pid;
		state->tgid = task->tgid;
		state->gpu_id = ZERNEL_NO_GPU;
		state->flags = ZERNEL_TASK_IS_ML;
		zernel_track_begin(state, now_ns);
	}
	return state;
}

/* What is known of the current thread, which belongs to an ML process from now on. */
static __always_inline struct zernel_thread *zernel_current_thread(void)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct zernel_thread *thread = zernel_kept_of(&threads, task, true);

	if (!thread) {
		ZERNEL_LOST(threads);
		return NULL;
	}
	if (!thread->process) {
		thread->process = zernel_process_index(task);
		zernel_task(task, bpf_ktime_get_ns());
	}
	return thread;
}

/* How long the current thread has been on a CPU since it last blocked. */
static __always_inline __u64 zernel_burst_ns(struct zernel_thread *thread, __u64 now_ns)
{
	__u64 stretch_ns = thread->run.state == ZERNEL_ON_CPU ? now_ns - thread->run.since_ns : 0;

	return thread->run.burst_ns + stretch_ns + 1;
}

static __always_inline struct zernel_histogram *zernel_histogram(struct zernel_process *process,
								 __u32 family)
{
	__u32 *place;
	__u32 index = 0, winner;

	if (family >= ZERNEL_FAMILIES)
		return NULL;
	place = &process->histograms[family];
	index = *(volatile __u32 *)place;
	if (index)
		return bpf_map_lookup_elem(&histograms, &index);
	if (bpf_map_pop_elem(&free_histograms, &index))
		return NULL;
	winner = __sync_val_compare_and_swap(place, 0, index);
	if (winner) {
		bpf_map_push_elem(&free_histograms, &index, BPF_ANY);
		index = winner;
	}
	return bpf_map_lookup_elem(&histograms, &index);
}

__noinline int zernel_observe_duration(__u32 process_index, __u32 family, __u64 ns)
{
	struct zernel_process *process = zernel_process(process_index);
	struct zernel_histogram *histogram;

	if (!process)
		return 0;
	histogram = zernel_histogram(process, family);
	if (histogram)
		zernel_record(histogram, ns);
	else
		ZERNEL_LOST(histograms);
	return 0;
}

static __always_inline struct zernel_counter *zernel_counter(__u32 process, __u32 symbol)
{
	struct zernel_counters *own = bpf_map_lookup_elem(&counters, &process);
	/* Of 64 bits, because old verifiers lose the check of a copy of 32. */
	__u64 row = symbol;

	barrier_var(row);
	if (!own || row >= ZERNEL_SYMBOLS)
		return NULL;
	/* The verifier wants the check before the arithmetic, the compiler does not. */
	barrier_var(own);
	return &own->of[row];
}

/* Tells the tracker what the current thread did, that long on a CPU. */
__noinline int zernel_observe_event(__u64 now_ns, __u32 event, __u64 burst_ns)
{
	struct zernel_settings *set = zernel_settings();
	struct zernel_task_state *state = zernel_task(bpf_get_current_task_btf(), now_ns);

	if (!state || !set)
		return 0;
	state->cpu_burst_ns = burst_ns;
	zernel_track(&set->tracker, state, now_ns, event);
	if (event == ZERNEL_GPU_SYNC_LEAVE)
		state->last_gpu_sync_ns = now_ns;
	if (event == ZERNEL_COLLECTIVE_ENTER)
		state->flags |= ZERNEL_TASK_NCCL_ACTIVE;
	else if (event == ZERNEL_COLLECTIVE_LEAVE)
		state->flags &= ~ZERNEL_TASK_NCCL_ACTIVE;
	return 0;
}

#endif
