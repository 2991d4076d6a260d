/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Launches, copies and waits. What they have in common with all calls is enough for most; waits also
 * show which collectives are done, and events carry that from stream to stream.
 */
enum cuda_trace_role {
	TRACE_CALL,
	TRACE_COPY_2D, /* argument: a description */
	TRACE_STREAM_WAIT, /* the stream */
	TRACE_EVENT_WAIT, /* the event */
	TRACE_CONTEXT_WAIT,
	TRACE_EVENT_RECORD, /* the event, the stream */
	TRACE_STREAM_WAITS_FOR_EVENT, /* the stream, the event */
	TRACE_COPY_3D, /* a description */
};

/* What we read of CUDA_MEMCPY2D. */
struct copy_2d {
	__u64 before[14];
	__u64 width_bytes;
	__u64 height;
};

/* What we read of CUDA_MEMCPY3D, and of CUDA_MEMCPY3D_PEER. */
struct copy_3d {
	__u64 before[22];
	__u64 width_bytes;
	__u64 height;
	__u64 depth;
};

static __always_inline void cuda_trace_enter(const struct zernel_symbol *symbol,
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

static __always_inline void cuda_trace_leave(const struct zernel_symbol *symbol,
					     struct zernel_thread *thread,
					     struct zernel_open_call *call, __u64 now_ns)
{
	__u32 process = thread->process;

	switch (symbol->role) {
	case TRACE_STREAM_WAIT:
	case TRACE_EVENT_WAIT:
		collectives_done(process, covered_by(process, call->arguments[0]), now_ns);
		break;
	case TRACE_CONTEXT_WAIT:
		collectives_done(process, ~0ULL, now_ns);
		break;
	case TRACE_EVENT_RECORD:
		cover(process, call->arguments[0], covered_by(process, call->arguments[1]));
		break;
	case TRACE_STREAM_WAITS_FOR_EVENT:
		cover(process, call->arguments[0],
		      covered_by(process, call->arguments[0]) |
			      covered_by(process, call->arguments[1]));
		break;
	}
}
