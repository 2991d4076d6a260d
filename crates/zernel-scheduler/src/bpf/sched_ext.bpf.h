/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The part of the kernel that the scheduler uses. libbpf matches `struct sched_ext_ops` with the
 * kernel's by the names of its members; the other structs are relocated field by field.
 */
#ifndef ZERNEL_SCHED_EXT_H
#define ZERNEL_SCHED_EXT_H

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef signed char __s8;
typedef short __s16;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef _Bool bool;

enum {
	false = 0,
	true = 1,
};

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_QUEUE = 22,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};

enum {
	BPF_ANY = 0,
	BPF_F_NO_PREALLOC = 1 << 0,
	BPF_F_MMAPABLE = 1 << 10,
	BPF_F_TIMER_CPU_PIN = 1 << 1,
	BPF_LOCAL_STORAGE_GET_F_CREATE = 1 << 0,
	CLOCK_MONOTONIC = 1,
};

enum {
	PF_KTHREAD = 0x00200000,
};

/* Only the type's name matters. */
enum scx_exit_kind { SCX_EXIT_NONE = 0 };

/* These two are part of map values, so their size matters. */
struct bpf_spin_lock {
	__u32 val;
};

struct bpf_timer {
	__u64 opaque[2];
} __attribute__((aligned(8)));

struct bpf_iter_scx_dsq {
	__u64 opaque[6];
} __attribute__((aligned(8)));

struct bpf_iter_num {
	__u64 opaque[1];
} __attribute__((aligned(8)));

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

/* Only the type's name matters; a type without a definition would not match. */
struct cpumask {
	unsigned long bits[1];
};

struct sched_ext_entity {
	__u32 flags;
	__u32 weight;
	__u64 slice;
	__u64 dsq_vtime;
};

struct signal_struct {
	unsigned int flags;
};

typedef struct {
	__u32 val;
} kuid_t;

struct cred {
	kuid_t uid;
};

struct task_struct {
	unsigned int flags;
	int pid;
	int tgid;
	int nr_cpus_allowed;
	const struct cpumask *cpus_ptr;
	unsigned short migration_disabled;
	struct sched_ext_entity scx;
	struct task_struct *group_leader;
	struct task_struct *real_parent;
	struct signal_struct *signal;
	const struct cred *real_cred;
};

struct kernfs_node {
	__u64 id;
};

struct cgroup {
	int level;
	struct kernfs_node *kn;
};

struct scx_exit_info {
	enum scx_exit_kind kind;
	__s64 exit_code;
	const char *reason;
	char *msg;
};

struct scx_init_task_args {
	bool fork;
	struct cgroup *cgroup;
};

/* The limits are there since Linux 6.17. */
struct scx_cgroup_init_args {
	__u32 weight;
	__u64 bw_period_us;
	__u64 bw_quota_us;
	__u64 bw_burst_us;
};

struct scx_cpu_release_args;

#pragma clang attribute pop

struct sched_ext_ops {
	__s32 (*select_cpu)(struct task_struct *p, __s32 prev_cpu, __u64 wake_flags);
	void (*enqueue)(struct task_struct *p, __u64 enq_flags);
	void (*dispatch)(__s32 cpu, struct task_struct *prev);
	void (*tick)(struct task_struct *p);
	void (*runnable)(struct task_struct *p, __u64 enq_flags);
	void (*running)(struct task_struct *p);
	void (*stopping)(struct task_struct *p, bool runnable);
	void (*quiescent)(struct task_struct *p, __u64 deq_flags);
	bool (*yield)(struct task_struct *from, struct task_struct *to);
	void (*set_weight)(struct task_struct *p, __u32 weight);
	void (*cpu_release)(__s32 cpu, struct scx_cpu_release_args *args);
	__s32 (*init_task)(struct task_struct *p, struct scx_init_task_args *args);
	void (*enable)(struct task_struct *p);
	void (*disable)(struct task_struct *p);
	__s32 (*cgroup_init)(struct cgroup *cgroup, struct scx_cgroup_init_args *args);
	void (*cgroup_exit)(struct cgroup *cgroup);
	void (*cgroup_move)(struct task_struct *p, struct cgroup *from, struct cgroup *to);
	void (*cgroup_set_weight)(struct cgroup *cgroup, __u32 weight);
	void (*cgroup_set_bandwidth)(struct cgroup *cgroup, __u64 period_us, __u64 quota_us,
				     __u64 burst_us);
	void (*cpu_online)(__s32 cpu);
	void (*cpu_offline)(__s32 cpu);
	__s32 (*init)(void);
	void (*exit)(struct scx_exit_info *info);
	__u64 flags;
	__u32 timeout_ms;
	char name[128];
};

