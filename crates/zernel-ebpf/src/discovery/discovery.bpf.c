/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Reports when the mappings of a process may have changed: it called exec, its dynamic loader
 * loaded or unloaded a library, a process of interest forked it, or it exited. Userspace then reads
 * the mappings.
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

/* An executable in a mount namespace. Executable and namespace together determine the dynamic loader. */
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

/* Processes whose forks and exits are reported. Userspace adds processes to this map, and the programs in this file add
 * their children. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, __u8);
} followed_processes SEC(".maps");

/*
 * Processes with an EVENT_LOADED that userspace has not handled yet. Userspace deletes the entry of a process before it
 * reads the mappings of the process. So a process that loads libraries in a loop has one event in the ring buffer at a
 * time, and no load is missed. The map has as many entries as the ring buffer.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u8);
} pending_loads SEC(".maps");

/* Executables whose loader is known. An exec of such an executable is not reported: shell scripts run the same programs
 * over and over. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct executable);
	__type(value, __u8);
} known_executables SEC(".maps");

/* Events that found the ring buffer full. */
__u64 lost;

static const __u8 set_member = 1;

static bool emit_event(const struct event *event)
{
	if (!bpf_ringbuf_output(&events, (void *)event, sizeof(*event), 0))
		return true;
	__sync_fetch_and_add(&lost, 1);
	return false;
}

/*
 * Adds a key to a set; false if the set has it already. Kernels before 6.4 return an int although
 * the helper declares a long, so the upper half is undefined.
 */
static __always_inline bool add_to_set(void *set, const void *key)
{
	int result = bpf_map_update_elem(set, key, &set_member, BPF_NOEXIST);

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
	bool was_interesting = !bpf_map_delete_elem(&followed_processes, &event.tgid);
	bool is_new = add_to_set(&known_executables, &event.executable);

	if ((was_interesting || is_new) && !emit_event(&event) && is_new)
		bpf_map_delete_elem(&known_executables, &event.executable);
	return 0;
}

SEC("tp_btf/sched_process_fork")
int BPF_PROG(forked, struct task_struct *parent, struct task_struct *child)
{
	struct event event = { .kind = EVENT_FORKED,
			       .tgid = parent->tgid,
			       .child_tgid = child->tgid };
	bool is_thread = child->pid != child->tgid;

	if (is_thread || !bpf_map_lookup_elem(&followed_processes, &event.tgid))
		return 0;
	bpf_map_update_elem(&followed_processes, &event.child_tgid, &set_member, BPF_ANY);
	event.start_boottime_ns = start_boottime_ns(parent);
	event.child_start_boottime_ns = start_boottime_ns(child);
	emit_event(&event);
	return 0;
}

/*
 * A process ends when its last thread exits. Two threads that exit at once may both see no live thread: only one of
 * them finds the process in the map.
 */
SEC("tp_btf/sched_process_exit")
int BPF_PROG(exited, struct task_struct *task)
{
	struct event event = { .kind = EVENT_EXITED, .tgid = task->tgid };

	if (BPF_CORE_READ(task, signal, live.counter))
		return 0;
	if (bpf_map_delete_elem(&followed_processes, &event.tgid))
		return 0;
	event.start_boottime_ns = start_boottime_ns(task);
	emit_event(&event);
	return 0;
}

/*
 * The function that a loader calls for debuggers before and after it changes its list of objects.
 * The cookie is the distance from the probed instruction to the loader's state; 0: unknown.
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
	if (!add_to_set(&pending_loads, &event.tgid))
		return 0;
	event.start_boottime_ns = start_boottime_ns((void *)bpf_get_current_task());
	if (!emit_event(&event))
		bpf_map_delete_elem(&pending_loads, &event.tgid);
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
