/* SPDX-License-Identifier: GPL-2.0-only */
/* Sizes of the tables that the probes write and userspace reads. */
#ifndef ZERNEL_LIMITS_H
#define ZERNEL_LIMITS_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"

enum zernel_limits {
	ZERNEL_PROCESSES = 2048,
	ZERNEL_SYMBOLS = 96,
	ZERNEL_HISTOGRAMS = 4096,
	ZERNEL_ALLOCATIONS = 1 << 17, /* of GPU memory, of all processes */
	ZERNEL_MEMORY_ACCOUNTS = 1 << 14,
	ZERNEL_COMMUNICATORS = 1 << 14,
	ZERNEL_KEPT_ARGUMENTS = 4, /* of a call that are kept */
	ZERNEL_NONE = 0xff, /* in a row of `symbols`: no family, no event */
};
ZERNEL_IN_BTF(enum, zernel_limits);

/* The index of a process in arrays, from its handle; see process.h. */
static __always_inline __u32 zernel_process_index(__u32 handle)
{
	return handle % ZERNEL_PROCESSES;
}

#endif
