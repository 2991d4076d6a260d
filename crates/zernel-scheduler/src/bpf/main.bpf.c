// SPDX-License-Identifier: GPL-2.0-only
/*
 * A fair scheduler.
 *
 * Every task has a virtual time, which grows while it runs, the slower the larger its effective
 * weight is (cgroup.bpf.h). The runnable task with the smallest virtual time runs next. Tasks wait
 * in one queue per last-level cache, or, if they can run on one CPU only, in the queue of that CPU.
 * A CPU takes the first task of the two queues that it serves. It takes a task of another cache
 * when it has nothing to do, or when that task is far behind.
 *
 * A task that wakes up runs on an idle CPU if there is one, and rather on the NUMA node of the GPU
 * that it uses (gpu_node.bpf.h). Otherwise it preempts a task that is
 * ahead of it, on the CPU where it ran last or on one other CPU. A task that slept keeps at most
 * one slice of credit. Slices end at ticks.
 *
 * Limits of cpu.max are kept by bandwidth.bpf.h. Critical threads and loaders of privileged
 * tasks go first (rank.bpf.h), as far as the guarantee allows (guarantee.bpf.h); by default nobody
 * is privileged. Critical threads that spin until the GPU is done may lend their CPU (lend.bpf.h).
 */
#include "aging.bpf.h"
#include "gpu_node.bpf.h"
#include "lend.bpf.h"
#include "preempt.bpf.h"
#include "process_tree.bpf.h"
#include "queue.bpf.h"
#include "rank.bpf.h"
#include "state.bpf.h"
#include "throttle_timer.bpf.h"
#include "userspace_calls.bpf.h"

char LICENSE[] SEC("license") = "GPL";

__s32 CALLBACK(zernel_select_cpu, struct task_struct *p, __s32 prev_cpu, __u64 wake_flags)
{
	struct task *task = task_of(p);
	bool is_idle = false;
	__s32 cpu = select_idle_cpu(p, prev_cpu, wake_flags, &is_idle);
	__u64 now_ns = scx_bpf_now();
	enum rank rank;
	__s32 victim;

	if (!task)
		return cpu;
	task->woken_ns = now_ns;
	choose_clock_and_bound_vtime(p, task, cpu, true, 1);
	rank = rank_of_waking(p, task, now_ns);
	if (is_idle) {
		if (must_wait_for_budget(p, task->cgroup_node, now_ns))
			return cpu;
		counters.idle_wakeups++;
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, settings.slice_ns, 0);
		return cpu;
	}
	victim = find_cpu_of_lower_rank(p, task, cpu, rank, now_ns);
	if (victim >= 0)
		return victim;
	return find_cpu_to_preempt(p, task, cpu, now_ns);
}

/* Notes that a task of this rank is about to preempt what a CPU runs. Until it runs, others that
 * wake up see it on this CPU and choose another one. */
static void note_preemption(struct cpu *cpu, enum rank rank)
{
	if (rank == RANK_CRITICAL)
		counters.critical_wakeups++;
	else
		counters.feed_wakeups++;
	cpu->rank = rank;
}

/* Preempts a task of a lower rank; false if there is none, or if this task may not go first. */
static bool preempt_lower_rank(struct task_struct *p, const struct task *task, __s32 number,
			  enum rank rank, __u64 now_ns, __u64 enq_flags)
{
	if ((rank == RANK_FEED && !feeds_waiting_process(p, task, now_ns)) ||
	    !may_preempt_by_rank(p, number, rank, now_ns))
		return false;
	note_preemption(cpu_at(number), rank);
	scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, settings.slice_ns, enq_flags | SCX_ENQ_PREEMPT);
	return true;
}

/* A CPU for a task that lost its own to a higher scheduling class: an idle one, else one that runs a task of
 * a lower rank; -1: none. Without one the task waits for the next tick. */
