/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What others keep beside critical threads and loaders.
 *
 * Were everybody treated alike, a clock would advance by CPUs / (sum of the weights of all runnable
 * tasks). The promised clock advances at a fraction of that speed, the guarantee. Tasks that go
 * first do not advance the clock, so it slows down while they take more than their share. How far
 * it is behind the promised clock is what others have lost. While this is below a limit, ranks go
 * first on all CPUs. At the limit one CPU must run an ordinary task, and the more the larger the
 * loss is: all CPUs at twice the limit. So others are paid by few CPUs all the time and not by all
 * CPUs now and then. The limit is 5 ms for loaders and 10 ms for critical threads: so loaders never
 * use up what is left for critical threads. A task that may not go first is scheduled like all
 * others.
 *
 * The shared clock has a promise, and the clock of each CPU has one for the tasks pinned there: a
 * critical thread goes first on a CPU only while neither has lost too much.
 */
#ifndef ZERNEL_SCHED_GUARANTEE_H
#define ZERNEL_SCHED_GUARANTEE_H

#include "queue.bpf.h"

/* How far a clock may fall behind its promise, in virtual time of a task with nice 0. */
#define LARGEST_LOSS 10000000LL
/* A CPU serves all of its queues at least this often, in the order of virtual times. */
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

/* Nobody has lost anything: none of the clock's tasks waits. */
static void promise_kept(struct clock *clock, __u64 now_ns)
{
	if (!settings.may_privilege)
		return;
	clock->promised_up_to_ns = now_ns;
	clock->promised = clock->now;
}

static __s64 largest_loss(enum rank rank)
{
	return rank == CRITICAL ? LARGEST_LOSS : LARGEST_LOSS / 2;
}

static __s64 loss_of(const struct clock *clock)
{
	return clock->promised - clock->now;
}

/* Whether a CPU must run an ordinary task, because too few others do. */
static bool must_pay(const struct cpu *cpu, enum rank rank)
{
	__s64 beyond = loss_of(&shared_clock) - largest_loss(rank);
	__s64 others = ordinary_cpus - cpu->is_ordinary;

	return beyond >= 0 && others < 1 + beyond * settings.cpus / largest_loss(rank);
}

/* Whether the tasks that are pinned to a CPU have lost too much. They can get no more than their
 * CPU, nor more than they would get elsewhere. */
static bool pinned_lost_too_much(__u32 number, enum rank rank, __u64 now_ns)
{
	struct cpu *cpu = cpu_at(number);
	__s64 here = cpu->pinned_weight * settings.cpus;
	__s64 everywhere = root_active;

	if (!cpu->runs_pinned && !scx_bpf_dsq_nr_queued(CPU_QUEUE(number))) {
		promise_kept(&cpu->clock, now_ns);
		return false;
	}
	promise(&cpu->clock, now_ns, settings.cpus, here > everywhere ? here : everywhere);
	return loss_of(&cpu->clock) >= largest_loss(rank);
}

/* Whether a task of this rank may go first on a CPU now. */
static bool may_go_first(__u32 number, enum rank rank, __u64 now_ns)
{
	promise(&shared_clock, now_ns, settings.cpus, root_active);
	if (!must_pay(cpu_at(number), rank) && !pinned_lost_too_much(number, rank, now_ns))
		return true;
	counters.guarantee_hits++;
	return false;
}

#endif
