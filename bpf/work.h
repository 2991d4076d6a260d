/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Total time that several threads have spent on one kind of work, including threads still working,
 * in one word. The lower 22 bits count the threads at work now; Linux has at most as many. The rest
 * is the sum of their end times less the sum of their start times, in units of 1,024 ns. So a
 * change is one atomic addition, and a reader adds "now" once per thread still at work. Sums wrap;
 * differences are right up to 26 days of all threads together.
 */
#ifndef ZERNEL_WORK_H
#define ZERNEL_WORK_H

#include "kernel.h"
#include "btf.h"

/* Kinds of work of a thread that loads data. Waiting for a request is not work. */
enum zernel_work_kind {
	ZERNEL_WORK_PREPARE, /* on a CPU */
	ZERNEL_WORK_FETCH, /* blocked on a disk, the network or a page */
	ZERNEL_WORK_QUEUED, /* runnable and not running */
	ZERNEL_WORK_KINDS, /* how many there are */
};
ZERNEL_IN_BTF(enum, zernel_work_kind);

#define ZERNEL_WORK_UNIT_SHIFT 10
#define ZERNEL_WORK_COUNT_BITS 22

static inline __u64 zernel_work_timestamp(__u64 now_ns)
{
	return now_ns >> ZERNEL_WORK_UNIT_SHIFT << ZERNEL_WORK_COUNT_BITS;
}

static inline void zernel_begin_work(__u64 *work, __u64 now_ns)
{
	__sync_fetch_and_add(work, 1 - zernel_work_timestamp(now_ns));
}

static inline void zernel_end_work(__u64 *work, __u64 now_ns)
{
	__sync_fetch_and_add(work, zernel_work_timestamp(now_ns) - 1);
}

/* Moves time from one kind of work to another. */
static inline void zernel_move_work(__u64 *from, __u64 *to, __u64 ns)
{
	__sync_fetch_and_add(from, -zernel_work_timestamp(ns));
	__sync_fetch_and_add(to, zernel_work_timestamp(ns));
}

/* The sum up to now; only differences are meaningful. */
static inline __u64 zernel_work_sum_at(const __u64 *work, __u64 now_ns)
{
	__u64 seen = *(volatile const __u64 *)work;
	__u64 working = seen & ((1ULL << ZERNEL_WORK_COUNT_BITS) - 1);

	return (seen >> ZERNEL_WORK_COUNT_BITS) + working * (now_ns >> ZERNEL_WORK_UNIT_SHIFT);
}

static inline __u64 zernel_work_ns_between(__u64 before, __u64 after)
{
	/* Moving time to another kind of work may leave less than before. */
	__s64 units = (__s64)((after - before) << ZERNEL_WORK_COUNT_BITS) >> ZERNEL_WORK_COUNT_BITS;

	return units > 0 ? (__u64)units << ZERNEL_WORK_UNIT_SHIFT : 0;
}

#endif
