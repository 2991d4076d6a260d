/* SPDX-License-Identifier: GPL-2.0-only */
/* Programs that the userspace half calls. */
#ifndef ZERNEL_SCHED_USERSPACE_CALLS_H
#define ZERNEL_SCHED_USERSPACE_CALLS_H

#include "throttle_timer.bpf.h"

SEC("syscall")
int set_policy(struct policy *wanted)
{
	__u64 id = wanted->privileged_id;
	__u32 *node;

	settings.slice_ns = wanted->slice_ns;
	settings.guarantee_percent = wanted->guarantee_percent;
	settings.lends = wanted->lends;
	/* With the id of one kind and another kind of privilege, strangers would be privileged. */
	settings.privilege = PRIVILEGE_NOBODY;
	settings.privileged_id = id;
	/* Cgroups that are created meanwhile compare themselves with this. */
	node = bpf_map_lookup_elem(&node_of_cgroup, &id);
	privileged_cgroup_node = node ? *node : NO_CGROUP_NODE;
	settings.privilege = wanted->privilege;
	return 0;
}

/* Returns the CPU time of the guarantee that others have not got yet, in microseconds. */
SEC("syscall")
int read_promised_time_us(void *context)
{
	return (__u64)promised_ordinary_ns / 1000;
}

/* Makes the calling process the privileged one. */
SEC("syscall")
int privilege_caller(void *context)
{
	settings.privileged_process = bpf_get_current_pid_tgid() >> 32;
	return 0;
}

SEC("syscall")
int set_cpu_limit(struct cpu_limit *wanted)
{
	limit_cgroup(find_cgroup_node(wanted->cgroup_id), wanted->quota_ns, wanted->period_ns);
	return 0;
}

#endif
