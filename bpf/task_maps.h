/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The two pinned maps that an observer writes and a scheduler reads: the states of tasks, and a
 * heartbeat. Both sides include this file, because flags and sizes must be equal. Both maps outlive
 * the observer, so that a scheduler that holds them sees it die and sees the next one.
 */
#ifndef ZERNEL_TASK_MAPS_H
#define ZERNEL_TASK_MAPS_H

#include "class.h"
#include "task_state.h"

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct zernel_task_state);
} zernel_tasks SEC(".maps");

struct zernel_heartbeat {
	__u64 last_beat_ns; /* the last beat; 0: the process has ended */
	__u32 owner_pid; /* its pid */
	__u32 layout_hash; /* hash of the layout of task states */
	__u64 since_ns; /* when it began to beat: another value is another process */
};

enum zernel_heart {
	ZERNEL_HEART_OBSERVER, /* writes the task states */
	ZERNEL_HEART_READER, /* reads them; while it beats, a stopped observer leaves its pins */
	ZERNEL_HEARTS, /* how many there are */
};

/* A heart beats five times a second. Without a beat for this long, its process is dead. */
#define ZERNEL_HEART_TIMEOUT_NS 1000000000ULL

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ZERNEL_HEARTS);
	__type(key, __u32);
	__type(value, struct zernel_heartbeat);
} zernel_heartbeats SEC(".maps");

/* Whether an observer writes the task states. Without one, everything about them is unknown. */
static inline int zernel_is_observed(__u64 now_ns)
{
	__u32 observer = ZERNEL_HEART_OBSERVER;
	const struct zernel_heartbeat *heart = bpf_map_lookup_elem(&zernel_heartbeats, &observer);
	__u64 last_beat_ns = heart ? *(volatile const __u64 *)&heart->last_beat_ns : 0;

	/* A beat may be later than the caller's time, if that was taken earlier. */
	return last_beat_ns && (__s64)(now_ns - last_beat_ns) < (__s64)ZERNEL_HEART_TIMEOUT_NS;
}

#endif
