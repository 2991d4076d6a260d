/* SPDX-License-Identifier: GPL-2.0-only */
/* State of the cuda_context probe: a thread's stack of CUDA contexts. */
#ifndef CUDA_CONTEXT_STATE_BPF_H
#define CUDA_CONTEXT_STATE_BPF_H

#include "kernel.h"

#define CUDA_CONTEXT_DEPTH 8

struct cuda_context_thread {
	__u64 current_context; /* 0: unknown */
	__u64 contexts_below[CUDA_CONTEXT_DEPTH]; /* contexts under the current one, the lowest first */
	__u64 pushed_count; /* how many lie below, even if not all are kept */
};

#endif
