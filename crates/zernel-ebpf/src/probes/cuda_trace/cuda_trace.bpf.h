/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Launches, copies and waits. For most of these calls the kernel does no more than for any probed call. A wait also
 * shows that collectives are done, and CUDA events carry that from stream to stream.
 */
#ifndef CUDA_TRACE_BPF_H
#define CUDA_TRACE_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "cuda_trace/state.bpf.h"
#include "mark.h"
#include "nccl/nccl.bpf.h"
#include "phase_tracker.h"
#include "process.h"
#include "symbol.h"
#include "thread.h"

enum cuda_trace_role {
	TRACE_CALL,
	TRACE_COPY_2D, /* argument: a CUDA_MEMCPY2D */
	TRACE_STREAM_WAIT, /* argument: the stream */
	TRACE_EVENT_WAIT, /* argument: the event */
	TRACE_CONTEXT_WAIT,
	TRACE_EVENT_RECORD, /* arguments: the event, the stream */
	TRACE_STREAM_WAITS_FOR_EVENT, /* arguments: the stream, the event */
	TRACE_COPY_3D, /* argument: a CUDA_MEMCPY3D or CUDA_MEMCPY3D_PEER */
};
ZERNEL_IN_BTF(enum, cuda_trace_role);

/* The part of CUDA_MEMCPY2D that is read. */
struct copy_2d {
	__u64 before[14];
	__u64 width_bytes;
	__u64 height;
};

/* The part of CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER that is read. */
struct copy_3d {
	__u64 before[22];
	__u64 width_bytes;
	__u64 height;
	__u64 depth;
};

#define cuda_trace_enter cuda_trace_enter
static __always_inline void cuda_trace_enter(const struct zernel_symbol *symbol,
					     struct zernel_thread *thread,
					     struct zernel_open_call *call)
{
	__u64 size[3] = { 0, 0, 1 };

	switch (symbol->role) {
	case TRACE_COPY_2D:
		bpf_probe_read_user(size, 2 * sizeof(size[0]),
				    (void *)(call->arguments[0] +
					     __builtin_offsetof(struct copy_2d, width_bytes)));
		break;
	case TRACE_COPY_3D:
		bpf_probe_read_user(size, sizeof(size),
				    (void *)(call->arguments[0] +
					     __builtin_offsetof(struct copy_3d, width_bytes)));
		break;
	default:
		return;
	}
	call->arguments[1] = size[0] * size[1] * size[2];
}

/* A thread that begins a GPU wait this soon after its copy waits for that copy: PyTorch waits at once after it copies
 * pageable memory. A loop of 20 launches takes longer than this time. */
#define MAX_COPY_TO_WAIT_NS 30000ULL

/*
 * While launches are sampled, a thread is presumed to launch from the end of the copy of its batch.
 * After a copy of pageable memory, which is waited for at once, it is presumed to launch from the
 * end of that wait. A thread that copies nothing launches from the end of its wait for the last
 * step.
 */
static __always_inline bool are_launches_presumed(const struct zernel_symbol *symbol,
					      struct zernel_thread *thread,
					      const struct zernel_open_call *call, __u64 now_ns)
{
	struct cuda_trace_thread *trace = &thread->cuda_trace;

	if (symbol->flags & ZERNEL_PRECEDES_LAUNCHES) {
		trace->last_copy_end_ns = now_ns;
		return true;
	}
	if (symbol->leave_event != ZERNEL_GPU_SYNC_LEAVE)
		return false;
	return trace->has_batches_on_gpu ||
	       (trace->last_copy_end_ns && call->since_ns - trace->last_copy_end_ns < MAX_COPY_TO_WAIT_NS);
}

/* Notes that a backward pass begins. A thread without a copy since its last backward pass has its
 * batches on the GPU already. One pass may call two functions that begin it; the first of them marks a step. */
static __always_inline void note_backward_begin(const struct zernel_symbol *symbol,
					  const struct zernel_process *process,
					  struct zernel_thread *thread, __u64 now_ns)
{
	bool presumes = symbol->flags & ZERNEL_PRECEDES_LAUNCHES && zernel_uses_gpu(process);
	struct cuda_trace_thread *trace = &thread->cuda_trace;

	if (symbol->enter_event != ZERNEL_BACKWARD_BEGIN)
		return;
	if (symbol->mark == ZERNEL_MARK_BACKWARD)
		trace->marks_backward = true;
	else if (trace->marks_backward)
		return;
	trace->has_batches_on_gpu = presumes && trace->last_copy_end_ns < trace->last_backward_begin_ns;
	trace->last_backward_begin_ns = presumes ? now_ns : 0;
}

#define cuda_trace_leave cuda_trace_leave
static __always_inline void cuda_trace_leave(const struct zernel_symbol *symbol,
					     struct zernel_thread *thread,
					     struct zernel_open_call *call, __u64 now_ns,
					     int result, bool failed)
{
	__u32 process = thread->process_handle;

	if (failed)
		return;
	switch (symbol->role) {
	case TRACE_STREAM_WAIT:
	case TRACE_EVENT_WAIT:
		end_pending_collectives(process, collectives_covered_by(process, call->arguments[0]), now_ns);
		break;
	case TRACE_CONTEXT_WAIT:
		end_pending_collectives(process, ~0ULL, now_ns);
		break;
	case TRACE_EVENT_RECORD:
		set_covered_collectives(process, call->arguments[0],
					collectives_covered_by(process, call->arguments[1]));
		break;
	case TRACE_STREAM_WAITS_FOR_EVENT:
		set_covered_collectives(process, call->arguments[0],
					collectives_covered_by(process, call->arguments[0]) |
						collectives_covered_by(process, call->arguments[1]));
		break;
	}
}

#endif
