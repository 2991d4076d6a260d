/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a critical thread or a loader takes beyond its share, it takes from its own tenant first.
 * The tenant is the privileged cgroup with its descendants; where all tasks are privileged, it is
 * the cgroup of the thread; with `zernel run --sched` it is the processes of the command, and with a
 * privileged user the user's tasks in the same cgroup.
 *
 * A thread that goes first is not charged for time beyond its share (state.bpf.h). Its tenant owes
 * that time, and the other tasks of the tenant are charged for it while they run. So the tenant as
 * a whole stays within its share as long as these tasks can pay. A task that pays keeps at least
 * the guarantee.
 *
 * Tasks of the root cgroup are of no tenant. Tasks that may use one CPU only do not pay. A tenant
 * owes MAX_LAG_NS and one charge at most.
 */
#ifndef ZERNEL_SCHED_TENANT_H
#define ZERNEL_SCHED_TENANT_H

#include "cgroup.bpf.h"
#include "clock.bpf.h"

/* Whether a cgroup is the privileged one, or a descendant. */
static bool is_in_privileged_cgroup(__u32 index)
{
	struct cgroup_node *node;
	__u32 level;

	for (level = 0; level < MAX_CGROUP_DEPTH && index != ROOT_CGROUP_INDEX; level++) {
		if (index == privileged_cgroup_node)
			return true;
		node = cgroup_node_at(index);
		if (!node)
			return false;
		index = node->parent;
	}
	return false;
}

/* The tenant of a task in a cgroup; NULL: it has none. */
static struct cgroup_node *tenant_of_cgroup(__u32 index)
{
	if (settings.privilege == PRIVILEGE_CGROUP)
		index = is_in_privileged_cgroup(index) ? privileged_cgroup_node : ROOT_CGROUP_INDEX;
	return index == ROOT_CGROUP_INDEX ? NULL : cgroup_node_at(index);
}

/* Counts time on a CPU for the statistics: for the tenant of a task, or else for its cgroup. */
static void count_tenant_time(__u32 index, __u64 ns)
{
	struct cgroup_node *node;

	/* All CPUs would share this sum, and nobody owes anything without privilege. */
	if (!settings.may_privilege)
		return;
	node = tenant_of_cgroup(index) ?: cgroup_node_at(index);
	if (node)
		__sync_fetch_and_add(&node->run_ns, ns);
}

/* How fast a clock advances by the guarantee, per millisecond. */
static __u64 promised_vtime_per_ms(__s64 weight)
{
	return 1000000ULL * usable_cpus() * settings.guarantee_percent / (weight > 0 ? weight : 1);
}

/* Adds time that a task took beyond its share, while others waited, to its tenant's debt. */
static void add_tenant_debt(__u32 index, __u64 ns)
{
	struct cgroup_node *tenant = tenant_of_cgroup(index);

	if (tenant && *(volatile __u64 *)&tenant->debt_ns < MAX_LAG_NS)
		__sync_fetch_and_add(&tenant->debt_ns, ns);
}

/* The time for which a task without rank is charged beside the `used_ns` that it ran. Were the
 * clock at its promised speed, it would get its guaranteed part and no more; so it pays only by how
 * much the clock is faster than that. */
static __u64 repay_tenant_debt(__u32 index, const struct clock *clock, __u64 used_ns)
{
	__u64 promised = promised_vtime_per_ms(root_active_weight) ?: 1;
	struct cgroup_node *tenant = tenant_of_cgroup(index);
	__u64 debt_ns, paid_ns;

	if (!tenant || clock->vtime_per_ms <= promised)
		return 0;
	debt_ns = *(volatile __u64 *)&tenant->debt_ns;
	paid_ns = used_ns * (clock->vtime_per_ms - promised) / promised;
	if (paid_ns > debt_ns)
		paid_ns = debt_ns;
	/* If another CPU has just changed the debt, this task pays at its next charge. */
	if (!paid_ns ||
	    !__sync_bool_compare_and_swap(&tenant->debt_ns, debt_ns, debt_ns - paid_ns))
		return 0;
	return paid_ns;
}

#endif