static __s32 find_cpu_for_displaced_task(struct task_struct *p, const struct task *task, __s32 cpu, enum rank rank,
			 __u64 now_ns, bool *is_idle)
{
	__s32 idle;

	if (task->clock_id != SHARED_CLOCK)
		return -1;
	idle = scx_bpf_pick_idle_cpu(p->cpus_ptr, 0);
	*is_idle = idle >= 0;
	return *is_idle ? idle : find_cpu_of_lower_rank(p, task, cpu, rank, now_ns);
}

/* Puts a task into the queue of its rank. Critical threads wait in the order in which they come,
 * all others in the order of their virtual times. */
static void enqueue_by_rank(struct task_struct *p, const struct task *task, __s32 cpu, enum rank rank,
			 __u64 enq_flags)
{
	__u64 queue = RANK_QUEUE(queue_of_task(task, cpu), rank);

	counters.queued++;
	if (rank == RANK_CRITICAL)
		scx_bpf_dsq_insert(p, queue, settings.slice_ns, enq_flags);
	else
		scx_bpf_dsq_insert_vtime(p, queue, settings.slice_ns, p->scx.dsq_vtime, enq_flags);
}

void CALLBACK(zernel_enqueue, struct task_struct *p, __u64 enq_flags)
{
	struct task *task = task_of(p);
	__s32 cpu = scx_bpf_task_cpu(p);
	bool is_wakeup = enq_flags & SCX_ENQ_WAKEUP;
	__u64 now_ns = scx_bpf_now();
	bool is_idle = false;
	__s32 refuge = -1;
	enum rank rank;

	if (!task) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, settings.slice_ns, enq_flags);
		return;
	}
	/* zernel_cpu_release puts tasks back, and so calls this program. */
	choose_clock_and_bound_vtime(p, task, cpu, is_wakeup, enq_flags & SCX_ENQ_REENQ ? 2 : 1);
	if (must_wait_for_budget(p, task->cgroup_node, now_ns)) {
		counters.throttled++;
		task->is_throttled = true;
		scx_bpf_dsq_insert_vtime(p, THROTTLED_QUEUE, settings.slice_ns, p->scx.dsq_vtime,
					 enq_flags);
		return;
	}
	/* A change of affinity or priority takes a task out of the queue of those without a budget, too. */
	if (task->is_throttled)
		end_throttling(task, now_ns);
	rank = is_wakeup ? rank_of_waking(p, task, now_ns) : rank_of_task(p, task, now_ns);
	count_ordinary_weight(task, rank == RANK_ORDINARY);
	if (stays_behind_borrower(p, cpu, enq_flags)) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, settings.slice_ns, enq_flags);
		return;
	}
	if (is_wakeup && preempt_lower_rank(p, task, cpu, rank, now_ns, enq_flags))
		return;
	/* A loader leaves CPUs that must pay to ordinary tasks. */
	if (is_wakeup && rank != RANK_FEED && preempt_running_task(p, task, cpu, now_ns)) {
		counters.preempting_wakeups++;
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, settings.slice_ns,
				   enq_flags | SCX_ENQ_PREEMPT);
		return;
	}
	if (enq_flags & SCX_ENQ_REENQ)
		refuge = find_cpu_for_displaced_task(p, task, cpu, rank, now_ns, &is_idle);
	enqueue_by_rank(p, task, refuge < 0 ? cpu : refuge, rank, enq_flags);
	if (refuge < 0) {
		wake_idle_cpu(p, task, cpu);
		return;
	}
	if (!is_idle)
		note_preemption(cpu_at(refuge), rank);
	/* That CPU takes the task from the queue of its cache. If the task may not migrate now, the kernel
	 * leaves it there; it would eject a scheduler that moves such a task by itself. */
	scx_bpf_kick_cpu(refuge, is_idle ? SCX_KICK_IDLE : SCX_KICK_PREEMPT);
}

/* Charges the running task up to now. Returns it, or NULL if it may not go on. */
static struct task *charge_continuing_task(struct task_struct *prev, __s32 cpu, __u64 now_ns)
{
	struct task *task;

	if (!prev || !(prev->scx.flags & SCX_TASK_QUEUED))
		return NULL;
	task = task_of(prev);
	if (!task)
		return NULL;
	charge_task(prev, task, now_ns);
	return_to_shared_clock(prev, task, cpu);
	return must_wait_for_budget(prev, task->cgroup_node, now_ns) ? NULL : task;
}

