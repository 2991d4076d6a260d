/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The classes of threads as hints for other schedulers, in the format of scx_layered. Off unless
 * userspace asks for it before the programs are loaded; then the verifier removes this code, and
 * the map is not created. docs/hints.md lists the values.
 */
#ifndef ZERNEL_HINTS_H
#define ZERNEL_HINTS_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "class.h"
#include "storage.h"

/* Not 0: hints are written. Userspace sets it before the programs are loaded. */
const volatile __u32 zernel_writes_hints SEC(".rodata.hints");

enum zernel_hint_value {
	ZERNEL_HINT_NONE = 0,
	ZERNEL_HINT_BASE = 1000, /* and the class; scx_layered allows values up to 1024 */
};
ZERNEL_IN_BTF(enum, zernel_hint_value);

struct zernel_hint {
	__u64 hint;
	__u64 reserved[3];
};
ZERNEL_IN_BTF(struct, zernel_hint);

/* A program that reuses a pinned map gives it the name by which the kernel knows it: the first 15
 * characters. scx_layered refuses to start if that is not the name of its own map. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct zernel_hint);
} scx_layered_task_hint_map SEC(".maps");

static __always_inline __u64 zernel_hint_of(const struct zernel_task_state *state)
{
	__u64 word = state->class_word;

	if (zernel_word_role(word) == ZERNEL_ROLE_NONE)
		return ZERNEL_HINT_NONE;
	return ZERNEL_HINT_BASE + zernel_word_class(word);
}

/* Writes the hint of a task. `create`: the task may get storage, which a context switch must not
 * allocate. */
static __always_inline void zernel_write_hint(struct task_struct *task,
					      const struct zernel_task_state *state, bool create)
{
	struct zernel_hint *hint;
	__u64 value;

	if (!zernel_writes_hints || !state)
		return;
	value = zernel_hint_of(state);
	hint = create ? zernel_task_storage(&scx_layered_task_hint_map, task, true) :
			bpf_task_storage_get(&scx_layered_task_hint_map, task, 0, 0);
	if (hint && hint->hint != value)
		*(volatile __u64 *)&hint->hint = value;
}

/* Clears the hint of a task, if it is one of ours. */
static __always_inline void zernel_clear_hint(struct task_struct *task)
{
	struct zernel_hint *hint;

	if (!zernel_writes_hints)
		return;
	hint = zernel_task_storage(&scx_layered_task_hint_map, task, false);
	if (hint && hint->hint >= ZERNEL_HINT_BASE &&
	    hint->hint < ZERNEL_HINT_BASE + ZERNEL_CLASSES)
		*(volatile __u64 *)&hint->hint = ZERNEL_HINT_NONE;
}

#endif
