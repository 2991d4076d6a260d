/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The class of a thread: what a scheduler needs to know about it. A function of its role, its phase
 * and a few flags; the twin of zernel-phase's class.rs. docs/architecture.md explains it.
 *
 * A class describes a thread that is runnable. Nobody schedules a blocked thread, so the class of a
 * blocked thread is the one that it will have when it wakes up: a thread that blocks until the GPU
 * is done is critical then.
 *
 * Include the kernel's types first: kernel.h, or vmlinux.h. Needs no helper and no map.
 */
#ifndef ZERNEL_CLASS_H
#define ZERNEL_CLASS_H

#include "task_state.h"

/* Zeroed memory is other. The values are part of the interface: see docs/hints.md. */
enum zernel_class {
	ZERNEL_CLASS_OTHER, /* nothing is known to wait for it */
	ZERNEL_CLASS_CRITICAL, /* a delay of the thread delays the step */
	ZERNEL_CLASS_FEED, /* a delay of the thread delays the next batch */
	ZERNEL_CLASS_GPU_WAIT, /* it spins until the GPU is done */
	ZERNEL_CLASSES, /* how many there are */
};

enum zernel_role {
	ZERNEL_ROLE_NONE, /* not a thread of an ML process, or it has exited */
	ZERNEL_ROLE_TRAINER, /* it runs a training loop, or another loop that uses the GPU */
	ZERNEL_ROLE_HELPER, /* another thread of the same process */
	ZERNEL_ROLE_LOADER, /* it loads data for a trainer, in that process or in another one */
	ZERNEL_ROLES, /* how many there are */
};

/* Why a thread has its class. */
enum zernel_reason {
	ZERNEL_REASON_UNKNOWN, /* there is no evidence */
	ZERNEL_REASON_COMPUTES, /* it launches, copies or is in a backward pass */
	ZERNEL_REASON_COLLECTIVE, /* it is in a collective, or waits for one */
	ZERNEL_REASON_OPTIMIZER, /* it updates the model */
	ZERNEL_REASON_GPU_SYNC, /* it waits for the GPU */
	ZERNEL_REASON_DATA, /* it gets its next batch */
	ZERNEL_REASON_LOADS, /* it loads data for a trainer */
	ZERNEL_REASONS, /* how many there are */
};

/*
 * The class word: everything about the class in one u64, written with one store.
 *
 *   bits  0-3   class
 *   bits  4-7   reason
 *   bits  8-11  role
 *   bits 12-15  enum zernel_class_flags
 *   bits 16-63  since when class and reason are these, in units of 1024 ns
 */
enum zernel_class_bits {
	ZERNEL_CLASS_FIELD_BITS = 4,
	ZERNEL_CLASS_REASON_SHIFT = 4,
	ZERNEL_CLASS_ROLE_SHIFT = 8,
	ZERNEL_CLASS_SINCE_SHIFT = 16,
	ZERNEL_CLASS_UNIT_SHIFT = 10,
};

enum zernel_class_flags {
	ZERNEL_CLASS_IN_SYNC = 1 << 12, /* in a call that waits for the GPU */
	ZERNEL_CLASS_DRIVES_STEPS = 1 << 13, /* a trainer with a known phase */
	ZERNEL_CLASS_BLOCKED = 1 << 14, /* it was blocked when it left its CPU */
	ZERNEL_CLASS_SAMPLED = 1 << 15, /* the sampled rule decided the class: the calls of the thread are not probed */
};

#define ZERNEL_CLASS_NO_DEADLINE (~0ULL) /* class_until_ns: no deadline */
#define ZERNEL_CLASS_FIELD_MASK ((1ULL << ZERNEL_CLASS_FIELD_BITS) - 1)

static inline __u8 zernel_role_of(const struct zernel_task_state *task)
{
	if (!(task->flags & ZERNEL_TASK_IS_ML))
		return ZERNEL_ROLE_NONE;
	if (task->flags & ZERNEL_TASK_IS_LOADER)
		return ZERNEL_ROLE_LOADER;
	return task->tracker.flags & ZERNEL_TRAINING_THREAD ? ZERNEL_ROLE_TRAINER :
							      ZERNEL_ROLE_HELPER;
}

/* Why a thread with this role has its class. A loader needs no evidence but its role. */
static inline __u8 zernel_reason_of(__u8 role, __u8 phase, int in_sync)
{
	if (role == ZERNEL_ROLE_NONE)
		return ZERNEL_REASON_UNKNOWN;
	if (role == ZERNEL_ROLE_LOADER)
		return ZERNEL_REASON_LOADS;
	switch (phase) {
	case ZERNEL_GPU_COMPUTE:
		return in_sync ? ZERNEL_REASON_GPU_SYNC : ZERNEL_REASON_COMPUTES;
	case ZERNEL_NCCL_COLLECTIVE:
		return ZERNEL_REASON_COLLECTIVE;
	case ZERNEL_OPTIMIZER_STEP:
		return ZERNEL_REASON_OPTIMIZER;
	case ZERNEL_DATA_LOADING:
		return ZERNEL_REASON_DATA;
	default:
		return ZERNEL_REASON_UNKNOWN;
	}
}

