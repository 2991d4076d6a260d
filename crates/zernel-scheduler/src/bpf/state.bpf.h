/* SPDX-License-Identifier: GPL-2.0-only */
/* What the scheduler remembers of tasks and CPUs. */
#ifndef ZERNEL_SCHED_STATE_H
#define ZERNEL_SCHED_STATE_H

#include "bandwidth.bpf.h"
#include "cgroup.bpf.h"
#include "clock.bpf.h"
#include "globals.bpf.h"
#include "statistics.bpf.h"
#include "tenant.bpf.h"

/* In place of the number of a CPU: a task's virtual time belongs to the shared clock. */
#define SHARED_CLOCK (~0U)

/* The queues: see queue.bpf.h. */
#define THROTTLED_QUEUE 0ULL
#define LLC_QUEUE(llc) (0x10000ULL + (llc))
#define CPU_QUEUE(cpu) (0x20000ULL + (cpu))
/* The queue of a rank beside one of these. */
#define RANK_QUEUE(queue, rank) ((queue) + 0x100000ULL * (rank))

/* The number of a CPU is masked, and queues of CPUs lie between those of caches and those of ranks. */
_Static_assert((MAX_CPUS & (MAX_CPUS - 1)) == 0, "a power of two");
_Static_assert(MAX_LLCS <= 0x10000 && MAX_CPUS <= 0x10000, "queues do not overlap");

/* Tasks with a higher rank go first, as far as the guarantee allows. */
enum rank {
	RANK_ORDINARY,
	RANK_FEED, /* loads data that its trainer waits for, or soon will */
	RANK_CRITICAL, /* a step waits for it */
};

/* The last two lengths of something that repeats. */
struct last_two_lengths {
	__u64 last_ns;
	__u64 previous_ns;
};

struct task {
	__u32 cgroup_node; /* of its cgroup */
	__u32 counted_weight; /* the weight that is counted there; 0 while it sleeps */
	__u32 clock_id; /* the clock of its virtual time: SHARED_CLOCK or a CPU */
	__u32 pinned_weight; /* counted at that CPU */
	__u32 ordinary_weight; /* counted in the sum of that name */
	bool has_yielded;
	bool is_throttled; /* it waits for a budget of cpu.max, not for a CPU */
	bool waits_for_thread; /* a critical thread that waits for another thread: see siblings.bpf.h */
	bool in_privileged_tree; /* it is, or descends from, settings.privileged_process */
	__u8 class; /* enum zernel_class; as seen when it began to run, or at the last tick */
	__u8 rank; /* enum rank; RANK_ORDINARY also if the guarantee does not let it go first */
	__u64 charged_ns; /* its running time is charged up to here */
	__u64 woken_ns; /* when it woke up; 0: it has run since */
	__u64 runnable_ns; /* when it last woke up or stopped running */
	__u64 blocked_ns; /* when it last blocked */
	__u64 vtime_before_aging; /* 0: it was not moved to the front of its queue since it last ran */
	__u64 share_vtime; /* virtual time by the shared clock of a pinned task that goes first */
	/* GPU waits of a training thread: see lend.bpf.h. */
	__u64 gpu_wait_since_ns; /* since when it spins until the GPU is done; 0: it does not */
	__u64 gpu_wait_ended_ns; /* when the last wait ended */
	struct last_two_lengths gpu_waits;
	struct last_two_lengths between_gpu_waits; /* from the end of a wait to the next one */
	/* Hand-off: see handoff.bpf.h. */
	__u32 rank_donor; /* the thread that it inherits from */
	__u32 handoff_number; /* number of the hand-off in its process */
	__u64 inherits_until_ns; /* 0: it does not inherit */
	/* State of the whole process. Only the struct of its main thread uses these fields. */
	__u32 handoff_count;
	__u32 last_training_tid; /* the training thread that was last seen */
	__s32 waiting_critical_threads; /* its critical threads that wait for another thread */
	__u64 data_wait_ended_ns; /* when a training thread last stopped waiting for data */
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct task);
} tasks SEC(".maps");

