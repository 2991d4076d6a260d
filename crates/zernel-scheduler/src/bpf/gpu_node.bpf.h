/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * NUMA nodes of GPUs. A thread that uses a GPU, or works for one that does, rather runs on the node of
 * the GPU, where its copies and launches take the shorter way: the search for an idle CPU begins
 * there. The observer publishes the GPU of a thread. The node is a preference only, so it needs no
 * privilege.
 */
#ifndef ZERNEL_SCHED_GPU_NODE_H
#define ZERNEL_SCHED_GPU_NODE_H

#include "globals.bpf.h"
#include "statistics.bpf.h"
#include "observer_clock.bpf.h"

/* CPUs of a node that are looked at to find one that a task may use. */
#define NUMA_CPU_CANDIDATES 8

static __u32 numa_node_of_cpu(__u64 cpu)
{
	return settings.node_of_cpu[cpu & (MAX_CPUS - 1)];
}

/* The node of the GPU that a task uses; MAX_NODES: none is known. */
static __u32 numa_node_of_tasks_gpu(struct task_struct *p)
{
	const struct zernel_task_state *state;
	__u32 gpu;

	if (settings.numa_nodes < 2 || !(settings.enabled_policies & POLICY_GPU_NODE) ||
	    !has_live_observer(scx_bpf_now()))
		return MAX_NODES;
	state = bpf_task_storage_get(&zernel_tasks, p, 0, 0);
	gpu = state ? state->gpu_id : ZERNEL_NO_GPU;
	return gpu < MAX_GPUS ? settings.node_of_gpu[gpu] : MAX_NODES;
}

/* A CPU of a node that a task may use; -1: none of those looked at. */
static __s32 allowed_cpu_of_numa_node(const struct task_struct *p, __u32 node)
{
	__u32 first = settings.first_cpu_of_node[node], count = settings.cpu_count_of_node[node], step;
	__u32 candidates = count < NUMA_CPU_CANDIDATES ? count : NUMA_CPU_CANDIDATES;

	for (step = 0; step < candidates; step++) {
		/* Spread over the node: the first CPUs are often reserved for other work. */
		__u32 index = first + step * count / candidates;
		__u32 cpu = settings.cpus_by_node[index & (MAX_CPUS - 1)];

		if (bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
			return cpu;
	}
	return -1;
}

/* Chooses a CPU for a task that wakes up: an idle one, if there is one. The search begins on the node
 * of its GPU, if it ran last on another one. */
static __s32 select_idle_cpu(struct task_struct *p, __s32 prev_cpu, __u64 wake_flags, bool *is_idle)
{
	__u32 node = numa_node_of_tasks_gpu(p);
	__s32 near = -1, cpu;

	if (node >= MAX_NODES)
		return scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, is_idle);
	if (numa_node_of_cpu(bpf_get_smp_processor_id()) != node)
		wake_flags &= ~SCX_WAKE_SYNC;
	if (numa_node_of_cpu(prev_cpu) != node)
		near = allowed_cpu_of_numa_node(p, node);
	cpu = scx_bpf_select_cpu_dfl(p, near < 0 ? prev_cpu : near, wake_flags, is_idle);
	if (near < 0)
		return cpu;
	/* No CPU is idle: it waits where it ran last. */
	if (!*is_idle)
		return prev_cpu;
	if (numa_node_of_cpu(cpu) == node)
		counters.moved_to_gpu++;
	return cpu;
}

#endif
