/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The queues: one per last-level cache, one per CPU for the tasks that can run nowhere else (pinned
 * tasks), and one for the tasks that wait for a budget. Critical threads and loaders wait in queues
 * of their own beside each of the first two kinds.
 *
 * Pinned tasks have a clock per CPU: ten of them on one CPU fall behind all others, and one
 * that has a CPU to itself runs ahead, and neither may disturb the weights elsewhere. An offset
 * makes both clocks comparable on that CPU. It changes only while one side has nothing runnable
 * there, or owes too much.
 */
#ifndef ZERNEL_SCHED_QUEUE_H
#define ZERNEL_SCHED_QUEUE_H

#include "state.bpf.h"

/* A task of another cache must be behind by this much virtual time to be taken, because it runs
 * slower for a while after the change. */
#define OTHER_CACHE_LEAD_VTIME 12000000ULL
/* Tasks at the head of a queue that are looked at to find one that may run on a CPU. Many tasks that may use a few
 * CPUs only can be behind all others. A CPU without a task looks at every task. */
#define QUEUE_HEAD_CANDIDATES 256
/* A critical thread that has waited for this long goes first on CPUs that choose by virtual time. Ordinary tasks
 * are at the front of their queue after half of it: many critical threads that take turns, each of which waits
 * for long, must not take the CPUs that pay the guarantee. */
#define LONGEST_CRITICAL_WAIT_NS (2 * MAX_LEAD_NS)
/* A shorter wait is never too long. */
#define MIN_LONG_WAIT_NS (SECOND_NS / 10)

static __u32 llc_of(__u64 cpu)
{
	return settings.llc_of_cpu[cpu & (MAX_CPUS - 1)];
}

/* Whether a task can run on its present CPU only. The kernel may forbid the current task to migrate while a program of
 * the scheduler runs; `programs` of them run now, one inside of another. */
static bool is_pinned(const struct task_struct *p, __u32 programs)
{
	__u32 own = p == bpf_get_current_task_btf() ? programs : 0;

	return p->nr_cpus_allowed == 1 || p->migration_disabled > own;
}

static __u64 queue_of_task(const struct task *task, __u32 cpu)
{
	return task->clock_id == SHARED_CLOCK ? LLC_QUEUE(llc_of(cpu)) : CPU_QUEUE(task->clock_id);
}

/* Counts a runnable task at the CPU that it is pinned to; a weight of 0 ends that. */
static void count_pinned_weight(struct task *task, __u32 weight)
{
	struct cpu *cpu = cpu_at(task->clock_id);
	__s64 difference = (__s64)weight - task->pinned_weight;

	if (!settings.may_privilege || !difference)
		return;
	task->pinned_weight = weight;
	__sync_fetch_and_add(&cpu->pinned_weight, difference);
}

/* Moves a task's virtual time to another clock, as far behind or ahead as it was. */
static void change_clock(struct task_struct *p, struct task *task, __u32 clock)
{
	__u64 lag = clock_of(task)->now - p->scx.dsq_vtime;

	count_pinned_weight(task, 0);
	task->clock_id = clock;
	/* It is of the other clock. */
	task->vtime_before_aging = 0;
	set_vtime(p, clock_of(task)->now - lag);
}

/* Before the first pinned task becomes runnable on a CPU, sets its clock equal to the shared clock. */
static void reset_pinned_clock_offset(__u32 number)
{
	struct cpu *cpu = cpu_at(number);

	if (!cpu->runs_pinned && !scx_bpf_dsq_nr_queued(CPU_QUEUE(number)))
		cpu->offset_to_shared_clock = shared_clock.now - cpu->pinned_clock.now;
}

/* Chooses the clock of a task that becomes runnable on a CPU, and bounds its virtual time. */
static void choose_clock_and_bound_vtime(struct task_struct *p, struct task *task, __u32 cpu, bool is_wakeup,
					 __u32 programs)
{
	__u32 wanted = is_pinned(p, programs) ? cpu : SHARED_CLOCK;
	const struct clock *clock;
	__u64 credit, lag;

	if (wanted != SHARED_CLOCK)
		reset_pinned_clock_offset(wanted);
	if (wanted != task->clock_id)
		change_clock(p, task, wanted);
	if (wanted != SHARED_CLOCK)
		count_pinned_weight(task, weight_of(task) >> WEIGHT_SHIFT ?: 1);
	clock = clock_of(task);
	lag = clock_advance_in(clock, MAX_LAG_NS);
	if (is_wakeup) {
		credit = virtual_time(settings.slice_ns, weight_of(task));
		lag = credit < lag ? credit : lag;
	}
	set_vtime(p, clock_bound(clock, p->scx.dsq_vtime, lag));
}

/* Returns a running task to the shared clock when it may migrate again. The kernel forbids migration
 * while a probe runs, and a task that is kept on its CPU is not placed again. */
