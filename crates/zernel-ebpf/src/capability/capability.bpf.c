/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * One small program per kind of attachment. Each is loaded and attached alone and counts its runs
 * under its own index: the count distinguishes a program that runs from one that is only attached.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "task_state.h"

enum capability {
	TP_BTF,
	RAW_TP,
	TRACEPOINT,
	UPROBE_SESSION,
	UPROBE_MULTI,
	UPROBE_PERF,
	TASK_STORAGE,
	TASK_VMA,
	RINGBUF,
	MMAP_ARRAY,
	FENTRY,
	KPROBE,
	CAPABILITIES, /* how many there are */
};

__u64 run_counts[CAPABILITIES];

/* Puts the enum into BTF, where a test compares it with userspace's. Unlike ZERNEL_IN_BTF() it adds
 * no map, so each program needs only the kernel feature that it tests. */
enum capability capability_in_btf;

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct zernel_task_state);
} task_storage_map SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} ringbuf_map SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} mmap_array_map SEC(".maps");

static void count_run(__u32 which)
{
	__sync_fetch_and_add(&run_counts[which], 1);
}

SEC("tp_btf/sched_switch")
int tp_btf(void *ctx)
{
	count_run(TP_BTF);
	return 0;
}

SEC("raw_tp/sched_switch")
int raw_tp(void *ctx)
{
	count_run(RAW_TP);
	return 0;
}

SEC("tp/sched/sched_switch")
int tracepoint(void *ctx)
{
	count_run(TRACEPOINT);
	return 0;
}

SEC("uprobe.session")
int uprobe_session(void *ctx)
{
	count_run(UPROBE_SESSION);
	return 0;
}

SEC("uprobe.multi")
int uprobe_multi(void *ctx)
{
	count_run(UPROBE_MULTI);
	return 0;
}

SEC("uprobe")
int uprobe_perf(void *ctx)
{
	count_run(UPROBE_PERF);
	return 0;
}

SEC("tp_btf/sched_switch")
int task_storage(void *ctx)
{
	struct zernel_task_state *state;

	state = bpf_task_storage_get(&task_storage_map, bpf_get_current_task_btf(), 0,
				     BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (state)
		count_run(TASK_STORAGE);
	return 0;
}

SEC("iter/task_vma")
int task_vma(struct bpf_iter__task_vma *ctx)
{
	if (ctx->vma)
		count_run(TASK_VMA);
	return 0;
}

SEC("tp_btf/sched_switch")
int ringbuf(void *ctx)
{
	__u64 value = 0;

	if (!bpf_ringbuf_output(&ringbuf_map, &value, sizeof(value), 0))
		count_run(RINGBUF);
	return 0;
}

SEC("tp_btf/sched_switch")
int mmap_array(void *ctx)
{
	__u32 key = 0;

	if (bpf_map_lookup_elem(&mmap_array_map, &key))
		count_run(MMAP_ARRAY);
	return 0;
}

SEC("fentry/hrtimer_nanosleep")
int fentry(void *ctx)
{
	count_run(FENTRY);
	return 0;
}

SEC("kprobe/hrtimer_nanosleep")
int kprobe(void *ctx)
{
	count_run(KPROBE);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
