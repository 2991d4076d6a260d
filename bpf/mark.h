/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Step marks: calls that a training loop makes about once a step. steps.h reports them to
 * userspace, which finds the steps.
 */
#ifndef ZERNEL_MARK_H
#define ZERNEL_MARK_H

#include "kernel.h"
#include "btf.h"

enum zernel_mark {
	ZERNEL_MARK_NONE,
	ZERNEL_MARK_OPTIMIZER,
	ZERNEL_MARK_BACKWARD,
	ZERNEL_MARK_REDUCE,
	ZERNEL_MARK_GRAPH,
	ZERNEL_MARK_COPY_IN,
	ZERNEL_MARK_COPY_OUT,
	ZERNEL_MARK_WAIT,
};
ZERNEL_IN_BTF(enum, zernel_mark);

enum zernel_mark_class {
	ZERNEL_MARKS_TRAINING, /* calls that only training makes */
	ZERNEL_MARKS_GPU_USE, /* calls that any program with a GPU makes */
	ZERNEL_MARK_CLASSES, /* how many there are */
};
ZERNEL_IN_BTF(enum, zernel_mark_class);

/* A mark as userspace reads it from the ring buffer. */
struct zernel_step_mark {
	__u64 at_ns;
	__u32 process; /* handle */
	__u16 launches; /* since the previous mark; 0xffff: at least that many */
	__u8 mark; /* enum zernel_mark */
	__u8 missing_classes; /* bits of the classes with marks missing before this one */
};
ZERNEL_IN_BTF(struct, zernel_step_mark);

/* Marks of one process. */
struct zernel_process_marks {
	__u32 launches; /* since the last mark */
	__u32 last_mark; /* enum zernel_mark */
	__u64 since_ns; /* start of the interval for which `interval_marks` counts */
	__u32 interval_marks[ZERNEL_MARK_CLASSES];
	__u32 missing_classes; /* bits of the classes with unreported marks since the last report */
	__u32 reserved;
	__u64 launched_ns; /* when one of its threads last launched */
};

#endif