static void return_to_shared_clock(struct task_struct *p, struct task *task, __u32 cpu)
{
	if (task->clock_id == SHARED_CLOCK || is_pinned(p, 1))
		return;
	change_clock(p, task, SHARED_CLOCK);
	cpu_at(cpu)->runs_pinned = false;
}

/* The virtual time of the front of a task's queue some time ago. A CPU compares its pinned tasks with the
 * others by the shared clock, so a pinned task must be before both clocks. */
static __u64 front_vtime(const struct task *task, __u64 ago_ns)
{
	__u64 shared_front =
		shared_clock.now - clock_advance_in(&shared_clock, MAX_LAG_NS + ago_ns);
	const struct clock *clock = clock_of(task);
	__u64 front = clock->now - clock_advance_in(clock, MAX_LAG_NS + ago_ns);

	if (task->clock_id != SHARED_CLOCK)
		shared_front -= cpu_at(task->clock_id)->offset_to_shared_clock;
	return is_before(shared_front, front) ? shared_front : front;
}

/* Whether a task that became runnable at `runnable_ns` has waited for `ns`. That may have been on another CPU, after
 * `now_ns`. */
static bool has_waited(__u64 runnable_ns, __u64 ns, __u64 now_ns)
{
	return (__s64)(now_ns - runnable_ns) >= (__s64)ns;
}

/* The virtual time of a critical thread in a queue. If it has waited for too long, it is as if it had been at the
 * front since it had waited for MAX_LEAD_NS: of all tasks that have, the one that has waited longest runs next. */
static __u64 critical_vtime(const struct task_struct *p, const struct task *task)
{
	__u64 now_ns = scx_bpf_now();

	if (!has_waited(task->runnable_ns, LONGEST_CRITICAL_WAIT_NS, now_ns))
		return p->scx.dsq_vtime;
	return front_vtime(task, now_ns - task->runnable_ns - MAX_LEAD_NS);
}

/* Whether a task is a thread of the observer. Also true if the heartbeat is late: the task may be why. */
static bool is_observer(const struct task_struct *p)
{
	__u32 observer = ZERNEL_HEART_OBSERVER;
	const struct zernel_heartbeat *heart = bpf_map_lookup_elem(&zernel_heartbeats, &observer);

	return heart && heart->last_beat_ns && heart->owner_pid == p->tgid;
}

/* The weights that share all CPUs, as the tasks that are pinned to one CPU see it: they can get no more than that
 * CPU, nor more than they would get elsewhere. */
static __s64 weight_beside_pinned_tasks(const struct cpu *cpu)
{
	__s64 here = cpu->pinned_weight * usable_cpus();

	return here > root_active_weight ? here : root_active_weight;
}

/* How long a task may wait for a CPU before the guarantee counts as broken: twice the time in which the guaranteed
 * part of its fair share is a slice. */
static __u64 max_fair_wait_ns(const struct task_struct *p, const struct task *task)
{
	__s64 all = task->clock_id == SHARED_CLOCK ? root_active_weight :
						     weight_beside_pinned_tasks(cpu_at(task->clock_id));
	/* The sum of all weights, in weights of this task. */
	__u64 tasks = ((__u64)(all > 0 ? all : 0) << WEIGHT_SHIFT) / weight_of(task) + 1;
	__u64 guaranteed_percent = usable_cpus() * (settings.guarantee_percent ?: 1);
	__u64 wait_ns = 2 * settings.slice_ns * tasks * 100 / guaranteed_percent;

	/* The watchdog's time bounds all waits. */
	if (wait_ns > MAX_LEAD_NS)
		wait_ns = MAX_LEAD_NS;
	return wait_ns < MIN_LONG_WAIT_NS || is_observer(p) ? MIN_LONG_WAIT_NS : wait_ns;
}

/* The first task in a queue that may run on a CPU. */
struct first_task {
	__u64 vtime;
	__u64 runnable_ns; /* when it woke up or stopped running */
	__u64 max_wait_ns; /* how long it may wait */
};

