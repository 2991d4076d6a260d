/* SPDX-License-Identifier: GPL-2.0-only */
/* Settings that userspace changes while the programs run. */
#ifndef ZERNEL_SETTINGS_H
#define ZERNEL_SETTINGS_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "phase_rule.h"
#include "phase_tracker.h"

struct zernel_settings {
	struct zernel_tracker_config tracker;
	__u32 is_window_open; /* a sampling window is open: sampled functions are counted */
	__u32 reserved;
	__u64 last_detach_ns; /* when probes were last detached: the return of earlier calls may not
			       be seen */
	__u64 events_probed_since_ns; /* since when functions that record or wait for CUDA events are probed
			       */
	__u64 are_events_sampled; /* those functions are sampled */
	__u64 are_launches_sampled; /* functions that launch are sampled */
	__u64 is_suspended; /* no probe is attached */
	struct zernel_phase_config sampled_rule; /* of processes whose calls are not probed */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct zernel_settings);
} settings SEC(".maps");

static __always_inline struct zernel_settings *zernel_settings(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&settings, &zero);
}

#endif