/* The running task as others see it, and the clock of the tasks that can run on this CPU only. */
struct cpu {
	__u64 start_vtime; /* of the running task when it started, by the shared clock */
	__u64 running_since_ns;
	__u64 running_weight; /* effective; 0: nothing runs */
	struct clock pinned_clock;
	__u64 offset_to_shared_clock; /* added to a virtual time by `pinned_clock`, gives one by the shared clock */
	__s64 pinned_weight; /* of the runnable tasks that can run on this CPU only */
	__u32 next_cache; /* which other cache to look at next */
	bool loader_waits_too_long; /* a loader that it could run has waited for too long */
	bool runs_pinned;
	bool is_ordinary; /* counted in ordinary_cpus */
	bool is_lost; /* counted in lost_cpus: a task of a higher scheduling class runs */
	bool task_waits_too_long; /* a task that it could run has waited for too long */
	__u8 rank; /* of the running task, of one that is about to run, or of the lender */
	bool is_lent; /* a borrower runs, and the lender waits in the local queue */
	bool lend_timer_runs; /* its timer looks at the running task */
	__u64 turn_ns; /* the length of the borrower's turn */
	__u32 lender_tid; /* the thread that lends the CPU, or is about to; 0: none */
} __attribute__((aligned(64)));

static struct cpu cpus[MAX_CPUS];
static struct clock shared_clock;
/* CPUs that run an ordinary task, and the effective weights of those that are runnable. Tasks that
 * can run on one CPU only do not count. */
static __s64 ordinary_cpus, ordinary_weight;
/* The CPU time of the guarantee that ordinary tasks have not got yet, and until when it is counted. */
static __s64 promised_ordinary_ns;
static __u64 promised_up_to_ns;
/* Whether an ordinary task waits, and so loses what a task that goes first takes beyond its share. */
static bool ordinary_task_waits;
/* The CPU to look at next for a task to preempt. */
static __u32 next_preemption_candidate;

/* The mask shows the verifier that the index is in range: the loader refuses machines with more
 * CPUs. */
static struct cpu *cpu_at(__u64 cpu)
{
	return &cpus[cpu & (MAX_CPUS - 1)];
}

static struct task *task_of(struct task_struct *p)
{
	return bpf_task_storage_get(&tasks, p, 0, 0);
}

/* The state of the main thread of a task's process. */
static struct task *process_state_of(struct task_struct *p)
{
	struct task_struct *leader = p->group_leader;

	return leader ? bpf_task_storage_get(&tasks, leader, 0, 0) : NULL;
}

static struct clock *clock_of(const struct task *task)
{
	return task->clock_id == SHARED_CLOCK ? &shared_clock : &cpu_at(task->clock_id)->pinned_clock;
}

/* A task's virtual time, by the shared clock. */
static __u64 comparable_vtime(const struct task_struct *p, const struct task *task)
{
	__u64 vtime = p->scx.dsq_vtime;

	return task->clock_id == SHARED_CLOCK ? vtime : vtime + cpu_at(task->clock_id)->offset_to_shared_clock;
}

static bool is_privileged(const struct task_struct *p, const struct task *task)
{
	switch (settings.privilege) {
	case PRIVILEGE_ALL:
		return true;
	case PRIVILEGE_CGROUP:
		return is_in_privileged_cgroup(task->cgroup_node);
	case PRIVILEGE_TREE:
		return task->in_privileged_tree;
	case PRIVILEGE_USER:
		return BPF_CORE_READ(p, real_cred, uid.val) == settings.privileged_id;
	default:
		return false;
	}
}

static __u64 weight_of(const struct task *task)
{
	return effective_weight(task->cgroup_node, task->counted_weight ?: DEFAULT_WEIGHT);
}

/* The virtual time of running for `ns` with an effective weight. */
static __u64 virtual_time(__u64 ns, __u64 weight)
{
	return ns * ((__u64)DEFAULT_WEIGHT << WEIGHT_SHIFT) / weight;
}

/* The time in which a task of an effective weight advances by `vtime`. */
static __u64 real_time(__u64 vtime, __u64 weight)
{
	/* Half of the shift now, half later: the product would overflow. */
	return vtime * (weight >> WEIGHT_SHIFT / 2) / ((__u64)DEFAULT_WEIGHT << WEIGHT_SHIFT / 2);
}

/* Counts a task as runnable with this weight; 0: as sleeping. */
static void count_runnable_task(struct task *task, __u32 weight)
{
	__s64 difference = (__s64)weight - task->counted_weight;

	task->counted_weight = weight;
	if (difference)
		add_runnable_weight(task->cgroup_node, difference);
}

