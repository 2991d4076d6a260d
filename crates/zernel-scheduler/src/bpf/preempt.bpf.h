/* SPDX-License-Identifier: GPL-2.0-only */
/* Wake-up preemption: at most two CPUs are looked at. */
#ifndef ZERNEL_SCHED_PREEMPT_H
#define ZERNEL_SCHED_PREEMPT_H

#include "queue.bpf.h"

/* A running task must be ahead of the waking one by this much virtual time to be preempted: a
 * context switch for a smaller lead costs more than it gains. */
#define PREEMPT_LEAD_VTIME 500000ULL

/* How far a CPU's running task is ahead of this one; negative if it is behind, 0 if it cannot be
 * preempted. */
static __s64 lead_of_running_task(const struct task_struct *p, const struct task *task, const struct cpu *cpu,
		       __u64 now_ns)
{
	if (!cpu->running_weight || cpu->rank != RANK_ORDINARY)
		return 0;
	return running_vtime(cpu, now_ns) - comparable_vtime(p, task);
}

/* A CPU whose running task the waking task should preempt, or `cpu`. */
static __s32 find_cpu_to_preempt(struct task_struct *p, const struct task *task, __s32 cpu, __u64 now_ns)
{
	__s64 lead = lead_of_running_task(p, task, cpu_at(cpu), now_ns);
	__u32 other = next_preemption_candidate++ % (settings.cpu_count ?: 1);

	if (other != cpu && llc_of(other) == llc_of(cpu) &&
	    bpf_cpumask_test_cpu(other, p->cpus_ptr) &&
	    lead_of_running_task(p, task, cpu_at(other), now_ns) > lead)
		return other;
	return cpu;
}

/* Decides whether a waking task preempts the running task of its CPU. */
static bool preempt_running_task(struct task_struct *p, const struct task *task, __s32 number, __u64 now_ns)
{
	struct cpu *cpu = cpu_at(number);

	if (lead_of_running_task(p, task, cpu, now_ns) < (__s64)PREEMPT_LEAD_VTIME)
		return false;
	/* Until it runs, others that wake up see it on this CPU and choose another one. */
	set_running_task(cpu, comparable_vtime(p, task), now_ns, weight_of(task));
	return true;
}

#endif
