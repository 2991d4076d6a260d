/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What others keep beside critical threads and loaders.
 *
 * Were all tasks treated alike, a clock would advance by CPUs / (sum of the weights of all runnable
 * tasks). The promised clock advances at a fraction of that speed, the guarantee. Tasks that go
 * first do not advance the clock, so it slows down while they take more than their share. How far
 * it is behind the promised clock is what others have lost. While this is less than a slice, ranks
 * go first on all CPUs. Then one CPU must run an ordinary task, and the more the larger the loss
 * is: all CPUs once it is two slices. So others are paid by few CPUs all the time and not by all
 * CPUs now and then. On those CPUs critical threads and loaders are scheduled like all others. On
 * the rest critical threads go before loaders, so loaders take nothing from them.
 *
 * The shared clock has a promise, and the clock of each CPU has one for the tasks pinned there: a
 * critical thread goes first on a CPU only while neither has lost too much. Tasks that may use some
 * CPUs only can lose more than others. So a CPU serves all of its queues by virtual time when the
 * first ordinary task has lost three slices by itself. The same rule protects a tenant with
 * tasks that lose more than those of others.
 *
 * So nobody waits longer than it takes the promised clock to advance by three slices. A small
 * guarantee would make this long, so a CPU also serves all of its queues ten times a second.
 */
#ifndef ZERNEL_SCHED_GUARANTEE_H
#define ZERNEL_SCHED_GUARANTEE_H

#include "queue.bpf.h"

/* A CPU serves all of its queues by virtual time at least this often. */
#define LONGEST_HOLD_NS (SECOND_NS / 10)

/* Advances a promised clock by what `cpus` CPUs give to tasks with this sum of weights. Of several
 * CPUs that do it at once, one succeeds. */
static void promise(struct clock *clock, __u64 now_ns, __u64 cpus, __s64 weight)
{
	__u64 before_ns = clock->promised_up_to_ns;
	__s64 elapsed_ns = now_ns - before_ns;

	if (elapsed_ns <= 0 ||
	    !__sync_bool_compare_and_swap(&clock->promised_up_to_ns, before_ns, now_ns))
		return;
	if (weight > 0 && elapsed_ns < (__s64)SECOND_NS)
		clock->promised += (__u64)elapsed_ns * cpus * settings.guarantee_percent / weight;
	/* What others got beyond the promise is no credit. */
	if (is_before(clock->promised, clock->now))
		clock->promised = clock->now;
}

/* Nobody has lost anything: the clock has no ordinary task, or a CPU is idle. */
static void promise_kept(struct clock *clock, __u64 now_ns)
{
	if (!settings.may_privilege)
		return;
	clock->promised_up_to_ns = now_ns;
	clock->promised = clock->now;
}

/* Nobody loses anything while no ordinary task waits. */
static void note_waiting(__u64 now_ns)
{
	bool waits = ordinary_waits();

	if (others_wait != waits)
		others_wait = waits;
	if (waits)
		return;
	if (ordinary_cpus > 0)
		shared_clock.promised_up_to_ns = now_ns;
	else
		promise_kept(&shared_clock, now_ns);
}

/* The loss, in virtual time of a task with nice 0, at which the first CPU must pay. */
static __s64 largest_loss(void)
{
	return settings.slice_ns ?: 1;
}

static __s64 loss_of(const struct clock *clock)
{
	return clock->promised - clock->now;
}

/* Whether a CPU must run an ordinary task, because too few others do. */
static bool must_pay(const struct cpu *cpu)
{
	__s64 beyond = loss_of(&shared_clock) - largest_loss();
	__s64 others = ordinary_cpus - cpu->is_ordinary;

	return beyond >= 0 &&
	       others < (__s64)(1 + (__u64)beyond * settings.cpus / (__u64)largest_loss());
}

/* Whether the ordinary tasks that are pinned to a CPU have lost too much. They can get no more than
 * their CPU, nor more than they would get elsewhere. A pinned task that goes first loses nothing. */
static bool pinned_lost_too_much(__u32 number, __u64 now_ns)
{
	struct cpu *cpu = cpu_at(number);
	__s64 here = cpu->pinned_weight * settings.cpus;
	__s64 everywhere = root_active;
	bool runs_ordinary = cpu->runs_pinned && cpu->rank == ORDINARY;

	if (!runs_ordinary && !scx_bpf_dsq_nr_queued(CPU_QUEUE(number))) {
		promise_kept(&cpu->clock, now_ns);
		return false;
	}
	promise(&cpu->clock, now_ns, settings.cpus, here > everywhere ? here : everywhere);
	return loss_of(&cpu->clock) >= largest_loss();
}

/* Whether the first ordinary task that a CPU could run has lost too much by itself. */
static bool first_lost_too_much(__u32 number, __u64 now_ns)
{
	__u64 vtime = 0;

	if (now_ns - cpu_at(number)->served_ns > LONGEST_HOLD_NS)
		return true;
	return first_vtime(LLC_QUEUE(llc_of(number)), number, &vtime) &&
	       (__s64)(shared_clock.promised - vtime) >= 3 * largest_loss();
}

/* Whether critical threads and loaders may go first on a CPU now. */
static bool may_go_first(__u32 number, __u64 now_ns)
{
	promise(&shared_clock, now_ns, settings.cpus, root_active);
	if (!must_pay(cpu_at(number)) && !pinned_lost_too_much(number, now_ns))
		return true;
	counters.guarantee_hits++;
	return false;
}

#endif
