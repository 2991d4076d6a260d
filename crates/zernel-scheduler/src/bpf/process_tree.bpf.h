/* SPDX-License-Identifier: GPL-2.0-only */
/* Finds the descendants of the privileged process. A task stays one when its parents exit. */
#ifndef ZERNEL_SCHED_PROCESS_TREE_H
#define ZERNEL_SCHED_PROCESS_TREE_H

#include "state.bpf.h"

/* Parents that are followed when the scheduler is loaded. */
#define MAX_ANCESTORS 32

static bool has_ancestor(struct task_struct *p, __u32 process)
{
	__u32 level;

	for (level = 0; level < MAX_ANCESTORS && p; level++) {
		__u32 id = BPF_CORE_READ(p, tgid);

		if (id == process)
			return true;
		if (id <= 1)
			return false;
		p = BPF_CORE_READ(p, real_parent);
	}
	return false;
}

/* Whether a task that the scheduler meets is in the tree. A new one inherits from its creator. */
static bool is_in_privileged_tree(struct task_struct *p, bool is_new)
{
	struct task *creator;

	if (!settings.privileged_process)
		return false;
	if (!is_new)
		return has_ancestor(p, settings.privileged_process);
	creator = task_of(bpf_get_current_task_btf());
	return creator && creator->in_privileged_tree;
}

#endif