/* Counts a task among the runnable ordinary ones, or no longer. */
static void count_ordinary_weight(struct task *task, bool is_ordinary)
{
	__u32 weight = 0;
	__s64 difference;

	if (!settings.may_privilege)
		return;
	if (is_ordinary && task->clock_id == SHARED_CLOCK)
		weight = weight_of(task) >> WEIGHT_SHIFT ?: 1;
	difference = (__s64)weight - task->ordinary_weight;
	task->ordinary_weight = weight;
	if (difference)
		__sync_fetch_and_add(&ordinary_weight, difference);
}

/* Whether an ordinary task waits that has the clock of this one. */
static bool ordinary_task_waits_on_clock(const struct task *task)
{
	return task->clock_id == SHARED_CLOCK ? ordinary_task_waits :
					     scx_bpf_dsq_nr_queued(CPU_QUEUE(task->clock_id)) > 0;
}

/* Whether a task advances its clock. Critical threads do not, and loaders only while no ordinary
 * task waits: if the clock stood still, a loader that is ahead of it would wait for all others. */
static bool advances_clock(const struct task *task)
{
	return task->rank == RANK_ORDINARY || (task->rank == RANK_FEED && !ordinary_task_waits_on_clock(task));
}

/* Notes what a pinned task that goes first takes beyond its share of all CPUs. The clock of its CPU
 * only shows what it takes from the tasks that are pinned there. */
static void add_debt_of_pinned_task(struct task *task, __u64 used_ns, __u64 weight)
{
	__u64 earliest = shared_clock.now - virtual_time(settings.slice_ns, weight);
	__s64 beyond;

	if (is_before(task->share_vtime, earliest))
		task->share_vtime = earliest;
	task->share_vtime += virtual_time(used_ns, weight);
	beyond = task->share_vtime - shared_clock.now;
	if (beyond <= 0)
		return;
	task->share_vtime = shared_clock.now;
	if (ordinary_task_waits)
		add_tenant_debt(task->cgroup_node, real_time(beyond, weight));
}

/* Advances the virtual time of a task that ran. The guarantee bounds what a task takes that goes
 * first, so it need not wait for it afterwards: its tenant owes it. */
static void advance_task_vtime(struct task_struct *p, struct task *task, __u64 used_ns)
{
	const struct clock *clock = clock_of(task);
	bool is_shared = clock == &shared_clock;
	__u64 weight = weight_of(task);
	__u64 taken_ns;
	__s64 beyond;

	if (!task->rank && is_shared && is_privileged(p, task))
		used_ns += repay_tenant_debt(task->cgroup_node, clock, used_ns);
	if (task->rank && !is_shared)
		add_debt_of_pinned_task(task, used_ns, weight);
	set_vtime(p, p->scx.dsq_vtime + virtual_time(used_ns, weight));
	beyond = p->scx.dsq_vtime - clock->now;
	if (beyond <= 0 || advances_clock(task))
		return;
	set_vtime(p, clock->now);
	/* What a loader took before, while nobody waited, is not owed. */
	taken_ns = real_time(beyond, weight);
	if (is_shared && ordinary_task_waits)
		add_tenant_debt(task->cgroup_node, taken_ns < used_ns ? taken_ns : used_ns);
}

/* Charges the running task for the time since it was last charged. */
static void charge_task(struct task_struct *p, struct task *task, __u64 now_ns)
{
	__u64 used_ns = now_ns - task->charged_ns;

	if ((__s64)used_ns <= 0)
		return;
	task->charged_ns = now_ns;
	advance_task_vtime(p, task, used_ns);
	charge_budgets(task->cgroup_node, used_ns);
	count_run_time(task->class, used_ns);
	count_tenant_time(task->cgroup_node, used_ns);
}

/* Notes which task starts to run, or is about to. */
static void set_running_task(struct cpu *cpu, __u64 vtime, __u64 now_ns, __u64 weight)
{
	cpu->start_vtime = vtime;
	cpu->running_since_ns = now_ns;
	cpu->running_weight = weight;
}

/* The virtual time of a CPU's running task by now. */
static __u64 running_vtime(const struct cpu *cpu, __u64 now_ns)
{
	__s64 ran_ns = now_ns - cpu->running_since_ns;

	return cpu->start_vtime + virtual_time(ran_ns > 0 ? ran_ns : 0, cpu->running_weight ?: 1);
}

#endif