/* Lets the running task go on. */
static void keep_running(struct task_struct *prev, const struct task *task, __u64 now_ns)
{
	set_slice(prev, settings.slice_ns);
	if (advances_clock(task))
		clock_advance_to(clock_of(task), prev->scx.dsq_vtime, now_ns);
}

/* Lets the running task go on because of its rank. */
static bool keep_running_by_rank(struct task_struct *prev, struct task *task, __s32 cpu, enum rank rank,
		       __u64 now_ns)
{
	task->rank = rank;
	set_running_rank(cpu_at(cpu), rank, true, now_ns);
	keep_running(prev, task, now_ns);
	return true;
}

/* Whether the running loader goes on: no other one is far behind it. Loaders that took turns at every
 * slice would finish their batches at the same time, and the trainer would wait for all of them. */
static bool loader_may_continue(const struct task_struct *prev, const struct task *task, __s32 cpu)
{
	struct queue_choice choice = {};

	choose_queue_if_earlier(&choice, RANK_QUEUE(LLC_QUEUE(llc_of(cpu)), RANK_FEED), cpu, 0);
	choose_queue_if_earlier(&choice, RANK_QUEUE(CPU_QUEUE(cpu), RANK_FEED), cpu, cpu_at(cpu)->offset_to_shared_clock);
	return !choice.found || !is_far_behind(choice.vtime, comparable_vtime(prev, task));
}

/* Chooses a loader that has waited for too long, if no ordinary task waits. */
static bool dispatch_overdue_loader(__s32 cpu)
{
	return !ordinary_task_waits && !scx_bpf_dsq_nr_queued(CPU_QUEUE(cpu)) && dispatch_task_of_rank(cpu, RANK_FEED);
}

/* Chooses a critical thread or a loader, if there is one that may go first. `task`: the running
 * task, NULL if it may not go on; `rank`: its rank. */
static bool dispatch_by_rank(struct task_struct *prev, struct task *task, __s32 cpu, enum rank rank,
			__u64 now_ns)
{
	bool is_loader = task && rank == RANK_FEED;
	bool has_critical, has_loader;

	if (prev && !task)
		raise_siblings(prev, cpu, now_ns);
	note_whether_ordinary_task_waits(now_ns);
	if (first_ordinary_lost_too_much(cpu, now_ns))
		return dispatch_overdue_loader(cpu);
	has_critical = rank == RANK_CRITICAL || queued_of_rank(cpu, RANK_CRITICAL);
	has_loader = is_loader || queued_of_rank(cpu, RANK_FEED);
	if (!has_critical && !has_loader)
		return false;
	if (!may_go_first(cpu, now_ns)) {
		counters.guarantee_hits++;
		return false;
	}
	if (has_critical && dispatch_task_of_rank(cpu, RANK_CRITICAL))
		return true;
	if (task && rank == RANK_CRITICAL) {
		counters.critical_kept++;
		return keep_running_by_rank(prev, task, cpu, rank, now_ns);
	}
	if (!has_loader)
		return false;
	if (is_loader && loader_may_continue(prev, task, cpu)) {
		counters.feed_kept++;
		return keep_running_by_rank(prev, task, cpu, rank, now_ns);
	}
	return dispatch_task_of_rank(cpu, RANK_FEED);
}

