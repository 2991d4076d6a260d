/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The table of probed functions. Userspace fills it; a function's index is the cookie of its links.
 * Every function runs the same programs, and its row says what they do.
 */
#ifndef ZERNEL_SYMBOL_H
#define ZERNEL_SYMBOL_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "limits.h"

enum zernel_symbol_flags {
	ZERNEL_RETURNS_STATUS = 1 << 0, /* returns a status; 0 is success */
	ZERNEL_IS_SAMPLED = 1 << 1, /* counted only while a sampling window is open */
	ZERNEL_LAUNCHES_WORK = 1 << 2, /* launches work on the GPU */
	ZERNEL_IS_NO_ML_EVIDENCE = 1 << 3, /* a call of it makes no process an observed one */
	ZERNEL_PRECEDES_LAUNCHES =
		1 << 7, /* while launches are sampled, presumed to be followed by launches */
};
ZERNEL_IN_BTF(enum, zernel_symbol_flags);

struct zernel_symbol {
	__u8 probe; /* enum zernel_probe */
	__u8 role; /* one of that probe's roles */
	__u8 duration_kind; /* enum zernel_duration_kind of its duration, or ZERNEL_NONE */
	__u8 enter_event; /* enum zernel_event, or ZERNEL_NONE */
	__u8 leave_event;
	__u8 flags; /* enum zernel_symbol_flags */
	__u8 bytes_argument; /* place of the number of bytes among the kept arguments, from 1; 0: none */
	__u8 mark; /* enum zernel_mark */
	__u8 kept_arguments[ZERNEL_KEPT_ARGUMENTS]; /* which arguments are kept, from 1; 0: none */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ZERNEL_SYMBOLS);
	__type(key, __u32);
	__type(value, struct zernel_symbol);
} symbols SEC(".maps");

static __always_inline const struct zernel_symbol *zernel_symbol(__u32 id)
{
	return bpf_map_lookup_elem(&symbols, &id);
}

#endif
