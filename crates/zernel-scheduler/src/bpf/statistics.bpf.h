/* SPDX-License-Identifier: GPL-2.0-only */
/* Counts what the threads of each class do. Every CPU counts for itself. */
#ifndef ZERNEL_SCHED_STATISTICS_H
#define ZERNEL_SCHED_STATISTICS_H

#include "globals.bpf.h"
#include "observer_clock.bpf.h"

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, ZERNEL_CLASSES);
	__type(key, __u32); /* enum zernel_class */
	__type(value, struct class_counters);
} class_counters SEC(".maps");

static struct class_counters *counters_of_class(__u32 class)
{
	return bpf_map_lookup_elem(&class_counters, &class);
}

/* The class of a task, privileged or not. `when_ns` is now, or when it woke up: the deadline of a
 * class stands still while a thread waits for a CPU. */
static __u8 class_of(struct task_struct *p, __u64 when_ns)
{
	const struct zernel_task_state *state;

	if (!has_live_observer(when_ns))
		return ZERNEL_CLASS_OTHER;
	state = bpf_task_storage_get(&zernel_tasks, p, 0, 0);
	return state ? zernel_word_class(class_word_at(state, when_ns)) : ZERNEL_CLASS_OTHER;
}

static __u32 bucket_of_wait(__u64 ns)
{
	__u64 rest = ns >> FIRST_WAIT_BUCKET_LOG2_NS;
	__u32 bucket = rest > 0, bits;

	for (bits = 32; bits; bits >>= 1) {
		if (rest >> bits) {
			rest >>= bits;
			bucket += bits;
		}
	}
	return bucket < WAIT_BUCKETS ? bucket : WAIT_BUCKETS - 1;
}

/* Counts that a thread begins to run. It woke up at `woken_ns`; 0: it was preempted before. */
static void count_run_start(__u8 class, __u64 woken_ns, __u64 now_ns)
{
	struct class_counters *counters = counters_of_class(class);
	__s64 wait_ns = now_ns - woken_ns;
	__u32 bucket;

	if (!counters)
		return;
	counters->runs++;
	if (!woken_ns)
		return;
	if (wait_ns < 0)
		wait_ns = 0;
	bucket = bucket_of_wait(wait_ns);
	counters->wakeups++;
	counters->wait_ns += wait_ns;
	if (bucket < WAIT_BUCKETS)
		counters->wait_buckets[bucket]++;
}

/* Counts time on a CPU. */
static void count_run_time(__u8 class, __u64 ns)
{
	struct class_counters *counters = counters_of_class(class);

	if (counters)
		counters->run_ns += ns;
}

#endif