void CALLBACK(zernel_dispatch, __s32 cpu, struct task_struct *prev)
{
	__u64 now_ns = scx_bpf_now();
	struct task *task = charge_continuing_task(prev, cpu, now_ns);
	struct queue_choice choice = {};
	enum rank rank = RANK_ORDINARY;
	bool is_first, pays = false, owes_pinned = false;

	set_lost(cpu_at(cpu), false, now_ns);
	if (cpu_at(cpu)->lender_tid && lend_cpu_of_spinner(prev, task, cpu, now_ns))
		return;
	if (settings.privilege != PRIVILEGE_NOBODY) {
		if (task && !task->has_yielded)
			rank = rank_of_task(prev, task, now_ns);
		if (dispatch_by_rank(prev, task, cpu, rank, now_ns))
			return;
		pays = must_run_ordinary_task(cpu_at(cpu));
		owes_pinned = !pays && pinned_lost_too_much(cpu, now_ns);
	}
	choose_queue(&choice, cpu, !pays || cpu_at(cpu)->loader_waits_too_long, owes_pinned);
	if (pays && !choice.found) {
		pays = false;
		choose_queue(&choice, cpu, true, false);
	}
	/* CPUs that choose at the same tick must know it before the task runs. */
	if (pays)
		set_running_rank(cpu_at(cpu), RANK_ORDINARY, true, now_ns);
	is_first = task && !task->has_yielded &&
		   (!choice.found || !is_before(choice.vtime, comparable_vtime(prev, task))) &&
		   !(pays && rank == RANK_FEED);
	if (!is_first && choice.found && dispatch_chosen(cpu, &choice))
		return;
	/* The first tasks of a queue may all be tasks that this CPU may not run. */
	if (!task && (dispatch_from_own_queues(cpu) || dispatch_from_other_cache(cpu)))
		return;
	if (task) {
		counters.kept++;
		keep_running(prev, task, now_ns);
	} else {
		set_running_rank(cpu_at(cpu), RANK_ORDINARY, false, now_ns);
		clear_guaranteed_time(now_ns);
	}
}

void CALLBACK(zernel_running, struct task_struct *p)
{
	__s32 number = scx_bpf_task_cpu(p);
	struct cpu *cpu = cpu_at(number);
	struct task *task = task_of(p);
	__u64 now_ns = scx_bpf_now();
	enum rank rank;

	if (!task)
		return;
	set_lost(cpu, false, now_ns);
	end_aging(p, task);
	task->charged_ns = now_ns;
	task->has_yielded = false;
	task->class = class_of(p, task->woken_ns ?: now_ns);
	count_run_start(task->class, task->woken_ns, now_ns);
	task->woken_ns = 0;
	cpu->runs_pinned = task->clock_id != SHARED_CLOCK;
	/* Deadlines of classes stand still while a task waits for a CPU. */
	rank = rank_of_task(p, task, task->runnable_ns);
	if (settings.lends)
		begin_turn_or_gpu_poll(p, task, number, rank, now_ns);
	set_task_and_cpu_rank(cpu, task, number, rank, now_ns);
	if (advances_clock(task))
		clock_advance_to(clock_of(task), p->scx.dsq_vtime, now_ns);
	set_running_task(cpu, comparable_vtime(p, task), now_ns, weight_of(task));
	/* See bandwidth.bpf.h. */
	if (must_wait_for_budget(p, task->cgroup_node, now_ns))
		scx_bpf_kick_cpu(number, SCX_KICK_PREEMPT);
}

void CALLBACK(zernel_stopping, struct task_struct *p, bool runnable)
{
	struct cpu *cpu = cpu_at(scx_bpf_task_cpu(p));
	struct task *task = task_of(p);

	if (task) {
		__u64 now_ns = scx_bpf_now();

		charge_task(p, task, now_ns);
		if (settings.lends)
			end_turn_or_gpu_poll(p, task, cpu, now_ns);
		task->runnable_ns = now_ns;
		if (!runnable && rank_of_task(p, task, now_ns) == RANK_CRITICAL)
			note_critical_thread_blocks(p, task, now_ns);
	}
	cpu->running_weight = 0;
	cpu->runs_pinned = false;
	/* If the task stays runnable, zernel_dispatch has already set the rank of the next task. */
	if (!runnable)
		set_running_rank(cpu, RANK_ORDINARY, false, scx_bpf_now());
}

