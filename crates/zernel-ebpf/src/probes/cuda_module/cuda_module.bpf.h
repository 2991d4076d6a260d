/* SPDX-License-Identifier: GPL-2.0-only */
/* Loads of GPU code. Many of them during training mean that kernels are compiled again and again. */
#ifndef CUDA_MODULE_BPF_H
#define CUDA_MODULE_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "cuda_module/state.bpf.h"
#include "process.h"
#include "symbol.h"
#include "thread.h"

#define cuda_module_leave cuda_module_leave
static __always_inline void cuda_module_leave(const struct zernel_symbol *symbol,
					      struct zernel_thread *thread,
					      struct zernel_open_call *call, __u64 now_ns,
					      int result, bool failed)
{
	struct zernel_process *process = zernel_process(thread->process);

	if (process && !failed)
		__sync_fetch_and_add(&process->cuda_module.loads, 1);
}

#endif
