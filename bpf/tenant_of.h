/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The tenant of a task: a pod, a Slurm job or a user. A task must not be able to choose it. This
 * is the rule of userspace's `Tenant`, for tables in the kernel. It runs once per process.
 */
#ifndef ZERNEL_TENANT_OF_H
#define ZERNEL_TENANT_OF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "btf.h"
#include "tenants.h"

enum zernel_tenant_limits {
	ZERNEL_TENANT_PARENTS = 256,
	ZERNEL_MAX_TENANT_DEPTH = 8, /* no cgroup of a pod or job is deeper */
	ZERNEL_MAX_NAMESPACE_DEPTH = 33, /* the kernel allows no deeper user namespace */
	ZERNEL_UID_RANGES = 5, /* of a user namespace, which the kernel stores in it; more are stored elsewhere */
	ZERNEL_SUBORDINATE_RANGES = 1 << 12, /* a power of two */
};
ZERNEL_IN_BTF(enum, zernel_tenant_limits);

/* The cgroups below which the kubelet and slurmd create those of pods and jobs, and how many levels
 * below. Userspace adds those at fixed places from the root, where only root can create any. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ZERNEL_TENANT_PARENTS);
	__type(key, struct zernel_cgroup_key);
	__type(value, __u32);
} tenant_parents SEC(".maps");

/* Subordinate uids of a user, in the order of `first`. Unused: `first` is above `last`. */
struct zernel_subordinate_range {
	__u32 first_uid;
	__u32 last_uid;
	__u32 owner_uid;
	__u32 reserved;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ZERNEL_SUBORDINATE_RANGES);
	__type(key, __u32);
	__type(value, struct zernel_subordinate_range);
} subordinate_ranges SEC(".maps");

/* The id of an ancestor of a cgroup; level 0 is the root. */
static __always_inline __u64 zernel_ancestor_id(struct cgroup *cgroup, __u32 level)
{
	struct cgroup *ancestor = NULL;
	__u64 id = 0;

	if (bpf_core_field_exists(struct cgroup, ancestors)) {
		bpf_probe_read_kernel(&ancestor, sizeof(ancestor),
				      (void *)cgroup +
					      bpf_core_field_offset(struct cgroup, ancestors) +
					      level * sizeof(ancestor));
		return BPF_CORE_READ(ancestor, kn, id);
	}
	bpf_probe_read_kernel(&id, sizeof(id),
			      (void *)cgroup +
				      bpf_core_field_offset(struct cgroup___with_ancestor_ids,
							    ancestor_ids) +
				      level * sizeof(id));
	return id;
}

/* The id of the pod's or job's cgroup that contains a cgroup; 0 if there is none. From the root
 * down, so that nothing that a tenant creates in its own cgroup counts. */
static __noinline __u64 zernel_tenant_cgroup(struct cgroup *cgroup, __u32 hierarchy)
{
	int depth = BPF_CORE_READ(cgroup, level);
	__u32 levels_left = 0;

	for (int level = 1; level <= ZERNEL_MAX_TENANT_DEPTH; level++) {
		struct zernel_cgroup_key key = { .hierarchy = hierarchy };
		__u32 *levels_below;

		if (level > depth)
			break;
		key.cgroup_inode = zernel_ancestor_id(cgroup, level);
		levels_below = bpf_map_lookup_elem(&tenant_parents, &key);
		if (levels_below)
			levels_left = *levels_below;
		else if (levels_left && !--levels_left)
			return key.cgroup_inode;
	}
	return 0;
}

/* The cgroup of a task in the hierarchy of the memory controller. */
static __always_inline struct cgroup *zernel_memory_cgroup(struct task_struct *task)
{
	struct css_set *cgroups = BPF_CORE_READ(task, cgroups);
	struct cgroup_subsys_state *state = NULL;

	if (!bpf_core_enum_value_exists(enum cgroup_subsys_id, memory_cgrp_id))
		return NULL;
	bpf_probe_read_kernel(&state, sizeof(state),
			      (void *)cgroups + bpf_core_field_offset(struct css_set, subsys) +
				      bpf_core_enum_value(enum cgroup_subsys_id, memory_cgrp_id) *
					      sizeof(state));
	return BPF_CORE_READ(state, cgroup);
}