void CALLBACK(zernel_tick, struct task_struct *p)
{
	__s32 number = scx_bpf_task_cpu(p);
	struct task *task = task_of(p);
	__u64 now_ns = scx_bpf_now();
	enum rank rank;

	if (!task)
		return;
	charge_task(p, task, now_ns);
	task->class = class_of(p, now_ns);
	rank = rank_of_task(p, task, now_ns);
	set_task_and_cpu_rank(cpu_at(number), task, number, rank, now_ns);
	if (settings.lends)
		watch_trainer(p, task, number, rank, now_ns);
	if (must_wait_for_budget(p, task->cgroup_node, now_ns))
		set_slice(p, 0);
}

bool CALLBACK(zernel_yield, struct task_struct *from, struct task_struct *to)
{
	struct task *task = task_of(from);

	if (task)
		task->has_yielded = true;
	set_slice(from, 0);
	return false;
}

void CALLBACK(zernel_runnable, struct task_struct *p, __u64 enq_flags)
{
	struct task *task = task_of(p);

	if (!task)
		return;
	/* A task that may use one CPU only is woken up without select_cpu. */
	if (enq_flags & SCX_ENQ_WAKEUP && !task->woken_ns)
		task->woken_ns = scx_bpf_now();
	/* A change of affinity or priority takes a waiting task out and puts it back. It waits on. */
	if (enq_flags & SCX_ENQ_WAKEUP || !task->runnable_ns)
		task->runnable_ns = scx_bpf_now();
	set_waits_for_thread(p, task, false);
	count_runnable_task(task, p->scx.weight);
}

void CALLBACK(zernel_quiescent, struct task_struct *p, __u64 deq_flags)
{
	struct task *task = task_of(p);

	if (!task)
		return;
	count_runnable_task(task, 0);
	count_pinned_weight(task, 0);
	count_ordinary_weight(task, false);
	if (deq_flags & SCX_DEQ_SLEEP)
		task->blocked_ns = scx_bpf_now();
}

void CALLBACK(zernel_set_weight, struct task_struct *p, __u32 weight)
{
	struct task *task = task_of(p);

	if (task && task->counted_weight)
		count_runnable_task(task, weight);
}

/* A task of a higher class takes the CPU: what waits there in the local queue goes elsewhere. */
void CALLBACK(zernel_cpu_release, __s32 cpu, struct scx_cpu_release_args *args)
{
	end_loan(cpu_at(cpu));
	/* No dispatch has set a rank. What the higher class uses is no time of ordinary tasks. */
	set_running_rank(cpu_at(cpu), RANK_ORDINARY, false, scx_bpf_now());
	set_lost(cpu_at(cpu), true, scx_bpf_now());
	scx_bpf_reenqueue_local();
}

__s32 SLEEPABLE_CALLBACK(zernel_init_task, struct task_struct *p, struct scx_init_task_args *args)
{
	struct task *task = bpf_task_storage_get(&tasks, p, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);

	if (!task)
		return -12; /* ENOMEM */
	task->cgroup_node = find_cgroup_node(args->cgroup->kn->id);
	task->clock_id = SHARED_CLOCK;
	task->in_privileged_tree = is_in_privileged_tree(p, args->fork);
	return 0;
}

void CALLBACK(zernel_enable, struct task_struct *p)
{
	struct task *task = task_of(p);

	set_vtime(p, shared_clock.now);
	if (!task)
		return;
	task->clock_id = SHARED_CLOCK;
	task->vtime_before_aging = 0;
	/* Time in another scheduling class does not count as waiting. */
	task->runnable_ns = 0;
	task->woken_ns = 0;
}

void CALLBACK(zernel_disable, struct task_struct *p)
{
	struct task *task = task_of(p);

	if (task)
		forget_waits_for_thread(p, task);
}

__s32 SLEEPABLE_CALLBACK(zernel_cgroup_init, struct cgroup *cgroup,
			 struct scx_cgroup_init_args *args)
{
	__u32 index = create_cgroup_node(cgroup, args->weight);

	if (index == ROOT_CGROUP_INDEX && cgroup->level > 0)
		counters.uncounted_cgroups++;
	if (bpf_core_field_exists(args->bw_quota_us) && args->bw_quota_us < NO_LIMIT_US)
		limit_cgroup(index, args->bw_quota_us * 1000, args->bw_period_us * 1000);
	return 0;
}

