/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Calls of NCCL: operations with their bytes and durations, and the progress of a process on each communicator.
 *
 * A call only enqueues work on the GPU, so the call's duration is that of the enqueue. The next wait that covers the
 * work shows that it is done: a wait for its stream, for an event recorded later on that stream, or for another stream
 * that waits for such an event.
 */
#ifndef NCCL_BPF_H
#define NCCL_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "duration.h"
#include "duration_kind.h"
#include "limits.h"
#include "losses.h"
#include "settings.h"
#include "symbol.h"
#include "thread.h"

enum nccl_role {
	NCCL_COLLECTIVE, /* arguments: elements, type of an element, communicator, stream */
	NCCL_POINT_TO_POINT, /* arguments: the same */
	NCCL_GROUP,
	/* arguments: where the communicator is stored, ranks, rank; the unique id on the stack */
	NCCL_INIT_RANK,
	NCCL_INIT_SCALABLE, /* arguments: where the communicator is stored, ranks, rank, unique ids */
	NCCL_INIT_ALL, /* arguments: where the communicators are stored, ranks */
	NCCL_SPLIT, /* arguments: communicator, color, key, where the new one is stored */
	NCCL_RANK, /* arguments: communicator, where the rank is stored */
	NCCL_RANKS, /* arguments: communicator, where the number of ranks is stored */
	NCCL_DESTROY, /* argument: communicator */
};
ZERNEL_IN_BTF(enum, nccl_role);

/* A rank that is unknown. */
enum nccl_no_rank {
	NCCL_NO_RANK = 0xffffffffU,
};
ZERNEL_IN_BTF(enum, nccl_no_rank);

#define NCCL_UNIQUE_ID_WORDS 16
#define NCCL_MAX_PENDING_COLLECTIVES 64
#define NCCL_MAX_EXPECTED_COMMUNICATORS 16
#define NCCL_NO_COLOR 0xffffffffU
/* ncclInProgress: a communicator that does not block has begun the operation. */
#define NCCL_IN_PROGRESS 7
#define NCCL_MAX_INIT_ALL_RANKS 16 /* ncclCommInitAll makes one rank per device of the process */

struct communicator_key {
	__u64 communicator; /* its handle; while it is being created, the address of the handle */
	__u32 process;
	__u32 is_being_made;
};

struct communicator {
	__u64 unique_id_hash; /* of the unique id: equal on all ranks of all nodes */
	__u64 sequence; /* collectives entered */
	__u64 bytes; /* of the last collective */
	__u64 entered_ns; /* when the last collective was entered */
	__u64 left_ns; /* when its call returned; 0: it has not */
	__u32 operation; /* enum nccl_operation of the last collective */
	__u32 rank; /* NCCL_NO_RANK: unknown */
	__u32 ranks; /* 0: unknown */
	__u32 split_count;
	__u64 operations; /* of the last 16 collectives, four bits each, the newest lowest */
	__u64 longest_gap_ns; /* longest time between the entries into two successive collectives */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, ZERNEL_COMMUNICATORS);
	__type(key, struct communicator_key);
	__type(value, struct communicator);
} communicators SEC(".maps");

/* Communicators whose handle was not stored yet when the call that creates them returned. */
struct expected_list {
	__u64 expected_count; /* all so far */
	struct expected_communicator {
		__u64 stored_at; /* 0: unused */
		__u64 unique_id_hash;
		__u32 rank;
		__u32 ranks;
		__u32 is_grouped; /* it is stored when the group ends */
		__u32 reserved;
	} last_communicators[NCCL_MAX_EXPECTED_COMMUNICATORS];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, ZERNEL_PROCESSES);
	__type(key, __u32);
	__type(value, struct expected_list);
} expected_communicators SEC(".maps");

/* The last collectives that a process enqueued, until a wait shows that they are done. */
struct process_collectives {
	__u64 entered_count; /* all so far */
	__u64 unfinished_places; /* bits of the places in `last_collectives` whose end was not seen */
	struct {
		__u64 since_ns;
		__u64 operation;
	} last_collectives[NCCL_MAX_PENDING_COLLECTIVES];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, ZERNEL_PROCESSES);
	__type(key, __u32);
	__type(value, struct process_collectives);
} pending_collectives SEC(".maps");