/* The verifier checks a global function once, not at every call: loading would take minutes. */
__attribute__((noinline)) bool find_first_task_for_cpu(__u64 queue, __u32 cpu, struct first_task *first)
{
	struct bpf_iter_scx_dsq it;
	const struct task *task;
	struct task_struct *p;
	bool found = false;
	int i;

	/* The verifier does not know that it is never NULL. */
	if (!first || !scx_bpf_dsq_nr_queued(queue))
		return false;
	if (!bpf_iter_scx_dsq_new(&it, queue, 0)) {
		bpf_for(i, 0, QUEUE_HEAD_CANDIDATES) {
			p = bpf_iter_scx_dsq_next(&it);
			if (!p)
				break;
			if (!bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
				continue;
			found = true;
			first->vtime = p->scx.dsq_vtime;
			/* Only the guarantee asks how long it waits. */
			task = settings.may_privilege ? task_of(p) : NULL;
			first->runnable_ns = task ? task->runnable_ns : 0;
			first->max_wait_ns = task ? max_fair_wait_ns(p, task) : 0;
			if (task && queue >= RANK_QUEUE(0, RANK_CRITICAL))
				first->vtime = critical_vtime(p, task);
			break;
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
	return found;
}

/* The queue from which a CPU should take its next task. */
struct queue_choice {
	bool found;
	bool changes_cache; /* the queue is that of another last-level cache */
	__u64 queue;
	__u64 vtime; /* by the shared clock; later by OTHER_CACHE_LEAD_VTIME for a task of another cache */
};

/* Keeps the clock of pinned tasks near the shared one: ahead is forgiven where nobody else wanted
 * the CPU, and far behind is forgotten. */
static void bound_pinned_clock_offset(struct cpu *cpu, bool nobody_else)
{
	__u64 lag = clock_advance_in(&shared_clock, MAX_LAG_NS);
	__u64 pinned = cpu->pinned_clock.now + cpu->offset_to_shared_clock;

	if (nobody_else && is_before(shared_clock.now, pinned))
		cpu->offset_to_shared_clock = shared_clock.now - cpu->pinned_clock.now;
	else if (is_before(pinned, shared_clock.now - lag))
		cpu->offset_to_shared_clock = shared_clock.now - lag - cpu->pinned_clock.now;
}

/* Chooses the first task of a queue if it comes before what is chosen. Added to its virtual time,
 * `offset` gives one that can be compared. */
static bool choose_queue_if_earlier(struct queue_choice *choice, __u64 queue, __u32 number, __u64 offset)
{
	struct first_task first = {};

	if (!find_first_task_for_cpu(queue, number, &first))
		return false;
	first.vtime += offset;
	if (choice->found && !is_before(first.vtime, choice->vtime))
		return false;
	choice->found = true;
	choice->queue = queue;
	choice->vtime = first.vtime;
	return true;
}

/* Balances the caches while all of them are busy: chooses the first task of another cache if it is
 * far behind. Another cache is looked at each time. */
static void choose_queue_of_other_cache(struct queue_choice *choice, __u32 number)
{
	__u32 step = cpu_at(number)->next_cache++ % (settings.llc_count - 1);
	__u64 queue = LLC_QUEUE((llc_of(number) + 1 + step) % settings.llc_count);

	choice->changes_cache = choose_queue_if_earlier(choice, queue, number, OTHER_CACHE_LEAD_VTIME);
	if (settings.may_privilege &&
	    (choose_queue_if_earlier(choice, RANK_QUEUE(queue, RANK_CRITICAL), number, OTHER_CACHE_LEAD_VTIME) ||
	     choose_queue_if_earlier(choice, RANK_QUEUE(queue, RANK_FEED), number, OTHER_CACHE_LEAD_VTIME)))
		choice->changes_cache = true;
}

/* Compares the first tasks of the queues of all ranks, those of loaders only with `loaders`. */
static void choose_queue_of_any_rank(struct queue_choice *choice, __u64 queue, __u32 number, bool loaders)
{
	choose_queue_if_earlier(choice, queue, number, 0);
	if (!settings.may_privilege)
		return;
	choose_queue_if_earlier(choice, RANK_QUEUE(queue, RANK_CRITICAL), number, 0);
	if (loaders)
		choose_queue_if_earlier(choice, RANK_QUEUE(queue, RANK_FEED), number, 0);
}

/* Compares the first tasks of the queues of a CPU, those of loaders only with `loaders`, and those
 * of another cache. With `owes_pinned` tasks that can run on this CPU only come first. */
static void choose_queue(struct queue_choice *choice, __u32 number, bool loaders, bool owes_pinned)
{
	struct cpu *cpu = cpu_at(number);
	struct queue_choice pinned = {};

	choose_queue_of_any_rank(choice, LLC_QUEUE(llc_of(number)), number, loaders);
	choose_queue_of_any_rank(&pinned, CPU_QUEUE(number), number, loaders);
	if (pinned.found || cpu->runs_pinned)
		bound_pinned_clock_offset(cpu, !choice->found);
	pinned.vtime += cpu->offset_to_shared_clock;
	if (pinned.found &&
	    (owes_pinned || !choice->found || is_before(pinned.vtime, choice->vtime)))
		*choice = pinned;
	if (settings.llc_count > 1)
		choose_queue_of_other_cache(choice, number);
}

/* Takes the first task that a CPU may run from its own queues, wherever it stands there. */
static bool dispatch_from_own_queues(__u32 cpu)
{
	__u64 pinned_queue = CPU_QUEUE(cpu), queue = LLC_QUEUE(llc_of(cpu));

	return scx_bpf_dsq_move_to_local(queue) || scx_bpf_dsq_move_to_local(pinned_queue) ||
	       (settings.may_privilege &&
		(scx_bpf_dsq_move_to_local(RANK_QUEUE(queue, RANK_CRITICAL)) ||
		 scx_bpf_dsq_move_to_local(RANK_QUEUE(pinned_queue, RANK_CRITICAL)) ||
		 scx_bpf_dsq_move_to_local(RANK_QUEUE(queue, RANK_FEED)) ||
		 scx_bpf_dsq_move_to_local(RANK_QUEUE(pinned_queue, RANK_FEED))));
}

/* Takes a task for a CPU from the chosen queue, or else from one of its own two. */
static bool dispatch_chosen(__u32 cpu, const struct queue_choice *choice)
{
	if (scx_bpf_dsq_move_to_local(choice->queue)) {
		if (choice->changes_cache)
			counters.stolen++;
		return true;
	}
	return scx_bpf_dsq_move_to_local(LLC_QUEUE(llc_of(cpu))) ||
	       scx_bpf_dsq_move_to_local(CPU_QUEUE(cpu));
}

/* Takes a task of this rank from one of the two queues of a CPU: the one whose first task has waited longer. */
static bool dispatch_task_of_rank(__u32 cpu, enum rank rank)
{
	__u64 pinned_queue = RANK_QUEUE(CPU_QUEUE(cpu), rank);
	__u64 queue = RANK_QUEUE(LLC_QUEUE(llc_of(cpu)), rank);
	struct first_task pinned = {}, first = {};

	if (find_first_task_for_cpu(pinned_queue, cpu, &pinned) && find_first_task_for_cpu(queue, cpu, &first) &&
	    is_before(first.runnable_ns, pinned.runnable_ns) && scx_bpf_dsq_move_to_local(queue))
		return true;
	return scx_bpf_dsq_move_to_local(pinned_queue) || scx_bpf_dsq_move_to_local(queue);
}

/* How many tasks of this rank wait in the queues of a CPU. */
static __u32 queued_of_rank(__u32 cpu, enum rank rank)
{
	return scx_bpf_dsq_nr_queued(RANK_QUEUE(CPU_QUEUE(cpu), rank)) +
	       scx_bpf_dsq_nr_queued(RANK_QUEUE(LLC_QUEUE(llc_of(cpu)), rank));
}

/* Whether an ordinary task waits in the queue of any cache. */
static bool any_ordinary_task_waits(void)
{
	__u32 llc;

	for (llc = 0; llc < MAX_LLCS && llc < settings.llc_count; llc++)
		if (scx_bpf_dsq_nr_queued(LLC_QUEUE(llc)))
			return true;
	return false;
}

/* Takes a task from the queue of another last-level cache. */
static bool dispatch_from_other_cache(__u32 cpu)
{
	__u32 own = llc_of(cpu), step, llc;

	for (step = 1; step < MAX_LLCS && step < settings.llc_count; step++) {
		llc = (own + step) % settings.llc_count;
		if (scx_bpf_dsq_move_to_local(LLC_QUEUE(llc)) ||
		    (settings.may_privilege &&
		     (scx_bpf_dsq_move_to_local(RANK_QUEUE(LLC_QUEUE(llc), RANK_CRITICAL)) ||
		      scx_bpf_dsq_move_to_local(RANK_QUEUE(LLC_QUEUE(llc), RANK_FEED))))) {
			counters.stolen++;
			return true;
		}
	}
	return false;
}

/* Wakes a CPU for a task that was queued. */
static void wake_idle_cpu(struct task_struct *p, const struct task *task, __s32 cpu)
{
	if (task->clock_id == SHARED_CLOCK)
		cpu = scx_bpf_pick_idle_cpu(p->cpus_ptr, 0);
	if (cpu >= 0)
		scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
}

/* Creates a queue, and those of the ranks beside it. */
static __s32 create_rank_queues(__u64 queue)
{
	return scx_bpf_create_dsq(queue, -1)			       ?:
		       scx_bpf_create_dsq(RANK_QUEUE(queue, RANK_FEED), -1) ?:
		       scx_bpf_create_dsq(RANK_QUEUE(queue, RANK_CRITICAL), -1);
}

static __s32 create_queues(void)
{
	__s32 error = scx_bpf_create_dsq(THROTTLED_QUEUE, -1);
	__u32 index;

	for (index = 0; !error && index < MAX_LLCS && index < settings.llc_count; index++)
		error = create_rank_queues(LLC_QUEUE(index));
	for (index = 0; !error && index < MAX_CPUS && index < settings.cpu_count; index++)
		error = create_rank_queues(CPU_QUEUE(index));
	return error;
}

#endif