void SLEEPABLE_CALLBACK(zernel_cgroup_exit, struct cgroup *cgroup)
{
	limit_cgroup(find_cgroup_node(cgroup->kn->id), 0, 0);
	delete_cgroup_node(cgroup);
}

void CALLBACK(zernel_cgroup_move, struct task_struct *p, struct cgroup *from, struct cgroup *to)
{
	struct task *task = task_of(p);
	__u32 counted;

	if (!task)
		return;
	counted = task->counted_weight;
	count_runnable_task(task, 0);
	task->cgroup_node = find_cgroup_node(to->kn->id);
	count_runnable_task(task, counted);
}

void CALLBACK(zernel_cgroup_set_weight, struct cgroup *cgroup, __u32 weight)
{
	set_cgroup_weight(cgroup, weight);
}

/* Since Linux 6.17. Before, the userspace half reads cpu.max and calls set_cpu_limit. */
void CALLBACK(zernel_cgroup_set_bandwidth, struct cgroup *cgroup, __u64 period_us, __u64 quota_us,
	      __u64 burst_us)
{
	__u64 quota_ns = quota_us < NO_LIMIT_US ? quota_us * 1000 : 0;

	limit_cgroup(find_cgroup_node(cgroup->kn->id), quota_ns, period_us * 1000);
}

void SLEEPABLE_CALLBACK(zernel_cpu_online, __s32 cpu)
{
	__sync_fetch_and_add(&online_cpus, 1);
}

void SLEEPABLE_CALLBACK(zernel_cpu_offline, __s32 cpu)
{
	__sync_fetch_and_sub(&online_cpus, 1);
	set_lost(cpu_at(cpu), false, scx_bpf_now());
}

__s32 SLEEPABLE_CALLBACK(zernel_init)
{
	const struct cpumask *online = scx_bpf_get_online_cpumask();

	online_cpus = bpf_cpumask_weight(online);
	scx_bpf_put_cpumask(online);
	return create_queues() ?: prepare_throttle_timer() ?: prepare_lend_timers() ?: start_aging_timer();
}

void CALLBACK(zernel_exit, struct scx_exit_info *info)
{
	bpf_probe_read_kernel_str(ending.reason, ENDING_MESSAGE_BYTES, BPF_CORE_READ(info, reason));
	bpf_probe_read_kernel_str(ending.message, ENDING_MESSAGE_BYTES, BPF_CORE_READ(info, msg));
	ending.kind = BPF_CORE_READ(info, kind);
}

SEC(".struct_ops.link")
struct sched_ext_ops zernel_ops = {
	.select_cpu = (void *)zernel_select_cpu,
	.enqueue = (void *)zernel_enqueue,
	.dispatch = (void *)zernel_dispatch,
	.tick = (void *)zernel_tick,
	.runnable = (void *)zernel_runnable,
	.running = (void *)zernel_running,
	.stopping = (void *)zernel_stopping,
	.quiescent = (void *)zernel_quiescent,
	.yield = (void *)zernel_yield,
	.set_weight = (void *)zernel_set_weight,
	.cpu_release = (void *)zernel_cpu_release,
	.init_task = (void *)zernel_init_task,
	.enable = (void *)zernel_enable,
	.disable = (void *)zernel_disable,
	.cgroup_init = (void *)zernel_cgroup_init,
	.cgroup_exit = (void *)zernel_cgroup_exit,
	.cgroup_move = (void *)zernel_cgroup_move,
	.cgroup_set_weight = (void *)zernel_cgroup_set_weight,
	.cgroup_set_bandwidth = (void *)zernel_cgroup_set_bandwidth,
	.cpu_online = (void *)zernel_cpu_online,
	.cpu_offline = (void *)zernel_cpu_offline,
	.init = (void *)zernel_init,
	.exit = (void *)zernel_exit,
	/* Without ENQ_LAST the kernel would run a throttled task that has no competitor. */
	.flags = SCX_OPS_ENQ_LAST | SCX_OPS_ENQ_MIGRATION_DISABLED,
	.timeout_ms = 5000,
	.name = "zernel",
};
