/* SPDX-License-Identifier: GPL-2.0-only */
/* The variables that the userspace half sets and reads. */
#ifndef ZERNEL_SCHED_GLOBALS_H
#define ZERNEL_SCHED_GLOBALS_H

#include "intf.h"

struct settings settings = {};
struct counters counters = {};
struct ending ending = {};
/* Time that tasks ran on CPUs that others lent them. */
__u64 lent_ns = 0;
/* How many CPUs are online, and how many of them run a task of a higher scheduling class. */
static __s32 online_cpus = 1, lost_cpus;

/* How many CPUs can run tasks of this scheduler. */
static __u32 usable_cpus(void)
{
	__s32 usable = online_cpus - lost_cpus;

	return usable > 0 ? usable : 1;
}

#endif
