/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Families of durations. A process has at most one histogram per family. NCCL's operations have two
 * families each, so the operations are listed here as well.
 */
#ifndef ZERNEL_DURATION_KIND_H
#define ZERNEL_DURATION_KIND_H

#include "btf.h"

enum nccl_operation {
	NCCL_OP_ALL_REDUCE,
	NCCL_OP_BROADCAST,
	NCCL_OP_REDUCE,
	NCCL_OP_ALL_GATHER,
	NCCL_OP_REDUCE_SCATTER,
	NCCL_OP_ALL_TO_ALL,
	NCCL_OP_GATHER,
	NCCL_OP_SCATTER,
	NCCL_OP_SEND,
	NCCL_OP_RECV,
	NCCL_OP_GROUP,
	NCCL_OP_OTHER,
	NCCL_OPS, /* how many there are */
};
ZERNEL_IN_BTF(enum, nccl_operation);

enum zernel_duration_kind {
	ZERNEL_LAUNCH_CALL,
	ZERNEL_STREAM_WAIT,
	ZERNEL_EVENT_WAIT,
	ZERNEL_CONTEXT_WAIT,
	ZERNEL_COPY_WAIT,
	ZERNEL_DATALOAD,
	ZERNEL_DIST_SYNC,
	ZERNEL_RUN_DELAY,
	ZERNEL_COLLECTIVE_ENQUEUE, /* the first of one family per operation */
	ZERNEL_COLLECTIVE_UNTIL_SYNC = ZERNEL_COLLECTIVE_ENQUEUE + NCCL_OPS, /* likewise */
	ZERNEL_DURATION_KINDS = ZERNEL_COLLECTIVE_UNTIL_SYNC + NCCL_OPS,
};
ZERNEL_IN_BTF(enum, zernel_duration_kind);

#endif
