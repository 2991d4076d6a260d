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
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_QUEUE = 22,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};

enum {
	BPF_ANY = 0,
	BPF_NOEXIST = 1,
};

enum {
	BPF_F_NO_PREALLOC = 1 << 0,
	BPF_F_MMAPABLE = 1 << 10,
};

enum {
	BPF_LOCAL_STORAGE_GET_F_CREATE = 1 << 0,
};

/* The registers of a thread in userspace: what an uprobe is given. An ABI, so nothing to relocate. */
struct pt_regs {
	unsigned long r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8;
	unsigned long rax, rcx, rdx, rsi, rdi, orig_rax, rip, cs, eflags, rsp, ss;
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

typedef struct {
	int counter;
} atomic_t;

struct signal_struct {
	atomic_t live;
};

struct task_struct {
	struct signal_struct *signal;
	int pid;
	int tgid;
	__u64 start_boottime;
	struct task_struct *group_leader;
};

struct vm_area_struct {
	unsigned long vm_start;
};

struct bpf_iter__task_vma {
	struct task_struct *task;
	struct vm_area_struct *vma;
};

#pragma clang attribute pop

#endif
