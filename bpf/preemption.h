/* SPDX-License-Identifier: GPL-2.0-only */
/* Sections of a program that can be preempted elsewhere. Kernels before 6.10 cannot turn preemption off for a program. */
#ifndef ZERNEL_PREEMPTION_H
#define ZERNEL_PREEMPTION_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>

extern void bpf_preempt_disable(void) __weak __ksym;
extern void bpf_preempt_enable(void) __weak __ksym;

static __always_inline void zernel_disable_preemption(void)
{
	if (bpf_ksym_exists(bpf_preempt_disable))
		bpf_preempt_disable();
}

static __always_inline void zernel_enable_preemption(void)
{
	if (bpf_ksym_exists(bpf_preempt_enable))
		bpf_preempt_enable();
}

#endif
