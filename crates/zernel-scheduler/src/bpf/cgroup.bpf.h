/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Cgroup weights, flattened. The effective weight of a task is its own weight, times its cgroup's
 * weight, divided by the weights of all that is runnable in that cgroup, and so on up to the root.
 * Tasks of all cgroups can then share one queue: 8 threads of one cgroup get together as much as 1
 * thread of a cgroup with the same weight.
 *
 * Each cgroup adds its weight to its parent's `active_weight` while anything in it is runnable.
 */
#ifndef ZERNEL_SCHED_CGROUP_H
#define ZERNEL_SCHED_CGROUP_H

#include "globals.bpf.h"
#include "sched_ext.bpf.h"

/* The weight of nice 0 and of a cgroup by default. */
#define DEFAULT_WEIGHT 100
/* Effective weights have this many binary digits after the point. */
#define WEIGHT_SHIFT 20
/* The smallest effective weight: a ten-thousandth of nice 0. */
#define MIN_EFFECTIVE_WEIGHT ((DEFAULT_WEIGHT << WEIGHT_SHIFT) / 10000)
/* The index of the root. */
#define ROOT_CGROUP_INDEX 0

struct cgroup_node {
	struct bpf_spin_lock lock;
	__u32 parent;
	__u32 weight;
	bool is_deleted;
	__s64 active_weight; /* weights of its runnable tasks and active children */
	__s64 weight_at_parent; /* the part of its parent's `active_weight` that comes from here */
	/* cpu.max: see bandwidth.bpf.h. */
	__u64 quota_ns;
	__u64 period_ns;
	__u64 next_refill_ns;
	__s64 budget_ns;
	/* See tenant.bpf.h. */
	__u64 debt_ns;
	__u64 run_ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CGROUPS);
	__type(key, __u32);
	__type(value, struct cgroup_node);
} cgroup_nodes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_CGROUPS);
	__type(key, __u64); /* id of a cgroup */
	__type(value, __u32);
} node_of_cgroup SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, MAX_CGROUPS);
	__type(value, __u32);
} free_cgroup_nodes SEC(".maps");

static __u32 used_cgroup_nodes = ROOT_CGROUP_INDEX + 1;
/* Weights of the root's runnable tasks and active children, if tasks may be privileged. */
static __s64 root_active_weight;
/* In place of the index of a node. */
#define NO_CGROUP_NODE (~0U)
/* The node of the privileged cgroup. */
static __u32 privileged_cgroup_node = NO_CGROUP_NODE;

static struct cgroup_node *cgroup_node_at(__u32 index)
{
	return bpf_map_lookup_elem(&cgroup_nodes, &index);
}

static __u32 find_cgroup_node(__u64 cgroup_id)
{
	__u32 *index = bpf_map_lookup_elem(&node_of_cgroup, &cgroup_id);

	return index ? *index : ROOT_CGROUP_INDEX;
}

/* Updates the weight that a cgroup adds to its parent's sum, and returns the change. */
static __s64 update_weight_at_parent(struct cgroup_node *node, __s64 added)
{
	__s64 counted, difference;

	bpf_spin_lock(&node->lock);
	node->active_weight += added;
	/* Two CPUs may report a start and its end in the wrong order: a negative sum is not active.
	 */
	counted = node->active_weight > 0 && !node->is_deleted ? node->weight : 0;
	difference = counted - node->weight_at_parent;
	node->weight_at_parent = counted;
	bpf_spin_unlock(&node->lock);
	return difference;
}

/* Adds to the runnable weight of a cgroup, and of its ancestors as far as theirs changes. */
static void add_runnable_weight(__u32 index, __s64 added)
{
	struct cgroup_node *node;
	int level;

	for (level = 0; level < MAX_CGROUP_DEPTH && index != ROOT_CGROUP_INDEX; level++) {
		node = cgroup_node_at(index);
		if (!node)
			return;
		added = update_weight_at_parent(node, added);
		if (!added)
			return;
		index = node->parent;
	}
	/* All CPUs would share this sum, and fairness does not need it. */
	if (settings.may_privilege)
		__sync_fetch_and_add(&root_active_weight, added);
}

