/* SPDX-License-Identifier: GPL-2.0-only */
/* Runs the kernel's copy of the phase rule over arrays of states, for comparison with userspace. */
#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "phase_rule.h"

#define BATCH 4096

struct classify_batch {
	struct zernel_phase_config config;
	struct zernel_phase_sample samples[BATCH];
	__u8 phases[BATCH];
};

struct detect_batch {
	struct zernel_phase_config config;
	__u64 now_ns[BATCH];
	struct zernel_task_state tasks[BATCH];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct classify_batch);
} classify_map SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct detect_batch);
} detect_map SEC(".maps");

static const __u32 zero = 0;

static long classify_one(__u32 index, struct classify_batch **batch)
{
	if (index >= BATCH)
		return 1;
	(*batch)->phases[index] = zernel_classify(&(*batch)->config, &(*batch)->samples[index]);
	return 0;
}

SEC("syscall")
int classify(void *ctx)
{
	struct classify_batch *batch = bpf_map_lookup_elem(&classify_map, &zero);

	return batch ? bpf_loop(BATCH, classify_one, &batch, 0) : -1;
}

static long detect_one(__u32 index, struct detect_batch **batch)
{
	if (index >= BATCH)
		return 1;
	zernel_detect(&(*batch)->config, &(*batch)->tasks[index], (*batch)->now_ns[index]);
	return 0;
}

SEC("syscall")
int detect(void *ctx)
{
	struct detect_batch *batch = bpf_map_lookup_elem(&detect_map, &zero);

	return batch ? bpf_loop(BATCH, detect_one, &batch, 0) : -1;
}

char LICENSE[] SEC("license") = "GPL";
