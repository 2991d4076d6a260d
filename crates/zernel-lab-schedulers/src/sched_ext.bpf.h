/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The part of sched_ext that these schedulers use. libbpf matches `struct sched_ext_ops` with the
 * kernel's by the names of its members, so callbacks that are not used here need no mention.
 */
#ifndef ZERNEL_LAB_SCHED_EXT_H
#define ZERNEL_LAB_SCHED_EXT_H

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

/* bpf_helpers.h names map types only in declarations that these schedulers do not use. */
enum bpf_map_type { BPF_MAP_TYPE_UNSPEC = 0 };

/* Only the type's name matters. */
enum scx_exit_kind { SCX_EXIT_NONE = 0 };

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sched_ext_entity {
	__u64 slice;
	__u64 dsq_vtime;
	__u32 weight;
};

struct task_struct {
	unsigned int flags;
	int pid;
	struct sched_ext_entity scx;
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
	char *msg;
};

#pragma clang attribute pop

struct sched_ext_ops {
	__s32 (*select_cpu)(struct task_struct *p, __s32 prev_cpu, __u64 wake_flags);
	void (*enqueue)(struct task_struct *p, __u64 enq_flags);
	void (*dispatch)(__s32 cpu, struct task_struct *prev);
	void (*running)(struct task_struct *p);
	void (*stopping)(struct task_struct *p, bool runnable);
	void (*enable)(struct task_struct *p);
	void (*cpu_online)(__s32 cpu);
	void (*cpu_offline)(__s32 cpu);
	__s32 (*init)(void);
	void (*exit)(struct scx_exit_info *info);
	__u32 timeout_ms;
	char name[128];
};

/* Values of the kernel's ABI towards BPF schedulers. */
#define SCX_SLICE_DFL (20ULL * 1000 * 1000)
#define SCX_DSQ_LOCAL (1ULL << 63 | 2)
#define SCX_DSQ_LOCAL_ON (1ULL << 63 | 1ULL << 62)
#define SCX_ENQ_WAKEUP 1ULL
#define PF_KTHREAD 0x00200000

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>

__s32 scx_bpf_create_dsq(__u64 dsq_id, __s32 node) __ksym;
__s32 scx_bpf_select_cpu_dfl(struct task_struct *p, __s32 prev_cpu, __u64 wake_flags, bool *is_idle) __ksym;
void scx_bpf_dsq_insert(struct task_struct *p, __u64 dsq_id, __u64 slice, __u64 enq_flags) __ksym;
void scx_bpf_dsq_insert_vtime(struct task_struct *p, __u64 dsq_id, __u64 slice, __u64 vtime, __u64 enq_flags) __ksym;
bool scx_bpf_dsq_move_to_local(__u64 dsq_id) __ksym;
__u32 scx_bpf_nr_cpu_ids(void) __ksym;
struct cgroup *scx_bpf_task_cgroup(struct task_struct *p) __ksym;
void bpf_cgroup_release(struct cgroup *cgroup) __ksym;

#define CALLBACK(declaration...) SEC("struct_ops") BPF_PROG(declaration)
#define SLEEPABLE_CALLBACK(declaration...) SEC("struct_ops.s") BPF_PROG(declaration)

#endif
