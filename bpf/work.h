/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * How long several threads together have been at some work, those still at it included, in one word:
 * the lower twelve bits are how many are at it now, the rest is the sum of when they left it less the
 * sum of when they began. So a change is one atomic addition, and a reader adds "now" for each that is
 * still at it. Sums wrap; differences are right.
 */
#ifndef ZERNEL_WORK_H
#define ZERNEL_WORK_H

/* What a thread that loads data can be at. Waiting for something to do is none of it. */
enum zernel_work {
	ZERNEL_PREPARES, /* is on a CPU */
	ZERNEL_FETCHES, /* waits for a disk, a network, a page */
	ZERNEL_QUEUES, /* could run, and does not */
	ZERNEL_WORKS,
};

#define ZERNEL_WORK_UNIT_SHIFT 6
#define ZERNEL_WORK_COUNT_BITS 12

static inline __u64 zernel_work_moment(__u64 now_ns)
{
	return now_ns >> ZERNEL_WORK_UNIT_SHIFT << ZERNEL_WORK_COUNT_BITS;
}

static inline void zernel_begin_work(__u64 *work, __u64 now_ns)
{
	__sync_fetch_and_add(work, 1 - zernel_work_moment(now_ns));
}

static inline void zernel_end_work(__u64 *work, __u64 now_ns)
{
	__sync_fetch_and_add(work, zernel_work_moment(now_ns) - 1);
}

/* Takes what was booked as one work for another. */
static inline void zernel_move_work(__u64 *from, __u64 *to, __u64 ns)
{
	__sync_fetch_and_add(from, -zernel_work_moment(ns));
	__sync_fetch_and_add(to, zernel_work_moment(ns));
}

/* The sum up to now, of which only differences mean something. */
static inline __u64 zernel_work_until(const __u64 *work, __u64 now_ns)
{
	__u64 seen = *(volatile const __u64 *)work;
	__u64 at_it = seen & ((1ULL << ZERNEL_WORK_COUNT_BITS) - 1);

	return (seen >> ZERNEL_WORK_COUNT_BITS) + at_it * (now_ns >> ZERNEL_WORK_UNIT_SHIFT);
}

static inline __u64 zernel_work_ns(__u64 before, __u64 after)
{
	/* What was booked as one work may turn out to be another, which was there before. */
	__s64 units = (__s64)((after - before) << ZERNEL_WORK_COUNT_BITS) >> ZERNEL_WORK_COUNT_BITS;

	return units > 0 ? (__u64)units << ZERNEL_WORK_UNIT_SHIFT : 0;
}

#endif