/* The pending collectives that a wait for a stream or an event covers. */
struct covered_collectives {
	__u64 entered_count; /* `entered_count` of struct process_collectives when this was stored */
	__u64 collective_bits; /* bits of their places in struct process_collectives */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 14);
	__type(key, struct communicator_key);
	__type(value, struct covered_collectives);
} covered_by_object SEC(".maps");

/* The size of an element of an ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, half,
 * float, double, bfloat16, float8e4m3, float8e5m2. */
static __always_inline __u64 element_bytes(__u32 type)
{
	switch (type) {
	case 2:
	case 3:
	case 7:
		return 4;
	case 4:
	case 5:
	case 8:
		return 8;
	case 6:
	case 9:
		return 2;
	default:
		return 1;
	}
}

static __always_inline __u64 mix_into_hash(__u64 hash, __u64 word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
	return hash ^ hash >> 32;
}

static __always_inline __u64 hash_unique_id(__u64 address)
{
	__u64 words[NCCL_UNIQUE_ID_WORDS] = {};
	__u64 hash = 1;

	bpf_probe_read_user(words, sizeof(words), (void *)address);
	for (int i = 0; i < NCCL_UNIQUE_ID_WORDS; i++)
		hash = mix_into_hash(hash, words[i]);
	return hash;
}

static __always_inline struct communicator *find_communicator(__u32 process, __u64 address)
{
	struct communicator_key key = { .communicator = address, .process = process };

	return bpf_map_lookup_elem(&communicators, &key);
}

static __always_inline __u64 read_handle(__u64 stored_at)
{
	__u64 handle = 0;

	bpf_probe_read_user(&handle, sizeof(handle), (void *)stored_at);
	return handle;
}

/* Adds a communicator, or replaces one whose end was not seen. */
static __always_inline void set_communicator(const struct communicator_key *key,
					     const struct communicator *made)
{
	if (!bpf_map_update_elem(&communicators, key, made, BPF_EXIST) ||
	    !zernel_process_may_add_entry(key->process, ZERNEL_COMMUNICATOR_TABLE))
		return;
	if (bpf_map_update_elem(&communicators, key, made, BPF_NOEXIST))
		ZERNEL_COUNT_LOST(communicators);
	else
		zernel_count_process_entries(key->process, ZERNEL_COMMUNICATOR_TABLE, 1);
}

static __always_inline void delete_communicator(const struct communicator_key *key)
{
	if (!bpf_map_delete_elem(&communicators, key))
		zernel_count_process_entries(key->process, ZERNEL_COMMUNICATOR_TABLE, -1);
}

__noinline int add_communicator(__u32 process, __u64 communicator, __u64 hash, __u32 rank,
				__u32 ranks)
{
	struct communicator_key key = { .communicator = communicator, .process = process };
	struct communicator made = { .unique_id_hash = hash, .rank = rank, .ranks = ranks };

	if (communicator)
		set_communicator(&key, &made);
	return 0;
}

/* Remembers a communicator whose handle is not stored yet, in place of the oldest one. */
static __always_inline void expect_communicator(__u32 process,
						const struct expected_communicator *one)
{
	struct expected_list *expected = bpf_map_lookup_elem(&expected_communicators, &process);

	if (!expected) {
		static const struct expected_list none;

		bpf_map_update_elem(&expected_communicators, &process, &none, BPF_NOEXIST);
		expected = bpf_map_lookup_elem(&expected_communicators, &process);
		if (!expected)
			return;
	}
	expected->last_communicators[__sync_fetch_and_add(&expected->expected_count, 1) % NCCL_MAX_EXPECTED_COMMUNICATORS] = *one;
}

/*
 * Adds expected communicators that are stored by now: the one that is used, or with `used` 0 those
 * of a group that has ended. A caller that does not block may reuse the memory once it has read the
 * handle, so a value there alone proves nothing.
 */
