/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Open calls: the arguments of a probed function, kept until it returns.
 *
 * A thread's open calls form a stack that is matched by the thread's stack pointer: a call that is
 * entered with the pointer at S returns with it at S + 8. So a call that was left by longjmp, or
 * whose probe was detached meanwhile, is recognised and dropped at the thread's next call or return.
 */
#ifndef ZERNEL_CALL_H
#define ZERNEL_CALL_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "losses.h"
#include "settings.h"
#include "thread.h"

#define ZERNEL_ARGUMENT_REGISTERS 6

/* Loads the arguments in registers one by one: the compiler would turn a choice between them into a
 * variable offset into the context, which the verifier refuses. */
static __always_inline void zernel_read_argument_registers(struct pt_regs *ctx, __u64 *registers)
{
	__u64 first = PT_REGS_PARM1(ctx), second = PT_REGS_PARM2(ctx), third = PT_REGS_PARM3(ctx);
	__u64 fourth = PT_REGS_PARM4(ctx), fifth = PT_REGS_PARM5(ctx), sixth = PT_REGS_PARM6(ctx);

	barrier_var(first);
	barrier_var(second);
	barrier_var(third);
	barrier_var(fourth);
	barrier_var(fifth);
	barrier_var(sixth);
	registers[0] = first;
	registers[1] = second;
	registers[2] = third;
	registers[3] = fourth;
	registers[4] = fifth;
	registers[5] = sixth;
}

/* The nth argument of a C function, from 1, as the System V ABI passes integers and pointers. */
static __always_inline __u64 zernel_nth_argument(const __u64 *registers, __u64 stack, __u32 nth)
{
	__u64 value = 0;

	barrier_var(nth);
	if (nth - 1 < ZERNEL_ARGUMENT_REGISTERS)
		return registers[nth - 1];
	/* The others are on the stack, above the return address. */
	bpf_probe_read_user(&value, sizeof(value),
			    (void *)(stack + 8 * (__u64)(nth - ZERNEL_ARGUMENT_REGISTERS)));
	return value;
}

/* The entry of a function without a return probe. Its arguments may decide what it means. */
struct zernel_function_entry {
	__u64 arguments[3];
	__u32 event; /* enum zernel_event, or ZERNEL_NONE */
	__u16 mark; /* enum zernel_mark */
	__u16 is_ignored; /* the call gives no event and no step mark */
};

static __always_inline struct zernel_open_call *zernel_top_call(struct zernel_thread *thread)
{
	__u32 depth = thread->open_call_count;

	return depth ? &thread->open_calls[(depth - 1) % ZERNEL_MAX_OPEN_CALLS] : NULL;
}

/* Drops the innermost call, whose return was missed. That is a loss unless its probe was detached
 * meanwhile. */
static __always_inline void zernel_drop_call(struct zernel_thread *thread,
					     const struct zernel_open_call *call)
{
	struct zernel_settings *set = zernel_settings();

	thread->open_call_count--;
	if (set && call->since_ns > set->last_detach_ns)
		ZERNEL_COUNT_LOST(calls);
}

static __always_inline struct zernel_open_call *zernel_push_call(struct zernel_thread *thread,
								 __u64 stack)
{
	struct zernel_open_call *call;
	__u32 depth;

	for (int i = 0; i < ZERNEL_MAX_OPEN_CALLS; i++) {
		call = zernel_top_call(thread);
		if (!call || call->stack_pointer > stack)
			break;
		/* Its frame has been overwritten, so it cannot return any more. */
		zernel_drop_call(thread, call);
	}
	depth = thread->open_call_count;
	if (depth >= ZERNEL_MAX_OPEN_CALLS) {
		ZERNEL_COUNT_LOST(calls);
		return NULL;
	}
	thread->open_call_count = depth + 1;
	/* Old verifiers forget the check when the compiler copies the checked value. */
	barrier_var(depth);
	call = &thread->open_calls[depth % ZERNEL_MAX_OPEN_CALLS];
	call->stack_pointer = stack;
	return call;
}

static __always_inline struct zernel_open_call *zernel_pop_call(struct zernel_thread *thread,
								__u64 stack)
{
	for (int i = 0; i < ZERNEL_MAX_OPEN_CALLS; i++) {
		struct zernel_open_call *call = zernel_top_call(thread);

		if (!call || call->stack_pointer + 8 > stack)
			return NULL;
		if (call->stack_pointer + 8 == stack) {
			thread->open_call_count--;
			return call;
		}
		zernel_drop_call(thread, call);
	}
	return NULL;
}

#endif
