/* SPDX-License-Identifier: GPL-2.0-only */
/* State of the dist_sync probe: waits of a thread and of a process for their peers. */
#ifndef DIST_SYNC_STATE_BPF_H
#define DIST_SYNC_STATE_BPF_H

#include "kernel.h"

struct dist_sync_process {
	__u64 backward_since_ns; /* when a thread last began a backward pass */
	__u64 backward_until_ns; /* when its training thread last came back from a backward pass */
	__u64 cpu_reductions; /* begun through the CPU since the last backward pass ended */
	__u64 helper_wait_ns; /* waits of the threads that run its backward passes */
	__u64 peer_blocks; /* of its threads, on the futex of a collective; see work.h */
};

/* A thread's wait for peers: several blocks with short bursts of CPU time between them. */
struct dist_sync_thread {
	__u64 call_entered_ns; /* when a call was entered whose blocks are the wait; 0: none */
	__u64 since_ns; /* 0: no block yet */
	__u64 until_ns; /* end of the last block */
	__u64 cpu_ns_since_block; /* on a CPU since then */
	__u64 peer_wait_ended_ns; /* when it last woke up from a wait for peers */
	__u64 is_for_gradients; /* the call waits several times */
	__u64 peer_blocks_before; /* peer_blocks of its process when the thread last blocked */
	__u64 is_blocked; /* peer_blocks counts it now */
};

#endif
