/* SPDX-License-Identifier: GPL-2.0-only */
/* Runs the kernel's copies of the phase rules on arrays of states, for comparison with userspace. */
#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "phase_rule.h"
#include "phase_tracker.h"
#include "task_maps.h"

ZERNEL_IN_BTF(enum, zernel_phase);
ZERNEL_IN_BTF(enum, zernel_gpu);
ZERNEL_IN_BTF(enum, zernel_q16);
ZERNEL_IN_BTF(enum, zernel_task_flags);
ZERNEL_IN_BTF(enum, zernel_tracker_flags);
ZERNEL_IN_BTF(enum, zernel_word_bits);
ZERNEL_IN_BTF(enum, zernel_event);
ZERNEL_IN_BTF(enum, zernel_class);
ZERNEL_IN_BTF(enum, zernel_role);
ZERNEL_IN_BTF(enum, zernel_reason);
ZERNEL_IN_BTF(enum, zernel_class_bits);
ZERNEL_IN_BTF(enum, zernel_class_flags);
ZERNEL_IN_BTF(enum, zernel_heart);

#define BATCH_SIZE 4096

struct classify_batch {
	struct zernel_phase_config config;
	struct zernel_phase_sample samples[BATCH_SIZE];
	__u8 phases[BATCH_SIZE];
};

struct detect_batch {
	struct zernel_phase_config config;
	__u64 now_ns[BATCH_SIZE];
	struct zernel_task_state tasks[BATCH_SIZE];
};

struct track_batch {
	struct zernel_tracker_config config;
	__u64 at_ns[BATCH_SIZE];
	__u8 events[BATCH_SIZE];
	struct zernel_task_state tasks[BATCH_SIZE];
};

struct publish_batch {
	__u64 now_ns[BATCH_SIZE];
	__u64 read_ns[BATCH_SIZE];
	__u64 words[BATCH_SIZE];
	struct zernel_task_state tasks[BATCH_SIZE];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct publish_batch);
} publish_map SEC(".maps");

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

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct track_batch);
} track_map SEC(".maps");

static const __u32 zero = 0;

static long classify_one(__u32 index, struct classify_batch **batch)
{
	if (index >= BATCH_SIZE)
		return 1;
	(*batch)->phases[index] = zernel_classify(&(*batch)->config, &(*batch)->samples[index]);
	return 0;
}

SEC("syscall")
int classify(void *ctx)
{
	struct classify_batch *batch = bpf_map_lookup_elem(&classify_map, &zero);

	return batch ? bpf_loop(BATCH_SIZE, classify_one, &batch, 0) : -1;
}

static long detect_one(__u32 index, struct detect_batch **batch)
{
	if (index >= BATCH_SIZE)
		return 1;
	zernel_detect(&(*batch)->config, &(*batch)->tasks[index], (*batch)->now_ns[index]);
	return 0;
}

SEC("syscall")
int detect(void *ctx)
{
	struct detect_batch *batch = bpf_map_lookup_elem(&detect_map, &zero);

	return batch ? bpf_loop(BATCH_SIZE, detect_one, &batch, 0) : -1;
}

static long track_one(__u32 index, struct track_batch **batch)
{
	struct zernel_task_state *task;

	if (index >= BATCH_SIZE)
		return 1;
	task = &(*batch)->tasks[index];
	if (!task->phase_word)
		zernel_begin_tracking(task, (*batch)->at_ns[index]);
	else
		zernel_track_event(&(*batch)->config, task, (*batch)->at_ns[index],
			     (*batch)->events[index]);
	return 0;
}

/* The first event of a task only starts its tracker. */
SEC("syscall")
int track(void *ctx)
{
	struct track_batch *batch = bpf_map_lookup_elem(&track_map, &zero);

	return batch ? bpf_loop(BATCH_SIZE, track_one, &batch, 0) : -1;
}

static long publish_one(__u32 index, struct publish_batch **batch)
{
	struct zernel_task_state *task;

	if (index >= BATCH_SIZE)
		return 1;
	task = &(*batch)->tasks[index];
	zernel_publish_class(task, (*batch)->now_ns[index]);
	(*batch)->words[index] = zernel_class_word_at(task, (*batch)->read_ns[index]);
	return 0;
}

SEC("syscall")
int publish(void *ctx)
{
	struct publish_batch *batch = bpf_map_lookup_elem(&publish_map, &zero);

	return batch ? bpf_loop(BATCH_SIZE, publish_one, &batch, 0) : -1;
}

char LICENSE[] SEC("license") = "GPL";
