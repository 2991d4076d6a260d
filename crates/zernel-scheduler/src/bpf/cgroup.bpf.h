/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Cgroup weights, flattened. The effective weight of a task is its own weight, times its cgroup's
 * weight, divided by the weights of all that is runnable in that cgroup, and so on up to the root.
 * Tasks of all cgroups can then share one queue: 8 threads of one cgroup get together as much as 1
 * thread of a cgroup with the same weight.
 *
 * Each cgroup adds its weight to its parent's `active` while anything in it is runnable.
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
#define ROOT 0

struct node {
	struct bpf_spin_lock lock;
	__u32 parent;
	__u32 weight;
	__s64 active; /* weights of its runnable tasks and active children */
	__s64 counted; /* the part of its parent's `active` that comes from here */
	/* cpu.max: see bandwidth.bpf.h. */
	__u64 quota_ns;
	__u64 period_ns;
	__u64 refill_ns;
	__s64 budget_ns;
	/* See tenant.bpf.h. */
	__u64 owed_ns;
	__u64 run_ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CGROUPS);
	__type(key, __u32);
	__type(value, struct node);
} nodes SEC(".maps");

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
} free_nodes SEC(".maps");

static __u32 used_nodes = ROOT + 1;
/* Weights of the root's runnable tasks and active children, if tasks may be privileged. */
static __s64 root_active;
/* In place of the index of a node. */
#define NO_NODE (~0U)
/* The node of the privileged cgroup. */
static __u32 privileged_node = NO_NODE;

static struct node *node_at(__u32 index)
{
	return bpf_map_lookup_elem(&nodes, &index);
}

static __u32 find_node(__u64 cgroup_id)
{
	__u32 *index = bpf_map_lookup_elem(&node_of_cgroup, &cgroup_id);

	return index ? *index : ROOT;
}

/* Updates the weight that a cgroup adds to its parent's sum, and returns the change. */
static __s64 recount(struct node *node, __s64 added)
{
	__s64 counted, difference;

	bpf_spin_lock(&node->lock);
	node->active += added;
	/* Two CPUs may report a start and its end in the wrong order: a negative sum is not active.
	 */
	counted = node->active > 0 ? node->weight : 0;
	difference = counted - node->counted;
	node->counted = counted;
	bpf_spin_unlock(&node->lock);
	return difference;
}

/* Adds to the runnable weight of a cgroup, and of its ancestors as far as theirs changes. */
static void add_runnable_weight(__u32 index, __s64 added)
{
	struct node *node;
	int level;

	for (level = 0; level < MAX_DEPTH && index != ROOT; level++) {
		node = node_at(index);
		if (!node)
			return;
		added = recount(node, added);
		if (!added)
			return;
		index = node->parent;
	}
	/* All CPUs would share this sum, and fairness does not need it. */
	if (settings.may_privilege)
		__sync_fetch_and_add(&root_active, added);
}

/* The effective weight of a task with this weight in a cgroup, shifted by WEIGHT_SHIFT. */
static __u64 effective_weight(__u32 index, __u64 weight)
{
	struct node *node;
	__s64 active;
	int level;

	weight <<= WEIGHT_SHIFT;
	for (level = 0; level < MAX_DEPTH && index != ROOT; level++) {
		node = node_at(index);
		if (!node)
			break;
		active = node->active;
		weight = weight * node->weight / (active > 0 ? active : DEFAULT_WEIGHT);
		index = node->parent;
	}
	return weight > MIN_EFFECTIVE_WEIGHT ? weight : MIN_EFFECTIVE_WEIGHT;
}

static __u32 parent_node(struct cgroup *cgroup)
{
	struct cgroup *parent = bpf_cgroup_ancestor(cgroup, cgroup->level - 1);
	__u32 index;

	if (!parent)
		return ROOT;
	index = find_node(parent->kn->id);
	bpf_cgroup_release(parent);
	return index;
}

/* Prepares the node of a new cgroup and returns its index, or ROOT if the table is full. */
static __u32 create_node(struct cgroup *cgroup, __u32 weight)
{
	__u64 id = cgroup->kn->id;
	struct node *node;
	__u32 index;

	if (cgroup->level <= 0)
		return ROOT;
	if (bpf_map_pop_elem(&free_nodes, &index))
		index = __sync_fetch_and_add(&used_nodes, 1);
	node = node_at(index);
	if (!node)
		return ROOT;
	node->parent = parent_node(cgroup);
	node->weight = weight;
	node->active = 0;
	node->counted = 0;
	node->quota_ns = 0;
	node->owed_ns = 0;
	node->run_ns = 0;
	bpf_map_update_elem(&node_of_cgroup, &id, &index, BPF_ANY);
	/* It counts only if a cgroup is privileged. */
	if (id == settings.privileged_id)
		privileged_node = index;
	return index;
}

static void delete_node(struct cgroup *cgroup)
{
	__u64 id = cgroup->kn->id;
	__u32 index = find_node(id);

	if (index == ROOT)
		return;
	bpf_map_delete_elem(&node_of_cgroup, &id);
	/* The index will be that of another cgroup. */
	if (index == privileged_node)
		privileged_node = NO_NODE;
	bpf_map_push_elem(&free_nodes, &index, 0);
}

static void set_node_weight(struct cgroup *cgroup, __u32 weight)
{
	__u32 index = find_node(cgroup->kn->id);
	struct node *node = node_at(index);
	__s64 difference;

	if (!node || index == ROOT)
		return;
	node->weight = weight;
	difference = recount(node, 0);
	if (difference)
		add_runnable_weight(node->parent, difference);
}

#endif
