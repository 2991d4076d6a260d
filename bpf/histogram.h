/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A histogram of durations in under 2 KiB: log-linear (H2) buckets, sixteen per power of two from
 * 256 ns to 266 s, as in userspace's LatencyHistogram. Below 256 ns buckets are 16 ns wide; the
 * last bucket holds everything longer than 266 s. Counts wrap: userspace reads often enough to take
 * differences.
 */
#ifndef ZERNEL_HISTOGRAM_H
#define ZERNEL_HISTOGRAM_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"

enum zernel_h2 {
	ZERNEL_H2_GROUPING = 4, /* log2 of the buckets per power of two */
	ZERNEL_H2_UNIT_SHIFT = 4, /* log2 of the narrowest bucket in ns */
	ZERNEL_H2_BUCKETS = 496,
};
ZERNEL_IN_BTF(enum, zernel_h2);

/* Zeroed memory is an empty histogram. */
struct zernel_histogram {
	__u64 sum_ns; /* wraps after 584 years of waiting */
	__u64 max_ns;
	__u64 min_inverted; /* ~min_ns */
	__u32 buckets[ZERNEL_H2_BUCKETS];
};

/* Global, so that the verifier checks it once: inlined, its paths would multiply with its callers'.
 */
__noinline __u32 zernel_log2(__u64 value)
{
	__u32 log = 0;

	for (__u32 bits = 32; bits; bits >>= 1) {
		if (value >> bits) {
			value >>= bits;
			log += bits;
		}
	}
	return log;
}

static inline __u32 zernel_h2_bucket(__u64 ns)
{
	__u64 units = ns >> ZERNEL_H2_UNIT_SHIFT;
	__u32 power = zernel_log2(units);
	__u64 bucket = units;

	if (power > ZERNEL_H2_GROUPING) {
		power -= ZERNEL_H2_GROUPING;
		bucket = ((__u64)power << ZERNEL_H2_GROUPING) + (units >> power);
	}
	return bucket < ZERNEL_H2_BUCKETS ? bucket : ZERNEL_H2_BUCKETS - 1;
}

/* Raises `*most` to at least `value`. Gives up after eight lost races. */
static inline void zernel_atomic_max(__u64 *most, __u64 value)
{
	for (int tries = 0; tries < 8; tries++) {
		__u64 seen = *(volatile __u64 *)most;

		if (seen >= value || __sync_val_compare_and_swap(most, seen, value) == seen)
			return;
	}
}

static inline void zernel_record_duration(struct zernel_histogram *histogram, __u64 ns)
{
	__u32 bucket = zernel_h2_bucket(ns);

	barrier_var(bucket);
	if (bucket >= ZERNEL_H2_BUCKETS)
		return;
	__sync_fetch_and_add(&histogram->sum_ns, ns);
	zernel_atomic_max(&histogram->max_ns, ns);
	zernel_atomic_max(&histogram->min_inverted, ~ns);
	/* Last, so that a reader that sees the count finds the time in the sum. */
	__sync_fetch_and_add(&histogram->buckets[bucket], 1);
}

#endif
