/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Programs that run where an uprobe was hit.
 *
 * Since 6.13 the stack of a tracing program may be memory of its CPU: the kernel holds that such a program
 * cannot run twice on one CPU at a time. At an uprobe it can. It is preempted like the thread that it runs
 * for, another thread runs it on the same CPU, and either finds the other's values on its stack, pointers
 * among them. A program that has a tail call keeps the stack of its thread. So each that keeps anything
 * there has one, which the verifier sees is never made and takes out.
 */
#ifndef ZERNEL_UPROBE_H
#define ZERNEL_UPROBE_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>

/* An array without programs; each program needs its own, because its kind becomes the array's. */
#define ZERNEL_NO_PROGRAMS(array)                       \
	struct {                                        \
		__uint(type, BPF_MAP_TYPE_PROG_ARRAY);  \
		__uint(max_entries, 1);                 \
		__uint(key_size, sizeof(__u32));        \
		__uint(value_size, sizeof(__u32));      \
	} array SEC(".maps")

static __always_inline void zernel_never_call(void *ctx, void *array)
{
	__u64 never;

	/* Zero, known to the verifier and not to the compiler. */
	asm volatile("%0 = 0" : "=r"(never));
	if (never)
		bpf_tail_call(ctx, array, 0);
}

/* A program of the section and the name, with `struct pt_regs *ctx`; its body follows. */
#define ZERNEL_UPROBE(section, name)                               \
	static __always_inline int name##_body(struct pt_regs *ctx);   \
	ZERNEL_NO_PROGRAMS(name##_none);                           \
	SEC(section) int name(struct pt_regs *ctx)                 \
	{                                                          \
		zernel_never_call(ctx, &name##_none);              \
		return name##_body(ctx);                           \
	}                                                          \
	static __always_inline int name##_body(struct pt_regs *ctx)

#endif