__noinline int add_stored_communicators(__u32 process, __u64 used)
{
	struct expected_list *expected = bpf_map_lookup_elem(&expected_communicators, &process);

	if (!expected)
		return 0;
	for (int i = 0; i < NCCL_MAX_EXPECTED_COMMUNICATORS; i++) {
		struct expected_communicator *one = &expected->last_communicators[i];
		__u64 handle = one->stored_at ? read_handle(one->stored_at) : 0;

		if (!handle || (used ? handle != used : !one->is_grouped))
			continue;
		add_communicator(process, handle, one->unique_id_hash, one->rank, one->ranks);
		one->stored_at = 0;
	}
	return 0;
}

/* Adds a communicator now, or once it is stored: one that is split off in a group or without
 * blocking is stored later. */
static __always_inline void add_or_expect_communicator(__u32 process, __u64 stored_at, __u64 hash,
						       __u32 rank, __u32 ranks, int result)
{
	struct expected_communicator one = { .stored_at = stored_at,
					     .unique_id_hash = hash,
					     .rank = rank,
					     .ranks = ranks,
					     .is_grouped = result != NCCL_IN_PROGRESS };
	__u64 handle = read_handle(stored_at);

	if (handle)
		add_communicator(process, handle, hash, rank, ranks);
	else
		expect_communicator(process, &one);
}

/* Where a call stores the handle of the communicator it creates; 0 if it creates none. */
static __always_inline __u64 new_communicator_address(const struct zernel_symbol *symbol,
						      const struct zernel_open_call *call)
{
	switch (symbol->role) {
	case NCCL_INIT_RANK:
	case NCCL_INIT_SCALABLE:
		return call->arguments[0];
	case NCCL_SPLIT:
		return call->arguments[3];
	default:
		return 0;
	}
}

/* A rank waits for the others to join. Until the call that creates the communicator returns, this entry shows that the
 * rank waits. */
static __always_inline void add_joining_communicator(__u32 process, __u64 stored_at, __u64 hash, __u32 rank,
				       __u32 ranks)
{
	struct communicator_key key = { .communicator = stored_at,
					.process = process,
					.is_being_made = 1 };
	struct communicator made = { .unique_id_hash = hash, .rank = rank, .ranks = ranks };

	made.entered_ns = bpf_ktime_get_ns();
	set_communicator(&key, &made);
}

/* Deletes the entry that add_joining_communicator() added: the call that creates the communicator has returned, with or without
 * success. */
static __always_inline void delete_joining_communicator(const struct zernel_symbol *symbol, __u32 process,
				     const struct zernel_open_call *call)
{
	struct communicator_key key = { .communicator = new_communicator_address(symbol, call),
					.process = process,
					.is_being_made = 1 };

	if (key.communicator)
		delete_communicator(&key);
}

/* The collectives that a wait covers, as far as their places have not been reused. */
static __always_inline __u64 collectives_still_covered(const struct covered_collectives *covered,
							       __u64 entered)
{
	__u64 newer = entered - covered->entered_count, from = covered->entered_count % NCCL_MAX_PENDING_COLLECTIVES;
	__u64 taken;

	if (newer >= NCCL_MAX_PENDING_COLLECTIVES)
		return 0;
	taken = (1ULL << newer) - 1;
	if (from)
		taken = taken << from | taken >> (NCCL_MAX_PENDING_COLLECTIVES - from);
	return covered->collective_bits & ~taken;
}

/* The pending collectives that a wait for the object covers. */
__noinline __u64 collectives_covered_by(__u32 process, __u64 object)
{
	struct process_collectives *pending = bpf_map_lookup_elem(&pending_collectives, &process);
	struct communicator_key key = { .communicator = object, .process = process };
	struct covered_collectives *covered = pending ? bpf_map_lookup_elem(&covered_by_object, &key) : NULL;

	return covered ? collectives_still_covered(covered, pending->entered_count) : 0;
}

/* Sets the collectives that a wait for the object covers. */
__noinline int set_covered_collectives(__u32 process, __u64 object, __u64 collective_bits)
{
	struct process_collectives *pending = bpf_map_lookup_elem(&pending_collectives, &process);
	struct communicator_key key = { .communicator = object, .process = process };
	struct covered_collectives covered = { .collective_bits = collective_bits };

	if (!pending)
		return 0;
	covered.entered_count = pending->entered_count;
	bpf_map_update_elem(&covered_by_object, &key, &covered, BPF_ANY);
	return 0;
}

