/* SPDX-License-Identifier: GPL-2.0-only */
/* What any program costs a context switch: this one does nothing. */
#include "kernel.h"
#include <bpf/bpf_helpers.h>

SEC("tp_btf/sched_switch")
int empty(void *ctx)
{
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
