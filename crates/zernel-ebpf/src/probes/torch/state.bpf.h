/* SPDX-License-Identifier: GPL-2.0-only */
/* State of the torch probe: the functions that a thread has begun to record and not ended, the
 * compilation that it is in, and the compilations of a process. */
#ifndef TORCH_STATE_BPF_H
#define TORCH_STATE_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>

#define TORCH_RECORD_BITS 4

struct torch_thread {
	__u64 records; /* enum torch_record, the innermost in the lowest bits */
	__u32 has_seen_record_end; /* the end of a record was seen */
	__u32 has_seen_update; /* an optimizer step was seen */
	__u64 compile_counter; /* the counter that times the compilation */
	__u64 compile_since_ns; /* when it began */
	__u64 compile_ns_at_block; /* compile_ns of its process when it last blocked */
	__u32 compile_depth; /* how often that counter runs now */
	__u32 has_compile_handle; /* a handle of such a counter was made */
};

struct torch_process {
	__u64 compile_ns; /* time in compilations that have ended, summed over threads */
	__u64 compiling_since_ns; /* when the compilation that is under way began; 0: none is */
	__u64 compiled_until_ns; /* when the last one ended */
};

/* Forgets the compilation that a thread is in: its end was missed, or will not be seen. Another thread may have begun one
 * later, which goes on. */
static __always_inline void drop_compilation(struct torch_thread *thread, struct torch_process *process)
{
	if (thread->compile_depth && process->compiling_since_ns == thread->compile_since_ns)
		process->compiling_since_ns = 0;
	thread->compile_depth = 0;
}

#endif
