/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Lending. A training thread that spins until the GPU is done needs its CPU only to see that the GPU is
 * done. In the first part of the wait it lends the CPU to loaders and ordinary tasks, in short turns. After each
 * turn it runs for a moment and sees whether the GPU is done (a poll), so its wait ends a turn too late
 * at most. If a task has lost too much or waited for too long, the usual order decides instead.
 *
 * Slices end at ticks, so a timer per CPU begins and ends the turns. It runs while a privileged training
 * thread does. During a turn the spinner waits in the local queue of its CPU, behind the borrower: no other
 * CPU can take it, and it runs next however the turn ends. The CPU keeps the spinner's rank for tasks
 * that wake up, so that none of them takes the turn.
 */
#ifndef ZERNEL_SCHED_LEND_H
#define ZERNEL_SCHED_LEND_H

#include "rank.bpf.h"

/* How much later a wait may end: the length of a turn. */
#define LEND_TURN_NS 200000ULL
/* Time in which a spinner sees that the GPU is done. */
#define GPU_POLL_NS (LEND_TURN_NS / 8)
/* The part of a wait in which the CPU is lent. Waits vary. */
#define LENT_WAIT_PERCENT 70

struct lend_timer {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CPUS);
	__type(key, __u32);
	__type(value, struct lend_timer);
} lend_timers SEC(".maps");

static struct lend_timer *lend_timer_of(__u32 number)
{
	return bpf_map_lookup_elem(&lend_timers, &number);
}

/* Has the timer of this CPU look at what runs, in `ns`; 0: not at all. */
static void start_lend_timer(__u32 number, __u64 ns)
{
	struct lend_timer *timer = ns ? lend_timer_of(number) : NULL;

	if (timer)
		cpu_at(number)->lend_timer_runs =
			!bpf_timer_start(&timer->timer, ns, BPF_F_TIMER_CPU_PIN);
}

/* The class word of a task that may lend its CPU: a training thread. 0: it is none. */
static __u64 class_word_of_trainer(struct task_struct *p, __u64 now_ns)
{
	const struct zernel_task_state *state = bpf_task_storage_get(&zernel_tasks, p, 0, 0);
	__u64 word = state ? class_word_at(state, now_ns) : 0;

	return zernel_word_role(word) == ZERNEL_ROLE_TRAINER ? word : 0;
}

/* Whether a training thread spins until the GPU is done. */
static bool spins_until_gpu_done(struct task_struct *p, __u64 now_ns)
{
	return zernel_word_class(class_word_of_trainer(p, now_ns)) == ZERNEL_CLASS_GPU_WAIT;
}

static void push_length(struct last_two_lengths *lengths, __u64 length_ns)
{
	lengths->previous_ns = lengths->last_ns;
	lengths->last_ns = length_ns;
}

/* The length that is expected next: the shorter of the last two, so that a job whose waits vary lends less.
 * 0: too few were seen. */
static __u64 expected_length_ns(const struct last_two_lengths *lengths)
{
	return lengths->last_ns < lengths->previous_ns ? lengths->last_ns : lengths->previous_ns;
}

/* Notes when a training thread begins and ends to spin. A wait ends when the next class begins. */
static void record_gpu_wait(struct task *task, __u64 word)
{
	bool is_wait = zernel_word_class(word) == ZERNEL_CLASS_GPU_WAIT;
	__u64 since_ns = zernel_word_since_ns(word);

	if (task->gpu_wait_since_ns == since_ns)
		return;
	if (task->gpu_wait_since_ns && is_before(task->gpu_wait_since_ns, since_ns)) {
		push_length(&task->gpu_waits, since_ns - task->gpu_wait_since_ns);
		task->gpu_wait_ended_ns = since_ns;
	}
	if (is_wait)
		push_length(&task->between_gpu_waits, since_ns - task->gpu_wait_ended_ns);
	task->gpu_wait_since_ns = is_wait ? since_ns : 0;
}