/* The effective weight of a task with this weight in a cgroup, shifted by WEIGHT_SHIFT. */
static __u64 effective_weight(__u32 index, __u64 weight)
{
	struct cgroup_node *node;
	__s64 active;
	int level;

	weight <<= WEIGHT_SHIFT;
	for (level = 0; level < MAX_CGROUP_DEPTH && index != ROOT_CGROUP_INDEX; level++) {
		node = cgroup_node_at(index);
		if (!node)
			break;
		active = node->active_weight;
		weight = weight * node->weight / (active > 0 ? active : DEFAULT_WEIGHT);
		index = node->parent;
	}
	return weight > MIN_EFFECTIVE_WEIGHT ? weight : MIN_EFFECTIVE_WEIGHT;
}

static __u32 parent_cgroup_node(struct cgroup *cgroup)
{
	struct cgroup *parent = bpf_cgroup_ancestor(cgroup, cgroup->level - 1);
	__u32 index;

	if (!parent)
		return ROOT_CGROUP_INDEX;
	index = find_cgroup_node(parent->kn->id);
	bpf_cgroup_release(parent);
	return index;
}

/* Prepares the node of a new cgroup and returns its index, or ROOT_CGROUP_INDEX if the table is full. */
static __u32 create_cgroup_node(struct cgroup *cgroup, __u32 weight)
{
	__u64 id = cgroup->kn->id;
	struct cgroup_node *node;
	__u32 index;

	if (cgroup->level <= 0)
		return ROOT_CGROUP_INDEX;
	/* Before Linux 6.19 a task may still run after its cgroup was deleted, and count there. So an index is used again
	 * as late as possible. */
	index = used_cgroup_nodes < MAX_CGROUPS ? __sync_fetch_and_add(&used_cgroup_nodes, 1) : MAX_CGROUPS;
	if (index >= MAX_CGROUPS && bpf_map_pop_elem(&free_cgroup_nodes, &index))
		return ROOT_CGROUP_INDEX;
	node = cgroup_node_at(index);
	if (!node)
		return ROOT_CGROUP_INDEX;
	node->parent = parent_cgroup_node(cgroup);
	node->weight = weight;
	node->is_deleted = false;
	node->active_weight = 0;
	node->weight_at_parent = 0;
	node->quota_ns = 0;
	node->debt_ns = 0;
	node->run_ns = 0;
	bpf_map_update_elem(&node_of_cgroup, &id, &index, BPF_ANY);
	/* It counts only if a cgroup is privileged. */
	if (id == settings.privileged_id)
		privileged_cgroup_node = index;
	return index;
}

/* Takes the weight of a deleted cgroup back from its parent. A task that still runs there does not count at the parent,
 * nor when it ends. */
static void settle_weight_at_parent(__u32 index)
{
	struct cgroup_node *node = cgroup_node_at(index);
	__s64 difference;

	if (!node)
		return;
	node->is_deleted = true;
	difference = update_weight_at_parent(node, 0);
	if (difference)
		add_runnable_weight(node->parent, difference);
}

static void delete_cgroup_node(struct cgroup *cgroup)
{
	__u64 id = cgroup->kn->id;
	__u32 index = find_cgroup_node(id);

	if (index == ROOT_CGROUP_INDEX)
		return;
	bpf_map_delete_elem(&node_of_cgroup, &id);
	settle_weight_at_parent(index);
	/* The index will be that of another cgroup. */
	if (index == privileged_cgroup_node)
		privileged_cgroup_node = NO_CGROUP_NODE;
	bpf_map_push_elem(&free_cgroup_nodes, &index, 0);
}

static void set_cgroup_weight(struct cgroup *cgroup, __u32 weight)
{
	__u32 index = find_cgroup_node(cgroup->kn->id);
	struct cgroup_node *node = cgroup_node_at(index);
	__s64 difference;

	if (!node || index == ROOT_CGROUP_INDEX)
		return;
	node->weight = weight;
	difference = update_weight_at_parent(node, 0);
	if (difference)
		add_runnable_weight(node->parent, difference);
}

#endif
