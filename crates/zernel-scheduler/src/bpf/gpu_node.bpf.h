/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * NUMA nodes of GPUs. A thread that uses a GPU, or works for one that does, runs on the node of the
 * GPU if a CPU is idle there: its copies and launches take the shorter way. The observer publishes
 * the GPU of a thread. The node is a preference only, so it needs no privilege.
 */
#ifndef ZERNEL_SCHED_GPU_NODE_H
#define ZERNEL_SCHED_GPU_NODE_H

#include "globals.bpf.h"
#include "statistics.bpf.h"
#include "task_maps.h"

static __u32 node_of(__u64 cpu)
{
	return settings.node_of_cpu[cpu & (MAX_CPUS - 1)];
}

/* The node of the GPU that a task uses; MAX_NODES: none is known. */
static __u32 node_of_gpu(struct task_struct *p)
{
	const struct zernel_task_state *state;
	__u32 gpu;

	if (settings.nodes < 2 || !(settings.policies & POLICY_GPU_NODE))
		return MAX_NODES;
	state = bpf_task_storage_get(&zernel_tasks, p, 0, 0);
	gpu = state ? state->gpu_id : ZERNEL_NO_GPU;
	return gpu < MAX_GPUS ? settings.node_of_gpu[gpu] : MAX_NODES;
}

/* Chooses a CPU for a task that wakes up, an idle one if there is one, and rather on the node of its
 * GPU than on the one where it ran last or where the waker runs. */
static __s32 select_idle_cpu(struct task_struct *p, __s32 prev_cpu, __u64 wake_flags, bool *is_idle)
{
	__u32 node = node_of_gpu(p), near;

	if (node >= MAX_NODES)
		return scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, is_idle);
	if (node_of(bpf_get_smp_processor_id()) != node)
		wake_flags &= ~SCX_WAKE_SYNC;
	near = settings.cpu_of_node[node];
	if (node_of(prev_cpu) != node && bpf_cpumask_test_cpu(near, p->cpus_ptr)) {
		counters.moved_to_gpu++;
		prev_cpu = near;
	}
	return scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, is_idle);
}

#endif