/* How long the next turn may be: until the end of the first part of the wait. 0: the CPU is not lent. */
static __u64 compute_turn_ns(const struct task *task)
{
	__u64 lent_ns = expected_length_ns(&task->gpu_waits) * LENT_WAIT_PERCENT / 100;
	/* By CLOCK_MONOTONIC, the clock of the observer, not by the clock of the scheduler. */
	__s64 left_ns = task->gpu_wait_since_ns + lent_ns - bpf_ktime_get_ns();

	/* A turn is longer than the poll after it. */
	if (!task->gpu_wait_since_ns || left_ns <= (__s64)GPU_POLL_NS)
		return 0;
	return left_ns < (__s64)LEND_TURN_NS ? left_ns : LEND_TURN_NS;
}

/* When to look at a training thread that lends nothing now. In a wait: when it is expected to end. Between waits:
 * after half of the expected time. If a wait was not seen, that half ends in the next one. 0: it has not spun for a
 * second. Then ticks look at it. */
static __u64 ns_until_next_check(const struct task *task)
{
	__u64 now_ns = bpf_ktime_get_ns(), at_ns;

	if (task->gpu_wait_since_ns)
		at_ns = task->gpu_wait_since_ns + expected_length_ns(&task->gpu_waits);
	else if (now_ns - task->gpu_wait_ended_ns > SECOND_NS)
		return 0;
	else
		at_ns = task->gpu_wait_ended_ns + expected_length_ns(&task->between_gpu_waits) / 2;
	return is_before(now_ns + LEND_TURN_NS, at_ns) ? at_ns - now_ns : LEND_TURN_NS;
}

/* Whether a task waits that may borrow a CPU. A critical thread that waits gets the CPU at a tick. */
static bool borrower_waits(__u32 number)
{
	return !queued_of_rank(number, RANK_CRITICAL) &&
	       (queued_of_rank(number, RANK_FEED) || queued_of_rank(number, RANK_ORDINARY));
}

/* Looks at the task that runs on a CPU: ends its turn, or has it lend the CPU. Returns when to look
 * again; 0: the timer stops. */
static __u64 begin_or_end_loan(struct cpu *cpu, __u32 number, struct task_struct *p, __u64 now_ns)
{
	struct task *task = task_of(p);
	__u64 word;

	if (cpu->is_lent) {
		scx_bpf_kick_cpu(number, SCX_KICK_PREEMPT);
		return 0;
	}
	if (!settings.lends || !task || rank_of_task(p, task, now_ns) != RANK_CRITICAL)
		return 0;
	word = class_word_of_trainer(p, now_ns);
	if (!word)
		return 0;
	record_gpu_wait(task, word);
	cpu->turn_ns = compute_turn_ns(task);
	if (!cpu->turn_ns)
		return ns_until_next_check(task);
	if (borrower_waits(number)) {
		cpu->lender_tid = p->pid;
		scx_bpf_kick_cpu(number, SCX_KICK_PREEMPT);
	}
	return LEND_TURN_NS;
}

static int on_lend_timer(void *map, __u32 *key, struct lend_timer *timer)
{
	__u32 number = *key;
	struct cpu *cpu = cpu_at(number);
	__u64 next_ns = 0;

	/* The timers of a CPU that is switched off go to another one. */
	if (bpf_get_smp_processor_id() == number) {
		/* Up to 6.17 the verifier takes the callback for sleepable. */
		bpf_rcu_read_lock();
		next_ns = begin_or_end_loan(cpu, number, bpf_get_current_task_btf(), scx_bpf_now());
		bpf_rcu_read_unlock();
	}
	cpu->lend_timer_runs = next_ns > 0;
	if (next_ns)
		bpf_timer_start(&timer->timer, next_ns, BPF_F_TIMER_CPU_PIN);
	return 0;
}

static __s32 prepare_lend_timers(void)
{
	struct lend_timer *timer;
	__u32 number;

	for (number = 0; number < MAX_CPUS && number < settings.cpu_count; number++) {
		timer = lend_timer_of(number);
		if (!timer)
			return -22; /* EINVAL */
		bpf_timer_init(&timer->timer, &lend_timers, CLOCK_MONOTONIC);
		bpf_timer_set_callback(&timer->timer, on_lend_timer);
	}
	return 0;
}

