/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What others keep beside critical threads and loaders.
 *
 * Were all tasks treated alike, ordinary tasks would get a part of all CPUs: their weights, divided by
 * the weights of all runnable tasks. The guarantee promises them a fraction of that CPU time. For
 * each slice of it that they have not got yet, one CPU must run an ordinary task. So others are paid
 * by few CPUs all the time and not by all CPUs now and then. CPU time measures this better than
 * virtual time: a clock stands still until the last of the ordinary tasks has had its turn, and then
 * jumps.
 *
 * A CPU that must pay runs no loaders, unless the first one has waited for too long, and critical threads
 * there are scheduled like ordinary tasks.
 * On the other CPUs critical threads go before loaders, so loaders take nothing from them.
 *
 * The clock of each CPU has a promise in virtual time, for the tasks pinned there: the promised clock
 * advances at the guaranteed fraction of CPUs / (sum of the weights of all runnable tasks). A
 * critical thread goes first on a CPU only while that clock is not a slice behind. Tasks that may use
 * some CPUs only can lose more than others. So a CPU serves all of its queues by virtual time when
 * the first ordinary task is three slices behind the others. The same rule protects a tenant with
 * tasks that lose more than those of others.
 *
 * A task that other CPUs do not serve could wait for long, and so could loaders, which no guarantee
 * protects. So a CPU also serves all of its queues by virtual time when the first ordinary task or
 * the first loader has waited for too long. Critical threads are then charged like ordinary tasks. Any
 * long wait of the observer is too long, because without its heartbeat nobody has a rank.
 */
#ifndef ZERNEL_SCHED_GUARANTEE_H
#define ZERNEL_SCHED_GUARANTEE_H

#include "queue.bpf.h"

/* Adds the CPU time that the guarantee gives to ordinary tasks, and subtracts what they got. What
 * they got beyond the promise is no credit. More than a slice per CPU is forgotten: it is time that
 * the tasks could not use, because they may not run on all CPUs. Of several CPUs that do this at
 * once, one succeeds. */
static void add_guaranteed_time(__u64 now_ns)
{
	__u64 before_ns = promised_up_to_ns;
	__s64 largest_ns = settings.slice_ns * usable_cpus();
	__s64 elapsed_ns = now_ns - before_ns, wanted_ns;
	__u64 guaranteed_ns;

	if (elapsed_ns <= 0 ||
	    !__sync_bool_compare_and_swap(&promised_up_to_ns, before_ns, now_ns) ||
	    elapsed_ns >= (__s64)SECOND_NS)
		return;
	guaranteed_ns = (__u64)elapsed_ns * usable_cpus() * settings.guarantee_percent / 100;
	wanted_ns = promised_ordinary_ns - elapsed_ns * ordinary_cpus;
	if (ordinary_weight > 0 && root_active_weight > 0)
		wanted_ns += guaranteed_ns * (__u64)ordinary_weight / (__u64)root_active_weight;
	if (wanted_ns < 0)
		wanted_ns = 0;
	promised_ordinary_ns = wanted_ns < largest_ns ? wanted_ns : largest_ns;
}

/* Sets the promised CPU time to 0: there is no ordinary task, or a CPU is idle. */
static void clear_guaranteed_time(__u64 now_ns)
{
	if (!settings.may_privilege)
		return;
	promised_up_to_ns = now_ns;
	promised_ordinary_ns = 0;
}

/* Updates whether an ordinary task waits. While none waits, no ordinary task loses CPU time. */
static void note_whether_ordinary_task_waits(__u64 now_ns)
{
	bool waits = any_ordinary_task_waits();

	if (ordinary_task_waits != waits)
		ordinary_task_waits = waits;
	if (waits)
		return;
	if (ordinary_cpus > 0)
		promised_up_to_ns = now_ns;
	else
		clear_guaranteed_time(now_ns);
}

/* Advances the promised clock of the tasks that are pinned to a CPU by what all CPUs give to tasks
 * with this sum of weights. Of several CPUs that do it at once, one succeeds. */
static void advance_promised_vtime(struct clock *clock, __u64 now_ns, __s64 weight)
{
	__u64 before_ns = clock->promised_up_to_ns;
	__s64 elapsed_ns = now_ns - before_ns;

	if (elapsed_ns <= 0 ||
	    !__sync_bool_compare_and_swap(&clock->promised_up_to_ns, before_ns, now_ns))
		return;
	if (weight > 0 && elapsed_ns < (__s64)SECOND_NS)
		clock->promised_vtime += (__u64)elapsed_ns * usable_cpus() * settings.guarantee_percent / weight;
	/* What others got beyond the promise is no credit. */
	if (is_before(clock->promised_vtime, clock->now))
		clock->promised_vtime = clock->now;
}

/* The tasks that are pinned to a CPU have lost nothing: none of them is ordinary. Their clock stood still while they
 * went first, so it is not behind the shared one. */
