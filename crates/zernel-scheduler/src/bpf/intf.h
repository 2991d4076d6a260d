/* SPDX-License-Identifier: GPL-2.0-only */
/* What the scheduler shares with its userspace half. The skeleton contains these types. */
#ifndef ZERNEL_SCHED_INTF_H
#define ZERNEL_SCHED_INTF_H

#include "sched_ext.bpf.h"

enum {
	MAX_CPUS = 1024,
	MAX_LLCS = 64,
	MAX_NODES = 64,
	MAX_GPUS = 64,
	/* Cgroups with the CPU controller; the tasks of further ones count as tasks of the root. */
	MAX_CGROUPS = 4096,
	/* Levels of cgroups below the root whose weights and limits count. */
	MAX_CGROUP_DEPTH = 8,
	ENDING_MESSAGE_BYTES = 256,
	/* Times from a wake-up to running: the first bucket ends at 2^10 ns, each further one at twice
	 * that, and the last holds all longer ones. */
	WAIT_BUCKETS = 28,
	FIRST_WAIT_BUCKET_LOG2_NS = 10,
};

/* The tasks with critical threads that go first. */
enum privilege {
	PRIVILEGE_NOBODY,
	PRIVILEGE_ALL,
	PRIVILEGE_CGROUP, /* the tasks of a cgroup and its descendants */
	PRIVILEGE_TREE, /* settings.privileged_process and its descendants */
	PRIVILEGE_USER, /* the tasks of a user */
};

/* The parts of the policy that can be switched off. */
enum policy_part {
	POLICY_HANDOFF = 1 << 0, /* threads that a critical thread wakes are critical */
	POLICY_FEED = 1 << 1, /* loaders of a trainer that runs out of data go before others */
	POLICY_SIBLINGS = 1 << 2, /* so do the threads of a critical thread that blocks */
	POLICY_GPU_NODE = 1 << 3, /* threads that use a GPU run on its NUMA node */
};

/* Set before loading. The program set_policy changes the first five while the scheduler runs. The
 * alignment keeps what is often written out of these cache lines. */
struct settings {
	__u64 slice_ns;
	__u64 privileged_id; /* of the privileged cgroup, or of the privileged user */
	enum privilege privilege;
	__u32 guarantee_percent; /* the part of their fair share that others keep */
	__u32 lends; /* threads that spin until the GPU is done lend their CPU */
	__u32 may_privilege; /* tasks are privileged, or may become so while the scheduler runs */
	__u32 privileged_process; /* its pid; 0: none */
	__u32 layout_hash; /* of the task states that this program reads */
	__u32 enabled_policies; /* enum policy_part */
	__u64 watchdog_ns; /* the kernel ejects a scheduler that lets a task wait for this long */
	__u32 cpu_count; /* numbers of possible CPUs are below this */
	__u32 llc_count;
	__u8 llc_of_cpu[MAX_CPUS];
	__u32 numa_nodes; /* NUMA nodes */
	__u8 node_of_cpu[MAX_CPUS];
	__u8 node_of_gpu[MAX_GPUS]; /* MAX_NODES: not known */
	__u16 cpus_by_node[MAX_CPUS]; /* all CPUs, node by node */
	__u16 first_cpu_of_node[MAX_NODES]; /* index of its first CPU there */
	__u16 cpu_count_of_node[MAX_NODES]; /* how many CPUs it has */
} __attribute__((aligned(64)));

/* Counted since loading. CPUs that count at the same moment may lose one: these are for people, and no
 * decision depends on them. */
struct counters {
	__u64 idle_wakeups; /* the task found an idle CPU */
	__u64 preempting_wakeups; /* the task preempted another one */
	__u64 queued; /* the task waited in a queue */
	__u64 kept; /* the task ran on because its virtual time was still the smallest */
	__u64 stolen; /* the task was taken from the queue of another cache */
	__u64 throttled; /* the task had to wait because of a cpu.max */
	__u64 aged; /* the task went to the front of its queue: it had waited for too long */
	__u64 critical_wakeups; /* a critical thread preempted another task */
	__u64 critical_kept; /* a critical thread was kept on its CPU */
	__u64 guarantee_hits; /* a CPU had to pay the guarantee while it ran a critical thread, or one or a loader waited */
	__u64 handoffs; /* a thread that a critical thread woke became critical */
	__u64 raised; /* a queued thread rose because a critical one of its process blocked */
	__u64 feed_wakeups; /* a loader preempted another task */
	__u64 feed_kept; /* a loader was kept on its CPU */
	__u64 lent; /* a thread that spun until the GPU was done lent its CPU for a turn */
	__u64 moved_to_gpu; /* a task that woke up left its NUMA node for that of its GPU */
	__u64 uncounted_cgroups; /* cgroups beyond MAX_CGROUPS */
};

/* What the threads of a class did, counted since loading, per CPU. */
struct class_counters {
	__u64 runs; /* times that a thread was chosen to run */
	__u64 run_ns;
	__u64 wakeups; /* wake-ups after which it has run; forks too */
	__u64 wait_ns; /* sum of the times from a wake-up to running */
	__u64 wait_buckets[WAIT_BUCKETS];
};

/* Why the scheduler ended. */
struct ending {
	__u32 kind; /* enum scx_exit_kind; 0 while it runs */
	char reason[ENDING_MESSAGE_BYTES];
	char message[ENDING_MESSAGE_BYTES];
};

/* Argument of the program set_policy. */
struct policy {
	__u64 slice_ns;
	__u64 privileged_id;
	__u32 privilege; /* enum privilege */
	__u32 guarantee_percent;
	__u32 lends;
};

/* Argument of the program set_cpu_limit. */
struct cpu_limit {
	__u64 cgroup_id;
	__u64 quota_ns; /* 0: none */
	__u64 period_ns;
};

#endif