/* Values of the kernel's ABI towards BPF schedulers. */
#define SCX_DSQ_LOCAL (1ULL << 63 | 2)
#define SCX_ENQ_WAKEUP 1ULL
#define SCX_ENQ_PREEMPT (1ULL << 32)
#define SCX_ENQ_REENQ (1ULL << 40)
#define SCX_DEQ_SLEEP 1ULL
#define SCX_WAKE_SYNC 16ULL
#define SCX_KICK_IDLE 1ULL
#define SCX_KICK_PREEMPT 2ULL
#define PF_EXITING 4U
#define SIGNAL_GROUP_EXIT 4U
#define SCX_TASK_QUEUED 1U
#define SCX_OPS_ENQ_LAST (1ULL << 1)
#define SCX_OPS_ENQ_MIGRATION_DISABLED (1ULL << 4)

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>

__s32 scx_bpf_create_dsq(__u64 dsq_id, __s32 node) __ksym;
__s32 scx_bpf_select_cpu_dfl(struct task_struct *p, __s32 prev_cpu, __u64 wake_flags,
			     bool *is_idle) __ksym;
__s32 scx_bpf_pick_idle_cpu(const struct cpumask *allowed, __u64 flags) __ksym;
void scx_bpf_kick_cpu(__s32 cpu, __u64 flags) __ksym;
void scx_bpf_dsq_insert(struct task_struct *p, __u64 dsq_id, __u64 slice, __u64 enq_flags) __ksym;
void scx_bpf_dsq_insert_vtime(struct task_struct *p, __u64 dsq_id, __u64 slice, __u64 vtime,
			      __u64 enq_flags) __ksym;
bool scx_bpf_dsq_move_to_local(__u64 dsq_id) __ksym;
void scx_bpf_dsq_move_set_vtime(struct bpf_iter_scx_dsq *it__iter, __u64 vtime) __ksym;
bool scx_bpf_dsq_move_vtime(struct bpf_iter_scx_dsq *it__iter, struct task_struct *p, __u64 dsq_id,
			    __u64 enq_flags) __ksym;
__s32 scx_bpf_dsq_nr_queued(__u64 dsq_id) __ksym;
__u32 scx_bpf_reenqueue_local(void) __ksym;
__u32 scx_bpf_nr_cpu_ids(void) __ksym;
__u64 scx_bpf_now(void) __ksym;
__s32 scx_bpf_task_cpu(const struct task_struct *p) __ksym;
struct task_struct *bpf_task_from_pid(__s32 pid) __ksym;
void bpf_task_release(struct task_struct *p) __ksym;
bool bpf_cpumask_test_cpu(__u32 cpu, const struct cpumask *cpumask) __ksym;
__u32 bpf_cpumask_weight(const struct cpumask *cpumask) __ksym;
const struct cpumask *scx_bpf_get_online_cpumask(void) __ksym;
void scx_bpf_put_cpumask(const struct cpumask *cpumask) __ksym;
struct cgroup *bpf_cgroup_ancestor(struct cgroup *cgroup, int level) __ksym;
void bpf_cgroup_release(struct cgroup *cgroup) __ksym;
int bpf_iter_scx_dsq_new(struct bpf_iter_scx_dsq *it, __u64 dsq_id, __u64 flags) __ksym;
struct task_struct *bpf_iter_scx_dsq_next(struct bpf_iter_scx_dsq *it) __ksym;
void bpf_iter_scx_dsq_destroy(struct bpf_iter_scx_dsq *it) __ksym;
void bpf_rcu_read_lock(void) __ksym;
void bpf_rcu_read_unlock(void) __ksym;

/* Since Linux 6.19; before, a scheduler writes the fields. */
bool scx_bpf_task_set_slice(struct task_struct *p, __u64 slice) __ksym __weak;
bool scx_bpf_task_set_dsq_vtime(struct task_struct *p, __u64 vtime) __ksym __weak;

static __always_inline void set_slice(struct task_struct *p, __u64 slice)
{
	if (bpf_ksym_exists(scx_bpf_task_set_slice))
		scx_bpf_task_set_slice(p, slice);
	else
		p->scx.slice = slice;
}

static __always_inline void set_vtime(struct task_struct *p, __u64 vtime)
{
	if (bpf_ksym_exists(scx_bpf_task_set_dsq_vtime))
		scx_bpf_task_set_dsq_vtime(p, vtime);
	else
		p->scx.dsq_vtime = vtime;
}

#define CALLBACK(declaration...) SEC("struct_ops") BPF_PROG(declaration)
#define SLEEPABLE_CALLBACK(declaration...) SEC("struct_ops.s") BPF_PROG(declaration)

#endif
