/* SPDX-License-Identifier: GPL-2.0-only */
/* State of the dataload probe: waits for data, and the work that explains them. */
#ifndef DATALOAD_STATE_BPF_H
#define DATALOAD_STATE_BPF_H

#include "kernel.h"
#include "work.h"

struct dataload_process {
	__u64 waited_ns[ZERNEL_WORK_KINDS + 1]; /* by the work done meanwhile; the last: no work */
	__u64 own_work[ZERNEL_WORK_KINDS]; /* of its own threads; see work.h */
	__u64 loader_work[ZERNEL_WORK_KINDS]; /* of the threads of its loaders */
	__u64 helper; /* pid of a child that ended a wait for data and is not observed, or 0 */
};

/* A thread's wait for data: several blocks with short bursts of CPU time between them. */
struct dataload_thread {
	__u64 since_ns; /* 0: no wait */
	__u64 until_ns; /* end of its last block */
	__u64 cpu_ns_since_block; /* on a CPU since then */
	__u64 work_before[ZERNEL_WORK_KINDS]; /* at since_ns */
	__u64 work_after[ZERNEL_WORK_KINDS]; /* at until_ns */
	__u8 is_tentative; /* it counts only if a copy to the device follows */
	__u8 is_by_loaders; /* loaders do the work, not the process itself */
	__u8 runs_training_loop; /* the thread makes calls that only a training loop makes */
	__u8 is_announced; /* the thread announced that it gets its next batch */
	__u8 is_own_work; /* the thread works since its optimizer step, perhaps on its next batch */
	__u8 reserved[3];
};

#endif
