/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The events of a thread that its tracker receives, and how long the tracker believes them. Include
 * the kernel's types first: kernel.h, or vmlinux.h.
 */
#ifndef ZERNEL_TRACKER_EVENT_H
#define ZERNEL_TRACKER_EVENT_H

enum zernel_event {
	ZERNEL_GPU_SYNC_ENTER,
	ZERNEL_GPU_SYNC_LEAVE,
	ZERNEL_COLLECTIVE_ENTER,
	ZERNEL_COLLECTIVE_LEAVE,
	ZERNEL_LAUNCH,
	ZERNEL_COPY_TO_DEVICE,
	ZERNEL_BLOCK_IO,
	ZERNEL_BLOCK_FUTEX,
	ZERNEL_BLOCK_POLL,
	ZERNEL_BLOCK_OTHER,
	ZERNEL_UNBLOCK,
	ZERNEL_OPTIMIZER_MARKER,
	ZERNEL_UNBLOCK_AFTER_LAUNCHES, /* other threads of its process launched meanwhile */
	ZERNEL_DATA_BEGIN,
	ZERNEL_FORWARD_BEGIN,
	ZERNEL_BACKWARD_BEGIN,
	ZERNEL_OPTIMIZER_BEGIN,
	ZERNEL_ZERO_GRADIENTS,
	ZERNEL_NOT_OBSERVED, /* its calls are not observed from now on */
	ZERNEL_PREEMPT, /* it left its CPU and is still runnable */
	ZERNEL_RESUME, /* it runs again after that */
	ZERNEL_OTHER_WORK_BEGIN,
	ZERNEL_UPDATE_END, /* of an optimizer step, or of clearing gradients */
	ZERNEL_BLOCK_REQUEST, /* waits for work from the training thread, which is another one */
	ZERNEL_COMPILE_BEGIN,
	ZERNEL_COMPILE_END,
	ZERNEL_FORK, /* of a process that may load data for it */
	ZERNEL_BLOCK_SLEEP, /* for a time, or a request from outside of the process */
	ZERNEL_AWAITED_COMPILE, /* it waited for another thread, which compiled, and still waits */
	ZERNEL_AWAITED_COLLECTIVE, /* the same: the other thread was in a collective */
	ZERNEL_AWAITED_DATA, /* the same: the other thread loads data for it */
	ZERNEL_COPY_TO_HOST_ENTER, /* of a copy that may wait for the GPU: to pageable memory, it does */
	ZERNEL_COPY_TO_HOST_LEAVE,
};

struct zernel_tracker_config {
	__u64 sync_max_ns;
	__u64 collective_max_ns;
	__u64 blocked_max_ns;
	__u64 loading_max_ns;
	__u64 launching_max_ns;
	__u64 optimizer_max_ns;
	__u64 optimizer_launch_max_ns;
	__u64 short_wait_max_ns;
};

#endif
