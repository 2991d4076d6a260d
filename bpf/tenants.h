/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Tenants, and how they share tables.
 *
 * A tenant may use all that is free in a table, except a reserve. Half of the reserve is for
 * tenants that have fewer entries than the largest one. All of it is for tenants that have less
 * than a minimum. So a full table refuses newcomers of the largest tenant first, and no tenant can
 * fill a table for all others.
 *
 * A tenant gets an index with its first process. Beyond ZERNEL_TENANTS, the other tenants count as
 * one. Programs count the entries that they add and delete, and userspace those that it deletes.
 * Both change counts by atomic additions only. Two programs that add an entry at once may both see
 * the last free one, so a tenant may exceed its share by the number of CPUs. A program may add an
 * entry of a process that userspace forgets at that moment, and then does not count it. So a count
 * may fall below 0.
 */
#ifndef ZERNEL_TENANTS_H
#define ZERNEL_TENANTS_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "limits.h"

enum zernel_table {
	ZERNEL_PROCESS_TABLE,
	ZERNEL_ALLOCATION_TABLE,
	ZERNEL_HISTOGRAM_TABLE,
	ZERNEL_COMMUNICATOR_TABLE,
	ZERNEL_ACCOUNT_TABLE,
	ZERNEL_TABLES, /* how many there are */
};
ZERNEL_IN_BTF(enum, zernel_table);

enum zernel_tenant_index {
	ZERNEL_ALL_TENANTS = 0, /* the sums */
	ZERNEL_OTHER_TENANTS = 1, /* those that got no index */
	ZERNEL_FIRST_TENANT = 2,
	ZERNEL_TENANTS = 256,
};
ZERNEL_IN_BTF(enum, zernel_tenant_index);

/* A hierarchy of cgroups in which tenants are looked for. */
enum zernel_hierarchy {
	ZERNEL_UNIFIED_HIERARCHY, /* cgroup v2 */
	ZERNEL_MEMORY_HIERARCHY, /* the memory controller, with cgroup v1 */
};
ZERNEL_IN_BTF(enum, zernel_hierarchy);

/* A cgroup. The same number stands for different ones in different hierarchies. */
struct zernel_cgroup_key {
	__u64 cgroup_inode;
	__u32 hierarchy; /* enum zernel_hierarchy */
	__u32 reserved;
};

/* Identifies a tenant. */
struct zernel_tenant_key {
	struct zernel_cgroup_key cgroup; /* of a pod or a Slurm job; 0: it is a user */
	__u32 uid;
	__u32 reserved;
};

struct zernel_tenant {
	__s64 used_entries[ZERNEL_TABLES];
	__u64 refused_events[ZERNEL_TABLES]; /* events that got no entry because of the reserve */
	/* Entries of the largest tenant; only in the sums. Programs raise it, and userspace lowers
	 * it once per round. */
	__s64 most_entries_of_tenant[ZERNEL_TABLES];
	__u64 unread_step_marks; /* step marks since userspace last read the buffer of marks */
	struct zernel_tenant_key key;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ZERNEL_TENANTS);
	__type(key, __u32);
	__type(value, struct zernel_tenant);
} tenants SEC(".maps");

/* Map from a tenant to its index. Userspace deletes tenants without entries. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ZERNEL_TENANTS);
	__type(key, struct zernel_tenant_key);
	__type(value, __u32);
} tenant_indices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, ZERNEL_TENANTS);
	__type(value, __u32);
} free_tenants SEC(".maps");

/* How a table is shared. Four tenants with their minimum fit into half of a reserve. */
static const struct zernel_table_shares {
	__s64 capacity;
	__s64 reserved_entries;
	__s64 minimum_per_tenant;
} zernel_table_shares[ZERNEL_TABLES] = {
	/* Index 0 stands for no process and no histogram. */
	[ZERNEL_PROCESS_TABLE] = { ZERNEL_PROCESSES - 1, 512, 64 },
	[ZERNEL_ALLOCATION_TABLE] = { ZERNEL_ALLOCATIONS, 32768, 4096 },
	[ZERNEL_HISTOGRAM_TABLE] = { ZERNEL_HISTOGRAMS - 1, 1024, 128 },
	[ZERNEL_COMMUNICATOR_TABLE] = { ZERNEL_COMMUNICATORS, 4096, 512 },
	[ZERNEL_ACCOUNT_TABLE] = { ZERNEL_MEMORY_ACCOUNTS, 4096, 512 },
};

static __always_inline struct zernel_tenant *zernel_tenant(__u32 index)
{
	return bpf_map_lookup_elem(&tenants, &index);
}

/* The index of a tenant, which gets one if it has none. Global, so that the verifier checks it
 * once. */
__noinline __u32 zernel_get_or_create_tenant(__u64 cgroup, __u32 hierarchy, __u32 uid)
{
	struct zernel_tenant_key key = { .cgroup = { .cgroup_inode = cgroup, .hierarchy = hierarchy },
					 .uid = uid };
	__u32 *known = bpf_map_lookup_elem(&tenant_indices, &key);
	struct zernel_tenant *tenant;
	__u32 index = 0;

	if (known)
		return *known;
	if (bpf_map_pop_elem(&free_tenants, &index))
		return ZERNEL_OTHER_TENANTS;
	tenant = zernel_tenant(index);
	if (tenant)
		tenant->key = key;
	if (!bpf_map_update_elem(&tenant_indices, &key, &index, BPF_NOEXIST))
		return index;
	bpf_map_push_elem(&free_tenants, &index, BPF_ANY);
	known = bpf_map_lookup_elem(&tenant_indices, &key);
	return known ? *known : ZERNEL_OTHER_TENANTS;
}

/* Whether a tenant may get another entry of a table. Counts a refusal. */
static __always_inline bool zernel_may_add_entry(__u32 index, __u32 table)
{
	struct zernel_tenant *all = zernel_tenant(ZERNEL_ALL_TENANTS);
	struct zernel_tenant *tenant = zernel_tenant(index);
	__s64 used, own, reserved;

	if (!all || !tenant || table >= ZERNEL_TABLES)
		return false;
	used = *(volatile __s64 *)&all->used_entries[table];
	own = *(volatile __s64 *)&tenant->used_entries[table];
	reserved = zernel_table_shares[table].reserved_entries;
	if (own < *(volatile __s64 *)&all->most_entries_of_tenant[table])
		reserved >>= 1;
	if (own < zernel_table_shares[table].minimum_per_tenant || used < zernel_table_shares[table].capacity - reserved)
		return true;
	__sync_fetch_and_add(&all->refused_events[table], 1);
	__sync_fetch_and_add(&tenant->refused_events[table], 1);
	return false;
}

/* Counts entries of a tenant that were added, or deleted with a negative change. */
static __always_inline void zernel_count_entries(__u32 index, __u32 table, __s64 change)
{
	struct zernel_tenant *all = zernel_tenant(ZERNEL_ALL_TENANTS);
	struct zernel_tenant *tenant = zernel_tenant(index);
	__s64 own;

	if (!all || !tenant || table >= ZERNEL_TABLES)
		return;
	__sync_fetch_and_add(&all->used_entries[table], change);
	own = __sync_fetch_and_add(&tenant->used_entries[table], change) + change;
	/* Two programs at once may store the smaller number. The next entry stores a larger one. */
	if (own > *(volatile __s64 *)&all->most_entries_of_tenant[table])
		*(volatile __s64 *)&all->most_entries_of_tenant[table] = own;
}

#endif
