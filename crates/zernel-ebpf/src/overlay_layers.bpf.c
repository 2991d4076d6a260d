/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Walks the open files of one process, and writes a record of each file on an overlay: whether one
 * of the file systems below the overlay is FUSE.
 */
#include "kernel.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include "btf.h"

#define OVERLAYFS_SUPER_MAGIC 0x794c7630
#define FUSE_SUPER_MAGIC 0x65735546

/* The most file systems below an overlay that are checked, because each layer may be on another file system. The kernel
 * allows 500 layers. */
#define MAX_FILE_SYSTEMS 512

enum overlay_layers {
	OVERLAY_WITHOUT_FUSE,
	OVERLAY_ON_FUSE,
	/* A layer is an overlay itself. */
	OVERLAY_ON_OVERLAY,
	/* The kernel does not describe overlays. Root has mounted it. */
	OVERLAY_OF_ROOT,
	/* The kernel does not describe overlays. The kernel does not describe overlays, and this overlay was mounted in
	 * a user namespace. */
	OVERLAY_OF_USER,
};
ZERNEL_IN_BTF(enum, overlay_layers);

struct overlay_file {
	__u32 descriptor;
	__u32 layers;
};
ZERNEL_IN_BTF(struct, overlay_file);

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
};

struct super_block___with_magic {
	unsigned long s_magic;
	void *s_fs_info;
	struct user_namespace *s_user_ns;
};

struct ovl_sb {
	struct super_block___with_magic *sb;
};

struct ovl_fs {
	unsigned int numfs;
	struct ovl_sb *fs;
};

#pragma clang attribute pop

/* What is below an overlay. The list of an overlay's file systems does not change while the overlay is mounted. The
 * first file system in the list is that of the upper layer, which may be missing. */
static enum overlay_layers layers_of(struct super_block___with_magic *overlay)
{
	struct ovl_fs *layers = BPF_CORE_READ(overlay, s_fs_info);
	struct super_block___with_magic *below;
	struct ovl_sb *systems;
	unsigned long magic;
	__u32 count, size, i;

	if (!bpf_core_field_exists(struct ovl_fs, fs) ||
	    !bpf_core_field_exists(struct ovl_fs, numfs) ||
	    !bpf_core_field_exists(struct ovl_sb, sb))
		return BPF_CORE_READ(overlay, s_user_ns, level) ? OVERLAY_OF_USER : OVERLAY_OF_ROOT;
	systems = BPF_CORE_READ(layers, fs);
	count = BPF_CORE_READ(layers, numfs);
	size = bpf_core_type_size(struct ovl_sb);
	for (i = 0; i < MAX_FILE_SYSTEMS && i < count; i++) {
		below = BPF_CORE_READ((struct ovl_sb *)((char *)systems + i * size), sb);
		if (!below)
			continue;
		magic = BPF_CORE_READ(below, s_magic);
		if (magic == FUSE_SUPER_MAGIC)
			return OVERLAY_ON_FUSE;
		if (magic == OVERLAYFS_SUPER_MAGIC)
			return OVERLAY_ON_OVERLAY;
	}
	return OVERLAY_WITHOUT_FUSE;
}

SEC("iter/task_file")
int overlay_files(struct bpf_iter__task_file *ctx)
{
	struct super_block___with_magic *mounted;
	struct file *file = ctx->file;
	struct overlay_file found = {};

	if (!file)
		return 0;
	mounted = (void *)BPF_CORE_READ(file, f_inode, i_sb);
	if (BPF_CORE_READ(mounted, s_magic) != OVERLAYFS_SUPER_MAGIC)
		return 0;
	found.descriptor = ctx->fd;
	found.layers = layers_of(mounted);
	bpf_seq_write(ctx->meta->seq, &found, sizeof(found));
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
