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
/* How many CPUs are online. */
static __u32 online_cpus = 1;

#endif