/* The user who may use a uid, or the uid itself if it is no subordinate one. A global function, so
 * that the verifier checks it once. */
__noinline __u32 zernel_subordinate_user(__u32 uid)
{
	struct zernel_subordinate_range *range;
	__u32 place = 0;

	for (__u32 bit = ZERNEL_SUBORDINATE_RANGES >> 1; bit; bit >>= 1) {
		__u32 next = place | bit;

		range = bpf_map_lookup_elem(&subordinate_ranges, &next);
		if (range && range->first_uid <= uid)
			place = next;
	}
	range = bpf_map_lookup_elem(&subordinate_ranges, &place);
	return range && range->first_uid <= uid && uid <= range->last_uid ? range->owner_uid : uid;
}

/* The owner of a range of uids that root has mapped: its first uid. A uid that is mapped to itself
 * stands for itself. */
static __always_inline __u32 zernel_owner_of_uid_range(struct user_namespace *namespace, __u32 uid)
{
	__u32 count = BPF_CORE_READ(namespace, uid_map.nr_extents);
	/* Not the kernel's type: accesses to that are relocated, on the stack too. */
	struct {
		__u32 inside;
		__u32 first;
		__u32 count;
	} ranges[ZERNEL_UID_RANGES] = {};

	/* More are stored elsewhere. */
	if (count > ZERNEL_UID_RANGES)
		return uid;
	bpf_core_read(&ranges, sizeof(ranges), &namespace->uid_map.extent);
	for (__u32 i = 0; i < ZERNEL_UID_RANGES && i < count; i++) {
		if (uid - ranges[i].first < ranges[i].count)
			return ranges[i].inside == ranges[i].first ? uid : ranges[i].first;
	}
	return uid;
}

/* The user of a task. In user namespaces, that is the owner of the outermost one: any user can
 * create some, and may have many uids in them. */
static __noinline __u32 zernel_user_of(struct task_struct *task)
{
	struct user_namespace *namespace = BPF_CORE_READ(task, group_leader, cred, user_ns);
	__u32 uid = BPF_CORE_READ(task, group_leader, cred, uid.val), owner;

	if (!BPF_CORE_READ(namespace, level))
		return zernel_subordinate_user(uid);
	for (int depth = 0; depth < ZERNEL_MAX_NAMESPACE_DEPTH; depth++) {
		if (BPF_CORE_READ(namespace, level) <= 1)
			break;
		namespace = BPF_CORE_READ(namespace, parent);
	}
	owner = BPF_CORE_READ(namespace, owner.val);
	/* Root creates namespaces for others: a container manager does, or a setuid program. */
	if (!owner)
		owner = zernel_owner_of_uid_range(namespace, uid);
	return zernel_subordinate_user(owner);
}

/* The index of the tenant of a task. */
static __always_inline __u32 zernel_tenant_of(struct task_struct *task)
{
	__u64 cgroup = zernel_tenant_cgroup(BPF_CORE_READ(task, cgroups, dfl_cgrp), ZERNEL_UNIFIED_HIERARCHY);

	if (cgroup)
		return zernel_get_or_create_tenant(cgroup, ZERNEL_UNIFIED_HIERARCHY, 0);
	cgroup = zernel_tenant_cgroup(zernel_memory_cgroup(task), ZERNEL_MEMORY_HIERARCHY);
	if (cgroup)
		return zernel_get_or_create_tenant(cgroup, ZERNEL_MEMORY_HIERARCHY, 0);
	return zernel_get_or_create_tenant(0, ZERNEL_UNIFIED_HIERARCHY, zernel_user_of(task));
}

#endif
