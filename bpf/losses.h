/* SPDX-License-Identifier: GPL-2.0-only */
/* Losses: how many events could not be recorded, by cause. Userspace exports every count. */
#ifndef ZERNEL_LOSSES_H
#define ZERNEL_LOSSES_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>

struct zernel_losses {
	__u64 processes; /* events of processes beyond ZERNEL_PROCESSES */
	__u64 histograms; /* durations beyond ZERNEL_HISTOGRAMS */
	__u64 calls; /* calls nested too deep, or without a return */
	__u64 allocations; /* allocations beyond the map of allocations */
	__u64 memory_accounts; /* allocations of call sites beyond the map of accounts */
	__u64 communicators; /* communicators beyond their map */
	__u64 threads; /* events of threads that got no storage */
	__u64 switches; /* context switches that no event showed and that could not be recovered */
	__u64 contexts; /* CUDA contexts pushed too deep */
	__u64 collectives; /* collectives overwritten before their end was seen */
	__u64 trace; /* records that found the ring buffer of the trace full */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct zernel_losses);
} losses SEC(".maps");

static __always_inline void zernel_count_loss(__u64 *cause)
{
	__sync_fetch_and_add(cause, 1);
}

/* Counts a loss; `cause` is a field of struct zernel_losses. */
#define ZERNEL_COUNT_LOST(cause)                                                       \
	({                                                                       \
		__u32 zero = 0;                                                  \
		struct zernel_losses *all = bpf_map_lookup_elem(&losses, &zero); \
		if (all)                                                         \
			zernel_count_loss(&all->cause);                          \
	})

#endif
