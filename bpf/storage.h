/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Lookups in task storage from programs that can be preempted. While a task is preempted within the
 * lookup, no other task on its CPU can create storage (seen up to 6.18). So these
 * lookups run with preemption off where the kernel allows it (since 6.10).
 */
#ifndef ZERNEL_STORAGE_H
#define ZERNEL_STORAGE_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "preemption.h"

#define zernel_task_storage(map, task, create)                                              \
	({                                                                                  \
		void *kept;                                                                 \
		zernel_disable_preemption();                                                \
		kept = bpf_task_storage_get(map, task, 0,                                   \
					    (create) ? BPF_LOCAL_STORAGE_GET_F_CREATE : 0); \
		zernel_enable_preemption();                                                 \
		kept;                                                                       \
	})

#endif
