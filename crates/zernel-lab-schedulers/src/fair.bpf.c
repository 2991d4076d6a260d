// SPDX-License-Identifier: GPL-2.0-only
/*
 * A scheduler with one queue for all CPUs, ordered by virtual time and weighted by nice values. It ignores
 * cgroups and caches and has no wake-up preemption, so a comparison with it shows what these are worth.
 *
 * The constant `fault` breaks the scheduler in one known way. The lab's tests show that each fault is found.
 */
#include "sched_ext.bpf.h"

char LICENSE[] SEC("license") = "GPL";

enum fault {
	NO_FAULT,
	/* One task in four runs only when no other task wants to. */
	STARVE,
	/* Tasks are queued for CPUs that their cpuset or affinity excludes. */
	IGNORE_CPUSETS,
	/* The queue is not served any more, one second after the scheduler was loaded. */
	STALL,
	/* No task is ever queued. */
	NEVER_DISPATCH,
	/* The tasks of one cgroup are charged a quarter of the time that they use. */
	LEAK_TO_CGROUP,
	/* One wake-up in 200 is forgotten. */
	LOSE_WAKEUP,
};

/* The constant has a section of its own, which the loader finds by name. */
const volatile __u32 fault SEC(".rodata.fault") = NO_FAULT;

enum {
	SHARED_QUEUE = 0,
	/* CPUs take tasks from this queue only while SHARED_QUEUE is empty. */
	STARVED_QUEUE = 1,
};

#define SECOND_NS 1000000000ULL
#define NICE_0_WEIGHT 100

static __u64 max_running_vtime;
static __u64 loaded_at_ns;
static __u64 user_task_wakeup_count;
static __u64 favoured_cgroup;

/* Why the kernel or the user ended the scheduler. */
struct {
	__u32 kind;
	char message[256];
} ending SEC(".data.ending") = {};

static bool is_user_task(const struct task_struct *p)
{
	return !(p->flags & PF_KTHREAD);
}

/* The id of a task's cgroup; 0 for the root. */
static __u64 cgroup_id_of_task(struct task_struct *p)
{
	struct cgroup *cgroup = scx_bpf_task_cgroup(p);
	__u64 id;

	if (!cgroup)
		return 0;
	id = cgroup->level > 0 ? cgroup->kn->id : 0;
	bpf_cgroup_release(cgroup);
	return id;
}

/* Whether a task is in the cgroup that LEAK_TO_CGROUP favours: the first one below the root that runs. */
static bool is_in_favoured_cgroup(struct task_struct *p)
{
	__u64 id = cgroup_id_of_task(p);

	if (!id)
		return false;
	if (!favoured_cgroup)
		favoured_cgroup = id;
	return id == favoured_cgroup;
}

__s32 CALLBACK(fair_select_cpu, struct task_struct *p, __s32 prev_cpu, __u64 wake_flags)
{
	bool is_idle = false;
	__s32 cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, &is_idle);

	if (is_idle && fault != NEVER_DISPATCH && fault != LOSE_WAKEUP && fault != STARVE &&
	    fault != STALL)
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, SCX_SLICE_DFL, 0);
	return cpu;
}

void CALLBACK(fair_enqueue, struct task_struct *p, __u64 enq_flags)
{
	__u64 vtime = p->scx.dsq_vtime;
	__u64 queue = SHARED_QUEUE;

	if (fault == NEVER_DISPATCH)
		return;
	if (fault == LOSE_WAKEUP && (enq_flags & SCX_ENQ_WAKEUP) && is_user_task(p) && ++user_task_wakeup_count % 200 == 0)
		return;
	if (fault == IGNORE_CPUSETS && is_user_task(p)) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL_ON | (p->pid % scx_bpf_nr_cpu_ids()),
				   SCX_SLICE_DFL, enq_flags);
		return;
	}
	if (fault == STARVE && is_user_task(p) && p->pid % 4 == 1)
		queue = STARVED_QUEUE;
	/* A task that slept may be behind the other tasks' virtual time by at most one slice. */
	if ((__s64)(vtime - (max_running_vtime - SCX_SLICE_DFL)) < 0)
		vtime = max_running_vtime - SCX_SLICE_DFL;
	scx_bpf_dsq_insert_vtime(p, queue, SCX_SLICE_DFL, vtime, enq_flags);
}

void CALLBACK(fair_dispatch, __s32 cpu, struct task_struct *prev)
{
	if (fault == STALL && bpf_ktime_get_ns() - loaded_at_ns > SECOND_NS)
		return;
	if (!scx_bpf_dsq_move_to_local(SHARED_QUEUE) && fault == STARVE)
		scx_bpf_dsq_move_to_local(STARVED_QUEUE);
}

void CALLBACK(fair_running, struct task_struct *p)
{
	if ((__s64)(p->scx.dsq_vtime - max_running_vtime) > 0)
		max_running_vtime = p->scx.dsq_vtime;
}

void CALLBACK(fair_stopping, struct task_struct *p, bool runnable)
{
	__u64 used = SCX_SLICE_DFL - p->scx.slice;

	if (fault == LEAK_TO_CGROUP && is_in_favoured_cgroup(p))
		used /= 4;
	p->scx.dsq_vtime += used * NICE_0_WEIGHT / p->scx.weight;
}

void CALLBACK(fair_enable, struct task_struct *p)
{
	p->scx.dsq_vtime = max_running_vtime;
}

/* Without callbacks for CPUs the kernel ends the scheduler when a CPU is switched on or off. The callbacks are empty,
 * because no queue belongs to a CPU. */
void CALLBACK(fair_cpu_online, __s32 cpu)
{
}

void CALLBACK(fair_cpu_offline, __s32 cpu)
{
}

__s32 SLEEPABLE_CALLBACK(fair_init)
{
	__s32 error = scx_bpf_create_dsq(SHARED_QUEUE, -1);

	loaded_at_ns = bpf_ktime_get_ns();
	if (!error && fault == STARVE)
		error = scx_bpf_create_dsq(STARVED_QUEUE, -1);
	return error;
}

void CALLBACK(fair_exit, struct scx_exit_info *info)
{
	bpf_probe_read_kernel_str(ending.message, sizeof(ending.message), BPF_CORE_READ(info, msg));
	ending.kind = BPF_CORE_READ(info, kind);
}

SEC(".struct_ops.link")
struct sched_ext_ops fair_ops = {
	.select_cpu = (void *)fair_select_cpu,
	.enqueue = (void *)fair_enqueue,
	.dispatch = (void *)fair_dispatch,
	.running = (void *)fair_running,
	.stopping = (void *)fair_stopping,
	.enable = (void *)fair_enable,
	.cpu_online = (void *)fair_cpu_online,
	.cpu_offline = (void *)fair_cpu_offline,
	.init = (void *)fair_init,
	.exit = (void *)fair_exit,
	/* The kernel ejects the scheduler when a task waits longer than this time. */
	.timeout_ms = 5000,
	.name = "zernel_fair",
};