static void end_loan(struct cpu *cpu)
{
	cpu->is_lent = false;
	cpu->lender_tid = 0;
}

/* Gives the CPU of the spinner that ran last to a borrower for a turn, if the timer asked for it and the
 * spinner may go on. A CPU that must pay the guarantee lends to ordinary tasks only. */
static bool lend_cpu_of_spinner(struct task_struct *prev, const struct task *task, __u32 number, __u64 now_ns)
{
	struct cpu *cpu = cpu_at(number);
	bool is_lender = !cpu->is_lent && task && prev->pid == cpu->lender_tid;

	end_loan(cpu);
	if (!is_lender || !spins_until_gpu_done(prev, now_ns))
		return false;
	note_whether_ordinary_task_waits(now_ns);
	add_guaranteed_time(now_ns);
	/* The usual order serves tasks that lost too much, or waited for too long. Turns would put it off for ever. */
	if (first_ordinary_lost_too_much(number, now_ns) || pinned_lost_too_much(number, now_ns))
		return false;
	if (!(!must_run_ordinary_task(cpu) && dispatch_task_of_rank(number, RANK_FEED)) && !dispatch_task_of_rank(number, RANK_ORDINARY))
		return false;
	counters.lent++;
	cpu->is_lent = true;
	cpu->lender_tid = prev->pid;
	return true;
}

/* Whether a task that stopped running has lent its CPU, and so stays there. */
static bool stays_behind_borrower(const struct task_struct *p, __u32 number, __u64 enq_flags)
{
	const struct cpu *cpu = cpu_at(number);

	return cpu->is_lent && cpu->lender_tid == p->pid &&
	       !(enq_flags & (SCX_ENQ_WAKEUP | SCX_ENQ_REENQ));
}

/* A task with this rank begins to run: a borrower its turn, a spinner its poll, or a training thread. A tick
 * ends the turn too if the timer does not. */
static void begin_turn_or_gpu_poll(struct task_struct *p, struct task *task, __u32 number, enum rank rank,
		       __u64 now_ns)
{
	struct cpu *cpu = cpu_at(number);
	bool is_poll = cpu->is_lent && cpu->lender_tid == p->pid;
	__u64 word;

	if (cpu->is_lent && !is_poll) {
		set_slice(p, cpu->turn_ns);
		start_lend_timer(number, cpu->turn_ns);
		return;
	}
	end_loan(cpu);
	word = rank == RANK_CRITICAL ? class_word_of_trainer(p, now_ns) : 0;
	if (!word)
		return;
	record_gpu_wait(task, word);
	start_lend_timer(number, is_poll ? GPU_POLL_NS : ns_until_next_check(task));
}

/* A task stops running. Counts the turn of a borrower, and notes the end of a training thread's GPU wait. A wait
 * that has begun unnoticed is noticed when the thread runs again. */
static void end_turn_or_gpu_poll(struct task_struct *p, struct task *task, const struct cpu *cpu, __u64 now_ns)
{
	__u64 word;

	if (cpu->is_lent && cpu->lender_tid != p->pid) {
		__sync_fetch_and_add(&lent_ns, now_ns - cpu->running_since_ns);
		return;
	}
	if (!task->gpu_wait_since_ns)
		return;
	word = class_word_of_trainer(p, now_ns);
	if (word)
		record_gpu_wait(task, word);
}

/* At a tick: notes a wait that began before the timer expects it, and has the timer look at a training thread
 * that was none when it began to run. */
static void watch_trainer(struct task_struct *p, struct task *task, __u32 number, enum rank rank,
			  __u64 now_ns)
{
	__u64 word = rank == RANK_CRITICAL ? class_word_of_trainer(p, now_ns) : 0;
	__u64 since_ns = task->gpu_wait_since_ns;

	if (!word)
		return;
	record_gpu_wait(task, word);
	if (task->gpu_wait_since_ns && task->gpu_wait_since_ns != since_ns)
		start_lend_timer(number, LEND_TURN_NS);
	else if (!cpu_at(number)->lend_timer_runs)
		start_lend_timer(number, ns_until_next_check(task));
}

#endif
