/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The kernel types that our BPF objects need, and no more: fixed-width integers, ABI constants, and
 * CO-RE subsets of kernel structs, relocated at load time against the running kernel's BTF.
 */
#ifndef ZERNEL_KERNEL_H
#define ZERNEL_KERNEL_H

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
	BPF_MAP_TYPE_PROG_ARRAY = 3,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_QUEUE = 22,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};

enum { BPF_RB_NO_WAKEUP = 1 };
enum { BPF_RB_AVAIL_DATA = 0 };

enum {
	BPF_ANY = 0,
	BPF_NOEXIST = 1,
	BPF_EXIST = 2,
};

enum {
	BPF_F_NO_PREALLOC = 1 << 0,
	BPF_F_MMAPABLE = 1 << 10,
};

enum {
	BPF_LOCAL_STORAGE_GET_F_CREATE = 1 << 0,
};

/* A thread's registers in userspace, the context of an uprobe. This is an ABI: no relocation. */
struct pt_regs {
	unsigned long r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8;
	unsigned long rax, rcx, rdx, rsi, rdi, orig_rax, rip, cs, eflags, rsp, ss;
};

enum {
	EEXIST = 17,
};

enum {
	VM_EXEC = 0x4,
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

typedef struct {
	int counter;
} atomic_t;

struct signal_struct {
	atomic_t live;
};

struct ns_common {
	unsigned int inum;
};

struct mnt_namespace {
	struct ns_common ns;
};

struct nsproxy {
	struct mnt_namespace *mnt_ns;
};

struct file;

struct mm_struct {
	struct file *exe_file;
};

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};

struct files_struct {
	struct fdtable *fdt;
};

/* The kernel's own account of how long a task waits for a CPU. */
struct sched_info {
	unsigned long long run_delay;
	unsigned long long last_arrival;
	unsigned long long last_queued;
};

typedef struct {
	__u32 val;
} kuid_t;

struct uid_gid_extent {
	__u32 first;
	__u32 lower_first;
	__u32 count;
};

struct uid_gid_map {
	struct uid_gid_extent extent[5]; /* ZERNEL_UID_RANGES */
	__u32 nr_extents;
};

struct user_namespace {
	struct uid_gid_map uid_map;
	struct user_namespace *parent;
	int level;
	kuid_t owner;
};

struct cred {
	kuid_t uid;
	kuid_t euid;
	struct user_namespace *user_ns;
};

struct kernfs_node {
	__u64 id;
};

struct cgroup {
	struct kernfs_node *kn;
	int level;
	struct cgroup *ancestors[];
};

/* Before Linux 6.1. */
struct cgroup___with_ancestor_ids {
	__u64 ancestor_ids[];
};

struct cgroup_subsys_state {
	struct cgroup *cgroup;
};

struct css_set {
	struct cgroup_subsys_state *subsys[1]; /* as many as there are controllers */
	struct cgroup *dfl_cgrp;
};

enum cgroup_subsys_id {
	memory_cgrp_id,
};

struct task_struct {
	unsigned int flags;
	int exit_code;
	int pid;
	int tgid;
	unsigned in_iowait : 1;
	struct sched_info sched_info;
	void *bpf_storage;
	__u64 start_boottime;
	__u64 self_exec_id;
	__u64 parent_exec_id;
	struct task_struct *group_leader;
	struct task_struct *real_parent;
	struct mm_struct *mm;
	struct nsproxy *nsproxy;
	struct signal_struct *signal;
	struct files_struct *files;
	void *vfork_done;
	const struct cred *cred;
	struct css_set *cgroups;
	char comm[16];
};

struct super_block {
	__u32 s_dev;
};

struct inode {
	__u16 i_mode;
	struct super_block *i_sb;
	unsigned long i_ino;
};

struct qstr {
	const unsigned char *name;
};

struct dentry {
	struct qstr d_name;
};

struct path {
	struct dentry *dentry;
};

struct file {
	struct path f_path;
	struct inode *f_inode;
	void *private_data;
};

struct sock_common {
	__u16 skc_family;
};

struct sock {
	struct sock_common __sk_common;
};

struct socket {
	struct sock *sk;
};

struct linux_binprm {
	struct file *file;
};

struct vm_area_struct {
	unsigned long vm_start;
	unsigned long vm_end;
	unsigned long vm_flags;
	unsigned long vm_pgoff;
	struct file *vm_file;
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};

struct bpf_iter__task_vma {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	struct vm_area_struct *vma;
};

#pragma clang attribute pop

#endif
