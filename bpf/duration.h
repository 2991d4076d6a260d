/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Distributions of durations, by process and family, in an array of histograms that userspace maps.
 * A process gets a histogram of a family with its first duration.
 */
#ifndef ZERNEL_DURATION_H
#define ZERNEL_DURATION_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "histogram.h"
#include "limits.h"
#include "losses.h"
#include "process.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ZERNEL_HISTOGRAMS);
	__type(key, __u32);
	__type(value, struct zernel_histogram);
} histograms SEC(".maps");

/* Free indices; 0 is never one of them. A histogram is cleared when it is taken, because its
 * last user may have written to it after it was freed. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, ZERNEL_HISTOGRAMS);
	__type(value, __u32);
} free_histograms SEC(".maps");

/* The histogram of a family; NULL if there is none and none is free for the tenant. */
static __always_inline struct zernel_histogram *zernel_get_or_create_histogram(struct zernel_process *process,
								 __u32 family)
{
	static const struct zernel_histogram empty;
	__u32 *place;
	__u32 index = 0, winner;

	if (family >= ZERNEL_DURATION_KINDS)
		return NULL;
	place = &process->histograms[family];
	index = *(volatile __u32 *)place;
	if (index)
		return bpf_map_lookup_elem(&histograms, &index);
	if (!zernel_may_add_entry(process->tenant, ZERNEL_HISTOGRAM_TABLE))
		return NULL;
	if (bpf_map_pop_elem(&free_histograms, &index)) {
		ZERNEL_COUNT_LOST(histograms);
		return NULL;
	}
	bpf_map_update_elem(&histograms, &index, &empty, BPF_ANY);
	winner = __sync_val_compare_and_swap(place, 0, index);
	if (winner) {
		bpf_map_push_elem(&free_histograms, &index, BPF_ANY);
		index = winner;
	} else {
		zernel_count_entries(process->tenant, ZERNEL_HISTOGRAM_TABLE, 1);
	}
	return bpf_map_lookup_elem(&histograms, &index);
}

/* Records a duration. Takes numbers only: such a global function is verified once, not on every
 * path to it. */
__noinline int zernel_observe_duration(__u32 handle, __u32 family, __u64 ns)
{
	struct zernel_process *process = zernel_process(handle);
	struct zernel_histogram *histogram;

	if (!process)
		return 0;
	histogram = zernel_get_or_create_histogram(process, family);
	if (histogram)
		zernel_record_duration(histogram, ns);
	return 0;
}

#endif