/* Adds a pending collective on a stream. */
__noinline int add_pending_collective(__u32 process, __u64 stream, __u32 operation, __u64 since_ns)
{
	struct process_collectives *pending = bpf_map_lookup_elem(&pending_collectives, &process);
	struct zernel_settings *set = zernel_settings();
	__u64 place, bit;

	if (!pending) {
		static const struct process_collectives none;

		bpf_map_update_elem(&pending_collectives, &process, &none, BPF_NOEXIST);
		pending = bpf_map_lookup_elem(&pending_collectives, &process);
		if (!pending)
			return 0;
	}
	place = __sync_fetch_and_add(&pending->entered_count, 1) % NCCL_MAX_PENDING_COLLECTIVES;
	pending->last_collectives[place].since_ns = since_ns;
	pending->last_collectives[place].operation = operation;
	bit = 1ULL << place;
	if (__sync_fetch_and_or(&pending->unfinished_places, bit) & bit && set && !set->are_events_sampled)
		ZERNEL_COUNT_LOST(collectives);
	set_covered_collectives(process, stream, collectives_covered_by(process, stream) | bit);
	return 0;
}

/* A wait that covers these collectives has returned. Collectives from before events_probed_since_ns are not
 * timed: an earlier wait, not seen, may have covered them. */
__noinline int end_pending_collectives(__u32 process, __u64 collective_bits, __u64 now_ns)
{
	struct process_collectives *pending = bpf_map_lookup_elem(&pending_collectives, &process);
	struct zernel_settings *set = zernel_settings();

	if (!pending || !set)
		return 0;
	collective_bits &= __sync_fetch_and_and(&pending->unfinished_places, ~collective_bits);
	for (int i = 0; i < NCCL_MAX_PENDING_COLLECTIVES && collective_bits; i++, collective_bits >>= 1) {
		if (collective_bits & 1 && pending->last_collectives[i].since_ns >= set->events_probed_since_ns)
			zernel_observe_duration(process,
						ZERNEL_COLLECTIVE_UNTIL_SYNC +
							(__u32)pending->last_collectives[i].operation,
						now_ns - pending->last_collectives[i].since_ns);
	}
	return 0;
}

static __always_inline __u32 operation_of_symbol(const struct zernel_symbol *symbol)
{
	__u32 operation = symbol->duration_kind - ZERNEL_COLLECTIVE_ENQUEUE;

	return operation < NCCL_OPS ? operation : NCCL_OP_OTHER;
}

static __always_inline void note_entered_collective(struct communicator *communicator,
						    __u32 operation, __u64 bytes)
{
	__u64 now_ns = bpf_ktime_get_ns();
	__u64 gap_ns = communicator->entered_ns ? now_ns - communicator->entered_ns : 0;

	if (gap_ns > communicator->longest_gap_ns)
		communicator->longest_gap_ns = gap_ns;
	communicator->sequence++;
	communicator->bytes = bytes;
	communicator->operation = operation;
	communicator->operations = communicator->operations << 4 | operation;
	communicator->left_ns = 0;
	communicator->entered_ns = now_ns;
}

#define nccl_enter nccl_enter
static __always_inline void nccl_enter(const struct zernel_symbol *symbol,
				       struct zernel_thread *thread, struct zernel_open_call *call)
{
	struct communicator *communicator;

