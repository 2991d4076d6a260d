/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Programs that run at an uprobe.
 *
 * Since 6.13 the stack of a tracing program may be per-CPU memory, because the kernel assumes that
 * such a program never runs twice on one CPU at a time. At an uprobe it does: the program is
 * preempted together with its thread, another thread runs it on the same CPU, and each finds the
 * other's values on its stack, pointers included. A program with a tail call keeps its stack on the
 * thread's kernel stack. So every program that uses the stack gets a tail call that never happens;
 * the verifier sees that and removes it.
 */
#ifndef ZERNEL_UPROBE_H
#define ZERNEL_UPROBE_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>

/* An empty array of programs. Each program needs its own, because an array takes one type of
 * program. */
#define ZERNEL_EMPTY_PROGRAM_ARRAY(array)                      \
	struct {                                       \
		__uint(type, BPF_MAP_TYPE_PROG_ARRAY); \
		__uint(max_entries, 1);                \
		__uint(key_size, sizeof(__u32));       \
		__uint(value_size, sizeof(__u32));     \
	} array SEC(".maps")

static __always_inline void zernel_unreachable_tail_call(void *ctx, void *array)
{
	__u64 never;

	/* It is zero. The verifier knows that, the compiler does not. */
	asm volatile("%0 = 0" : "=r"(never));
	if (never)
		bpf_tail_call(ctx, array, 0);
}

/* Defines a program with the parameter `struct pt_regs *ctx`; its body follows. */
#define ZERNEL_UPROBE(section, name)                                 \
	static __always_inline int name##_body(struct pt_regs *ctx); \
	ZERNEL_EMPTY_PROGRAM_ARRAY(name##_none);                             \
	SEC(section) int name(struct pt_regs *ctx)                   \
	{                                                            \
		zernel_unreachable_tail_call(ctx, &name##_none);                \
		return name##_body(ctx);                             \
	}                                                            \
	static __always_inline int name##_body(struct pt_regs *ctx)

#endif
