/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Walks the mappings of one process or of all, and writes a record of each executable mapping whose
 * file has a name of interest.
 */
#include "kernel.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include "btf.h"

#define MAX_PREFIXES 16

/* The first 8 bytes of a name of interest, and a mask of the bytes to compare. A mask of 0 ends the
 * list. */
struct prefix {
	__u64 bytes;
	__u64 mask;
};

/* Filled by userspace. */
const volatile struct prefix prefixes[MAX_PREFIXES] SEC(".rodata.prefixes");

struct mapping {
	__u64 start_boottime_ns;
	__u64 start;
	__u64 end;
	__u64 page_offset;
	__u64 inode;
	__u32 device;
	__u32 tgid;
	__u32 tid;
	__u32 reserved;
	char file_name[48];
};
ZERNEL_IN_BTF(struct, mapping);

static bool is_name_of_interest(__u64 word)
{
	int i;

	for (i = 0; i < MAX_PREFIXES && prefixes[i].mask; i++)
		if ((word & prefixes[i].mask) == prefixes[i].bytes)
			return true;
	return false;
}

SEC("iter/task_vma")
int mappings(struct bpf_iter__task_vma *ctx)
{
	struct vm_area_struct *vma = ctx->vma;
	struct task_struct *task = ctx->task;
	struct mapping mapping = {};
	struct file *file;
	__u64 first_word;

	if (!task || !vma || !(vma->vm_flags & VM_EXEC))
		return 0;
	/* Of each process, the mappings of its first thread are reported; if that thread has exited before the others,
	 * those of another thread. */
	if (task->pid != task->tgid && task->group_leader->mm)
		return 0;
	file = vma->vm_file;
	if (!file)
		return 0;
	bpf_probe_read_kernel_str(mapping.file_name, sizeof(mapping.file_name),
				  BPF_CORE_READ(file, f_path.dentry, d_name.name));
	__builtin_memcpy(&first_word, mapping.file_name, sizeof(first_word));
	if (!is_name_of_interest(first_word))
		return 0;
	mapping.start_boottime_ns = task->group_leader->start_boottime;
	mapping.start = vma->vm_start;
	mapping.end = vma->vm_end;
	mapping.page_offset = vma->vm_pgoff;
	mapping.inode = BPF_CORE_READ(file, f_inode, i_ino);
	mapping.device = BPF_CORE_READ(file, f_inode, i_sb, s_dev);
	mapping.tgid = task->tgid;
	mapping.tid = task->pid;
	bpf_seq_write(ctx->meta->seq, &mapping, sizeof(mapping));
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