	switch (symbol->role) {
	case NCCL_COLLECTIVE:
	case NCCL_POINT_TO_POINT:
		call->arguments[0] *= element_bytes(call->arguments[1]);
		if (symbol->role == NCCL_POINT_TO_POINT)
			break;
		communicator = find_communicator(thread->process_handle, call->arguments[2]);
		if (!communicator) {
			add_stored_communicators(thread->process_handle, call->arguments[2]);
			communicator = find_communicator(thread->process_handle, call->arguments[2]);
		}
		if (!communicator)
			break;
		note_entered_collective(communicator, operation_of_symbol(symbol), call->arguments[0]);
		break;
	case NCCL_INIT_RANK:
		/* The unique id, 128 bytes passed by value, lies above the return address. */
		call->probe_values[0] = hash_unique_id(call->stack_pointer + 8);
		add_joining_communicator(thread->process_handle, call->arguments[0], call->probe_values[0],
			   call->arguments[2], call->arguments[1]);
		break;
	case NCCL_INIT_SCALABLE:
		call->probe_values[0] = hash_unique_id(call->arguments[3]);
		add_joining_communicator(thread->process_handle, call->arguments[0], call->probe_values[0],
			   call->arguments[2], call->arguments[1]);
		break;
	case NCCL_SPLIT:
		communicator = find_communicator(thread->process_handle, call->arguments[0]);
		if (!communicator)
			break;
		/* All ranks of a communicator split it in the same order, and all wait in the split, whatever their
		 * color. */
		communicator->split_count++;
		call->probe_values[0] = mix_into_hash(communicator->unique_id_hash, communicator->split_count);
		add_joining_communicator(thread->process_handle, call->arguments[3], call->probe_values[0],
			   communicator->rank, communicator->ranks);
		break;
	case NCCL_DESTROY:
		/* The communicator is deleted at the entry of the call: once the call returns, another communicator may
		 * have the same address. */
		delete_communicator(&(struct communicator_key){ .communicator = call->arguments[0],
								.process = thread->process_handle });
		break;
	}
}

static __always_inline void add_all_communicators(struct zernel_thread *thread,
						  struct zernel_open_call *call, __u64 now_ns)
{
	__u32 ranks = call->arguments[1];

	for (__u32 rank = 0; rank < NCCL_MAX_INIT_ALL_RANKS && rank < ranks; rank++)
		add_communicator(thread->process_handle, read_handle(call->arguments[0] + 8 * rank),
				 now_ns, rank, ranks);
}

#define nccl_failed nccl_failed
static __always_inline bool nccl_failed(int result)
{
	return result && result != NCCL_IN_PROGRESS;
}

#define nccl_leave nccl_leave
static __always_inline void nccl_leave(const struct zernel_symbol *symbol,
				       struct zernel_thread *thread, struct zernel_open_call *call,
				       __u64 now_ns, int result, bool failed)
{
	struct communicator *communicator;
	__u32 color;

	delete_joining_communicator(symbol, thread->process_handle, call);
	if (failed)
		return;
	switch (symbol->role) {
	case NCCL_COLLECTIVE:
		communicator = find_communicator(thread->process_handle, call->arguments[2]);
		if (communicator)
			communicator->left_ns = now_ns;
		/* fallthrough */
	case NCCL_POINT_TO_POINT:
		add_pending_collective(thread->process_handle, call->arguments[3], operation_of_symbol(symbol),
				 call->since_ns);
		break;
	case NCCL_INIT_RANK:
	case NCCL_INIT_SCALABLE:
		add_or_expect_communicator(thread->process_handle, call->arguments[0], call->probe_values[0],
					   call->arguments[2], call->arguments[1], result);
		break;
	case NCCL_INIT_ALL:
		add_all_communicators(thread, call, now_ns);
		break;
	case NCCL_SPLIT:
		color = call->arguments[1];
		if (call->probe_values[0] && color != NCCL_NO_COLOR)
			add_or_expect_communicator(thread->process_handle, call->arguments[3],
						   mix_into_hash(call->probe_values[0], color),
						   NCCL_NO_RANK, 0, result);
		break;
	case NCCL_GROUP:
		add_stored_communicators(thread->process_handle, 0);
		break;
	case NCCL_RANK:
		communicator = find_communicator(thread->process_handle, call->arguments[0]);
		if (communicator)
			bpf_probe_read_user(&communicator->rank, sizeof(communicator->rank),
					    (void *)call->arguments[1]);
		break;
	case NCCL_RANKS:
		communicator = find_communicator(thread->process_handle, call->arguments[0]);
		if (communicator)
			bpf_probe_read_user(&communicator->ranks, sizeof(communicator->ranks),
					    (void *)call->arguments[1]);
		break;
	}
}

#endif
