/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * PyTorch: calls that only a training loop makes. They are C++ functions, so only their entry is
 * probed.
 */
#ifndef TORCH_BPF_H
#define TORCH_BPF_H

#include "kernel.h"
#include "btf.h"
#include "dataload/dataload.bpf.h"
#include "process.h"
#include "symbol.h"
#include "thread.h"

enum torch_role {
	TORCH_BACKWARD,
	TORCH_OPTIMIZER,
};
ZERNEL_IN_BTF(enum, torch_role);

#define torch_mark torch_mark
static __always_inline void torch_mark(const struct zernel_symbol *symbol,
				       struct zernel_thread *thread, struct zernel_process *process,
				       __u64 now_ns)
{
	mark_training_loop(thread, process);
}

#endif