/* The class of a thread that runs, is runnable, or wakes up from a block. */
static inline __u8 zernel_class_for(__u8 reason, int wakes_up)
{
	switch (reason) {
	case ZERNEL_REASON_COMPUTES:
	case ZERNEL_REASON_COLLECTIVE:
	case ZERNEL_REASON_OPTIMIZER:
		return ZERNEL_CLASS_CRITICAL;
	case ZERNEL_REASON_GPU_SYNC:
		return wakes_up ? ZERNEL_CLASS_CRITICAL : ZERNEL_CLASS_GPU_WAIT;
	case ZERNEL_REASON_DATA:
	case ZERNEL_REASON_LOADS:
		return ZERNEL_CLASS_FEED;
	default:
		return ZERNEL_CLASS_OTHER;
	}
}

/* The lower 16 bits of the class word. */
static inline __u64 zernel_class_fields(const struct zernel_task_state *task)
{
	__u16 flags = task->tracker.flags;
	__u8 phase = zernel_word_phase(task->phase_word);
	__u8 role = zernel_role_of(task);
	int is_sampled = task->flags & ZERNEL_TASK_IS_SAMPLED;
	/* The sampled rule's GPU compute is a thread that was off its CPU while its GPU worked. */
	int in_sync = is_sampled ? phase == ZERNEL_GPU_COMPUTE : flags & ZERNEL_IN_SYNC;
	__u8 reason = zernel_reason_of(role, phase, in_sync);
	__u64 fields = zernel_class_for(reason, is_sampled || flags & ZERNEL_IS_BLOCKED);

	fields |= reason << ZERNEL_CLASS_REASON_SHIFT | role << ZERNEL_CLASS_ROLE_SHIFT;
	if (role == ZERNEL_ROLE_NONE)
		return fields;
	if (in_sync)
		fields |= ZERNEL_CLASS_IN_SYNC;
	if (is_sampled)
		fields |= ZERNEL_CLASS_SAMPLED;
	if (flags & ZERNEL_IS_BLOCKED)
		fields |= ZERNEL_CLASS_BLOCKED;
	if (role == ZERNEL_ROLE_TRAINER && phase != ZERNEL_UNKNOWN)
		fields |= ZERNEL_CLASS_DRIVES_STEPS;
	return fields;
}

/* Publishes the class of a task after an event of its tracker, or a change of its role. */
static inline void zernel_publish_class(struct zernel_task_state *task, __u64 now_ns)
{
	const __u64 all = (1ULL << ZERNEL_CLASS_SINCE_SHIFT) - 1;
	const __u64 class_and_reason = (1ULL << ZERNEL_CLASS_ROLE_SHIFT) - 1;
	__u64 fields = zernel_class_fields(task);
	__u64 before = task->class_word;
	__u64 since = before & ~all;
	/* A loader has its class until its process ends or trains itself. */
	int is_loader = task->flags & ZERNEL_TASK_IS_LOADER;

	*(volatile __u64 *)&task->class_until_ns =
		is_loader ? ZERNEL_CLASS_NO_DEADLINE : task->tracker.deadline_ns;
	if ((before & all) == fields)
		return;
	if (!before || (before ^ fields) & class_and_reason)
		since = now_ns >> ZERNEL_CLASS_UNIT_SHIFT << ZERNEL_CLASS_SINCE_SHIFT;
	*(volatile __u64 *)&task->class_word = since | fields;
}

static inline __u8 zernel_word_class(__u64 class_word)
{
	__u8 class = class_word & ZERNEL_CLASS_FIELD_MASK;

	return class < ZERNEL_CLASSES ? class : ZERNEL_CLASS_OTHER;
}

static inline __u8 zernel_word_reason(__u64 class_word)
{
	__u8 reason = class_word >> ZERNEL_CLASS_REASON_SHIFT & ZERNEL_CLASS_FIELD_MASK;

	return reason < ZERNEL_REASONS ? reason : ZERNEL_REASON_UNKNOWN;
}

static inline __u8 zernel_word_role(__u64 class_word)
{
	__u8 role = class_word >> ZERNEL_CLASS_ROLE_SHIFT & ZERNEL_CLASS_FIELD_MASK;

	return role < ZERNEL_ROLES ? role : ZERNEL_ROLE_NONE;
}

/* Since when class and reason are these, rounded down to 1024 ns. */
static inline __u64 zernel_word_since_ns(__u64 class_word)
{
	return class_word >> ZERNEL_CLASS_SINCE_SHIFT << ZERNEL_CLASS_UNIT_SHIFT;
}

/*
 * The class word of a task at `now_ns`, for readers. After the deadline only the role is left: the
 * class is other, the reason unknown, and no flag is set. A scheduler passes the time at which a
 * runnable task became runnable, because deadlines stand still while a thread waits for a CPU.
 */
static inline __u64 zernel_class_word_at(const struct zernel_task_state *task, __u64 now_ns)
{
	__u64 word = *(volatile const __u64 *)&task->class_word;
	__u64 until_ns = *(volatile const __u64 *)&task->class_until_ns;

	if (now_ns < until_ns)
		return word;
	return word & ZERNEL_CLASS_FIELD_MASK << ZERNEL_CLASS_ROLE_SHIFT;
}

#endif
