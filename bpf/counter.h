/* SPDX-License-Identifier: GPL-2.0-only */
/* Counters of calls, by process and function, in an array that userspace maps. */
#ifndef ZERNEL_COUNTER_H
#define ZERNEL_COUNTER_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "limits.h"

struct zernel_counter {
	__u64 calls;
	__u64 failed_calls;
	__u64 bytes; /* of calls that succeeded */
};

struct zernel_counters {
	struct zernel_counter functions[ZERNEL_SYMBOLS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ZERNEL_PROCESSES);
	__type(key, __u32);
	__type(value, struct zernel_counters);
} counters SEC(".maps");

static __always_inline struct zernel_counter *zernel_counter(__u32 process, __u32 symbol)
{
	__u32 index = zernel_process_index(process);
	struct zernel_counters *own = bpf_map_lookup_elem(&counters, &index);
	/* 64 bits wide: old verifiers forget the check when the compiler copies 32 bits. */
	__u64 row = symbol;

	barrier_var(row);
	if (!own || row >= ZERNEL_SYMBOLS)
		return NULL;
	/* Keeps the compiler from moving the arithmetic before the check. */
	barrier_var(own);
	return &own->functions[row];
}

#endif