static void reset_promised_vtime(struct cpu *cpu, __u64 now_ns)
{
	struct clock *clock = &cpu->pinned_clock;

	clock->promised_up_to_ns = now_ns;
	clock->promised_vtime = clock->now;
	if (is_before(clock->now + cpu->offset_to_shared_clock, shared_clock.now))
		cpu->offset_to_shared_clock = shared_clock.now - clock->now;
}

/* The loss, in virtual time of a task with nice 0, that tasks pinned to a CPU must bear. */
static __s64 max_tolerated_loss_vtime(void)
{
	return settings.slice_ns ?: 1;
}

/* Whether a CPU must run an ordinary task: for each slice that is promised, one CPU does. */
static bool must_run_ordinary_task(const struct cpu *cpu)
{
	__s64 others = ordinary_cpus - cpu->is_ordinary;

	return promised_ordinary_ns >= (others + 1) * (__s64)settings.slice_ns;
}

/* Whether the ordinary tasks that are pinned to a CPU have lost too much. A pinned task that goes first loses nothing. */
static bool pinned_lost_too_much(__u32 number, __u64 now_ns)
{
	struct cpu *cpu = cpu_at(number);
	bool runs_ordinary = cpu->runs_pinned && cpu->rank == RANK_ORDINARY;

	if (!runs_ordinary && !scx_bpf_dsq_nr_queued(CPU_QUEUE(number))) {
		reset_promised_vtime(cpu, now_ns);
		return false;
	}
	advance_promised_vtime(&cpu->pinned_clock, now_ns, weight_beside_pinned_tasks(cpu));
	return (__s64)(cpu->pinned_clock.promised_vtime - cpu->pinned_clock.now) >= max_tolerated_loss_vtime();
}

/* Whether a virtual time is three slices behind another one. */
static bool is_far_behind(__u64 vtime, __u64 other)
{
	return (__s64)(other - vtime) >= 3 * max_tolerated_loss_vtime();
}

/* Whether the first task of this rank in a queue has waited for too long. */
static bool first_waits_too_long(__u64 queue, enum rank rank, __u32 number, __u64 now_ns)
{
	struct first_task first = {};

	return find_first_task_for_cpu(RANK_QUEUE(queue, rank), number, &first) &&
	       has_waited(first.runnable_ns, first.max_wait_ns, now_ns);
}

/* Whether the first ordinary task that a CPU could run has lost too much by itself, or whether that
 * task or the first loader has waited for too long. */
static bool first_ordinary_lost_too_much(__u32 number, __u64 now_ns)
{
	__u64 queue = LLC_QUEUE(llc_of(number));
	struct cpu *cpu = cpu_at(number);
	struct first_task first = {};
	bool found = find_first_task_for_cpu(queue, number, &first);

	cpu->loader_waits_too_long = first_waits_too_long(queue, RANK_FEED, number, now_ns) ||
			     first_waits_too_long(CPU_QUEUE(number), RANK_FEED, number, now_ns);
	cpu->task_waits_too_long = cpu->loader_waits_too_long || (found && has_waited(first.runnable_ns, first.max_wait_ns, now_ns)) ||
				   first_waits_too_long(CPU_QUEUE(number), RANK_ORDINARY, number, now_ns);
	return cpu->task_waits_too_long || (found && is_far_behind(first.vtime, shared_clock.now));
}

/* Notes on its own CPU which rank runs, or is about to; `is_busy`: anything does. */
static void set_running_rank(struct cpu *cpu, enum rank rank, bool is_busy, __u64 now_ns)
{
	bool is_ordinary = is_busy && rank == RANK_ORDINARY && !cpu->runs_pinned;

	cpu->rank = cpu->is_lent ? RANK_CRITICAL : rank;
	if (!settings.may_privilege || cpu->is_ordinary == is_ordinary)
		return;
	add_guaranteed_time(now_ns);
	cpu->is_ordinary = is_ordinary;
	__sync_fetch_and_add(&ordinary_cpus, is_ordinary ? 1LL : -1LL);
}

/* Counts a CPU as lost to a higher scheduling class, or no longer. The guarantee is a part of the other CPUs. */
static void set_lost(struct cpu *cpu, bool is_lost, __u64 now_ns)
{
	if (cpu->is_lost == is_lost)
		return;
	if (settings.may_privilege)
		add_guaranteed_time(now_ns);
	cpu->is_lost = is_lost;
	__sync_fetch_and_add(&lost_cpus, is_lost ? 1 : -1);
}

/* Whether critical threads and loaders may go first on a CPU now. */
static bool may_go_first(__u32 number, __u64 now_ns)
{
	add_guaranteed_time(now_ns);
	return !must_run_ordinary_task(cpu_at(number)) && !pinned_lost_too_much(number, now_ns);
}

#endif
