/* SPDX-License-Identifier: GPL-2.0-only */
/* State of the cuda_trace probe: when a thread's launches begin, while launches are sampled. */
#ifndef CUDA_TRACE_STATE_BPF_H
#define CUDA_TRACE_STATE_BPF_H

#include "kernel.h"

struct cuda_trace_thread {
	__u64 last_copy_end_ns; /* end of the last copy after which launches are presumed */
	__u64 last_backward_begin_ns; /* start of the last backward pass; 0: launches are not presumed */
	__u32 has_batches_on_gpu; /* no copy between the last two backward passes */
	__u32 marks_backward; /* it calls the function that marks a step with each backward pass */
};

#endif
