/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Says when a process may map other files than before: it executes a program, its dynamic loader
 * has loaded or unloaded something, it was forked from a process of interest, it is gone. Which
 * files these are is for userspace to look up.
 */
#include "kernel.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "btf.h"
#include "uprobe.h"

/* The loader's list of objects is complete: <link.h>. */
#define RT_CONSISTENT 0

enum event_kind {
	EVENT_EXECUTED,
	EVENT_FORKED,
	EVENT_EXITED,
	EVENT_LOADED,
};
ZERNEL_IN_BTF(enum, event_kind);

/* An executable as one mount namespace shows it: this decides which loader it gets. */
struct executable {
	__u64 inode;
	__u32 device;
	__u32 mount_namespace;
};

struct event {
	__u64 start_boottime_ns;
	__u64 child_start_boottime_ns;
	struct executable executable;
	__u32 tgid;
	__u32 child_tgid;
	__u32 kind; /* enum event_kind */
	__u32 reserved;
};
ZERNEL_IN_BTF(struct, event);

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 128 * 1024);
} events SEC(".maps");

/* Processes whose forks and death are reported: put in by userspace, and here for their children. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, __u8);
} interesting SEC(".maps");

/*
 * Processes with an EVENT_LOADED that userspace has not taken yet; it takes them out before it
 * looks. So a process that loads libraries in a loop costs one event at a time, and none is missed.
 * As many as the ring buffer holds are enough.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u8);
} pending SEC(".maps");

/* Executables whose loader is known: the thousandth `true` of a shell script needs no look. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct executable);
	__type(value, __u8);
} seen SEC(".maps");

/* Events that found the ring buffer full. */
__u64 lost;

static const __u8 present = 1;

static bool emit(const struct event *event)
{
	if (!bpf_ringbuf_output(&events, (void *)event, sizeof(*event), 0))
		return true;
	__sync_fetch_and_add(&lost, 1);
	return false;
}

/*
 * Puts a key into a set; false if it was there already. Kernels before 6.4 return an int where the
 * helper says long: its upper half means nothing.
 */
static __always_inline bool put(void *set, const void *key)
{
	int result = bpf_map_update_elem(set, key, &present, BPF_NOEXIST);

	return result != -EEXIST;
}

static __u64 start_boottime_ns(struct task_struct *task)
{
	return BPF_CORE_READ(task, group_leader, start_boottime);
}

SEC("tp_btf/sched_process_exec")
int BPF_PROG(executed, struct task_struct *task, int old_pid, struct linux_binprm *binary)
{
	struct event event = {
		.kind = EVENT_EXECUTED,
		.tgid = task->tgid,
		.start_boottime_ns = start_boottime_ns(task),
		.executable = {
			.inode = BPF_CORE_READ(binary, file, f_inode, i_ino),
			.device = BPF_CORE_READ(binary, file, f_inode, i_sb, s_dev),
			.mount_namespace = BPF_CORE_READ(task, nsproxy, mnt_ns, ns.inum),
		},
	};
	bool was_interesting = !bpf_map_delete_elem(&interesting, &event.tgid);
	bool is_new = put(&seen, &event.executable);

	if ((was_interesting || is_new) && !emit(&event) && is_new)
		bpf_map_delete_elem(&seen, &event.executable);
	return 0;
}

SEC("tp_btf/sched_process_fork")
int BPF_PROG(forked, struct task_struct *parent, struct task_struct *child)
{
	struct event event = { .kind = EVENT_FORKED,
			       .tgid = parent->tgid,
			       .child_tgid = child->tgid };
	bool is_thread = child->pid != child->tgid;

	if (is_thread || !bpf_map_lookup_elem(&interesting, &event.tgid))
		return 0;
	bpf_map_update_elem(&interesting, &event.child_tgid, &present, BPF_ANY);
	event.start_boottime_ns = start_boottime_ns(parent);
	event.child_start_boottime_ns = start_boottime_ns(child);
	emit(&event);
	return 0;
}

/*
 * The last thread to go takes the process with it. Two last ones may both see nobody alive: only
 * one of them finds the process in the map.
 */
SEC("tp_btf/sched_process_exit")
int BPF_PROG(exited, struct task_struct *task)
{
	struct event event = { .kind = EVENT_EXITED, .tgid = task->tgid };

	if (BPF_CORE_READ(task, signal, live.counter))
		return 0;
	if (bpf_map_delete_elem(&interesting, &event.tgid))
		return 0;
	event.start_boottime_ns = start_boottime_ns(task);
	emit(&event);
	return 0;
}

/*
 * The function that a loader calls for debuggers before and after it changes its list of objects.
 * The cookie is how far behind the probed instruction its state lies, zero where that is not known.
 */
static __always_inline int loader_called(struct pt_regs *ctx)
{
	__u64 distance = bpf_get_attach_cookie(ctx);
	struct event event = {
		.kind = EVENT_LOADED,
		.tgid = bpf_get_current_pid_tgid() >> 32,
	};
	void *address = (void *)(PT_REGS_IP(ctx) + distance);
	__u32 state = RT_CONSISTENT;

	if (distance && !bpf_probe_read_user(&state, sizeof(state), address) &&
	    state != RT_CONSISTENT)
		return 0;
	if (!put(&pending, &event.tgid))
		return 0;
	event.start_boottime_ns = start_boottime_ns((void *)bpf_get_current_task());
	if (!emit(&event))
		bpf_map_delete_elem(&pending, &event.tgid);
	return 0;
}

ZERNEL_UPROBE("uprobe.multi", loader_multi)
{
	return loader_called(ctx);
}

ZERNEL_UPROBE("uprobe", loader_perf)
{
	return loader_called(ctx);
}

char LICENSE[] SEC("license") = "GPL";
